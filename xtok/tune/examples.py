"""Training examples for a draft: the target's texts in the draft's own ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from xtok.align.tokenbytes import TokenBytes
from xtok.errors import InvalidInputError
from xtok.models.cache import context_window
from xtok.models.load import DraftModel
from xtok.models.prompts import Chat, chat_ids

IGNORED = -100
"""The label that transformers leaves out of a loss."""
_MOST_LOST = 0.5
"""The largest share of texts that the draft's tokenizer may fail to write; above it, training is refused."""


@dataclass(frozen=True)
class WrittenText:
    """A text that the target wrote after `start`, the beginning of a prompt or a chat.

    `ids`: the target's, which decode to `text`. `likeliest`, int64, and `probabilities`, float32, (ids, few) each: the
    most likely ids at each position, and the target's probabilities for them, at temperature 1. `ended`: whether the target
    ended the text. `way`: how its tokens were picked (`xtok.tune.writing.name_of_way`).
    """

    start: str | Chat
    text: str
    ids: list[int]
    likeliest: Tensor
    probabilities: Tensor
    ended: bool = False
    way: str = ""


@dataclass(frozen=True)
class Example:
    """A text in the draft's ids.

    `input_ids`, and `labels`, which are the same ids where the target wrote them and else `IGNORED`: (ids,), int64 each.
    `likeliest`, int64, and `probabilities`, float32, (ids, few) each: those at the target's id that begins at the same byte;
    zeros if none does.
    """

    input_ids: Tensor
    labels: Tensor
    likeliest: Tensor
    probabilities: Tensor


def training_examples(draft: DraftModel, target: TokenBytes, texts: Sequence[WrittenText]) -> list[Example]:
    """The target's texts as the draft would read them while it guesses. `target`: the bytes of the target's ids.

    Texts that the draft's tokenizer can't write, or alters, are left out. Raises `InvalidInputError` if that is most of them,
    or if all are empty.
    """
    texts = [one for one in texts if one.text]
    if not texts:
        raise InvalidInputError("The target ended every text at once. Give other prompts.")
    view = draft.vocabulary.view
    writable = [one for one in texts if view.to_bytes(_read(draft, one)[1]).endswith(one.text.encode())]
    if len(writable) < max(1, len(texts) * _MOST_LOST):
        raise InvalidInputError(
            f"The draft's tokenizer can write only {len(writable)} of the target's {len(texts)} texts. Use a draft that was "
            "made for this language and script. `xtok inspect` names the characters that are lost."
        )
    return [_example(draft, target, one) for one in writable]


def _example(draft: DraftModel, target: TokenBytes, one: WrittenText) -> Example:
    """The example of a text, or of the end of one that is longer than the draft's window. An id with bytes of both `start` and
    what the target wrote counts as the target's.
    """
    lead, ids = _read(draft, one)
    room = (context_window(draft.model) or len(ids) + len(lead)) - len(lead)
    ids = [*lead, *ids[-room:]] if room > 0 else ids[room - len(lead) :]
    left = _bytes_left(draft.vocabulary.view, ids)
    size = len(one.text.encode())
    labels = [token if after < size else IGNORED for token, after in zip(ids, left[1:], strict=True)]
    indices = _indices_by_bytes_left(target, one)
    known = [(i, indices[rest]) for i, rest in enumerate(left[:-1]) if rest in indices and labels[i] != IGNORED]
    if one.ended and draft.vocabulary.ends:
        ids, labels = [*ids, min(draft.vocabulary.ends)], [*labels, min(draft.vocabulary.ends)]
    mine, theirs = [i for i, _ in known], [index for _, index in known]
    likeliest, probabilities = (part.new_zeros((len(ids), *part.shape[1:])) for part in (one.likeliest, one.probabilities))
    likeliest[mine], probabilities[mine] = one.likeliest[theirs], one.probabilities[theirs]
    own, learnt = (torch.tensor(row, dtype=torch.int64, device="cpu") for row in (ids, labels))
    return Example(own, learnt, likeliest, probabilities)


def _read(draft: DraftModel, one: WrittenText) -> tuple[list[int], list[int]]:
    """The draft's ids before a text, and those of the text, as it reads them while it guesses. Chats use its own template."""
    encoder = draft.vocabulary.encoder
    if isinstance(one.start, str):
        return list(draft.lead), encoder.ids(one.start + one.text)
    own = chat_ids(draft.vocabulary.tokenizer, one.start, {})
    return list(draft.lead) if own is None else own, encoder.ids(one.text)


def _indices_by_bytes_left(target: TokenBytes, one: WrittenText) -> dict[int, int]:
    """The index of each of the target's ids, by how many bytes of the text are left there; empty if they decode to another
    text.
    """
    text, data = one.text.encode(), b"".join(target[token] or b"" for token in one.ids)
    if not data.startswith(text):
        return {}
    unfinished = len(data) - len(text)
    return {left - unfinished: index for index, left in enumerate(_bytes_left(target, one.ids)[:-1]) if left > unfinished}


def _bytes_left(view: TokenBytes, ids: Sequence[int]) -> list[int]:
    """How many bytes are left at each id, and 0 after the last."""
    return list(accumulate((len(view[token] or b"") for token in reversed(ids)), initial=0))[::-1]


def batch(rows: Sequence[Example], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """A batch of examples on a device, padded at their ends.

    `input_ids`, `attention_mask`, `labels`: (rows, longest), int64. `likeliest`, `probabilities`: (rows, longest, few).
    """
    padded = {
        "input_ids": pad_sequence([row.input_ids for row in rows], batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row.input_ids) for row in rows], batch_first=True),
        "labels": pad_sequence([row.labels for row in rows], batch_first=True, padding_value=IGNORED),
        "likeliest": pad_sequence([row.likeliest for row in rows], batch_first=True),
        "probabilities": pad_sequence([row.probabilities for row in rows], batch_first=True),
    }
    return {name: part.to(device) for name, part in padded.items()}
