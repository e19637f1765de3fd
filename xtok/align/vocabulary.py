"""`Vocabulary`: all that is known of a model's ids."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from xtok.align.encoding import Encoder, encoder
from xtok.align.keys import noise_keys
from xtok.align.tokenbytes import TokenBytes


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The bytes of a model's ids, how its tokenizer encodes plain text, and the keys of its ids for noise. It holds no model.

    `view`: the bytes of each id. `size`: how many ids the model has logits for, those without a token included. `ends`: the
    ids that end a text. All sequences share one; parts that take time to make are made at their first use.
    """

    tokenizer: Any
    view: TokenBytes
    size: int
    ends: frozenset[int]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Vocabulary":
        """Returns the object itself: nothing in it changes but parts that are made at their first use."""
        return self

    @cached_property
    def encoder(self) -> Encoder:
        return encoder(self.tokenizer, self.view)

    @cached_property
    def longest(self) -> int:
        """How many bytes of a text one id stands for at most. A control token stands for its name."""
        return max(self.view.longest, *(len(name.encode()) for name in self.tokenizer.get_added_vocab()), 1)

    @cached_property
    def keys(self) -> Tensor:
        """The keys of the ids for noise, (size,), int64."""
        return noise_keys(self.view, self.size)
