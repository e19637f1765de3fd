"""Where texts have their slots: which models they share, and which each has for itself."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from transformers import PreTrainedModel

from xtok.models.cache import new_cache
from xtok.models.forwards import Slot
from xtok.models.graphs import Graphs, state_of, takes_graphs
from xtok.models.modes import Modes
from xtok.models.probe import takes_slots
from xtok.models.recurrent import cached_model
from xtok.models.slots import Shapes, Slots

_SNAPSHOTS = 16
"""Of two rounds: what a draft reads in one may be read otherwise in the next."""


class Caches:
    """The caches of texts that are generated together, one for each model."""

    def __init__(self, rows: int = 1, room: Mapping[PreTrainedModel, int] | None = None, *, captures: bool = False) -> None:
        """`rows`: how many texts there will be at a time. `room`: how many positions the cache of each model may have for all
        of them, rows × positions of a row; None for as many as are needed. `captures`: whether forwards are captured where
        a model allows it.
        """
        self._rows, self._room, self._captures = rows, room, captures
        self._slots: dict[PreTrainedModel, Slots] = {}

    def of(self, model: PreTrainedModel, *, shows_hidden: bool = False, shapes: Shapes | None = None) -> Slots:
        """The cache of a model that takes slots."""
        if model not in self._slots:
            self._slots[model] = Slots(
                model,
                shows_hidden=shows_hidden,
                rows=self._rows,
                room=None if self._room is None else self._room[model],
                shapes=shapes,
                graphs=Graphs() if self._captures and takes_graphs(model) else None,
            )
        return self._slots[model]

    def empty(self) -> None:
        """Make them ready for other texts. Those that aren't captured, or of models that compute otherwise now, are let go."""
        self._slots = {model: slots for model, slots in self._slots.items() if slots.state and slots.state == state_of(model)}
        for slots in self._slots.values():
            slots.empty()


class Pool:
    """The caches of an instance's calls. Where forwards are captured, a call has those of an earlier one, and their graphs."""

    def __init__(self, *, captures: bool) -> None:
        self._captures = captures
        self._free: list[Caches] = []

    @contextmanager
    def lent(self, rows: int, modes: Modes) -> Iterator[Caches]:
        """Caches for a call with so many texts at a time. What fails, or is closed before its end, doesn't give them back. A
        call under autocast has its own, for the precision of a cache is that in which it was made.
        """
        if modes.autocast:
            yield Caches(rows, captures=self._captures)
            return
        try:
            caches = self._free.pop()
        except IndexError:
            caches = Caches(rows, captures=self._captures)
        caches.empty()
        yield caches
        if self._captures:
            self._free.append(caches)


class Seat:
    """What one text takes up in the caches that it shares with others, or in its own."""

    def __init__(self, caches: Caches | None = None, most: int | None = None) -> None:
        """`most`: how many positions it may have in a model, beside guesses; None for as many as it needs."""
        self._caches, self._most = caches or Caches(), most
        self._taken: list[Slot] = []

    def slot(self, model: PreTrainedModel, *, shows_hidden: bool = False, shapes: Shapes | None = None) -> Slot:
        """A slot in `model`: one whose forwards are shared, where the model can be held so, and have `shapes`."""
        if takes_slots(model):
            self._taken.append(self._caches.of(model, shows_hidden=shows_hidden, shapes=shapes).join(self._most))
            return self._taken[-1]
        return cached_model(model, new_cache(model), shows_hidden=shows_hidden, snapshots=_SNAPSHOTS)

    def leave(self) -> None:
        """Make room for other texts."""
        for slot in self._taken:
            slot.leave()
        self._taken.clear()
