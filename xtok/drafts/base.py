"""Drafts: whatever guesses what the target is about to write. No target is run here."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from transformers import LogitsProcessorList, PreTrainedModel

from xtok.align.vocabulary import Vocabulary
from xtok.drafts.meter import Meter
from xtok.drafts.policy.settings import Budget
from xtok.drafts.tree import Tree
from xtok.errors import InvalidInputError, shown
from xtok.models.cache_set import Slots
from xtok.models.forwards import Steps, together
from xtok.sampling.noise import Noise


@dataclass(frozen=True)
class Context:
    """What a drafter guesses after: the target's ids, their bytes, and how many of those bytes are the prompt's.

    `noise`: that under which the target picks, None if it picks greedily. `controls`: how many of the new ids have no bytes.

    With fixed shapes (`stable`) the last id may be one that isn't committed yet: one time in a hundred the target's next
    forward pass doesn't confirm it. The next context then has another id in its place, and goes on from there.
    """

    ids: Sequence[int]
    data: bytes
    prompt_size: int
    controls: int = 0
    noise: Noise | None = None


@runtime_checkable
class Drafter(Protocol):
    """Anything that guesses. Whatever it returns or raises, the output stays the target's own."""

    def propose(self, context: Context, budget: Budget) -> Tree:
        """Guess what follows `context`, in the target's ids."""


class ModelDrafter(ABC):
    """A drafter that runs a model. It is written for one sequence, and yields what it wants forwarded."""

    @abstractmethod
    def guess(self, context: Context, budget: Budget) -> Steps[Tree]:
        """As `propose`, by forward passes that it yields."""

    def propose(self, context: Context, budget: Budget) -> Tree:
        """Guess by forward passes of its own."""
        return together([self.guess(context, budget)])[0]


@dataclass(frozen=True)
class Request:
    """A sequence that is to be drafted, as far as drafters have to know it.

    `vocabulary`, `end`: the target's, and its end of text. `samples`: whether the target draws. `independent`: guesses are to
    be draws of noise of their own, with their distributions, for speculative sampling. `warpers`: what shapes distributions in
    any vocabulary. `prompt`: a text, a chat, or None if the target was given ids; `template`: the arguments of a chat's
    template. `model`: the target, if there is one at hand. `hidden_layers`: after which of its layers hidden
    states are shown to drafters. `slots`: the sequence's cache slots in all models.
    """

    vocabulary: Vocabulary
    meter: Meter
    samples: bool = False
    independent: bool = False
    end: int | None = None
    warpers: LogitsProcessorList | None = None
    prompt: Any = None
    template: Mapping[str, Any] = field(default_factory=dict)
    model: PreTrainedModel | None = None
    hidden_layers: tuple[int, ...] = ()
    slots: Slots = field(default_factory=Slots)

    @property
    def shapes(self) -> LogitsProcessorList:
        """What shapes a draft's distribution: nothing if the target picks greedily."""
        return self.warpers if self.samples and self.warpers is not None else LogitsProcessorList()


def check_request(given: Any) -> None:
    """Raises `InvalidInputError` for what is no request."""
    if not isinstance(given, Request):
        raise InvalidInputError(f"request is {shown(given)}; a drafter is started by xtok, or by an xtok.Request of your own.")


@runtime_checkable
class Draft(Protocol):
    """What makes drafters: a model, `PromptLookup`, `HeadsDrafter`, or an object of the caller's own."""

    def start(self, request: Request) -> Drafter:
        """A drafter for one sequence."""
