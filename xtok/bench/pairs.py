"""The models to measure: as they are, enlarged, and tuned."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from xtok.bench.stretch import forward_seconds, shortened, sized, stretched_to
from xtok.drafts.heads import HeadsDrafter
from xtok.models.load import load
from xtok.pair import HEADS, TUNED
from xtok.results.progress import busy

LARGE, SMALL = (13e9, 40), (160e6, 12)
"""Parameters and blocks of llm-jp-13B and of open-calm-small."""
Pair = tuple[tuple[Any, Any], tuple[Any, Any]]
"""Target and draft, each with its tokenizer."""


def enlarged(pair: Pair, ratio: float | None, large: bool) -> Pair:
    """The pair enlarged. `large`: both models, to the sizes of a large pair. `ratio`: the target, until its forward pass takes
    this many times as long as the draft's. Neither: the pair as it is.
    """
    (big, tokens), (small, pieces) = pair
    with busy("enlarging the models"):
        if large:
            big, small = sized(big, *LARGE), sized(small, *SMALL)
        if ratio is not None:
            big = stretched_to(big, ratio * forward_seconds(small))
    return (big, tokens), (small, pieces)


def shipped_drafts(pair: Pair) -> dict[str, Any]:
    """Further drafts of the shipped target: the tuned one, its own lower blocks, which have its ids, and its heads."""
    (target, tokens), (draft, _) = pair
    model, tokenizer = load(TUNED, "draft")
    tuned = model.to(draft.device, draft.dtype), tokenizer
    return {"tuned draft": tuned, "lower blocks": (shortened(target, 3), tokens), "heads": HeadsDrafter(HEADS)}


def tuned(target: tuple[Any, Any], draft: tuple[Any, Any], prompts: Sequence[str], **settings: Any) -> tuple[Any, Any]:
    """The draft, fine-tuned on what the target writes after `prompts`. `settings` are those of `xtok.tune_draft`."""
    from xtok.tune import tune_draft

    with TemporaryDirectory() as folder:
        return load(tune_draft(target, draft, prompts, Path(folder) / "draft", **settings).path, "draft")
