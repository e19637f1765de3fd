"""Lets the target write the texts that its draft or its heads are trained on."""

import json
import os
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from xtok.align.tokenbytes import TokenBytes, token_bytes
from xtok.assisted import XTokAssisted
from xtok.errors import InvalidInputError
from xtok.models.cache import context_window, device_of, end_ids
from xtok.models.packed import running
from xtok.models.prompts import Chat, prompt_ids
from xtok.results.progress import bar
from xtok.tune.examples import WrittenText

_BATCH = 32
PENALTY = 1.2
"""The repetition penalty under which every other greedy text is written."""
_FEW = 32
"""How many of the most likely ids are kept of each of the target's distributions."""
_KEPT = ("ids", "likeliest", "probabilities")
_PLAIN = {"return_dict_in_generate": False, "max_time": None}
"""What a target's generation config may set otherwise."""


def beginnings(prompts: Sequence[str], count: int) -> list[str]:
    """`count` beginnings of each prompt, evenly spaced in length up to the whole prompt, shuffled and without duplicates."""
    found = [prompt[: ceil(len(prompt) * part / count)] for prompt in prompts for part in range(1, count + 1)]
    found = list(dict.fromkeys(found))
    Random(0).shuffle(found)
    return found


def way(index: int, sampled: float, start: str | Chat = "") -> dict[str, Any]:
    """How to pick the tokens of text number `index`, as arguments of `generate`: sampled, greedy, or greedy with a repetition
    penalty.

    Greedy continuations of small models repeat themselves, and nothing is learnt from repetitions. So every other one is
    written under a repetition penalty, but not answers in a chat, which don't need it. `sampled`: the share of texts that are
    sampled, evenly spread.
    """
    before = int(index * sampled)  # how many texts before it are sampled
    if int((index + 1) * sampled) > before:
        return {"do_sample": True}
    is_penalised = (index - before) % 2 and isinstance(start, str)
    return {"do_sample": False} | ({"repetition_penalty": PENALTY} if is_penalised else {})


def name_of_way(way: dict[str, Any]) -> str:
    penalised = f"greedy, repetition penalty {PENALTY}"
    return "sampled" if way["do_sample"] else penalised if "repetition_penalty" in way else "greedy"


def check_written(target: tuple[Any, Any], starts: Sequence[str | Chat], arguments: dict[str, Any], further: int = 0) -> None:
    """Check that the target can continue texts, by letting it write one token.

    `arguments`: those of `write`. `further`: how many tokens longer than `starts` texts may begin. Raises `InvalidInputError`
    if the target's context window is too short for a text, and whatever `generate` raises for what the target or its
    generation config has that xtok doesn't support.
    """
    window, longest = context_window(target[0]), max(len(prompt_ids(target[1], one)) for one in starts) + further
    if window is not None and longest + arguments["max_new_tokens"] > window:
        raise InvalidInputError(
            f"The longest prompt takes {longest} tokens, and max_new_tokens is {arguments['max_new_tokens']}: more than the "
            f"target's context window of {window}. Shorten the prompts, or lower max_new_tokens."
        )
    XTokAssisted(target).generate(starts[0], max_new_tokens=1, do_sample=False)


def write(
    target: tuple[Any, Any],
    starts: Sequence[str | Chat],
    into: Path,
    *,
    sampled: float,
    seed: int = 0,
    shows: bool = True,
    **arguments: Any,
) -> list[WrittenText]:
    """The target's continuation of each start. Each batch is saved in a file of its own in the folder `into`.

    Law: the texts depend on the target, the starts, `sampled`, `seed`, `arguments` and torch's version alone, however often
    writing was stopped in between. Each is picked in its own `way`. `target`: a model and its tokenizer. `arguments`: those of
    transformers' `generate`.
    """
    into.mkdir(parents=True, exist_ok=True)
    view, ends = token_bytes(target[1]), {target[1].eos_token_id, *end_ids(target[0])} - {None}
    texts: list[WrittenText] = []
    batches = _batches(starts, sampled)
    for index, (picked, batch) in enumerate(bar(batches, "the target writes") if shows else batches):
        file = into / f"{index:05}.safetensors"
        if (rows := _written_before(file)) is None:
            tensors = _continued(target, batch, seed + index, **picked, **arguments)
            save(file, lambda half, tensors=tensors: save_file(tensors, half))  # type: ignore[misc]
            rows = load_file(file)
        how, kept = name_of_way(picked), (rows[name] for name in _KEPT)
        texts += [_written(start, how, view, ends, *row) for start, *row in zip(batch, *kept, strict=True)]
    return texts


