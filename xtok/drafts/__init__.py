"""Drafters: whatever guesses what the target is about to write."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from xtok.budget import Budget
from xtok.tree import Tree

__all__ = ["Context", "Drafter"]


@dataclass(frozen=True)
class Context:
    """What is committed: the target's ids, the bytes that they spell, and how many of those bytes are the prompt's."""

    ids: Sequence[int]
    data: bytes
    prompt_size: int


@runtime_checkable
class Drafter(Protocol):
    """Anything that guesses."""

    def propose(self, context: Context, budget: Budget) -> Tree:
        """Guess what follows `context`, in the target's ids.

        Whatever it returns or raises, the output stays the target's own: a guess only decides how many picks a forward yields.
        """
