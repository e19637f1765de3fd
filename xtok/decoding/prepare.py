"""transformers' `generate`: what it prepares for a text, what is refused, and what it is handed back."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria, MaxTimeCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from xtok.align.vocabulary import Vocabulary
from xtok.decoding.arguments import check_kinds, handed_on, with_cache_renamed
from xtok.decoding.rounds import drain, in_rounds
from xtok.decoding.sequence import Sequence
from xtok.decoding.stops import StopStrings
from xtok.drafts.lookup import Prediction
from xtok.errors import InvalidInputError, UnsupportedArgumentError, shown
from xtok.models.cache import CACHE, CachedModel, device_of, ids_read
from xtok.models.probe import check_cache
from xtok.models.prompts import KnownPrompt, is_ids, prompt_ids, template_arguments
from xtok.models.roles import Target
from xtok.models.rope import dynamic_boundary, longrope_boundary
from xtok.sampling.noise import Noise, noise

_COUNTED = {"attention_mask", "position_ids", "logits_to_keep"}
"""What a model may be given beside ids that follows from those, and from where there is padding."""
_NAMED = {"attention_mask", "custom_generate", "inputs", "batch_size", "progress", "streamer"}
"""What transformers is given by xtok, or not at all: None of the caller's is as good as nothing."""
_CACHES = (None, "dynamic")
_CACHE_FAULT = "cache_implementation={!r} can't be rolled back. Leave it out"


@dataclass(frozen=True)
class Prepared:
    """A text as transformers prepared it for a decoding method.

    `ids`: (1, length), with padding; `inputs`: what else the model is given for them. `prompt`: what the caller gave, None
    where that was ids; `template`: the arguments of a chat's template. `keeps_cache`: whether the caller handed in the cache,
    or is to be given it. `shared`: processors and criteria that other texts were given, too. `prediction`: what the caller
    foresees.
    """

    ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    cache: Cache
    inputs: dict[str, Any] = field(default_factory=dict)
    prompt: Any = None
    template: Mapping[str, Any] = field(default_factory=dict)
    keeps_cache: bool = False
    shared: tuple[Any, ...] = ()
    prediction: Prediction | None = None

    def with_own_state(self) -> "Prepared":
        """With copies of what other texts were given, too: processors and criteria may keep a state."""
        if not self.shared:
            return self
        own = dict(zip(map(id, self.shared), _copied(self.shared), strict=True))
        processors = LogitsProcessorList(own.get(id(one), one) for one in self.processors)
        criteria = StoppingCriteriaList(own.get(id(one), one) for one in self.criteria)
        return replace(self, processors=processors, criteria=criteria, shared=())

    @cached_property
    def is_plain(self) -> bool:
        """Whether ids are all that the model reads: beside them there is padding at most, and positions that count them."""
        others = {name for name, value in self.inputs.items() if value is not None} - _COUNTED
        mask, positions = self.inputs.get("attention_mask"), self.inputs.get("position_ids")
        if others or any(one is not None and one.shape != self.ids.shape for one in (mask, positions)):
            return False
        if mask is not None and not bool(
            mask[0, -1] and (mask[0].long().diff() >= 0).all()
        ):  # padding is read, but on the left
            return False
        counted = None if positions is None else (positions if mask is None else positions[mask != 0]).flatten()
        return counted is None or torch.equal(counted, torch.arange(len(counted), dtype=torch.int64, device=counted.device))

    @property
    def samples(self) -> bool:
        """Whether its ids are drawn."""
        return bool(self.config.do_sample)

    @property
    def unpadded(self) -> list[int]:
        """The prompt's ids without padding."""
        mask = self.inputs.get("attention_mask")
        held: list[int] = (self.ids if mask is None or mask.shape != self.ids.shape else self.ids[mask != 0]).flatten().tolist()
        return held

    @property
    def end(self) -> int | None:
        """The id that ends texts, the first of several."""
        ends = self.config._eos_token_tensor
        return None if ends is None or not ends.numel() or int(ends.min()) < 0 else int(ends.reshape(-1)[0])

    def records(self, what: str) -> tuple[Tensor, ...] | None:
        """Where `output_scores` or `output_logits` asks for them, the record of them, still empty."""
        return () if self.config.return_dict_in_generate and getattr(self.config, what) else None


