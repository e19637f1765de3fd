"""Sequential heads: they change no text, and what they read is what the target picked, whatever rounds came before."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import heads_file
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from worlds import TREE, fitting, tokenizer, whole_generations

from xtok import Budget, HeadsDrafter, XTokAssisted
from xtok.drafts.base import Context, Request
from xtok.drafts.heads import save_heads
from xtok.drafts.sequential import SequentialDrafter, SequentialHeads
from xtok.drafts.tree import Tree
from xtok.errors import InvalidInputError
from xtok.models.runner import renewed

TOKENS = tokenizer("SentencePiece BPE")
TARGET = fitting(TOKENS, "Llama", 0)
LAYERS = (0, 1, -1)


def random_heads(window: int = 8) -> Path:
    return heads_file(("Llama", "SentencePiece BPE", 0), torch.float64, "sequential", window)


@whole_generations
@given(exponent=st.floats(-6, 3), seed=st.integers(0, 9))
def test_files_hold_each_weight_to_half_a_step_of_its_row(
    tmp_path_factory: pytest.TempPathFactory, exponent: float, seed: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "kept.safetensors"
    made = HeadsDrafter(random_heads()).model_for(TARGET)
    assert made is not None
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn_like(weight) * 10**exponent)
    save_heads(made, HeadsDrafter(random_heads()).trained, file)
    kept = HeadsDrafter(file).model_for(TARGET)
    assert kept is not None
    for weight, found in zip(made.parameters(), kept.parameters(), strict=True):
        step = weight.abs().amax(dim=-1, keepdim=True) / 127 if weight.dim() > 1 else 0 * weight
        rounding = weight.abs().amax() / 2 ** (11 if weight.dim() > 1 else 24) + 2**-24  # matrices are loaded in float16
        assert ((weight - found).abs() <= step / 2 + rounding).all()


@torch.no_grad()
def from_scratch(heads: SequentialHeads, ids: list[int], start: int) -> torch.Tensor:
    """The slow oracle: the logits after the pairs of ids from `start` on, by one forward pass of each model."""
    output = TARGET(input_ids=torch.tensor([ids[:-1]]), output_hidden_states=True)
    hidden = torch.stack([output.hidden_states[layer] for layer in LAYERS], dim=2)[:, start - 1 :]
    states, _ = heads.step(torch.tensor([ids[start:]]), heads.fused(hidden), use_cache=False)
    return heads.logits_of(heads.out(states[0, -1:]))


@whole_generations
@given(window=st.sampled_from([6, 9, 64]), skipped=st.sets(st.integers(0, 16)), known=st.integers(0, 4), stable=st.booleans())
@example(window=6, skipped=set(), known=0, stable=False)
@example(window=64, skipped={0, 1, 5}, known=3, stable=True)
@example(window=6, skipped={*range(11)}, known=3, stable=False)
def test_guesses_follow_from_all_that_was_picked(window: int, skipped: set[int], known: int, stable: bool) -> None:
    """Also if the drafter isn't asked in some rounds, another draft is right, or a pick is left to the next round."""
    start = list(TOKENS("吾輩は").input_ids)
    asked: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": None, "do_sample": False}
    right = XTokAssisted((TARGET, TOKENS)).generate("吾輩は", **asked).token_ids
    errors, rounds = list[float](), 0

    class Watched(SequentialDrafter):
        def guess(self, context: Context, budget: Budget) -> Any:
            nonlocal rounds
            rounds += 1
            return Tree() if rounds in skipped else (yield from super().guess(context, budget))

        def read(self, context: Context, front: Any) -> Any:
            logits = yield from super().read(context, front)
            if not front[0].ids:
                errors.append(float((logits - from_scratch(self.heads, [*context.ids], self._start)).abs().max()))
            return logits

    class WatchedHeads(HeadsDrafter):
        def start(self, request: Request) -> Any:
            return Watched(**{name: value for name, value in vars(super().start(request)).items() if name[0] != "_"})

    class Knows:
        def propose(self, context: Context, budget: Budget) -> Tree:
            """What is right, as the less likely branch."""
            ids = tuple(right[len(context.ids) - len(start) :][:known])
            return Tree((0, *ids), (-1, -1, *range(1, known))[: 1 + len(ids)], probabilities=(0.6, *[0.3] * len(ids)))

    heads = WatchedHeads(random_heads(window))
    xt = XTokAssisted((TARGET, TOKENS), [heads, Knows()], budget=TREE, stable=stable)
    generation = xt.generate("吾輩は", **asked)
    assert generation.token_ids == right and generation.stats.draft_error is None
    assert rounds > 0 and len(errors) == len({*range(1, rounds + 1)} - skipped)
    assert max(errors, default=0.0) < 1e-3


