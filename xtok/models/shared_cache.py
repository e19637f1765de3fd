"""One KV cache for many sequences: each has a row of its own in it, and one forward pass serves all that ask for one.

A row's keys and values are written to positions of its own, and are seen through an explicit mask with position ids per row. So
a roll-back is a smaller length, a sliding window is a mask, and a sequence that ends leaves its row to the next one. Nothing is
copied except when the cache grows, and when a branch wins.
"""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from xtok.models import timing
from xtok.models.cache import CACHE, stacked
from xtok.models.forwards import Answer, ForwardRequest, Parent, wait_for
from xtok.models.graphs import Graphs, Inputs
from xtok.models.groups import bisect_until_fits, by_positions, grouped, is_wide
from xtok.models.layers import Layer, View, doubled
from xtok.models.masks import NewIds, Trees
from xtok.models.runner import runner_of
from xtok.models.shapes import CHUNK, Shapes, rounded
from xtok.models.timing import EXCLUDED, Cost
from xtok.models.traits import Traits, read


class SharedSlot:
    """A sequence's row in a shared cache; `Slot` says what it does.

    `moves`: the positions of kept tree nodes that are yet to be moved within the row, each with the position to move it to.
    """

    shares = True
    chunk: int | None = CHUNK

    def __init__(self, server: "SharedCache", index: int, limit: int | None, shapes: Shapes | None = None) -> None:
        self.server = server
        self.index = index
        self.limit = limit
        self._shapes = shapes
        self.fixed = shapes is not None
        self.device, self.vocabulary = server.device, server.vocabulary
        self.length = self.branched = self.forwards = 0
        self.moves: list[tuple[int, int]] = []

    @property
    def tolerance(self) -> float:
        return 0.0 if self._shapes is None else self._shapes.tolerance

    @property
    def held(self) -> int:
        """How many positions of the row are taken."""
        return self.length + self.branched

    def takes(self, new: int, prompt: int) -> int:
        return min(new, CHUNK) if self._shapes is None else self._shapes.takes(self.length, new, prompt)

    def guesses(self, new: int) -> int:
        return sys.maxsize if self._shapes is None else self._shapes.guesses(self.length, new)

    def new(self, ask: ForwardRequest | None) -> NewIds:
        """The new ids that `ask` adds to the row; none if it is None."""
        if ask is None:
            return NewIds(self.held, self.length, nodes=self.branched)
        kept = len(ask.ids) - len(ask.parents)
        parents = [*[Parent.KEPT] * kept, *ask.parents]
        return NewIds(self.held, self.length + kept, ask.ids, parents, self.branched + len(ask.parents))

    def take(self, ask: ForwardRequest) -> None:
        self.length += len(ask.ids) - len(ask.parents)
        self.branched += len(ask.parents)
        self.forwards += 1

    def keep(self, path: Sequence[int]) -> None:
        self.moves += [(self.length + node, self.length + place) for place, node in enumerate(path) if node != place]
        self.roll_back(self.length + len(path))

    def roll_back(self, length: int) -> bool:
        self.length, self.branched = length, 0
        return True

    def start_anew(self) -> None:
        self.roll_back(0)

    def adopt(self, ids: Sequence[int]) -> int:
        return 0

    def leave(self, *, keep: bool = False) -> None:
        self.server.leave(self, keep=keep)


