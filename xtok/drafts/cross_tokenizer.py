"""A draft model with a tokenizer of its own."""

from array import array

import torch
from torch import Tensor

from xtok.budget import Budget
from xtok.continuation import Continuation
from xtok.drafts import Context
from xtok.drafts.reader import DraftModel, Reader
from xtok.trace import Meter
from xtok.tree import Tree, chain


class CrossTokenizerDrafter:
    """Reads the context in the draft's own ids, guesses text, and gives it in the target's ids. One per generation.

    The last draft token of the context may be the beginning of a longer one ("healing", as in guidance's token healing): it is
    chosen anew among the tokens that begin with its bytes, from the same forward that reads the context.
    The draft's end of text becomes `target_end`.
    """

    def __init__(
        self,
        draft: DraftModel,
        reader: Reader,
        continuation: Continuation,
        target_end: int | None,
        meter: Meter,
    ) -> None:
        self._draft = draft
        self._view = draft.encoder.view
        self._reader = reader
        self._continuation = continuation
        self._target_end = target_end
        self._meter = meter

    @torch.inference_mode()
    def propose(self, context: Context, budget: Budget) -> Tree:
        """A chain: the target's ids for what the draft writes in at most `budget.draft_tokens` of its own."""
        count = self._reader.longest(budget.draft_tokens)
        ids, pending = self._reader.read(context, count)
        if not ids or not count:
            return Tree()
        guess, ended = self._guess(ids, pending, count)
        with self._meter.timing("align"):
            tokens = self._continuation.ids(context.ids, guess)
            if ended and self._target_end is not None:
                tokens.append(self._target_end)
            return chain(tokens[: budget.target_tokens], guess)

    def _guess(self, ids: list[int], pending: bytes, count: int) -> tuple[bytes, bool]:
        """The bytes that the draft adds to the text, and whether it ends the text behind them."""
        token, given = self._first(ids, pending)
        written = b""
        for position in range(count):
            piece = None if token is None else self._view[token]
            if token is None or piece is None:
                return written[len(given) :], token in self._draft.ends and len(written) >= len(given)
            written += piece
            if position + 1 < count:
                token = self._best(self._reader.next([token]), given[len(written) :])
        return written[len(given) :], False

    def _first(self, ids: list[int], pending: bytes) -> tuple[int | None, bytes]:
        """The first token of the guess, and the bytes at its beginning that the context has already."""
        rows = self._reader.logits(ids, rows=min(2, len(ids)))
        given = (self._view[ids[-1]] or b"") + pending
        if len(given) > len(pending) and len(rows) == 2:
            healed = self._likeliest(rows[0], self._view.ids_starting_with(given))
            if healed is not None and healed != ids[-1]:
                self._reader.take_back()
                return healed, given
        return self._best(rows[-1], pending), pending

    def _best(self, logits: Tensor, must: bytes) -> int | None:
        """The likeliest token, among those compatible with the bytes that the text must begin with."""
        return self._likeliest(logits, self._view.compatible(must)) if must else int(logits.argmax())

    @staticmethod
    def _likeliest(logits: Tensor, allowed: "array[int]") -> int | None:
        """The likeliest of some tokens, less those that the model has no row for."""
        if not allowed:
            return None
        tokens = torch.frombuffer(allowed, dtype=torch.int32).to(logits.device)
        tokens = tokens[tokens < len(logits)]
        return int(tokens[logits[tokens].argmax()]) if len(tokens) else None
