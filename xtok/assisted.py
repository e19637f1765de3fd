"""`XTokAssisted`: the front door."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from os import PathLike
from threading import Lock
from typing import Any, overload

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from xtok.continuation import Continuation
from xtok.drafts import Drafter
from xtok.drafts.cross_tokenizer import CrossTokenizerDrafter, DraftModel
from xtok.encoding import encoder
from xtok.errors import InvalidInputError, UnsupportedArgumentError, UnsupportedModelError
from xtok.lm import CachedModel, check_rolls_back, context_window
from xtok.loop import Run, decode, drain
from xtok.text import TextPieces
from xtok.tokenbytes import token_bytes
from xtok.trace import Meter, Round, Stats

Source = str | PathLike[str] | tuple[PreTrainedModel, Any]
"""A hub id, a local path, or a (model, tokenizer) pair."""
Message = Mapping[str, str]
Chat = Sequence[Message]


@dataclass(frozen=True)
class Generation:
    """What a prompt was answered with.

    `finish_reason` is "length" where a limit of length or time ended the text, else "stop". `rounds` tells what happened.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    rounds: tuple[Round, ...]


class XTokAssisted:
    """A target model that generates with the help of any draft, and gives exactly what it alone would give.

    Law: greedy ids equal those of `target.generate(...)` with the same arguments. A draft decides only how fast they come.
    One instance may serve several threads. The models and tokenizers handed in are never changed.
    """

    def __init__(self, target: Source, draft: Source | Drafter | None = None, *, guess_length: int = 5) -> None:
        """`draft` may also be anything with `propose(context, budget)`. `guess_length` counts the draft's own tokens per round.

        Raises `UnsupportedModelError`, `UnsupportedTokenizerError` or `InvalidInputError` (all of `xtok.errors`).
        """
        if guess_length < 1:
            raise InvalidInputError(f"guess_length is {guess_length}; it must be at least 1. Use draft=None to guess nothing.")
        self.model, self.tokenizer = _load(target, "target")
        check_rolls_back(self.model, "target")
        self._view = token_bytes(self.tokenizer)
        self._guess_length = guess_length
        self._reading = Lock()
        self._drafter = draft if isinstance(draft, Drafter) else None
        self._draft, self._draft_tokenizer = None, None
        if draft is not None and not isinstance(draft, Drafter):
            self._draft, self._draft_tokenizer = _draft_model(draft)
            self._continuation = Continuation(encoder(self.tokenizer, self._view))

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
        Raises `InvalidInputError` for a prompt and `UnsupportedArgumentError` for an argument that can't be honoured.
        """
        many = not isinstance(prompt, str) and not _is_chat(prompt)
        prompts = list(prompt) if many else [prompt]
        streamer = arguments.pop("streamer", None)
        if streamer is not None and len(prompts) > 1:
            raise UnsupportedArgumentError("A streamer takes one text. Call generate once per prompt.")
        runs = [self._run(one, dict(arguments)) for one in prompts]
        _stream_prompt(streamer, runs)
        drain(runs, _feed(streamer))
        results = [self._result(run) for run in runs]
        return results if many else results[0]

    def stream(self, prompt: str | Chat, **arguments: Any) -> Iterator[str]:
        """Yield the new text in pieces as they are committed, never half a character. Joined, they are `generate(...).text`."""
        run = self._run(prompt, arguments)
        pieces = TextPieces(self._view, run.data)
        for block in decode(run):
            if piece := pieces.add(block):
                yield piece
        if rest := pieces.rest():
            yield rest

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        stop_strings: str | list[str] | None = None,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | Tensor:
        """The Hugging Face way in: `model.generate(**inputs, custom_generate=xt)`.

        `stop_strings` is named here so that transformers hands it over: it drops `tokenizer`, without which it would refuse
        them.
        """
        if model is not self.model:
            raise InvalidInputError("custom_generate was called by another model than the target. Call target.generate.")
        streamer = _callers_streamer()
        criteria = self._with_stop_strings(stopping_criteria, stop_strings)
        runs = self._prepared(input_ids, logits_processor, criteria, generation_config, model_kwargs)
        drain(runs, _feed(streamer))
        return _as_transformers(runs, generation_config)

    def _run(self, prompt: str | Chat, arguments: dict[str, Any]) -> Run:
        """Let transformers prepare a generation, and take what it hands to a decoding method."""
        ids = self._read(prompt, split_special_tokens=bool(arguments.pop("split_special_tokens", False)))
        _check_arguments(arguments)
        stop_strings = arguments.pop("stop_strings", None)
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

        if isinstance(config := arguments.get("generation_config"), GenerationConfig) and config.stop_strings is not None:
            stop_strings = stop_strings or config.stop_strings
            arguments["generation_config"] = config = copy(config)
            config.stop_strings = None
        self.model.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=capture, **arguments)
        if len(captured) != 1:
            raise UnsupportedArgumentError(
                f"num_return_sequences={len(captured)} gives several texts for one prompt. Pass the prompt several times."
            )
        return captured[0]

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
        _check_config(config, inputs, rows=len(input_ids))
        cache = inputs.pop("past_key_values")
        inputs.pop("use_cache", None)
        records = bool(config.return_dict_in_generate)
        runs = []
        for row in range(len(input_ids)):
            meter = Meter()
            runs.append(
                Run(
                    target=CachedModel(self.model, cache if len(input_ids) == 1 else deepcopy(cache), _row(inputs, row)),
                    view=self._view,
                    ids=input_ids[row : row + 1],
                    processors=_processors_of_row(processors, row),
                    criteria=criteria,
                    config=config,
                    drafter=self._new_drafter(config, meter, draft_prompt),
                    guess_length=self._guess_length,
                    deepest=context_window(self.model),
                    meter=meter,
                    scores=() if records and config.output_scores else None,
                    logits=() if records and config.output_logits else None,
                )
            )
        return runs

    def _new_drafter(self, config: GenerationConfig, meter: Meter, prompt: list[int] | None) -> Drafter | None:
        if self._draft is None:
            return self._drafter
        ends = config._eos_token_tensor
        end = None if ends is None else int(ends.reshape(-1)[0])
        return CrossTokenizerDrafter(self._draft, self._continuation, end, meter, prompt)

    def _read(self, prompt: Any, *, split_special_tokens: bool) -> Tensor:
        """The target's ids for a prompt: its tokenizer's leading special tokens, never a trailing end of text."""
        if _is_chat(prompt):
            ids = _chat_ids(self.tokenizer, prompt)
            if ids is None:
                raise InvalidInputError("The target's tokenizer has no chat template. Pass the prompt as a text.")
        elif isinstance(prompt, str):
            with self._reading:
                ids = _text_ids(self.tokenizer, prompt, split_special_tokens)
        else:
            raise InvalidInputError(f"A prompt is a text or a list of messages, not {type(prompt).__name__}.")
        if not ids and (start := self.tokenizer.bos_token_id or self.tokenizer.eos_token_id) is not None:
            ids = [start]
        if not ids:
            raise InvalidInputError("The prompt has no ids, and the target's tokenizer has no token to begin with.")
        return torch.tensor([ids], device=self.model.device)

    def _draft_prompt(self, prompt: Any) -> list[int] | None:
        """A chat in the draft's own template; None where it reads the target's text instead."""
        return _chat_ids(self._draft_tokenizer, prompt) if self._draft is not None and _is_chat(prompt) else None

    def _with_stop_strings(self, criteria: StoppingCriteriaList, strings: str | list[str] | None) -> StoppingCriteriaList:
        if not strings:
            return criteria
        return StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer=self.tokenizer, stop_strings=strings)])

    def _result(self, run: Run) -> Generation:
        return Generation(
            text=run.new_data.decode(errors="replace"),
            token_ids=run.new_ids,
            finish_reason=run.finish_reason or "stop",
            stats=run.meter.stats(run.target.forwards),
            rounds=tuple(run.meter.rounds),
        )


def _load(source: Any, role: str) -> tuple[PreTrainedModel, Any]:
    if isinstance(source, (str, PathLike)):
        model = AutoModelForCausalLM.from_pretrained(source)
        return model, AutoTokenizer.from_pretrained(source)
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], PreTrainedModel):
        return source
    raise InvalidInputError(
        f"The {role} is {type(source).__name__}. Pass a hub id, a local path, or a (model, tokenizer) pair."
    )


def _draft_model(source: Any) -> tuple[DraftModel, Any]:
    model, tokenizer = _load(source, "draft")
    check_rolls_back(model, "draft")
    ends = model.generation_config.eos_token_id
    ends = [tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])]
    view = token_bytes(tokenizer)
    lead = tuple(_leading(tokenizer))
    return DraftModel(model, encoder(tokenizer, view), lead, frozenset(end for end in ends if end is not None)), tokenizer


def _leading(tokenizer: Any) -> list[int]:
    """The special ids that a tokenizer puts in front of a text."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    mask = [*encoded["special_tokens_mask"], 0]
    return list(encoded["input_ids"][: mask.index(0)])


