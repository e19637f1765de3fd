"""The models to measure: as they are, enlarged, tuned, and useless ones."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from xtok.bench.stretch import forward_seconds, shortened, sized, stretched_to, with_vocabulary
from xtok.drafts.heads import HeadsDrafter
from xtok.models.load import from_config, load
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


def with_vocabularies(pair: Pair, sizes: tuple[int, int] | None) -> Pair:
    """The pair with vocabularies enlarged to these sizes, (target, draft); as it is if None."""
    return pair if sizes is None else (with_vocabulary(*pair[0], sizes[0]), with_vocabulary(*pair[1], sizes[1]))


def shipped_drafts(pair: Pair) -> dict[str, Any]:
    """Further drafts of the shipped target: the tuned one, its own lower blocks, which have its ids, and its heads."""
    (target, tokens), (draft, _) = pair
    model, tokenizer = load(TUNED, "draft")
    tuned = model.to(draft.device, draft.dtype), tokenizer
    return {"tuned draft": tuned, "lower blocks": (shortened(target, 1), tokens), "heads": HeadsDrafter(HEADS)}


def useless_drafts(target: tuple[Any, Any], draft: tuple[Any, Any]) -> dict[str, tuple[Any, Any]]:
    """The draft with random weights, and the draft enlarged until its forward pass takes as long as the target's."""
    random = from_config(draft[0].config, dtype=draft[0].dtype).to(draft[0].device).eval()
    expensive = stretched_to(draft[0], forward_seconds(target[0]))
    return {"with random weights": (random, draft[1]), "as expensive as the target": (expensive, draft[1])}


def tuned(target: tuple[Any, Any], draft: tuple[Any, Any], prompts: Sequence[str], **settings: Any) -> tuple[Any, Any]:
    """The draft, fine-tuned on what the target writes after `prompts`. `settings` are those of `xtok.tune_draft`."""
    from xtok.tune import tune_draft

    with TemporaryDirectory() as folder:
        return load(tune_draft(target, draft, prompts, Path(folder) / "draft", **settings).path, "draft")
