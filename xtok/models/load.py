"""Loads models from a hub id or a local path, or takes a loaded one.

Only data is loaded: tensors in safetensors or in torch's own format. Code that comes with a model never runs.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import is_zipfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.hub import cached_file

from xtok.align.tokenbytes import TokenBytes, token_bytes
from xtok.align.vocabulary import Vocabulary
from xtok.errors import InvalidInputError, UnsupportedModelError, XTokError, install, reason
from xtok.models.cache import context_window, end_ids, ids_read, parameters, vocabulary_size
from xtok.models.continues import check_continues, check_rolls_back
from xtok.models.gguf import is_gguf, load_gguf, read_gguf, tokenizer_of
from xtok.models.placement import Placement, best_device
from xtok.models.probe import traits
from xtok.models.prompts import reading, special_ids
from xtok.models.quantized import check_rows
from xtok.models.roles import DraftModel, Target

Source = str | PathLike[str] | tuple[PreTrainedModel, Any]
"""A hub id, the path of a folder or of a GGUF file, or a (model, tokenizer) pair."""


DEFAULT = Placement()
_TOKENIZERS = ("*token*", "vocab*", "*.model", "*.tiktoken", "*.gguf", "*.txt")
"""Name patterns of a tokenizer's files."""
from_config: Any = AutoModelForCausalLM.from_config
"""Makes a model from a configuration, with random weights."""


