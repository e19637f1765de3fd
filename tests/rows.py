"""Rows of a shared cache, beside what they ought to hold."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from front_door import forwards
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from inside import rows_of, used
from torch import Tensor
from transformers import PreTrainedModel
from worlds import ARCHITECTURES, assert_close, model

from xtok.models.forwards import Answer, ForwardRequest, run_forwards
from xtok.models.shared_cache import SharedCache
from xtok.models.shared_slot import SharedSlot

VOCABULARY = 40
FAULTY = VOCABULARY - 1
"""The id at which a forward fails, if it is to."""
LONGEST = 400
PLACES = ("before all layers", "between two", "after all layers")
tokens = st.integers(0, FAULTY - 1)
few = st.lists(tokens, max_size=4)
"""With a tree after them still so few that all share a forward, however unlike they are."""


@dataclass
class Held:
    """What a row ought to hold: ids that are kept, and after them the nodes of a tree, each with its parent."""

    slot: SharedSlot
    ids: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def path(self, node: int) -> list[int]:
        """All ids that a node sees, itself included."""
        if node < 0:
            return self.ids[: len(self.ids) + node + 1]
        return [*self.path(self.parents[node]), self.nodes[node]]

    def root(self, node: int) -> int:
        """What the path to a node begins after: -1 or -2."""
        return self.root(self.parents[node]) if node >= 0 else node

    def with_new(self, ids: Sequence[int], parents: Sequence[int]) -> "Held":
        """What it holds when an ask is answered."""
        kept = len(ids) - len(parents)
        return Held(self.slot, [*self.ids, *ids[:kept]], [*self.nodes, *ids[kept:]], [*self.parents, *parents])

    def take(self, other: "Held") -> None:
        self.ids, self.nodes, self.parents = other.ids, other.nodes, other.parents


@dataclass
class Asked:
    """An ask, what its row holds when it is answered, and what is seen by each id whose logits it asks for."""

    held: Held
    ask: ForwardRequest
    then: Held
    paths: list[list[int]]


def asked(held: Held, ids: Sequence[int], parents: Sequence[int], rows: int) -> Asked:
    then, kept = held.with_new(ids, parents), len(held.ids)
    new = [then.ids[: kept + i + 1] for i in range(len(ids) - len(parents))]
    new += [then.path(len(held.nodes) + i) for i in range(len(parents))]
    return Asked(held, ForwardRequest(held.slot, list(ids), rows, list(parents)), then, new[-rows:])


def anew(lm: PreTrainedModel, paths: list[list[int]]) -> list[Tensor]:
    """The logits after each of some texts, forwarded as a whole; what is padded at the end is seen by nothing before it."""
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(path) for path in paths], batch_first=True)
    with torch.no_grad():
        logits = lm(padded).logits
    return [row[len(path) - 1] for row, path in zip(logits, paths, strict=True)]


def check(lm: PreTrainedModel, all_asked: Sequence[Asked], answers: Sequence[Answer | Exception]) -> None:
    """All are answered by what forwarding the texts anew gives."""
    expected = iter(anew(lm, [path for one in all_asked for path in one.paths]))
    for one, answer in zip(all_asked, answers, strict=True):
        assert isinstance(answer, Answer), answer
        assert_close(answer.logits, torch.stack([next(expected) for _ in one.paths]))
        one.held.take(one.then)


@contextmanager
def failing_by_an_id(lm: PreTrainedModel, place: str) -> Iterator[list[int]]:
    """A model that raises in each forward that reads `FAULTY`. Counts those."""
    layers = next(module for module in lm.modules() if isinstance(module, torch.nn.ModuleList))
    failed: list[int] = []
    reads_it = False

    def look(_: Any, args: Any, kwargs: Any) -> None:
        nonlocal reads_it
        reads_it = bool((kwargs["input_ids"] == FAULTY).any())

    def fail(*_: Any) -> None:
        if reads_it:
            failed.append(1)
            raise RuntimeError("simulated")

    part: Any = {PLACES[0]: lm, PLACES[1]: layers[1], PLACES[2]: lm.get_output_embeddings()}[place]
    handles = [lm.register_forward_pre_hook(look, with_kwargs=True), part.register_forward_pre_hook(fail)]
    try:
        yield failed
    finally:
        for handle in handles:
            handle.remove()


def shapes(slots: SharedCache) -> set[tuple[int, int]]:
    """How many rows and positions there are."""
    return {(part.shape[0], part.shape[2]) for part in slots.parts}


def poison(slots: SharedCache, index: int, start: int = 0, end: int | None = None) -> None:
    """Let some positions of a row hold what isn't a number, as a text that overflows leaves it. `end`: None for all used."""
    for part in slots.parts:
        part[index : index + 1, :, start : used(slots, index) if end is None else end] = float("nan")


