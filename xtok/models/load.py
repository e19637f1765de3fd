"""Loads models from a hub id or a local path, or takes a loaded one.

Only data is loaded: tensors in safetensors or in torch's own format. Code that comes with a model never runs.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin

from xtok.align.tokenbytes import TokenBytes, token_bytes
from xtok.align.vocabulary import Vocabulary
from xtok.errors import InvalidInputError, UnsupportedModelError, XTokError, reason
from xtok.models.cache import active_parameters, context_window, end_ids, ids_read, vocabulary_size
from xtok.models.capabilities import check_usable, traits
from xtok.models.gguf import is_gguf, load_gguf, read_gguf, read_once, tokenizer_of
from xtok.models.prompts import reading, special_ids
from xtok.models.runner import pack_in_place, renewed
from xtok.models.traits import Traits, check_rolls_back

T = TypeVar("T")
OneOrEach: TypeAlias = T | tuple[T | None, T | None] | None
"""A setting of both models, or the target's and the drafts'. None is the default."""
Device: TypeAlias = str | int | torch.device
Dtype: TypeAlias = str | torch.dtype
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
"""Other names of precisions."""
DeviceMap: TypeAlias = str | dict[str, Any]
Quantization: TypeAlias = QuantizationConfigMixin | dict[str, Any]
Source = str | PathLike[str] | tuple[PreTrainedModel, Any]
"""A hub id, the path of a folder or of a GGUF file, or a (model, tokenizer) pair."""

_TOKENIZERS = ("*token*", "vocab*", "*.model", "*.tiktoken", "*.gguf", "*.txt")
"""Name patterns of a tokenizer's files."""
from_config: Any = AutoModelForCausalLM.from_config
"""Makes a model from a configuration, with random weights."""


@dataclass(frozen=True)
class Target:
    """A target model, its vocabulary, and what it can do; shared by all sequences."""

    model: PreTrainedModel
    vocabulary: Vocabulary
    traits: Traits


@dataclass(frozen=True)
class DraftModel:
    """A draft model and its vocabulary, shared by all sequences. `lead`: the ids that its tokenizer puts before every text."""

    model: PreTrainedModel
    vocabulary: Vocabulary
    lead: tuple[int, ...]

    @cached_property
    def branches(self) -> bool:
        """Whether one forward pass can continue several guesses."""
        return traits(self.model).branches


@dataclass(frozen=True)
class Placement:
    """Where to put one model that xtok loads, and how.

    Args:
        device: The device; None for the best there is, or for a draft, the target's.
        dtype: The precision; None for "auto", what the configuration says.
        device_map, quantization_config, attn_implementation: Passed on to transformers' `from_pretrained`.
    """

    device: torch.device | None = None
    dtype: Dtype | None = None
    device_map: DeviceMap | None = None
    quantization_config: Quantization | None = None
    attn_implementation: str | None = None

    def arguments(self) -> dict[str, Any]:
        """Those of `from_pretrained` that differ from xtok's defaults."""
        return {name: value for name, value in vars(self).items() if value is not None and name != "device"}

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self).items() if value is not None)


DEFAULT = Placement()


def placements(**settings: Any) -> tuple[Placement, Placement]:
    """The target's and the drafts' placements. A setting is for both, or a pair. Raises `InvalidInputError`."""
    for name, given in settings.items():
        if isinstance(given, tuple) and len(given) != 2:
            raise InvalidInputError(f"{name} is {given!r}; give one value, or a pair: the target's, the drafts'.")
    target, draft = ({name: one[i] if isinstance(one, tuple) else one for name, one in settings.items()} for i in (0, 1))
    return _placement(**target), _placement(**draft)


def _placement(device: Any = None, dtype: Any = None, device_map: Any = None, **settings: Any) -> Placement:
    if device is not None and device_map is not None:
        raise InvalidInputError(f"device is {device!r} and device_map is {device_map!r}; give one of them.")
    name = dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
    name = _SHORT.get(name, name)
    dtype = None if name == "auto" else getattr(torch, name, dtype)
    return Placement(None if device is None else _usable(device), dtype, device_map, **settings)


def _usable(device: Any) -> torch.device:
    """The device, with its index. Raises `InvalidInputError` if torch can't use it, or not in float64, as noise is computed."""
    try:
        return torch.empty(0, dtype=torch.float64, device=device).device
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:  # torch's own ways to say so
        raise InvalidInputError(f"device {device!r} can't be used: {reason(error)}. Use cpu, or an accelerator.") from error


