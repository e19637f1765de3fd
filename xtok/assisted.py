"""`XTokAssisted`: the front door."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from os import PathLike
from threading import Lock
from typing import Any, overload

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria, MaxTimeCriteria

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

_READING = Lock()
_CACHES = (None, "dynamic")
_CACHE_FAULT = "cache_implementation={!r} can't be rolled back. Leave it out"
_SEVERAL = "num_return_sequences={} gives several texts for one prompt. Pass the prompt several times."


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
        self.model, self.tokenizer = load(target, "target")
        check_rolls_back(self.model, "target")
        self._view = token_bytes(self.tokenizer)
        self._guess_length = guess_length
        self._drafter = draft if isinstance(draft, Drafter) else None
        self._draft, self._draft_tokenizer = None, None
        if draft is not None and not isinstance(draft, Drafter):
            self._draft, self._draft_tokenizer = _draft_model(draft)
            self._encoder = encoder(self.tokenizer, self._view)

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
        many = isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes)) and not _is_chat(prompt)
        prompts = list(prompt) if many else [prompt]
        streamer = arguments.pop("streamer", None)
        if streamer is not None and many:
            raise UnsupportedArgumentError("A streamer takes one text. Call generate once per prompt.")
        runs = [self._run(one, _own_arguments(arguments, len(prompts))) for one in prompts]
        if streamer is not None:
            streamer.put(runs[0].ids.cpu())
        _complete(runs, streamer)
        results = [self._result(run) for run in runs]
        return results if many else results[0]

    def stream(self, prompt: str | Chat, **arguments: Any) -> Iterator[str]:
        """Yield the new text in pieces as they are committed, never half a character. Joined, they are `generate(...).text`."""
        return self._pieces(self._run(prompt, arguments))

    def _pieces(self, run: Run) -> Iterator[str]:
        pieces = TextPieces(self._view, run.data)
        for block in decode(run):
            if piece := pieces.add(block):
                yield piece
        _stop_recording(run)
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
        them, and it does refuse those of a generation config. Each row of a batch is a generation of its own: processors are
        copied per row, and asked with a batch of one.
        """
        if model is not self.model:
            raise InvalidInputError("custom_generate was called by another model than the target. Call target.generate.")
        if _callers("assistant_model") is not None:
            _check_arguments({"assistant_model": True})
        criteria = self._with_stop_strings(stopping_criteria, stop_strings)
        runs = self._prepared(input_ids, logits_processor, criteria, generation_config, model_kwargs)
        _complete(runs, _callers("streamer"))
        return _as_transformers(runs, generation_config)

    def _run(self, prompt: str | Chat, arguments: dict[str, Any]) -> Run:
        """Let transformers prepare a generation, and take what it hands to a decoding method."""
        _check_arguments(arguments)
        ids = self._read(prompt, split_special_tokens=arguments.pop("split_special_tokens", None))
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
        if len(captured) != 1:
            raise UnsupportedArgumentError(_SEVERAL.format(len(captured)))
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
        _check_config(config, inputs, criteria, rows=len(input_ids))
        cache = inputs.pop("past_key_values")
        inputs.pop("use_cache", None)
        records = bool(config.return_dict_in_generate)
        runs = []
        for row in range(len(input_ids)):
            meter = Meter()
            own_cache = cache if len(input_ids) == 1 else _cache_of_row(cache, row)
            runs.append(
                Run(
                    target=CachedModel(self.model, own_cache, _row(inputs, row)),
                    view=self._view,
                    ids=input_ids[row : row + 1],
                    processors=_processors_of_row(processors, row) if len(input_ids) > 1 else processors,
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
        return CrossTokenizerDrafter(self._draft, Continuation(self._encoder), end, meter, prompt)

    def _read(self, prompt: Any, *, split_special_tokens: bool | None) -> Tensor:
        """The target's ids for a prompt: its tokenizer's leading special tokens, never a trailing end of text."""
        if _is_chat(prompt):
            ids = _chat_ids(self.tokenizer, prompt)
            if ids is None:
                raise InvalidInputError("The target's tokenizer has no chat template. Pass the prompt as a text.")
        elif isinstance(prompt, str):
            ids = _text_ids(self.tokenizer, prompt, split_special_tokens)
        else:
            raise InvalidInputError(
                f"A prompt is {type(prompt).__name__}. Pass a text, a list of messages (role, content), or a list of those."
            )
        starts = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        ids = ids or [token for token in starts if token is not None][:1]
        if not ids:
            raise InvalidInputError(
                f"The prompt {prompt!r} has no ids, and the target has no token to begin with. Pass a text."
            )
        return torch.tensor([ids], device=self.model.device)

    def _draft_prompt(self, prompt: Any) -> list[int] | None:
        """A chat in the draft's own template; None where it reads the target's text instead."""
        if self._draft is None or not _is_chat(prompt):
            return None
        try:
            return _chat_ids(self._draft_tokenizer, prompt)
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
        with _reading(self.tokenizer):
            stops = StopStringCriteria(tokenizer=self.tokenizer, stop_strings=strings)
        return StoppingCriteriaList([*criteria, stops])

    def _result(self, run: Run) -> Generation:
        return Generation(
            text=run.new_data.decode(errors="replace"),
            token_ids=run.new_ids,
            finish_reason=run.finish_reason or "stop",
            stats=run.meter.stats(run.target.forwards),
            rounds=tuple(run.meter.rounds),
        )


def load(source: Any, role: str) -> tuple[PreTrainedModel, Any]:
    """The model and the tokenizer of a source. `role` ("target" or "draft") is for the message of an error."""
    if isinstance(source, (str, PathLike)):
        model = AutoModelForCausalLM.from_pretrained(source)
        return model, AutoTokenizer.from_pretrained(source)
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], PreTrainedModel):
        if not source[0].can_generate():
            name = type(source[0]).__name__
            raise UnsupportedModelError(f"{name} has no language model head. Load the {role} with AutoModelForCausalLM.")
        return source
    raise InvalidInputError(
        f"The {role} is {type(source).__name__}. Pass a hub id, a local path, or a (model, tokenizer) pair."
    )


