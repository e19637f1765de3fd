"""The only decoding loop: a round plans what to guess, lets the target verify it, and commits what was right.

Every committed id is the target's own pick from its own logits on the committed prefix. A guess decides only how many picks a
forward yields.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from xtok.decoding.pick import Ahead, picks
from xtok.decoding.sequence import Round, Sequence
from xtok.drafts.policy.ledger import Batch, BatchGates
from xtok.drafts.policy.settings import Budget
from xtok.drafts.tree import Tree
from xtok.models.forwards import Answer, Ask, Steps, answered, together
from xtok.models.roles import Target
from xtok.models.timing import timed


class Known(NamedTuple):
    """What is known of the first rows of a forward before anything is committed: their `scores`, (rows, vocabulary), and the id
    that each picks, with what it beats the second by; -1 where the scores are to be asked again.
    """

    scores: Tensor
    picks: list[tuple[int, float]]


def in_rounds(target: Target, texts: Iterable[Sequence], most: int) -> Iterator[list[tuple[int, Sequence]]]:
    """Write texts to their ends, `most` of them at a time. After each round it gives those that ended in it, be it by an error,
    with their numbers.
    """
    waiting, running = enumerate(texts), list[tuple[int, Sequence]]()
    while running := [*running, *islice(waiting, most - len(running))]:
        step(target, [text for _, text in running])
        yield [one for one in running if one[1].finish_reason is not None]
        running = [one for one in running if one[1].finish_reason is None]


def drain(target: Target, texts: Iterable[Sequence], most: int) -> Iterator[tuple[int, Sequence]]:
    """As `in_rounds`, each text as it ends."""
    return chain.from_iterable(in_rounds(target, texts, most))


def step(target: Target, texts: list[Sequence]) -> list[list[int]]:
    """A round of texts that aren't finished: plan each, verify all, commit each. Returns what each commits.

    A text that has not begun has some of its prompt read. What fails in a text ends that text alone.
    """
    batch_gates, is_reading = _batch_gates(texts), not all(text.begun for text in texts)
    batch = Batch(max(1, sum(text.slot.shares for text in texts))) if batch_gates is None else batch_gates.batch(len(texts))
    before = _spent(texts)
    plans = dict(zip(texts, together([_plan(text, batch) for text in texts]), strict=True))
    going = {text: tree for text, tree in plans.items() if text.finish_reason is None}
    blocks = dict(zip(going, _verified(target, list(going), _evened(list(going), list(going.values()))), strict=True))
    if batch_gates is not None and not is_reading and not any(text.session and text.session.reads for text in texts):
        batch_gates.judge(batch, sum(map(len, blocks.values())), _spent(texts) - before)
    return [blocks.get(text, []) for text in texts]


def _spent(texts: list[Sequence]) -> float:
    """The seconds of their rounds."""
    return sum(text.meter.seconds["all"] for text in texts)


def _batch_gates(texts: list[Sequence]) -> BatchGates | None:
    """What knows whether guessing pays for several texts that share forwards; None where it isn't one for all of them."""
    ledgers = [text.session.ledger for text in texts if text.session and text.slot.shares and text.budget.schedule == "cost"]
    is_one = len(ledgers) == len(texts) > 1 and all(one is ledgers[0] and one.nominal is None for one in ledgers)
    return ledgers[0].batch_gates if is_one else None


def _verified(target: Target, texts: list[Sequence], trees: list[Tree]) -> list[list[int]]:
    """Let the target verify what was guessed, and commit what was right. Returns that of each."""
    unread = [text.unread() for text in texts]
    checked = answered(
        [
            Ask(text.slot, [*ids, *tree.tokens], 1 + len(tree), tree.parents)
            for text, ids, tree in zip(texts, unread, trees, strict=True)
        ]
    )
    read = [len(ids) for ids in unread]
    known = _picked_ahead(texts, read, trees, checked)
    return [_checked(target, *one) for one in zip(texts, read, trees, checked, known, strict=True)]


