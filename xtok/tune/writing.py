"""The target writes the texts that its draft is to learn."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from xtok.prompts import prompt_ids
from xtok.tokenbytes import token_bytes

_BATCH = 16


@dataclass(frozen=True)
class Written:
    """What the target wrote behind a beginning of a prompt."""

    start: str
    text: str


def beginnings(prompts: Sequence[str], count: int) -> list[str]:
    """`count` beginnings of each prompt, evenly long up to the whole one; each once."""
    return list(dict.fromkeys(prompt[: ceil(len(prompt) * part / count)] for prompt in prompts for part in range(1, count + 1)))


def drawn(index: int, share: float) -> bool:
    """Whether the text of that index is among the `share` of them that are sampled, evenly spread."""
    return int((index + 1) * share) > int(index * share)


def write(target: tuple[Any, Any], starts: Sequence[str], into: Path, *, sampled: float, **arguments: Any) -> list[Written]:
    """The target's continuation of each start, batch by batch, each batch kept in a file of its own.

    Law: the texts are those of the starts, `arguments`, and torch's version alone, however often the writing was stopped in
    between. `sampled` is the share of the texts that are drawn at random, evenly among the starts; the others are greedy.
    `arguments` are those of transformers' `generate`.
    """
    into.mkdir(parents=True, exist_ok=True)
    draws = [drawn(i, sampled) for i in range(len(starts))]
    batches = [
        (kind, chosen[at : at + _BATCH])
        for kind in (False, True)
        if (chosen := [start for start, one in zip(starts, draws, strict=True) if one == kind])
        for at in range(0, len(chosen), _BATCH)
    ]
    texts: list[Written] = []
    for index, (kind, batch) in enumerate(track(batches, description="the target writes", transient=True)):
        file = into / f"{index:05}.jsonl"
        if not file.exists():
            found = _continued(target, batch, index, do_sample=kind, **arguments)
            save(file, "\n".join(json.dumps(asdict(one), ensure_ascii=False) for one in found))
        texts += [Written(**json.loads(line)) for line in file.read_text(encoding="utf-8").split("\n")]
    return texts


def save(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    half = file.with_suffix(".half")
    half.write_text(text, encoding="utf-8")
    os.replace(half, file)


def _continued(target: tuple[Any, Any], starts: Sequence[str], seed: int, **arguments: Any) -> list[Written]:
    """One batch, padded on the left, by transformers' own `generate`."""
    model, tokenizer = target
    ids = [torch.tensor(prompt_ids(tokenizer, start)) for start in starts]
    padded = pad_sequence(ids, batch_first=True, padding_side="left").to(model.device)
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True, padding_side="left").to(model.device)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        rows = model.generate(padded, attention_mask=mask, pad_token_id=0, **arguments)[:, padded.shape[1] :]
    return [Written(start, _text(target, row)) for start, row in zip(starts, rows, strict=True)]


def _text(target: tuple[Any, Any], row: Tensor) -> str:
    """The text of new ids up to the end of the text, without a character left unfinished."""
    model, tokenizer = target
    ends = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    ids = row.tolist()
    stop = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    return token_bytes(tokenizer).to_bytes(ids[:stop]).decode(errors="ignore")
