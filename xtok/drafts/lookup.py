"""Prompt lookup: guesses what followed the same text before. It needs no model."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from threading import Lock
from typing import Any

from xtok.align.continuation import Continuation
from xtok.align.encoding import Encoder
from xtok.drafts.base import Context, Request, check_request
from xtok.drafts.corpus import Corpus, Repeats, TextMemory
from xtok.drafts.policy.settings import Budget
from xtok.drafts.tree import Tree, Trie
from xtok.errors import InvalidInputError, shown

_LONGEST = 8
"""The cap on the length of a match, in ids."""
_PRIOR = (0.0, 0.2, 0.5, 0.7, 0.8, 0.85, 0.9, 0.9, 0.9)
"""How often the next id is the same if 0, 1, … ids before it are: an assumption, until enough was observed."""
_WEIGHT = 4
"""How many observations weigh as much as the assumption."""
_LEAST = 0.01
"""Ids that are less probable aren't guessed."""
_SMALLEST = 1 << 16
"""The smallest memory, in bytes: much less would hold no text of a usual length."""
_BYTES = 8
"""How many bytes an id of the target is assumed to have at most."""


class PromptLookup:
    """Guesses what followed the longest earlier occurrence of the text's end, in prompt and output or in a corpus (prompt
    lookup: Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding). It needs no model and next to no time.

    `corpus`: texts that the target may quote, such as retrieved documents. They are searched by bytes, so any tokenizer will
    do, and in a time that hardly depends on their size. `memory`: how many bytes to spend on remembering earlier sequences
    (prompts and outputs), which are searched as well. About a sixth of it is text; the oldest is forgotten first. With a
    memory, a sequence's speed depends on earlier ones, though its tokens don't. One object may serve several instances and
    threads.
    """

    def __init__(self, corpus: Sequence[str] = (), *, memory: int = 0) -> None:
        """Raises `InvalidInputError` unless `corpus` is a list of texts and `memory` is 0 or a large enough number of bytes."""
        texts = list(corpus) if isinstance(corpus, Iterable) else [None]
        if isinstance(corpus, (str, bytes, Mapping)) or not all(isinstance(text, str) for text in texts):
            raise InvalidInputError(f"corpus is {shown(corpus)}; it must be a list of texts: PromptLookup(corpus=[text, …]).")
        if not isinstance(memory, int) or isinstance(memory, bool) or (memory and memory < _SMALLEST):
            raise InvalidInputError(
                f"memory is {memory!r}; it must be 0 or a whole number of bytes from {_SMALLEST} on: "
                "PromptLookup(memory=16 * 2**20)."
            )
        self._texts = [str(text) for text in texts if text]
        self._size, self._memory = memory, TextMemory(memory) if memory else None
        self._index: Corpus | None = None
        self._lock = Lock()

    @property
    def index(self) -> Corpus | None:
        """The index of the corpus, which is made at its first use, by one thread; None without a corpus."""
        with self._lock:
            if self._index is None and self._texts:
                self._index = Corpus([text.encode(errors="replace") for text in self._texts])
            return self._index

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy indexes the corpus anew, and remembers nothing: a lock can't be copied."""
        return partial(type(self), memory=self._size), (self._texts,)

    def __repr__(self) -> str:
        corpus = [f"a corpus of {len(self._texts)} texts"] if self._texts else []
        return f"PromptLookup({', '.join([*corpus, *([f'memory={self._size}'] if self._size else [])])})"

    def start(self, request: Request) -> "Lookup":
        check_request(request)
        return Lookup(self.index, request.vocabulary.encoder, memory=self._memory)

    def without_memory(self) -> "PromptLookup":
        """The same draft without a memory of earlier sequences."""
        if self._memory is None:
            return self
        other = PromptLookup(self._texts)
        other._index = self.index
        return other


class Prediction:
    """Guesses that the output follows a text that the caller expects (OpenAI's Predicted Outputs). After the two differ, it
    guesses again as soon as the end of the output occurs in that text. One object may serve several sequences.
    """

    def __init__(self, text: str) -> None:
        self._data = text.encode(errors="replace")
        self._corpus = Corpus([self._data])

    def start(self, request: Request) -> "Lookup":
        return Lookup(self._corpus, request.vocabulary.encoder, self._data)


