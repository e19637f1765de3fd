"""Models in GGUF files, the format of llama.cpp. transformers reads them; what it would read wrong is fixed or refused here.

llama.cpp's src/llama-vocab.cpp defines what the values of `tokenizer.ggml.pre` mean.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any, NamedTuple

import torch
import transformers
from packaging.version import Version
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from xtok.errors import InvalidInputError, install

_LEAST = Version("5.19")
_PASS = "Or load it with transformers, check its tokenizer, and pass the pair (model, tokenizer) as {role}."
_WORDS = frozenset({"gpt-2", "phi-2", "mpt", "olmo"})
"""Values of `pre` for GPT-2's own pattern, which the tokenizer has if transformers knows no other."""
_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
"""Values of `pre` for GPT-2's own pattern after splitting off every digit. transformers' reader doesn't split off digits."""
_WHOLE = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "midm-2.0", "lfm2", "tekken"})
"""Values of `pre` for vocabularies whose words are taken whole even where no merges lead to them, and whose texts begin with
BOS unless the file says otherwise. transformers' reader does neither.
"""
_ENDS = ("eos", "eot", "eom")
"""Tokens that end a text: of the text, of a turn, of a message."""
_RESCALED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that change rotary frequencies, and that transformers' reader leaves out."""


class GGUF(NamedTuple):
    """A file and its header. `dtype`: that of its weights; bfloat16 if they are quantised."""

    file: Path
    metadata: dict[str, Any]
    dtype: torch.dtype


def is_gguf(source: object) -> bool:
    return isinstance(source, (str, PathLike)) and str(source).lower().endswith(".gguf")


def check_installed() -> None:
    """Raises `InvalidInputError` if a package for reading GGUF files is missing or too old."""
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise InvalidInputError(
            f"GGUF files need {' and '.join(missing)}, which isn't installed. Install with: {install('gguf')}"
        )
    if Version(transformers.__version__) < _LEAST:  # 5.17 has a reader, but of fewer kinds of weights
        raise InvalidInputError(
            f"GGUF files need transformers {_LEAST} or later; {transformers.__version__} is installed. Install it with: "
            f"pip install 'transformers>={_LEAST}'"
        )


def read_gguf(source: str | PathLike[str], role: str) -> GGUF:
    """The header of a file. Raises `InvalidInputError` for a file that isn't whole or that transformers would read wrong, and
    if a package is missing.
    """
    check_installed()
    from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata

    file = Path(source)
    again = f"The {role} {source} is damaged or isn't a GGUF file"
    try:
        metadata, names = read_gguf_metadata(str(file))
        header = GgufHeader.from_file(str(file))
    except (struct.error, UnicodeDecodeError, MemoryError, OverflowError, IndexError) as error:
        raise InvalidInputError(f"{again}: its header can't be read. Download it again.") from error
    end = max((header.data_start + one.offset + one.nbytes for one in header.tensors), default=0)
    if not end or file.stat().st_size < end:
        raise InvalidInputError(
            f"{again}: it has {file.stat().st_size:,} bytes, and its tensors end at {end:,}. Download it again."
        )
    scaled = metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    if scaled != "none" or not set(names).isdisjoint(_RESCALED):
        raise InvalidInputError(
            f"The {role} {source} scales its rotary positions ({scaled}), and transformers doesn't read that from GGUF files. "
            f"Use the same model in safetensors as {role}."
        )
    return GGUF(file, metadata, header.dtype or torch.bfloat16)


_PATCHED = Lock()


