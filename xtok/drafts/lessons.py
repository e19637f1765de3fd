"""The target's texts in the draft's own ids, for it to learn."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from xtok.align.tokenbytes import TokenBytes
from xtok.errors import InvalidInputError
from xtok.models.cache import context_window
from xtok.models.roles import DraftModel

NOT_LEARNT = -100
"""What transformers takes for a label to be left out."""
_MOST_LOST = 0.5


@dataclass(frozen=True)
class Written:
    """What the target wrote behind a beginning of a prompt.

    `ids`: the target's, which spell `text`. `likeliest`, int64, `probabilities`, float32, (ids, few): the few likeliest ids in
    the place of each of them, and the target's own distribution of those, at temperature 1.
    """

    start: str
    text: str
    ids: list[int]
    likeliest: Tensor
    probabilities: Tensor


@dataclass(frozen=True)
class Lesson:
    """A text in the draft's ids.

    `input_ids`: (ids,), int64. `labels`: (ids,), int64, the id itself where it belongs to the continuation, else `NOT_LEARNT`.
    `likeliest`, int64, `probabilities`, float32, (ids, few): where one of the target's ids begins with the draft's, the
    distribution from which the target picked it; elsewhere all are 0.
    """

    input_ids: Tensor
    labels: Tensor
    likeliest: Tensor
    probabilities: Tensor


def lessons(draft: DraftModel, target: TokenBytes, texts: Sequence[Written]) -> list[Lesson]:
    """What the draft is to learn: the continuations alone, read as it reads them while it guesses. `target`: its tokenizer.

    A text that its tokenizer can't spell, or rewrites, is left out. Raises `InvalidInputError` where that is most of them.
    """
    texts = [one for one in texts if one.text]
    spelled = [one for one in texts if _spells(draft, one)]
    if len(spelled) < max(1, len(texts) * _MOST_LOST):
        raise InvalidInputError(
            f"The draft's tokenizer can spell {len(spelled)} of {len(texts)} texts of the target. Use another draft: one made "
            "for this language and script. `xtok inspect` tells which characters are lost."
        )
    return [_lesson(draft, target, one) for one in spelled]


def _spells(draft: DraftModel, one: Written) -> bool:
    return draft.vocabulary.encoder.view.to_bytes(draft.vocabulary.encoder.ids(one.start + one.text)).endswith(
        one.text.encode()
    )


def _lesson(draft: DraftModel, target: TokenBytes, one: Written) -> Lesson:
    """The end of a text, if its window has no room for more. An id that reaches into the continuation belongs to it."""
    ids = draft.vocabulary.encoder.ids(one.start + one.text)
    room = (context_window(draft.model) or len(ids) + len(draft.lead)) - len(draft.lead)
    ids = [*draft.lead, *ids[-room:]]
    left = _bytes_left(draft.vocabulary.encoder.view, ids)
    size = len(one.text.encode())
    labels = [token if after < size else NOT_LEARNT for token, after in zip(ids, left[1:], strict=True)]
    places = _places(target, one)
    known = [(i, places[rest]) for i, rest in enumerate(left[:-1]) if rest in places and labels[i] != NOT_LEARNT]
    mine, theirs = [i for i, _ in known], [place for _, place in known]
    parts = [given.new_zeros((len(ids), *given.shape[1:])) for given in (one.likeliest, one.probabilities)]
    for part, given in zip(parts, (one.likeliest, one.probabilities), strict=True):
        part[mine] = given[theirs]
    own, learnt = (torch.tensor(row, dtype=torch.int64, device="cpu") for row in (ids, labels))
    return Lesson(own, learnt, *parts)


def _places(target: TokenBytes, one: Written) -> dict[int, int]:
    """Where the target's ids begin, by how many bytes of the text are left there; none where they spell something else."""
    text, spelled = one.text.encode(), b"".join(target[token] or b"" for token in one.ids)
    if not spelled.startswith(text):
        return {}
    unfinished = len(spelled) - len(text)
    return {left - unfinished: place for place, left in enumerate(_bytes_left(target, one.ids)[:-1]) if left > unfinished}


def _bytes_left(view: TokenBytes, ids: Sequence[int]) -> list[int]:
    """How many bytes are left at each id, and behind the last."""
    return list(accumulate((len(view[token] or b"") for token in reversed(ids)), initial=0))[::-1]


def batch(rows: Sequence[Lesson]) -> dict[str, Tensor]:
    """A batch of lessons, padded behind their ends.

    `input_ids`, `attention_mask`, `labels`: (rows, longest), int64. `likeliest`, `probabilities`: (rows, longest, few).
    """
    return {
        "input_ids": pad_sequence([row.input_ids for row in rows], batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row.input_ids) for row in rows], batch_first=True),
        "labels": pad_sequence([row.labels for row in rows], batch_first=True, padding_value=NOT_LEARNT),
        "likeliest": pad_sequence([row.likeliest for row in rows], batch_first=True),
        "probabilities": pad_sequence([row.probabilities for row in rows], batch_first=True),
    }