def _draft_model(source: Any) -> tuple[DraftModel, Any]:
    model, tokenizer = load(source, "draft")
    check_rolls_back(model, "draft")
    ends = model.generation_config.eos_token_id
    ends = [tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])]
    view = token_bytes(tokenizer)
    with _reading(tokenizer):
        lead = tuple(_leading(tokenizer))
    return DraftModel(model, encoder(tokenizer, view), lead, frozenset(end for end in ends if end is not None)), tokenizer


@contextmanager
def _reading(tokenizer: Any) -> Iterator[None]:
    """One thread at a time, for reading sets truncation, padding and control tokens of a fast tokenizer. They are put back."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    with _READING:
        if backend is None:
            yield
            return
        splits, truncation, padding = backend.encode_special_tokens, backend.truncation, backend.padding
        try:
            yield
        finally:
            backend.encode_special_tokens = splits
            if truncation is not None:
                backend.enable_truncation(**truncation)
            if padding is not None:
                backend.enable_padding(**padding)


def _leading(tokenizer: Any) -> list[int]:
    """The special ids that a tokenizer puts in front of a text."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    mask = [*encoded["special_tokens_mask"], 0]
    return list(encoded["input_ids"][: mask.index(0)])


def _text_ids(tokenizer: Any, text: str, split_special_tokens: bool | None) -> list[int]:
    """`split_special_tokens` is None where the tokenizer's own setting counts."""
    splits = {} if split_special_tokens is None else {"split_special_tokens": split_special_tokens}
    with _reading(tokenizer):
        return [*_leading(tokenizer), *tokenizer(text, add_special_tokens=False, **splits)["input_ids"]]


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and all(isinstance(message, Mapping) for message in prompt)


def _chat_ids(tokenizer: Any, chat: Chat) -> list[int] | None:
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    with _reading(tokenizer):
        ids = tokenizer.apply_chat_template(list(chat), add_generation_prompt=True, return_dict=True)["input_ids"]
    return list(ids)


def _own_arguments(arguments: Mapping[str, Any], prompts: int) -> dict[str, Any]:
    """The arguments for one of several prompts, which take turns: logits processors may keep a state."""
    own = dict(arguments)
    if prompts > 1 and own.get("logits_processor"):
        own["logits_processor"] = _copied(own["logits_processor"])
    return own


def _copied(processors: LogitsProcessorList) -> LogitsProcessorList:
    try:
        return deepcopy(processors)
    except Exception as error:
        names = ", ".join(type(processor).__name__ for processor in processors)
        raise UnsupportedArgumentError(
            f"Several texts need a copy each of the logits processors {names}, and copying failed ({error}). "
            "Call generate once per text."
        ) from error


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """What can be refused before transformers has prepared anything."""
    refused = {
        "assistant_model": "The draft is the one that XTokAssisted was made with.",
        "custom_generate": "XTokAssisted is the decoding method.",
        "inputs_embeds": "The draft needs a text. Pass a prompt.",
        "inputs": "Pass the prompt as a text, or use target.generate(inputs, custom_generate=xt).",
        "input_ids": "Pass the prompt as a text, or use target.generate(input_ids, custom_generate=xt).",
        "attention_mask": "A prompt has no padding. Use target.generate(input_ids, custom_generate=xt) for padded ones.",
        "streamer": "Iterate over stream(prompt), or use generate(prompt, streamer=streamer).",
    }
    for name, remedy in refused.items():
        if arguments.get(name) is not None:
            raise UnsupportedArgumentError(f"{name} can't be used here. {remedy}")
    if (count := arguments.get("num_return_sequences") or 1) != 1:
        raise UnsupportedArgumentError(_SEVERAL.format(count))
    if arguments.get("cache_implementation") not in _CACHES:
        raise UnsupportedArgumentError(_CACHE_FAULT.format(arguments["cache_implementation"]) + ".")


