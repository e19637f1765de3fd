"""EAGLE-3 heads in the format of speculators: what is read, what they compute, and that they change no text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu, softmax
from worlds import TREE, fitting, tokenizer

from xtok import HeadsDrafter, XTokAssisted
from xtok.errors import InvalidInputError

TOKENS = tokenizer("SentencePiece BPE")
TARGET = fitting(TOKENS, "Llama", 0)
SIZE, HEADS, GROUPS, INNER, IDS = 32, 4, 2, 48, 40
LAYERS = (0, 1, 2)
CONFIG: dict[str, Any] = {
    "speculators_model_type": "eagle3",
    "draft_vocab_size": IDS,
    "norm_before_residual": True,
    "eagle_aux_hidden_state_layer_ids": list(LAYERS),
    "speculators_config": {"verifier": {"name_or_path": "a", "architectures": ["LlamaForCausalLM"]}},
    "transformer_layer_config": {
        "model_type": "llama",
        "vocab_size": TARGET.config.vocab_size,
        "hidden_size": SIZE,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": SIZE // HEADS,
        "rms_norm_eps": 1e-5,
    },
}


def folder(path: Path, tensors: dict[str, Tensor | None] | None = None, **config: Any) -> Path:
    """Random weights in the format. `tensors`: others, None for one that is missing."""
    size, shape = SIZE // HEADS, torch.Generator().manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=shape) * 0.3

    kept = torch.randperm(TARGET.config.vocab_size, generator=shape)[:IDS].sort().values
    made: dict[str, Tensor | None] = {
        "fc.weight": random(SIZE, 3 * SIZE),
        "layers.0.self_attn.q_proj.weight": random(HEADS * size, 2 * SIZE),
        "layers.0.self_attn.k_proj.weight": random(GROUPS * size, 2 * SIZE),
        "layers.0.self_attn.v_proj.weight": random(GROUPS * size, 2 * SIZE),
        "layers.0.self_attn.o_proj.weight": random(SIZE, HEADS * size),
        "layers.0.mlp.gate_proj.weight": random(INNER, SIZE),
        "layers.0.mlp.up_proj.weight": random(INNER, SIZE),
        "layers.0.mlp.down_proj.weight": random(SIZE, INNER),
        **{
            f"layers.0.{name}.weight": 1 + random(SIZE)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
        "norm.weight": 1 + random(SIZE),
        "lm_head.weight": random(IDS, SIZE),
        "embed_tokens.weight": random(TARGET.config.vocab_size, SIZE),
        "d2t": kept - torch.arange(IDS),
        "t2d": torch.isin(torch.arange(TARGET.config.vocab_size), kept),
    }
    path.mkdir()
    save_file({name: one for name, one in (made | (tensors or {})).items() if one is not None}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG | config), encoding="utf-8")
    return path


def by_hand(weights: dict[str, Tensor], hidden: Tensor, ids: list[int], normed: bool) -> tuple[Tensor, Tensor]:
    """The slow oracle, by the paper and the format: logits after pairs, (ids, own ids), and states, (ids, size).

    `hidden`: (ids, 3 * size) of the target, or (ids, size) states in their place.
    """

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weights[name]

    def turned(x: Tensor) -> Tensor:
        """Rotary embeddings, (ids, heads, size)."""
        half = x.shape[-1] // 2
        angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(half) / half)
        cos, sin = angles.cos()[:, None].to(x), angles.sin()[:, None].to(x)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    states = hidden @ weights["fc.weight"].T if hidden.shape[1] == 3 * SIZE else hidden
    own = norm(states, "layers.0.hidden_norm.weight")
    pairs = torch.cat([norm(weights["embed_tokens.weight"][ids], "layers.0.input_layernorm.weight"), own], dim=-1)
    q, k, v = (
        (pairs @ weights[f"layers.0.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, SIZE // HEADS)) for name in "qkv"
    )
    q, k = turned(q), turned(k)
    k, v = (one.repeat_interleave(HEADS // GROUPS, dim=1) for one in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / (SIZE // HEADS) ** 0.5
    scores = scores.masked_fill(~torch.ones(len(ids), len(ids)).tril().bool(), -torch.inf)
    attended = torch.einsum("hij,jhd->ihd", softmax(scores, dim=-1), v).flatten(1)
    states = (own if normed else states) + attended @ weights["layers.0.self_attn.o_proj.weight"].T
    inner = norm(states, "layers.0.post_attention_layernorm.weight")
    gate, up = (inner @ weights[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    states = states + (silu(gate) * up) @ weights["layers.0.mlp.down_proj.weight"].T
    return norm(states, "norm.weight") @ weights["lm_head.weight"].T, states


@pytest.mark.parametrize(("normed", "embeds"), [(False, True), (True, False)])
def test_what_is_computed_is_what_the_format_says(tmp_path: Path, normed: bool, embeds: bool) -> None:
    """Also for a guess, which is read with the heads' own state."""
    target_own = TARGET.get_input_embeddings().weight.detach().float()
    file = folder(tmp_path / "h", {} if embeds else {"embed_tokens.weight": None}, norm_before_residual=normed)
    heads = HeadsDrafter(file).model_for(TARGET)
    weights = {
        name: one.to(TARGET.dtype) for name, one in load_file(file / "model.safetensors").items() if one.dtype.is_floating_point
    }
    weights.setdefault("embed_tokens.weight", target_own.to(TARGET.dtype))
    assert heads is not None
    ids, hidden = [5, 9, 7, 30], torch.randn(4, 3, SIZE, dtype=TARGET.dtype)
    with torch.no_grad():
        logits, states = by_hand(weights, hidden.flatten(1), ids, normed)
        fused = heads.fused(hidden)
        found = heads(torch.tensor([ids]), fused[None])
        assert torch.allclose(found.logits[0], logits, atol=1e-4) and torch.allclose(
            found.hidden_states[0][0], states, atol=1e-4
        )
        guessed = by_hand(weights, torch.cat([fused, states[-1:]]), [*ids, 11], normed)[0]
        again = heads(torch.tensor([[*ids, 11]]), torch.cat([fused, states[-1:]])[None]).logits[0]
        assert torch.allclose(again, guessed, atol=1e-4)
    assert heads.ids.tolist() == load_file(file / "model.safetensors")["t2d"].nonzero()[:, 0].tolist()


