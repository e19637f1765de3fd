"""Tiny models of all causal architectures that transformers knows, from their configurations."""

import inspect
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING as CONFIGURATIONS

NAMES_OF_SIZES = {
    0: "num_kv_shared_layers",
    1: "n_shared_experts n_group topk_group first_k_dense_replace",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers depth "
    "num_attention_heads num_key_value_heads n_head n_heads num_heads decoder_attention_heads "
    "encoder_attention_heads mamba_n_heads mamba_n_groups linear_num_key_heads linear_num_value_heads num_experts_per_tok",
    4: "num_experts num_local_experts n_routed_experts",
    8: "qk_rope_head_dim qk_nope_head_dim rotary_dim hidden_size_per_layer_input linear_key_head_dim linear_value_head_dim "
    "mamba_d_state state_size ssm_state_size index_head_dim index_topk linear_num_heads output_channels num_blocks chunk_size "
    "mamba_chunk_size patch_size shape_vocab_size pronunciation_vocab_size",
    9: "sliding_window",
    16: "index_n_heads moe_intermediate_size shared_expert_intermediate_size head_dim v_head_dim d_kv q_lora_rank "
    "kv_lora_rank linear_head_dim pronunciation_embed_dim shape_embed_dim mlp_dim num_position_embeddings "
    "encoder_hash_byte_group_vocab",
    32: "hidden_size n_embd d_model embed_dim word_embed_proj_dim embedding_size adapter_in_dim adapter_input_size "
    "adapter_out_dim image_size",
    48: "intermediate_size ffn_dim d_ff ffn_hidden_size hidden_dim decoder_ffn_dim encoder_ffn_dim",
    256: "max_position_embeddings n_positions max_seq_len",
}
SIZES = {name: size for size, names in NAMES_OF_SIZES.items() for name in names.split()}
SWITCHES = {"is_decoder": True, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TINY: dict[str, Any] = SIZES | SWITCHES
"""What the sizes of models are called, and how small they can be."""
UNSUITED = (), ("sliding_window",), ("head_dim",), ("head_dim", "sliding_window"), ("num_key_value_heads",), ("layer_types",)
"""Sizes that some architectures derive from others, left out one after the other."""
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OWN: dict[str, dict[str, Any]] = {
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": ROPE}},
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]], "window_size": 9},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Dots3NoteVisionConfig": {"mlp_layer_types": ["dense", "dense"]},
    "Dots3NoteTextConfig": {"swa_num_attention_heads": 2, "swa_num_key_value_heads": 2},
    "BambaConfig": {"attn_layer_indices": [1]},
    "GraniteMoeHybridConfig": {"layer_types": ["linear_attention", "full_attention"]},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Qwen4ExpTextConfig": {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8}
    | {"indexer_compress_ratio": 1, "ngram_vocab_size_base": 64, "split_ngram_parts": 1},
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "ReformerConfig": {"axial_pos_embds": False},
    "CodeGenConfig": {"n_head": 4, "num_attention_heads": 4},
    "LongcatFlashConfig": {"head_dim": 8},
    "Mamba2Config": {"head_dim": 32, "n_groups": 1},
    "XmodConfig": {"default_language": "en_XX"},
    "ZayaConfig": {"num_experts_per_tok": 1},
}
"""What single architectures need beside that."""


def _tiny_config(kind: Any, vocabulary: int, without: tuple[str, ...]) -> Any:
    """A configuration with everything small that has a known name, in the configurations within it, too."""
    sizes = TINY | {"vocab_size": vocabulary, "vocab_size_per_layer_input": vocabulary}
    kinds = _kinds_of_layers(kind)
    sizes |= {"layer_types": kinds, "num_hidden_layers": len(kinds)} if len(kinds) > 1 else {}
    taken = set(inspect.signature(kind.__init__).parameters) | set(getattr(kind, "attribute_map", {}))
    given = {name: size for name, size in sizes.items() if name in taken and name not in without}
    inner = {name: _tiny_config(part, vocabulary, without) for name, part in _parts(kind).items() if name in taken}
    return kind(**{**given, **inner, **OWN.get(kind.__name__, {})})


def _kinds_of_layers(kind: Any) -> list[str]:
    """The kinds of layers that an architecture mixes by default."""
    try:
        return list(dict.fromkeys(getattr(kind(), "layer_types", None) or ()))
    except Exception:  # some are made of other configurations only
        return []


def _parts(kind: Any) -> dict[str, Any]:
    """The kinds of configurations within a kind."""
    parts = getattr(kind, "sub_configs_defaults", None) or getattr(kind, "sub_configs", {})
    named = {name: getattr(part, "model_type", None) for name, part in parts.items()}
    found = {name: part if inspect.isclass(part) else CONFIGURATIONS[named[name]] for name, part in parts.items()}
    return {name: part for name, part in found.items() if part.__name__ != "AutoConfig"}


def _check_small(config: Any) -> None:
    """Raises `ValueError` for a model with parts whose sizes aren't among those above."""
    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if parameters > 10**8:
        raise ValueError(f"the tiniest has {parameters:,} parameters")


def tiny(name: str, vocabulary: int, attention: str | None = None) -> PreTrainedModel:
    """A tiny random model of an architecture, sharpened so that its picks are seldom close calls.

    Raises what transformers raises where it can't be built."""
    raised = None
    for without in UNSUITED:
        try:
            config = _tiny_config(CONFIGURATIONS[name], vocabulary, without)
            _check_small(config)
            torch.manual_seed(0)
            made = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        except Exception as error:
            raised = raised or error
            continue
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.data.normal_(0, 0.3)
        return made.eval()
    assert raised
    raise raised


RECURRENT = tuple(name for name in ("falcon_h1", "lfm3", "olmo_hybrid", "qwen3_next") if name in CONFIGURATIONS)
"""State spaces beside attention in one layer; convolutions with full and sliding attention; two kinds of delta rules."""
