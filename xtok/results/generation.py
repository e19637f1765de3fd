"""What a prompt was answered with: its text, its figures, and its trace, which names the draft that guessed each token."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import count, zip_longest
from os import PathLike
from pathlib import Path
from threading import local
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from xtok.decoding.pick import NearTie
from xtok.decoding.sequence import Round, Sequence
from xtok.models.cache import CACHE
from xtok.models.cached_model import CachedModel
from xtok.results.page import frame, page
from xtok.results.trace import Committed, Token, WrittenRound, written_rounds


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


@dataclass(frozen=True, repr=False)
class Generation:
    """What a prompt was answered with.

    `prompt`: its text as the target read it, a chat in its template, without control tokens.
    `finish_reason` is "length" if a limit of length or time ended the text, else "stop". `seed` gives the texts of a call
    again, with any draft or none; it is None for greedy ones. `scores`, `logits`: (1, vocabulary) for each new id, if
    `return_dict_in_generate` and `output_scores` or `output_logits` ask for them. `drafts`: names, to which the indices in
    `rounds` refer. `pieces`: the bytes of each new id, none for a control token. `guess_bytes`: those of guessed ids.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    rounds: tuple[Round, ...]
    seed: int | None = None
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    drafts: tuple[str, ...] = ()
    pieces: tuple[bytes, ...] = ()
    guess_bytes: Mapping[int, bytes] = field(default_factory=dict)
    prompt: str = ""

    def __repr__(self) -> str:
        counts = f"{len(self.token_ids)} tokens, {self.stats.target_forwards} target forwards, {self.finish_reason!r}"
        return f"Generation({self.text!r}, {counts})"

    @property
    def tokens(self) -> list[Token]:
        """The new tokens, and who each is from. Law: their texts joined are `text`."""
        return [token for one in self.written for token in one.tokens]

    @property
    def written(self) -> Iterator[WrittenRound]:
        """The rounds, with the tokens that came of each."""
        return written_rounds(self._committed(), self.drafts, lambda token: self.guess_bytes.get(token, b""))

    def _committed(self) -> Iterator[Committed]:
        end = 0
        for one in self.rounds:
            start, end = end, end + one.committed
            yield one, self.token_ids[start:end], self.pieces[start:end], end == len(self.token_ids)

    def to_dict(self) -> dict[str, Any]:
        r"""All but `scores` and `logits`, in values that JSON has. Bytes that are no whole characters are written as `\xe3`.

        A round's `guessed` is a tree: a guess's `parent` is the number of an earlier one, or -1. `right`: numbers of guesses.
        """
        return {
            "prompt": self.prompt,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "drafts": list(self.drafts),
            "stats": {
                **asdict(self.stats),
                "accepted_by_draft": list(self.stats.accepted_by_draft),
                "near_ties": None if self.stats.near_ties is None else [one._asdict() for one in self.stats.near_ties],
                "tokens_per_forward": self.stats.tokens_per_forward,
                "acceptance_rate": self.stats.acceptance_rate,
            },
            "tokens": [one._asdict() for one in self.tokens],
            "rounds": [
                {"offset": one.offset, "committed": one.committed, "right": each["right"], "guessed": each["guessed"]}
                for one, each in zip(self.rounds, map(WrittenRound.to_dict, self.written), strict=True)
            ],
        }

    def save_trace(self, file: str | PathLike[str]) -> None:
        """Write `to_dict` to a file as JSON."""
        Path(file).write_text(json.dumps(self.to_dict(), ensure_ascii=False) + "\n", encoding="utf-8")

    def to_html(self) -> str:
        """A page for a browser, in one file: the prompt, the text tinted by who guessed it, its speed, each round's guesses,
        near-ties, and the counts.
        """
        return page(self.to_dict())

    def _repr_html_(self) -> str:
        return frame(self.to_dict())


def finished(sequence: Sequence) -> Generation:
    """The generation of a sequence that has ended. Raises the error that ended it."""
    if sequence.error is not None:
        raise sequence.error
    text = sequence.text
    return Generation(
        text=text.new_data.decode(errors="replace"),
        token_ids=text.new_ids,
        finish_reason=sequence.finish_reason or "stop",
        stats=_stats(sequence),
        rounds=tuple(sequence.rounds),
        seed=sequence.seed,
        scores=sequence.picker.scores,
        logits=sequence.picker.logits,
        drafts=sequence.drafts,
        pieces=tuple(text.pieces),
        prompt=text.data[: text.prompt_size].decode(errors="replace"),
        guess_bytes={token: text.view[token] or b"" for one in sequence.rounds for token in one.tree.tokens},
    )


def _stats(sequence: Sequence) -> Stats:
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


def columns(sequences: list[Sequence], sent: int) -> Iterator[Tensor]:
    """The new ids of all rows, (rows,), for each position from `sent` on that all have reached; ended rows are padded."""
    rows = [(one.new_ids, one) for one in sequences]
    for i in count(sent):
        if all(len(ids) <= i for ids, _ in rows) or any(len(ids) <= i and one.finish_reason is None for ids, one in rows):
            return
        column = [ids[i] if i < len(ids) else _pad(one.config) for ids, one in rows]
        yield torch.tensor(column, dtype=torch.int64, device="cpu")


def _pad(config: GenerationConfig) -> int:
    return 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)


def as_transformers(sequences: list[Sequence], config: GenerationConfig) -> GenerateDecoderOnlyOutput | Tensor:
    """Rows of equal length, padded as by transformers. Scores and logits, (rows, vocabulary) for each new id, are 0 after a row
    has ended.
    """
    rows = [one.ids[0] for one in sequences]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=_pad(config))
    if not config.return_dict_in_generate:
        return padded
    alone = sequences[0] if len(sequences) == 1 else None
    own = alone.slot if alone is not None and isinstance(alone.slot, CachedModel) else None
    if own is not None:
        own.settle()
    cache: dict[str, Any] = {CACHE: None if own is None else own.cache}
    return GenerateDecoderOnlyOutput(
        sequences=padded,  # type: ignore[arg-type, unused-ignore]
        scores=_by_step([one.picker.scores for one in sequences]),
        logits=_by_step([one.picker.logits for one in sequences]),
        **cache,
    )


def _by_step(rows: list[tuple[Tensor, ...] | None]) -> Any:
    """What rows recorded, (1, vocabulary) for each of their ids, as (rows, vocabulary) for each id of the longest."""
    recorded = [row for row in rows if row is not None]
    if not recorded:
        return None
    ended = torch.zeros_like(recorded[0][0])
    return tuple(torch.cat(step) for step in zip_longest(*recorded, fillvalue=ended))


class _Last(local):
    """The results of each instance's last call, by thread."""

    def __init__(self) -> None:
        self.of_thread = WeakKeyDictionary[Any, list[Generation]]()


LAST = _Last()
