"""Drafts: whatever guesses what the target is about to write. No target is run here."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from xtok.align.vocabulary import Vocabulary
from xtok.drafts.meter import Meter
from xtok.drafts.policy.settings import Budget
from xtok.drafts.tree import Tree
from xtok.errors import InvalidInputError, shown
from xtok.models.forwards import Steps, together
from xtok.models.seats import Seat
from xtok.sampling.noise import Noise

__all__ = ["Context", "Draft", "Drafter", "Request"]


@dataclass(frozen=True)
class Context:
    """What is committed: the target's ids, the bytes that they spell, and how many of those bytes are the prompt's.

    `noise` is that under which the target picks, None where it picks greedily. `controls` counts the new ids that spell
    nothing. `hidden`: the target's last hidden state at the position behind which it picked the last id, (hidden size,); None
    where it isn't known or nobody asks for it. `hint`: what the target very likely picks next, where its latest forward told so
    all but surely. It is guessed anyway: of a guess only what stands behind it is looked at. Only drafters with `reads_hint`
    are given one. Others are shown it as the last of `ids`, and guess what comes after: it isn't committed yet, so one time in
    a hundred the ids that follow are without it.
    """

    ids: Sequence[int]
    data: bytes
    prompt_size: int
    controls: int = 0
    noise: Noise | None = None
    hidden: Tensor | None = None
    hint: int | None = None

    def after_hint(self, piece: bytes) -> "Context":
        """The context as it will be if the hint, whose bytes are `piece`, is right."""
        ids = self.ids if self.hint is None else [*self.ids, self.hint]
        return replace(self, ids=ids, data=self.data + piece, controls=self.controls + (not piece), hidden=None, hint=None)


@runtime_checkable
class Drafter(Protocol):
    """Anything that guesses."""

    def propose(self, context: Context, budget: Budget) -> Tree:
        """Guess what follows `context`, in the target's ids.

        Whatever it returns or raises, the output stays the target's own: a guess only decides how many picks a forward yields.
        """


class ModelDrafter(ABC):
    """A drafter that runs a model: it is written for one text, and asks for forwards that texts may share."""

    reads_hint = True

    @abstractmethod
    def guess(self, context: Context, budget: Budget) -> Steps[Tree]:
        """As `propose`, by forwards that it yields."""

    def propose(self, context: Context, budget: Budget) -> Tree:
        """Guess what follows `context`, in the target's ids, by forwards of its own."""
        return together([self.guess(context, budget)])[0]


@dataclass(frozen=True)
class Request:
    """A text that is to be drafted, as far as drafters have to know of it.

    `vocabulary`: the target's. `samples`: whether the target draws. `independent`: guesses are to be draws of noise of their
    own, with their distributions, for speculative sampling. `end`: the target's end of text. `warpers`: what shapes
    distributions in any vocabulary. `prompt`: a text, a chat, or None where the target was given ids. `template`: the arguments
    of a chat's template. `model`: the target, for what shares its layers; None where there is none at hand. `seat`: where the
    text has its slots in models.
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
    seat: Seat = field(default_factory=Seat)

    @property
    def shapes(self) -> LogitsProcessorList:
        """What a draft's distribution is shaped by: nothing where the target picks greedily."""
        return self.warpers if self.samples and self.warpers is not None else LogitsProcessorList()


def check_request(given: Any) -> None:
    """Raises `InvalidInputError` for what is no request."""
    if not isinstance(given, Request):
        raise InvalidInputError(f"request is {shown(given)}; a drafter is started by xtok, or by an xtok.Request of your own.")


@runtime_checkable
class Draft(Protocol):
    """What makes drafters: a model, `PromptLookup`, `HeadsDrafter`, or an object of the caller's own."""

    def start(self, request: Request) -> Drafter:
        """A drafter for one text."""