class Sharing(RuleBasedStateMachine):
    """Law 8: a batch changes nothing. Lists hold what the rows ought to hold.

    `forwards`: how often a model may be called if one forward answers all.
    """

    forwards: tuple[int, ...] = (1,)

    @initialize(
        architecture=st.sampled_from(sorted(ARCHITECTURES)),
        seed=st.integers(0, 1),
        texts=st.integers(1, 4),
        rows=st.integers(1, 6),
        room=st.sampled_from([None, 1, 60, 200, 400]),
    )
    def start(self, architecture: str, seed: int, texts: int, rows: int, room: int | None) -> None:
        self.begin(architecture, seed, texts, rows, room)

    def begin(self, architecture: str, seed: int, texts: int, rows: int, room: int | None) -> None:
        self.model = model(architecture, VOCABULARY, seed, torch.float64)
        self.slots = SharedCache(self.model, rows=rows, capacity=room)
        self.room, self.needed = room, 0
        self.texts = [Held(self.slots.join()) for _ in range(texts)]

    @precondition(lambda self: len(self.texts) < 5)
    @rule()
    def join(self) -> None:
        self.texts.append(Held(self.slots.join()))

    def chosen(self, data: st.DataObject, most: int = 5) -> list[Held]:
        able = [one for one in self.texts if len(one.ids) < LONGEST]
        return data.draw(st.lists(st.sampled_from(able), min_size=1, max_size=most, unique_by=id)) if able else []

    def drawn(self, held: Held, data: st.DataObject) -> Asked:
        """Ids that are kept, nodes of a tree, or those after these. Where a tree stands, there are further nodes alone."""
        kept = [] if held.nodes else data.draw(few)
        nodes = data.draw(st.lists(tokens, min_size=not kept, max_size=4))
        first = -2 if len(held.ids) + len(kept) > 1 else -1
        parents = [data.draw(st.integers(first, len(held.nodes) + i - 1)) for i in range(len(nodes))]
        if data.draw(st.booleans()):  # a chain
            parents = list(range(len(held.nodes) - 1, len(held.nodes) + len(nodes) - 1))
        return asked(held, [*kept, *nodes], parents, data.draw(st.integers(1, len(kept) + len(nodes))))

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        """One forward answers all."""
        if all_asked := [self.drawn(one, data) for one in self.chosen(data)]:
            with forwards(self.model) as seen:
                answers = run_forwards([one.ask for one in all_asked])
            assert len(seen) in self.forwards
            check(self.model, all_asked, answers)
            assert [isinstance(one, Answer) and one.cost.texts for one in answers] == [len(answers)] * len(answers)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def ask_for_much(self, data: st.DataObject) -> None:
        """The cache grows, beside texts that ask for little."""
        all_asked = []
        for one in self.chosen(data):
            if one.nodes or data.draw(st.booleans()):
                all_asked.append(self.drawn(one, data))
            else:
                size, step = data.draw(st.integers(33, 90)), data.draw(st.integers(1, FAULTY - 1))
                all_asked.append(asked(one, [(7 + step * i) % FAULTY for i in range(size)], (), data.draw(st.integers(1, 3))))
        if all_asked:
            check(self.model, all_asked, run_forwards([one.ask for one in all_asked]))

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), place=st.sampled_from(PLACES))
    def ask_for_what_fails(self, data: st.DataObject, place: str) -> None:
        """A sequence whose forward fails gets the error, and holds what it held; the others are answered."""
        all_asked = [self.drawn(one, data) for one in self.chosen(data)]
        faulty = data.draw(st.lists(st.booleans(), min_size=len(all_asked), max_size=len(all_asked)))
        for one, fails in zip(all_asked, faulty, strict=True):
            if fails:
                one.ask.ids[data.draw(st.integers(0, len(one.ask.ids) - 1))] = FAULTY  # type: ignore[index]
        if all_asked:  # what fails may have taken room before
            most = max(one.held.slot.held for one in all_asked) + 2 * max(len(one.ask.ids) for one in all_asked)
            self.needed = max(self.needed, len(rows_of(self.slots)) * (max(one.slot.held for one in self.texts) + most))
        with failing_by_an_id(self.model, place) as failed:
            answers = run_forwards([one.ask for one in all_asked])
        assert [isinstance(answer, Exception) for answer in answers] == faulty
        assert len(failed) == sum(faulty) + (sum(faulty) > 0 and len(faulty) > 1)
        right = [pair for pair, fails in zip(zip(all_asked, answers, strict=True), faulty, strict=True) if not fails]
        if right:
            check(self.model, *map(list, zip(*right, strict=True)))  # type: ignore[arg-type]

    @precondition(lambda self: any(one.nodes for one in self.texts))
    @rule(data=st.data())
    def keep_a_path(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from([one for one in self.texts if one.nodes]))
        node = data.draw(st.sampled_from([-1, *(node for node in range(len(held.nodes)) if held.root(node) == -1)]))
        path: list[int] = []
        ids = held.path(node)
        while node >= 0:
            path, node = [node, *path], held.parents[node]
        held.slot.keep(path)
        held.ids, held.nodes, held.parents = ids, [], []

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.texts))
        length = data.draw(st.one_of(st.just(0), st.integers(max(0, len(held.ids) - 12), len(held.ids))))
        assert held.slot.roll_back(length)
        held.ids, held.nodes, held.parents = held.ids[:length], [], []

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), times=st.integers(1, 2), overflows=st.booleans())
    def leave(self, data: st.DataObject, times: int, overflows: bool) -> None:
        """What a text forwarded may be no numbers."""
        held = self.texts.pop(data.draw(st.integers(0, len(self.texts) - 1)))
        if overflows:
            poison(self.slots, held.slot.index)
        for _ in range(times):
            held.slot.leave()

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def overflow_in_what_is_taken_back(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.texts))
        if not held.slot.moves:
            poison(self.slots, held.slot.index, held.slot.held)

    @invariant()
    def slots_are_as_long_as_their_ids_and_no_two_texts_have_one_row(self) -> None:
        if hasattr(self, "texts"):
            assert [(one.slot.length, one.slot.branched) for one in self.texts] == [
                (len(one.ids), len(one.nodes)) for one in self.texts
            ]
            assert len({one.slot.index for one in self.texts}) == len(self.texts)
            assert all(rows_of(self.slots)[one.slot.index] is one.slot for one in self.texts)

    @invariant()
    def there_is_no_more_room_than_is_needed_or_there_may_be(self) -> None:
        if getattr(self, "room", None) is not None:
            length = max((one.slot.length for one in self.texts), default=0)
            nodes = max((one.slot.branched for one in self.texts), default=0)
            self.needed = max(self.needed, len(rows_of(self.slots)) * (length + nodes + 1))  # where padding goes
            kept = self.slots.prefixes.positions if self.slots.prefixes is not None else 0
            assert all(rows * positions + kept <= max(self.room, self.needed) for rows, positions in shapes(self.slots))


LM = model("Llama", VOCABULARY, 0, torch.float64)


def filled(slots: SharedCache, *sizes: int) -> list[Held]:
    """Texts of so many ids, in rows of their own."""
    texts = [Held(slots.join()) for _ in sizes]
    all_asked = [
        asked(held, [(3 + 5 * row + i) % FAULTY for i in range(size)], (), 1)
        for row, (held, size) in enumerate(zip(texts, sizes, strict=True))
    ]
    check(LM, all_asked, run_forwards([one.ask for one in all_asked]))
    return texts


def ask_one_more(texts: Sequence[Held], lm: PreTrainedModel = LM) -> None:
    all_asked = [asked(held, [11], (), 1) for held in texts]
    check(lm, all_asked, run_forwards([one.ask for one in all_asked]))
