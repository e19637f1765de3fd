"""A tokenizer as all else sees it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from xtok.align.encoding import Encoder, encoder
from xtok.align.keys import spelling_keys
from xtok.align.tokenbytes import TokenBytes


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """What a model's ids spell, how its tokenizer writes plain text, and what noise its ids have. No model.

    `size`: how many ids the model has logits for, those without a token included. `ends`: its ids that end a text.
    Shared by all texts; what takes time to make is made where it is first asked for.
    """

    tokenizer: Any
    view: TokenBytes
    size: int
    ends: frozenset[int]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Vocabulary":
        """Itself: nothing in it changes but what is made where it is first asked for."""
        return self

    @cached_property
    def encoder(self) -> Encoder:
        """How the tokenizer writes plain text."""
        return encoder(self.tokenizer, self.view)

    @cached_property
    def longest(self) -> int:
        """How many bytes of a text one id stands for at most; a control token stands for its name."""
        return max(self.view.longest, *(len(name.encode()) for name in self.tokenizer.get_added_vocab()), 1)

    @cached_property
    def keys(self) -> Tensor:
        """The keys of the ids for noise, (size,), int64."""
        return spelling_keys(self.view, self.size)
