"""How long a round takes apart from the models' forward passes: by context length, and by vocabulary sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median
from typing import Annotated, Any

import torch
from transformers import LlamaConfig, LogitsProcessorList
from transformers.generation.logits_process import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from xtok.align.keys import noise_keys
from xtok.align.projection import projection
from xtok.align.vocabulary import Vocabulary
from xtok.assisted import XTokAssisted
from xtok.bench.rows import Column
from xtok.bench.runs import seconds_of
from xtok.bench.stretch import with_pieces
from xtok.decoding.pick import Picker
from xtok.drafts.base import Context, Request
from xtok.drafts.meter import Meter
from xtok.drafts.model import ModelDraft
from xtok.drafts.policy.settings import Budget
from xtok.drafts.tree import Tree
from xtok.models.load import draft_model, from_config, target_model
from xtok.models.prompts import prompt_ids
from xtok.results.progress import bar
from xtok.sampling.largest import best
from xtok.sampling.noise import noise

CONTEXTS = (256, 2048, 8192, 32000)
BUDGETS = {
    "chain of 5": Budget(5, width=1, schedule="constant"),
    "tree of 32": Budget(3, width=4, nodes=32, schedule="constant"),
}
_FEW, _MANY, _GENERATIONS = 20, 150, 3
VOCABULARIES = ((8_000, 4_096), (48_586, 16_000), (256_000, 151_000))
_CUTS: dict[str, list[Any]] = {
    "plain": [],
    "top-k 50": [TopKLogitsWarper(50)],
    "top-p 0.95": [TopPLogitsWarper(0.95)],
    "min-p 0.05": [MinPLogitsWarper(0.05)],
}
_TEMPERATURE = 0.8
_NOISY, _GREEDY, _CHECKED = (1, 4, 8), 8, 33
"""Rows of a level with noise and greedily, and of a forward of the target over a tree of 32."""
_LEVELS, _REPEATS = 9, 15
_DEVIATION = 3.0
"""The standard deviation of logits, which are random."""


@dataclass(frozen=True)
class ContextRow:
    """Milliseconds per round, without the models' forward passes, after about `context` ids of the target."""

    context: Annotated[int, Column(form=",")]
    budget: Annotated[str, Column("")]
    align: Annotated[float, Column(form=".2f", note="mapping texts to ids.")]
    guess: Annotated[float, Column(form=".2f", note="scoring and choosing continuations.")]
    pick: Annotated[float, Column(form=".2f", note="picking, stopping, and all else.")]


