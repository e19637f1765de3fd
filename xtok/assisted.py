"""`XTokAssisted`: the front door."""

from collections.abc import Generator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput

from xtok import bridge
from xtok.adapt import Adapter
from xtok.budget import Budget, Pace
from xtok.continuation import Continuation
from xtok.drafts import Drafter
from xtok.drafts.cross_tokenizer import CrossTokenizerDrafter
from xtok.drafts.reader import Reader
from xtok.drafts.sampling import Projection, SamplingDrafter, projection
from xtok.encoding import encoder
from xtok.errors import InvalidInputError, UnsupportedArgumentError
from xtok.lm import CachedModel, check_rolls_back, context_window, takes_trees, vocabulary_size
from xtok.loop import Run, decode
from xtok.noise import spelling_keys
from xtok.prompts import Chat, chat_ids, is_chat, prompt_ids, reading
from xtok.sources import Source, draft_model, load
from xtok.text import TextPieces
from xtok.tokenbytes import token_bytes
from xtok.trace import Meter, Round, Stats

Acceptance = Literal["match", "rejection"]


@dataclass(frozen=True)
class Generation:
    """What a prompt was answered with.

    `finish_reason` is "length" where a limit of length or time ended the text, else "stop". `rounds` tells what happened.
    `seed` gives the texts of a call again, by any draft or none; it is None for greedy ones.
    `scores` and `logits`, one of shape (1, vocabulary) per new id: where `return_dict_in_generate` and `output_scores`
    or `output_logits` ask for them.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    rounds: tuple[Round, ...]
    seed: int | None = None
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None


class XTokAssisted:
    """A target model that generates with the help of any draft, and gives exactly what it alone would give.

    Law: greedy ids equal those of `target.generate(...)` with the same arguments. Sampled ids are draws from the target's own
    law, and equal those of `XTokAssisted(target)`, which has no draft and is the reference sampler, for the same seed.
    A draft decides only how fast they come.
    One instance may serve several threads. The models and tokenizers handed in are never changed.
    """

    def __init__(
        self,
        target: Source,
        draft: Source | Drafter | None = None,
        *,
        budget: Budget | None = None,
        acceptance: Acceptance = "match",
        adapt: bool = False,
    ) -> None:
        """`draft` may also be anything with `propose(context, budget)`.

        `budget`: how much is guessed in each round. Without one, as much as pays, by what forwards cost and guesses gain
        lately; `Budget(depth=5, width=1)` guesses chains of five of the draft's tokens, say.

        `acceptance`, of sampled texts. "match": a guess is accepted where it is what the target draws; draft and target look at
        the same noise. "rejection": speculative sampling (Leviathan et al. 2023, Chen et al. 2023) by the draft's law,
        projected onto the target's ids by bytes, in chains of the budget's depth; what comes out are draws from the target's
        own law, too, but they depend on the draft and that depth.

        `adapt`: a copy of the draft learns from each greedy text when it is done, in 3% of the time that those take, and
        guesses the greedy ones to come. `adapter.save(file)` and `adapter.load(file)` keep what it learnt. No text changes.

        Raises `UnsupportedModelError`, `UnsupportedTokenizerError` or `InvalidInputError` (all of `xtok.errors`).
        """
        if acceptance not in get_args(Acceptance):
            raise InvalidInputError(f"acceptance is {acceptance!r}; use one of {', '.join(map(repr, get_args(Acceptance)))}.")
        if acceptance == "rejection" and isinstance(draft, Drafter):
            raise UnsupportedArgumentError(
                f"acceptance='rejection' needs the law that guesses are drawn from, and that of {type(draft).__name__} isn't "
                "known. Use a draft model, or acceptance='match'."
            )
        self.model, self.tokenizer = load(target, "target")
        check_rolls_back(self.model, "target")
        self._view = token_bytes(self.tokenizer)
        self._budget = budget or Budget(depth=8, width=8, pace=Pace())
        self._chains = replace(budget or Budget(), width=1, pace=None)
        self._pace = self._budget.pace
        self._drafter = draft if isinstance(draft, Drafter) else None
        self._draft, self._draft_tokenizer = None, None
        if draft is not None and not isinstance(draft, Drafter):
            self._draft, self._draft_tokenizer = draft_model(draft)
            self._encoder = encoder(self.tokenizer, self._view)
        self._rejects = acceptance == "rejection"
        if adapt and self._draft is None:
            raise InvalidInputError("adapt=True needs a draft model that can learn. Pass one, or leave adapt out.")
        self.adapter = Adapter(self._draft, self._view) if adapt and self._draft else None

    @overload
    def generate(self, prompt: str, **arguments: Any) -> Generation: ...
    @overload
    def generate(self, prompt: Sequence[str] | Sequence[Chat], **arguments: Any) -> list[Generation]: ...
    @overload
    def generate(self, prompt: Chat, **arguments: Any) -> Generation: ...
    def generate(self, prompt: Any, **arguments: Any) -> Generation | list[Generation]:
        """Answer a text, a chat (a list of messages), or a list of either.

        `arguments` are those of transformers' `generate`, among them `streamer`, `stop_strings`, `logits_processor` and
        `stopping_criteria`. `split_special_tokens=True` reads control tokens written out in a text as plain text.
        `seed`, where `do_sample=True`: the ids depend on target, prompt, settings and seed alone, not on the draft or on what
        else is in the list. The same prompt again, in a list or by `num_return_sequences`, gives further, independent texts.
        Raises `InvalidInputError` for a prompt and `UnsupportedArgumentError` for an argument that can't be honoured.
        """
        many = isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes)) and not is_chat(prompt)
        prompts = list(prompt) if many else [prompt]
        streamer, seed = arguments.pop("streamer", None), arguments.pop("seed", None)
        bridge.check_seed(seed)
        runs = [run for one in prompts for run in self._runs(one, bridge.own_arguments(arguments, len(prompts)))]
        if streamer is not None:
            if many or len(runs) > 1:
                raise UnsupportedArgumentError("A streamer takes one text. Call generate once per prompt, for one text each.")
            streamer.put(runs[0].ids.cpu())
        bridge.sow(runs, seed, lambda: self._keys)
        bridge.complete(runs, streamer)
        results = [self._result(run) for run in runs]
        return results if many or len(runs) > 1 else results[0]

    def stream(self, prompt: str | Chat, **arguments: Any) -> Generator[str, None, Generation]:
        """Yield the new text in pieces as they are committed, never half a character. Joined, they are `generate(...).text`.

        The generator returns (`StopIteration.value`) what `generate` returns.
        """
        seed = arguments.pop("seed", None)
        bridge.check_seed(seed)
        runs = self._runs(prompt, arguments)
        if len(runs) > 1:
            raise UnsupportedArgumentError(f"num_return_sequences={len(runs)} gives several texts. Call generate for them.")
        bridge.sow(runs, seed, lambda: self._keys)
        return self._pieces(runs[0])

    def _pieces(self, run: Run) -> Generator[str, None, Generation]:
        pieces = TextPieces(self._view, run.data)
        for block in decode(run):
            if piece := pieces.add(block):
                yield piece
        bridge.stop_recording(run)
        if rest := pieces.rest():
            yield rest
        return self._result(run)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        stop_strings: str | list[str] | None = None,
        seed: int | None = None,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | Tensor:
        """The Hugging Face way in: `model.generate(**inputs, custom_generate=xt)`.

        `stop_strings` is named here so that transformers hands it over: it drops `tokenizer`, without which it would refuse
        them, and it does refuse those of a generation config. Each row of a batch is a generation of its own: processors are
        copied per row, and asked with a batch of one. `seed` is as in `generate`; transformers hands it over.
        """
        bridge.check_seed(seed)
        if model is not self.model:
            raise InvalidInputError("custom_generate was called by another model than the target. Call target.generate.")
        if bridge.callers("assistant_model") is not None:
            bridge.check_arguments({"assistant_model": True})
        criteria = self._with_stop_strings(stopping_criteria, stop_strings)
        runs = self._prepared(input_ids, logits_processor, criteria, generation_config, model_kwargs)
        bridge.sow(runs, seed, lambda: self._keys)
        bridge.complete(runs, bridge.callers("streamer"))
        for run in runs:
            self._learn(run)
        return bridge.as_transformers(runs, generation_config)

    def _runs(self, prompt: str | Chat, arguments: dict[str, Any]) -> list[Run]:
        """Let transformers prepare the texts for a prompt, and take what it hands to a decoding method."""
        bridge.check_arguments(arguments)
        read = prompt_ids(self.tokenizer, prompt, arguments.pop("split_special_tokens", None))
        ids = torch.tensor([read], device=self.model.device)
        stop_strings = self._take_stop_strings(arguments)
        captured: list[Run] = []

        def capture(
            model: Any,
            input_ids: Any,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **model_kwargs: Any,
        ) -> Tensor:
            criteria = self._with_stop_strings(stopping_criteria, stop_strings)
            own = self._draft_prompt(prompt)
            captured.extend(self._prepared(input_ids, logits_processor, criteria, generation_config, model_kwargs, own))
            return torch.empty(0)

        self.model.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=capture, **arguments)
        return captured

    def _prepared(
        self,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        inputs: dict[str, Any],
        draft_prompt: list[int] | None = None,
    ) -> list[Run]:
        """One run per row of a batch that transformers prepared."""
        bridge.check_config(config, inputs, criteria, rows=len(input_ids))
        bridge.check_boundary(self.model, input_ids.shape[1], config.max_length)
        cache = inputs.pop("past_key_values")
        inputs.pop("use_cache", None)
        records = bool(config.return_dict_in_generate)
        runs = []
        for row in range(len(input_ids)):
            meter = Meter(chains_only=not self._branches)
            own_inputs = bridge.row_of_inputs(inputs, row)
            own_cache = cache if len(input_ids) == 1 else bridge.cache_of_row(cache, row)
            runs.append(
                Run(
                    target=CachedModel(self.model, own_cache, own_inputs),
                    view=self._view,
                    ids=input_ids[row : row + 1],
                    processors=bridge.processors_of_row(processors, row) if len(input_ids) > 1 else processors,
                    criteria=bridge.copied(criteria) if len(input_ids) > 1 else criteria,
                    config=config,
                    drafter=self._new_drafter(config, meter, bridge.warpers(processors), draft_prompt),
                    budget=self._own_budget(config),
                    branches=not meter.chains_only,
                    deepest=context_window(self.model),
                    meter=meter,
                    rejects=self._rejects,
                    prompt_key=bridge.prompt_key(input_ids[row : row + 1], own_inputs),
                    scores=() if records and config.output_scores else None,
                    logits=() if records and config.output_logits else None,
                )
            )
        return runs

    def _new_drafter(
        self, config: GenerationConfig, meter: Meter, warpers: LogitsProcessorList, prompt: list[int] | None
    ) -> Drafter | None:
        if self._draft is None:
            return self._drafter
        ends = config._eos_token_tensor
        end = None if ends is None or int(ends.min()) < 0 else int(ends.reshape(-1)[0])
        draft = self._draft if self.adapter is None or config.do_sample else self.adapter.draft
        reader = Reader(draft, meter, prompt)
        if config.do_sample:
            return SamplingDrafter(
                draft, reader, self._projection, self._view, self._keys, end, meter, warpers, independent=self._rejects
            )
        return CrossTokenizerDrafter(draft, reader, Continuation(self._encoder), end, meter)

    def _own_budget(self, config: GenerationConfig) -> Budget:
        """The budget of one generation, which begins with what the ones before it learnt. A law's guesses are fixed chains."""
        if config.do_sample and self._rejects:
            return self._chains
        return replace(self._budget, pace=deepcopy(self._pace))

    @cached_property
    def _branches(self) -> bool:
        """Whether the target can check a tree, found out where there is something that guesses one."""
        return (self._draft or self._drafter) is None or takes_trees(self.model)

    @cached_property
    def _projection(self) -> Projection:
        """The draft's ids in the target's vocabulary, where they are first asked for."""
        assert self._draft is not None
        return projection(self._view, self._draft.encoder.view)

    @cached_property
    def _keys(self) -> Tensor:
        """The keys of the target's ids for noise, where they are first asked for."""
        return spelling_keys(self._view, vocabulary_size(self.model))

    def _draft_prompt(self, prompt: Any) -> list[int] | None:
        """A chat in the draft's own template; None where it reads the target's text instead."""
        if self._draft is None or not is_chat(prompt):
            return None
        try:
            return chat_ids(self._draft_tokenizer, prompt)
        except Exception:  # templates refuse roles that they don't know, and a draft never spoils a generation
            return None

    def _take_stop_strings(self, arguments: dict[str, Any]) -> str | list[str] | None:
        """Stop strings, wherever they were set. Transformers must not see them: it would ask for a tokenizer, and drop it."""
        given = arguments.pop("stop_strings", None)
        configs = (arguments.get("generation_config"), self.model.generation_config)
        configured = next((config.stop_strings for config in configs if config is not None and config.stop_strings), None)
        if configured is not None:
            arguments["stop_strings"] = None
        return given or configured

    def _with_stop_strings(self, criteria: StoppingCriteriaList, strings: str | list[str] | None) -> StoppingCriteriaList:
        if not strings:
            return criteria
        with reading(self.tokenizer):
            stops = StopStringCriteria(tokenizer=self.tokenizer, stop_strings=strings)
        return StoppingCriteriaList([*criteria, stops])

    def _learn(self, run: Run) -> None:
        """Let the draft learn from a text that is done."""
        if self.adapter is not None and run.noise is None:
            start, text = (part.decode(errors="ignore") for part in (run.data[: run.prompt_size], run.new_data))
            self.adapter.learn(start, text, run.meter.seconds["all"])

    def _result(self, run: Run) -> Generation:
        self._learn(run)
        self._pace = run.budget.pace or self._pace
        return Generation(
            text=run.new_data.decode(errors="replace"),
            token_ids=run.new_ids,
            finish_reason=run.finish_reason or "stop",
            stats=run.meter.stats(run.target.forwards),
            rounds=tuple(run.meter.rounds),
            seed=run.seed,
            scores=run.scores,
            logits=run.logits,
        )
