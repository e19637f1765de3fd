"""The only decoding loop. A round guesses, lets the target verify the guesses, and commits the target's picks.

Every committed id is the target's own pick from its own logits on the committed prefix. A guess decides only how many picks a
forward pass yields.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from xtok.decoding.pick import EarlyPick, PickRequest, early_picks
from xtok.decoding.sequence import Round, Sequence
from xtok.drafts.policy.policy import Batch
from xtok.drafts.policy.settings import Budget
from xtok.drafts.session import Guess
from xtok.drafts.tree import Tree
from xtok.models import timing
from xtok.models.forwards import Answer, ForwardRequest, Steps, run_forwards, run_lockstep
from xtok.models.timing import EXCLUDED, timed

_NOTHING = Guess()
_KEPT = 2048
"""For how many of a prompt's last ids hidden states are kept for drafters, at least: no heads see more."""


def run(admit: Callable[[list[Sequence]], Iterable[Sequence]]) -> Iterator[dict[Sequence, list[int]]]:
    """Run sequences to their ends, round by round. After each round, yields the ids that each sequence in it committed.

    `admit`: called before each round with the running sequences, returns those that join them. Ends when none is running. An
    error in a sequence ends that sequence alone (`finish_reason`).
    """
    running: list[Sequence] = []
    while running := [one for one in (*running, *admit(running)) if one.finish_reason is None]:
        yield dict(zip(running, _round(running), strict=True))
        running = [one for one in running if one.finish_reason is None]


def run_one(sequence: Sequence) -> Iterator[list[int]]:
    """As `run`, for one sequence: yields the ids that each round committed."""
    waiting = iter([sequence])
    for committed in run(lambda _: waiting):
        yield committed[sequence]


def _round(sequences: list[Sequence]) -> list[list[int]]:
    """Guess, verify and commit for sequences that haven't ended. Returns the ids that each commits.

    For a sequence whose prompt isn't read yet, a part of the prompt is read instead.
    """
    start = timing.perf_counter() - EXCLUDED.seconds
    guessing = [one for one in sequences if one.drafting is not None and not one.is_reading]
    batches = _batches(guessing)
    plans = [_plan(one, batch) for batch, some in batches for one in some]
    planned = dict(zip([one for _, some in batches for one in some], run_lockstep(plans), strict=True)) if plans else {}
    going = [one for one in sequences if one.finish_reason is None]
    guesses = _trim_to_width(going, [planned.get(one, _NOTHING) for one in going])
    blocks = dict(zip(going, _verified(going, guesses), strict=True))
    _observe(batches, timing.perf_counter() - EXCLUDED.seconds - start, is_pure=len(guessing) == len(sequences))
    return [blocks.get(one, []) for one in sequences]


def _batches(sequences: list[Sequence]) -> list[tuple[Batch, list[Sequence]]]:
    """The batches of a round, each with its sequences: those that share forward passes and a policy."""
    groups = dict[int, list[Sequence]]()
    for one in sequences:
        shares = one.slot.shares and one.policy is not None and one.policy.reads_clock
        groups.setdefault(id(one.policy) if shares else id(one), []).append(one)
    return [(_batch(some), some) for some in groups.values()]


def _batch(sequences: list[Sequence]) -> Batch:
    policy, budget = sequences[0].policy, sequences[0].budget
    return policy.batch(len(sequences)) if policy and budget.schedule == "cost" else Batch(len(sequences))


def _observe(batches: list[tuple[Batch, list[Sequence]]], seconds: float, *, is_pure: bool) -> None:
    """Let policies learn from a round, in which each batch is taken to have had an equal part of the time."""
    for _, some in batches:
        outcomes = [one.outcome for one in some if one.outcome is not None]
        if outcomes and (policy := some[0].policy):
            is_whole = is_pure and len(outcomes) == len(some)
            policy.observe(outcomes, seconds / len(batches), is_pure=is_whole)


def _plan(sequence: Sequence, batch: Batch) -> Steps[Guess]:
    """The guess of the drafts. An error that isn't a draft's, such as a warning that is set to raise, ends the sequence."""
    sequence.outcome = None
    try:
        limit = _limit(sequence)
        if limit.longest == 0 or sequence.session is None:
            return _NOTHING
        with sequence.meter.timing("draft"), sequence.meter.timing("all"):
            return (yield from sequence.session.propose(limit, batch, sequence.left))
    except Exception as error:
        sequence.fail(error)
        return _NOTHING


