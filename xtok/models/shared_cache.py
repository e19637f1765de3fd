"""One KV cache for many sequences: each has a row of its own in it, and one forward pass serves all that ask for one.

A row's keys and values are written to positions of its own, and are seen through an explicit mask with position ids per row. So
a roll-back is a smaller length, a sliding window is a mask, and a sequence that ends leaves its row to the next one. Nothing is
copied except when the cache grows, and when a branch wins.
"""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from xtok.models import timing
from xtok.models.cache import CACHE, stacked
from xtok.models.forwards import Answer, Ask, wait_for
from xtok.models.graphs import Graphs, Inputs, state_of
from xtok.models.groups import grouped, is_wide
from xtok.models.layers import doubled
from xtok.models.masks import NewIds
from xtok.models.rows import Rows
from xtok.models.shapes import Shapes, rounded
from xtok.models.shared_slot import SharedSlot
from xtok.models.timing import Cost
from xtok.models.traits import Traits, read


class SharedCache(Rows):
    """A model, and one KV cache for the sequences that it forwards together.

    Law: a sequence's logits are those that it has alone, within rounding, whatever other rows hold; with `shapes` in every bit,
    after ids that are kept and after nodes whose index is their depth. Rows between those that ask get padding.
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
        keeps: bool = False,
    ) -> None:
        """`known`: the model's traits. `rows`: how many there are from the beginning. `capacity`: rows × positions, as long as
        their sequences need no more; None for any number. `shapes`: those that forward passes are to have; None for what each
        needs. `graphs`: what captures forward passes, which then have few shapes, too. `keeps`: whether rows that sequences
        leave keep what they hold for later ones, until they or their memory are needed.
        """
        known = known or read(model)
        super().__init__(known, rows, capacity, shapes, keeps=keeps)
        self._model, self._graphs = model, graphs
        self._cache = Cache(layers=list(self._layers))
        self.state = None if graphs is None else state_of(model)
        self._keeps_logits = known.supports_logits_to_keep
        self._hidden_layers = tuple(hidden_layers)

    @property
    def position_bytes(self) -> int:
        """How many bytes a position of a row takes; 0 before the first forward pass."""
        return sum(part.shape[1] * part.shape[3] * part.element_size() for part in self._parts)

    def tiled(self, rows: int, positions: int, capacity: int, shapes: Shapes) -> "SharedCache":
        """A cache of some rows with memory for `capacity` positions each, the first `positions` of which repeat what this
        cache's first row holds.
        """
        made = SharedCache(self._model, rows=rows, shapes=shapes)
        made._used = [positions] * rows
        for layer, own in zip(made._layers, self._layers, strict=True):
            if positions:
                layer.tile(own, rows, positions, capacity, self._used[0])
        return made

    def held(self, start: int, stop: int) -> list[Tensor]:
        """Keys and values of each layer at some positions, (rows, heads, positions, size) each."""
        return [part[:, :, start:stop] for part in self._parts]

    def groups(self, asks: Sequence[Ask]) -> list[list[Ask]]:
        self._close_gaps()
        if self._shapes is not None:
            self._shapes.refresh()
        if len(asks) == 1:
            return [list(asks)]
        if self._shapes is None:
            return grouped(asks)
        narrow = sorted((ask for ask in asks if not is_wide(ask)), key=self._seen)
        groups = [[ask] for ask in asks if is_wide(ask)]
        for _, kind in groupby(narrow, key=self._seen):
            for group in grouped(list(kind)):
                groups += [group] if self._width(group) is not None else [[ask] for ask in group]
        return groups

    def _seen(self, ask: Ask) -> int:
        """How many positions of a row a forward pass of fixed shape reads."""
        assert self._shapes is not None
        return self._shapes.seen(ask.slot.length + ask.slot.branched + len(ask.ids))

    def _width(self, asks: Sequence[Ask]) -> int | None:
        """How many ids of each row are forwarded; None if no shape is known for the group."""
        new = max(len(ask.ids) for ask in asks)
        if self._captures(asks) and self._shapes is None:
            return doubled(new)
        if self._shapes is None or is_wide(asks[0]):
            return new
        first, last = self._span(asks)
        return self._shapes.width(last - first, new, self._seen(asks[0]))

    def _span(self, asks: Sequence[Ask]) -> tuple[int, int]:
        """The first row that is forwarded, and the one after the last; if forward passes are captured, all rows up to a power
        of two, as far as there are so many: few shapes.
        """
        asked = _rows(asks)
        first, last = min(asked), 1 + max(asked)
        if self._shapes is not None or not self._captures(asks):
            return first, last
        return 0, max(last, min(doubled(last), *map(len, self._parts)))

    @torch.no_grad()
    def serve(self, asks: Sequence[Ask]) -> list[Answer]:
        """Answer sequences of different rows by one forward pass."""
        first, last = self._span(asks)
        width = self._width(asks)
        assert width is not None
        self._settle()
        before = 0 if self._graphs is None else self._graphs.replays
        start = timing.perf_counter()
        logits, *hidden = self._forward(first, last, asks, width)
        wait_for(logits)
        seconds = timing.perf_counter() - start
        if self._shapes is not None:
            self._shapes.served(seconds)
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

    def _forward(self, first: int, last: int, asks: Sequence[Ask], width: int) -> list[Tensor]:
        """Forward `width` ids of each row from `first` to `last`.

        Returns their logits, (rows, new, vocabulary), and hidden states, (rows, new, layers, size), if they are shown.
        """
        asked = dict(zip(_rows(asks), asks, strict=True))
        self._vacate(first, last)
        rows = self._rows[first:last] + [None] * (last - max(first, len(self._rows)))  # the latter are no sequence's
        news = [NewIds() if row is None else row.new(asked.get(row.index)) for row in rows]
        new = range(news[0].base, news[0].base + len(news[0].ids)) if len(news) == 1 and not self._captures(asks) else None
        ends = [one.base + len(one.ids) + (new is None and len(one.ids) < width) for one in news]
        nodes = max(one.nodes for one in news)
        reach = max(max(end, one.kept + nodes) for end, one in zip(ends, news, strict=True))
        seen = self._seen(asks[0]) if self._shapes is not None else reach if self._graphs is None else rounded(reach)
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

    def _captures(self, asks: Sequence[Ask]) -> bool:
        """Whether the forward pass is one of those that are captured; not one that makes the cache or reads a prompt."""
        return self._graphs is not None and not is_wide(asks[0]) and all(layer.is_initialized for layer in self._layers)

    def _computed(
        self, first: int, seen: int, inputs: Inputs, new: range | None = None, logits: int | None = None
    ) -> list[Tensor]:
        """What the model computes by `inputs` and the cache alone, so that it can be captured.

        `first`: the first row. `seen`, `new`: see `View`. `logits`: of how many of the last ids those are wanted; None for
        all.
        """
        ids, positions, cache_positions = (inputs[name] for name in ("ids", "positions", "cache_positions"))
        masks = {kind: inputs[kind] for kind in self._trees.windows}
        self._view.look(first, cache_positions, seen, new)
        outputs = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=masks if len(masks) > 1 else masks.popitem()[1],
            use_cache=True,
            return_dict=True,
            **{CACHE: self._cache},
            **({"output_hidden_states": True} if self._hidden_layers else {}),
            **({"states": inputs["states"]} if "states" in inputs else {}),
            **({"logits_to_keep": logits} if self._keeps_logits and logits is not None else {}),
        )
        return [outputs.logits, *([stacked(outputs, self._hidden_layers)] if self._hidden_layers else [])]

    def _on_growth(self) -> None:
        if self._graphs is not None:  # what was captured knows the former memory
            self._graphs.clear()


def _states(asks: Sequence[Ask], first: int, rows: int, width: int) -> Tensor | None:
    """What the model reads beside ids, (rows, width, size), with zeros in front as padding; None if it reads ids alone."""
    given = {ask.slot.index - first: ask.states for ask in asks if isinstance(ask.slot, SharedSlot) and ask.states is not None}
    if not given:
        return None
    one = next(iter(given.values()))
    found = one.new_zeros((rows, width, one.shape[1]))
    for row, states in given.items():
        found[row, width - len(states) :] = states
    return found


def _rows(asks: Sequence[Ask]) -> list[int]:
    """The rows of the cache that some asks are about."""
    return [ask.slot.index for ask in asks if isinstance(ask.slot, SharedSlot)]
