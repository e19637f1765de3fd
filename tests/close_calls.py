"""Targets of whose picks many are close calls, in each precision, to be forwarded in fixed shapes."""

from functools import cache
from typing import Any

import torch
import transformers
from front_door import TOKENS
from transformers import AutoModelForCausalLM, PreTrainedModel
from worlds import quick

LENGTH = 12 if quick() else 24
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": LENGTH, "pad_token_id": 0, "eos_token_id": None}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "penalty": GREEDY | {"repetition_penalty": 1.2},
    "sampled": GREEDY | {"do_sample": True, "top_k": 0, "seed": 5},
    "cut": GREEDY | {"do_sample": True, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "temperature": 0.9, "seed": 5},
}
SIZE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
ROWS = {"num_key_value_heads": 2, "max_position_embeddings": 4096}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": SIZE | ROWS,
    "GPTNeoX": SIZE | {"max_position_embeddings": 4096},
    "Qwen2": SIZE | ROWS,
    "Qwen3": SIZE | ROWS | {"head_dim": 16},
    "GPT2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 4096},
    "Gemma2": SIZE | ROWS | {"head_dim": 16, "sliding_window": 300, "query_pre_attn_scalar": 16},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HALF = "bfloat16"


@cache
def target(architecture: str, dtype: str) -> PreTrainedModel:
    """A tiny model whose picks vary with the context, and are closer calls than those of other tests."""
    controls = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False}
    torch.manual_seed(1)
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=len(TOKENS) + 5, **controls, **ARCHITECTURES[architecture]
    )
    made = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in made.named_parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.7 if "embed" in name or "wte" in name else 0.12)
    return made.to(DTYPES[dtype])
