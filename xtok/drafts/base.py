"""The interfaces of drafts and drafters, which guess what the target is about to pick."""

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
from xtok.models.forwards import Steps, run_lockstep
from xtok.sampling.noise import Noise


@dataclass(frozen=True)
class Context:
    """The text that a drafter continues: `ids`, the target's; `data`, their bytes; `prompt_size`, how many are the prompt's.

    `noise`: the noise under which the target samples; None if it is greedy. `controls`: how many of the new ids have no bytes.

    With fixed shapes (`stable`) the last id may not be committed yet. One time in a hundred, the target's next forward pass
    doesn't confirm it, and the next context has another id in its place.
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
    """A drafter that runs a model. It guesses for one sequence, by a generator that yields the forward passes it needs."""

    @abstractmethod
    def guess(self, context: Context, budget: Budget) -> Steps[Tree]:
        """As `propose`, but yields each forward pass that it needs and is sent the result, so that sequences can share them."""

    def propose(self, context: Context, budget: Budget) -> Tree:
        """Guess, by forward passes that no other sequence shares."""
        return run_lockstep([self.guess(context, budget)])[0]


@dataclass(frozen=True)
class Request:
    """What a drafter needs to know of the sequence that it is to guess for.

    `vocabulary`: the target's. `meter`: the sequence's counts and times. `samples`: whether the target samples. `independent`:
    guesses are to be independent random draws that carry their distributions, for rejection sampling. `end`: the target's id
    that ends a text. `warpers`: the logits processors that suit any vocabulary, such as temperature. `prompt`: a
    text, a chat, or None if the target was given ids. `template`: the arguments of the chat template. `model`: the target;
    None if another engine runs it. `hidden_layers`: after which of its layers drafters are shown hidden states. `slots`: the
    sequence's cache slots in all models.
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
    def draft_warpers(self) -> LogitsProcessorList:
        """The processors to apply to a draft's logits: `warpers`, or none if the target is greedy."""
        return self.warpers if self.samples and self.warpers is not None else LogitsProcessorList()


def check_request(given: Any) -> None:
    """Raises `InvalidInputError` unless `given` is a `Request`."""
    if not isinstance(given, Request):
        raise InvalidInputError(f"request is {shown(given)}; give an xtok.Request. XTokAssisted makes one for each sequence.")


@runtime_checkable
class Draft(Protocol):
    """Makes a drafter for each sequence: a model, `PromptLookup`, `HeadsDrafter`, or an object of the caller's own."""

    def start(self, request: Request) -> Drafter:
        """A drafter for one sequence."""