WILD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a layer that the target lacks": ({}, {"layers": [0, 1, 99]}),
    "layers that are no numbers": ({}, {"layers": ["a", "b", "c"]}),
    "a window without positions": ({}, {"window": 0}),
    "a window that is no number": ({}, {"window": "abc"}),
    "an id beyond the vocabulary": ({"ids": torch.tensor([10**6, *range(39)])}, {}),
    "an id twice": ({"ids": torch.tensor([0, *range(39)])}, {}),
    "ids that are no whole numbers": ({"ids": torch.ones(40)}, {}),
    "a matrix that is missing": ({"model.layers.0.self_attn.q_proj.weight": None}, {}),
    "a matrix that claims much": ({"model.layers.0.mlp.gate_proj.weight": torch.zeros(600_000, 0)}, {}),
    "a vector for a matrix": ({"fuse.weight": torch.zeros(32)}, {}),
    "a scale that is missing": ({"fuse.weight.scale": None}, {}),
    "a scale for other rows": ({"fuse.weight.scale": torch.ones(1)}, {}),
    "a scale that is no number": ({"fuse.weight.scale": torch.ones(32, dtype=torch.complex64)}, {}),
}


@pytest.mark.parametrize("what", WILD)
def test_wild_files_are_refused_before_any_text(tmp_path: Path, what: str) -> None:
    """Found here: some made the target's own forward pass raise, or took memory by what they claimed."""
    changed, claimed = WILD[what]
    with safe_open(random_heads(), framework="pt") as kept:
        known = json.loads(kept.metadata()["xtok"]) | claimed
    tensors = {name: one for name, one in (load_file(random_heads()) | changed).items() if one is not None}
    save_file(tensors, tmp_path / "wild", metadata={"xtok": json.dumps(known)})
    with pytest.raises(InvalidInputError, match="holds no heads"):
        XTokAssisted((TARGET, TOKENS), HeadsDrafter(tmp_path / "wild"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_without_hidden_states_is_refused_by_name(dtype: torch.dtype) -> None:
    target = deepcopy(TARGET).to(dtype)
    forward = target.forward
    target.forward = lambda *args, **kwargs: replace(forward(*args, **kwargs), hidden_states=None)  # type: ignore[method-assign]
    with pytest.raises(InvalidInputError, match="doesn't return one hidden state for each id, which heads guess from"):
        XTokAssisted((target, TOKENS), HeadsDrafter(random_heads()))


def test_heads_follow_a_target_that_changes() -> None:
    """Found here: rows of the output embedding were copied once and for all."""
    target = deepcopy(TARGET)
    draft, head = HeadsDrafter(random_heads()), target.get_output_embeddings().weight
    before = draft.model_for(target)
    assert draft.model_for(target) is before and before is not None
    with torch.no_grad():
        head.mul_(2)
    renewed(target)
    after = draft.model_for(target)
    hidden = torch.randn(1, 32, dtype=target.dtype)
    assert after is not None and torch.allclose(after.logits_of(hidden), 2 * before.logits_of(hidden))  # type: ignore[attr-defined]
