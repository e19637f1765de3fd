"""A draft model with a tokenizer of its own, which guesses what the target writes greedily."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from xtok.align.continuation import Continuation
from xtok.drafts.base import Context, ModelDrafter
from xtok.drafts.growth import CHILDREN, SHARPNESS, Path, check_numbers, grown, looked_at
from xtok.drafts.meter import Meter
from xtok.drafts.policy.settings import Budget
from xtok.drafts.reader import Reader
from xtok.drafts.tree import Tree, Trie
from xtok.models.forwards import Steps
from xtok.models.roles import DraftModel
from xtok.sampling.largest import largest

_SEEN = 64
"""Of how many ids the conditionals are told: the others have next to none, once they are sharpened."""

_TIED = 1e-6
"""A chain goes on behind its last token unless a longer one is likelier by more than rounding."""


@dataclass
class _Text(Path):
    """A guessed text. `written` begins with `given`, bytes that the context has already, as soon as it is long enough.

    `token` is the draft's last one. `ended`: the draft ends its text here.
    """

    given: bytes = b""
    token: int = 0
    ended: bool = False

    @property
    def is_open(self) -> bool:
        """Whether the draft goes on behind it."""
        return not self.ended

    @property
    def added(self) -> bytes:
        """What the guess adds to the context."""
        return self.written[len(self.given) :]


class CrossTokenizerDrafter(ModelDrafter):
    """Reads the context in the draft's own ids, guesses texts, and gives them in the target's ids. One per generation.

    The last draft token of the context may be the beginning of a longer one ("healing", as in guidance's token healing): the
    guesses start from both, each with the conditional that the draft gives it, from the forward that reads the context.
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
        self._view = draft.vocabulary.view
        self._reader = reader
        self._continuation = continuation
        self._target_end = target_end
        self._meter = meter

    @torch.no_grad()
    def guess(self, context: Context, budget: Budget) -> Steps[Tree]:
        """A tree of the target's ids for what the draft writes within the budget; a chain where its width is 1."""
        chained = budget.width == 1 or not self._draft.branches
        depth = self._reader.longest(budget.depth)
        pending = self._reader.read(context, depth)
        if not self._reader.size or not depth:
            return Tree()
        budget = replace(budget, depth=depth, width=1 if chained else budget.width)
        with self._meter.drafting():
            first = yield from self._first(pending, chained)
        texts = yield from grown(first, budget, self._expanded if not chained else lambda front: self._expanded(front, 1))
        with self._meter.timing("align"):
            return self._mapped(context, texts[-1:] if chained else texts, budget)

    def _first(self, pending: bytes, chained: bool) -> Steps[list[_Text]]:
        """The beginnings of guesses: after the last token, and in place of it. A chain begins with the likeliest."""
        logits = yield from self._reader.logits(rows=min(2, self._reader.size))
        rows = logits.float() * SHARPNESS
        token, count = self._reader.last, 1 if chained else CHILDREN
        last = self._view[token] or b""
        behind = _Text(1.0, -1, b"", given=pending)
        longer = _Text(0.0, -2, b"", given=last + pending)
        others = [other for other in self._view.ids_starting_with(last + pending) if other != token] if last else []
        if len(rows) < 2 or not others:
            return (yield from self._children(rows[-1:], [behind], count))[0]
        again = self._only(rows[0], [token, *others]).softmax(dim=-1)
        stays, again[token] = again[token].clone(), 0.0
        probabilities = torch.stack([stays, 1 - stays])
        starts = torch.stack([rows[1], again.log()])
        next_ones, longer_ones = yield from self._children(starts, [behind, longer], count, probabilities)
        if not chained:
            return [*next_ones, *longer_ones]
        if not longer_ones or behind.probability >= longer_ones[0].probability * (1 - _TIED):
            return next_ones
        self._reader.take_back()
        return [replace(one, parent=-1) for one in longer_ones]

    def _expanded(self, front: list[_Text], count: int = CHILDREN) -> Steps[list[list[_Text]]]:
        """The continuations of some texts, all by one forward."""
        with self._meter.drafting():
            first = self._reader.branched
            logits = yield from self._reader.branch([text.token for text in front], [text.parent for text in front])
            for node, text in enumerate(front, start=first):
                text.parent = node
            return (yield from self._children(logits.float() * SHARPNESS, front, count))

    def _children(
        self, logits: Tensor, texts: list[_Text], count: int, probabilities: Tensor | None = None
    ) -> Steps[list[list[_Text]]]:
        """The `count` likeliest continuations of each text by its row of `logits`. Where a text ends, it has none.

        `logits`: (texts, vocabulary), float32. `probabilities`: of the texts, (texts,), if only the device knows them yet.
        """
        missing = [text.given[len(text.written) :] for text in texts]
        allowed = [
            self._only(row, self._view.compatible(rest)) if rest else row for row, rest in zip(logits, missing, strict=True)
        ]
        likely, ids = largest(torch.stack(allowed) if any(missing) else logits, _SEEN)
        probabilities = likely[:0, 0] if probabilities is None else probabilities
        numbers = ids[:, :count], likely.softmax(dim=-1)[:, :count], probabilities
        tokens, conditionals, found = yield from looked_at(self._meter, *numbers)
        check_numbers(logits, conditionals)
        for text, probability in zip(texts, found, strict=False):
            text.probability = probability
        return [
            [child for token, p in zip(own, ps, strict=True) if (child := self._child(text, p, token))]
            for text, own, ps in zip(texts, tokens, conditionals, strict=True)
        ]

    def _child(self, text: _Text, conditional: float, token: int) -> _Text | None:
        piece, ended = self._view[token], token in self._draft.vocabulary.ends
        if not conditional > 0 or (piece is None and not ended):
            return None
        written = text.written + (piece or b"")
        return _Text(
            text.probability * conditional, text.parent, written, conditional, given=text.given, token=token, ended=ended
        )

    @staticmethod
    def _only(logits: Tensor, allowed: Sequence[int]) -> Tensor:
        """`logits`, (vocabulary,), of some ids, those that the model has; -inf of all others."""
        ids = torch.tensor([token for token in allowed if token < len(logits)], dtype=torch.int64, device=logits.device)
        only = torch.full_like(logits, -torch.inf)
        only[ids] = logits[ids]
        return only

    def _mapped(self, context: Context, texts: list[_Text], budget: Budget) -> Tree:
        """The likeliest of the target's ids for what the texts add."""
        probabilities: dict[tuple[bytes, bool], float] = {}
        for text in texts:
            if len(text.written) >= len(text.given):
                probabilities[text.added, text.ended] = probabilities.get((text.added, text.ended), 0.0) + text.kept
        likeliest = sorted(probabilities.items(), key=lambda item: -item[1])
        trie = Trie()
        for (added, ended), probability in likeliest[: budget.verified([probability for _, probability in likeliest])]:
            ids = self._continuation.ids(context.ids, added) if added else []
            if ended and self._target_end is not None:
                ids.append(self._target_end)
            trie.add(ids[: budget.longest], probability)
        return trie.best(budget.verified, guess=likeliest[0][0][0] if likeliest else b"")