class Lookup:
    """The drafter of `PromptLookup` and `Prediction` for one sequence. `encoder`: the target's. `prediction`: the bytes of the
    expected text, if there is one; `corpus` then holds that text alone, and all guesses are from it. `memory`: remembers the
    text, once it has ended, for later sequences.
    """

    def __init__(
        self, corpus: Corpus | None, encoder: Encoder, prediction: bytes | None = None, memory: TextMemory | None = None
    ) -> None:
        self._corpora = [one for one in (corpus, memory) if one is not None]
        self._memory = memory
        self._prediction = prediction
        self._continuation = Continuation(encoder)
        self._view = encoder.view
        self._repeats = Repeats()
        self._shown: tuple[int, int | None] = (0, None)
        self._beliefs = [Belief() for _ in range(1 + len(self._corpora))]

    def propose(self, context: Context, budget: Budget) -> Tree:
        """The continuations after earlier occurrences of the text's end, as branches; those of the longest ones first."""
        ids, (before, last) = context.ids, self._shown
        is_as_shown = before > 0 and len(ids) >= before and ids[before - 1] == last
        for belief in self._beliefs:
            belief.learn(ids[before:] if is_as_shown else [])
        self._shown = len(ids), ids[-1] if ids else None
        trie = Trie()
        if self._prediction is None:
            self._add(trie, 0, self._repeated(ids, budget))
        for source, corpus in enumerate(self._corpora, 1):
            self._add(trie, source, self._found(corpus, context, budget))
        return trie.best(budget.verified)

    def ends(self, data: bytes) -> None:
        """Remember the whole text, if there is a memory."""
        if self._memory is not None:
            self._memory.add(data)

    def _add(self, trie: Trie, source: int, found: list[tuple[list[int], int, float]]) -> None:
        """Add the continuations that were `found` in one source: the ids of each, how many ids before it agree with the text's
        end, and its share of the occurrences.
        """
        left, belief = 1.0, self._beliefs[source]
        for i, (ids, agreeing, share) in enumerate(found):
            expected = (left * share * one for one in belief.probabilities(agreeing, len(ids)))
            probabilities = [*takewhile(lambda one: one > _LEAST, expected)]
            trie.add(ids, probabilities, source)
            left -= sum(probabilities[:1])
            if not i:
                belief.given = ids, agreeing

    def _repeated(self, ids: Sequence[int], budget: Budget) -> list[tuple[list[int], int, float]]:
        """Continuations found in `ids`, prompt and output, as `_add` takes them. The last id may not be committed yet."""
        repeats = self._repeats
        for token in ids[len(repeats.ids) : -1]:
            repeats.append(token)
        if not budget.longest or not ids:
            return []
        found = repeats.followers(budget.width, ids[-1])
        return [(repeats.continuation(position, budget.longest, ids[-1]), agreeing, 1.0) for position, agreeing in found]

    def _found(self, corpus: Corpus | TextMemory, context: Context, budget: Budget) -> list[tuple[list[int], int, float]]:
        """Continuations found in the corpus, as `_add` takes them; the rest of the prediction while the output follows it."""
        new = context.data[context.prompt_size :]
        if self._prediction is not None and self._prediction.startswith(new):
            rest = self._prediction[len(new) : len(new) + _BYTES * budget.longest]
            ids = self._continuation.ids(context.ids, rest)[: budget.longest]
            return [(ids, _LONGEST, 1.0)] if ids else []
        agreeing, texts = corpus.continuations(context.data, _BYTES * budget.longest, budget.width)
        known = self._ids_within(context, agreeing)
        mapped = [(self._continuation.ids(context.ids, text), known, share) for text, share in texts if known]
        return [(ids[: budget.longest], known, share) for ids, known, share in mapped if ids[: budget.longest]]

    def _ids_within(self, context: Context, size: int) -> int:
        """How many of the last ids lie within the last `size` bytes, `_LONGEST` at most."""
        count = 0
        for token in reversed(context.ids[-_LONGEST:]):
            size -= len(self._view[token] or b"")
            if size < 0:
                break
            count += 1
        return count


class Belief:
    """How probable continuations are, by how many ids before them agree, as learnt from earlier ones that were verified."""

    def __init__(self) -> None:
        self._hits = [rate * _WEIGHT for rate in _PRIOR]
        self._tries = [_WEIGHT] * len(_PRIOR)
        self.given: tuple[list[int], int] = ([], 0)

    def probabilities(self, agreeing: int, size: int) -> Iterator[float]:
        """For each of `size` ids after `agreeing` ones, the probability that it and all before it are right."""
        probability = 1.0
        for i in range(size):
            known = min(agreeing + i, _LONGEST)
            probability *= self._hits[known] / self._tries[known]
            yield probability

    def learn(self, new: Sequence[int]) -> None:
        """Compare the continuation `given` last with the `new` ids that were committed in its place; none if unknown."""
        (ids, agreeing), self.given = self.given, ([], 0)
        for i, (guess, truth) in enumerate(zip(ids, new, strict=False)):
            known = min(agreeing + i, _LONGEST)
            self._tries[known] += 1
            self._hits[known] += guess == truth
            if guess != truth:
                break
