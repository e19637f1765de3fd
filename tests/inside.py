"""What tests look at inside of xtok, where nothing public shows it: in one place, so that a change there is one here."""

from typing import Any

from xtok import Engine
from xtok.drafts.corpus import TextMemory
from xtok.drafts.policy.policy import Policy
from xtok.models.shared_cache import SharedCache
from xtok.models.shared_slot import SharedSlot


def caches_of(engine: Any) -> list[SharedCache]:
    """The shared caches of an `Engine` or a `DraftEngine`, one for each model that has read something."""
    return [*(engine._shared.caches if isinstance(engine, Engine) else engine._caches)._caches.values()]


def rows_of(slots: SharedCache) -> list[SharedSlot | None]:
    """The slots of a shared cache; None for a row that a sequence has left."""
    return slots._rows


def is_empty(slots: SharedCache) -> bool:
    """Whether no sequence has a row of a shared cache."""
    return all(row is None for row in rows_of(slots))


def used(slots: SharedCache, row: int) -> int:
    """Up to which position a row of a shared cache may hold something."""
    return dict(enumerate(slots._storage._used)).get(row, 0)


def captured(slots: SharedCache) -> dict[Any, Any]:
    """The captured forward passes of a shared cache, by their shapes."""
    assert slots._graphs is not None
    return slots._graphs._made


def policy_of(engine: Any) -> Policy:
    """What decides how much a `DraftEngine` guesses."""
    return engine._policy


def positions_of(engine: Any) -> int:
    """How many positions the caches of an `Engine` may have whose memory is bounded."""
    assert engine._shared.memory is not None
    return engine._shared.memory.positions


def agreed_by(shapes: Any) -> dict[tuple[int, int, int, int], bool]:
    """Which fixed shapes were tried, and which of them agreed."""
    return shapes._trials.agreed


def tables_of(recycling: Any) -> Any:
    """The tables of token recycling, by what reads them."""
    return recycling._tables


def memory_of(lookup: Any) -> TextMemory | None:
    """What prompt lookup has learnt from texts."""
    return lookup._memory


def corpus_of(lookup: Any) -> list[str]:
    """The texts that prompt lookup was given."""
    return lookup._texts
