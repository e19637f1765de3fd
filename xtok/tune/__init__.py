"""Training: fine-tunes a draft on the target's own texts, or trains heads for the target.

All training code is in this package, and no code that generates imports it.
"""

import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedModel

from xtok.align.tokenbytes import token_bytes
from xtok.align.vocabulary import Projection, projection
from xtok.errors import InvalidInputError, shown
from xtok.models.cache import device_of
from xtok.models.load import Source, draft_model, load
from xtok.models.modes import Modes, within
from xtok.results.progress import stage
from xtok.tune.draft import loss_of, rate_for, trains_by_lora, with_lora
from xtok.tune.examples import training_examples
from xtok.tune.heads import TrainedHeads, train_heads
from xtok.tune.training import check, fit, per_forward
from xtok.tune.writing import given_prompts, split, write

__all__ = ["TrainedHeads", "Tuned", "split", "train_heads", "tune_draft"]


@dataclass(frozen=True)
class Tuned:
    """The result of `tune_draft`.

    `path`: the folder with the tuned draft. `texts`: how many texts it was trained on. `before`, `after`: tokens per forward
    pass of the target with the untuned and the tuned draft, over all ways of picking, on held-out prompts. `epochs`: tokens
    per forward pass on the prompts that decided when to stop, before training and in each epoch; the best was kept.
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

    Each time that the draft is better than before, it is written to `out`, so that an interrupted training leaves its best so
    far. Raises `InvalidInputError` for invalid settings, for fewer than 3 prompts, for prompts that leave no room in the
    target's context window, for an `out` that isn't empty, for a draft whose tokenizer can't write the target's texts, and if
    peft is missing for LoRA; `UnsupportedModelError` or `UnsupportedTokenizerError` for an unsupported target or draft.
    """
    check(locals(), starts=1, max_new_tokens=1, epochs=1)
    if not isinstance(lora, bool | None):
        raise InvalidInputError(f"lora is {shown(lora)}; it must be True, False or None.")
    path = Path(out)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InvalidInputError(f"{out} is not empty. Choose another folder for the draft.")
    arguments: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampled": sampled}
    arguments |= {} if temperature is None else {"temperature": temperature}
    pair = load(target, "target")
    learner = draft_model(load(draft, "draft", beside=device_of(pair[0])))  # loaded first: its weights are to be trained
    lora = trains_by_lora(learner.model, lora)
    stopping, kept, learnt = given_prompts(pair, prompts, starts, arguments, chats=False)
    path.mkdir(parents=True, exist_ok=True)
    texts = write(pair, learnt, **arguments)
    view = token_bytes(pair[1])
    rows = training_examples(learner, view, texts)
    own = vars(projection(view, learner.vocabulary.view))
    seen = Projection(**{name: part.to(learner.model.device) for name, part in own.items()})

    def measured(model: PreTrainedModel, texts: Sequence[str] = stopping) -> tuple[float, dict[str, float]]:
        return per_forward(pair, (model, learner.vocabulary.tokenizer), texts, **arguments)

    with stage("measuring the draft as it is"):
        first, _ = measured(learner.model)
    draft_copy: Any = deepcopy(learner.model)
    trained: Any = with_lora(draft_copy.float()) if lora else draft_copy.float()

    def whole() -> PreTrainedModel:
        """The draft as trained so far, in its own dtype."""
        one = deepcopy(trained)
        return (one.merge_and_unload() if lora else one).eval().to(learner.model.dtype)  # type: ignore[no-any-return]

    def keep(figure: float) -> None:
        if figure > first:
            _save(whole(), learner.vocabulary.tokenizer, path)

    rate = learning_rate or rate_for(learner.model, lora)
    found = fit(
        trained, rows, partial(loss_of, seen=seen), lambda: measured(draft_copy.eval())[0], keep, epochs=epochs, rate=rate
    )
    model = whole() if max(found) > first else learner.model
    if model is learner.model:
        _save(model, learner.vocabulary.tokenizer, path)
    with stage("measuring what was gained"):
        before, after = (measured(one, kept)[1] for one in (learner.model, model))
    ways = {way: (before[way], after[way]) for way in before}
    return Tuned(path, len(rows), fmean(before.values()), fmean(after.values()), (first, *found), ways)


def _save(model: PreTrainedModel, tokenizer: Any, out: Path) -> None:
    """Write a draft to a folder. Each file of the model is replaced as a whole, its configuration, which makes it one, last."""
    if not (out / "config.json").exists():
        tokenizer.save_pretrained(out)
    with TemporaryDirectory(dir=out) as folder:
        model.save_pretrained(folder)
        for file in sorted(Path(folder).iterdir(), key=lambda file: file.name == "config.json"):
            os.replace(file, out / file.name)
