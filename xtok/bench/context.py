"""The benchmark of what a round costs beside the models' forwards, by the length of the context."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig

from xtok.assisted import XTokAssisted
from xtok.drafts.policy.settings import Budget
from xtok.models.load import from_config
from xtok.models.prompts import prompt_ids
from xtok.results.progress import bar
from xtok.results.stats import Stats

SIZES = (256, 2048, 8192, 32000)
BUDGETS = {
    "chain of 5": Budget(5, width=1, schedule="constant"),
    "tree of 32": Budget(3, width=4, nodes=32, schedule="constant"),
}
_FEW, _MANY = 20, 150
_REPEATS = 3


@dataclass(frozen=True)
class ContextRow:
    """Milliseconds per round of what is no forward of a model, behind about `context` ids of the target.

    `align`: mapping texts to ids. `guess`: scoring and choosing continuations. `pick`: picking, stopping, keeping the books.
    """

    context: int
    budget: str
    align: float
    guess: float
    pick: float


def compare_contexts(
    target_tokenizer: Any, draft_tokenizer: Any, texts: Sequence[str], sizes: Sequence[int] = SIZES
) -> list[ContextRow]:
    """Generate behind contexts of some lengths by random models of one layer, and give a row per length and kind of guess.

    What a generation takes besides its rounds, such as its prompt, cancels out: the figures are differences of a long and a
    short one, each the least of a few.
    """
    target, draft = (random_model(tokenizer, max(sizes) + 2 * _MANY) for tokenizer in (target_tokenizer, draft_tokenizer))
    ids = prompt_ids(target_tokenizer, "".join(texts))
    ids = ids * (max(sizes) // len(ids) + 1)
    cases = [(size, name) for size in sizes for name in BUDGETS]
    rows = []
    for size, name in bar(cases, "contexts"):
        xt = XTokAssisted((target, target_tokenizer), (draft, draft_tokenizer), budget=BUDGETS[name])
        prompt = target_tokenizer.decode(ids[:size], skip_special_tokens=True)
        short, long = (_least(xt, prompt, count) for count in (_FEW, _MANY))
        parts = ((b - a) / (long[0] - short[0]) * 1e3 for a, b in zip(short[1:], long[1:], strict=True))
        rows.append(ContextRow(size, name, *parts))
    return rows


def random_model(tokenizer: Any, positions: int) -> Any:
    """A random model of one layer, with a row for each id of the tokenizer."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=2 * positions, **sizes)
    return from_config(config).eval()


def _least(xt: XTokAssisted, prompt: str, count: int) -> tuple[float, ...]:
    """Rounds, and the seconds of alignment, guessing and picking, of the fastest of a few generations."""
    runs = [xt.generate(prompt, max_new_tokens=count, do_sample=False, eos_token_id=None) for _ in range(_REPEATS)]
    return min(((float(len(run.rounds)), *_besides(run.stats)) for run in runs), key=sum)


def _besides(stats: Stats) -> tuple[float, float, float]:
    guess = stats.seconds_draft - stats.seconds_draft_forwards
    return stats.seconds_align, guess, stats.seconds - stats.seconds_target - stats.seconds_draft - stats.seconds_align
