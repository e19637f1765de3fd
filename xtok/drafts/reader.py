"""A draft model that reads what the target writes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from xtok.drafts import Context
from xtok.encoding import Encoder
from xtok.lm import CachedModel, context_window, new_cache, takes_trees, vocabulary_size
from xtok.reencode import Reencoder
from xtok.trace import Meter


@dataclass(frozen=True)
class DraftModel:
    """A draft and its tables, shared by all generations.

    `lead`: the ids that its tokenizer puts in front of every text. `ends`: its ids that end a text.
    """

    model: PreTrainedModel
    encoder: Encoder
    lead: tuple[int, ...]
    ends: frozenset[int]

    @cached_property
    def vocabulary(self) -> int:
        """How many ids the model knows, those without a token included."""
        return vocabulary_size(self.model)

    @cached_property
    def branches(self) -> bool:
        """Whether one forward can continue several guesses."""
        return takes_trees(self.model)


class Reader:
    """The text of one generation in the draft's own ids, and the draft's logits behind them.

    A text beyond the draft's window is read from its most recent part.
    """

    def __init__(self, draft: DraftModel, meter: Meter, prompt: Sequence[int] | None = None) -> None:
        """`prompt`: the draft's own ids for the prompt (its chat template), instead of the prompt's text."""
        self._draft = draft
        self._meter = meter
        self._own_prompt = prompt is not None
        self._lead = tuple(draft.lead if prompt is None else prompt)
        self._text = Reencoder(draft.encoder)
        self._read: int | None = None
        self._window = context_window(draft.model)
        self._start = 0
        self._lm = CachedModel(draft.model, new_cache(draft.model))
        self._cached: list[int] = []

    def longest(self, guess: int) -> int:
        """How much of a guess of `guess` tokens leaves room in the window for a text to guess behind."""
        return guess if self._window is None else min(guess, self._window // 2)

    def read(self, context: Context, guess: int) -> tuple[list[int], bytes]:
        """The context in the draft's ids, and the bytes of a character that it leaves unfinished."""
        with self._meter.timing("align"):
            if self._read is None:
                self._read = context.prompt_size if self._own_prompt else 0
            self._text.append(context.data[self._read :])
            self._read = len(context.data)
            return self._recent([*self._lead, *self._text.ids], guess), self._text.pending

    def _recent(self, ids: list[int], guess: int) -> list[int]:
        """`ids` from where they fit the window together with a guess; that start moves in steps of half a window."""
        if self._window is None:
            return ids
        room = max(1, self._window - guess)
        if len(ids) - self._start > room or self._start >= len(ids):
            self._start = max(0, len(ids) - max(1, room // 2))
        return ids[self._start :]

    def logits(self, ids: list[int], rows: int) -> Tensor:
        """The logits behind the last `rows` of `ids`; only what the cache lacks is forwarded."""
        common = _common_prefix(self._cached, ids[: len(ids) - rows])
        if not self._lm.roll_back(common):
            self._lm.start_anew()
            common = 0
        self._cached = ids[:common]
        return self._forward(ids[common:], rows)

    def holds(self, tokens: int) -> bool:
        """Whether the window has room for so many tokens."""
        return self._window is None or tokens <= self._window

    @property
    def branched(self) -> int:
        """How many nodes stand behind what was read."""
        return self._lm.branched

    def branch(self, tokens: list[int], parents: list[int]) -> Tensor:
        """The logits behind further tokens, nodes of a tree, (tokens, vocabulary); parents as for `CachedModel.branch`."""
        self._meter.drafts(len(tokens))
        with self._meter.timing("reading"):
            return self._lm.branch(torch.tensor([tokens], device=self._draft.model.device), parents)

    def take_back(self) -> None:
        """Forget the last token."""
        self._lm.roll_back(self._lm.length - 1)
        self._cached.pop()

    def _forward(self, new: list[int], rows: int) -> Tensor:
        self._meter.drafts(len(new))
        self._cached = [*self._cached, *new]
        with self._meter.timing("reading"):
            return self._lm.forward(torch.tensor([new], device=self._draft.model.device), rows)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    size = min(len(a), len(b))
    same = next((i for i in range(0, size, 64) if a[i : i + 64] != b[i : i + 64]), size)  # slices compare faster than ids
    return next((i for i in range(same, size) if a[i] != b[i]), size)
