"""Heads: what they learn, which targets they take, and that they change no text."""

import json
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from commands import run
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import DynamicCache
from worlds import TREE, deep, fitting, rising, tokenizer

from xtok import Budget, HeadsDrafter, XTokAssisted, pair, train_heads
from xtok.align.tokenbytes import token_bytes
from xtok.drafts.heads import described, save_heads
from xtok.drafts.medusa import MedusaHeads
from xtok.drafts.sequential import SequentialHeads, sequential_config
from xtok.errors import InvalidInputError
from xtok.models.cache import CACHE
from xtok.models.load import load
from xtok.models.timing import Span
from xtok.tune.examples import IGNORED, Example, batch
from xtok.tune.heads import TrainedHeads, _guesses, _hidden, _untrained, accuracies, loss_of

TOKENS = tokenizer("SentencePiece BPE")
TARGET = fitting(TOKENS, "Llama", 0)
PROMPTS = pair.prompts()[:9]
EPOCHS = 6
SETTINGS: dict[str, Any] = {"hours": 1e-4, "steps": 2, "size": 64, "vocabulary": 1024, "starts": 3, "max_new_tokens": 16}


def example(before: Any, ids: list[int]) -> Example:
    """A text whose distributions are sure."""
    whole, labels = (torch.tensor([*first, *ids]) for first in (before, [IGNORED] * len(before)))
    likeliest = whole[:, None].clone()
    return Example(whole, labels, likeliest, (labels != IGNORED)[:, None].float())


def trained(out: Path, target: Path = pair.TARGET, **changed: Any) -> TrainedHeads:
    return train_heads(target, out, PROMPTS, **{**SETTINGS, **changed})


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first four blocks of the target, which take a third of its time."""
    folder = tmp_path_factory.mktemp("targets") / "shallow"
    copytree(pair.TARGET, folder)
    model: Any = load(pair.TARGET, "target")[0]
    del model.model.layers[4:]
    model.config.num_hidden_layers = 4
    model.save_pretrained(folder)
    return folder


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["sequential", "medusa"])
def test_training_teaches_heads_what_the_target_writes(
    kind: str, tmp_path: Path, shallow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much as in 14 s of a quiet machine, also on a busy one."""
    monkeypatch.setattr("xtok.tune.writing.timed", lambda: nullcontext(Span(2.0)))
    monkeypatch.setattr("xtok.tune.heads.planned", lambda *_: (EPOCHS, False))
    taught = trained(tmp_path / "heads", shallow, kind=kind, hours=0.004, max_new_tokens=48)
    assert taught.accuracy[0][0] > 0.3  # of 8,000 ids
    assert taught.epochs[-1] >= taught.epochs[0]
    assert taught.after > 1 and set(taught.ways) == {"greedy", "greedy, repetition penalty 1.2", "sampled"}
    assert all(0 <= share <= 1 for ranks in taught.accuracy for share in ranks)
    assert HeadsDrafter(taught.file).trained.accuracy == taught.accuracy


LAYERS = (0, 1, -1)
ROWS = [example(range(4), [5 + (i + shift) % 7 for i in range(4, 20)]) for shift in range(7)]


def untrained(kind: str) -> Any:
    if kind == "medusa":
        return MedusaHeads(2, 32).double()
    config = sequential_config(20, 64, 64, 1, 1, 64)
    torch.manual_seed(0)
    heads = SequentialHeads(config, 3, TARGET.get_input_embeddings(), TARGET.get_output_embeddings(), torch.arange(20))
    return heads.double()


@pytest.mark.parametrize("kind", ["sequential", "medusa"])
def test_the_loss_falls_as_heads_learn(kind: str) -> None:
    heads = untrained(kind)
    learning = torch.optim.Adam(heads.parameters(), 0.05)
    losses = []
    for _ in range(40):
        losses.append(loss_of(TARGET, heads, batch(ROWS), LAYERS, 2))
        learning.zero_grad()
        losses[-1].backward()
        learning.step()
    assert losses[-1] < 0.7 * losses[0]
    assert all(weight.grad is None for weight in TARGET.parameters())
    assert accuracies(TARGET, heads, ROWS, LAYERS, 2)[1][0] > 0.7


