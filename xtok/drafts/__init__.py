"""Drafters: whatever guesses what the target is about to write."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from xtok.budget import Budget
from xtok.noise import Noise
from xtok.tree import Tree

__all__ = ["Context", "Drafter"]


@dataclass(frozen=True)
class Context:
    """What is committed: the target's ids, the bytes that they spell, and how many of those bytes are the prompt's.

    `noise` is that under which the target picks, None where it picks greedily. `controls` counts the new ids that spell
    nothing. `hidden`: the target's last hidden state at the position behind which it picked the last id, (hidden size,); None
    where it isn't known or nobody asks for it.
    """

    ids: Sequence[int]
    data: bytes
    prompt_size: int
    controls: int = 0
    noise: Noise | None = None
    hidden: Tensor | None = None


@runtime_checkable
class Drafter(Protocol):
    """Anything that guesses."""

    def propose(self, context: Context, budget: Budget) -> Tree:
        """Guess what follows `context`, in the target's ids.

        Whatever it returns or raises, the output stays the target's own: a guess only decides how many picks a forward yields.
        """
