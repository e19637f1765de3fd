"""Log-probabilities and penalties: what OpenAI's API needs and transformers lacks."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from xtok.models.cache import new_cache
from xtok.models.modes import within
from xtok.models.recurrent import cached_model

_CHUNK = 256
"""How many ids of a prompt are forwarded at once if all of their logits are needed."""


class Picked(NamedTuple):
    """An id with its log-probability, and the most likely ids with theirs; None for the first id of a prompt. `offset`: the
    character at which it begins.
    """

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] | None
    offset: int = 0


def picked_from(row: Tensor, token: int, top: int) -> Picked:
    """`token` with the `top` most likely ids. `row`: the log-probabilities of all ids, (vocabulary,)."""
    best = row.topk(min(top, len(row)))
    pairs = zip(best.indices.tolist(), map(_finite, best.values.tolist()), strict=True)
    return Picked(token, _finite(float(row[token])), tuple(pairs))


@within()
def prompt_picks(model: PreTrainedModel, ids: Sequence[int], top: int) -> list[Picked]:
    """The ids of a prompt as if they had been picked, by one pass over it, in chunks: no more logits are held at once."""
    cached, found = cached_model(model, new_cache(model)), [Picked(ids[0], None, None)]
    for start in range(0, len(ids) - 1, _CHUNK):
        part, following = ids[start : min(start + _CHUNK, len(ids) - 1)], ids[start + 1 : start + 1 + _CHUNK]
        logits = cached.forward(torch.tensor([list(part)], dtype=torch.int64, device=cached.device), len(part))
        rows = logits.float().log_softmax(dim=-1)
        found += [picked_from(row, token, top) for row, token in zip(rows, following, strict=True)]
    return found


class Record:
    """Keeps the log-probabilities for the next pick, and changes no scores. `top`: how many of the likeliest to report."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._row = torch.zeros(0, dtype=torch.float32, device="cpu")

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """`ids`: (1, length). `scores`: (1, vocabulary)."""
        self._row = scores[0].float().log_softmax(dim=-1)
        return scores

    def picked(self, token: int) -> Picked:
        """What is reported of `token`, which was picked."""
        return picked_from(self._row, token, self._top)


def _finite(logprob: float) -> float:
    """A log-probability for JSON, which has no infinity: -9999 at least, as other servers write it."""
    return max(logprob, -9999.0)


class Penalties:
    """OpenAI's penalties for generated ids, those after the first `start`: `frequency` each time, `presence` once."""

    def __init__(self, start: int, frequency: float, presence: float) -> None:
        self._start, self._frequency, self._presence = start, frequency, presence

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """`ids`: (1, length). `scores`: (1, vocabulary)."""
        counts = torch.bincount(ids[0, self._start :], minlength=scores.shape[-1])
        return scores - counts * self._frequency - (counts > 0) * self._presence