def _text_ids(tokenizer: Any, text: str, split_special_tokens: bool) -> list[int]:
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=split_special_tokens)["input_ids"]
    return [*_leading(tokenizer), *ids]


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and all(isinstance(message, Mapping) for message in prompt)


def _chat_ids(tokenizer: Any, chat: Chat) -> list[int] | None:
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    ids = tokenizer.apply_chat_template(list(chat), add_generation_prompt=True, return_dict=True)["input_ids"]
    return list(ids)


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """What can be refused before transformers has prepared anything."""
    refused = {
        "assistant_model": "The draft is the one that XTokAssisted was made with.",
        "custom_generate": "XTokAssisted is the decoding method.",
        "inputs_embeds": "The draft needs a text. Pass a prompt.",
        "input_ids": "Pass the prompt as a text, or use target.generate(input_ids, custom_generate=xt).",
    }
    for name, remedy in refused.items():
        if arguments.get(name) is not None:
            raise UnsupportedArgumentError(f"{name} can't be used here. {remedy}")


def _check_config(config: GenerationConfig, inputs: Mapping[str, Any], rows: int) -> None:
    """Refuse what can't give exactly what the target alone gives. Raises `UnsupportedArgumentError`."""
    mode = config.get_generation_mode()
    faults = {
        f"generation mode {mode.value!r} (num_beams={config.num_beams}) is not supported. Use greedy search or sampling": (
            mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        ),
        "inputs_embeds are not supported: the draft needs a text. Pass input_ids": inputs.get("inputs_embeds") is not None,
        "use_cache=False is not supported: guesses are checked against a cache. Leave it out": not config.use_cache,
        f"cache_implementation={config.cache_implementation!r} can't be rolled back. Leave it out": (
            config.cache_implementation not in (None, "dynamic")
        ),
        "output_attentions and output_hidden_states are not supported. Leave them out": (
            bool(config.output_attentions or config.output_hidden_states)
        ),
        "output_scores and output_logits are for one text at a time. Call generate once per row": (
            rows > 1 and bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))
        ),
        "guidance_scale with several rows is not supported. Call generate once per row": (
            rows > 1 and config.guidance_scale not in (None, 1)
        ),
    }
    for fault, applies in faults.items():
        if applies:
            raise UnsupportedArgumentError(f"{fault}.")
    cache = inputs.get("past_key_values")
    if cache is None or not cache.is_croppable:
        raise UnsupportedModelError(f"A cache of type {type(cache).__name__} can't be rolled back. Use a DynamicCache.")