def test_what_is_learnt_is_what_is_guessed_later() -> None:
    """Each step of training gives the logits that guessing gives after as many guessed ids: one forward pass after another."""
    heads, inputs = untrained("sequential"), batch(ROWS[:2])
    hidden = _hidden(TARGET, inputs, LAYERS).double()
    for step, (learnt, *_) in enumerate(_guesses(TARGET, heads, inputs, LAYERS, 3)):
        places, found = inputs["labels"][:, 2 + step :] != IGNORED, []
        for row, place in places.nonzero().tolist():
            ids, cache = inputs["input_ids"][row], DynamicCache()
            states = heads.fused(hidden[row : row + 1, : place + 1])
            states, _ = heads.step(ids[None, 1 : place + 2], states, **{CACHE: cache})
            for guess in range(step):
                states, _ = heads.step(ids[None, place + 2 + guess : place + 3 + guess], states[:, -1:], **{CACHE: cache})
            found.append(heads.logits_of(heads.out(states[0, -1])))
        assert torch.allclose(torch.stack(found).float(), learnt, atol=1e-4)


def heads_for(path: Path, **changed: Any) -> Path:
    known = described(TARGET, token_bytes(TOKENS))
    save_heads(MedusaHeads(2, 32), replace(known, **changed), path)
    return path


def test_a_target_may_change_its_precision_after_it_was_handed_in(tmp_path: Path) -> None:
    target = deepcopy(TARGET)
    xt = XTokAssisted((target, TOKENS), HeadsDrafter(heads_for(tmp_path / "h")), budget=Budget(2, width=4, schedule="constant"))
    for dtype in (torch.float64, torch.float32, torch.float64):
        target.to(dtype)
        assert xt.generate("吾輩は", max_new_tokens=8, do_sample=False).stats.draft_error is None


OTHER_WEIGHTS = described(fitting(TOKENS, "Llama", 5), token_bytes(TOKENS)).weights


def test_heads_of_another_target_are_refused(tmp_path: Path) -> None:
    wrong = {"whose vocabulary is": {"vocabulary": "abc"}, "with other weights": {"weights": OTHER_WEIGHTS}}
    for match, changed in wrong.items():
        with pytest.raises(InvalidInputError, match=f"{match}.*xtok train-heads"):
            XTokAssisted((TARGET, TOKENS), HeadsDrafter(heads_for(tmp_path / "wrong", **changed)))
    save_heads(MedusaHeads(2, 16), described(TARGET, token_bytes(TOKENS)), tmp_path / "h")
    with pytest.raises(InvalidInputError, match="whose hidden size is 16"):
        XTokAssisted((TARGET, TOKENS), HeadsDrafter(tmp_path / "h"))
    assert XTokAssisted((TARGET, TOKENS), HeadsDrafter(heads_for(tmp_path / "unknown", weights=()))).names


def test_heads_are_known_by_weights_and_not_by_names(tmp_path: Path) -> None:
    """Found by a trial as a new user: a folder of another name, or of a hub's cache, and the heads were refused."""
    heads = HeadsDrafter(heads_for(tmp_path / "h"))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        same = deepcopy(TARGET).to(dtype)
        same.config._name_or_path = f"snapshots/{dtype}"
        noise = same.get_input_embeddings().weight
        noise.data += torch.randn_like(noise) * noise.abs().mean() * 0.2  # as coarse as quantisation to few bits
        heads.check(same, token_bytes(TOKENS))