def _limit(sequence: Sequence) -> Budget:
    """The budget, limited to ids that could still be committed and that have a position and a row in the target's forward
    pass.
    """
    room = sequence.config.max_length - sequence.ids.shape[1] - 1
    if sequence.deepest is not None:
        room = min(room, sequence.deepest - sequence.slot.length - len(sequence.text.ids) + sequence.read)
    nodes, budget = sequence.room(), sequence.budget
    if budget.longest <= room and max(budget.longest, budget.nodes) <= nodes:
        return budget
    longest = ceil(max(0, min(budget.longest, room, nodes)))  # transformers takes 2.5 new tokens for 3, inf for no limit
    return replace(budget, longest=longest, nodes=max(1, min(budget.nodes, nodes)))


def _trim_to_width(sequences: list[Sequence], guesses: list[Guess]) -> list[Guess]:
    """The guesses, cut to as many nodes as pay: in a shared forward pass, a node more for one sequence is a row for all."""
    if not any(guess.tree.tokens for guess in guesses):
        return guesses
    sharing = {one: guess for one, guess in zip(sequences, guesses, strict=True) if one.slot.shares and one.room()}
    offers = [(one.left, guess.offer if guess.tree else []) for one, guess in sharing.items()]
    policy = next((one.policy for one, guess in sharing.items() if guess.tree), None)
    given = [(unread, probabilities) for unread, probabilities in offers if probabilities is not None]
    if len(sharing) < 2 or policy is None or len(given) < len(offers):
        return guesses
    width = policy.width(given)
    return [guess.cut(width - one.left) if one in sharing else guess for one, guess in zip(sequences, guesses, strict=True)]


def _verified(sequences: list[Sequence], guesses: list[Guess]) -> list[list[int]]:
    """Let the target verify the guesses, and commit its picks. Returns the ids that each sequence commits."""
    unread, trees = [one.unread() for one in sequences], [guess.tree for guess in guesses]
    asks = [
        ForwardRequest(one.slot, [*ids, *tree.tokens], 1 + len(tree.tokens), tree.parents)
        for one, ids, tree in zip(sequences, unread, trees, strict=True)
    ]
    checked = [*zip(sequences, map(len, unread), guesses, run_forwards(asks), strict=True)]
    early = _early_picks([one for one in checked if isinstance(one[3], Answer) and one[1] == one[0].left])
    return [_checked(*one, early.get(one[0], [])) for one in checked]


@torch.no_grad()
def _early_picks(checked: list[tuple[Sequence, int, Guess, Any]]) -> dict[Sequence, list[EarlyPick] | Exception]:
    """The picks of all rows that can be picked from before anything is committed, for all sequences in one transfer; or the
    error of a sequence for which that fails.
    """
    found, requests = dict[Sequence, list[EarlyPick] | Exception](), dict[Sequence, PickRequest]()
    for one, _, guess, answer in checked:
        if one.picker.accept is None:
            try:
                requests[one] = _pick_request(one, guess.tree, answer)
            except Exception as error:
                found[one] = error
    with timed() as span:
        picked = _picked([*requests.values()])
    for one, some in zip(requests, picked, strict=True):
        found[one] = some
        one.meter.add(span.seconds / len(requests), "all", *(["noise"] if one.picker.noise else []))
    return found


def _picked(requests: list[PickRequest]) -> list[list[EarlyPick] | Exception]:
    """As `early_picks`, but if one sequence makes that fail, only that one gets the error."""
    try:
        return [*early_picks(requests)]
    except Exception as error:
        return [error] if len(requests) == 1 else [some for one in requests for some in _picked([one])]


def _pick_request(sequence: Sequence, tree: Tree, answer: Answer) -> PickRequest:
    with sequence.meter.timing("all"):
        picker, text = sequence.picker, sequence.text
        scores = picker.early_scores(sequence.ids, answer.logits)
        positions = text.positions(tree.tokens, tree.parents, len(scores)) if picker.noise is not None else []
        exact = 1 + _exact_node_count(sequence, tree)
        tolerances = [0.0 if row < exact else sequence.slot.tolerance for row in range(len(scores))]
        return PickRequest(picker, scores, positions, tolerances)


def _checked(
    sequence: Sequence, read: int, guess: Guess, checked: Answer | Exception, early: list[EarlyPick] | Exception
) -> list[int]:
    """Commit what was checked, if all of the sequence was read. Returns the ids."""
    try:
        for one in (checked, early):
            if isinstance(one, Exception):
                raise one
        assert isinstance(checked, Answer) and not isinstance(early, Exception)
        sequence.meter.add(checked.cost.share, "target", "all")
        sequence.meter.target_replays += checked.cost.replayed
        sequence.read += read
        if checked.hidden is not None and sequence.is_reading:
            sequence.hidden.append(checked.hidden)
            while sum(map(len, sequence.hidden[1:])) >= _KEPT:
                del sequence.hidden[0]
        if sequence.left or not _has_drafters(sequence):
            return []
        with sequence.meter.timing("all"):
            return _commit(sequence, guess, checked, early)
    except Exception as error:
        sequence.fail(error)
        return []


