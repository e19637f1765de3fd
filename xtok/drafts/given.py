"""Turns the `draft` argument of a caller into a list of drafts: models, drafts and drafters."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from xtok.align.continuation import Continuation
from xtok.align.tokenbytes import same_tokens
from xtok.align.vocabulary import Projection, Vocabulary, identity_projection, projection
from xtok.drafts.acceptance import DrawnChains
from xtok.drafts.base import Draft, Drafter, Request
from xtok.drafts.cross_tokenizer import CrossTokenizerDrafter
from xtok.drafts.heads import HeadsDrafter
from xtok.drafts.lookup import PromptLookup
from xtok.drafts.projected import Candidates, ProjectedDrafter
from xtok.drafts.reader import IdReader, Reader
from xtok.drafts.recycling import TokenRecycling
from xtok.errors import InvalidInputError
from xtok.models.cache import device_of
from xtok.models.load import DraftModel
from xtok.models.prompts import chat_ids, is_chat


class ModelDraft:
    """A draft model for targets of one vocabulary."""

    def __init__(self, draft: DraftModel, target: Vocabulary) -> None:
        self._draft = draft
        self._target = target
        self._candidates = dict[int | None, Candidates]()
        own = draft.vocabulary
        self._same = same_tokens(target.tokenizer, target.view, own.tokenizer, own.view)

    @property
    def model(self) -> PreTrainedModel:
        return self._draft.model

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelDraft":
        """The same object, since it never changes, except for parts that are made at their first use."""
        return self

    @cached_property
    def _projection(self) -> Projection:
        own = self._draft.vocabulary
        return identity_projection(self._target.size, own.size) if self._same else projection(self._target.view, own.view)

    def start(self, request: Request) -> Drafter:
        """A drafter for one sequence. It guesses ids if the tokens are the target's or the target samples, else text."""
        model = self._draft
        slot = request.slots.take(model.model)
        if self._same:
            return self._projected(model, IdReader(model, request.meter, slot), request, end=None)
        reader = Reader(model, request.meter, slot, _own_prompt(model.vocabulary.tokenizer, request))
        if request.samples:
            return self._projected(model, reader, request, end=request.end)
        return CrossTokenizerDrafter(model, reader, Continuation(self._target.encoder), request.end, request.meter)

    def _projected(self, model: DraftModel, reader: Reader, request: Request, end: int | None) -> Drafter:
        if end not in self._candidates:
            own, keys = self._draft.vocabulary, self._target.keys.to(device_of(self._draft.model))
            self._candidates[end] = Candidates(self._projection, own.size, keys, own.ends, end)
        candidates, view = self._candidates[end], self._target.view
        drafter = ProjectedDrafter(model, reader, candidates, view, request.meter, request.draft_warpers)
        return DrawnChains(drafter) if request.independent else drafter


def _own_prompt(tokenizer: Any, request: Request) -> list[int] | None:
    """The draft's ids for a chat, by its own template; None if it reads the target's text instead."""
    if not is_chat(request.prompt):
        return None
    template = {name: value for name, value in request.template.items() if name != "chat_template"}  # which is the target's
    try:
        return chat_ids(tokenizer, request.prompt, template)
    except Exception:  # templates refuse unknown roles, and a draft must not make generation fail
        return None


class _Shared:
    """A draft whose one drafter, the caller's own, serves all sequences."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def start(self, request: Request) -> Drafter:
        return self._drafter


def as_draft(given: Draft | Drafter) -> Draft:
    """A draft as it is; for a drafter, a draft whose sequences all share it."""
    return _Shared(given) if isinstance(given, Drafter) else given


def as_drafts(given: Sequence[Any], models: Mapping[int, DraftModel], target: Vocabulary) -> list[Draft]:
    """The drafts for a target. `models`: those of `given` that are models, by their index."""
    return [ModelDraft(models[i], target) if i in models else as_draft(one) for i, one in enumerate(given)]


def is_drafting(given: Any) -> bool:
    """Whether an object is a draft (it has `start`) or a drafter (it has `propose`), and so no model."""
    return not isinstance(given, type) and any(callable(getattr(given, name, None)) for name in ("propose", "start"))


def without_a_model() -> list[Draft]:
    """The drafts that need no model: they guess alone, or beside a draft model."""
    return [PromptLookup(), TokenRecycling()]


def as_list(draft: Any, beside: Sequence[Draft]) -> list[Any]:
    """The drafts and models that a caller gives, as a list. To a single model, or to heads, the drafts `beside` are added.

    Raises `InvalidInputError` for what stands for drafts on the command line only.
    """
    if draft is None:
        return []
    for one in draft if isinstance(draft, list) else [draft]:
        if isinstance(one, str) and one in ("lookup", "none") and not Path(one).exists():
            raise InvalidInputError(
                f'"{one}" is a name of the command line. In Python, pass [PromptLookup(), TokenRecycling()] as the draft for '
                "drafts that need no model, and None for no draft."
            )
    if isinstance(draft, list):
        return list(draft)
    is_alone = is_drafting(draft) and not isinstance(draft, HeadsDrafter)
    return [draft] if is_alone else [draft, *beside]