def compare_contexts(target_tokenizer: Any, draft_tokenizer: Any, texts: Sequence[str]) -> list[ContextRow]:
    """Generate after contexts of several lengths with random models of one layer. Returns a row for each length and budget.

    Figures are differences between a long and a short generation, each the fastest of a few, so that times outside rounds,
    such as for reading the prompt, cancel out.
    """
    most = max(CONTEXTS)
    target, draft = (_random_model(tokenizer, most + 2 * _MANY) for tokenizer in (target_tokenizer, draft_tokenizer))
    ids = prompt_ids(target_tokenizer, "".join(texts))
    ids = ids * (most // len(ids) + 1)
    rows = []
    for size, name in bar([(size, name) for size in CONTEXTS for name in BUDGETS], "contexts"):
        xt = XTokAssisted((target, target_tokenizer), (draft, draft_tokenizer), budget=BUDGETS[name])
        prompt = target_tokenizer.decode(ids[:size], skip_special_tokens=True)
        short, long = (_fastest(xt, prompt, count) for count in (_FEW, _MANY))
        parts = ((b - a) / (long[0] - short[0]) * 1e3 for a, b in zip(short[1:], long[1:], strict=True))
        rows.append(ContextRow(size, name, *parts))
    return rows


def _random_model(tokenizer: Any, positions: int) -> Any:
    """A random model of one layer, with a row for each id of the tokenizer."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=2 * positions, **sizes)
    return from_config(config).eval()


def _fastest(xt: XTokAssisted, prompt: str, count: int) -> tuple[float, ...]:
    """Rounds, and the seconds of alignment, guessing and picking, of the fastest of a few generations."""
    found = []
    for _ in range(_GENERATIONS):
        run = xt.generate(prompt, max_new_tokens=count, do_sample=False, eos_token_id=None)
        stats, guess = run.stats, run.stats.seconds_draft - run.stats.seconds_draft_forwards
        rest = stats.seconds - stats.seconds_target - stats.seconds_draft - stats.seconds_align
        found.append((float(len(run.rounds)), stats.seconds_align, guess, rest))
    return min(found, key=sum)


@dataclass(frozen=True)
class VocabularyRow:
    """How many milliseconds something (`what`) takes if target and draft have this many ids; the median if it is repeated."""

    target: int
    draft: int
    what: str
    milliseconds: float


@dataclass(frozen=True)
class SizesRow:
    """How many milliseconds something (`what`) takes, by the numbers of ids of target and draft."""

    what: Annotated[str, Column("")]
    milliseconds: Annotated[dict[str, float], Column(form=",.2f")]


def by_size(rows: Sequence[VocabularyRow]) -> list[SizesRow]:
    """A row for each `what`, with all sizes side by side."""
    found = {row.what: SizesRow(row.what, {}) for row in rows}
    for row in rows:
        found[row.what].milliseconds[f"{row.target:,} × {row.draft:,}"] = row.milliseconds
    return [*found.values()]


def compare_vocabularies(target_tokenizer: Any, draft_tokenizer: Any) -> list[VocabularyRow]:
    """Time the work over vocabularies of several sizes, which are the tokenizers' own with added pieces.

    The models are random ones of one layer, whose forward passes don't count. Errors are those of `with_pieces`.
    """
    rows = []
    for size in bar(VOCABULARIES, "vocabularies"):
        pairs = [_pair(tokenizer, ids) for tokenizer, ids in zip((target_tokenizer, draft_tokenizer), size, strict=True)]
        rows += [VocabularyRow(*size, what, 1e3 * seconds) for what, seconds in _seconds(*pairs).items()]
    return rows


def _pair(tokenizer: Any, size: int) -> tuple[Any, Any]:
    wide = with_pieces(tokenizer, size)
    model = _random_model(wide, positions=512)
    head = model.get_output_embeddings().weight
    head.data.normal_(0, _DEVIATION / sqrt(head.shape[1]))  # hidden states are normalised
    return model, wide


def _seconds(target: tuple[Any, Any], draft: tuple[Any, Any]) -> dict[str, float]:
    found = {"to build an instance": seconds_of(lambda: XTokAssisted(target, draft))}
    whole, own = target_model(target).vocabulary, draft_model(draft)
    found["to build its keys for noise"] = seconds_of(lambda: noise_keys(whole.view, whole.size))
    found["to build its projection"] = seconds_of(lambda: projection(whole.view, own.vocabulary.view))
    made = ModelDraft(own, whole)
    for rows in _NOISY:
        found[f"a level of {rows} under noise"] = _level(made, whole, rows, samples=True)
    found[f"a level of {_GREEDY} greedily"] = _level(made, whole, _GREEDY, samples=False)
    found |= {f"a pick, {name}": _pick(whole, cuts) for name, cuts in _CUTS.items()}
    logits = _DEVIATION * torch.randn(_CHECKED, whole.size)
    return found | {f"the best of {_CHECKED} rows": seconds_of(lambda: best(logits)[0].tolist(), _REPEATS)}


def _level(draft: ModelDraft, target: Vocabulary, rows: int, *, samples: bool) -> float:
    """Seconds of a tree level without its forward pass and alignment: how much longer a deep tree takes, per added level."""
    data = target.view.to_bytes(ids := prompt_ids(target.tokenizer, "The cat. 吾輩は猫である。"))
    context = Context(ids, data, len(data), noise=noise(0, 0, data))
    warpers = LogitsProcessorList([TemperatureLogitsWarper(_TEMPERATURE)] if samples else [])
    meter = Meter()
    drafter = draft.start(Request(target, meter, samples, warpers=warpers))

    def besides(depth: int) -> float:
        before = meter.seconds["reading"] + meter.seconds["align"]
        whole = seconds_of(lambda: drafter.propose(context, Budget(depth, width=rows, schedule="constant")))
        return whole - (meter.seconds["reading"] + meter.seconds["align"] - before)

    besides(_LEVELS)  # the first one makes tables
    deep, flat = (median(besides(depth) for _ in range(_REPEATS)) for depth in (_LEVELS, 1))
    return (deep - flat) / (_LEVELS - 1)


def _pick(target: Vocabulary, cuts: list[Any]) -> float:
    """Seconds of a pick, as the decoding loop makes it."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(_TEMPERATURE), *cuts])
    picker, ids = Picker(processors, Meter(), noise(0, 0, b""), target.keys), torch.zeros((1, 1), dtype=torch.int64)
    several = iter([(_DEVIATION * torch.randn(1, target.size), (run, 0)) for run in range(_REPEATS)])
    return seconds_of(lambda: picker.pick(ids, *next(several), Tree(), -1), _REPEATS)