def _has_drafters(sequence: Sequence) -> bool:
    """Start the drafters of a sequence, if they haven't been. Returns False if that ended it: even an exit ends it alone."""
    try:
        _ = sequence.session
    except BaseException as error:
        sequence.fail(error)
        return False
    return True


def _commit(sequence: Sequence, guess: Guess, checked: Answer, early: list[EarlyPick]) -> list[int]:
    """Commit what the target picks along a guess, and let the drafts learn from it. Returns the ids."""
    session, tree = sequence.session, guess.tree
    read = [*sequence.text.ids[-1:], *tree.tokens]
    block, path, carried = _walk(sequence, guess, checked, early)
    kept = [node for node in path[1:] if node < _exact_node_count(sequence, tree)]
    sequence.slot.keep(kept)
    sequence.read += len(kept)
    if session is not None:
        last = None if carried is None else tree.child(path[-1], block[-1])
        session.extend(block, _hidden(sequence, tree, checked, path if last is None else [*path, last]), carried)
        if sequence.finish_reason is None:
            session.learn(guess, read, checked.logits[len(checked.logits) - len(read) :])
        sequence.outcome = session.outcome(guess, block, checked.cost.rows / checked.cost.texts)
    if sequence.finish_reason is not None:
        sequence.end()
    return block


def _hidden(sequence: Sequence, tree: Tree, checked: Answer, nodes: list[int]) -> Tensor | None:
    """The target's hidden states after some nodes (-1: the context), (nodes, layers, size), preceded by the prompt's if
    drafters haven't had those. None if no drafter reads hidden states.
    """
    if checked.hidden is None:
        return None
    context = len(checked.hidden) - len(tree) - 1
    prompt, sequence.hidden = sequence.hidden, []
    try:
        rows = [context + 1 + node for node in nodes]
        consecutive = rows[-1] - rows[0] == len(rows) - 1  # as they mostly are, and slices take less time
        states = checked.hidden[slice(rows[0], rows[-1] + 1) if consecutive else rows]  # `cat` copies it: graphs reuse memory
        return torch.cat([*prompt[:-1], *(last[:context] for last in prompt[-1:]), states])
    except Exception:  # no memory, say: drafters go on with what comes next
        return None


@torch.no_grad()
def _walk(sequence: Sequence, guess: Guess, checked: Answer, early: list[EarlyPick]) -> tuple[list[int], list[int], int | None]:
    """Pick id after id along the guesses, until no guess matches or the sequence ends.

    Returns the picked ids; the nodes after which they were picked (-1, for the context, and then accepted guesses); and the
    carried token: the likely next pick, if it is left to the next round.
    """
    text, tree = sequence.text, guess.tree
    offset, _ = text.position
    block, path, carried = list[int](), list[int](), None
    node: int | None = -1
    while node is not None and sequence.finish_reason is None:
        token, certain = _pick(sequence, tree, node, checked, early)
        if token is None or not certain:
            carried = token
            break
        path.append(node)
        block.append(token)
        sequence.picker.note_near_tie(len(text.ids) - text.prompt_length)
        sequence.append(token)
        node = tree.child(node, token)
    sequence.catch_up()
    right = (*path[1:], *([] if node is None else [node]))
    shown = replace(tree, distributions=()) if tree.distributions else tree
    sequence.rounds.append(Round(offset, shown, tuple(guess.owners), right, len(block)))
    return block, path, carried


def _pick(sequence: Sequence, tree: Tree, node: int, checked: Answer, early: list[EarlyPick]) -> tuple[int | None, bool]:
    """The pick after a node, and whether it is certain. If it may depend on the node's position in the cache, it is left to the
    next round.
    """
    picker, logits = sequence.picker, checked.logits[node + 1 : node + 2]
    given = sequence.ids, logits, sequence.text.position
    picked = early[node + 1] if node + 1 < len(early) else None
    if node < _exact_node_count(sequence, tree):
        return picker.pick(*given, after=(tree, node), early=picked), True
    return picker.if_certain(*given, sequence.slot.tolerance, picked)


def _exact_node_count(sequence: Sequence, tree: Tree) -> int:
    """How many of the first nodes get exactly the logits that they would get if they were committed first.

    With fixed shapes, those of the others differ in their last bits: attention adds up in the order of the cache. They are
    forwarded again in the next round, if they turn out right.
    """
    return tree.leading_chain if sequence.slot.fixed else len(tree)
