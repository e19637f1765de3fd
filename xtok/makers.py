"""From what the caller gives as drafts to the drafters of one generation."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from xtok.adapt import Adapter
from xtok.continuation import Continuation
from xtok.drafts import Drafter
from xtok.drafts.cross_tokenizer import CrossTokenizerDrafter
from xtok.drafts.heads import Heads, HeadsDrafter, HeadsGuesser
from xtok.drafts.lookup import Lookup, PromptLookup
from xtok.drafts.projected import ProjectedDrafter
from xtok.drafts.projection import Candidates, projection, same_ids
from xtok.drafts.reader import DraftModel, IdReader, Reader
from xtok.errors import InvalidInputError, UnsupportedArgumentError
from xtok.lm import device_of
from xtok.prompts import chat_ids, is_chat
from xtok.sources import Source, TargetModel
from xtok.tokenbytes import same_tokens
from xtok.trace import Meter

Draft = Source | Drafter | PromptLookup | HeadsDrafter
KINDS = (Drafter, PromptLookup, HeadsDrafter)
"""What is given as it is. Anything else is a model."""


@dataclass(frozen=True)
class Task:
    """One generation, as far as its drafters have to know of it.

    `samples`: whether the target draws. `end`: the target's end of text. `warpers`: what shapes laws in any vocabulary.
    `prompt`: a text, a chat, or None where the target was given ids.
    """

    samples: bool
    end: int | None
    warpers: LogitsProcessorList
    meter: Meter
    prompt: Any = None


Maker = Callable[[Task], Drafter]
"""Makes the drafter of one generation."""


def as_list(draft: Draft | list[Any] | None, *, alone: bool) -> list[Draft]:
    """A model guesses together with what the text repeats, unless `alone`. Anything else is taken as it is."""
    if draft is None:
        return []
    if isinstance(draft, list):
        return list(draft)
    return [draft] if alone or isinstance(draft, KINDS) else [draft, PromptLookup()]


def check_drafts(
    drafts: Sequence[Any], models: Sequence[DraftModel], target: PreTrainedModel, *, rejects: bool, adapt: bool
) -> None:
    """Raises `InvalidInputError` or `UnsupportedArgumentError` where drafts, `models` among them, can't do what is asked."""
    if any(one.model is target for one in models):
        raise InvalidInputError("The draft is the target itself, which can't guess sooner than it knows. Give a smaller model.")
    if rejects and drafts and (len(drafts), len(models)) != (1, 1):
        raise UnsupportedArgumentError(
            "acceptance='rejection' needs the law that guesses are drawn from, so it takes one draft model alone. "
            "Give one, or use acceptance='match'."
        )
    if adapt and len(models) != 1:
        raise InvalidInputError(f"adapt=True needs one draft model that can learn, and there are {len(models)}.")


def of_lookup(lookup: PromptLookup, target: TargetModel) -> Maker:
    return lambda task: Lookup(lookup.index, target.encoder)


def of_heads(given: HeadsDrafter, target: TargetModel) -> Maker:
    """Heads for this very target: others are refused."""
    given.check(target.model, target.view)
    head: Any = target.model.get_output_embeddings()

    @cache
    def placed(device: torch.device, dtype: torch.dtype) -> tuple[Heads, Tensor]:
        return deepcopy(given.heads).to(device, dtype), target.keys.to(device)

    def make(task: Task) -> Drafter:
        warpers = task.warpers if task.samples else LogitsProcessorList()
        return HeadsGuesser(*placed(device_of(target.model), target.model.dtype), head, target.view, task.meter, warpers)

    return make


def of_model(draft: DraftModel, tokenizer: Any, target: TargetModel, *, rejects: bool, adapter: Adapter | None) -> Maker:
    """A draft model: one that has the target's own ids reads and guesses those; another one reads and guesses text.

    Draws are guessed in the target's ids either way.
    """
    same = same_tokens(target.tokenizer, target.view, tokenizer, draft.encoder.view)

    @cache
    def candidates(end: int | None) -> Candidates:
        seen = same_ids(target.vocabulary, draft.vocabulary) if same else projection(target.view, draft.encoder.view)
        return Candidates(seen, draft.vocabulary, target.keys.to(device_of(draft.model)), draft.ends, end)

    def make(task: Task) -> Drafter:
        model = draft if adapter is None or task.samples else adapter.draft
        reader = IdReader(model, task.meter) if same else Reader(model, task.meter, _own_prompt(tokenizer, task.prompt))
        if not same and not task.samples:
            return CrossTokenizerDrafter(model, reader, Continuation(target.encoder), task.end, task.meter)
        warpers = task.warpers if task.samples else LogitsProcessorList()
        return ProjectedDrafter(
            model,
            reader,
            candidates(None if same else task.end),
            target.view,
            task.meter,
            warpers,
            shares=task.samples,
            independent=rejects and task.samples,
        )

    return make


def _own_prompt(tokenizer: Any, prompt: Any) -> list[int] | None:
    """A chat in the draft's own template; None where it reads the target's text instead."""
    if not is_chat(prompt):
        return None
    try:
        return chat_ids(tokenizer, prompt)
    except Exception:  # templates refuse roles that they don't know, and a draft never spoils a generation
        return None