def _plan(text: Sequence, batch: Batch) -> Steps[Tree]:
    """What the drafts guess. What fails beside them, such as a warning of them that is an error, ends the text."""
    if text.session is None or not text.begun:
        return Tree()
    try:
        if (limit := _limit(text)).longest == 0:
            return Tree()
        with text.meter.timing("draft"), text.meter.timing("all"):
            return (yield from text.session.propose(limit, batch, text.left))
    except Exception as error:
        text.fail(error)
        return Tree()


def _evened(texts: list[Sequence], trees: list[Tree]) -> list[Tree]:
    """Guesses with no more nodes than pay: where texts share a forward, a node more in one of them is a row more in all."""
    if not any(trees):
        return trees
    sharing = {text: tree for text, tree in zip(texts, trees, strict=True) if text.slot.shares and text.room()}
    offers = [(text.left, text.session.offer() if tree and text.session else []) for text, tree in sharing.items()]
    session = next((text.session for text, tree in sharing.items() if tree), None)
    given = [(unread, probabilities) for unread, probabilities in offers if probabilities is not None]
    if len(sharing) < 2 or session is None or len(given) < len(offers):
        return trees
    width = session.ledger.width(given)
    return [
        text.session.cut(width - text.left) if text in sharing and text.session and len(tree) > width - text.left else tree
        for text, tree in zip(texts, trees, strict=True)
    ]


def _limit(text: Sequence) -> Budget:
    """No id is guessed that could not be committed any more, that lies beyond the target's positions, or that finds no room in
    its forward.
    """
    room = text.config.max_length - text.ids.shape[1] - 1
    if text.deepest is not None:
        room = min(room, text.deepest - text.slot.length - len(text.text.ids) + text.read)
    nodes = text.room()
    longest = ceil(max(0, min(text.budget.longest, room, nodes)))  # transformers takes 2.5 new tokens for 3, inf for no limit
    return replace(text.budget, longest=longest, nodes=max(1, min(text.budget.nodes, nodes)))


@torch.no_grad()
def _picked_ahead(texts: list[Sequence], read: list[int], trees: list[Tree], checked: list[Answer | Exception]) -> list[Known]:
    """What texts pick behind as many of their rows as can be picked from before anything is committed, all in one transfer.

    Where that fails, its error takes the place of what was `checked`.
    """
    asked: dict[int, Ahead] = {}
    for i, (text, tree, answer) in enumerate(zip(texts, trees, checked, strict=True)):
        if isinstance(answer, Answer) and text.read + read[i] == len(text.text.ids) and not text.picker.judges:
            try:
                asked[i] = _ahead(text, tree, answer)
            except Exception as error:
                checked[i] = error
    with timed() as span:
        found = dict(zip(asked, _picked(list(asked.values())), strict=True))
    for i, failed in found.items():
        checked[i] = failed if isinstance(failed, Exception) else checked[i]
    for i in asked:
        texts[i].meter.add(span.seconds / len(asked), "all", *(["noise"] if texts[i].picker.noise else []))
    known = {i: Known(asked[i].scores, some) for i, some in found.items() if not isinstance(some, Exception)}
    return [known.get(i, Known(torch.empty(0, dtype=torch.float32, device="cpu"), [])) for i in range(len(texts))]


def _picked(asked: list[Ahead]) -> list[list[tuple[int, float]] | Exception]:
    """As `picks`; where one of them makes that fail, such as scores of another size, an error is its alone."""
    try:
        return [*picks(asked)]
    except Exception as error:
        return [error] if len(asked) == 1 else [some for one in asked for some in _picked([one])]


def _ahead(text: Sequence, tree: Tree, answer: Answer) -> Ahead:
    with text.meter.timing("all"):
        scores = text.picker.ahead(text.ids, answer.logits)
        places = text.text.places(tree.tokens, tree.parents, len(scores)) if text.picker.noise is not None else []
        in_place = _in_place(text, tree)
        return Ahead(text.picker, scores, places, 1 + in_place, text.slot.tolerance if in_place < len(tree) else 0.0)


