"""Refuses arguments that can't be honoured, before any work is done."""

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import MaxLengthCriteria, MaxTimeCriteria

from xtok.decoding.keywords import GenerateArguments
from xtok.drafts.lookup import Prediction
from xtok.errors import InvalidInputError, UnsupportedArgumentError, XTokError, reason, shown
from xtok.models.cache import CACHE, CACHE_NAMES
from xtok.models.traits import Traits

_CACHES = (None, "dynamic")
_CACHE_FAULT = "cache_implementation={!r} can't be rolled back. Leave it out"
_NAMED = {"attention_mask", "custom_generate", "inputs", "batch_size", "progress", "streamer"}
"""Arguments that transformers gets from xtok or not at all. If the caller passes None for one, it is left out."""
_LIMITS = ("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time")
_NUMBERS = (
    *_LIMITS,
    *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "guidance_scale"),
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
)
_COUNTS = ("num_beams", "num_return_sequences", "prefill_chunk_size")
_IDS = (
    *("bos_token_id", "pad_token_id", "eos_token_id", "forced_bos_token_id", "forced_eos_token_id"),
    *("suppress_tokens", "begin_suppress_tokens"),
)
_OBJECTS = {"generation_config": (GenerationConfig, "a GenerationConfig"), CACHE: (Cache, "a Cache, or leave it out")}


