"""The target's texts in the draft's own ids."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from xtok.drafts.reader import DraftModel
from xtok.errors import InvalidInputError
from xtok.lm import context_window
from xtok.tune.writing import Written

NOT_LEARNT = -100
"""What transformers takes for a label to be left out."""
_MOST_LOST = 0.5


@dataclass(frozen=True)
class Lesson:
    """A text in the draft's ids. `labels` are those of the continuation, each at its own place; elsewhere `NOT_LEARNT`."""

    input_ids: list[int]
    labels: list[int]


def lessons(draft: DraftModel, texts: Sequence[Written]) -> list[Lesson]:
    """What the draft is to learn: the continuations alone, read as it reads them while it guesses.

    A text that its tokenizer can't spell, or rewrites, is left out. Raises `InvalidInputError` where that is most of them.
    """
    texts = [one for one in texts if one.text]
    spelled = [one for one in texts if _spells(draft, one)]
    if len(spelled) < max(1, len(texts) * _MOST_LOST):
        raise InvalidInputError(
            f"The draft's tokenizer can spell {len(spelled)} of {len(texts)} texts of the target. Use another draft: one made "
            "for this language and script. `xtok inspect` tells which characters are lost."
        )
    return [_lesson(draft, one) for one in spelled]


def _spells(draft: DraftModel, one: Written) -> bool:
    return draft.encoder.view.to_bytes(draft.encoder.ids(one.start + one.text)).endswith(one.text.encode())


def _lesson(draft: DraftModel, one: Written) -> Lesson:
    """The end of a text, if its window has no room for more. An id that reaches into the continuation belongs to it."""
    view, ids = draft.encoder.view, draft.encoder.ids(one.start + one.text)
    behind, count = len(one.text.encode()), 0
    while count < len(ids) and behind > 0:
        count += 1
        behind -= len(view[ids[-count]] or b"")
    room = (context_window(draft.model) or len(ids) + len(draft.lead)) - len(draft.lead)
    whole = [*draft.lead, *ids[-room:]]
    return Lesson(whole, [NOT_LEARNT] * (len(whole) - count) + whole[-count:] if count < len(whole) else list(whole))


def batch(rows: Sequence[Lesson]) -> dict[str, Tensor]:
    """Lessons as tensors (rows, longest), padded behind their ends."""
    return {
        "input_ids": _padded([row.input_ids for row in rows], 0),
        "attention_mask": _padded([[1] * len(row.input_ids) for row in rows], 0),
        "labels": _padded([row.labels for row in rows], NOT_LEARNT),
    }


def _padded(rows: Sequence[list[int]], filler: int) -> Tensor:
    tensors = [torch.tensor(row) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=filler)