def _batches(starts: Sequence[str | Chat], sampled: float) -> list[tuple[dict[str, Any], list[str | Chat]]]:
    """Batches of starts, each with the way in which all of its texts are picked."""
    ways = [way(index, sampled, start) for index, start in enumerate(starts)]
    kinds = [kind for i, kind in enumerate(ways) if kind not in ways[:i]]
    alike = [(kind, [start for start, own in zip(starts, ways, strict=True) if own == kind]) for kind in kinds]
    return [(kind, some[at : at + _BATCH]) for kind, some in alike for at in range(0, len(some), _BATCH)]


def _written_before(file: Path) -> dict[str, Tensor] | None:
    """The tensors of a file; None if there is none, or it is damaged, for example since the disk was full."""
    try:
        return load_file(file)
    except (OSError, SafetensorError):
        return None


def saved(file: Path) -> Any:
    """What a file holds as JSON; None if there is none, or it is damaged."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def save(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file completely or not at all. `write`: writes to the path that it is given. Raises `OSError` if it can't."""
    half = file.with_suffix(".half")
    try:
        write(half)
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(f"{half} can't be written: {error}") from error
    os.replace(half, file)


def _continued(target: tuple[Any, Any], starts: Sequence[str | Chat], seed: int, **arguments: Any) -> dict[str, Tensor]:
    """The continuations of one batch, by transformers' own `generate`, and the distributions that they were picked from.

    Returns `ids`: (rows, new), int64; `likeliest`, int32, and `probabilities`, float16, (rows, new, few): the few likeliest ids
    of each distribution and their probabilities. It is the target's own at temperature 1, or after a repetition penalty.
    """
    model, tokenizer = target
    ids = [torch.tensor(prompt_ids(tokenizer, start), dtype=torch.int64, device="cpu") for start in starts]
    padded = pad_sequence(ids, batch_first=True, padding_side="left").to(device_of(model))
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True, padding_side="left").to(padded.device)
    penalty, seen = arguments.pop("repetition_penalty", None), _Likeliest()
    penalties = [] if penalty is None else [_Penalty(penalty, (mask == 0).sum(dim=1).tolist())]
    with torch.random.fork_rng(), running(model):
        torch.manual_seed(seed)
        processors = LogitsProcessorList([*penalties, seen])  # which come before temperature and top_k
        sequences = model.generate(
            padded, attention_mask=mask, pad_token_id=0, logits_processor=processors, tokenizer=tokenizer, **_PLAIN, **arguments
        )
    return {
        "ids": sequences[:, padded.shape[1] :].cpu().contiguous(),
        "likeliest": torch.stack(seen.ids, dim=1),
        "probabilities": torch.stack(seen.probabilities, dim=1),
    }


class _Likeliest(LogitsProcessor):
    """Keeps the likeliest ids of each step and their probabilities, (rows, few) each. It changes nothing."""

    def __init__(self) -> None:
        self.ids, self.probabilities = list[Tensor](), list[Tensor]()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`input_ids`: (rows, length). `scores`: (rows, vocabulary)."""
        few = scores.float().softmax(dim=-1).topk(min(_FEW, scores.shape[-1]))
        self.ids.append(few.indices.to(torch.int32).cpu())
        self.probabilities.append(few.values.to(torch.float16).cpu())
        return scores


class _Penalty(LogitsProcessor):
    """A repetition penalty for rows padded on the left, which doesn't count the padding as text."""

    def __init__(self, penalty: float, padding: Sequence[int]) -> None:
        self._of_a_row = RepetitionPenaltyLogitsProcessor(penalty)
        self._padding = padding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`input_ids`: (rows, length). `scores`: (rows, vocabulary)."""
        rows = enumerate(self._padding)
        return torch.cat([self._of_a_row(input_ids[i : i + 1, size:], scores[i : i + 1]) for i, size in rows])


def _written(
    start: str | Chat, how: str, view: TokenBytes, ends: set[int], row: Tensor, likeliest: Tensor, probabilities: Tensor
) -> WrittenText:
    """A text from its ids, (new,), and distributions, (new, few) twice: up to its first end id, and without an unfinished
    character. `how`: the name of the way in which it was picked.
    """
    ids: list[int] = row.tolist()
    count = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    text = view.to_bytes(ids[:count], before=b"a").decode(errors="ignore")
    ended = count < len(ids)
    return WrittenText(start, text, ids[:count], likeliest[:count].long(), probabilities[:count].float(), ended, how)
