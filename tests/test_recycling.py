"""Token recycling: what the target held for likely after the same id before, against a plain dictionary."""

import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from front_door import BYTES, GREEDY, OTHER, PROMPTS, TARGET, TOKENS
from hypothesis import example, given
from hypothesis import strategies as st
from inside import tables_of

from xtok import Budget, Context, Drafter, Request, TokenRecycling, Tree, XTokAssisted, chain, pair
from xtok.drafts.recycling import _Table

TREE = Budget(4, width=4, nodes=16, schedule="constant")
SIZE = 40
rows = st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=12)


@given(forwards=st.lists(rows, max_size=12), asked=rows, seed=st.integers(0, 99))
@example(forwards=[[3, 3, 5]], asked=[3, 4, 5], seed=0)
def test_a_table_holds_what_was_likeliest_after_each_id_the_last_time(
    forwards: list[list[int]], asked: list[int], seed: int
) -> None:
    table = _Table(SIZE)
    generator, wanted = torch.Generator().manual_seed(seed), dict[int, list[torch.Tensor]]()
    for ids in forwards:
        logits = torch.randn(len(ids), SIZE + 8, generator=generator)  # there may be more logits than ids
        tops = logits[:, :SIZE].topk(16)
        table.learn(ids, tops.indices, tops.values)
        wanted |= {token: [] for token in ids}
        for token, row in zip(ids, logits, strict=True):
            wanted[token].append(row[:SIZE])
    known, ids_after, logits_after = table.likeliest_after(asked)
    assert known == [token in wanted for token in asked]
    for token, found, values in zip([token for token in asked if token in wanted], ids_after, logits_after, strict=True):
        tops = [row.topk(16) for row in wanted[token]]  # of an id that comes twice in a forward, either
        assert any(torch.equal(found, top.indices) and torch.equal(values, top.values) for top in tops)


@pytest.mark.parametrize(
    ("way", "least"),
    [({}, 1.7), ({"repetition_penalty": 1.2}, 1.3), ({"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 3}, 1.15)],
)
def test_real_text_takes_fewer_forwards(way: dict[str, Any], least: float) -> None:
    """What is drawn is predicted, too: under the noise of its position."""
    xt = XTokAssisted(pair.TARGET, TokenRecycling(), budget=TREE)
    made = xt.generate(pair.prompts()[:3], **{**GREEDY, **way, "max_new_tokens": 40, "eos_token_id": None})
    assert sum(one.stats.new_tokens for one in made) > least * sum(one.stats.target_forwards for one in made)


def test_targets_with_other_ids_share_an_object_and_nothing_in_it() -> None:
    recycling = TokenRecycling()
    targets = ((TARGET, TOKENS), (OTHER, BYTES), (TARGET, TOKENS))
    kept = [XTokAssisted(target, recycling, budget=TREE) for target in targets]
    for target, xt in zip(targets, kept, strict=True):
        expected = XTokAssisted(target).generate(PROMPTS[0], **GREEDY).token_ids
        assert xt.generate(PROMPTS[0], **GREEDY).token_ids == expected
    assert len(tables_of(recycling)) == 3


@pytest.mark.parametrize("copied", [deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_has_learnt_nothing(copied: Any) -> None:
    recycling = TokenRecycling()
    xt = XTokAssisted((TARGET, TOKENS), recycling, budget=TREE)  # which keeps its vocabulary, and so the table, alive
    xt.generate(PROMPTS[0], **GREEDY)
    assert tables_of(recycling) and not tables_of(copied(recycling))


class Seen:
    """Keeps what the target's forwards are said to have given, and guesses what comes next."""

    def __init__(self, coming: list[int]) -> None:
        self._coming, self.seen = coming, list[tuple[list[int], torch.Tensor]]()

    def start(self, request: Request) -> Drafter:
        return self

    def propose(self, context: Context, budget: Budget) -> Tree:
        written = len(context.ids) - len(TOKENS(PROMPTS[0]).input_ids)
        return chain([*self._coming[written : written + 2], 7])

    def learn(self, ids: list[int], logits: torch.Tensor) -> None:
        self.seen.append((list(ids), logits))


def test_a_drafter_is_shown_the_targets_logits_after_each_id_that_it_checked() -> None:
    alone = XTokAssisted((TARGET, TOKENS)).generate(PROMPTS[0], **GREEDY, output_logits=True, return_dict_in_generate=True)
    ids = alone.token_ids
    draft = Seen(ids)
    xt = XTokAssisted((TARGET, TOKENS), draft, budget=Budget(4, width=1, schedule="constant"))
    assert xt.generate(PROMPTS[0], **GREEDY).token_ids == ids
    text = [TOKENS(PROMPTS[0]).input_ids[-1], *ids]
    position = 0
    for read, logits in draft.seen:
        right = next(i for i, pair in enumerate(zip([*read, -1], text[position:], strict=False)) if pair[0] != pair[1])
        assert len(read) == len(logits) and right >= 1
        for step in range(min(right, len(ids) - position)):
            assert torch.allclose(logits[step].float(), alone.logits[position + step][0], atol=1e-4)
        position += right
    assert position >= len(ids) - 5, "all rounds but the last"
