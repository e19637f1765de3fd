"""Training of heads on a frozen target."""

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from xtok.drafts.examples import IGNORED
from xtok.drafts.heads import HeadsDrafter, described, save_heads
from xtok.drafts.medusa import MedusaHeads
from xtok.errors import InvalidInputError
from xtok.models.cache import device_of
from xtok.models.load import Source, target_model
from xtok.models.modes import Modes, within
from xtok.models.prompts import prompt_ids
from xtok.results.progress import busy
from xtok.tune.training import Objective, fit
from xtok.tune.work import (
    Settings,
    check,
    check_installed,
    check_out,
    digest,
    name,
    per_forward,
    split,
    work_folder,
    writing_arguments,
)
from xtok.tune.writing import beginnings, write

_DECAY = 0.8
"""The weight of a head's loss, relative to that of the head before it."""
_RANKS = 5
_BATCH = 16
_RATE = 2e-3


@dataclass(frozen=True)
class TrainedHeads:
    """What training of heads gave.

    `file`: the file with the heads. `texts`: how many were learnt. `accuracy`, (heads, 5): how often the next id was a head's
    first guess, its second, up to its fifth. `after`: tokens per forward pass of the target with the heads. Both are of prompts
    that had no part in training. `epochs`: tokens per forward pass after each epoch, on the prompts that decided when to stop.
    """

    file: Path
    texts: int
    accuracy: tuple[tuple[float, ...], ...]
    after: float
    epochs: tuple[float, ...]


@within(Modes())
def train_heads(
    target: Source,
    data: Sequence[str],
    out: str | os.PathLike[str],
    *,
    heads: int = 4,
    starts: int = 8,
    max_new_tokens: int = 64,
    sampled: float = 0.0,
    temperature: float | None = None,
    epochs: int = 8,
    learning_rate: float | None = None,
) -> TrainedHeads:
    """Let the target continue the texts of `data`, and train heads on what it writes; `out` is their file, in safetensors.

    Law: `XTokAssisted(target, HeadsDrafter(out))` gives what `XTokAssisted(target)` gives. The target is frozen.

    Head i learns the (i + 2)th id after a hidden state, by cross-entropy with the weight 0.8**i. A tenth of the texts decides
    when to stop, another tenth shows what was gained; neither is learnt from. `starts`, `max_new_tokens`, `sampled` and
    `temperature` are those of `tune_draft`. Called again after it was stopped, it goes on from there. Raises
    `InvalidInputError` for settings that make no sense, for less than 3 texts, for an `out` that was started with other
    settings, for a target whose output embedding heads can't share, and if accelerate is missing; `UnsupportedModelError` or
    `UnsupportedTokenizerError` for a target that can't be one.
    """
    check_installed("accelerate")
    check_out(out)
    settings = Settings(
        name(target), digest(data), starts, max_new_tokens, sampled, temperature, epochs, learning_rate, heads=heads
    )
    check(settings, heads=1, starts=1, max_new_tokens=1, epochs=1)
    if Path(out).is_dir():
        raise InvalidInputError(f"{out} is a folder. Give the name of a file for the heads.")
    stopping, kept, learnt = split(data)
    made, file = target_model(target), Path(out)
    known = described(made.model, made.vocabulary.view)
    work = work_folder(file.with_name(f"{file.name}.work"), settings, file)
    now = work / "now.safetensors"

    pair = made.model, made.vocabulary.tokenizer

    def written(prompts: Sequence[str], into: str) -> list[dict[str, Tensor]]:
        texts = write(pair, beginnings(prompts, starts), work / into, **writing_arguments(settings))
        return [example(prompt_ids(pair[1], one.start), one.ids) for one in texts if len(one.ids) > 1]

    rows = written(learnt, "texts")
    learner = MedusaHeads(heads, known.hidden_size).to(device_of(made.model))

    def measured(prompts: Sequence[str] = stopping) -> float:
        save_heads(learner, known, now)
        return per_forward(pair, HeadsDrafter(now), settings.measured(prompts), **writing_arguments(settings))[0]

    found = fit(
        learner,
        rows,
        Objective(batch_of, partial(loss_of, made.model), measured),
        work / "training",
        epochs=epochs,
        rate=learning_rate or _RATE,
    )
    with busy("measuring what was gained"):
        after = measured(kept)
    accuracy = accuracies(made.model, learner, written(kept, "kept"))
    save_heads(learner, replace(known, accuracy=accuracy), now)
    os.replace(now, file)
    shutil.rmtree(work)
    return TrainedHeads(file, len(rows), accuracy, after, tuple(found))


def example(before: Sequence[int], ids: Sequence[int]) -> dict[str, Tensor]:
    """A text that the target continued by `ids`: `input_ids`, `attention_mask` and `labels`, (ids,), int64 each."""
    whole = torch.tensor([*before, *ids], dtype=torch.int64, device="cpu")
    labels = torch.tensor([*[IGNORED] * len(before), *ids], dtype=torch.int64, device="cpu")
    return {"input_ids": whole, "attention_mask": torch.ones_like(whole), "labels": labels}


def batch_of(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of examples, padded at their ends: (rows, longest) each."""
    fills = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}
    return {
        name: pad_sequence([row[name] for row in rows], batch_first=True, padding_value=fill) for name, fill in fills.items()
    }


def _guesses(target: Any, heads: MedusaHeads, inputs: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """For each head its logits, (positions, vocabulary), float32, and the ids of the text there, (positions,).

    `inputs`: a batch, as `batch_of` makes it.
    """
    with torch.no_grad():
        output = target(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], output_hidden_states=True)
    hidden, labels = output.hidden_states[-1].to(heads.weight.dtype), inputs["labels"]
    embedding = target.get_output_embeddings()
    frozen = {name: weight.detach() for name, weight in embedding.state_dict(keep_vars=True).items()}
    for head in range(len(heads.weight)):
        came = labels[:, head + 2 :]
        known = came != IGNORED
        states = heads(hidden[:, : came.shape[1]][known])[:, head]
        yield functional_call(embedding, frozen, states.to(embedding.weight.dtype)).float(), came[known]


def loss_of(target: Any, heads: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The sum of the heads' cross-entropies, each with 0.8 times the weight of the one before it: a scalar.

    `inputs`: a batch, as `batch_of` makes it.
    """
    losses = [
        _DECAY**i * cross_entropy(logits, came) for i, (logits, came) in enumerate(_guesses(target, heads, inputs)) if len(came)
    ]
    return torch.stack(losses).sum()


@torch.no_grad()
def accuracies(target: Any, heads: MedusaHeads, rows: Sequence[dict[str, Tensor]]) -> tuple[tuple[float, ...], ...]:
    """How often the next id was a head's first guess, its second, up to its fifth, (heads, 5)."""
    right = torch.zeros(len(heads.weight), _RANKS, dtype=torch.float32, device="cpu")
    seen = torch.zeros(len(heads.weight), 1, dtype=torch.float32, device="cpu")
    device = device_of(target)
    for at in range(0, len(rows), _BATCH):
        inputs = {key: value.to(device) for key, value in batch_of(rows[at : at + _BATCH]).items()}
        for head, (logits, came) in enumerate(_guesses(target, heads, inputs)):
            right[head] += (logits.topk(_RANKS).indices == came[:, None]).sum(dim=0).cpu()
            seen[head] += len(came)
    return tuple(map(tuple, (right / seen.clamp_min(1)).tolist()))
