"""What followed the same words before: guesses without a model."""

from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import Any

from xtok.align.continuation import Continuation
from xtok.align.encoding import Encoder
from xtok.drafts.base import Context, Request, check_request
from xtok.drafts.corpus import Corpus
from xtok.drafts.policy.settings import Budget
from xtok.drafts.repeats import Repeats
from xtok.drafts.tree import Tree, Trie, chain
from xtok.errors import InvalidInputError

_LONGEST = 8
_PRIOR = (0.0, 0.2, 0.5, 0.7, 0.8, 0.85, 0.9, 0.9, 0.9)
"""How often the next id is the same where so many ids before it are, until it has been seen."""
_WEIGHT = 4
_LEAST = 0.01
"""What is less probable isn't guessed."""
_BYTES = 8
"""How many bytes an id of the target is taken to have at most."""


class PromptLookup:
    """Guesses what followed the longest repeated end of prompt and output, there or in a corpus. No model, next to no cost.

    (Prompt lookup: Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding.) `corpus`: texts that the target may
    quote, such as retrieved documents. A look-up costs the same however large it is, and so does its tokenizer not matter: the
    corpus is looked up by its bytes. One object may serve several instances and threads.
    """

    def __init__(self, corpus: Sequence[str] = ()) -> None:
        """Raises `InvalidInputError` unless `corpus` is a list of texts."""
        texts = list(corpus) if isinstance(corpus, Iterable) else [None]
        if isinstance(corpus, (str, bytes, Mapping)) or not all(isinstance(text, str) for text in texts):
            raise InvalidInputError(
                f"corpus is {type(corpus).__name__}; it must be a list of texts: PromptLookup(corpus=[text, …])."
            )
        self._texts = [str(text) for text in texts if text]
        self._index: Corpus | None = None
        self._lock = Lock()

    @property
    def index(self) -> Corpus | None:
        """The corpus, made ready where it is first asked for."""
        with self._lock:
            if self._index is None and self._texts:
                self._index = Corpus(self._texts)
            return self._index

    def __repr__(self) -> str:
        return f"PromptLookup({f'a corpus of {len(self._texts)} texts' if self._texts else ''})"

    def __getstate__(self) -> dict[str, Any]:
        """A copy has a lock of its own, for locks can't be copied."""
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=Lock())

    def start(self, request: Request) -> "Lookup":
        """A drafter for one text."""
        check_request(request)
        return Lookup(self.index, request.vocabulary.encoder)


class Prediction:
    """Guesses that a text goes on as its caller foresees, and again wherever the two agree (OpenAI's Predicted Outputs). One
    object may serve several texts.
    """

    def __init__(self, text: str) -> None:
        self._data = text.encode(errors="replace")
        self._corpus = Corpus([text])

    def start(self, request: Request) -> "Foreseen":
        """A drafter for one text."""
        return Foreseen(self._data, self._corpus, request.vocabulary.encoder)