def checked(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as transformers' `generate` takes them. Raises `InvalidInputError` or `UnsupportedArgumentError`."""
    check_arguments(arguments)
    arguments = with_cache_renamed(arguments)
    check_kinds(arguments)
    return {name: value for name, value in arguments.items() if value is not None or name not in _NAMED}


def taken_prediction(arguments: dict[str, Any]) -> Prediction | None:
    """The text that the caller expects, taken out of the arguments; None without one. Raises `InvalidInputError`."""
    given = arguments.pop("prediction", None)
    if not isinstance(given, str | Prediction | None):
        raise InvalidInputError(f"prediction is {given!r}; it must be a text that the answer is likely to contain.")
    return Prediction(given) if given and isinstance(given, str) else given or None


def taken_stop_strings(model: PreTrainedModel, arguments: dict[str, Any]) -> str | list[str] | None:
    """Stop strings, taken out of wherever they were set. transformers must not see them: it would ask for a tokenizer."""
    given = arguments.pop("stop_strings", None)
    configs = (arguments.get("generation_config"), model.generation_config)
    configured = next((config.stop_strings for config in configs if config is not None and config.stop_strings), None)
    if configured is not None:
        arguments["stop_strings"] = None
    return configured if given is None else given


def with_cache_renamed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with a cache under this transformers release's name for it. Raises `InvalidInputError` if both names are
    given.
    """
    given = [name for name in CACHE_NAMES if arguments.get(name) is not None]
    if len(given) > 1:
        raise InvalidInputError("cache and past_key_values are two names for one argument. Give one of them.")
    renamed = {name: value for name, value in arguments.items() if name not in CACHE_NAMES}
    return {**renamed, CACHE: arguments[given[0]]} if given else renamed


def check_kinds(arguments: Mapping[str, Any]) -> None:
    """Raises `InvalidInputError` for arguments of a type or range that transformers' `generate` can't use."""
    for name in _NUMBERS:
        value = arguments.get(name)
        if value is not None and not _is_number(value, alone=name == "max_time"):
            raise InvalidInputError(f"{name} is {shown(value)}; give a number.")
        if name not in _LIMITS and isinstance(value, int) and abs(value) >= 1 << 63:
            raise InvalidInputError(f"{name} is {shown(value)}; give a number below 2**63.")
    for name in _COUNTS:
        value = arguments.get(name, 1)
        is_left_out = name == "prefill_chunk_size" and value is None
        if not (is_left_out or (_is_whole(value) and 1 <= value < 1 << 31)):
            raise InvalidInputError(f"{name} is {shown(value)}; it must be a whole number, 1 or more.")
    for name in _IDS:
        value = arguments.get(name)
        if value is not None and not _is_ids(value):
            raise InvalidInputError(f"{name} is {shown(value)}; give an id, or a list of ids.")
    for name, (kind, wanted) in _OBJECTS.items():
        value = arguments.get(name)
        if value is not None and not isinstance(value, kind):
            raise InvalidInputError(f"{name} is {shown(value)}; give {wanted}.")


def _is_number(value: Any, *, alone: bool) -> bool:
    """`alone`: whether a tensor that holds a number is refused."""
    if isinstance(value, Tensor) and not alone:
        return value.numel() == 1 and not value.is_complex() and bool(value == value)
    return isinstance(value, Real) and not isinstance(value, bool) and float(value) == float(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_ids(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() and not value.is_complex()
    several = value if isinstance(value, list | tuple) else [value]
    return all(_is_whole(one) and abs(one) < 1 << 63 for one in several)


def call_generate(model: Any, ids: Tensor, arguments: Mapping[str, Any], custom_generate: Callable[..., Any]) -> None:
    """Call transformers' `generate`. If an argument that it doesn't check makes it fail, the error names the arguments."""
    try:
        model.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=custom_generate, **arguments)
    except (XTokError, torch.OutOfMemoryError):
        raise
    except ValueError as error:
        unknown = [name for name in sorted(arguments) if repr(name) in str(error)] if "model_kwargs" in str(error) else []
        raise InvalidInputError(" ".join(map(_unknown, unknown)) or str(error)) from error
    except (AttributeError, TypeError, LookupError, ArithmeticError, RuntimeError) as error:
        raise InvalidInputError(
            f"transformers can't use one of {', '.join(sorted(arguments)) or 'the settings of the generation config'} "
            f"({type(error).__name__}: {reason(error)}). Give each what its documentation for generate asks for."
        ) from error


_ELSEWHERE = {
    "n": "num_return_sequences",
    "messages": "prompt",
    "response_format": "logits_processor",
    "json_schema": "logits_processor",
}
"""Names of OpenAI's and vLLM's arguments that no name here is like."""


def _unknown(name: str) -> str:
    """The message that `generate` has no such argument, with the one that may have been meant."""
    known = list(GenerateArguments.__annotations__)
    alike = *(one for one in known if one.startswith(name)), *get_close_matches(name, known, 1)
    near = [_ELSEWHERE[name]] if name in _ELSEWHERE else alike[:1]
    return f"generate has no argument {name}.{f' Did you mean {near[0]}?' if near else ''}"


def listed_texts(name: str, given: Any) -> list[str]:
    """`given`, a list or other sequence of texts, as a list. Raises `InvalidInputError` for anything else."""
    is_list = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
    texts: list[str] = list(given) if is_list else []
    if not is_list or not all(isinstance(text, str) for text in texts):
        raise InvalidInputError(f"{name} is {shown(given)}; give a list of texts.")
    return texts


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises `UnsupportedArgumentError` or `InvalidInputError` for arguments that can be judged without transformers."""
    refused = {
        "assistant_model": "Pass it as the draft: XTokAssisted(target, draft).",
        "custom_generate": "XTokAssisted is the decoding method.",
        "inputs_embeds": "Drafts need ids or text. Pass a prompt.",
        "inputs": "Pass the ids as the prompt, or use target.generate(inputs, custom_generate=xt).",
        "input_ids": "Pass the ids as the prompt, or use target.generate(input_ids, custom_generate=xt).",
        "attention_mask": "Prompts have no padding here. Use target.generate(input_ids, custom_generate=xt) for padded ids.",
        "batch_size": "It is for lists of prompts, in generate.",
        "progress": "It is for lists of prompts, in generate.",
        "streamer": "Iterate over stream(prompt), or use generate(prompt, streamer=streamer).",
    }
    for name, remedy in refused.items():
        if arguments.get(name) is not None:
            raise UnsupportedArgumentError(f"{name} can't be used here. {remedy}")
    if arguments.get("synced_gpus"):
        raise UnsupportedArgumentError(
            "synced_gpus=True can't be used here: the number of rounds differs between ranks. Leave it out."
        )
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
    """Raises `InvalidInputError` unless it is a streamer or None, and `UnsupportedArgumentError` if `several` sequences run."""
    if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise InvalidInputError(
            f"streamer is {streamer!r}, which has no put and end methods. Give one of transformers' streamers, or iterate over "
            "stream(prompt)."
        )
    if streamer is not None and several:
        raise UnsupportedArgumentError("A streamer takes one text. Call generate once per prompt, for one text each.")


def check_supported(*, stable: bool | None, fixed: bool) -> None:
    """Raises `UnsupportedArgumentError` if `stable` is requested, and forward passes can't have fixed shapes (`fixed`)."""
    if stable and not fixed:
        raise UnsupportedArgumentError(
            f"stable=True works with ids alone, without a given cache or further inputs of the model. Leave {CACHE} and "
            "those inputs out, or leave out stable=True."
        )


def check_prepared(config: GenerationConfig, ids: Tensor, inputs: Mapping[str, Any], known: Traits) -> None:
    """Raises `InvalidInputError` or `UnsupportedArgumentError` for what xtok can't honour. `ids`: (rows, length)."""
    positions = inputs.get("position_ids")
    if positions is not None and not (isinstance(positions, Tensor) and positions.dim() > 1):
        raise InvalidInputError(f"position_ids is {shown(positions)}; give a tensor of shape (1, length of the prompt).")
    check_config(config, inputs, rows=len(ids))
    check_ids(ids, known.ids_read)
    check_boundary(known, ids, inputs, config.max_length)


def check_config(config: GenerationConfig, inputs: Mapping[str, Any], rows: int) -> None:
    """Raises `UnsupportedArgumentError` for settings under which the ids might not be those of the target alone."""
    mode = config.get_generation_mode()
    faults = {
        "prompt_lookup_num_tokens and assistant_early_exit are not supported. Pass a draft to XTokAssisted instead, such as "
        "XTokAssisted(target, PromptLookup())": mode is GenerationMode.ASSISTED_GENERATION,
        f"generation mode {mode.value!r} (num_beams={config.num_beams}) is not supported. Use greedy search or sampling": (
            mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        ),
        "inputs_embeds are not supported: drafts need ids or text. Pass input_ids": inputs.get("inputs_embeds") is not None,
        "use_cache=False is not supported: guesses are checked against a cache. Pass use_cache=True": not config.use_cache,
        _CACHE_FAULT.format(config.cache_implementation): config.cache_implementation not in _CACHES,
        "output_attentions and output_hidden_states are not supported. Leave them out": (
            bool(config.output_attentions or config.output_hidden_states)
        ),
        "guidance_scale with several rows is not supported. Call generate once per row": (
            rows > 1 and config.guidance_scale not in (None, 1)
        ),
    }
    for fault, applies in faults.items():
        if applies:
            raise UnsupportedArgumentError(f"{fault}.")


def check_adapters(model: PreTrainedModel, rows: int) -> None:
    """Raises `UnsupportedArgumentError` for what PEFT adds to the inputs in its own `generate`, by which it calls the model: a
    learnt prompt (prompt tuning, p-tuning, prefix tuning), and different adapters for the rows of a batch.
    """
    owner = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    if getattr(getattr(owner, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedArgumentError(
            f"{type(owner).__name__} puts a learnt prompt before the text, which xtok would leave out. Generate without xtok."
        )
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    if rows > 1 and any("adapter_names" in getattr(hook, "keywords", ()) for hook in hooks):
        raise UnsupportedArgumentError(
            "adapter_names differ by row, and xtok forwards rows separately. Set one adapter, and generate once for each."
        )


def check_rows(criteria: StoppingCriteriaList, stop_strings: Any, rows: int) -> None:
    """Raises `UnsupportedArgumentError` for stopping criteria of several rows without an eos token: in transformers, a row that
    has stopped then goes on until all have.
    """
    ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    limits = all(isinstance(criterion, (MaxLengthCriteria, MaxTimeCriteria)) for criterion in criteria)
    if rows > 1 and not (ends or (limits and stop_strings is None)):
        raise UnsupportedArgumentError(
            "Stopping criteria for several rows need an eos_token_id: without one, transformers goes on with rows that have "
            "stopped. Call generate once per row, or set eos_token_id."
        )


def check_ids(ids: Tensor, size: int) -> None:
    """Raises `InvalidInputError` unless there are ids, all of them from 0 to `size` - 1."""
    if not ids.numel():
        raise InvalidInputError("The prompt has no ids. Pass at least one, such as the token that begins texts.")
    least, most = (int(end) for end in ids.aminmax())
    if least < 0 or most >= size:
        raise InvalidInputError(
            f"The prompt has the id {least if least < 0 else most}, and the target's ids are from 0 to {size - 1}. "
            "Encode it with the target's own tokenizer."
        )


def check_boundary(known: Traits, ids: Tensor, inputs: Mapping[str, Any], longest: int) -> None:
    """Raises `UnsupportedArgumentError` for sequences that go beyond a rotary boundary in a way that makes logits depend on how
    ids are split into forward passes.

    If a sequence crosses the boundary of `longrope`, the cached keys depend on which ids were forwarded together. In a batch,
    transformers uses the factors of the longest row for all rows; a row that runs alone has its own.
    """
    long, dynamic = known.longrope_boundary, known.dynamic_boundary
    if long is None and dynamic is None:
        return
    rows, name = _lengths(ids, inputs), known.name
    cache = inputs.get(CACHE)
    held = 0 if cache is None else int(cache.get_seq_length())
    if long is not None and 0 < held <= long < min(rows) and not hasattr(cache, "is_croppable"):
        raise UnsupportedArgumentError(
            f"{CACHE} holds {held} positions, and the prompt goes beyond position {long}, where {name} replaces the cache "
            f"by its own in this release of transformers. Leave {CACHE} out, or use transformers 5.23 or later."
        )
    ends = [row + longest - ids.shape[1] for row in rows]
    crossing = [end for row, end in zip(rows, ends, strict=True) if long is not None and row <= long < end]
    if crossing:
        raise UnsupportedArgumentError(
            f"max_length={crossing[0]} crosses position {long}, where {name} changes its rotary factors. "
            f"Keep prompt and new tokens within {long} positions, or begin with a longer prompt."
        )
    apart = long is not None and min(rows) <= long < max(rows)
    if apart or (dynamic is not None and min(rows) < max(rows) and max(ends) > dynamic):
        raise UnsupportedArgumentError(
            f"Rows of {min(rows)} to {max(rows)} ids would all get the rotary factors of the longest, which is beyond position "
            f"{long if apart else dynamic} of {name}. Call generate once per row, or xt.generate with a list of texts."
        )


def _lengths(ids: Tensor, inputs: Mapping[str, Any]) -> list[int]:
    """How many positions each row has, without padding and with those in a cache."""
    mask = inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return [ids.shape[1]] * len(ids)
    lengths: list[int] = (mask != 0).sum(dim=1).tolist()
    return lengths


def check_seed(seed: Any) -> None:
    if seed is not None and not (_is_whole(seed) and 0 <= seed < 1 << 64):
        raise InvalidInputError(f"seed is {seed!r}; it must be a whole number from 0 to 2**64 - 1, or None to draw one.")


def check_batch(batch_size: Any, progress: Any) -> None:
    """Raises `InvalidInputError` unless `batch_size` is 1 or more and `progress` is True, False or None."""
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise InvalidInputError(f"batch_size is {batch_size!r}; it must be a whole number, 1 or more.")
    if not isinstance(progress, bool | None):
        raise InvalidInputError(f"progress is {progress!r}; it must be True, False or None.")
