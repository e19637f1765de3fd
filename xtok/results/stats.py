"""Figures of a generation."""

from dataclasses import dataclass, field

from xtok.decoding.pick import NearTie
from xtok.decoding.sequence import Sequence


@dataclass(frozen=True)
class Stats:
    """Figures of one generation. Counts are tokens of the target, or forward passes if they are called so; times are seconds.

    `seconds_draft`: all of guessing but alignment, `seconds_draft_forwards` among it. `seconds_noise`, of sampling: drawing
    under the noise, of which the draft's part lies within `seconds_draft`. `chains_only`: whether the target can verify no
    tree, so that all guesses were chains. `accepted_by_draft`: for each draft, in order, the accepted ids that count for it
    (what several guessed, for the cheapest, unless another gave it more than twice the probability); a model given by
    itself is followed by prompt lookup and token recycling.

    `exact`: whether the ids are those that the target alone picks: in float32 and float64 but for `near_ties`, in half
    precision by forward passes of fixed shapes. False in half precision without those (`stable`), and for sampled texts under
    `acceptance="rejection"`, whose ids depend on the draft and the budget's depth, and `acceptance="typical"`.

    `near_ties`: the picks at which `model.generate`, whose forward passes have other shapes, may pick another id, by an
    estimate of how far those change logits. If there are none, a greedy text is very likely the one that it gives. None if
    `min_margin` is.

    `shared_forwards`: whether the target's forward passes can be shared with other sequences, each of which counts its share of
    their seconds. `target_replays`: how many of all were replayed CUDA graphs.

    `min_margin`: the smallest gap between the two best scores of a pick, noise included, in logits, whatever the temperature.
    If it is above twice what forward passes of several rows and of one differ in, the ids are surely the target's own. None if
    that isn't known: under processors that cut a distribution or are of unknown kinds, and if guesses are accepted by a
    distribution.

    `cached_tokens`: how many of the prompt's tokens an engine didn't read again, since it keeps what earlier requests read.
    """

    new_tokens: int
    target_forwards: int
    draft_forwards: int
    proposed: int
    accepted: int
    seconds: float
    seconds_target: float
    seconds_draft: float
    seconds_draft_forwards: float
    seconds_align: float
    seconds_noise: float
    draft_error: str | None
    chains_only: bool
    exact: bool
    shared_forwards: bool = False
    target_replays: int = 0
    accepted_by_draft: tuple[int, ...] = ()
    min_margin: float | None = None
    near_ties: tuple[NearTie, ...] | None = field(default=None, repr=False)
    cached_tokens: int = 0

    @property
    def tokens_per_forward(self) -> float:
        """New tokens per forward pass of the target; the target alone has 1."""
        return self.new_tokens / self.target_forwards if self.target_forwards else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted ids per guessed id."""
        return self.accepted / self.proposed if self.proposed else 0.0


def stats(sequence: Sequence) -> Stats:
    meter, picker, rounds = sequence.meter, sequence.picker, sequence.rounds
    return Stats(
        new_tokens=sum(one.committed for one in rounds),
        target_forwards=sequence.slot.forwards,
        draft_forwards=meter.draft_forwards,
        proposed=sum(one.proposed for one in rounds),
        accepted=sum(one.accepted for one in rounds),
        seconds=meter.seconds["all"],
        seconds_target=meter.seconds["target"],
        seconds_draft=meter.seconds["draft"] - meter.seconds["align"],
        seconds_draft_forwards=meter.seconds["reading"],
        seconds_align=meter.seconds["align"],
        seconds_noise=meter.seconds["noise"],
        draft_error=meter.draft_error,
        chains_only=meter.chains_only,
        exact=meter.exact,
        shared_forwards=meter.shared_forwards,
        target_replays=meter.target_replays,
        accepted_by_draft=tuple(meter.accepted_by_draft),
        min_margin=picker.margin,
        near_ties=picker.near_ties,
        cached_tokens=sequence.adopted,
    )
