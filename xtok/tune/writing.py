"""The target writes the texts that its draft is to learn."""

import os
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from xtok.align.tokenbytes import TokenBytes, token_bytes
from xtok.drafts.lessons import Written
from xtok.models.cache import device_of
from xtok.models.prompts import prompt_ids
from xtok.results.progress import bar

_BATCH = 16
PENALTY = 1.2
_FEW = 32
"""Of how many ids the target's distribution is kept."""
_KEPT = ("ids", "likeliest", "probabilities")


def beginnings(prompts: Sequence[str], count: int) -> list[str]:
    """`count` beginnings of each prompt, evenly long up to the whole one; each once, in no order."""
    found = [prompt[: ceil(len(prompt) * part / count)] for prompt in prompts for part in range(1, count + 1)]
    found = list(dict.fromkeys(found))
    Random(0).shuffle(found)
    return found


def drawn(index: int, share: float) -> bool:
    """Whether the text of that index is among the `share` of them that are sampled, evenly spread."""
    return int((index + 1) * share) > int(index * share)


def way(index: int, sampled: float) -> dict[str, Any]:
    """How the text of that index is picked, as arguments of `generate`: at random, greedily, or greedily without repeating.

    Greedy texts of small models go round in circles, from which there is nothing to learn; so every other of those is written
    under a penalty for what it has.
    """
    if drawn(index, sampled):
        return {"do_sample": True}
    before = index - int(index * sampled)  # so many of those before it are greedy
    return {"do_sample": False} | ({"repetition_penalty": PENALTY} if before % 2 else {})


def called(way: dict[str, Any]) -> str:
    """The name of a way of picking."""
    penalised = f"greedy, repetition penalty {PENALTY}"
    return "sampled" if way["do_sample"] else penalised if "repetition_penalty" in way else "greedy"


def write(target: tuple[Any, Any], starts: Sequence[str], into: Path, *, sampled: float, **arguments: Any) -> list[Written]:
    """The target's continuation of each start, batch by batch, each batch kept in a file of its own.

    Law: the texts are those of the starts, `arguments`, and torch's version alone, however often the writing was stopped in
    between. Each is picked in a `way` of its own. `arguments` are those of transformers' `generate`.
    """
    into.mkdir(parents=True, exist_ok=True)
    view, ends = token_bytes(target[1]), _ends(target)
    texts: list[Written] = []
    for index, (picked, batch) in enumerate(bar(_batches(starts, sampled), "the target writes")):
        file = into / f"{index:05}.safetensors"
        if not file.exists():
            tensors = _continued(target, batch, index, **picked, **arguments)
            save(file, lambda half, tensors=tensors: save_file(tensors, half))  # type: ignore[misc]
        rows = load_file(file)
        texts += [_written(start, view, ends, *row) for start, *row in zip(batch, *(rows[name] for name in _KEPT), strict=True)]
    return texts


def _batches(starts: Sequence[str], sampled: float) -> list[tuple[dict[str, Any], list[str]]]:
    """The starts in batches, and in which way each is to be picked."""
    ways = [way(index, sampled) for index in range(len(starts))]
    kinds = [kind for i, kind in enumerate(ways) if kind not in ways[:i]]
    alike = [(kind, [start for start, own in zip(starts, ways, strict=True) if own == kind]) for kind in kinds]
    return [(kind, some[at : at + _BATCH]) for kind, some in alike for at in range(0, len(some), _BATCH)]


def save(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all."""
    half = file.with_suffix(".half")
    write(half)
    os.replace(half, file)


def _continued(target: tuple[Any, Any], starts: Sequence[str], seed: int, **arguments: Any) -> dict[str, Tensor]:
    """One batch, padded on the left, by transformers' own `generate`: new ids and the distributions that they were picked from.

    `ids`: (rows, new), int64. `likeliest`, int32, `probabilities`, float16: (rows, new, few). A distribution is the target's
    own, at temperature 1, or what a penalty makes of it.
    """
    model, tokenizer = target
    ids = [torch.tensor(prompt_ids(tokenizer, start), dtype=torch.int64, device="cpu") for start in starts]
    padded = pad_sequence(ids, batch_first=True, padding_side="left").to(device_of(model))
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True, padding_side="left").to(padded.device)
    penalty = arguments.pop("repetition_penalty", None)
    if penalty is not None:
        arguments["logits_processor"] = LogitsProcessorList([_Penalty(penalty, (mask == 0).sum(dim=1).tolist())])
    kept: dict[str, Any] = {"pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        output = model.generate(padded, attention_mask=mask, **kept, **arguments)
    shaped = output.logits if arguments["do_sample"] else output.scores
    few = [logits.float().softmax(dim=-1).topk(min(_FEW, logits.shape[-1])) for logits in shaped]
    return {
        "ids": output.sequences[:, padded.shape[1] :].cpu().contiguous(),
        "likeliest": torch.stack([one.indices for one in few], dim=1).to(torch.int32).cpu(),
        "probabilities": torch.stack([one.values for one in few], dim=1).to(torch.float16).cpu(),
    }


class _Penalty(LogitsProcessor):
    """A repetition penalty on rows padded on the left: padding is no text that could be repeated."""

    def __init__(self, penalty: float, padding: Sequence[int]) -> None:
        self._of_a_row = RepetitionPenaltyLogitsProcessor(penalty)
        self._padding = padding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`input_ids`: (rows, length). `scores`: (rows, vocabulary)."""
        rows = enumerate(self._padding)
        return torch.cat([self._of_a_row(input_ids[i : i + 1, size:], scores[i : i + 1]) for i, size in rows])


def _ends(target: tuple[Any, Any]) -> set[int]:
    """The ids that end a text of the target."""
    ends = target[0].generation_config.eos_token_id
    return {target[1].eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}


def _written(start: str, view: TokenBytes, ends: set[int], row: Tensor, likeliest: Tensor, probabilities: Tensor) -> Written:
    """New ids up to the end of the text, and their text without a character left unfinished.

    `row`: (new,). `likeliest`, `probabilities`: (new, few).
    """
    ids: list[int] = row.tolist()
    count = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    text = view.to_bytes(ids[:count], before=b"a").decode(errors="ignore")
    return Written(start, text, ids[:count], likeliest[:count].long(), probabilities[:count].float())
