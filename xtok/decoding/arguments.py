"""Kinds of arguments, told before any work is done."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig

from xtok.errors import InvalidInputError, XTokError, reason, shown
from xtok.models.cache import CACHE, CACHE_NAMES

_LIMITS = ("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time")
_NUMBERS = (
    *_LIMITS,
    *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "guidance_scale"),
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
)
_COUNTS = ("num_beams", "num_return_sequences")
_IDS = (
    *("bos_token_id", "pad_token_id", "eos_token_id", "forced_bos_token_id", "forced_eos_token_id"),
    *("suppress_tokens", "begin_suppress_tokens"),
)
_OBJECTS = {
    "generation_config": (GenerationConfig, "a GenerationConfig"),
    CACHE: (Cache, "a Cache, or leave it out"),
}


def with_cache_renamed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments, a cache under the name that this release of transformers has for it. Raises `InvalidInputError` for two."""
    given = [name for name in CACHE_NAMES if arguments.get(name) is not None]
    if len(given) > 1:
        raise InvalidInputError("cache and past_key_values are two names of one argument. Give one of them.")
    renamed = {name: value for name, value in arguments.items() if name not in CACHE_NAMES}
    return {**renamed, CACHE: arguments[given[0]]} if given else renamed


def check_kinds(arguments: Mapping[str, Any]) -> None:
    """Raises `InvalidInputError` for arguments of transformers' `generate` that are of no kind it can use."""
    for name in _NUMBERS:
        value = arguments.get(name)
        if value is not None and not _is_number(value, alone=name == "max_time"):
            raise InvalidInputError(f"{name} is {shown(value)}; give a number.")
        if name not in _LIMITS and isinstance(value, int) and abs(value) >= 1 << 63:
            raise InvalidInputError(f"{name} is {shown(value)}; give a number below 2**63.")
    for name in _COUNTS:
        if name in arguments and not (_is_whole(arguments[name]) and 1 <= arguments[name] < 1 << 31):
            raise InvalidInputError(f"{name} is {shown(arguments[name])}; it must be a whole number, 1 or more.")
    for name in _IDS:
        value = arguments.get(name)
        if value is not None and not _is_ids(value):
            raise InvalidInputError(f"{name} is {shown(value)}; give an id, or a list of ids.")
    for name, (kind, wanted) in _OBJECTS.items():
        value = arguments.get(name)
        if value is not None and not isinstance(value, kind):
            raise InvalidInputError(f"{name} is {shown(value)}; give {wanted}.")


def _is_number(value: Any, *, alone: bool) -> bool:
    """`alone`: whether a tensor that holds one is none."""
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


@contextmanager
def handed_on(arguments: Iterable[str]) -> Iterator[None]:
    """What transformers doesn't check, and stumbles over, in an error that names the arguments it was handed."""
    try:
        yield
    except (XTokError, torch.OutOfMemoryError):
        raise
    except (AttributeError, TypeError, LookupError, ArithmeticError, RuntimeError) as error:
        raise InvalidInputError(
            f"transformers can't use one of {', '.join(sorted(arguments)) or 'its own settings'} "
            f"({type(error).__name__}: {reason(error)}). Give each what its documentation of generate asks for."
        ) from error


def listed_texts(name: str, given: Any) -> list[str]:
    """A list of texts as such. Raises `InvalidInputError` for anything else."""
    is_list = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
    texts: list[str] = list(given) if is_list else []
    if not is_list or not all(isinstance(text, str) for text in texts):
        raise InvalidInputError(f"{name} is {shown(given)}; give a list of texts.")
    return texts
