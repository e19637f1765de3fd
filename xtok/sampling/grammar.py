"""Holds a text to a grammar, by llguidance."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xtok.errors import InvalidInputError

_SHOWN = 150
"""How many characters of the beginning and of the end of an error of llguidance are shown."""


class GrammarError(ValueError):
    """A grammar that llguidance can't follow."""


class Grammar:
    """A logits processor that lets pass what a grammar allows. It is for one sequence; those of a list get copies of it.

    `matcher`: an `llguidance.LLMatcher` at the beginning of a text, for the target's tokenizer; it is never changed. `start`:
    how many ids the prompt has; by default, as many as there are at the first call.
    """

    def __init__(self, matcher: Any, start: int | None = None) -> None:
        self._given, self._start = matcher, start
        self._matcher, self._read = matcher.deep_copy(), start

    def __deepcopy__(self, memo: dict[int, Any]) -> "Grammar":
        copied = Grammar(self._given, self._start)
        copied._matcher, copied._read = self._matcher.deep_copy(), self._read
        return copied

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """`ids`: (1, length). `scores`: (1, vocabulary). Raises `GrammarError` if the grammar can't be followed further, and
        `InvalidInputError` for another text than that of the calls before.
        """
        if self._read is None:
            self._read = ids.shape[1]
        if ids.shape[1] < self._read:
            raise InvalidInputError("This Grammar has read a longer text already. Make a new one for each call of generate.")
        for token in ids[0, self._read :].tolist():
            self._matcher.consume_token(token)
        self._read = ids.shape[1]
        allowed = allowed_ids(self._matcher)
        forbidden = np.ones(scores.shape[-1], dtype=bool)  # logits may be more than the tokenizer has ids
        size = min(len(allowed), len(forbidden))
        forbidden[:size] = allowed[:size] == 0
        return scores.masked_fill(torch.from_numpy(forbidden).to(scores.device), -torch.inf)

    def guide(self, prompt: Sequence[int]) -> "GrammarGuide":
        """What the grammar allows and forces after `prompt`, the ids that the processor is first called with."""
        guide = GrammarGuide(self._given.deep_copy())
        for token in prompt[len(prompt) if self._start is None else self._start :]:
            guide.push(token)
        return guide


class GrammarGuide:
    """What a grammar allows and forces after a text that grows and shrinks by tokens. `matcher`: at its beginning."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._mask: bytes | None = None
        self._before_end: Any = None

    def push(self, token: int) -> bool:
        """Add a token to the text, if the grammar allows it. Returns whether it does."""
        mask = b"" if self._before_end is not None else self._allowed()
        byte = token >> 3
        if byte >= len(mask) or not mask[byte] >> (token & 7) & 1:
            return False
        is_end, before = self._matcher.is_stopped(), self._matcher.deep_copy() if self._matcher.is_accepting() else None
        self._mask = None
        self._matcher.consume_token(token)
        if is_end or self._matcher.stop_reason() == "EndOfSentence":
            self._before_end = before
        return True

    def pop(self, tokens: int) -> None:
        """Take the last tokens off the text."""
        if not tokens:
            return
        if self._before_end is not None:  # LLMatcher.rollback doesn't restore what was before the end of text
            self._matcher, self._before_end, tokens = self._before_end, None, tokens - 1
        self._matcher.rollback(tokens)
        self._mask = None

    def forced(self) -> list[int]:
        """The tokens with which any text goes on, as the tokenizer cuts them, as far as that is certain."""
        if self._before_end is not None:
            return []
        if self._matcher.is_stopped():
            return np.flatnonzero(_unpacked(self._allowed())).tolist()[:1]
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens

    def _allowed(self) -> bytes:
        if self._mask is None:
            self._mask = self._matcher.compute_bitmask()
            check(self._matcher)
        return self._mask


def allowed_ids(matcher: Any) -> Any:
    """Which ids may come next, 1 or 0 for each id of the tokenizer. Raises `GrammarError` if the grammar can't be followed."""
    mask = matcher.compute_bitmask()
    check(matcher)
    return _unpacked(mask)


def check(matcher: Any) -> None:
    """Raises `GrammarError` if the grammar can't be followed."""
    if matcher.is_error():
        raise GrammarError(in_one_line(matcher.get_error()))


def in_one_line(error: str) -> str:
    """What llguidance says is wrong, without its state and the grammar, and without the middle of what is long."""
    line = " ".join(re.split(r"\n<state>|\n *\d+ \| ", error)[0].split())
    return line if len(line) <= 2 * _SHOWN else f"{line[:_SHOWN]} … {line[-_SHOWN:]}"


def _unpacked(mask: bytes) -> Any:
    return np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
