"""The benchmark of what is computed over a whole vocabulary beside the models' forwards, by its size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from xtok.align.keys import spelling_keys
from xtok.align.projection import projection
from xtok.align.vocabulary import Vocabulary
from xtok.bench.compare import build_seconds
from xtok.bench.context import random_model
from xtok.bench.stretch import with_pieces
from xtok.decoding.pick import Picker
from xtok.drafts.base import Context, Request
from xtok.drafts.meter import Meter
from xtok.drafts.model import ModelDraft
from xtok.drafts.policy.settings import Budget
from xtok.drafts.tree import Tree
from xtok.models.load import draft_model, target_model
from xtok.models.prompts import prompt_ids
from xtok.results.progress import bar
from xtok.sampling.largest import best
from xtok.sampling.noise import noise

SIZES = ((8_000, 4_096), (48_586, 16_000), (256_000, 151_000))
_TEMPERATURE = 0.8
_CUTS: dict[str, list[Any]] = {
    "plain": [],
    "top-k 50": [TopKLogitsWarper(50)],
    "top-p 0.95": [TopPLogitsWarper(0.95)],
    "min-p 0.05": [MinPLogitsWarper(0.05)],
}
_NOISY, _GREEDY, _CHECKED = (1, 4, 8), 8, 33
"""Rows of a level under noise and greedily, and of a forward of the target over a tree of 32."""
_LEVELS = 9
_REPEATS = 15
_SPREAD = 3.0
"""The standard deviation of logits, which are random."""


@dataclass(frozen=True)
class VocabularyRow:
    """How many milliseconds something takes where target and draft have so many ids; of what is done often, the median."""

    target: int
    draft: int
    what: str
    milliseconds: float


def compare_vocabularies(
    target_tokenizer: Any, draft_tokenizer: Any, sizes: Sequence[tuple[int, int]] = SIZES
) -> list[VocabularyRow]:
    """Time what is computed over vocabularies of some sizes: those of the tokenizers, with further pieces.

    The models are random ones of one layer, whose forwards aren't counted. `sizes`: ids of target and draft. Errors are those
    of `with_pieces`.
    """
    rows = []
    for size in bar(sizes, "vocabularies"):
        pairs = [_pair(tokenizer, ids) for tokenizer, ids in zip((target_tokenizer, draft_tokenizer), size, strict=True)]
        rows += [VocabularyRow(*size, what, 1e3 * seconds) for what, seconds in _seconds(*pairs).items()]
    return rows


def _pair(tokenizer: Any, size: int) -> tuple[Any, Any]:
    wide = with_pieces(tokenizer, size)
    model = random_model(wide, positions=512)
    head = model.get_output_embeddings().weight
    head.data.normal_(0, _SPREAD / sqrt(head.shape[1]))  # hidden states are normalised
    return model, wide


def _seconds(target: tuple[Any, Any], draft: tuple[Any, Any]) -> dict[str, float]:
    found = {"to build an instance": build_seconds(target, draft)}
    whole, own = target_model(target).vocabulary, draft_model(draft)
    found["to build its keys for noise"] = _once(lambda: spelling_keys(whole.view, whole.size))
    found["to build its projection"] = _once(lambda: projection(whole.view, own.vocabulary.view))
    made = ModelDraft(own, whole)
    context = _context(whole)
    for rows in _NOISY:
        found[f"a level of {rows} under noise"] = _level(made, whole, context, rows, samples=True)
    found[f"a level of {_GREEDY} greedily"] = _level(made, whole, context, _GREEDY, samples=False)
    found |= {f"a pick, {name}": _pick(whole, cuts) for name, cuts in _CUTS.items()}
    logits = _SPREAD * torch.randn(_CHECKED, whole.size)
    return found | {f"the best of {_CHECKED} rows": _median(lambda _: best(logits)[0].tolist())}


def _context(target: Vocabulary) -> Context:
    ids = prompt_ids(target.tokenizer, "The cat. 吾輩は猫である。")
    data = target.view.to_bytes(ids)
    return Context(ids, data, len(data), noise=noise(0, 0, data))


def _level(draft: ModelDraft, target: Vocabulary, context: Context, rows: int, *, samples: bool) -> float:
    """Seconds of a level of so many guesses besides its forward and alignment.

    They are what a deep tree takes longer than one of a single level, per level.
    """
    warpers = LogitsProcessorList([TemperatureLogitsWarper(_TEMPERATURE)] if samples else [])
    meter = Meter()
    drafter = draft.start(Request(target, meter, samples, warpers=warpers))

    def besides(depth: int) -> float:
        before = meter.seconds["reading"] + meter.seconds["align"]
        whole = _once(lambda: drafter.propose(context, Budget(depth, width=rows, schedule="constant")))
        return whole - (meter.seconds["reading"] + meter.seconds["align"] - before)

    besides(_LEVELS)  # the first one makes tables
    deep, flat = (median(besides(depth) for _ in range(_REPEATS)) for depth in (_LEVELS, 1))
    return (deep - flat) / (_LEVELS - 1)


def _pick(target: Vocabulary, cuts: list[Any]) -> float:
    """Seconds of a pick, as the decoding loop makes it."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(_TEMPERATURE), *cuts])
    picker, ids = Picker(processors, Meter(), noise(0, 0, b""), target.keys), torch.zeros((1, 1), dtype=torch.int64)
    several = [_SPREAD * torch.randn(1, target.size) for _ in range(_REPEATS)]
    return _median(lambda place: picker.pick(ids, several[place], (place, 0), Tree(), -1))


def _median(run: Callable[[int], Any]) -> float:
    """Seconds of `run`, which is told how often it ran before."""
    return median(_once(partial(run, count)) for count in range(_REPEATS))


def _once(run: Callable[[], Any]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start
