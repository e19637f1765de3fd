"""A draft model with a tokenizer of its own."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from xtok.budget import Budget
from xtok.continuation import Continuation
from xtok.drafts import Context
from xtok.encoding import Encoder
from xtok.lm import CachedModel, context_window, new_cache
from xtok.reencode import Reencoder
from xtok.trace import Meter
from xtok.tree import Tree, chain


@dataclass(frozen=True)
class DraftModel:
    """A draft and its tables, shared by all generations.

    `lead`: the ids that its tokenizer puts in front of every text. `ends`: its ids that end a text.
    """

    model: PreTrainedModel
    encoder: Encoder
    lead: tuple[int, ...]
    ends: frozenset[int]


class CrossTokenizerDrafter:
    """Reads the context in the draft's own ids, guesses text, and gives it in the target's ids. One per generation.

    The last draft token of the context may be the beginning of a longer one ("healing", as in guidance's token healing): it is
    chosen anew among the tokens that begin with its bytes, from the same forward that reads the context.
    A context beyond the draft's window is read from its most recent part. The draft's end of text becomes `target_end`.
    """

    def __init__(
        self,
        draft: DraftModel,
        continuation: Continuation,
        target_end: int | None,
        meter: Meter,
        prompt: Sequence[int] | None = None,
        heals: bool = True,
    ) -> None:
        """`prompt`: the draft's own ids for the prompt (its chat template), instead of the prompt's text."""
        self._draft = draft
        self._view = draft.encoder.view
        self._continuation = continuation
        self._target_end = target_end
        self._meter = meter
        self._own_prompt = prompt is not None
        self._lead = tuple(draft.lead if prompt is None else prompt)
        self._text = Reencoder(draft.encoder)
        self._read: int | None = None
        self._window = context_window(draft.model)
        self._start = 0
        self._lm = CachedModel(draft.model, new_cache(draft.model))
        self._cached: list[int] = []
        self._heals = heals

    def propose(self, context: Context, budget: Budget) -> Tree:
        """A chain: the target's ids for what the draft writes in at most `budget.draft_tokens` of its own."""
        with self._meter.timing("align"):
            ids, pending = self._ids(context)
        count = budget.draft_tokens if self._window is None else min(budget.draft_tokens, self._window // 2)
        ids = self._recent(ids, count)
        if not ids or not count:
            return Tree()
        guess, ended = self._guess(ids, pending, count)
        with self._meter.timing("align"):
            tokens = self._continuation.ids(context.ids, guess)
            if ended and self._target_end is not None:
                tokens.append(self._target_end)
            return chain(tokens[: budget.target_tokens], guess)

    def _ids(self, context: Context) -> tuple[list[int], bytes]:
        """The context in the draft's ids, and the bytes of a character that it leaves unfinished."""
        if self._read is None:
            self._read = context.prompt_size if self._own_prompt else 0
        self._text.append(context.data[self._read :])
        self._read = len(context.data)
        return [*self._lead, *self._text.ids], self._text.pending

    def _recent(self, ids: list[int], guess: int) -> list[int]:
        """`ids` from where they fit the window together with a guess; that start moves in steps of half a window."""
        if self._window is None:
            return ids
        room = max(1, self._window - guess)
        if len(ids) - self._start > room or self._start >= len(ids):
            self._start = max(0, len(ids) - max(1, room // 2))
        return ids[self._start :]

    def _guess(self, ids: list[int], pending: bytes, count: int) -> tuple[bytes, bool]:
        """The bytes that the draft adds to the text, and whether it ends the text behind them."""
        rows = self._logits(ids, rows=min(2, len(ids)))
        token, must, given = self._first(rows, ids, pending)
        written = b""
        for position in range(count):
            piece = None if token is None else self._view[token]
            if token is None or piece is None:
                return written[len(given) :], token in self._draft.ends and len(written) >= len(given)
            written += piece
            must = must[len(piece) :]
            if position + 1 < count:
                token = self._best(self._next(token), must)
        return written[len(given) :], False

    def _first(self, rows: Tensor, ids: list[int], pending: bytes) -> tuple[int | None, bytes, bytes]:
        """The first token of the guess, the bytes it must agree with, and those of them that the context has already."""
        given = (self._view[ids[-1]] or b"") + pending
        if self._heals and len(given) > len(pending) and len(rows) == 2:
            healed = self._likeliest(rows[0], self._view.ids_starting_with(given))
            if healed is not None and healed != ids[-1]:
                self._lm.roll_back(self._lm.length - 1)
                self._cached.pop()
                return healed, given, given
        return self._best(rows[-1], pending), pending, pending

    def _best(self, logits: Tensor, must: bytes) -> int | None:
        """The likeliest token, among those compatible with the bytes that the text must begin with."""
        return self._likeliest(logits, self._view.compatible(must)) if must else int(logits.argmax())

    @staticmethod
    def _likeliest(logits: Tensor, tokens: "array[int]") -> int | None:
        """The likeliest of `tokens`, less those that the model has no row for."""
        if not tokens:
            return None
        allowed = torch.frombuffer(tokens, dtype=torch.int32).to(logits.device)
        allowed = allowed[allowed < len(logits)]
        return int(allowed[logits[allowed].argmax()]) if len(allowed) else None

    def _next(self, token: int) -> Tensor:
        return self._forward([token], rows=1)[-1]

    def _logits(self, ids: list[int], rows: int) -> Tensor:
        """The logits of the last `rows` of `ids`; only what the cache lacks is forwarded."""
        common = _common_prefix(self._cached, ids[: len(ids) - rows])
        if not self._lm.roll_back(common):
            self._lm.start_anew()
            common = 0
        self._cached = ids[:common]
        return self._forward(ids[common:], rows)

    def _forward(self, new: list[int], rows: int) -> Tensor:
        self._meter.draft_forwards += 1
        self._cached = [*self._cached, *new]
        return self._lm.forward(torch.tensor([new], device=self._draft.model.device), rows)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    size = min(len(a), len(b))
    same = next((i for i in range(0, size, 64) if a[i : i + 64] != b[i : i + 64]), size)  # slices compare faster than ids
    return next((i for i in range(same, size) if a[i] != b[i]), size)
