"""Where texts have their slots: which models they share, and which each has for itself."""

from collections.abc import Mapping

from transformers import PreTrainedModel

from xtok.models.cache import new_cache
from xtok.models.forwards import Slot
from xtok.models.probe import takes_slots
from xtok.models.recurrent import cached_model
from xtok.models.slots import Shapes, Slots

_SNAPSHOTS = 16
"""Of two rounds: what a draft reads in one may be read otherwise in the next."""


class Caches:
    """The caches of texts that are generated together, one for each model."""

    def __init__(self, rows: int = 1, room: Mapping[PreTrainedModel, int] | None = None) -> None:
        """`rows`: how many texts there will be at a time. `room`: how many positions the cache of each model may have for all
        of them, rows × positions of a row; None for as many as are needed.
        """
        self._rows, self._room = rows, room
        self._slots: dict[PreTrainedModel, Slots] = {}

    def of(self, model: PreTrainedModel, *, shows_hidden: bool = False, shapes: Shapes | None = None) -> Slots:
        """The cache of a model that takes slots."""
        if model not in self._slots:
            room = None if self._room is None else self._room[model]
            self._slots[model] = Slots(model, shows_hidden=shows_hidden, rows=self._rows, room=room, shapes=shapes)
        return self._slots[model]


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