def _row(inputs: Mapping[str, Any], row: int) -> dict[str, Any]:
    """One row of the model's inputs, so that each row is its own generation."""
    return {name: value[row : row + 1] if isinstance(value, Tensor) else value for name, value in inputs.items()}


def _processors_of_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """`prefix_allowed_tokens_fn` is asked by row number, and a row that runs for itself would always be number 0."""
    if row == 0:
        return processors

    def of_row(processor: Any) -> Any:
        if not isinstance(processor, PrefixConstrainedLogitsProcessor):
            return processor
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), processor._num_beams)

    return LogitsProcessorList(of_row(processor) for processor in processors)


def _callers_streamer() -> Any:
    """Transformers gives a callable no streamer, though it has fed the prompt to it; so it is taken from the caller's frame."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "generate":
        frame = frame.f_back
    return frame.f_locals.get("streamer") if frame is not None else None


def _stream_prompt(streamer: Any, runs: list[Run]) -> None:
    if streamer is not None:
        streamer.put(runs[0].ids.cpu())


def _feed(streamer: Any) -> Callable[[int, list[int]], None]:
    """Hand each committed id to a streamer, one at a time as transformers does, and tell it of the end."""

    def feed(row: int, block: list[int]) -> None:
        for token in block if streamer is not None else ():
            streamer.put(torch.tensor([token]))

    return feed


def _as_transformers(runs: list[Run], config: GenerationConfig) -> GenerateDecoderOnlyOutput | Tensor:
    """Rows of equal length: those that ended early are filled up with padding, as transformers does."""
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    rows = [run.ids[0] for run in runs]
    sequences = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
    if not config.return_dict_in_generate:
        return sequences
    alone = runs[0] if len(runs) == 1 else None
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=alone.scores if alone else None,
        logits=alone.logits if alone else None,
        past_key_values=alone.target.cache if alone else None,
    )