def prepare(target: Target, prompt: Any, arguments: dict[str, Any], *, several: bool = False) -> list[Prepared]:
    """Let transformers prepare the texts for a prompt, and take what it hands to a decoding method.

    `several`: whether the arguments serve other prompts, too.
    """
    check_arguments(arguments)
    arguments = with_cache_renamed(arguments)
    check_kinds(arguments)
    arguments = {name: value for name, value in arguments.items() if value is not None or name not in _NAMED}
    prediction = _taken_prediction(arguments)
    template = template_arguments(arguments)
    splits = arguments.pop("split_special_tokens", None)
    known = isinstance(prompt, KnownPrompt)
    read = prompt.ids if known else prompt_ids(target.vocabulary.tokenizer, prompt, splits, template)
    prompt = prompt.prompt if known else prompt
    asked = None if is_ids(prompt) else prompt
    ids = torch.tensor([read], dtype=torch.int64, device=device_of(target.model))
    stop_strings = _take_stop_strings(target.model, arguments)
    if arguments.get("generation_config") is None:
        arguments.setdefault("use_cache", True)  # some models' own configurations say otherwise
    keeps_cache = CACHE in arguments
    shared = _stateful(arguments) if several else ()
    captured: list[Prepared] = []

    def capture(
        _: Any,
        input_ids: Any,
        /,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Tensor:
        criteria = with_stop_strings(target.vocabulary, stopping_criteria, stop_strings)
        made = rows(
            target.model, input_ids, logits_processor, criteria, generation_config, model_kwargs, keeps_cache=keeps_cache
        )
        captured.extend(replace(one, prompt=asked, template=template, shared=shared, prediction=prediction) for one in made)
        return torch.empty(0, dtype=torch.int64, device="cpu")

    model: Any = target.model
    with handed_on(arguments):
        model.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=capture, **arguments)
    return captured


def rows(
    model: PreTrainedModel,
    ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    inputs: dict[str, Any],
    *,
    keeps_cache: bool,
) -> list[Prepared]:
    """A batch as texts of their own. `inputs` are the model's, (rows, …) where they are tensors."""
    check_positions(inputs.get("position_ids"))
    check_config(config, inputs, rows=len(ids))
    check_ids(ids, ids_read(model))
    check_boundary(model, ids, inputs, config.max_length)
    cache = inputs.pop(CACHE, None)
    check_cache(model, cache)
    inputs.pop("use_cache", None)
    if len(ids) == 1:
        return [Prepared(ids, processors, criteria, config, cache, inputs, keeps_cache=keeps_cache)]
    return [
        Prepared(
            ids[row : row + 1],
            _processors_of_row(processors, row),
            _copied(criteria),
            config,
            _cache_of_row(cache, row),
            {name: value[row : row + 1] if isinstance(value, Tensor) else value for name, value in inputs.items()},
            keeps_cache=keeps_cache,
        )
        for row in range(len(ids))
    ]


def _taken_prediction(arguments: dict[str, Any]) -> Prediction | None:
    """What the caller foresees: a text, or what was made of one for several. Raises `InvalidInputError` for anything else."""
    given = arguments.pop("prediction", None)
    if not isinstance(given, str | Prediction | None):
        raise InvalidInputError(f"prediction is {given!r}; it must be a text: what the answer is likely to be.")
    return Prediction(given) if given and isinstance(given, str) else given or None


