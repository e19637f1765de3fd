"""One KV cache for many texts: each has a row of its own in it, and one forward serves all that ask for one.

A row's keys and values stand at places of its own, and are seen through an explicit mask with position ids per row. So a
rewind is a smaller length, a sliding window is a mask, texts of unlike lengths need no realignment, and a text that ends
leaves its row to the next one. Nothing is copied but when the cache grows, and where a branch wins.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import ceil

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from xtok.models.cache import CACHE, device_of, keeps_rows, new_cache, vocabulary_size, windows
from xtok.models.forwards import Answer, Ask, wait_for
from xtok.models.graphs import Graphs, Inputs, state_of
from xtok.models.layers import Layer, View, doubled
from xtok.models.masks import KEPT, PADDING, Trees
from xtok.models.timing import Cost, timed

CHUNK = 512
"""How many ids of a prompt are forwarded at once."""
_NARROW, _PADDED = 8, 64
"""Texts of up to so many new ids share a forward however unlike they are, and forwards of up to so many rows of padding and ids
are shared: that costs less than forwards of their own.
"""
_LEAST, _MOST = 128, 4096
"""How many places are looked at at least, and by how many more at most, where forwards have few shapes."""
USUAL = 16
"""How many new ids of one text forwards of the usual fixed shape have. Of prompts more are forwarded at once, in forwards of
their own, until no more than that are left.
"""


class Shapes:
    """Which shapes the forwards of a model are to have, so that an id has the same bits whatever is forwarded with it."""

    @property
    def tolerance(self) -> float:
        """By how much, in logits, the best id behind a node that stands at another place than alone is to beat the second."""
        return 0.0

    def refresh(self) -> None:
        """Look at what a caller may have changed since."""

    def served(self, seconds: float) -> None:
        """Learn how long a forward pass took."""

    def seen(self, positions: int) -> int:
        """How many places of each row are looked at where a text has so many positions."""
        return rounded(positions)

    def width(self, rows: int, new: int, seen: int) -> int | None:
        """How many ids of each of some rows are to be forwarded, where there are `new`; None where no shape is fit."""
        raise NotImplementedError

    def widest(self, seen: int) -> int:
        """How many new ids of one text can be forwarded."""
        raise NotImplementedError


class Row:
    """A text's slot in a cache that others share; `Slot` says what it does.

    `moves`: which places of the row, kept nodes of a tree, are yet to move where.
    """

    shares = True
    chunk: int | None = CHUNK
    fixed = False

    def __init__(self, server: "Slots", index: int, most: int | None) -> None:
        self.server = server
        self.index = index
        self.most = most
        self.device, self.vocabulary = server.device, server.vocabulary
        self.length = self.branched = self.forwards = 0
        self.moves: list[tuple[int, int]] = []

    @property
    def tolerance(self) -> float:
        """Nothing: forwards have any shape."""
        return 0.0

    @property
    def held(self) -> int:
        """How many places are taken."""
        return self.length + self.branched

    def takes(self, new: int, prompt: int) -> int:
        """How many of `new` ids are forwarded next, the first `prompt` of which are of a prompt."""
        return min(new, CHUNK)

    def guesses(self, new: int) -> int:
        """How many nodes of a tree can be forwarded behind so many new ids."""
        return sys.maxsize

    def take(self, ask: Ask) -> None:
        """Count what was forwarded."""
        self.length += len(ask.ids) - len(ask.parents)
        self.branched += len(ask.parents)
        self.forwards += 1

    def keep(self, path: Sequence[int]) -> None:
        """End a tree: keep the nodes of `path`, each the parent of the next and the first a child of -1. Drop the others."""
        self.moves += [(self.length + node, self.length + place) for place, node in enumerate(path) if node != place]
        self.roll_back(self.length + len(path))

    def roll_back(self, length: int) -> bool:
        """Take the newest positions back until `length` are left. True: it always can."""
        self.length, self.branched = length, 0
        return True

    def start_anew(self) -> None:
        """Forget everything."""
        self.roll_back(0)

    def leave(self) -> None:
        """Make room for another text."""
        self.server.leave(self)


class FixedRow(Row):
    """A slot whose forwards have shapes that follow from its text's length and its prompt's, and from nothing else."""

    fixed = True

    def __init__(self, server: "Slots", index: int, most: int | None, shapes: Shapes) -> None:
        super().__init__(server, index, most)
        self._shapes = shapes

    @property
    def tolerance(self) -> float:
        """That of the shapes."""
        return self._shapes.tolerance

    def takes(self, new: int, prompt: int) -> int:
        """Of a prompt powers of two, down from a whole chunk, so that none crosses where more places are looked at."""
        if prompt > USUAL:
            return min(CHUNK, 1 << (prompt - 1).bit_length() - 1)
        return min(new, USUAL, self._shapes.seen(self.length + 1) - self.length)

    def guesses(self, new: int) -> int:
        """No more than the widest forward holds, and none that would make it look at more places."""
        seen = self._shapes.seen(self.length + new)
        return min(seen - self.length, self._shapes.widest(seen)) - new


class Slots:
    """A model, and one cache for the texts that it forwards together.

    Law: a text's logits are those that it has alone, within rounding, whatever other rows hold; with `shapes` in every bit,
    behind ids that are kept and behind nodes that stand where they would if they were kept. Rows that aren't asked for and
    stand between others are forwarded with padding.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        shows_hidden: bool = False,
        rows: int = 1,
        room: int | None = None,
        shapes: Shapes | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        """`rows`: how many there are from the beginning. `room`: how many positions all of them together may have, rows ×
        positions of a row, as long as the texts in them need no more; None for as many as come. `shapes`: those that forwards
        are to have; None for what each needs. `graphs`: where forwards are captured; then they have few shapes, too.
        """
        own = new_cache(model)
        kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or [""]
        self.device, self.vocabulary = device_of(model), vocabulary_size(model)
        self._model, self._shapes, self._graphs = model, shapes, graphs
        windows_of = dict(zip(kinds, windows(own), strict=False))
        self._view = View(rows, room, evenly=shapes is not None)
        self._layers = [Layer(self._view) for _ in own.layers]
        self._cache = Cache(layers=list(self._layers))
        self._trees = Trees(windows_of, model.dtype, self.device)
        self.state = None if graphs is None else state_of(model)
        self._keeps = keeps_rows(model)
        self._shown = {"output_hidden_states": True} if shows_hidden else {}
        self._rows: list[Row | None] = []
        self._used: list[int] = []  # up to where the places of each row may hold something

    def join(self, most: int | None = None) -> Row:
        """A row for a text, which may have so many positions beside guesses: one that another left, or a further one."""
        if None not in self._rows:
            self._rows.append(None)
            self._used += [0] * (len(self._rows) - len(self._used))
        index = self._rows.index(None)
        row = Row(self, index, most) if self._shapes is None else FixedRow(self, index, most, self._shapes)
        self._rows[row.index] = row
        return row

    def leave(self, row: Row) -> None:
        """Let go of a row."""
        if row.index < len(self._rows) and self._rows[row.index] is row:
            self._rows[row.index] = None

    def empty(self) -> None:
        """Let go of all rows."""
        self._rows.clear()

    @property
    def position_bytes(self) -> int:
        """How many bytes a position of a row takes; 0 before the first forward."""
        held = [part for layer in self._layers for part in (layer.keys, layer.values) if part is not None]
        return sum(part.shape[1] * part.shape[3] * part.element_size() for part in held)

    def tiled(self, rows: int, positions: int, room: int, shapes: Shapes) -> "Slots":
        """A cache with room for so many positions of each of some rows, which hold in some of them, over and over, what this
        one's first row holds.
        """
        made = Slots(self._model, rows=rows, shapes=shapes)
        made._used = [positions] * rows
        for layer, own in zip(made._layers, self._layers, strict=True):
            if positions:
                layer.tile(own, rows, positions, room, self._used[0])
        return made

    def held(self, start: int, stop: int) -> list[Tensor]:
        """Keys and values of each layer at some places, (rows, heads, places, size) each."""
        return [part[:, :, start:stop] for layer in self._layers for part in (layer.keys, layer.values) if part is not None]

    def groups(self, asks: Sequence[Ask]) -> list[list[Ask]]:
        """Which are to share a forward: those of about as many new ids, where little of it would be padding."""
        self._close_gaps()
        if self._shapes is None:
            return [part for group in _alike(asks) for part in _dense(group)]
        self._shapes.refresh()
        narrow = sorted((ask for ask in asks if not _is_wide(ask)), key=self._seen)
        kinds = [list(kind) for _, kind in groupby(narrow, key=self._seen)]
        parts = (part for kind in kinds for group in _alike(kind) for part in _dense(group))
        return [*([ask] for ask in asks if _is_wide(ask)), *(fit for part in parts for fit in self._fitting(part))]

    def _seen(self, ask: Ask) -> int:
        """How many places are looked at, of fixed shapes."""
        assert self._shapes is not None
        return self._shapes.seen(_row(ask).held + len(ask.ids))

    def _fitting(self, asks: list[Ask]) -> list[list[Ask]]:
        """A group as it is, if there is a shape for it, else each alone."""
        return [asks] if self._width(asks) is not None else [[ask] for ask in asks]

    def _width(self, asks: Sequence[Ask]) -> int | None:
        """How many ids of each row are forwarded; None where the group has no shape."""
        new = max(len(ask.ids) for ask in asks)
        if self._captures(asks) and self._shapes is None:
            return doubled(new)
        if self._shapes is None or _is_wide(asks[0]):
            return new
        first, last = self._span(asks)
        return self._shapes.width(last - first, new, self._seen(asks[0]))

    def _span(self, asks: Sequence[Ask]) -> tuple[int, int]:
        """The first row that is forwarded, and the one behind the last.

        Where forwards are captured these are all rows up to a power of two, as far as there are so many: few shapes.
        """
        first, last = _ends(asks)
        if self._shapes is not None or not self._captures(asks):
            return first, last
        rows = min(len(layer.keys) for layer in self._layers if layer.keys is not None)
        return 0, max(last, min(doubled(last), rows))

    @torch.no_grad()
    def serve(self, asks: Sequence[Ask]) -> list[Answer]:
        """Answer texts of different rows by one forward."""
        first, last = self._span(asks)
        width = self._width(asks)
        assert width is not None
        self._settle()
        before = self._replays
        with timed() as took:
            logits, *hidden = self._forward(first, last, asks, width)
            wait_for(logits)
        if self._shapes is not None:
            self._shapes.served(took.seconds)
        replayed = self._replays > before
        cost = Cost((last - first) * width, took.seconds, len(asks), replayed=replayed)  # padding included
        for ask in asks:
            _row(ask).take(ask)
        found = list[Answer]()
        for ask in asks:
            row = _row(ask).index - first, slice(-ask.rows, None)
            shown = hidden[0][row] if hidden else None
            found.append(Answer(logits[row], shown, cost._replace(told=bool(found))))
        return found

    def _forward(self, first: int, last: int, asks: Sequence[Ask], width: int) -> list[Tensor]:
        """Forward `width` ids of each row from `first` to `last`.

        Returns their logits, (rows, new, vocabulary), and last hidden states, (rows, new, size), where they are shown.
        """
        rows = [row for row in self._rows[first:last] if row is not None]
        asked = {_row(ask).index: ask for ask in asks}
        news = [_New.of(row, asked.get(row.index)) for row in rows]
        news += [_New(0, 0, (), (), 0)] * (last - first - len(news))  # rows that no text is in
        nodes = max(one.nodes for one in news)
        ends = [one.base + len(one.ids) + (len(one.ids) < width) for one in news]
        reach = max(max(end, one.trunk + nodes) for end, one in zip(ends, news, strict=True))
        seen = self._seen(asks[0]) if self._shapes is not None else reach if self._graphs is None else rounded(reach)
        self._clear(first, ends, seen)
        self._make_room(last, max(seen, reach))
        table = torch.tensor([one.line(width, asks[0].ids[0]) for one in news], dtype=torch.int64, device=self.device)
        base, trunk, ids, parents = table[:, :1], table[:, 1:2], table[:, 2 : 2 + width], table[:, 2 + width :]
        padding = (parents == PADDING).sum(dim=1, keepdim=True)
        places = torch.arange(width, dtype=torch.int64, device=self.device) - padding
        places = base + torch.where(places < 0, width - padding, places)  # padding goes to one place behind what is new
        linked = any(one.linked for one in news)
        positions, masks = self._trees.add(slice(first, last), trunk, places, parents, nodes=nodes, seen=seen, linked=linked)
        inputs = {"ids": ids, "positions": positions, "places": places, **masks}
        if not self._captures(asks):
            start = news[0].base if len(news) == 1 and len(news[0].ids) == width else None
            whole = self._shapes is not None and not _is_wide(asks[0])  # how many rows a matrix has may change its bits
            return self._computed(first, seen, inputs, start, None if whole else max(ask.rows for ask in asks))
        assert self._graphs is not None
        return self._graphs.run((first, last, width, seen), partial(self._computed, first, seen), inputs)

    @property
    def _replays(self) -> int:
        """How many forwards were replayed."""
        return 0 if self._graphs is None else self._graphs.replays

    def _captures(self, asks: Sequence[Ask]) -> bool:
        """Whether the forward is one of those that are captured; not one that makes the cache or reads a prompt."""
        return self._graphs is not None and not _is_wide(asks[0]) and all(layer.is_initialized for layer in self._layers)

    def _computed(
        self, first: int, seen: int, inputs: Inputs, start: int | None = None, logits: int | None = None
    ) -> list[Tensor]:
        """What the model computes, by nothing but `inputs` and the cache where all else is as it was: so it can be captured.

        `first`: the first row. `seen`: how many places are looked at. `start`: the place of the first new id, where one row
        is forwarded without padding. `logits`: of how many of the last ids those are wanted; None for all.
        """
        ids, positions, places, *masks = inputs.values()
        self._view.look(first, places, seen, start)
        outputs = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=masks[0] if len(masks) == 1 else dict(zip(list(inputs)[3:], masks, strict=True)),
            use_cache=True,
            return_dict=True,
            **{CACHE: self._cache},
            **self._shown,
            **({"logits_to_keep": logits} if self._keeps and logits is not None else {}),
        )
        return [outputs.logits, *(outputs.hidden_states[-1:] if self._shown else ())]

    def _make_room(self, rows: int, positions: int) -> None:
        """Let the cache have so many rows and positions at least. What was captured knows its former places."""
        self._view.need(rows, positions, len(self._rows), max(row.held for row in self._rows if row is not None))
        if self._graphs is not None and any(layer.is_short for layer in self._layers):
            self._graphs.clear()
        for layer in self._layers:
            layer.grow()

    def _clear(self, first: int, ends: Sequence[int], seen: int) -> None:
        """Empty what others left behind the `ends` of rows, as far as it is looked at: what isn't a number would be seen
        through any mask.
        """
        self._used += [0] * (first + len(ends) - len(self._used))
        for index, end in enumerate(ends, start=first):
            if end < min(self._used[index], seen):
                for layer in self._layers:
                    layer.clear(index, end, self._used[index])
                self._used[index] = end
            self._used[index] = max(self._used[index], end)

    def _settle(self) -> None:
        """Move the nodes of branches that won to where they are kept."""
        moves = [(row.index, *move) for row in self._rows if row is not None for move in row.moves]
        if moves:
            rows, sources, places = torch.tensor(moves, dtype=torch.int64, device=self.device).T
            for layer in self._layers:
                layer.move(rows, sources, places)
        for row in self._rows:
            if row is not None:
                row.moves.clear()

    def _close_gaps(self) -> None:
        """Let the last rows take the places of rows that were left, so that no forward runs over empty ones."""
        self._settle()
        while None in self._rows:
            row = self._rows.pop()
            if row is not None:
                used = self._used[row.index]  # which stays: the row holds what it held
                gap = self._rows.index(None)
                for layer in self._layers if used else ():
                    layer.copy(row.index, gap, used)
                self._trees.copy(row.index, gap)
                self._rows[gap], self._used[gap], row.index = row, max(used, self._used[gap]), gap


