"""Turns the `draft` argument of a caller into a list of drafts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xtok.drafts.base import Draft, Drafter, Request
from xtok.drafts.heads import HeadsDrafter
from xtok.drafts.lookup import PromptLookup
from xtok.drafts.recycling import TokenRecycling
from xtok.errors import InvalidInputError


class _Shared:
    """A draft whose one drafter, the caller's own, serves all sequences."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def start(self, request: Request) -> Drafter:
        return self._drafter


def as_draft(given: Draft | Drafter) -> Draft:
    """A draft as it is; for a drafter, a draft whose sequences all share it."""
    return _Shared(given) if isinstance(given, Drafter) else given


def is_drafting(given: Any) -> bool:
    """Whether an object is a draft (it has `start`) or a drafter (it has `propose`), and so no model."""
    return not isinstance(given, type) and any(callable(getattr(given, name, None)) for name in ("propose", "start"))


def without_a_model() -> list[Draft]:
    """The drafts that need no model: they guess alone, or beside a draft model."""
    return [PromptLookup(), TokenRecycling()]


def as_list(draft: Any, beside: Sequence[Draft]) -> list[Any]:
    """The drafts and models that a caller gives, as a list. To a single model, or to heads, the drafts `beside` are added.

    Raises `InvalidInputError` for what stands for drafts on the command line only.
    """
    if draft is None:
        return []
    for one in draft if isinstance(draft, list) else [draft]:
        if isinstance(one, str) and one in ("lookup", "none") and not Path(one).exists():
            raise InvalidInputError(
                f'"{one}" is a name of the command line. In Python, pass [PromptLookup(), TokenRecycling()] as the draft for '
                "drafts that need no model, and None for no draft."
            )
    if isinstance(draft, list):
        return list(draft)
    is_alone = is_drafting(draft) and not isinstance(draft, HeadsDrafter)
    return [draft] if is_alone else [draft, *beside]