def _take_stop_strings(model: PreTrainedModel, arguments: dict[str, Any]) -> str | list[str] | None:
    """Stop strings, wherever they were set. Transformers must not see them: it would ask for a tokenizer, and drop it."""
    given = arguments.pop("stop_strings", None)
    configs = (arguments.get("generation_config"), model.generation_config)
    configured = next((config.stop_strings for config in configs if config is not None and config.stop_strings), None)
    if configured is not None:
        arguments["stop_strings"] = None
    return configured if given is None else given


def with_stop_strings(vocabulary: Vocabulary, criteria: StoppingCriteriaList, strings: Any) -> StoppingCriteriaList:
    """Criteria, with one for stop strings if there are some. Raises `InvalidInputError` unless those are texts."""
    return criteria if strings is None else StoppingCriteriaList([*criteria, StopStrings(vocabulary, strings)])


def check_several(arguments: Mapping[str, Any]) -> None:
    """Raises `UnsupportedArgumentError` for what several prompts can't be given: each needs its own state."""
    check_arguments(arguments)
    if CACHE in with_cache_renamed(arguments):
        raise UnsupportedArgumentError(f"{CACHE} holds one text. Call generate once per prompt.")
    _copied(_stateful(arguments))


def _stateful(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """The processors and criteria of a call."""
    return (*(arguments.get("logits_processor") or ()), *(arguments.get("stopping_criteria") or ()))


def _copied(kept: Any, name: str | None = None) -> Any:
    """A copy of what may keep a state: a list of logits processors or stopping criteria, or something with a name."""
    try:
        return deepcopy(kept)
    except Exception as error:
        names = name or ", ".join(type(one).__name__ for one in kept)
        raise UnsupportedArgumentError(
            f"Several texts need a copy each of {names}, and copying failed ({error}). Call generate once per text."
        ) from error


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """What can be refused before transformers has prepared anything."""
    refused = {
        "assistant_model": "The draft is the one that XTokAssisted was made with.",
        "custom_generate": "XTokAssisted is the decoding method.",
        "inputs_embeds": "The draft needs a text. Pass a prompt.",
        "inputs": "Pass the ids as the prompt, or use target.generate(inputs, custom_generate=xt).",
        "input_ids": "Pass the ids as the prompt, or use target.generate(input_ids, custom_generate=xt).",
        "attention_mask": "A prompt has no padding. Use target.generate(input_ids, custom_generate=xt) for padded ones.",
        "batch_size": "It is for lists of prompts, in generate.",
        "progress": "It is for lists of prompts, in generate.",
        "streamer": "Iterate over stream(prompt), or use generate(prompt, streamer=streamer).",
    }
    for name, remedy in refused.items():
        if arguments.get(name) is not None:
            raise UnsupportedArgumentError(f"{name} can't be used here. {remedy}")
    if arguments.get("synced_gpus"):
        raise UnsupportedArgumentError("synced_gpus=True can't be used here: rounds differ from rank to rank. Leave it out.")
    if arguments.get("token_healing"):
        raise UnsupportedArgumentError("token_healing=True can't be used here: it would rewrite the prompt. Leave it out.")
    for name in ("logits_processor", "stopping_criteria"):
        given = arguments.get(name)
        if given is not None and not (isinstance(given, list | tuple) and all(map(callable, given))):
            raise InvalidInputError(f"{name} is {given!r}; give a list of callables: {name}=[…].")
    allowed = arguments.get("prefix_allowed_tokens_fn")
    if allowed is not None and not callable(allowed):
        raise InvalidInputError(f"prefix_allowed_tokens_fn is {allowed!r}; give a function of a row's number and its ids.")
    if arguments.get("cache_implementation") not in _CACHES:
        raise UnsupportedArgumentError(_CACHE_FAULT.format(arguments["cache_implementation"]) + ".")


def check_streamer(streamer: Any, *, several: bool) -> None:
    """Raises `InvalidInputError` for what is no streamer, `UnsupportedArgumentError` where one would be given several texts."""
    if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise InvalidInputError(
            f"streamer is {streamer!r}, which has no put and end. Give one of transformers' streamers, or iterate over "
            "stream(prompt)."
        )
    if streamer is not None and several:
        raise UnsupportedArgumentError("A streamer takes one text. Call generate once per prompt, for one text each.")


def check_config(config: GenerationConfig, inputs: Mapping[str, Any], rows: int) -> None:
    """Refuse what can't give exactly what the target alone gives. Raises `UnsupportedArgumentError`."""
    mode = config.get_generation_mode()
    faults = {
        f"generation mode {mode.value!r} (num_beams={config.num_beams}) is not supported. Use greedy search or sampling": (
            mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        ),
        "inputs_embeds are not supported: the draft needs a text. Pass input_ids": inputs.get("inputs_embeds") is not None,
        "use_cache=False is not supported: guesses are checked against a cache. Pass use_cache=True": not config.use_cache,
        _CACHE_FAULT.format(config.cache_implementation): config.cache_implementation not in _CACHES,
        "output_attentions and output_hidden_states are not supported. Leave them out": (
            bool(config.output_attentions or config.output_hidden_states)
        ),
        "guidance_scale with several rows is not supported. Call generate once per row": (
            rows > 1 and config.guidance_scale not in (None, 1)
        ),
    }
    _refuse(faults)


def check_rows(criteria: StoppingCriteriaList, rows: int) -> None:
    """Refuse what rows of transformers' batches can't be given as texts of their own. Raises `UnsupportedArgumentError`."""
    fault = "stopping criteria for several rows without an eos_token_id, where ended rows run on, are not supported"
    _refuse({f"{fault}. Call generate once per row": rows > 1 and not _ends_rows(criteria)})


def _refuse(faults: Mapping[str, bool]) -> None:
    for fault, applies in faults.items():
        if applies:
            raise UnsupportedArgumentError(f"{fault}.")


def check_ids(ids: Tensor, size: int) -> None:
    """Raises `InvalidInputError` unless there are ids, and of those that the model can read, which are below `size`."""
    if not ids.numel():
        raise InvalidInputError("The prompt has no ids. Pass at least one, as the token that begins texts.")
    least, most = (int(end) for end in ids.aminmax())
    if least < 0 or most >= size:
        raise InvalidInputError(
            f"The prompt has the id {least if least < 0 else most}, and the target reads those from 0 to {size - 1}. "
            "Encode it with the target's own tokenizer."
        )


def check_positions(positions: Any) -> None:
    """Raises `InvalidInputError` for what are none."""
    if positions is not None and not (isinstance(positions, Tensor) and positions.dim() > 1):
        raise InvalidInputError(f"position_ids is {shown(positions)}; give a tensor of shape (1, ids of the prompt).")


def check_boundary(model: PreTrainedModel, ids: Tensor, inputs: Mapping[str, Any], longest: int) -> None:
    """Refuse texts that depend on how, or beside which rows, they are forwarded: beyond the boundary of rotary embeddings.

    Where a text crosses that of `longrope`, what is cached depends on what was forwarded at once. Transformers reads all
    rows of a batch as the longest of them, which a row that runs for itself isn't.
    """
    long, dynamic = longrope_boundary(model), dynamic_boundary(model)
    if long is None and dynamic is None:
        return
    rows, name = _lengths(ids, inputs), type(model).__name__
    cache = inputs.get(CACHE)
    held = 0 if cache is None else int(cache.get_seq_length())
    if long is not None and 0 < held <= long < min(rows) and not hasattr(cache, "is_croppable"):
        raise UnsupportedArgumentError(
            f"{CACHE} holds {held} positions, and the prompt goes beyond position {long}, where {name} begins a cache "
            f"of its own in this release of transformers. Leave {CACHE} out, or use transformers 5.23 or later."
        )
    ends = [row + longest - ids.shape[1] for row in rows]
    crossing = [end for row, end in zip(rows, ends, strict=True) if long is not None and row <= long < end]
    if crossing:
        raise UnsupportedArgumentError(
            f"max_length={crossing[0]} crosses position {long}, where {name} changes its rotary factors. "
            f"Keep prompt and new tokens within {long}, or begin with a prompt beyond it."
        )
    apart = long is not None and min(rows) <= long < max(rows)
    if apart or (dynamic is not None and min(rows) < max(rows) and max(ends) > dynamic):
        raise UnsupportedArgumentError(
            f"Rows of {min(rows)} to {max(rows)} ids would all be read as the longest, which goes beyond position "
            f"{long if apart else dynamic} of {name}. Call generate once per row, or xt.generate with a list of texts."
        )


def _lengths(ids: Tensor, inputs: Mapping[str, Any]) -> list[int]:
    """How many positions each row has, without padding, and with what a filled cache holds of it."""
    mask = inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return [ids.shape[1]] * len(ids)
    lengths: list[int] = (mask != 0).sum(dim=1).tolist()
    return lengths


def check_seed(seed: Any) -> None:
    """Raises `InvalidInputError` unless `seed` is None or a whole number of 64 bits."""
    whole = isinstance(seed, Integral) and not isinstance(seed, bool)
    if seed is not None and not (whole and 0 <= seed < 1 << 64):
        raise InvalidInputError(f"seed is {seed!r}; it must be a whole number from 0 to 2**64 - 1, or None to draw one.")


def noises(texts: list[Prepared], seed: int | None) -> tuple[int | None, list[Noise | None]]:
    """The seed of a call, and the noise of each of its sampled texts.

    Texts of one prompt are numbered, those of different prompts differ by the prompt: a prompt has the same text alone and in
    any batch. Without a seed, one is drawn by torch's generator; greedy texts have none. Raises `InvalidInputError` where they
    are given one.
    """
    if not any(text.samples for text in texts):
        if seed is not None:
            raise InvalidInputError(f"seed={seed} has no effect on a greedy text. Leave it out, or pass do_sample=True.")
        return None, [None for _ in texts]
    seed = int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu") if seed is None else seed)
    samples, found = Counter[bytes](), list[Noise | None]()
    for text in texts:
        prompt = ",".join(map(str, text.unpadded)).encode()
        found.append(noise(seed, samples[prompt], prompt))
        samples[prompt] += 1
    return seed, found


def _cache_of_row(cache: Cache, row: int) -> Cache:
    own: Cache = _copied(cache, CACHE)
    if own.get_seq_length():
        own.batch_select_indices(torch.tensor([row], dtype=torch.int64, device="cpu"))
    return own


def _ends_rows(criteria: StoppingCriteriaList) -> bool:
    """Whether rows end as transformers ends them. Without an end of text, it lets those run on that a criterion stopped."""
    ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    return ends or all(isinstance(criterion, (MaxLengthCriteria, MaxTimeCriteria)) for criterion in criteria)


def _processors_of_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """A copy, for processors may keep a state. Those of transformers that know of the batch's rows know of this one alone."""
    own: LogitsProcessorList = _copied(processors)
    for processor in own:
        if isinstance(processor, RepetitionPenaltyLogitsProcessor):
            if isinstance(processor.prompt_ignore_length, Tensor):
                processor.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
        elif isinstance(processor, EncoderRepetitionPenaltyLogitsProcessor):
            own_ids: Any = processor.encoder_input_ids[row : row + 1]
            processor.encoder_input_ids = own_ids
        elif isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
            processor.generated_ngrams, processor.batch_size = processor.generated_ngrams[row : row + 1], 1
        elif isinstance(processor, PrefixConstrainedLogitsProcessor):
            number = row // processor._num_beams  # from transformers 5.24 on, texts of one prompt have one number
            processor._prefix_allowed_tokens_fn = _as_row(processor._prefix_allowed_tokens_fn, number)
            processor._num_beams = 1
    return own


def _as_row(allowed: Callable[[int, Tensor], list[int]], number: int) -> Callable[[int, Tensor], list[int]]:
    """A row that runs for itself would always be asked for as number 0."""
    return lambda _, ids: allowed(number, ids)


def callers(name: str) -> Any:
    """An argument of the `generate` that called. Transformers hands a callable neither its streamer nor its assistant."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "generate":
        frame = frame.f_back
    return frame.f_locals.get(name) if frame is not None else None


def written(target: Target, texts: Iterable[Sequence], most: int, streamer: Any) -> Iterator[tuple[int, Sequence]]:
    """Texts with their numbers as they end, `most` of them at a time.

    A streamer is handed what transformers hands it: ids of all rows at a time, then the end. Then all are written at once, and
    not in a generator, which would change a StopIteration of the streamer into another error.
    """
    if streamer is not None:
        _stream(target, texts := list(texts), streamer)
    ended = drain(target, texts, most) if streamer is None else enumerate(texts)
    return ((number, _recorded(text)) for number, text in ended)


def _stream(target: Target, texts: list[Sequence], streamer: Any) -> None:
    sent = 0
    for _ in in_rounds(target, texts, len(texts)):
        while (column := _column(texts, sent)) is not None:
            streamer.put(column)
            sent += 1
    streamer.end()


def _recorded(text: Sequence) -> Sequence:
    stop_recording(text)
    return text


def _column(texts: list[Sequence], index: int) -> Tensor | None:
    """The new ids of all rows at `index`, with padding for those that ended; None where one is to come, or all have ended."""
    rows = [text.new_ids for text in texts]
    ended = [text.finish_reason is not None and len(row) <= index for text, row in zip(texts, rows, strict=True)]
    if all(ended) or any(len(row) <= index and not end for row, end in zip(rows, ended, strict=True)):
        return None
    column = [_pad(text.config) if end else row[index] for text, row, end in zip(texts, rows, ended, strict=True)]
    return torch.tensor(column, dtype=torch.int64, device="cpu")


def stop_recording(text: Sequence) -> None:
    """A cache that may be handed back is left as transformers leaves it."""
    for layer in text.slot.cache.layers if isinstance(text.slot, CachedModel) else ():
        if hasattr(layer, "record_past"):
            layer.record_past = False


def _pad(config: GenerationConfig) -> int:
    return 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)


def as_transformers(texts: list[Sequence], config: GenerationConfig) -> GenerateDecoderOnlyOutput | Tensor:
    """Rows of equal length: those that ended early are filled up with padding, as transformers does.

    Scores and logits, (rows, vocabulary) for each new id, are 0 where a row has ended.
    """
    rows = [text.ids[0] for text in texts]
    sequences = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=_pad(config))
    if not config.return_dict_in_generate:
        return sequences
    alone = texts[0] if len(texts) == 1 else None
    own = alone.slot if alone is not None and isinstance(alone.slot, CachedModel) else None
    if own is not None:
        own.settle()
    cache: dict[str, Any] = {CACHE: None if own is None else own.cache}
    return GenerateDecoderOnlyOutput(
        sequences=sequences,  # type: ignore[arg-type, unused-ignore]
        scores=_by_step([text.picker.scores for text in texts]),
        logits=_by_step([text.picker.logits for text in texts]),
        **cache,
    )


def _by_step(rows: list[tuple[Tensor, ...] | None]) -> Any:
    """What rows recorded, (1, vocabulary) for each of their ids, as (rows, vocabulary) for each id of the longest."""
    recorded = [row for row in rows if row is not None]
    if not recorded:
        return None
    ended = torch.zeros_like(recorded[0][0])
    return tuple(torch.cat(step) for step in zip_longest(*recorded, fillvalue=ended))
