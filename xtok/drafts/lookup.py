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

    reads_hint = True

    def __init__(self, corpus: Corpus | None, encoder: Encoder) -> None:
        self._corpus = corpus
        self._continuation = Continuation(encoder)
        self._view = encoder.view
        self._repeats, self._read = Repeats(), 0
        self._beliefs = Belief(), Belief()

    def propose(self, context: Context, budget: Budget) -> Tree:
        """What followed, the longest match first, as branches."""
        new, self._read = context.ids[self._read :], len(context.ids)
        for belief in self._beliefs:
            belief.learn(new)
        trie = Trie()
        if context.hint is not None:
            trie.add([context.hint], 1.0)
        self._mix(trie, self._repeated(new, context.hint, budget), self._beliefs[0], context.hint)
        if self._corpus is not None:
            self._mix(trie, self._found(self._corpus, context, budget), self._beliefs[1], context.hint)
        return trie.best(budget.verified)

    @staticmethod
    def _mix(trie: Trie, found: list[tuple[list[int], int, float]], belief: "Belief", hint: int | None) -> None:
        """Continuations after a hint, how many ids agree before each, and their shares."""
        left = 1.0
        before = [] if hint is None else [hint]
        for i, (ids, agreeing, share) in enumerate(found):
            probabilities = [left * share * probability for probability in belief.probabilities(agreeing, len(ids))]
            kept = sum(probability > _LEAST for probability in probabilities)
            trie.mix(chain([*before, *ids[:kept]]), [*[1.0] * len(before), *probabilities])
            left -= probabilities[0]
            if not i:
                belief.given, belief.hint = (ids, agreeing), hint

    def _repeated(self, new: Sequence[int], hint: int | None, budget: Budget) -> list[tuple[list[int], int, float]]:
        """From prompt and output, which has `new` ids."""
        repeats = self._repeats
        for token in new:
            repeats.append(token)
        if not budget.longest:
            return []
        found = repeats.followers(budget.width, hint)
        return [(repeats.continuation(place, budget.longest, hint), agreeing, 1.0) for place, agreeing in found]

    def _found(self, corpus: Corpus, context: Context, budget: Budget) -> list[tuple[list[int], int, float]]:
        """From the corpus."""
        data = context.data + self._continuation.spelled(context.hint, context.data)
        agreeing, texts = corpus.continuations(data, _BYTES * budget.longest, budget.width)
        known = self._ids_within(context, agreeing)
        mapped = [(self._ids_of(context, text, budget), known, share) for text, share in texts if known]
        return [one for one in mapped if one[0]]

    def _ids_of(self, context: Context, text: bytes, budget: Budget) -> list[int]:
        """A text as ids after the committed ones and the hint."""
        hint = [] if context.hint is None else [context.hint]
        return self._continuation.ids(context.ids, text, known=hint)[: budget.longest]

    def _ids_within(self, context: Context, size: int) -> int:
        """How many of the last ids, the hint among them, lie within the last `size` bytes, as far as it matters."""
        count = 0
        hint = [] if context.hint is None else [context.hint]
        for token in reversed([*context.ids[-_LONGEST:], *hint]):
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

    def _repeated(self, new: Sequence[int], hint: int | None, budget: Budget) -> list[tuple[list[int], int, float]]:
        """Nothing: what the text repeats is no merit of what was predicted."""
        return []

    def _found(self, corpus: Corpus, context: Context, budget: Budget) -> list[tuple[list[int], int, float]]:
        """As long as the text is the beginning of what was predicted, what comes next there; else what a corpus has."""
        new = context.data[context.prompt_size :] + self._continuation.spelled(context.hint, context.data)
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
        self.hint: int | None = None

    def probabilities(self, agreeing: int, size: int) -> list[float]:
        """For each id of a continuation, the probability of all up to it."""
        found, probability = list[float](), 1.0
        for i in range(size):
            known = min(agreeing + i, _LONGEST)
            probability *= self._hits[known] / self._tries[known]
            found.append(probability)
        return found

    def learn(self, new: Sequence[int]) -> None:
        """See what became of the last continuation given: nothing is learnt from one after a hint that was wrong."""
        (ids, agreeing), hint = self.given, self.hint
        self.given, self.hint = ([], 0), None
        if hint is not None:
            ids, new = (ids if list(new[:1]) == [hint] else []), new[1:]
        for i, (guess, truth) in enumerate(zip(ids, new, strict=False)):
            known = min(agreeing + i, _LONGEST)
            self._tries[known] += 1
            self._hits[known] += guess == truth
            if guess != truth:
                break
