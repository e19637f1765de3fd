"""Guesses for texts that another engine generates. That engine schedules, verifies and commits; this module only guesses."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from operator import index
from time import perf_counter
from typing import Any

from xtok.align.tokenbytes import token_bytes
from xtok.align.vocabulary import Vocabulary
from xtok.drafts.base import Draft, Drafter, Request
from xtok.drafts.given import as_drafts, as_list, is_drafting
from xtok.drafts.heads import HeadsDrafter
from xtok.drafts.lookup import PromptLookup
from xtok.drafts.meter import Meter
from xtok.drafts.policy.policy import Batch, DraftPolicy, Policy
from xtok.drafts.policy.settings import Budget, check_budget
from xtok.drafts.recycling import TokenRecycling
from xtok.drafts.session import Guess, Session
from xtok.drafts.tree import Tree
from xtok.errors import InvalidInputError, check_whole, shown
from xtok.models.cache_set import CacheSet, Slots
from xtok.models.forwards import run_lockstep
from xtok.models.load import Source, draft_model
from xtok.models.modes import Modes, within
from xtok.models.runner import renewed

CHAINS = Budget(width=2)
"""The default budget. Drafting 2 paths, of which the most likely becomes the chain, gave the pair that ships 1.90 ids per step;
1 path gave 1.78, and 8 paths 1.89, in half as much time again.
"""


@dataclass(eq=False)
class DraftedText:
    """A text that another engine generates, as `DraftEngine.add` returns it.

    `ids`: the ids committed so far, prompt included. `session`: its drafters. `slots`: its cache slots in draft models.
    """

    ids: list[int]
    session: Session = field(repr=False)
    slots: Slots = field(repr=False)

    def __post_init__(self) -> None:
        self._shown = len(self.ids)

    def show(self) -> None:
        if self._shown < len(self.ids):
            self.session.extend(self.ids[self._shown :])
            self._shown = len(self.ids)


@dataclass
class _Step:
    """A step of the other engine, which starts when a proposal ends (`start`). `seconds`: how long it took; None until the
    first `observe`.

    `guesses`: those of the texts with a proposal. `is_pure`: whether the target's forward pass has no other ids than these.
    `batch`: the texts with a proposal; if it guesses, drafts took `drafting` seconds. `observed`: how many ids of each text
    the step committed; None if the ids are of several steps, or of a step without a proposal.
    """

    guesses: dict[DraftedText, Guess] = field(default_factory=dict)
    batch: Batch = field(default_factory=lambda: Batch(0, guesses=False))
    drafting: float = 0.0
    start: float = 0.0
    seconds: float | None = None
    is_pure: bool = True
    observed: dict[DraftedText, int | None] = field(default_factory=dict)


class DraftEngine:
    """Guesses for texts that another engine generates. Texts share the forward passes of drafts.

    Laws: a guess is a chain, the likeliest path of what all drafts guess together. It decides how fast a text comes, never
    what it says, as long as the other engine commits the target's own picks. A draft that raises is reported by a
    `DraftFailedWarning` and not asked again for that text. Memory doesn't grow with the number of texts that were dropped.

        engine = DraftEngine(tokenizer, "cyberagent/open-calm-small")
        text = engine.add(prompt_ids)
        while not done:
            (guess,) = engine.propose([text], longest=8)
            engine.observe(text, verify(guess.tokens))  # the target's own picks along the guess, and one after it
        engine.drop(text)

    Use an object in one thread at a time. Unless the budget is constant, how much is guessed depends on what guesses gained
    and on the time from the end of `propose` to the next `observe`. That is taken for one forward pass of the target over all
    texts of the proposal.
    """

    @within(Modes())
    def __init__(
        self,
        tokenizer: Any,
        draft: Source | Draft | Drafter | list[Any],
        *,
        size: int | None = None,
        ends: Collection[int] = (),
        budget: Budget | None = None,
    ) -> None:
        """`tokenizer`: the target's, from transformers. `draft`: as for `XTokAssisted`, but a model is joined by prompt lookup
        alone, and heads and token recycling are refused. `size`: how many ids the target has logits for; None for as many as
        the tokenizer has. `ends`: the ids that end a text; if empty, the tokenizer's. `budget`: by default, drafts follow two
        paths, and a chain is as long as pays.

        Raises `UnsupportedModelError`, `UnsupportedTokenizerError` or `InvalidInputError` (all of `xtok.errors`).
        """
        check_budget(budget)
        self._budget = budget or CHAINS
        ends = _ids("ends", ends)
        self._vocabulary = _vocabulary(tokenizer, size, ends)
        own = tokenizer.eos_token_id
        self._end = next(iter(ends), None) if own is None or (ends and own not in ends) else own
        given = as_list(draft, beside=[PromptLookup()] if self._budget.width > 1 else [])
        if not given or any(isinstance(one, HeadsDrafter | TokenRecycling) for one in given):
            raise InvalidInputError(f"draft is {draft!r}; give what guesses from ids alone, such as a model or PromptLookup().")
        models = {i: draft_model(one) for i, one in enumerate(given) if not is_drafting(one)}
        self._drafts = as_drafts(given, models, self._vocabulary)
        self._models = [one.model for one in models.values()]
        self._policy = Policy([DraftPolicy() for _ in given])
        self._caches = CacheSet()  # without CUDA graphs: the other engine may be capturing its own
        self._texts: dict[DraftedText, None] = {}
        self._step = _Step(is_pure=False)

    @property
    def texts(self) -> list[DraftedText]:
        """The texts that were added and not dropped."""
        return list(self._texts)

    @within(Modes())
    def add(self, ids: Sequence[int]) -> DraftedText:
        """Add a text to guess for. `ids`: all that is committed of it, in the target's ids, without padding. Raises
        `InvalidInputError` if there are none, and for ids that the target lacks.
        """
        ids = _ids("ids", ids, self._vocabulary.size)
        if not ids:
            raise InvalidInputError("The text has no ids. Give at least one, such as the token that begins texts.")
        for model in self._models:
            renewed(model)
        self._step.is_pure = False  # this step reads the new text's prompt, or leaves the text out
        slots = Slots(self._caches)
        request = Request(self._vocabulary, Meter(), end=self._end, slots=slots)
        text = DraftedText(ids, Session(self._drafts, request, self._policy, ids), slots)
        self._texts[text] = None
        return text

    @within(Modes())
    def observe(self, text: DraftedText, ids: Sequence[int]) -> None:
        """Report the ids that one step committed to a text: the accepted part of its guess, and the id after it. Give no ids if
        the step only read more of its prompt. Raises `InvalidInputError` for a dropped text, and for ids that the target lacks.

        After steps without a proposal, call this once for each of them, or once for all but the last and once for the last.
        """
        self._check(text)
        ids, step = _ids("ids", ids, self._vocabulary.size), self._step
        if step.seconds is None:
            step.seconds = perf_counter() - step.start
        is_whole = bool(ids) and text in step.guesses and text not in step.observed
        step.is_pure &= is_whole
        step.observed[text] = len(ids) if is_whole else None
        text.ids += ids
        if step.batch.guesses:
            text.show()

    def drop(self, text: DraftedText) -> None:
        """Forget a text and free its cache slots. Raises `InvalidInputError` for one that was dropped already."""
        self._check(text)
        del self._texts[text]
        text.session.close()
        text.slots.leave()

    @within(Modes())
    def propose(self, texts: Sequence[DraftedText], longest: int) -> list[Tree]:
        """A guess for each of `texts`, in order: a chain of up to `longest` of the target's ids, which may be empty. The target
        is to verify them in its next forward pass, over these texts alone. In the first step all are empty unless the budget is
        constant: what guessing costs isn't known yet. Raises `InvalidInputError`.
        """
        check_whole("longest", longest, 0)
        if not isinstance(texts, Sequence) or isinstance(texts, str | bytes):
            raise InvalidInputError(f"texts is {shown(texts)}; give a list of texts that add returned.")
        for text in texts:
            self._check(text)
        if len(set(texts)) < len(texts):
            raise InvalidInputError("texts holds the same text twice. Give each once.")
        self._learn()
        start, limit = perf_counter(), replace(self._budget, longest=min(self._budget.longest, longest))
        going = [text for text in texts if longest and text.ids[-1] not in self._vocabulary.ends]
        batch = self._policy.batch(max(1, len(texts))) if limit.schedule == "cost" else Batch(len(texts))
        guesses = self._guessed(going, limit, batch) if batch.guesses else dict.fromkeys(going, Guess())
        end = perf_counter()
        self._step = _Step(guesses, batch, end - start, end)
        return [guesses.get(text, Guess()).tree for text in texts]

    def _guessed(self, texts: Sequence[DraftedText], limit: Budget, batch: Batch) -> dict[DraftedText, Guess]:
        for text in texts:
            text.show()
        guesses = run_lockstep([text.session.propose(limit, batch, chained=True) for text in texts])
        return dict(zip(texts, guesses, strict=True))

    def _learn(self) -> None:
        """Let drafts learn from the step that is over. A step that isn't pure says little about latency, but shows which
        guesses were right.
        """
        step, self._step = self._step, _Step(is_pure=False)
        outcomes = [
            text.session.outcome(guess := step.guesses[text], text.ids[-count:], 1 + len(guess.tree))
            for text, count in step.observed.items()
            if count is not None  # else it was put off, has ended, or spans several steps
        ]
        if step.seconds is not None and outcomes:
            self._policy.observe(outcomes, step.drafting + step.seconds, is_pure=step.is_pure)

    def _check(self, text: Any) -> None:
        if not (isinstance(text, DraftedText) and text in self._texts):
            raise InvalidInputError("The text was not added to this engine, or was dropped. Add it first.")


def _ids(name: str, given: Any, size: float = inf) -> list[int]:
    """The argument `name` as a list. Raises `InvalidInputError` unless it holds whole numbers from 0 to `size` - 1."""
    tokens: Any = [None] if isinstance(given, str | bytes) else given  # a text holds no ids, though bytes are numbers
    try:
        found = [index(token) for token in tokens]
    except TypeError as error:
        raise InvalidInputError(f"{name} is {shown(given)}; give a list of ids.") from error
    if wrong := [token for token in found if not 0 <= token < size]:
        raise InvalidInputError(f"{name} holds {wrong[0]}; ids are {f'0 to {size - 1}' if size < inf else '0 or more'}.")
    return found


def _vocabulary(tokenizer: Any, size: Any, ends: Collection[int]) -> Vocabulary:
    """The target's vocabulary. Raises `UnsupportedTokenizerError` or `InvalidInputError` for what can't be a target's."""
    if not callable(getattr(tokenizer, "get_vocab", None)):
        raise InvalidInputError(f"tokenizer is {type(tokenizer).__name__}; give the target's, as AutoTokenizer loads it.")
    size = len(tokenizer) if size is None else size
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise InvalidInputError(f"size is {size!r}; it must be how many ids the target has logits for, 1 or more.")
    own, view = tokenizer.eos_token_id, token_bytes(tokenizer)
    last = max((token for token, piece in enumerate(view.table) if piece), default=-1)
    if last >= size:
        raise InvalidInputError(
            f"size is {size:,}, but the tokenizer writes ids up to {last:,}. Give the number of ids that the target has logits "
            "for, or the tokenizer that it was trained with."
        )
    found = frozenset(ends) or frozenset([] if own is None else [own])
    vocabulary = Vocabulary(tokenizer, view, size, found)
    _ = vocabulary.encoder  # refused here if it can't be had, and not in the first text
    return vocabulary