class SharedCache:
    """A model, and one KV cache for the sequences that it forwards together.

    Law: a sequence's logits are those that it has alone, within rounding, whatever other rows hold. With `shapes`, they are the
    same in every bit, after kept ids and after nodes whose index is their depth. Rows between those that ask get padding.
    """

    _slot_kind: type[SharedSlot] = SharedSlot

    def __init__(
        self,
        model: PreTrainedModel,
        known: Traits | None = None,
        *,
        hidden_layers: Sequence[int] = (),
        rows: int = 1,
        capacity: int | None = None,
        shapes: Shapes | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        """`known`: the model's traits. `hidden_layers`: after which layers answers have hidden states. `rows`: how many the
        cache has at first. `capacity`: how many rows × positions it may have, unless running sequences need more; None for any
        number. `shapes`: those that forward passes are to have; None for what each needs. `graphs`: captures forward passes,
        which then have few shapes, too.
        """
        known = known or read(model)
        self.device, self.vocabulary, self._window = known.device, known.vocabulary, known.window
        self._model, self._shapes, self._graphs = model, shapes, graphs
        self.runner = runner_of(model)
        self._forwarded: Any = self.runner.model_of(model)
        self._infers = self.runner.infers and graphs is None
        self.has_graphs = graphs is not None
        self._view = View(rows, capacity, evenly=shapes is not None)
        self._layers = list(map(Layer, repeat(self._view, len(known.layers))))
        self._cache = Cache(layers=list(self._layers))
        self._trees = Trees(known.windows, known.dtype, self.device)
        self._keeps = known.supports_logits_to_keep
        self._hidden_layers = tuple(hidden_layers)
        self._rows: list[SharedSlot | None] = []
        self._used: list[int] = []  # up to which position each row may hold something

    def join(self, most: int | None = None) -> SharedSlot:
        """A row for a new sequence: one that another left, or a new one.

        `most`: how many positions it may take, without guesses, if that is less than the model's context window.
        """
        if None not in self._rows:
            self._rows.append(None)
            self._used += [0] * (len(self._rows) - len(self._used))
        index = self._rows.index(None)
        limit = min((size for size in (self._window, most) if size), default=None)
        slot = self._rows[index] = self._slot_kind(self, index, limit, self._shapes)
        return slot

    def leave(self, row: SharedSlot, *, keep: bool = False) -> None:
        if row.index < len(self._rows) and self._rows[row.index] is row:
            self._rows[row.index] = None

    def empty(self) -> None:
        self._rows.clear()

    @property
    def parts(self) -> list[Tensor]:
        """Keys and values of each layer, (rows, heads, positions, size); none before the first forward pass."""
        return [part for layer in self._layers for part in (layer.keys, layer.values) if part is not None]

    def tiled(self, rows: int, positions: int, capacity: int, shapes: Shapes) -> "SharedCache":
        """A new cache of `rows` rows with memory for `capacity` positions each. Their first `positions` repeat what this
        cache's first row holds.
        """
        made = SharedCache(self._model, rows=rows, shapes=shapes)
        made._used = [positions] * rows
        for layer, own in zip(made._layers, self._layers, strict=True):
            if positions:
                layer.tile(own, rows, positions, capacity, self._used[0])
        return made

    def groups(self, asks: Sequence[ForwardRequest]) -> list[list[ForwardRequest]]:
        self._close_gaps()
        if self._shapes is not None:
            self._shapes.refresh()
        if len(asks) == 1:
            return [list(asks)]
        if self._shapes is None:
            return grouped(asks)
        narrow = [ask for ask in asks if not is_wide(ask)]
        groups = [[ask] for ask in asks if is_wide(ask)]
        for kind in by_positions(narrow, self._seen, self._shapes.reads_alike):
            for group in grouped(kind):
                groups += bisect_until_fits(group, lambda some: self._shape(some) is not None)
        return groups

    def _seen(self, ask: ForwardRequest) -> int:
        """How many positions of a row a forward pass of fixed shape has to read."""
        assert self._shapes is not None
        return self._shapes.seen(ask.slot.length + ask.slot.branched + len(ask.ids))

    def _shape(self, asks: Sequence[ForwardRequest]) -> tuple[int, int, int] | None:
        """The first row to forward, the one after the last, and how many ids of each; None if no shape is known for the group.
        If forward passes are captured, the rows are all up to a power of two, or all that there are: there are few shapes then.
        """
        asked, new = _rows(asks), max(len(ask.ids) for ask in asks)
        first, last = min(asked), 1 + max(asked)
        if self._shapes is None or is_wide(asks[0]):
            if self._shapes is not None or not self._captures(asks):
                return first, last, new
            return 0, max(last, min(doubled(last), *map(len, self.parts))), doubled(new)
        seen = max(needs := set(map(self._seen, asks)))
        if not all(self._shapes.reads_alike(need, seen) for need in needs):
            return None
        held = max(row.held for row in self._rows if row is not None)
        most = self._spare(last, max(seen, held + new + 1))
        rows, width = self._shapes.fit(last - first, new, seen, most) or (0, 0)
        first = min(first, most - rows)
        return (first, first + rows, width) if rows else None

    def _spare(self, last: int, reach: int) -> int:
        """How many rows can be forwarded if it has to be the first `last`: those with memory for `reach` positions."""
        keys = self._layers[0].keys  # the other layers get as much
        return last if keys is None or keys.shape[2] < reach else max(last, len(keys))

    @torch.no_grad()
    def serve(self, asks: Sequence[ForwardRequest]) -> list[Answer]:
        """Answer sequences of different rows by one forward pass."""
        shape = self._shape(asks)
        assert shape is not None
        first, last, width = shape
        self._settle()
        before = 0 if self._graphs is None else self._graphs.replays
        start = timing.perf_counter() - EXCLUDED.seconds
        made = self._forward(first, last, asks, width)
        logits, *hidden = [one.clone() if one.is_inference() else one for one in made]  # callers may write to them
        wait_for(logits)
        seconds = timing.perf_counter() - EXCLUDED.seconds - start
        replayed = self._graphs is not None and self._graphs.replays > before
        cost = Cost((last - first) * width, seconds, len(asks), replayed=replayed)  # padding included
        found = list[Answer]()
        for ask in asks:
            slot: Any = ask.slot
            slot.take(ask)
            row = slot.index - first
            shown = hidden[0][row, -len(ask.ids) :] if hidden else None
            found.append(Answer(logits[row, -ask.rows :], shown, cost._replace(repeated=bool(found))))
        return found

    def _forward(self, first: int, last: int, asks: Sequence[ForwardRequest], width: int) -> list[Tensor]:
        """Forward `width` ids of each of some rows. Returns logits, (rows, new, vocabulary), and hidden states, if shown."""
        asked = dict(zip(_rows(asks), asks, strict=True))
        rows = self._rows[first:last] + [None] * (last - max(first, len(self._rows)))  # the latter are no sequence's
        news = [NewIds() if row is None else row.new(asked.get(row.index)) for row in rows]
        new = range(news[0].base, news[0].base + len(news[0].ids)) if len(news) == 1 and not self._captures(asks) else None
        ends = [one.base + len(one.ids) + (new is None and len(one.ids) < width) for one in news]
        nodes = max(one.nodes for one in news)
        reach = max(max(end, one.kept + nodes) for end, one in zip(ends, news, strict=True))
        seen = max(map(self._seen, asks)) if self._shapes is not None else reach if self._graphs is None else rounded(reach)
        self._clear(first, ends, seen)
        self._grow(last, max(seen, reach))
        inputs = self._trees.inputs(first, news, width, seen)
        if (states := _states(asks, first, len(news), width)) is not None:
            inputs["states"] = states
        if not self._captures(asks):
            whole = self._shapes is not None and not is_wide(asks[0])  # how many rows a matrix has may change its bits
            return self._computed(first, seen, inputs, new, None if whole else max(ask.rows for ask in asks))
        assert self._graphs is not None
        return self._graphs.run((first, last, width, seen), partial(self._computed, first, seen), inputs)

    def _captures(self, asks: Sequence[ForwardRequest]) -> bool:
        """Whether to capture the forward pass: not if it makes the cache or reads a prompt."""
        return self._graphs is not None and not is_wide(asks[0]) and all(layer.is_initialized for layer in self._layers)

    def _computed(
        self, first: int, seen: int, inputs: Inputs, new: range | None = None, logits: int | None = None
    ) -> list[Tensor]:
        """Run the model on `inputs` and the cache alone, so that it can be captured. `first`, `seen`, `new`: as in `View`.
        `logits`: for how many of the last ids to compute logits; None for all.
        """
        ids, positions, cache_positions = (inputs[name] for name in ("ids", "positions", "cache_positions"))
        masks = {kind: inputs[kind] for kind in self._trees.windows}
        self._view.look(first, cache_positions, seen, new)
        given: dict[str, Any] = {CACHE: self._cache, "attention_mask": masks if len(masks) > 1 else masks.popitem()[1]}
        given |= {"output_hidden_states": True} if self._hidden_layers else {}
        given |= {"states": inputs["states"]} if "states" in inputs else {}
        given |= {"logits_to_keep": logits} if self._keeps and logits is not None else {}
        with torch.inference_mode() if self._infers else nullcontext():
            outputs = self._forwarded(input_ids=ids, position_ids=positions, use_cache=True, return_dict=True, **given)
        return [outputs.logits, *([stacked(outputs, self._hidden_layers)] if self._hidden_layers else [])]

    def _grow(self, rows: int, positions: int) -> None:
        """Grow the cache to at least `rows` and `positions`. Graphs are dropped if it moves in memory."""
        self._need(rows, positions)
        if self._graphs is not None and any(self._view.shape(*part.shape[::2]) != part.shape[::2] for part in self.parts):
            self._graphs.clear()
        for layer in self._layers:
            layer.grow()

    def _need(self, rows: int, positions: int) -> None:
        self._view.need(rows, positions, len(self._rows), max(row.held for row in self._rows if row is not None))

    def _clear(self, first: int, ends: Sequence[int], seen: int) -> None:
        """Zero what earlier sequences left after the `ends` of rows, where it will be read: NaN would pass any mask."""
        self._used += [0] * (first + len(ends) - len(self._used))
        for index, end in enumerate(ends, start=first):
            if end < min(self._used[index], seen):
                for part in self.parts:
                    part[index : index + 1, :, end : self._used[index]].zero_()  # a failed forward pass may have left less
                self._used[index] = end
            self._used[index] = max(self._used[index], end)

    def _settle(self) -> None:
        """Move the nodes of branches that won to the positions where they are kept."""
        moves = [(row.index, *move) for row in self._rows if row is not None for move in row.moves]
        if moves:
            rows, sources, targets = torch.tensor(moves, dtype=torch.int64, device=self.device).T
            for part in self.parts:  # layers may be on other devices
                row, source, target = (indices.to(part.device) for indices in (rows, sources, targets))
                part[row, :, target] = part[row, :, source]
        for row in self._rows:
            if row is not None:
                row.moves.clear()

    def _close_gaps(self) -> None:
        """Move the last rows to rows that were left, so that no forward pass runs over empty ones."""
        self._settle()
        while None in self._rows:
            row = self._rows.pop()
            if row is not None:
                gap = self._rows.index(None)
                self._move(row.index, gap)
                self._trees.copy(row.index, gap)
                self._rows[gap], row.index = row, gap

    def _move(self, source: int, target: int) -> None:
        """Copy what a row holds to a row without a sequence."""
        used = self._used[source]
        for part in self.parts:
            if used and source < len(part):  # a failed forward pass may have left it without memory
                part[target, :, :used].copy_(part[source, :, :used])
        self._used[target] = max(used, self._used[target])


def _states(asks: Sequence[ForwardRequest], first: int, rows: int, width: int) -> Tensor | None:
    """What the model reads beside ids, (rows, width, size), with zeros in front as padding; None if it reads ids alone."""
    given = {ask.slot.index - first: ask.states for ask in asks if isinstance(ask.slot, SharedSlot) and ask.states is not None}
    if not given:
        return None
    one = next(iter(given.values()))
    found = one.new_zeros((rows, width, one.shape[1]))
    for row, states in given.items():
        found[row, width - len(states) :] = states
    return found


def _rows(asks: Sequence[ForwardRequest]) -> list[int]:
    return [ask.slot.index for ask in asks if isinstance(ask.slot, SharedSlot)]
