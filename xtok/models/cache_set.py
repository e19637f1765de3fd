"""The KV caches of a call, one for each model, and the slots that its sequences have in them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from transformers import PreTrainedModel

from xtok.models.cache import new_cache
from xtok.models.capabilities import traits
from xtok.models.forwards import Slot
from xtok.models.graphs import Graphs, takes_graphs
from xtok.models.modes import Modes
from xtok.models.prefixes import Prefixes
from xtok.models.recurrent import cached_model
from xtok.models.runner import runner_of
from xtok.models.shapes import Shapes
from xtok.models.shared_cache import SharedCache
from xtok.models.traits import Traits

_SNAPSHOTS = 16
"""How many states a recurrent draft keeps: those of two rounds, since the next round may replace what one round read."""


class CacheSet:
    """The shared caches of sequences that run together, one for each model."""

    def __init__(
        self,
        rows: int = 1,
        capacity: Mapping[PreTrainedModel, int] | None = None,
        *,
        captures: bool = False,
        keeps: bool = False,
    ) -> None:
        """`rows`: how many sequences run at a time. `capacity`: how many rows × positions each model's cache may have; None for
        any number. `captures`: whether to capture CUDA graphs of models that allow it. `keeps`: whether later sequences may
        take over what earlier ones have in the cache.
        """
        self._rows, self._capacity, self._captures, self.keeps = rows, capacity, captures, keeps
        self._caches: dict[PreTrainedModel, SharedCache] = {}

    def of(self, model: PreTrainedModel, known: Traits, *, hidden_layers: Sequence[int], shapes: Shapes | None) -> SharedCache:
        """The cache of a model that sequences can share, another after it was changed. `known`: its traits."""
        cache = self._caches.get(model)
        if cache is None or cache.runner is not runner_of(model):
            cache = self._caches[model] = SharedCache(
                model,
                known,
                hidden_layers=hidden_layers,
                rows=self._rows,
                capacity=None if self._capacity is None else self._capacity[model],
                shapes=shapes,
                graphs=Graphs() if self._captures and takes_graphs(model) else None,
            )
            cache.prefixes = Prefixes(self._rows) if self.keeps else None
        return cache

    def empty(self) -> None:
        """Make the caches ready for other sequences. Those without graphs are dropped."""
        self._caches = {model: cache for model, cache in self._caches.items() if cache.has_graphs}
        for cache in self._caches.values():
            cache.empty()

    def forget(self) -> None:
        """Keep nothing of sequences that have ended."""
        for cache in self._caches.values():
            if cache.prefixes is not None:
                cache.prefixes.clear()


class CachePool:
    """The cache sets of an instance's calls. If forward passes are captured, calls reuse sets and graphs of earlier ones."""

    def __init__(self, *, captures: bool) -> None:
        self._captures = captures
        self._free: list[CacheSet] = []

    @contextmanager
    def lent(self, rows: int, modes: Modes) -> Iterator[CacheSet]:
        """Caches for a call with `rows` sequences at a time, which return to the pool if the call ends well. A call under
        autocast gets new ones, since a cache keeps the precision in which it was made.
        """
        free = [] if modes.autocast else self._free
        try:
            caches = free.pop()
        except IndexError:
            caches = CacheSet(rows, captures=self._captures)
        caches.empty()
        yield caches
        if self._captures:
            free.append(caches)


class Slots:
    """The cache slots of one sequence, one in each model that runs for it. `adopts`: whether they may take over what other
    sequences have in the cache.
    """

    def __init__(self, caches: CacheSet | None = None, most: int | None = None) -> None:
        """`most`: how many positions the sequence may take in each model, without guesses; None for as many as it needs."""
        self._caches, self._most = caches or CacheSet(), most
        self._taken: list[Slot] = []
        self.adopts = True

    def take(
        self,
        model: PreTrainedModel,
        known: Traits | None = None,
        *,
        hidden_layers: Sequence[int] = (),
        shapes: Shapes | None = None,
    ) -> Slot:
        """A slot in `model`, whose traits are `known`: a row of a shared cache, whose forward passes have `shapes`, or a cache
        of its own if forward passes can't be shared.
        """
        known = known or traits(model)
        if not known.shares:
            return cached_model(model, new_cache(model), hidden_layers=hidden_layers, snapshots=_SNAPSHOTS)
        cache = self._caches.of(model, known, hidden_layers=hidden_layers, shapes=shapes)
        slot = cache.join(self._most)
        slot.adopts = self.adopts
        self._taken.append(slot)
        return slot

    def leave(self, *, keep: bool = False) -> None:
        """Release all slots. `keep`: whether other sequences may take over what they hold."""
        for slot in self._taken:
            slot.leave(keep=keep)
        self._taken.clear()
