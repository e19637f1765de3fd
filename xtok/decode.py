"""The only decoding loop: a round plans what to guess, lets the target verify it, and commits what was right.

Every committed id is the target's own pick from its own logits on the committed prefix. A guess decides only how many picks a
forward yields.
"""

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Any

import torch

from xtok.budget import Budget
from xtok.models.target import Checked, Target
from xtok.sequence import Sequence
from xtok.stats import Round
from xtok.tree import Tree


def drain(target: Target, texts: list[Sequence], on_block: Callable[[int, list[int]], Any] = lambda row, block: None) -> None:
    """Write texts to their ends, round by round together, so that a limit of time treats them alike."""
    for row, block in enumerate(prefill(target, texts)):
        on_block(row, block)
    while active := [row for row, text in enumerate(texts) if text.finish_reason is None]:
        for row, block in zip(active, step(target, [texts[row] for row in active]), strict=True):
            on_block(row, block)


def prefill(target: Target, texts: list[Sequence]) -> list[list[int]]:
    """Read the prompts, and commit the first id of each text. Returns the ids that each commits."""
    return [_commit(target, text, Tree(), target.prefill(text.slot, text.ids, text.config)) for text in texts]


def step(target: Target, texts: list[Sequence]) -> list[list[int]]:
    """A round of texts that have begun and aren't finished: plan each, verify all, commit each. Returns what each commits."""
    trees = [_plan(text) for text in texts]
    checked = target.verify([(text.slot, text.text.ids[-1], tree) for text, tree in zip(texts, trees, strict=True)])
    return [_commit(target, *one) for one in zip(texts, trees, checked, strict=True)]


def _plan(text: Sequence) -> Tree:
    """What the drafts guess."""
    limit = _limit(text)
    if text.session is None or limit.longest == 0:
        return Tree()
    with text.meter.timing("draft"), text.meter.timing("all"):
        return text.session.propose(limit)


def _limit(text: Sequence) -> Budget:
    """No id is guessed that could not be committed any more, or that lies beyond the target's positions."""
    room = text.config.max_length - text.ids.shape[1] - 1
    if text.deepest is not None:
        room = min(room, text.deepest - text.slot.length - 1)
    longest = ceil(max(0, min(text.budget.longest, room)))  # transformers takes 2.5 new tokens for 3, and inf for no limit
    return replace(text.budget, longest=longest)


def _commit(target: Target, text: Sequence, tree: Tree, checked: Checked) -> list[int]:
    """Commit what the target picks along a guess, and let the drafts learn from it. Returns the ids."""
    text.meter.add(checked.seconds, "target", "all")
    with text.meter.timing("all"):
        block, path = _walk(text, tree, checked)
        if text.begun:
            target.keep(text.slot, path[1:])
        text.begun = True
        if text.session is not None:
            text.session.extend(block, None if checked.hidden is None else checked.hidden[path[-1] + 1])
            text.session.observe(checked.rows, checked.seconds)
            if text.finish_reason is not None:
                text.session.close()
    return block


@torch.no_grad()
def _walk(text: Sequence, tree: Tree, checked: Checked) -> tuple[list[int], list[int]]:
    """Walk the picks along the guesses, until those or the text ends.

    Returns the ids picked, and the nodes behind which they were picked: -1, for the context, and its descendants.
    """
    offset, _ = text.text.place
    greedy = text.picker.greedy(checked.logits)
    block, path = list[int](), list[int]()
    node: int | None = -1
    while node is not None and text.finish_reason is None:
        path.append(node)
        row = slice(node + 1, node + 2)
        block.append(
            greedy[node + 1] if greedy else text.picker.pick(text.ids, checked.logits[row], text.text.place, tree, node)
        )
        text.append(block[-1])
        node = tree.child(node, block[-1])
    text.catch_up()
    if greedy:
        text.picker.note_greedy(checked.logits[[node + 1 for node in path]])
    accepted = len(block) - (node is None)
    text.meter.rounds.append(Round(offset, tree.guess, len(tree), accepted, len(block)))
    return block, path
