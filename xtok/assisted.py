"""`XTokAssisted`: the front door."""

import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from numbers import Real
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
from xtok.budget import Account, Budget, Ledger
from xtok.drafts.heads import HeadsDrafter
from xtok.drafts.lookup import PromptLookup
from xtok.drafts.merged import Drafts
from xtok.drafts.reader import DraftModel
from xtok.errors import InvalidInputError, LossyWarning, UnsupportedArgumentError
from xtok.lm import context_window, device_of, ids_read
from xtok.loop import Run, step
from xtok.makers import KINDS, Draft, Maker, Task, as_list, check_drafts, of_heads, of_lookup, of_model
from xtok.processors import warpers
from xtok.prompts import Chat, is_chat, prompt_ids, reading
from xtok.recurrent import cached_model
from xtok.sources import Source, draft_model, target_model
from xtok.text import TextPieces
from xtok.trace import Meter, Round, Stats
from xtok.trial import check_cache, fits_trees, takes_trees

Acceptance = Literal["match", "rejection", "typical"]


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
        draft: Draft | list[Any] | None = None,
        *,
        budget: Budget | None = None,
        acceptance: Acceptance = "match",
        posterior_threshold: float = 0.09,
        posterior_alpha: float = 0.3,
        adapt: bool = False,
    ) -> None:
        """`draft`: a model, which guesses together with what the text repeats; `PromptLookup(...)`; anything with
        `propose(context, budget)`; or a list of such, whose guesses are merged. A list is taken as it is. Drafts with the
        target's own token ids skip the text.

        `budget`: how much is guessed in each round. Without one, as much as pays, by what forwards cost and guesses gain
        lately; `Budget(depth=5, width=1)` guesses chains of five of the draft's tokens, say.

        `acceptance`, of sampled texts. "match": a guess is accepted where it is what the target draws; draft and target look at
        the same noise. "rejection": speculative sampling (Leviathan et al. 2023, Chen et al. 2023) by the draft's law,
        projected onto the target's ids by bytes, in chains of the budget's depth; what comes out are draws from the target's
        own law, too, but they depend on the draft and that depth.

        "typical", **lossy**: any guess is accepted that isn't too unlikely, above min(`posterior_threshold`,
        `posterior_alpha` * exp(-entropy)) (Medusa, Cai et al. 2024). Sampled texts are then no draws from the target's law, and
        `stats.exact` is False.

        `adapt`: a copy of the draft learns from each greedy text when it is done, in 3% of the time that those take, and
        guesses the greedy ones to come. `adapter.save(file)` and `adapter.load(file)` keep what it learnt. No text changes.

        Raises `UnsupportedModelError`, `UnsupportedTokenizerError` or `InvalidInputError` (all of `xtok.errors`).
        """
        _check_settings(budget, acceptance, posterior_threshold=posterior_threshold, posterior_alpha=posterior_alpha)
        self._typical = (posterior_threshold, posterior_alpha) if acceptance == "typical" else None
        if self._typical:
            warnings.warn("acceptance='typical' is lossy: sampled texts are not the target's own.", LossyWarning, stacklevel=2)
        self._target = target_model(target)
        self.model, self.tokenizer = self._target.model, self._target.tokenizer
        self._rejects = acceptance == "rejection"
        self._budget = budget or Budget(depth=8, width=8, schedule="cost")
        self._chains = replace(budget or Budget(), width=1, schedule="constant")
        drafts = as_list(draft, alone=self._rejects or self._budget.width == 1)
        models = {i: draft_model(one) for i, one in enumerate(drafts) if not isinstance(one, KINDS)}
        learners = [one for one, _ in models.values()]
        check_drafts(drafts, learners, self.model, rejects=self._rejects, adapt=adapt)
        self.adapter = Adapter(learners[0], self._target.view) if adapt else None
        self._makers = [self._maker(one, models.get(i)) for i, one in enumerate(drafts)]
        self._ledger = Ledger([Account() for _ in drafts])
        self._shows_hidden = any(isinstance(one, HeadsDrafter) for one in drafts)

    def _maker(self, draft: Any, model: tuple[DraftModel, Any] | None) -> Maker:
        if model is not None:
            return of_model(*model, self._target, rejects=self._rejects, adapter=self.adapter)
        if isinstance(draft, PromptLookup):
            return of_lookup(draft, self._target)
        return of_heads(draft, self._target) if isinstance(draft, HeadsDrafter) else lambda task: draft

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
        bridge.check_streamer(streamer, several=many)
        runs = [run for one in prompts for run in self._runs(one, bridge.own_arguments(arguments, len(prompts)))]
        bridge.check_streamer(streamer, several=len(runs) > 1)
        if streamer is not None:
            streamer.put(runs[0].ids.cpu())
        bridge.sow(runs, seed, lambda: self._target.keys)
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
        bridge.sow(runs, seed, lambda: self._target.keys)
        return self._pieces(runs[0])

    def _pieces(self, run: Run) -> Generator[str, None, Generation]:
        pieces = TextPieces(self._target.view, run.data)
        while run.finish_reason is None:
            if piece := pieces.add(step(run)):
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
        bridge.check_arguments({name: bridge.callers(name) for name in ("assistant_model", "synced_gpus")})
        criteria = self._with_stop_strings(stopping_criteria, stop_strings)
        bridge.check_rows(generation_config, criteria, rows=len(input_ids))
        runs = self._prepared(input_ids, logits_processor, criteria, generation_config, model_kwargs)
        bridge.sow(runs, seed, lambda: self._target.keys)
        bridge.complete(runs, bridge.callers("streamer"))
        for run in runs:
            self._learn(run)
        return bridge.as_transformers(runs, generation_config)

    def _runs(self, prompt: str | Chat, arguments: dict[str, Any]) -> list[Run]:
        """Let transformers prepare the texts for a prompt, and take what it hands to a decoding method."""
        bridge.check_arguments(arguments)
        read = prompt_ids(self.tokenizer, prompt, arguments.pop("split_special_tokens", None))
        ids = torch.tensor([read], device=device_of(self.model))
        stop_strings = self._take_stop_strings(arguments)
        if arguments.get("generation_config") is None:
            arguments.setdefault("use_cache", True)  # some models' own configurations say otherwise
        captured: list[Run] = []

        def capture(
            _: Any,
            input_ids: Any,
            /,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **model_kwargs: Any,
        ) -> Tensor:
            criteria = self._with_stop_strings(stopping_criteria, stop_strings)
            captured.extend(self._prepared(input_ids, logits_processor, criteria, generation_config, model_kwargs, prompt))
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
        prompt: Any = None,
    ) -> list[Run]:
        """One run per row of a batch that transformers prepared."""
        bridge.check_config(config, inputs, rows=len(input_ids))
        bridge.check_ids(input_ids, ids_read(self.model))
        bridge.check_boundary(self.model, input_ids, inputs, config.max_length)
        cache = inputs.pop("past_key_values", None)
        check_cache(self.model, cache)
        branches = self._branches and fits_trees(self.model, cache)
        inputs.pop("use_cache", None)
        records = bool(config.return_dict_in_generate)
        ends = config._eos_token_tensor
        end = None if ends is None or not ends.numel() or int(ends.min()) < 0 else int(ends.reshape(-1)[0])
        runs = []
        for row in range(len(input_ids)):
            meter = Meter(chains_only=not branches, exact=not (self._typical and config.do_sample))
            own_inputs = bridge.row_of_inputs(inputs, row)
            own_cache = cache if len(input_ids) == 1 else bridge.cache_of_row(cache, row)
            runs.append(
                Run(
                    target=cached_model(self.model, own_cache, own_inputs, shows_hidden=self._shows_hidden),
                    view=self._target.view,
                    ids=input_ids[row : row + 1],
                    prompt=bridge.unpadded(input_ids[row], own_inputs),
                    processors=bridge.processors_of_row(processors, row) if len(input_ids) > 1 else processors,
                    criteria=bridge.copied(criteria) if len(input_ids) > 1 else criteria,
                    config=config,
                    drafts=self._drafts(Task(bool(config.do_sample), end, warpers(processors), meter, prompt)),
                    budget=self._chains if self._rejects and config.do_sample else self._budget,
                    branches=branches,
                    deepest=context_window(self.model),
                    meter=meter,
                    rejects=self._rejects,
                    typical=self._typical,
                    scores=() if records and config.output_scores else None,
                    logits=() if records and config.output_logits else None,
                )
            )
        return runs

    def _drafts(self, task: Task) -> Drafts | None:
        """The drafters of one generation, which share what all of this instance learn of costs and gains."""
        if not self._makers:
            return None
        drafts = Drafts(self._ledger, task.meter, self._target.vocabulary)
        for make in self._makers:
            drafts.add(partial(make, task))
        return drafts

    @cached_property
    def _branches(self) -> bool:
        """Whether the target can check a tree, found out where there is something that guesses one."""
        return not self._makers or takes_trees(self.model)

    def _take_stop_strings(self, arguments: dict[str, Any]) -> str | list[str] | None:
        """Stop strings, wherever they were set. Transformers must not see them: it would ask for a tokenizer, and drop it."""
        given = arguments.pop("stop_strings", None)
        configs = (arguments.get("generation_config"), self.model.generation_config)
        configured = next((config.stop_strings for config in configs if config is not None and config.stop_strings), None)
        if configured is not None:
            arguments["stop_strings"] = None
        return configured if given is None else given

    def _with_stop_strings(self, criteria: StoppingCriteriaList, strings: str | list[str] | None) -> StoppingCriteriaList:
        if strings is None:
            return criteria
        try:
            with reading(self.tokenizer):
                stops = StopStringCriteria(tokenizer=self.tokenizer, stop_strings=strings)
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidInputError(f"stop_strings is {strings!r}; give a text or a list of texts ({error}).") from error
        return StoppingCriteriaList([*criteria, stops])

    def _learn(self, run: Run) -> None:
        """Let an adapting draft learn from a text that is done."""
        if self.adapter is not None and run.noise is None:
            start, text = (part.decode(errors="ignore") for part in (run.data[: run.prompt_size], run.new_data))
            self.adapter.learn(start, text, run.meter.seconds["all"])

    def _result(self, run: Run) -> Generation:
        self._learn(run)
        return Generation(
            text=run.new_data.decode(errors="replace"),
            token_ids=run.new_ids,
            finish_reason=run.finish_reason or "stop",
            stats=run.meter.stats(run.target.forwards, None if run.margin is None else float(run.margin)),
            rounds=tuple(run.meter.rounds),
            seed=run.seed,
            scores=run.scores,
            logits=run.logits,
        )


def _check_settings(budget: Any, acceptance: Any, **posterior: Any) -> None:
    if acceptance not in get_args(Acceptance):
        raise InvalidInputError(f"acceptance is {acceptance!r}; use one of {', '.join(map(repr, get_args(Acceptance)))}.")
    for name, value in posterior.items():
        if not (isinstance(value, Real) and 0 < float(value) <= 1):
            raise InvalidInputError(f"{name} is {value!r}; it must be above 0, and 1 at most.")
    if not isinstance(budget, Budget | None):
        raise InvalidInputError(f"budget is {budget!r}; give a Budget, such as Budget(depth=5), or leave it out.")