def load(source: Any, role: str, place: Placement = DEFAULT, beside: torch.device | None = None) -> tuple[PreTrainedModel, Any]:
    """The model and the tokenizer of a source. `role`: "target" or "draft", for error messages.

    `place`: where to put a model that is loaded here; by default on the device `beside`, or without one on the best device.

    Raises `InvalidInputError` for what can't be loaded, and `UnsupportedModelError` for a model that isn't decoder-only, has no
    language model head, or has weights that can't be read without running code.
    """
    if isinstance(source, (str, PathLike)):
        with _loading(source, role):
            config = _checked(source, role)
            _check_placed(source, config, place, role)
            if is_gguf(source):
                read = read_gguf(source, role)
                tokenizer = tokenizer_of(read, role)
                model, found = load_gguf(read, config, **{"dtype": read.dtype, **place.arguments()})
            else:
                _check_weights(source, config, role)
                tokenizer = _tokenizer(source, role)
                loaded: Any = AutoModelForCausalLM.from_pretrained(
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
            if place.device_map is None:
                _move(model, place.device or beside or best_device(), source, role)
            return model, tokenizer
    if _is_pair(source):
        check_places(source, role, place)
        if not source[0].can_generate():
            name = type(source[0]).__name__
            raise UnsupportedModelError(f"{name} has no language model head. Load the {role} with AutoModelForCausalLM.")
        return source[0], source[1]
    raise _unusable(source, role)


def check_source(source: Any, role: str) -> None:
    """Raises the errors of `load` that are found fast: for a wrong kind of source, or one without a usable configuration. Of a
    GGUF file, whose header takes seconds to read, only the path is checked.
    """
    if isinstance(source, str | PathLike):
        with _loading(source, role):
            (_check_path if is_gguf(source) else _checked)(source, role)
    elif not _is_pair(source):
        raise _unusable(source, role)


def _unusable(source: Any, role: str) -> InvalidInputError:
    kind = f"the class {source.__name__}" if isinstance(source, type) else type(source).__name__
    if isinstance(source, tuple):
        kind = f"({', '.join(type(part).__name__ for part in source)})"
    remedy = "Pass a hub id, a local path, or a pair of a transformers model, unwrapped, and its tokenizer."
    if isinstance(source, type) and hasattr(source, "start"):
        remedy = f"Pass an instance of it: {source.__name__}(…)."
    return InvalidInputError(f"The {role} is {kind}. {remedy}")


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
        return Described(_tokenizer(source, role), context_window(model), parameters(model))


def _is_pair(source: Any) -> bool:
    pair = isinstance(source, tuple) and len(source) == 2
    return pair and isinstance(source[0], PreTrainedModel) and callable(getattr(source[1], "get_vocab", None))


def check_places(source: Any, role: str, place: Placement) -> None:
    """Raises `InvalidInputError` if `place` would change a loaded model: models that callers pass are never changed."""
    if _is_pair(source) and not _is_placed(source[0], place):
        other = "('cuda', None)" if role == "draft" else "(None, 'cuda')"
        raise InvalidInputError(
            f"The {role} is loaded already, on {source[0].device} in {source[0].dtype}, so {place} can't be honoured. Move or "
            f"convert it before you pass it. For the other model alone, give a pair, the target's and the drafts', such as "
            f"device={other}."
        )


def _is_placed(model: PreTrainedModel, place: Placement) -> bool:
    has = Placement(
        device=place.device and model.device,
        dtype=place.dtype and model.dtype,
        attn_implementation=place.attn_implementation and model.config._attn_implementation,
    )
    return has == place and (place.device is None or not hasattr(model, "hf_device_map"))


def _check_placed(source: str | PathLike[str], config: Any, place: Placement, role: str) -> None:
    """Raises `InvalidInputError` if a model can't be loaded as requested."""
    if is_gguf(source) and place.quantization_config is not None:
        raise InvalidInputError(
            f"The {role} {source} is dequantised when it is loaded, so quantization_config can't be honoured. Leave it out."
        )
    if place.attn_implementation is not None:
        try:
            with torch.device("meta"):
                from_config(config, attn_implementation=place.attn_implementation, trust_remote_code=False)
        except (ImportError, ValueError) as error:
            raise InvalidInputError(
                f"attn_implementation={place.attn_implementation!r} can't be used by the {role} {source}: {reason(error)}. Use "
                "sdpa, or eager."
            ) from error


def _move(model: Any, device: torch.device, source: str | PathLike[str], role: str) -> None:
    """Put a model on a device. Raises `InvalidInputError` if it doesn't fit."""
    if model.device == device:  # as for quantised models, which may not be moved
        return
    try:
        model.to(device)
    except torch.OutOfMemoryError as error:
        raise InvalidInputError(
            f"The {role} {source} doesn't fit on {device}. Give another device (device='cpu'), a dtype that takes less, or "
            "device_map='auto'."
        ) from error


def target_model(source: Any, place: Placement = DEFAULT) -> Target:
    """Load a target. Raises `UnsupportedModelError`, `UnsupportedTokenizerError` or `InvalidInputError` for unfit sources."""
    return Target(*_loaded(source, "target", place, None))


def draft_model(source: Any, place: Placement = DEFAULT, beside: torch.device | None = None) -> DraftModel:
    """Load a draft model. Errors are those of `target_model`."""
    model, vocabulary = _loaded(source, "draft", place, beside)
    _ = vocabulary.encoder  # fails here, and not in the first call
    with reading(vocabulary.tokenizer):
        return DraftModel(model, vocabulary, tuple(special_ids(vocabulary.tokenizer)[0]))


def _loaded(source: Any, role: str, place: Placement, beside: torch.device | None) -> tuple[PreTrainedModel, Vocabulary]:
    model, tokenizer = load(source, role, place, beside)
    check_rolls_back(model, role)
    view = token_bytes(tokenizer)
    _check_sizes(model, view, role)
    if role == "target":
        check_rows(model, role)
    check_continues(model, role)
    traits(model)  # tried here, and not in the first call
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


_TRUST = "If you trust it, load it with transformers and pass the pair (model, tokenizer) as {role}."
_MEND = "Download or save it again, or load it with transformers and pass the pair (model, tokenizer) as {role}."


@contextmanager
def _loading(source: str | PathLike[str], role: str) -> Iterator[None]:
    """Turns errors of transformers, safetensors and the network in the block into errors of xtok."""
    try:
        yield
    except XTokError:
        raise
    except OSError as error:
        if Path(source).exists():
            fault = f"can't be loaded: {reason(error)}. {_MEND.format(role=role)}"
        else:
            fault = (
                f"is neither a local folder nor available from the Hub: {reason(error)}. Check the name and the connection, "
                "or pass the path of a saved model."
            )
        raise InvalidInputError(f"The {role} {source} {fault}") from error
    except ImportError as error:
        module = _needed(error)
        if module is None:  # as transformers raises it, in words
            raise InvalidInputError(f"The {role} {source} can't be loaded: {reason(error)}.") from error
        remedy = install("ja") if module in ("fugashi", "unidic_lite") else f"pip install {module.replace('_', '-')}"
        message = f"The {role} {source} needs {module}, which isn't installed. Install it with: {remedy}"
        raise InvalidInputError(message) from error
    except Exception as error:  # broken files raise all kinds of errors
        remedy = (_TRUST if "trust_remote_code" in str(error) else _MEND).format(role=role)
        raise InvalidInputError(f"The {role} {source} can't be loaded: {reason(error)}. {remedy}") from error


def _check_path(source: str | PathLike[str], role: str) -> None:
    """Raises `InvalidInputError` for a name or a path at which there can't be a model."""
    if not str(source).strip():
        raise InvalidInputError(f"The {role} has an empty name. Pass a hub id, or the path of a saved model.")
    folder = Path(source)
    looks_like_a_path = (
        isinstance(source, PathLike)
        or is_gguf(source)
        or source.endswith(".safetensors")
        or source.startswith(("/", ".", "~"))
        or source.count("/") > 1
    )
    if looks_like_a_path and not folder.exists():
        raise InvalidInputError(f"The {role} {source} does not exist. Pass a hub id, or the path of a saved model.")
    if folder.is_file() and not is_gguf(source):
        raise InvalidInputError(
            f"The {role} {source} is a file. Pass the folder that it is in, or a .gguf file; for heads, HeadsDrafter(file)."
        )
    if folder.is_dir() and not (folder / CONFIG_NAME).is_file():
        raise InvalidInputError(
            f"The {role} {source} holds no model: there is no {CONFIG_NAME}. Pass the folder that a model was saved to."
        )


def _checked(source: str | PathLike[str], role: str) -> Any:
    """The configuration of a source. Refuses what transformers would refuse less clearly, or would load but shouldn't."""
    _check_path(source, role)
    if is_gguf(source):
        read_gguf(source, role)  # which says what is wrong with it
    where: Any = (Path(source).parent, Path(source).name) if is_gguf(source) else (source, None)
    config: Any = AutoConfig.from_pretrained(where[0], gguf_file=where[1], trust_remote_code=False)
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{source} is an encoder-decoder model. Use a decoder-only model as {role}.")
    return config


def _check_weights(source: str | PathLike[str], config: Any, role: str) -> None:
    """Raises `InvalidInputError` if a folder holds no weights, and what `_check_plain` raises."""
    named = getattr(config, "transformers_weights", None)
    names = [named] if named else [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME]
    first = next((file for name in names if (file := _file(source, name))), None)  # as transformers chooses it
    files = [first]
    if first is not None and first.suffix == ".json":
        shards = json.loads(first.read_text(encoding="utf-8"))["weight_map"].values()
        files = [_file(source, shard) for shard in sorted(set(shards))]
    if not any(files) and Path(source).is_dir() and not (Path(source) / "adapter_config.json").exists():
        raise InvalidInputError(
            f"The {role} {source} has no weights: neither {SAFE_WEIGHTS_NAME} nor {WEIGHTS_NAME}. "
            "Pass the folder that a model was saved to."
        )
    for file in files:
        if file is not None:
            _check_plain(file, source, role)


def _file(source: str | PathLike[str], name: str) -> Path | None:
    """A file of a source, fetched if it is on a hub; None if there is none."""
    try:
        found = cached_file(source, name)
    except OSError:
        return None
    return None if found is None else Path(found)


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


def _check_plain(file: Path, source: str | PathLike[str], role: str) -> None:
    """Raises `UnsupportedModelError` for weights that can't be read without running code, before anything else is read."""
    if file.suffix == ".safetensors":
        return
    try:
        torch.load(file, map_location="meta", mmap=is_zipfile(file), weights_only=True)
    except Exception as error:  # a file makes no sense in many ways, and each has its own
        needed = re.search(r"GLOBAL (\S+)", str(error))
        if needed is None:
            raise InvalidInputError(
                f"The {role} {source} can't be loaded: {file.name} doesn't hold weights in torch's format. "
                "Download or save it again."
            ) from error
        raise UnsupportedModelError(
            f"The {role} {source} needs code to open {file.name}, namely {needed[1]}, and xtok runs none. Save it in "
            f"safetensors, or, if you trust it, load it with transformers and pass the pair (model, tokenizer) as {role}."
        ) from error


def _needed(error: BaseException | None) -> str | None:
    while error is not None:
        if isinstance(error, ImportError) and error.name:
            return error.name
        error = error.__context__
    return None
