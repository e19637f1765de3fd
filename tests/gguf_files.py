"""Small GGUF files, written as llama.cpp's converters write them."""

import json
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from worlds import fitting
from worlds import tokenizer as made

CONTROL, NORMAL, BYTE = 3, 1, 6
"""Types of tokens."""


def write(path: Path, model: Any, tokenizer: Any, *, weights: str = "F32", **more: Any) -> Path:
    """A Llama in a file, with its byte-level or SentencePiece BPE unless that is None. `more`: metadata, such as `pre`."""
    library = import_module("gguf")
    writer, config = library.GGUFWriter(str(path), "llama"), model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer, config.vocab_size, **more)
    names = library.TensorNameMap(library.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.float().state_dict().items():
        stem, values = name.removesuffix(".weight"), weight.numpy().astype(np.float32)
        if stem.endswith(("q_proj", "k_proj")):  # llama.cpp turns pairs of neighbours where transformers turns halves
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        fits = values.ndim == 2 and (weights != "Q8_0" or values.shape[1] % 32 == 0)
        kind = library.GGMLQuantizationType[weights if fits else "F32"]
        writer.add_tensor(f"{names.get_name(stem)}.weight", library.quants.quantize(values, kind), raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


def _add_tokenizer(writer: Any, tokenizer: Any, size: int, pre: str | None = "gpt-2", **more: Any) -> None:
    state = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    pieces = sorted(state["vocab"], key=state["vocab"].__getitem__)
    pieces += [f"[PAD{i}]" for i in range(len(pieces), size)]
    fallback = state["byte_fallback"]
    types = [CONTROL if i < 3 else BYTE if piece.startswith("<0x") else NORMAL for i, piece in enumerate(pieces)]
    writer.add_tokenizer_model(more.pop("family", "llama" if fallback else "gpt2"))
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(pieces)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in state["merges"]])
    for name, token in (("unk", 0), ("bos", 1), ("eos", 2)):
        getattr(writer, f"add_{name}_token_id")(token)
    if (template := more.pop("template", None)) is not None:
        writer.add_chat_template(template)
    for key, value in more.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(key.replace("__", "."), value)


TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
TOKENS = {kind: made(kind) for kind in ("byte-level BPE", "SentencePiece BPE")}
MODELS = {kind: deepcopy(fitting(tokens, "Llama", 3)).float() for kind, tokens in TOKENS.items()}
