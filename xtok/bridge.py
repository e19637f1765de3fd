"""The bridge to transformers' `generate`: what is refused, what a row of a batch is given, and what is handed back."""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from copy import deepcopy
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria, MaxTimeCriteria

from xtok.errors import InvalidInputError, UnsupportedArgumentError
from xtok.loop import Run, drain
from xtok.noise import noise
from xtok.rope import dynamic_boundary, longrope_boundary

_CACHES = (None, "dynamic")
_CACHE_FAULT = "cache_implementation={!r} can't be rolled back. Leave it out"


def own_arguments(arguments: Mapping[str, Any], prompts: int) -> dict[str, Any]:
    """The arguments for one of several prompts, which take turns: processors and criteria may keep a state."""
    own = dict(arguments)
    if prompts == 1:
        return own
    if own.get("past_key_values") is not None:
        raise UnsupportedArgumentError("past_key_values holds one text. Call generate once per prompt.")
    for name in ("logits_processor", "stopping_criteria"):
        if own.get(name):
            own[name] = copied(own[name])
    return own


def copied(kept: Any, name: str | None = None) -> Any:
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
        "inputs": "Pass the prompt as a text, or use target.generate(inputs, custom_generate=xt).",
        "input_ids": "Pass the prompt as a text, or use target.generate(input_ids, custom_generate=xt).",
        "attention_mask": "A prompt has no padding. Use target.generate(input_ids, custom_generate=xt) for padded ones.",
        "streamer": "Iterate over stream(prompt), or use generate(prompt, streamer=streamer).",
    }
    for name, remedy in refused.items():
        if arguments.get(name) is not None:
            raise UnsupportedArgumentError(f"{name} can't be used here. {remedy}")
    if arguments.get("synced_gpus"):
        raise UnsupportedArgumentError("synced_gpus=True can't be used here: rounds differ from rank to rank. Leave it out.")
    if arguments.get("token_healing"):
        raise UnsupportedArgumentError("token_healing=True can't be used here: it would rewrite the prompt. Leave it out.")
    if arguments.get("cache_implementation") not in _CACHES:
        raise UnsupportedArgumentError(_CACHE_FAULT.format(arguments["cache_implementation"]) + ".")


def check_streamer(streamer: Any, *, several: bool) -> None:
    """Raises `UnsupportedArgumentError` for a streamer that would be given several texts."""
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


def check_rows(config: GenerationConfig, criteria: StoppingCriteriaList, rows: int) -> None:
    """Refuse what rows of transformers' batches can't be given as texts of their own. Raises `UnsupportedArgumentError`."""
    scores = config.output_scores or config.output_logits
    faults = {
        "output_scores and output_logits are for one text at a time": bool(config.return_dict_in_generate and scores),
        "stopping criteria for several rows without an eos_token_id, where ended rows run on, are not supported": (
            not _ends_rows(criteria)
        ),
    }
    _refuse({f"{fault}. Call generate once per row": applies for fault, applies in faults.items() if rows > 1})


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


def check_boundary(model: PreTrainedModel, ids: Tensor, inputs: Mapping[str, Any], longest: int) -> None:
    """Refuse texts that depend on how, or beside which rows, they are forwarded: beyond the boundary of rotary embeddings.

    Where a text crosses that of `longrope`, what is cached depends on what was forwarded at once. Transformers reads all
    rows of a batch as the longest of them, which a row that runs for itself isn't.
    """
    long, dynamic = longrope_boundary(model), dynamic_boundary(model)
    if long is None and dynamic is None:
        return
    rows, name = _lengths(ids, inputs), type(model).__name__
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


def sow(runs: list[Run], seed: int | None, keys: Callable[[], Tensor]) -> None:
    """Give each sampled text its noise: texts of one prompt are numbered, those of different prompts differ by the prompt.

    So a prompt has the same text alone and in any batch. Without a seed, one is drawn by torch's generator.
    """
    if not any(run.config.do_sample for run in runs):
        return
    seed = int(torch.randint(2**63 - 1, ()) if seed is None else seed)
    samples: Counter[bytes] = Counter()
    for run in runs:
        run.seed, run.keys = seed, keys().to(run.ids.device)
        prompt = ",".join(map(str, run.prompt)).encode()
        run.noise = noise(seed, samples[prompt], prompt)
        samples[prompt] += 1


def unpadded(ids: Tensor, inputs: Mapping[str, Any]) -> list[int]:
    """A prompt's ids, (length,), without padding."""
    mask = inputs.get("attention_mask")
    held: list[int] = (ids if mask is None or mask.shape != (1, *ids.shape) else ids[mask[0] != 0]).tolist()
    return held


def row_of_inputs(inputs: Mapping[str, Any], row: int) -> dict[str, Any]:
    """One row of the model's inputs, so that each row is its own generation."""
    return {name: value[row : row + 1] if isinstance(value, Tensor) else value for name, value in inputs.items()}


def cache_of_row(cache: Cache, row: int) -> Cache:
    own: Cache = copied(cache, "past_key_values")
    if own.get_seq_length():
        own.batch_select_indices(torch.tensor([row]))
    return own


def _ends_rows(criteria: StoppingCriteriaList) -> bool:
    """Whether rows end as transformers ends them. Without an end of text, it lets those run on that a criterion stopped."""
    ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    return ends or all(isinstance(criterion, (MaxLengthCriteria, MaxTimeCriteria)) for criterion in criteria)


def processors_of_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """A copy, for processors may keep a state. Those of transformers that know of the batch's rows know of this one alone."""
    own = copied(processors)
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


def callers(name: str) -> Any:
    """An argument of the `generate` that called. Transformers hands a callable neither its streamer nor its assistant."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "generate":
        frame = frame.f_back
    return frame.f_locals.get(name) if frame is not None else None


def complete(runs: list[Run], streamer: Any) -> None:
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
        stop_recording(run)


def _column(runs: list[Run], index: int) -> Tensor | None:
    """The new ids of all rows at `index`, with padding for those that ended; None where one is to come, or all have ended."""
    ended = [run.finish_reason is not None and len(run.new_ids) <= index for run in runs]
    if all(ended) or any(len(run.new_ids) <= index and not end for run, end in zip(runs, ended, strict=True)):
        return None
    return torch.tensor([_pad(run.config) if end else run.new_ids[index] for run, end in zip(runs, ended, strict=True)])


def stop_recording(run: Run) -> None:
    """A cache that may be handed back is left as transformers leaves it."""
    for layer in run.target.cache.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = False


def _pad(config: GenerationConfig) -> int:
    return 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)


def as_transformers(runs: list[Run], config: GenerationConfig) -> GenerateDecoderOnlyOutput | Tensor:
    """Rows of equal length: those that ended early are filled up with padding, as transformers does."""
    rows = [run.ids[0] for run in runs]
    sequences = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=_pad(config))
    if not config.return_dict_in_generate:
        return sequences
    alone = runs[0] if len(runs) == 1 else None
    if alone is not None:
        alone.target.settle()
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=alone.scores if alone else None,
        logits=alone.logits if alone else None,
        past_key_values=alone.target.cache if alone else None,
    )