@contextmanager
def read_once() -> Iterator[None]:
    """Within this block, transformers parses the header of a file, vocabulary included, and maps the names of its tensors once.
    By itself it parses the former twice, each token of the vocabulary by a dozen views, and maps the latter for each
    module: 16 of 23 s for SmolLM2 135M.
    """
    check_installed()
    import gguf
    import numpy as np
    from transformers import modeling_gguf_pytorch_utils

    class Reader(gguf.GGUFReader):
        def _get(self, *args: Any, **kwargs: Any) -> Any:
            self.data: Any = self.data.view(np.ndarray)  # whose slices are faster than those of a memory map
            return super()._get(*args, **kwargs)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count, at = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64), orig_offs + 12
            parts, item = [kind, count], gguf.GGUFValueType(kind[0])
            if item == gguf.GGUFValueType.STRING:
                for _ in range(int(count[0])):
                    end = at + 8 + int.from_bytes(self.data[at : at + 8].tobytes(), "little")
                    parts += [self.data[at : at + 8], self.data[at + 8 : end]]
                    at = end
                places = range(3, len(parts), 2)  # each after its length
            elif item in self.gguf_scalar_to_np:
                values = self._get(at, self.gguf_scalar_to_np[item], int(count[0]))
                parts.extend(values.reshape(-1, 1))
                at += values.nbytes
                places = range(2, len(parts))
            else:
                return super()._get_field_parts(orig_offs, raw_type)
            kinds = [gguf.GGUFValueType.ARRAY, *([item] if places else ())]
            return at - orig_offs, parts, list(places), kinds

    module: Any = gguf
    reading: Any = modeling_gguf_pytorch_utils
    with _PATCHED:
        before = module.GGUFReader, module.get_tensor_name_map, reading.tqdm
        module.GGUFReader, module.get_tensor_name_map = cache(Reader), cache(before[1])
        reading.tqdm = partial(before[2], disable=None)  # no bar in a log
        try:
            yield
        finally:
            module.GGUFReader, module.get_tensor_name_map, reading.tqdm = before


def load_gguf(read: GGUF, config: Any, **where: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model of a file, with dequantised weights, and transformers' loading report. `where`: `dtype` and `device_map`."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import GgufConfig

    with _alone(read.file) as folder:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=read.file.name,
            config=config,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
            weights_only=True,
            trust_remote_code=False,
            **where,
        )
    model, found = loaded
    vars(model.config).pop("quantization_config", None)  # the weights are plain now, and can be saved
    model.hf_quantizer = None
    model.name_or_path = model.config.name_or_path = str(read.file)
    ends = [read.metadata[key] for one in _ENDS if (key := f"tokenizer.ggml.{one}_token_id") in read.metadata]
    if len(set(ends)) > 1:  # of which transformers reads the first
        model.config.eos_token_id = model.generation_config.eos_token_id = list(dict.fromkeys(ends))
    return model, found


@contextmanager
def _alone(file: Path) -> Iterator[Path]:
    """A folder with that file alone. transformers would read a tokenizer and a generation config that lie beside it."""
    with TemporaryDirectory(prefix="xtok-") as folder:
        try:
            (Path(folder) / file.name).symlink_to(file.resolve())
        except OSError:  # as on Windows, where not every user may make links
            folder = str(file.parent)
        yield Path(folder)


def tokenizer_of(read: GGUF, role: str) -> Any:
    """The tokenizer of a file, which reads texts as llama.cpp does. Raises `InvalidInputError` if none can be made of it."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    kind, pre = (read.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    known = _WORDS | _DIGITS | GGUF_PRE_TOKENIZER_SPLITS.keys()
    if kind not in ("gpt2", "llama") or (kind == "gpt2" and pre not in known):
        named = f"tokenizer.ggml.pre={pre!r}" if kind == "gpt2" else f"tokenizer.ggml.model={kind!r}"
        raise InvalidInputError(
            f"The {role} {read.file} has a tokenizer with {named}, which isn't read right from GGUF files. Supported are "
            f"SentencePiece and {', '.join(sorted(known))}. Use the model in safetensors. {_PASS.format(role=role)}"
        )
    settings: dict[str, Any] = {"add_bos_token": True} if kind == "gpt2" and pre in _WHOLE else {}
    with _alone(read.file) as folder:
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(
            folder, gguf_file=read.file.name, trust_remote_code=False, **settings
        )
    tokenizer.name_or_path = str(read.file)
    if kind == "gpt2":
        _cut_as_trained(tokenizer.backend_tokenizer, pre)
    elif tokenizer.backend_tokenizer.normalizer is None:  # Phi 3's and Gemma's are made right
        _prefix_as_sentencepiece(tokenizer.backend_tokenizer, read.metadata.get("tokenizer.ggml.add_space_prefix", True))
    return tokenizer


def _cut_as_trained(tokenizer: Tokenizer, pre: str | None) -> None:
    """Make a byte-level BPE cut a text as `pre` says, where transformers doesn't."""
    model: Any = tokenizer.model
    if pre in _WHOLE:
        model.ignore_merges = True
    if pre in _DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])


def _prefix_as_sentencepiece(tokenizer: Tokenizer, prefix: bool) -> None:
    """Put a space before a text if the file says so, also before one that begins with a space, where transformers puts none."""
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    tokenizer.pre_tokenizer = None
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