def best_device() -> torch.device:
    """The accelerator, if there is one that computes in float64; else the CPU."""
    try:
        return _usable(torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu")
    except InvalidInputError:
        return torch.device("cpu")


def load(source: Any, role: str, place: Placement = DEFAULT, beside: torch.device | None = None) -> tuple[PreTrainedModel, Any]:
    """The model and the tokenizer of a source. `role`: "target" or "draft", for error messages.

    `place`: where to put a model that is loaded here; by default on the device `beside`, or without one on the best device.

    Raises `InvalidInputError` for what can't be loaded, and `UnsupportedModelError` for a model that isn't decoder-only, has no
    language model head, or has weights that can't be read without running code.
    """
    if isinstance(source, (str, PathLike)):
        with _loading(source, role, place), read_once() if is_gguf(source) and Path(source).is_file() else nullcontext():
            return _from_path(source, role, place, beside)
    check_places(source, role, place)
    if not source[0].can_generate():
        name = type(source[0]).__name__
        raise UnsupportedModelError(f"{name} has no language model head. Load the {role} with AutoModelForCausalLM.")
    return source[0], source[1]


def _from_path(source: Any, role: str, place: Placement, beside: torch.device | None) -> tuple[PreTrainedModel, Any]:
    config = _checked(source, role)
    if is_gguf(source):
        read = read_gguf(source, role)
        tokenizer = tokenizer_of(read, role)
        loaded: Any = load_gguf(read, config, **{"dtype": read.dtype, **place.arguments()})
    else:
        tokenizer = _tokenizer(source, role)
        loaded = AutoModelForCausalLM.from_pretrained(
            source,
            weights_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **{"dtype": "auto", **place.arguments()},
        )
    model, found = loaded
    if missing := sorted(found["missing_keys"]):  # transformers would fill them at random
        raise InvalidInputError(
            f"The {role} {source} lacks {len(missing)} of its weights, {missing[0]} among them. "
            "Load it with a causal language model's weights, or save it again."
        )
    device = place.device or beside or best_device()
    if place.device_map is None and model.device != device:  # quantised models may not be moved
        model.to(device)
    return model, tokenizer


def check_source(source: Any, role: str) -> None:
    """Raises the errors of `load` that are found fast: for a wrong kind of source, or one without a usable configuration. GGUF
    files that are there aren't read, since their headers take seconds.
    """
    if not isinstance(source, str | PathLike):
        _check_pair(source, role)
    elif not (is_gguf(source) and Path(source).exists()):
        with _loading(source, role):
            _checked(source, role)


def _check_pair(source: Any, role: str) -> None:
    """Raises `InvalidInputError` for what is neither a name nor a pair of a model and its tokenizer."""
    pair = isinstance(source, tuple) and len(source) == 2
    if pair and isinstance(source[0], PreTrainedModel) and callable(getattr(source[1], "get_vocab", None)):
        return
    kind = f"the class {source.__name__}" if isinstance(source, type) else type(source).__name__
    if isinstance(source, tuple):
        kind = f"({', '.join(type(part).__name__ for part in source)})"
    remedy = "Pass a hub id, a local path, or a pair of a transformers model, unwrapped, and its tokenizer."
    if isinstance(source, type) and hasattr(source, "start"):
        remedy = f"Pass an instance of it: {source.__name__}(…)."
    raise InvalidInputError(f"The {role} is {kind}. {remedy}")


class Described(NamedTuple):
    """What is known of a model without its weights: its tokenizer, its window in positions, and its `parameters`."""

    tokenizer: Any
    window: int | None
    parameters: int


def load_without_weights(source: str, role: str) -> Described:
    """What a model's files say about it. Raises `InvalidInputError`, or `UnsupportedModelError` if it can't have that role."""
    with _loading(source, role):
        config = _checked(source, role)
        with torch.device("meta"):
            model = from_config(config, trust_remote_code=False)
        check_rolls_back(model, role)
        return Described(_tokenizer(source, role), context_window(model), active_parameters(model))


def check_places(source: Any, role: str, place: Placement) -> None:
    """Raises `InvalidInputError` if `place` would change a loaded model: models that callers pass are never changed."""
    if isinstance(source, str | PathLike):
        return
    _check_pair(source, role)
    model: PreTrainedModel = source[0]
    has = {"device": model.device, "dtype": model.dtype, "attn_implementation": model.config._attn_implementation}
    differs = any(value is not None and value != has.get(name) for name, value in vars(place).items())
    if differs or (place.device is not None and hasattr(model, "hf_device_map")):
        other = "('cuda', None)" if role == "draft" else "(None, 'cuda')"
        raise InvalidInputError(
            f"The {role} is loaded already, on {model.device} in {model.dtype}, so {place} can't be honoured. Move or convert "
            f"it before you pass it. For the other model alone, give a pair, the target's and the drafts', such as "
            f"device={other}."
        )


def target_model(source: Any, place: Placement = DEFAULT) -> Target:
    """Load a target. Raises `UnsupportedModelError`, `UnsupportedTokenizerError` or `InvalidInputError` for unfit sources."""
    model, vocabulary = _loaded(source, "target", place, None)
    return Target(model, vocabulary, traits(model))


def draft_model(source: Any, place: Placement = DEFAULT, beside: torch.device | None = None) -> DraftModel:
    """Load a draft model. Errors are those of `target_model`."""
    model, vocabulary = _loaded(source, "draft", place, beside)
    _ = vocabulary.encoder  # fails here, and not in the first call
    with reading(vocabulary.tokenizer):
        return DraftModel(model, vocabulary, tuple(special_ids(vocabulary.tokenizer)[0]))


def _loaded(source: Any, role: str, place: Placement, beside: torch.device | None) -> tuple[PreTrainedModel, Vocabulary]:
    model, tokenizer = load(source, role, place, beside)
    if isinstance(source, str | PathLike):
        pack_in_place(model, convert=place.dtype is None)
    renewed(model)
    check_rolls_back(model, role)
    view = token_bytes(tokenizer)
    _check_sizes(model, view, role)
    check_usable(model, role)
    ends = [getattr(tokenizer, "eos_token_id", None), *end_ids(model)]
    return model, Vocabulary(tokenizer, view, vocabulary_size(model), frozenset(end for end in ends if end is not None))


def _check_sizes(model: PreTrainedModel, view: TokenBytes, role: str) -> None:
    """Raises `InvalidInputError` if the tokenizer has ids that the model can't read, even if few texts have them."""
    last, size = max((token for token, piece in enumerate(view.table) if piece), default=-1), ids_read(model)
    if last >= size:
        raise InvalidInputError(
            f"The {role}'s tokenizer writes ids up to {last}, and {type(model).__name__} reads those below {size}. "
            "Pass the tokenizer that the model was trained with."
        )


@contextmanager
def _loading(source: str | PathLike[str], role: str, place: Placement = DEFAULT) -> Iterator[None]:
    """Turns errors of transformers, torch, safetensors and the network in the block into errors of xtok, with their text."""
    how = f" with {place}" if str(place) else ""
    instead = f"load it with transformers and pass the pair (model, tokenizer) as {role}"
    try:
        yield
    except XTokError:
        raise
    except Exception as error:  # broken files raise all kinds of errors
        kind: type[XTokError] = InvalidInputError
        if isinstance(error, torch.OutOfMemoryError):
            why, remedy = "doesn't fit", "Give another device (device='cpu'), a smaller dtype, or device_map='auto'"
        elif isinstance(error, OSError) and not Path(source).exists():
            why = "is neither a local folder nor available from the Hub"
            remedy = "Check the name and the connection, or pass the path of a saved model"
        elif code := re.search(r"GLOBAL (\S+)", str(error)):  # as torch says that weights aren't only data
            kind, why = UnsupportedModelError, f"needs code to open its weights, namely {code[1]}, and xtok runs none"
            remedy = f"Save it in safetensors, or, if you trust it, {instead}"
        else:
            first = "Check these settings" if how else "Download or save it again"
            first = "Install what is missing" if isinstance(error, ImportError) else first
            why, remedy = f"can't be loaded{how}", f"{first}, or {instead}"
        raise kind(f"The {role} {source} {why}: {reason(error)}. {remedy}.") from error


def _checked(source: str | PathLike[str], role: str) -> Any:
    """The configuration of a source."""
    if Path(source).is_file() and not is_gguf(source):
        raise InvalidInputError(
            f"The {role} {source} is a file. Pass the folder that it is in, or a .gguf file; for heads, HeadsDrafter(file)."
        )
    if is_gguf(source):
        read_gguf(source, role)  # which says what is wrong with it
    where: Any = (Path(source).parent, Path(source).name) if is_gguf(source) else (source, None)
    config: Any = AutoConfig.from_pretrained(where[0], gguf_file=where[1], trust_remote_code=False)
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{source} is an encoder-decoder model. Use a decoder-only model as {role}.")
    return config


def _tokenizer(source: str | PathLike[str], role: str) -> Any:
    """The tokenizer of a source. Raises `InvalidInputError` if a folder has none, which transformers reports wrongly."""
    folder = Path(source)
    if is_gguf(source):
        return tokenizer_of(read_gguf(source, role), role)
    if folder.is_dir() and not any(any(folder.glob(name)) for name in _TOKENIZERS):
        raise InvalidInputError(
            f"The {role} {source} has no tokenizer beside the model. Save it there (tokenizer.save_pretrained), or pass the "
            f"pair (model, tokenizer) as {role}."
        )
    return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
