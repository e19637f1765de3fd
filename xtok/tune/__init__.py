"""Training: fine-tunes a draft on the target's own texts, or trains heads for the target.

All training code is in this package, and no code that generates imports it.
"""

import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import PreTrainedModel

from xtok.align.projection import projection
from xtok.align.tokenbytes import token_bytes
from xtok.errors import InvalidInputError, shown
from xtok.models.cache import device_of
from xtok.models.load import Source, draft_model, load
from xtok.models.modes import Modes, within
from xtok.results.progress import stage
from xtok.tune.examples import training_examples
from xtok.tune.heads import TrainedHeads, train_heads
from xtok.tune.training import TrainingSettings, train
from xtok.tune.work import (
    Settings,
    card_of,
    check,
    fingerprint,
    finish,
    per_forward,
    settings_of,
    split,
    work_of_draft,
    writing_arguments,
)
from xtok.tune.writing import PENALTY, beginnings, check_written, write

__all__ = ["TrainedHeads", "Tuned", "split", "train_heads", "tune_draft"]

_MOST = 40
"""On how many beginnings of prompts tokens per forward pass are measured, at most."""


@dataclass(frozen=True)
class Tuned:
    """The result of `tune_draft`.

    `path`: the folder with the tuned draft. `texts`: how many texts it was trained on. `before`, `after`: tokens per forward
    pass of the target with the untuned and the tuned draft, over all ways of picking, on held-out prompts. `epochs`: tokens
    per forward pass on the prompts that decided when to stop, before training and after each epoch; the best epoch was kept.
    `ways`: before and after for each way of picking: greedy, greedy with a repetition penalty, sampled.
    """

    path: Path
    texts: int
    before: float
    after: float
    epochs: tuple[float, ...]
    ways: dict[str, tuple[float, float]]


@within(Modes())
def tune_draft(
    target: Source,
    draft: Source,
    prompts: Sequence[str],
    out: str | os.PathLike[str],
    *,
    starts: int = 8,
    max_new_tokens: int = 64,
    sampled: float = 0.5,
    temperature: float | None = None,
    epochs: int = 6,
    learning_rate: float | None = None,
    lora: bool | None = None,
) -> Tuned:
    """Let the target continue `prompts`, and fine-tune a copy of the draft on the texts. `out`: the folder for the new draft.

    Law: `XTokAssisted(target, out)` gives what `XTokAssisted(target, draft)` gives; only the speed differs.

    A tenth of the prompts decides when to stop, and another tenth measures the gain; neither is trained on. Of each other
    prompt, the target continues `starts` beginnings, by `max_new_tokens` tokens. A share `sampled` of these texts is sampled,
    at `temperature` (None: as the target's generation config says). The others are greedy, every other one with a repetition
    penalty of 1.2, since greedy texts of small models repeat themselves. `epochs`: the most epochs. `learning_rate`: None to
    choose by the draft's size. `lora`: train low-rank matrices (Hu et al. 2021, arXiv 2106.09685) and merge them into the
    draft; None: for drafts of more than 500 M parameters.

    If training was stopped, call this again with the same arguments to resume; the weights are the same as without a stop (in
    float32 on a CPU). Raises `InvalidInputError` for invalid settings, for fewer than 3 prompts, for prompts that leave no room
    in the target's context window, for an `out` that holds something else or was started with other settings, for a draft whose
    tokenizer can't write the target's texts, and if accelerate or peft is missing; `UnsupportedModelError` or
    `UnsupportedTokenizerError` for an unsupported target or draft.
    """
    settings = {**settings_of(locals()), "penalty": PENALTY}
    if not isinstance(lora, bool | None):
        raise InvalidInputError(f"lora is {shown(lora)}; it must be True, False or None.")
    check(settings, out, "accelerate", "peft", starts=1, max_new_tokens=1, epochs=1)
    stopping, kept, learnt = split(prompts)
    pair = load(target, "target")
    learner = draft_model(draft, beside=device_of(pair[0]))
    arguments = writing_arguments(settings)
    check_written(pair, [*stopping, *kept, *learnt], arguments)
    weights = {
        "target's weights": fingerprint(*pair),
        "draft's weights": fingerprint(learner.model, learner.vocabulary.tokenizer),
    }
    work = work_of_draft(Path(out), settings | weights)
    apart = {*beginnings(stopping, starts), *beginnings(kept, starts)}
    texts = write(pair, [one for one in beginnings(learnt, starts) if one not in apart], work / "texts", **arguments)
    view = token_bytes(pair[1])
    rows, seen = training_examples(learner, view, texts), projection(view, learner.vocabulary.view)

    def measured(model: PreTrainedModel, texts: Sequence[str] = stopping) -> tuple[float, dict[str, float]]:
        some = beginnings(texts, starts)[:: -(-len(texts) * starts // _MOST)]  # evenly spread
        return per_forward(pair, (model, learner.vocabulary.tokenizer), some, **arguments)

    with stage("measuring the draft as it is"):
        first, _ = measured(learner.model)
    copy: Any = deepcopy(learner.model)
    trained: Any
    how = TrainingSettings(epochs, learning_rate, lora)
    trained, found = train(copy.float(), rows, seen, lambda model: measured(model)[0], work / "training", how)
    model = trained.to(learner.model.dtype) if max(found) > first else learner.model
    with stage("measuring what was gained"):
        before, after = (measured(one, kept)[1] for one in (learner.model, model))
    ways = {way: (before[way], after[way]) for way in before}
    result = Tuned(Path(out), len(rows), fmean(before.values()), fmean(after.values()), (first, *found), ways)
    finish(model, learner.vocabulary.tokenizer, _card(settings, result), result.path, work)
    return result


def _card(settings: Settings, result: Tuned) -> str:
    first, *others = result.epochs
    learnt = f"on {result.texts} texts that `{settings['target']}` wrote"
    made = f"`{settings['draft']}`, fine-tuned by xtok {learnt}."
    if max(others) <= first:
        made = f"`{settings['draft']}`, unchanged: fine-tuning it {learnt} gained nothing."
    ways = [[way, f"{before:.2f}", f"{after:.2f}"] for way, (before, after) in result.ways.items()]
    titles = ["tokens per forward of the target", "before", "after"]
    when, about = "before training and after each epoch", {"base_model": settings["draft"], "library_name": "transformers"}
    return card_of(settings, "A draft", made, [titles, *ways], when, result.epochs, **about)
