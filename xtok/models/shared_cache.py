"""One KV cache for many sequences: each has a row of its own in it, and one forward pass serves all that ask for one.

A row's keys and values are written to positions of its own, and are seen through an explicit mask with position ids per row. So
a roll-back is a smaller length, a sliding window is a mask, and a sequence that ends leaves its row to the next one. Keys and
values are copied only when the cache grows, when a branch wins, when the last row takes the place of one that was left, and
when what an ended sequence has read is kept for later ones.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from xtok.models import timing
from xtok.models.cache import CACHE, stacked
from xtok.models.forwards import Answer, ForwardRequest, wait_for
from xtok.models.graphs import Graphs, Inputs
from xtok.models.masks import model_inputs
from xtok.models.plan import Plan, Planner, is_wide, row_of
from xtok.models.prefixes import Prefix, Prefixes, Read, usable
from xtok.models.runner import runner_of
from xtok.models.shapes import Shapes
from xtok.models.shared_slot import SharedSlot
from xtok.models.storage import Storage
from xtok.models.timing import EXCLUDED, Cost
from xtok.models.traits import Traits, read


class SharedCache:
    """A model, and one KV cache for the sequences that it forwards together.

    Laws: a sequence's logits are those that it has alone, within rounding, or, with `shapes`, in all bits. What one sequence
    takes over from another was read from the ids that it begins with, and, with `shapes`, by forward passes that it would have
    had itself. Running sequences have the first rows when they are forwarded.

    `prefixes`: what ended sequences leave for later ones; None to keep nothing.
    """

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
        cache has at first. `capacity`: how many rows × positions it may have, prefixes included, unless running sequences need
        more; None for any number. `shapes`: those that forward passes are to have; None for what each needs. `graphs`: captures
        forward passes, which then have few shapes, too.
        """
        known = known or read(model)
        self.device, self._window = known.device, known.window
        self._model, self._shapes, self._graphs, self._capacity = model, shapes, graphs, capacity
        self.runner = runner_of(model)
        self._forwarded: Any = self.runner.model_of(model)
        self._infers = self.runner.infers and graphs is None
        self.has_graphs = graphs is not None
        self._storage = Storage(len(known.layers), rows, evenly=shapes is not None)
        self._cache = Cache(layers=list(self._storage.layers))
        self._windows, self._like = known.windows, torch.empty(0, dtype=known.dtype, device=known.device)
        self._keeps = known.supports_logits_to_keep
        self._hidden_layers = tuple(hidden_layers)
        self._rows: list[SharedSlot | None] = []
        self.prefixes: Prefixes | None = None

    def join(self, most: int | None = None) -> SharedSlot:
        """A row for a new sequence: one that another left, or a new one.

        `most`: how many positions it may take, without guesses, if that is less than the model's context window.
        """
        if None not in self._rows:
            self._rows.append(None)
        index = self._rows.index(None)
        limit = min((size for size in (self._window, most) if size), default=None)
        slot = self._rows[index] = SharedSlot(self, index, limit, self._shapes)
        return slot

    def leave(self, row: SharedSlot, *, keep: bool = False) -> None:
        """Take the row of a sequence that has ended. `keep`: whether later ones may take over what it holds."""
        if row.index >= len(self._rows) or self._rows[row.index] is not row:
            return
        self._rows[row.index] = None
        if keep and self.prefixes is not None and row.reads:
            try:
                self._keep(row, row.reads, self.prefixes)
            except Exception:  # there is no memory, say
                self.prefixes.clear()

    def empty(self) -> None:
        self._rows.clear()

    @property
    def parts(self) -> list[Tensor]:
        """Keys and values of each layer, (rows, heads, positions, size); none before the first forward pass."""
        return self._storage.parts

    def tiled(self, rows: int, positions: int, capacity: int, shapes: Shapes) -> "SharedCache":
        """A new cache of `rows` rows with memory for `capacity` positions each. Their first `positions` repeat what this
        cache's first row holds.
        """
        made = SharedCache(self._model, rows=rows, shapes=shapes)
        made._storage.tile(self._storage, rows, positions, capacity)
        return made

    def adopt(self, row: SharedSlot, wanted: list[Read]) -> int:
        """Copy to an empty row as much as another row or a prefix holds of what its sequence is to read. Returns how many
        positions.
        """
        if row.held or self.prefixes is None:
            return 0
        try:
            return self._adopted(row, wanted, self.prefixes)
        except Exception:  # there is no memory, say
            self.prefixes.clear()
            row.start_anew()
            return 0

    def groups(self, asks: Sequence[ForwardRequest]) -> list[list[ForwardRequest]]:
        self._close_gaps()
        if self._shapes is not None:
            self._shapes.refresh()
        return self._planner().groups(asks)

    @torch.no_grad()
    def serve(self, asks: Sequence[ForwardRequest]) -> list[Answer]:
        """Answer sequences of different rows by one forward pass."""
        plan = self._planner().plan(asks)
        self._settle()
        before = 0 if self._graphs is None else self._graphs.replays
        start = timing.perf_counter() - EXCLUDED.seconds
        try:
            made = self._forward(plan, asks)
        except torch.OutOfMemoryError:
            if not self.prefixes:
                raise
            self.prefixes.clear()
            made = self._forward(plan, asks)
        logits, *hidden = [one.clone() if one.is_inference() else one for one in made]  # callers may write to them
        wait_for(logits)
        seconds = timing.perf_counter() - EXCLUDED.seconds - start
        replayed = self._graphs is not None and self._graphs.replays > before
        cost = Cost(len(plan.news) * plan.width, seconds, len(asks), replayed=replayed)  # padding included
        found = list[Answer]()
        for ask in asks:
            slot: Any = ask.slot
            slot.take(ask)
            row = slot.index - plan.first
            shown = hidden[0][row, -len(ask.ids) :] if hidden else None
            found.append(Answer(logits[row, -ask.rows :], shown, cost))
        return found

    def _planner(self) -> Planner:
        is_captured = self._graphs is not None and all(layer.is_initialized for layer in self._storage.layers)
        return Planner(self._rows, self._storage.shape, self._shapes, is_captured)

    def _forward(self, plan: Plan, asks: Sequence[ForwardRequest]) -> list[Tensor]:
        """The logits of a forward pass, (rows, new, vocabulary), and hidden states, if shown."""
        self._storage.clear(plan.first, plan.ends, plan.seen)
        self._grow(plan.last, max(plan.seen, *plan.ends))
        inputs = model_inputs(plan.news, plan.width, plan.seen, self._windows, self._like)
        if (states := _states(plan, asks)) is not None:
            inputs["states"] = states
        if plan.captured:
            assert self._graphs is not None
            shape = plan.first, plan.last, plan.width, plan.seen
            return self._graphs.run(shape, partial(self._computed, plan.first, plan.seen), inputs)
        whole = self._shapes is not None and not is_wide(asks[0])  # how many rows a matrix has may change its bits
        return self._computed(plan.first, plan.seen, inputs, plan.new, None if whole else max(ask.rows for ask in asks))

    def _computed(
        self, first: int, seen: int, inputs: Inputs, new: range | None = None, logits: int | None = None
    ) -> list[Tensor]:
        """Run the model on `inputs` and the cache alone, so that it can be captured. `first`, `seen`, `new`: as in
        `Storage.look`. `logits`: for how many of the last ids to compute logits; None for all.
        """
        ids, positions, cache_positions = (inputs[name] for name in ("ids", "positions", "cache_positions"))
        masks = {kind: inputs[kind] for kind in self._windows}
        self._storage.look(first, cache_positions, seen, new)
        given: dict[str, Any] = {CACHE: self._cache, "attention_mask": masks if len(masks) > 1 else masks.popitem()[1]}
        given |= {"output_hidden_states": True} if self._hidden_layers else {}
        given |= {"states": inputs["states"]} if "states" in inputs else {}
        given |= {"logits_to_keep": logits} if self._keeps and logits is not None else {}
        with torch.inference_mode() if self._infers else nullcontext():
            outputs = self._forwarded(input_ids=ids, position_ids=positions, use_cache=True, return_dict=True, **given)
        return [outputs.logits, *([stacked(outputs, self._hidden_layers)] if self._hidden_layers else [])]

    def _grow(self, last: int, reach: int) -> None:
        """Have memory for `reach` positions in the rows up to `last`. Prefixes give way."""
        least, capacity = (len(self._rows), self._longest()), self._capacity
        if capacity is not None and self.prefixes is not None:  # half is for them, unless running sequences need more
            capacity = min(capacity // 2, capacity - self.prefixes.positions)
        self._resize(*self._storage.fitting(last, reach, least, capacity))

    def _resize(self, rows: int, positions: int) -> None:
        """Give the rows another shape. Graphs are dropped if they move in memory, and prefixes for which there is none left."""
        if self._storage.resize(rows, positions) and self._graphs is not None:
            self._graphs.clear()
        if self._capacity is not None and self.prefixes is not None:
            self.prefixes.trim(self._capacity - rows * positions)

    def _longest(self) -> int:
        """The most positions that a sequence takes."""
        return max((row.held for row in self._rows if row is not None), default=0)

    def _keep(self, row: SharedSlot, reads: list[Read], prefixes: Prefixes) -> None:
        """Copy what an ended sequence's row holds to the prefixes. If there is no memory beside the rows, they get less."""
        self._storage.move([(row.index, *move) for move in row.moves])
        prefixes.put(Prefix(reads, [part.clone() for part in self._storage.row(row.index, row.length)]))
        rows, positions = self._storage.shape
        if self._capacity is not None and rows * positions + len(reads) > self._capacity:
            self._close_gaps()
            rows, positions = len(self._rows), self._longest()
        self._resize(rows, positions)

    def _adopted(self, row: SharedSlot, wanted: list[Read], prefixes: Prefixes) -> int:
        self._settle()
        best = prefixes.best(wanted)
        count, source = (0, None) if best is None else (usable(best.reads, wanted), best.parts)
        for one in self._rows:
            if one is not None and one is not row and one.reads and (own := usable(one.reads, wanted)) > count:
                count, source = own, self._storage.row(one.index, own)
        if source is None or not count:
            return 0
        self._grow(row.index + 1, count)
        self._storage.fill(row.index, [part[:, :count] for part in source])
        row.length, row.reads = count, wanted[:count]
        return count

    def _settle(self) -> None:
        """Move the nodes of branches that won to the positions where they are kept."""
        taken = [row for row in self._rows if row is not None]
        self._storage.move([(row.index, *move) for row in taken for move in row.moves])
        for row in taken:
            row.moves.clear()

    def _close_gaps(self) -> None:
        """Move the last rows to rows that were left, so that no forward pass runs over empty ones."""
        self._settle()
        while None in self._rows:
            row = self._rows.pop()
            if row is not None:
                gap = self._rows.index(None)
                self._storage.fill(gap, self._storage.row(row.index, row.held))
                self._rows[gap], row.index = row, gap


def _states(plan: Plan, asks: Sequence[ForwardRequest]) -> Tensor | None:
    """What the model reads beside ids, (rows, width, size), with zeros in front as padding; None if it reads ids alone."""
    given = {row_of(ask) - plan.first: ask.states for ask in asks if ask.states is not None}
    if not given:
        return None
    one = next(iter(given.values()))
    found = one.new_zeros((len(plan.news), plan.width, one.shape[1]))
    for row, states in given.items():
        found[row, plan.width - len(states) :] = states
    return found
