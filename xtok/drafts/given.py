"""What a caller gives as drafts."""

from collections.abc import Sequence
from typing import Any

from xtok.drafts.base import Draft, Drafter, Request
from xtok.drafts.lookup import PromptLookup
from xtok.drafts.recycling import TokenRecycling


class _Shared:
    """A drafter of the caller's own that serves all texts."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def start(self, request: Request) -> Drafter:
        """The drafter itself."""
        return self._drafter


def as_draft(given: Draft | Drafter) -> Draft:
    """What starts drafters. One that guesses by itself serves all texts."""
    return _Shared(given) if isinstance(given, Drafter) else given


def guesses(given: Any) -> bool:
    """Whether it is a draft or a drafter, and no model. Where it has `propose`, it is a drafter, whatever else it has."""
    return not isinstance(given, type) and any(callable(getattr(given, name, None)) for name in ("propose", "start"))


def without_a_model() -> list[Draft]:
    """What guesses beside a model, or where there is none, by the text and by what the target held for likely before."""
    return [PromptLookup(), TokenRecycling()]


def as_list(draft: Any, beside: Sequence[Draft]) -> list[Any]:
    """A model guesses together with what stands `beside` it. Anything else is taken as it is."""
    if draft is None:
        return []
    if isinstance(draft, list):
        return list(draft)
    return [draft] if guesses(draft) else [draft, *beside]