def test_heads_whose_file_names_the_target_are_taken(tmp_path: Path) -> None:
    """As earlier versions wrote them."""
    heads_for(tmp_path / "h")
    with safe_open(tmp_path / "h", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 # no iterator
        known = json.loads(file.metadata()["xtok"])
    del known["weights"]
    save_file(tensors, tmp_path / "old", metadata={"xtok": json.dumps({**known, "target": "a"})})
    HeadsDrafter(tmp_path / "old").check(TARGET, token_bytes(TOKENS))
    save_file(tensors, tmp_path / "wrong", metadata={"xtok": json.dumps({**known, "weights": [1.0]})})
    with pytest.raises(InvalidInputError, match="it has 1 values of the target's embedding"):
        HeadsDrafter(tmp_path / "wrong")


@pytest.mark.parametrize(("kind", "error"), [("sequential", OSError), ("medusa", KeyboardInterrupt)])
def test_a_training_that_ends_within_a_write_leaves_its_best_heads(
    kind: str, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = list[bytes]()

    def full(heads: Any, info: Any, file: Path) -> None:
        save_heads(heads, info, file)
        whole.append(file.read_bytes())
        if len(whole) == 3:
            file.write_bytes(whole[-1][:99])
            raise error("simulated")

    monkeypatch.setattr("xtok.tune.heads.planned", lambda *_: (5, False))
    monkeypatch.setattr("xtok.tune.heads.per_forward", rising(9, AssertionError()))
    monkeypatch.setattr("xtok.tune.heads.save_heads", full)
    with pytest.raises(error, match="simulated"):
        train_heads((TARGET, TOKENS), tmp_path / "h", PROMPTS, **{**SETTINGS, "kind": kind})
    assert [path.name for path in tmp_path.iterdir()] == ["h"] and (tmp_path / "h").read_bytes() == whole[1]
    xt = XTokAssisted((TARGET, TOKENS), HeadsDrafter(tmp_path / "h"), budget=TREE)
    stats = xt.generate("吾輩は", max_new_tokens=8, do_sample=False).stats
    assert stats.proposed and stats.draft_error is None


def test_texts_shorter_than_the_steps_of_heads_are_learnt() -> None:
    """Found with a target that ends its texts early: tensors of other sizes didn't match."""
    info = replace(described(TARGET, token_bytes(TOKENS)), layers=(1, -1), window=9)
    for length in (2, 3, 4, 6):
        rows = [example([3], list(range(4, 3 + length)))] * 2
        heads = _untrained(TARGET, info, rows, 5, 64, None)
        if length > 2:
            assert torch.isfinite(loss_of(TARGET, heads, batch(rows), info.layers, 5))
        found = accuracies(TARGET, heads, rows, info.layers, 5)
        assert len(found) == length - 2, "nothing was measured at later steps"
        assert all(0 <= one <= 1 for step in found for one in step)


@pytest.mark.parametrize("kind", ["sequential", *deep("medusa")])
def test_the_command_trains_and_prints_how_often_heads_were_right(tmp_path: Path, kind: str) -> None:
    (tmp_path / "data.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    for part in (TARGET, TOKENS):
        part.save_pretrained(tmp_path / "target")
    arguments = ["--target", str(tmp_path / "target"), "--prompts", str(tmp_path / "data.txt"), "--out", str(tmp_path / "h")]
    arguments += ["--steps", "2", "--hours", "0.0001"]
    arguments += ["--kind", kind, "--size", "64", "--starts", "1", "--max-new-tokens", "8"]
    printed = "".join(run("train-heads", *arguments))
    assert "tokens per forward" in printed and "  greedy: " in printed and "step 2" in printed
    found = HeadsDrafter(tmp_path / "h").trained
    assert len(found.accuracy) == 2 and (found.window is None) == (kind == "medusa")


def test_settings_that_make_no_sense_and_files_that_are_there_are_refused(tmp_path: Path) -> None:
    """Found with a path that named the target's own weights."""
    wrong = {"steps": 0, "hours": 0, "kind": "other", "size": 3, "vocabulary": 1, "sampled": 2, "temperature": 0}
    for name, value in wrong.items():
        with pytest.raises(InvalidInputError, match=name):
            trained(tmp_path / "h", **{name: value})
        assert not list(tmp_path.iterdir())
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    with pytest.raises(InvalidInputError, match=r"exists, where the heads would be written"):
        trained(file)
    assert file.read_bytes() == b"weights" and [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize("size", [None, 64, 100, 640, 704])
def test_heads_of_any_size_can_be_made(size: int | None) -> None:
    info = replace(described(TARGET, token_bytes(TOKENS)), layers=LAYERS, window=9)
    heads: Any = _untrained(TARGET, info, ROWS, 2, 10, size)
    assert heads.config.hidden_size == -(-(size or 32) // 64) * 64
    assert torch.isfinite(heads(torch.tensor([[5, 6]])).logits).all()
