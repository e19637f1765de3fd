"""What waits for the device: one transfer per round of the target, and one per level of a draft."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from front_door import BYTES, GREEDY, OTHER, PROMPTS, TARGET, TOKENS, forwards
from scripted import ScriptedDrafter
from torch.overrides import TorchFunctionMode
from transformers import LogitsProcessorList
from worlds import make_target_expensive

import xtok.decoding.pick
import xtok.sampling.draws
import xtok.sampling.largest
from xtok import Budget, PromptLookup, XTokAssisted
from xtok.errors import DraftFailedWarning
from xtok.models import forwards as of_models

WAITING = {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "masked_select"}
TREE = Budget(4, width=4, nodes=12, schedule="constant")
LONG = 16
WAYS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": {**GREEDY, "do_sample": True, "temperature": 0.7, "top_k": 0, "seed": 7},
    "cut": {**GREEDY, "do_sample": True, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 7},
}


class Waits(TorchFunctionMode):
    """Counts what would wait for an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.known = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        masks = name == "__getitem__" and any(isinstance(one, torch.Tensor) and one.dtype == torch.bool for one in args[1:])
        self.count += not self.known and (name in WAITING or masks)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def counted_once(self) -> Iterator[None]:
        """Count all in the block as one."""
        self.count, self.known = self.count + 1, True
        yield
        self.known = False


def taken_for_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (xtok.sampling.draws, xtok.decoding.pick):
        monkeypatch.setattr(module, "on_host", lambda device: False)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    """As on an accelerator: draws after all nodes at once, and lists by one transfer."""
    found = Waits()

    def listed(*parts: torch.Tensor) -> Any:
        with found.counted_once():
            return xtok.sampling.largest.listed(*parts)

    for module in (xtok.sampling.draws, xtok.decoding.pick, of_models):
        monkeypatch.setattr(module, "listed", listed)
    taken_for_an_accelerator(monkeypatch)
    with found:
        yield found


@pytest.mark.parametrize(
    ("way", "stable", "beside"),
    [("greedy", False, True), ("greedy", True, False), ("sampled", True, True), ("cut", False, False)],
)
def test_a_round_takes_one_transfer_and_a_level_of_the_draft_another(
    waits: Waits, way: str, stable: bool, beside: bool
) -> None:
    """What a text takes at its beginning isn't counted. A draw that is too near to a cut takes more; that is seldom."""
    drafts = [(OTHER, BYTES), *([PromptLookup()] if beside else [])]
    xt = make_target_expensive(XTokAssisted((TARGET, TOKENS), drafts, budget=TREE, stable=stable))
    totals, most = list[int](), list[int]()
    for count in (LONG, 6, LONG):  # the first makes tables
        before = waits.count
        stats = xt.generate(PROMPTS[0], **{**WAYS[way], "max_new_tokens": count}).stats
        totals.append(waits.count - before)
        most.append(stats.target_forwards + stats.draft_forwards)
    more = 2 if way == "cut" else 0
    assert 0 < totals[2] - totals[1] <= most[2] - most[1] + more


def test_texts_share_transfers_as_they_share_forwards(waits: Waits) -> None:
    """One for each forward of both models, of which each serves all texts; those that end early take a few more."""
    xt = make_target_expensive(XTokAssisted((TARGET, TOKENS), [(OTHER, BYTES)], budget=TREE))
    totals, forwarded = list[int](), list[int]()
    for count in (LONG, 6, LONG):
        before = waits.count
        with forwards(TARGET, OTHER) as seen:
            xt.generate([PROMPTS[0]] * 4, batch_size=4, **{**WAYS["sampled"], "max_new_tokens": count})
        totals.append(waits.count - before)
        forwarded.append(len(seen))
    assert 0 < totals[2] - totals[1] <= forwarded[2] - forwarded[1] + 4


@pytest.mark.parametrize("fails", [[2], list(range(2, 99))])
def test_a_transfer_that_fails_costs_drafts_only(monkeypatch: pytest.MonkeyPatch, fails: list[int]) -> None:
    """Found by a hostile trial: it ended all texts. One that fails for several texts is tried for each alone."""
    expected = [one.token_ids for one in XTokAssisted((TARGET, TOKENS)).generate(PROMPTS, **GREEDY)]
    xt = XTokAssisted((TARGET, TOKENS), (OTHER, BYTES), budget=TREE)
    count = 0

    def listed(*parts: torch.Tensor) -> Any:
        nonlocal count
        count += 1
        if count in fails:
            raise torch.OutOfMemoryError("simulated")
        return xtok.sampling.largest.listed(*parts)

    monkeypatch.setattr(of_models, "listed", listed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DraftFailedWarning)
        found = xt.generate(PROMPTS, batch_size=3, **GREEDY)
    assert [one.token_ids for one in found] == expected
    assert (found[0].stats.draft_error is None) == (fails == [2])


@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_a_processor_that_gives_more_rows_than_it_got_is_called_after_each_id(way: str) -> None:
    arguments = {**WAYS[way], "logits_processor": LogitsProcessorList([lambda ids, scores: torch.cat([scores, scores])])}
    truth = XTokAssisted((TARGET, TOKENS)).generate(PROMPTS[0], **arguments).token_ids
    length = len(TOKENS(PROMPTS[0]).input_ids)
    guesses = ScriptedDrafter(lambda context: (truth + [3] * 4)[len(context.ids) - length :][:3])
    drafted = XTokAssisted((TARGET, TOKENS), guesses, budget=Budget(3, width=1, schedule="constant"))
    assert drafted.generate(PROMPTS[0], **arguments).token_ids == truth