def _checked(target: Target, text: Sequence, read: int, tree: Tree, checked: Answer | Exception, known: Known) -> list[int]:
    """Commit what was checked, if all of the text was read. Returns the ids."""
    try:
        if isinstance(checked, Exception):
            raise checked
        text.meter.add(checked.cost.share, "target", "all")
        text.meter.target_replays += checked.cost.replayed
        text.read += read
        with text.meter.timing("all"):
            return _commit(target, text, tree, checked, known) if text.read == len(text.text.ids) else []
    except Exception as error:
        text.fail(error)
        return []


def _commit(target: Target, text: Sequence, tree: Tree, checked: Answer, known: Known) -> list[int]:
    """Commit what the target picks along a guess, and let the drafts learn from it. Returns the ids."""
    read = [*text.text.ids[-1:], *tree.tokens]
    block, path, hint = _walk(text, tree, checked, known)
    kept = [node for node in path[1:] if node < _in_place(text, tree)]
    text.slot.keep(kept)
    text.read += len(kept)
    if text.session is not None:
        text.session.extend(block, None if checked.hidden is None else checked.hidden[path[-1] + 1], hint)
        if text.finish_reason is None:
            text.session.learn(read, checked.logits[len(checked.logits) - len(read) :])
        text.session.observe(checked.cost)
    if text.finish_reason is not None:
        text.end()
    return block


@torch.no_grad()
def _walk(text: Sequence, tree: Tree, checked: Answer, known: Known) -> tuple[list[int], list[int], int | None]:
    """Walk the picks along the guesses, until those or the text ends. `known`: the first picks.

    Returns the ids picked, the nodes behind which they were picked: -1, for the context, and its descendants; and the likely
    next pick, where it is left to the next round.
    """
    offset, _ = text.text.place
    drafts = () if text.session is None else text.session.sources(tree)
    block, path, hint = list[int](), list[int](), None
    node: int | None = -1
    while node is not None and text.finish_reason is None:
        token, sure = _pick(text, tree, node, checked, known)
        if token is None or not sure:
            hint = token
            break
        path.append(node)
        block.append(token)
        text.picker.note_near_tie(len(text.text.ids) - text.text.prompt_length)
        text.append(token)
        node = tree.child(node, block[-1])
    text.catch_up()
    right = (*path[1:], *([] if node is None else [node]))
    guess = replace(tree, distributions=()) if tree.distributions else tree
    text.rounds.append(Round(offset, guess, drafts, right, len(block)))
    return block, path, hint


def _pick(text: Sequence, tree: Tree, node: int, checked: Answer, known: Known) -> tuple[int | None, bool]:
    """What is picked behind a node, and whether that is sure. Where it may depend on where the node stands, it is left to the
    next round.
    """
    tolerance = None if node < _in_place(text, tree) else text.slot.tolerance
    picker, row = text.picker, slice(node + 1, node + 2)
    for token, margin in known.picks[row]:
        if tolerance is None:
            is_told = token >= 0
            return picker.note(token, margin) if is_told else picker.picked(text.ids, known.scores[row], text.text.place), True
        if token >= 0:
            return picker.surely(token, margin, tolerance)
    if tolerance is not None:
        return picker.sure(text.ids, checked.logits[row], text.text.place, tolerance)
    return picker.pick(text.ids, checked.logits[row], text.text.place, tree, node), True


def _in_place(text: Sequence, tree: Tree) -> int:
    """How many of the first nodes have the logits that they would have if they were committed before they are forwarded.

    Where forwards have fixed shapes, the others' differ in their last bits: attention adds up in the order of places. Those are
    forwarded again by the next round, if they come true.
    """
    return tree.lead if text.slot.fixed else len(tree)
