"""What transformers' `generate` hands back, and what it hands to a streamer."""

from collections.abc import Iterator
from itertools import count, zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from xtok.decoding.sequence import Sequence
from xtok.models.cache import CACHE
from xtok.models.cached_model import CachedModel


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
