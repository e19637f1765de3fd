"""A draft model with a tokenizer of its own, which guesses text that the target writes greedily."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from xtok.align.continuation import Continuation
from xtok.drafts.base import Context
from xtok.drafts.growth import CHILDREN, SHARPNESS, Path, TreeDrafter, as_lists, check_numbers
from xtok.drafts.meter import Meter
from xtok.drafts.policy.settings import Budget
from xtok.drafts.reader import Reader
from xtok.drafts.tree import Tree, Trie
from xtok.models.forwards import Steps
from xtok.models.load import DraftModel
from xtok.sampling.largest import largest

_CONSIDERED = 64
"""For how many ids probabilities are computed: others have almost none after logits are multiplied by `SHARPNESS`."""

_TIED = 1e-6
"""A chain replaces the context's last token by a longer one only if that is likelier by more than rounding."""


@dataclass
class _Guess(Path):
    """A guessed text. `token`: the draft's last token of it; None before the first. `given`: the bytes at the beginning of
    `written` that the context has already.
    """

    given: bytes = b""
    token: int | None = None

    @property
    def added(self) -> bytes:
        return self.written[len(self.given) :]


@dataclass(eq=False, repr=False)
class CrossTokenizerDrafter(TreeDrafter[_Guess]):
    """Reads the context in the draft's own ids, guesses texts, and returns them in the target's ids. For one sequence.

    The last draft token of the context may be the beginning of a longer token (token healing, as in guidance). So some guesses
    start after it and others with longer tokens in its place. The draft's forward pass over the context gives the
    probabilities of both. The draft's end of text becomes `target_end`.
    """

    draft: DraftModel
    reader: Reader
    continuation: Continuation
    target_end: int | None
    meter: Meter

    def __post_init__(self) -> None:
        self._view = self.draft.vocabulary.view

    def begin(self, context: Context, budget: Budget) -> tuple[_Guess, Budget] | None:
        depth = self.reader.longest(budget.depth)
        pending = self.reader.read(context, depth)
        if not self.reader.size or not depth:
            return None
        limit = replace(budget, depth=depth, width=budget.width if self.draft.branches else 1)
        return _Guess(1.0, -1, b"", given=pending), limit

    def _first(self, follows: _Guess, chained: bool) -> Steps[list[_Guess]]:
        """The first tokens of guesses: after the context's last token, as `follows`, and in place of it. For a chain, only the
        most probable.
        """
        pending = follows.given
        logits = yield from self.reader.logits(rows=min(2, self.reader.size))
        rows = logits.float() * SHARPNESS
        token, count = self.reader.last, 1 if chained else CHILDREN
        last = self._view[token] or b""
        longer = _Guess(0.0, -2, b"", given=last + pending)
        others = [other for other in self._view.ids_starting_with(last + pending) if other != token] if last else []
        if len(rows) < 2 or not others:
            return (yield from self._children(rows[-1:], [follows], count))[0]
        again = self._only(rows[0], [token, *others]).softmax(dim=-1)
        stays, again[token] = again[token].clone(), 0.0
        probabilities = torch.stack([stays, 1 - stays])
        starts = torch.stack([rows[1], again.log()])
        next_ones, longer_ones = yield from self._children(starts, [follows, longer], count, probabilities)
        if not chained:
            return [*next_ones, *longer_ones]
        if not longer_ones or follows.probability >= longer_ones[0].probability * (1 - _TIED):
            return next_ones
        self.reader.take_back()
        return [replace(one, parent=-1) for one in longer_ones]

    def expanded(self, context: Context, front: list[_Guess], budget: Budget) -> Steps[list[list[_Guess]]]:
        if front[0].token is None:
            return [(yield from self._first(front[0], budget.width == 1))]
        first = self.reader.branched
        tokens = [guess.token for guess in front if guess.token is not None]
        logits = yield from self.reader.branch(tokens, [guess.parent for guess in front])
        for node, guess in enumerate(front, start=first):
            guess.parent = node
        return (yield from self._children(logits.float() * SHARPNESS, front, 1 if budget.width == 1 else CHILDREN))

    def _children(
        self, logits: Tensor, guesses: list[_Guess], count: int, probabilities: Tensor | None = None
    ) -> Steps[list[list[_Guess]]]:
        """The `count` likeliest continuations of each guess by `logits`, (guesses, vocabulary), float32. `probabilities`: those
        of the guesses, (guesses,), if they are still on the device.
        """
        missing = [guess.given[len(guess.written) :] for guess in guesses]
        allowed = [
            self._only(row, self._view.compatible(rest)) if rest else row for row, rest in zip(logits, missing, strict=True)
        ]
        likely, ids = largest(torch.stack(allowed) if any(missing) else logits, _CONSIDERED)
        probabilities = likely[:0, 0] if probabilities is None else probabilities
        numbers = ids[:, :count], likely.softmax(dim=-1)[:, :count], probabilities
        tokens, conditionals, found = yield from as_lists(self.meter, *numbers)
        check_numbers(logits, conditionals)
        for guess, probability in zip(guesses, found, strict=False):
            guess.probability = probability
        return [
            [child for token, p in zip(own, ps, strict=True) if (child := self._child(guess, p, token))]
            for guess, own, ps in zip(guesses, tokens, conditionals, strict=True)
        ]

    def _child(self, guess: _Guess, conditional: float, token: int) -> _Guess | None:
        piece, ended = self._view[token], token in self.draft.vocabulary.ends
        if not conditional > 0 or (piece is None and not ended):
            return None
        written = guess.written + (piece or b"")
        probability = guess.probability * conditional
        return _Guess(probability, guess.parent, written, conditional, not ended, given=guess.given, token=token)

    @staticmethod
    def _only(logits: Tensor, allowed: Sequence[int]) -> Tensor:
        """Logits, (vocabulary,), with -inf for all ids but `allowed` ones, some of which the model may lack."""
        ids = torch.tensor([token for token in allowed if token < len(logits)], dtype=torch.int64, device=logits.device)
        only = torch.full_like(logits, -torch.inf)
        only[ids] = logits[ids]
        return only

    def tree(self, context: Context, paths: list[_Guess], budget: Budget) -> Tree:
        """The most likely of the guessed texts, as a tree of the target's ids; of a chain, the longest."""
        with self.meter.timing("align"):
            return self._aligned(context, paths[-1:] if budget.width == 1 else paths, budget)

    def _aligned(self, context: Context, guesses: list[_Guess], budget: Budget) -> Tree:
        probabilities: dict[tuple[bytes, bool], float] = {}
        for guess in guesses:
            if len(guess.written) >= len(guess.given):
                text = guess.added, not guess.is_open
                probabilities[text] = probabilities.get(text, 0.0) + guess.kept
        likeliest = sorted(probabilities.items(), key=lambda item: -item[1])
        trie = Trie()
        for (added, ended), probability in likeliest[: budget.verified([probability for _, probability in likeliest])]:
            ids = self.continuation.ids(context.ids, added) if added else []
            if ended and self.target_end is not None:
                ids.append(self.target_end)
            trie.add(ids[: budget.longest], probability)
        return trie.best(budget.verified)
