"""One generation in progress, and the stop strings that may end it."""

from collections import abc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from xtok.align.text import SequenceText
from xtok.align.vocabulary import Vocabulary
from xtok.decoding.pick import Picker
from xtok.drafts.meter import Meter
from xtok.drafts.policy.policy import Outcome, Policy
from xtok.drafts.policy.settings import Budget
from xtok.drafts.session import Session
from xtok.drafts.tree import Tree
from xtok.errors import InvalidInputError
from xtok.models.cache_set import Slots
from xtok.models.cached_model import CachedModel
from xtok.models.forwards import Slot
from xtok.models.modes import as_called


class StopStrings(StoppingCriteria):
    """Stops a sequence at the first token that completes a stop string, as transformers' `StopStringCriteria` does: a string
    may begin in the prompt, and a control token counts as its name (`</s>`).

    Unlike transformers', it needs no table of the vocabulary for each set of strings, and with every tokenizer it finds
    characters that are spread over tokens. A check takes time linear in the length of the strings.

    Raises `InvalidInputError` unless `strings` is a text, or a list of one or more.
    """

    def __init__(self, vocabulary: Vocabulary, strings: str | Iterable[str]) -> None:
        try:
            found = [strings] if isinstance(strings, str) else list(strings)
            self._stops = [stop.encode() for stop in found]
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidInputError(f"stop_strings is {strings!r}; give a text or a list of texts ({error}).") from error
        if isinstance(strings, Iterator):
            raise InvalidInputError(
                f"stop_strings is {strings!r}, an iterator, which can be read only once. Give a text or a list."
            )
        if not found:
            raise InvalidInputError(f"stop_strings is {strings!r}, which is empty. Give at least one text, or leave it out.")
        self._vocabulary = vocabulary
        self._longest = max(map(len, self._stops))

    def __deepcopy__(self, memo: dict[int, Any]) -> "StopStrings":
        """The same object, since it keeps no state."""
        return self

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Whether each row, (rows, length), ends with a token that completes a string; (rows,), bool."""
        rows: Tensor = input_ids
        return torch.tensor([self.completed(row) for row in rows.tolist()], dtype=torch.bool, device=rows.device)

    def completed(self, ids: abc.Sequence[int]) -> bool:
        """Whether the last of `ids` completes a stop string."""
        last = self._bytes_of(ids[-1])
        before, size, index = list[bytes](), 0, len(ids) - 1
        while index and size + 1 < self._longest:
            index -= 1
            before.append(self._bytes_of(ids[index]))
            size += len(before[-1])
        text = b"".join(reversed(before)) + last
        return any(text.find(stop, max(size + 1 - len(stop), 0)) >= 0 for stop in self._stops)

    def _bytes_of(self, token: int) -> bytes:
        piece = self._vocabulary.view[token]
        if piece is not None:
            return piece
        tokenizer = self._vocabulary.tokenizer
        name = tokenizer.convert_ids_to_tokens(token) if token < len(self._vocabulary.view) else None
        if name is None:
            return b"\xff"  # no text has this byte: an id without a token ends all matches
        text: str = tokenizer.convert_tokens_to_string(["a", name])  # with the space that some decoders put in front of it
        return text.removeprefix("a").encode()


_LIMITS = (MaxLengthCriteria, MaxTimeCriteria)
_KNOWN = (MaxLengthCriteria, EosTokenCriteria, StopStrings)
"""Criteria that are evaluated here from the ids: calling them would take a transfer from the device for each id."""


@dataclass(frozen=True)
class Round:
    """One round, which has one forward pass of the target: what was guessed, and what of it was right.

    `offset`: how many bytes the new text had before the round. `tree`: the guesses, in the target's ids. `drafts`: the index of
    the draft that each node counts for (`Trie.owner`); None for a pick carried over from the round before. `right`: the
    accepted nodes, each the parent of the next. `committed`: how many ids were committed.
    """

    offset: int
    tree: Tree
    drafts: tuple[int | None, ...]
    right: tuple[int, ...]
    committed: int

    @property
    def proposed(self) -> int:
        """How many ids drafts guessed."""
        return sum(draft is not None for draft in self.drafts)

    @property
    def accepted(self) -> int:
        """How many of the ids that drafts guessed were right."""
        return sum(self.drafts[node] is not None for node in self.right)


@dataclass(repr=False, eq=False, kw_only=True)
class Sequence:
    """The state of one generation: its ids and bytes, its cache slots, and what picks, guesses and stops for it.

    `slot`: its cache slot in the target; `slots`: those in all models. `ids`: what processors and criteria read, (1, length),
    padding included. `text`: the ids without padding, and their bytes. `deepest`: how many positions the target has, if known.
    `drafting`: starts its drafters, if it has any; `drafts`: their names. `read`: how many of its ids the slot holds;
    `adopted`: how many of those were taken over from other sequences. `hidden`: the target's hidden states for the latest part
    of the prompt, until drafters take them. `outcome`: what became of the latest round's guess. `error`: what ended it, if
    `finish_reason` is "error".
    """

    slot: Slot
    slots: Slots
    ids: Tensor
    text: SequenceText
    picker: Picker
    criteria: StoppingCriteriaList
    config: GenerationConfig
    budget: Budget
    deepest: int | None
    meter: Meter
    drafting: Callable[[], Session] | None = None
    policy: Policy | None = None
    seed: int | None = None
    drafts: tuple[str, ...] = ()
    rounds: list[Round] = field(default_factory=list)
    read: int = 0
    adopted: int = 0
    hidden: list[Tensor] = field(default_factory=list)
    outcome: Outcome | None = None
    finish_reason: str | None = None
    error: BaseException | None = None
    _limit: int | None = field(init=False)
    _ends: frozenset[int] = field(init=False)
    _stops: list[StopStrings] = field(init=False)
    _length: int = field(init=False)

    def __post_init__(self) -> None:
        limits = [one.max_length for one in self.criteria if type(one) is MaxLengthCriteria]
        ends = [one.eos_token_id.reshape(-1).tolist() for one in self.criteria if type(one) is EosTokenCriteria]
        self._limit, self._ends = min(limits, default=None), frozenset(token for some in ends for token in some)
        self._stops = [one for one in self.criteria if type(one) is StopStrings]
        self.criteria = StoppingCriteriaList(one for one in self.criteria if type(one) not in _KNOWN)
        self._length = self.ids.shape[1]

    @property
    def new_ids(self) -> list[int]:
        """The ids that were committed so far, without the prompt's."""
        return self.text.new_ids

    @property
    def is_reading(self) -> bool:
        """Whether its prompt isn't read yet, so that nothing was committed."""
        return len(self.text.ids) == self.text.prompt_length

    @cached_property
    def session(self) -> Session | None:
        """Its drafters, which are started when this is first read, after the prompt was forwarded; None if it has none."""
        return None if self.drafting is None else self.drafting()

    def unread(self) -> list[int]:
        """The committed ids to forward next, at most as many as the slot takes at once."""
        size = self.slot.takes(self.left, self.text.prompt_length - self.read)
        return list(self.text.ids[self.read : self.read + size])

    @property
    def left(self) -> int:
        """How many committed ids are yet to be forwarded."""
        return len(self.text.ids) - self.read

    def room(self) -> int:
        """How many nodes of a tree can be forwarded with the unread ids; 0 if not even all of those can."""
        return self.slot.guesses(self.left) if self.slot.takes(self.left, 0) == self.left else 0

    def end(self, reason: str | None = None) -> None:
        """Release its drafters and its slots. `reason`: the `finish_reason`, unless that is set already."""
        self.finish_reason = self.finish_reason or reason
        if (session := vars(self).get("session")) is not None:
            session.close()
        self.slots.leave(keep=self.finish_reason in ("stop", "length"))
        if isinstance(self.slot, CachedModel):
            self.slot.stop_recording()

    def fail(self, error: BaseException) -> None:
        self.finish_reason, self.error = "error", error
        self.end()

    def append(self, token: int) -> None:
        """Commit an id, and end the sequence if a stopping criterion says so."""
        self.text.append(token)
        if self.picker.processors or self.criteria:
            self.catch_up()
        with as_called():
            fired = [one for one in self.criteria if bool(torch.as_tensor(one(self.ids, self.picker.scores)).any())]
        ends = token in self._ends or any(stops.completed(self.text.ids) for stops in self._stops)
        ends = ends or not all(isinstance(criterion, _LIMITS) for criterion in fired)
        if ends or fired or (self._limit is not None and self._size >= self._limit):
            self.finish_reason = "stop" if ends else "length"

    @property
    def _size(self) -> int:
        """How many ids there are, padding included."""
        return self._length + len(self.text.ids) - self.text.prompt_length

    def catch_up(self) -> None:
        """Append the committed ids to what processors and criteria read."""
        if missing := self._size - self.ids.shape[1]:
            new = torch.tensor([self.text.ids[-missing:]], dtype=torch.int64, device=self.ids.device)
            self.ids = torch.cat([self.ids, new], dim=-1)
