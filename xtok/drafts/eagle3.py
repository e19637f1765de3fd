"""EAGLE-3 heads in the format of speculators (github.com/vllm-project/speculators), as they are published for many models."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from xtok.drafts.sequential import StateHeads, built, checked_ids
from xtok.errors import InvalidInputError
from xtok.models.cache import device_of, ids_read, vocabulary_size

_WINDOW = 2048
"""How many of the latest positions the heads see: as many as such heads are trained with."""
_SETTINGS = {
    *("hidden_size", "intermediate_size", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters"),
}
"""The settings that are read from a configuration. Others could name code, such as kernels to download."""


class _Layer(LlamaDecoderLayer):  # type: ignore[no-untyped-call, unused-ignore]
    """A decoder layer that reads pairs of an id's embedding and a state, (…, 2 * size), and returns states, (…, size)."""

    def __init__(self, config: LlamaConfig, normed: bool) -> None:
        """`normed`: whether the attention's output is added to the state after its norm."""
        super().__init__(config, 0)
        attention: Any = self.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            own = getattr(attention, name)
            setattr(attention, name, nn.Linear(2 * config.hidden_size, own.out_features, bias=own.bias is not None))
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._normed = normed

    def forward(self, hidden_states: Tensor, **inputs: Any) -> Tensor:
        embedded, states = hidden_states.chunk(2, dim=-1)
        normed = self.hidden_norm(states)
        pairs = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        attended, _ = self.self_attn(hidden_states=pairs, **inputs)
        states = (normed if self._normed else states) + attended
        return states + self.mlp(self.post_attention_layernorm(states))  # type: ignore[no-any-return]


class Eagle3Heads(StateHeads):  # type: ignore[no-untyped-call, unused-ignore]
    """One decoder layer of EAGLE-3 (Li et al. 2025, arXiv 2503.01840). `ids`: the target's id of each of its own."""

    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig, normed: bool, embedding: nn.Module, ids: Tensor) -> None:
        super().__init__(config)
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.model = LlamaModel(config)
        self.model.layers[0] = _Layer(config, normed)
        self.model.embed_tokens = nn.Identity()
        self.model.norm = nn.Identity()  # the next step reads the state before the final norm
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, len(ids), bias=False)
        self._embedding = (embedding,)
        self.ids, self.window = ids, _WINDOW

    def get_input_embeddings(self) -> nn.Module:
        return self._embedding[0]

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def fused(self, hidden: Tensor) -> Tensor:
        return self.fc(hidden.to(self.fc.weight).flatten(-2))  # type: ignore[no-any-return]

    def pairs(self, ids: Tensor, states: Tensor) -> Tensor:
        return torch.cat([self._embedding[0](ids).to(states.dtype), states], dim=-1)

    def logits_after(self, states: Tensor) -> Tensor:
        return self.lm_head(self.norm(states))  # type: ignore[no-any-return]


def read_eagle3(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the tensors of a folder. Raises `ValueError` or `KeyError` unless it holds heads of one layer."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = config.get("speculators_model_type")
    layer = config["transformer_layer_config"] if kind == "eagle3" else {}
    if kind != "eagle3" or layer.get("model_type", "llama") != "llama" or layer.get("num_hidden_layers") != 1:
        found = f"speculators_model_type {kind!r}, {layer.get('num_hidden_layers')} layers of {layer.get('model_type')!r}"
        raise ValueError(f"its config.json says {found}; xtok reads 'eagle3' of one 'llama' layer")
    if config.get("norm_before_fc"):
        raise ValueError("its config.json has norm_before_fc, which xtok doesn't read")
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    layers = config.get("eagle_aux_hidden_state_layer_ids")
    if layers is not None and (not isinstance(layers, list) or len(layers) != 3):
        raise ValueError(f"its config.json has eagle_aux_hidden_state_layer_ids {layers!r}; there should be three")
    if tensors["fc.weight"].shape != (layer["hidden_size"], 3 * layer["hidden_size"]):
        raise ValueError(f"fc.weight has shape {tuple(tensors['fc.weight'].shape)}")
    return config, tensors


def is_eagle3(folder: Path) -> bool:
    """Whether a folder has heads in this format, by its config.json."""
    try:
        return "speculators_model_type" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def layers_of_eagle3(config: dict[str, Any], model: PreTrainedModel) -> tuple[int, ...]:
    """After which layers of a target hidden states are read."""
    count = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    return tuple(config.get("eagle_aux_hidden_state_layer_ids") or (2, count // 2, max(0, count - 3)))


def check_eagle3(config: dict[str, Any], tensors: dict[str, Tensor], model: PreTrainedModel) -> None:
    """Raises `InvalidInputError` unless the heads were made for a target of this architecture, hidden size and vocabulary."""
    own = model.config.get_text_config(decoder=True)
    classes = ((config.get("speculators_config") or {}).get("verifier") or {}).get("architectures") or [type(model).__name__]
    size = config.get("target_hidden_size") or config["transformer_layer_config"]["hidden_size"]
    facts = {
        "class": (classes[0], type(model).__name__),
        "hidden size": (size, own.hidden_size),
        "vocabulary": (len(tensors["t2d"]) if "t2d" in tensors else vocabulary_size(model), vocabulary_size(model)),
    }
    for name, (wanted, found) in facts.items():
        if wanted != found:
            raise InvalidInputError(
                f"These EAGLE-3 heads are for a target whose {name} is {wanted}; this one's is {found}. Use heads made for it, "
                "or train some with: xtok train-heads"
            )


def load_eagle3(config: dict[str, Any], tensors: dict[str, Tensor], model: PreTrainedModel) -> Eagle3Heads:
    """Heads for a target, on its device and in its dtype."""
    weights = {name: one for name, one in tensors.items() if name.startswith(("fc.", "norm.", "lm_head."))}
    weights |= {f"model.{name}": one for name, one in tensors.items() if name.startswith("layers.")}
    ids = torch.arange(len(tensors["lm_head.weight"]), dtype=torch.int64, device="cpu")
    ids = checked_ids(ids + tensors["d2t"] if "d2t" in tensors else ids, model)
    embedding: Any = model.get_input_embeddings()
    if "embed_tokens.weight" in tensors:
        own = tensors["embed_tokens.weight"].to(device_of(model), model.dtype)
        if own.shape != (ids_read(model), config["transformer_layer_config"]["hidden_size"]):
            raise ValueError(f"embed_tokens.weight has shape {tuple(own.shape)}")
        embedding = nn.Embedding(own.shape[0], own.shape[1], _weight=own, _freeze=True)
    layer = {name: value for name, value in config["transformer_layer_config"].items() if name in _SETTINGS}
    made_of = LlamaConfig(**layer, vocab_size=len(ids))
    normed = bool(config.get("norm_before_residual"))
    return built(lambda: Eagle3Heads(made_of, normed, embedding, ids), weights, model)