def rounded(positions: int) -> int:
    """How many places are looked at where a text has so many and there are to be few shapes: 128, twice as many up to 4,096,
    then multiples of that.
    """
    doubled = (_LEAST << power for power in range((_MOST // _LEAST).bit_length()))
    return next((size for size in doubled if size >= positions), _MOST * ceil(positions / _MOST))


def _row(ask: Ask) -> Row:
    assert isinstance(ask.slot, Row)
    return ask.slot


def _ends(asks: Sequence[Ask]) -> tuple[int, int]:
    """The first row of some texts, and the one behind the last."""
    indices = [_row(ask).index for ask in asks]
    return min(indices), 1 + max(indices)


def _is_wide(ask: Ask) -> bool:
    """Whether it is a part of a prompt whose forward, where shapes are fixed, is as wide as the part, and of one text."""
    return len(ask.ids) > USUAL and not ask.parents


def _alike(asks: Sequence[Ask]) -> list[list[Ask]]:
    """Groups of about as many new ids."""
    groups = list[list[Ask]]()
    for ask in sorted(asks, key=lambda ask: len(ask.ids)):
        if groups and len(ask.ids) <= max(_NARROW, 2 * len(groups[-1][0].ids)):
            groups[-1].append(ask)
        else:
            groups.append([ask])
    return groups


def _dense(group: list[Ask]) -> list[list[Ask]]:
    """A group as it is, or in parts whose rows stand side by side, where rows between them would be much padding."""
    group = sorted(group, key=lambda ask: _row(ask).index)
    (first, last), width = _ends(group), max(len(ask.ids) for ask in group)
    if (last - first) * width <= max(_PADDED, 2 * sum(len(ask.ids) for ask in group)):
        return [group]
    parts = groupby(enumerate(group), key=lambda pair: _row(pair[1]).index - pair[0])
    return [[ask for _, ask in part] for _, part in parts]


@dataclass(frozen=True)
class _New:
    """What is new in a row: its ids, from place `base` on, the last of them nodes behind `trunk` positions; all its nodes."""

    base: int
    trunk: int
    ids: Sequence[int]
    parents: Sequence[int]
    nodes: int

    @classmethod
    def of(cls, row: Row, ask: Ask | None) -> "_New":
        """Nothing in a row that doesn't ask."""
        if ask is None:
            return cls(row.held, row.length, (), (), row.branched)
        kept = len(ask.ids) - len(ask.parents)
        return cls(row.held, row.length + kept, ask.ids, [*[KEPT] * kept, *ask.parents], row.branched + len(ask.parents))

    @property
    def linked(self) -> bool:
        """Whether one of the new ids is the parent of another."""
        return max(self.parents, default=KEPT) >= self.nodes - sum(parent > KEPT for parent in self.parents)

    def line(self, width: int, other: int) -> list[int]:
        """All of it as numbers, with padding in front: by an id of its own, for one that it doesn't have may be no number.

        `other`: an id for a row without any.
        """
        padding = width - len(self.ids)
        filler = self.ids[0] if self.ids else other
        return [self.base, self.trunk, *[filler] * padding, *self.ids, *[PADDING] * padding, *self.parents]
