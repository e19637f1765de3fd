"""What all sequences of an `XTokAssisted` share."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Literal

from transformers import PreTrainedModel

from xtok.drafts.acceptance import Accept
from xtok.drafts.base import Draft
from xtok.drafts.given import ModelDraft
from xtok.drafts.heads import HeadsDrafter
from xtok.drafts.policy.latency import Latency
from xtok.drafts.policy.policy import WITHOUT_A_MODEL, DraftPolicy, Policy
from xtok.drafts.policy.settings import Budget
from xtok.errors import InvalidInputError, UnstableWarning, XTokError, shown, warn
from xtok.models.cache import parameter_count
from xtok.models.cache_set import CachePool
from xtok.models.load import Target
from xtok.models.runner import Runner
from xtok.models.shapes import rounded
from xtok.models.stable import StableShapes
from xtok.models.storage import doubled

Acceptance = Literal["match", "rejection", "typical"]
FORMAT, PREDICTION = "format", "prediction"
"""The names, in a trace, of the drafts that guess by the text's format and from the caller's prediction."""
_UNSTABLE = (
    "{} computes in {}, so the last bits of its logits depend on what else is in a forward pass, and its forward passes can't "
    "have fixed shapes. The reason: {} The same call gives the same text, unless a draft learns between calls; but if the "
    "two best logits are nearly equal (stats.near_ties), it may differ from the text without a draft, in a batch, or from "
    "model.generate. Load the target in float32 if the text has to be the same in all of these cases. stable=False silences "
    "this warning, but then the same call may give another text, too."
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The target, what guesses for it and how much, and how guesses are accepted.

    `names`: the unique names of `drafts`, in order. `accept`: accepts guesses of sampled sequences by their probabilities;
    None to accept those that the target draws itself. `stable`, `compile`: as the caller gave them. `shapes`: the fixed shapes
    of the target's forward passes, if any. `captures`: whether forward passes are captured as CUDA graphs. `runners`:
    those of all models when these were decided. Two parts change: `policy`, which learns from all sequences what
    guessing costs and gains, and `caches`, which keeps KV caches for later calls. A copy has its own.
    """

    target: Target
    drafts: tuple[Draft, ...] = ()
    names: tuple[str, ...] = ()
    budget: Budget
    acceptance: Acceptance = "match"
    accept: Accept | None = None
    stable: bool | None = None
    compile: bool | None = None
    shapes: StableShapes | None = None
    captures: bool = False
    runners: Mapping[PreTrainedModel, Runner] = field(default_factory=dict)

    @cached_property
    def policy(self) -> Policy:
        on_cpu = self.target.model.device.type == "cpu"
        padded = padding(self.shapes, captures=self.captures)
        return Policy([DraftPolicy() for _ in self.drafts], padded, on_cpu=on_cpu)

    @cached_property
    def caches(self) -> CachePool:
        return CachePool(captures=self.captures)

    def with_drafts(self, names: Collection[str]) -> "Setup":
        given = list(names) if isinstance(names, Iterable) and not isinstance(names, str | bytes) else [None]
        if not all(name in self.names for name in given):
            raise InvalidInputError(
                f"names is {shown(names)}; the drafts are {list(self.names)}. Give a list of any of these names."
            )
        kept = [i for i, name in enumerate(self.names) if name in given]
        return replace(self, drafts=tuple(self.drafts[i] for i in kept), names=tuple(self.names[i] for i in kept))

    @property
    def models(self) -> list[PreTrainedModel]:
        return [self.target.model, *(model for one in self.drafts if (model := self.model_of(one)) is not None)]

    def model_of(self, draft: Draft) -> PreTrainedModel | None:
        """The model whose forward passes a draft takes; None if it takes none."""
        if isinstance(draft, HeadsDrafter):
            return draft.model_for(self.target.model)
        return draft.model if isinstance(draft, ModelDraft) else None

    @cached_property
    def hidden_layers(self) -> tuple[int, ...]:
        """After which of the target's layers drafts read hidden states."""
        heads = [one for one in self.drafts if isinstance(one, HeadsDrafter)]
        return tuple(sorted({layer for one in heads for layer in one.layers_for(self.target.model)}))

    def positions_beside(self, positions: float = 1, *, prediction: bool = False) -> int:
        """How many cache positions a sequence of `positions` may need in addition, for guesses and padding."""
        budget = self.budget
        most = max(64, budget.nodes, 4 * budget.depth * budget.width) if self.drafts or prediction else 1
        if self.shapes is None and not self.captures:
            return most
        seen = rounded(ceil(positions) + (most if self.captures else 0))  # fixed shapes look at no more for a guess
        return max(most, 1 + seen - ceil(positions))

    def shapes_now(self) -> StableShapes | None:
        """The shapes for a call. None, with a warning, if they no longer fix bits, as after a change of torch's threads."""
        if self.shapes is not None:
            try:
                self.shapes.check()
            except XTokError as error:
                warn_unstable(self.target, error, stable=self.stable)
                return None
        return self.shapes

    def policy_without_a_clock(self) -> Policy:
        """A policy for one sequence, which decides by ids and counts alone, so that the same call gives the same text."""
        size = parameter_count(self.target.model)
        models = map(self.model_of, self.drafts)
        shares = [WITHOUT_A_MODEL if one is None else parameter_count(one) / size for one in models]
        return Policy([DraftPolicy(Latency(share)) for share in shares], self.policy.padded, Latency(1.0))


def padding(shapes: StableShapes | None, *, captures: bool) -> Callable[[int, int], int]:
    """A function that gives how many rows each sequence has in a forward pass of the target, padding included, by how many
    sequences share it and how many rows each needs.
    """
    if shapes is not None:
        return shapes.padded
    return lambda sequences, rows: doubled(rows) if captures else rows


def warn_unstable(target: Target, error: XTokError, *, stable: bool | None) -> None:
    """Warn that forward passes can't have fixed shapes, for the reason in `error`. Raises an error if they were requested."""
    if stable:
        raise type(error)(f"{error} Or leave out stable=True, and ids may depend on the batch and the draft.") from error
    warn(_UNSTABLE.format(type(target.model).__name__, target.model.dtype, error), UnstableWarning)


def named(drafts: Iterable[str], *reserved: str) -> tuple[str, ...]:
    """Unique names of drafts: equal ones are numbered, and none is among the `reserved`."""
    found: list[str] = []
    for name in drafts:
        found.append(name if name not in (*found, *reserved) else f"{name} ({len(found) + 1})")
    return tuple(found)