def test_what_is_generated_does_not_depend_on_them(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 16, "do_sample": True, "seed": 3}
    xt = XTokAssisted((TARGET, TOKENS), [HeadsDrafter(folder(tmp_path / "h"))], budget=TREE)
    generation = xt.generate("吾輩は", **asked)
    assert generation.token_ids == XTokAssisted((TARGET, TOKENS)).generate("吾輩は", **asked).token_ids
    assert generation.stats.draft_error is None and generation.stats.proposed


@pytest.mark.parametrize(
    ("changed", "reported"),
    [
        ({"speculators_model_type": "hydra"}, "speculators_model_type 'hydra'"),
        ({"transformer_layer_config": {**CONFIG["transformer_layer_config"], "num_hidden_layers": 2}}, "2 layers of 'llama'"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"speculators_config": {"verifier": {"architectures": ["QwenForCausalLM"]}}}, "class is QwenForCausalLM"),
        ({"target_hidden_size": 64}, "hidden size is 64"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(tmp_path: Path, changed: dict[str, Any], reported: str) -> None:
    with pytest.raises(InvalidInputError, match=reported):
        XTokAssisted((TARGET, TOKENS), HeadsDrafter(folder(tmp_path / "h", **changed)))


def test_heads_for_another_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="vocabulary is 7"):
        XTokAssisted((TARGET, TOKENS), HeadsDrafter(folder(tmp_path / "h", {"t2d": torch.ones(7, dtype=torch.bool)})))
    with pytest.raises(InvalidInputError, match="holds no heads"):
        HeadsDrafter(folder(tmp_path / "i", {"fc.weight": None}))