def _check_config(config: GenerationConfig, inputs: Mapping[str, Any], criteria: StoppingCriteriaList, rows: int) -> None:
    """Refuse what can't give exactly what the target alone gives. Raises `UnsupportedArgumentError`."""
    mode = config.get_generation_mode()
    faults = {
        f"generation mode {mode.value!r} (num_beams={config.num_beams}) is not supported. Use greedy search or sampling": (
            mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        ),
        "inputs_embeds are not supported: the draft needs a text. Pass input_ids": inputs.get("inputs_embeds") is not None,
        "use_cache=False is not supported: guesses are checked against a cache. Leave it out": not config.use_cache,
        _CACHE_FAULT.format(config.cache_implementation): config.cache_implementation not in _CACHES,
        "output_attentions and output_hidden_states are not supported. Leave them out": (
            bool(config.output_attentions or config.output_hidden_states)
        ),
        "output_scores and output_logits are for one text at a time. Call generate once per row": (
            rows > 1 and bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))
        ),
        "guidance_scale with several rows is not supported. Call generate once per row": (
            rows > 1 and config.guidance_scale not in (None, 1)
        ),
        "stopping criteria for several rows without an eos_token_id, where ended rows run on, are not supported. "
        "Call generate once per row": rows > 1 and not _ends_rows(criteria),
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


def _cache_of_row(cache: Cache, row: int) -> Cache:
    own = deepcopy(cache)
    if own.get_seq_length():
        own.batch_select_indices(torch.tensor([row]))
    return own


def _ends_rows(criteria: StoppingCriteriaList) -> bool:
    """Whether rows end as transformers ends them. Without an end of text, it lets those run on that a criterion stopped."""
    ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    return ends or all(isinstance(criterion, (MaxLengthCriteria, MaxTimeCriteria)) for criterion in criteria)


def _processors_of_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """A copy, for processors may keep a state. Those of transformers that know of the batch's rows know of this one alone."""
    own = _copied(processors)
    for processor in own:
        if isinstance(processor, RepetitionPenaltyLogitsProcessor):
            if isinstance(processor.prompt_ignore_length, Tensor):
                processor.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
        elif isinstance(processor, EncoderRepetitionPenaltyLogitsProcessor):
            processor.encoder_input_ids = processor.encoder_input_ids[row : row + 1]
        elif isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
            processor.generated_ngrams, processor.batch_size = processor.generated_ngrams[row : row + 1], 1
        elif isinstance(processor, PrefixConstrainedLogitsProcessor):
            processor._prefix_allowed_tokens_fn = _as_row(processor._prefix_allowed_tokens_fn, row)
    return own


def _as_row(allowed: Callable[[int, Tensor], list[int]], row: int) -> Callable[[int, Tensor], list[int]]:
    """A row that runs for itself would always be asked for as number 0."""
    return lambda _, ids: allowed(row, ids)


def _callers(name: str) -> Any:
    """An argument of the `generate` that called. Transformers hands a callable neither its streamer nor its assistant."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "generate":
        frame = frame.f_back
    return frame.f_locals.get(name) if frame is not None else None


def _complete(runs: list[Run], streamer: Any) -> None:
    """Run to the end, and hand a streamer what transformers hands it: the ids of all rows at a time, then the end."""
    sent = 0

    def feed(row: int, block: list[int]) -> None:
        nonlocal sent
        while (column := _column(runs, sent)) is not None:
            streamer.put(column)
            sent += 1

    if streamer is None:
        drain(runs)
    else:
        drain(runs, feed)
        streamer.end()
    for run in runs:
        _stop_recording(run)


def _column(runs: list[Run], index: int) -> Tensor | None:
    """The new ids of all rows at `index`, with padding for those that ended; None where one is to come, or all have ended."""
    ended = [run.finish_reason is not None and len(run.new_ids) <= index for run in runs]
    if all(ended) or any(len(run.new_ids) <= index and not end for run, end in zip(runs, ended, strict=True)):
        return None
    return torch.tensor([_pad(run.config) if end else run.new_ids[index] for run, end in zip(runs, ended, strict=True)])


def _stop_recording(run: Run) -> None:
    """A cache that may be handed back is left as transformers leaves it."""
    for layer in run.target.cache.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = False


def _pad(config: GenerationConfig) -> int:
    return 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)


def _as_transformers(runs: list[Run], config: GenerationConfig) -> GenerateDecoderOnlyOutput | Tensor:
    """Rows of equal length: those that ended early are filled up with padding, as transformers does."""
    rows = [run.ids[0] for run in runs]
    sequences = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=_pad(config))
    if not config.return_dict_in_generate:
        return sequences
    alone = runs[0] if len(runs) == 1 else None
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=alone.scores if alone else None,
        logits=alone.logits if alone else None,
        past_key_values=alone.target.cache if alone else None,
    )