class Lookup:
    """`PromptLookup` for one generation, whose target has `encoder`."""

    def __init__(self, corpus: Corpus | None, encoder: Encoder) -> None:
        self._corpus = corpus
        self._continuation = Continuation(encoder)
        self._view = encoder.view
        self._repeats = Repeats()
        self._shown: tuple[int, int | None] = (0, None)
        self._beliefs = Belief(), Belief()

    def propose(self, context: Context, budget: Budget) -> Tree:
        """What followed, the longest match first, as branches."""
        ids, (shown, last) = context.ids, self._shown
        is_as_shown = shown > 0 and len(ids) >= shown and ids[shown - 1] == last
        for belief in self._beliefs:
            belief.learn(ids[shown:] if is_as_shown else [])
        self._shown = len(ids), ids[-1] if ids else None
        trie = Trie()
        self._mix(trie, self._repeated(ids, budget), self._beliefs[0])
        if self._corpus is not None:
            self._mix(trie, self._found(self._corpus, context, budget), self._beliefs[1])
        return trie.best(budget.verified)

    @staticmethod
    def _mix(trie: Trie, found: list[tuple[list[int], int, float]], belief: "Belief") -> None:
        """Add continuations, each with how many ids agree before it and its share."""
        left = 1.0
        for i, (ids, agreeing, share) in enumerate(found):
            probabilities = [left * share * probability for probability in belief.probabilities(agreeing, len(ids))]
            kept = sum(probability > _LEAST for probability in probabilities)
            trie.mix(chain(ids[:kept]), probabilities)
            left -= probabilities[0]
            if not i:
                belief.given = ids, agreeing

    def _repeated(self, ids: Sequence[int], budget: Budget) -> list[tuple[list[int], int, float]]:
        """From prompt and output. The last of `ids` isn't taken in yet, for it may not be committed."""
        repeats = self._repeats
        for token in ids[len(repeats.ids) : -1]:
            repeats.append(token)
        if not budget.longest or not ids:
            return []
        found = repeats.followers(budget.width, ids[-1])
        return [(repeats.continuation(start, budget.longest, ids[-1]), agreeing, 1.0) for start, agreeing in found]

    def _found(self, corpus: Corpus, context: Context, budget: Budget) -> list[tuple[list[int], int, float]]:
        """From the corpus."""
        agreeing, texts = corpus.continuations(context.data, _BYTES * budget.longest, budget.width)
        known = self._ids_within(context, agreeing)
        mapped = [(self._ids_of(context, text, budget), known, share) for text, share in texts if known]
        return [one for one in mapped if one[0]]

    def _ids_of(self, context: Context, text: bytes, budget: Budget) -> list[int]:
        """A text as ids after the context's."""
        return self._continuation.ids(context.ids, text)[: budget.longest]

    def _ids_within(self, context: Context, size: int) -> int:
        """How many of the last ids lie within the last `size` bytes, as far as it matters."""
        count = 0
        for token in reversed(context.ids[-_LONGEST:]):
            size -= len(self._view[token] or b"")
            if size < 0:
                break
            count += 1
        return count


class Foreseen(Lookup):
    """`Prediction` for one generation."""

    def __init__(self, data: bytes, corpus: Corpus, encoder: Encoder) -> None:
        super().__init__(corpus, encoder)
        self._data = data

    def _repeated(self, ids: Sequence[int], budget: Budget) -> list[tuple[list[int], int, float]]:
        """Nothing: what the text repeats is no merit of what was predicted."""
        return []

    def _found(self, corpus: Corpus, context: Context, budget: Budget) -> list[tuple[list[int], int, float]]:
        """As long as the text is the beginning of what was predicted, what comes next there; else what a corpus has."""
        new = context.data[context.prompt_size :]
        if not self._data.startswith(new):
            return super()._found(corpus, context, budget)
        behind = self._data[len(new) : len(new) + _BYTES * budget.longest]
        ids = self._ids_of(context, behind, budget)
        return [(ids, _LONGEST, 1.0)] if ids else []


class Belief:
    """How far a continuation is believed, by how many ids before it agree: learnt from those that were given before."""

    def __init__(self) -> None:
        self._hits = [rate * _WEIGHT for rate in _PRIOR]
        self._tries = [_WEIGHT] * len(_PRIOR)
        self.given: tuple[list[int], int] = ([], 0)

    def probabilities(self, agreeing: int, size: int) -> list[float]:
        """For each id of a continuation, the probability of all up to it."""
        found, probability = list[float](), 1.0
        for i in range(size):
            known = min(agreeing + i, _LONGEST)
            probability *= self._hits[known] / self._tries[known]
            found.append(probability)
        return found

    def learn(self, new: Sequence[int]) -> None:
        """Learn from what came in place of the last continuation given, if anything is known of that."""
        (ids, agreeing), self.given = self.given, ([], 0)
        for i, (guess, truth) in enumerate(zip(ids, new, strict=False)):
            known = min(agreeing + i, _LONGEST)
            self._tries[known] += 1
            self._hits[known] += guess == truth
            if guess != truth:
                break
