"""What a model can do, found out by trying."""

from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from xtok.models.cache import new_cache, vocabulary_size
from xtok.models.continues import largest_logit, rounding
from xtok.models.forwards import ForwardRequest
from xtok.models.modes import Modes, within
from xtok.models.quantized import quantization_of
from xtok.models.recurrent import cached_model
from xtok.models.runner import Verdicts
from xtok.models.shared_cache import SharedCache
from xtok.models.traits import Traits, read

_UNLIKE = ("moshi",)
"""Models whose cache keeps a window, though ids of one forward pass see each other beyond it. No short text shows that."""
_SHARED = 8
"""How many positions shared forward passes are tried with."""


def _try_sharing(model: PreTrainedModel) -> tuple[bool, int | None]:
    """Whether the model handles several branches in a forward pass; and how many bytes a position takes in a shared cache, or
    None if it doesn't handle several sequences in a forward pass.
    """
    known = read(model)
    branches = known.is_plain and _sees_by_positions(model) and _branches_as_it_should(model)
    turns = known.longrope_boundary is not None or known.dynamic_boundary is not None  # by a forward pass's longest sequence
    short = (known.window or _SHARED) < _SHARED
    shares = branches and not (turns or short or model.config.model_type in _UNLIKE)
    return branches, _shared_position_bytes(model) if shares else None


def _sees_by_positions(model: PreTrainedModel) -> bool:
    """Whether all layers choose what they see by positions, not by the order of keys. Exceptions are known by name, since no
    short context shows them.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "attention_layers", None) or ())}
    return kinds <= {"full_attention", "sliding_attention", "global"}


@within(Modes())
def _branches_as_it_should(model: PreTrainedModel) -> bool:
    """Whether a node after another branch has the same logits as in a chain of its own, within rounding. Rounding changes
    little compared with what seeing the other branch would change.
    """
    cached = cached_model(model, new_cache(model))
    first, other, *rest = (
        torch.tensor([[token % cached.vocabulary]], dtype=torch.int64, device=cached.device) for token in (3, 5, 7, 11, 13)
    )
    try:
        cached.forward(torch.cat([first, other], dim=1), rows=1)
        branched = cached.branch(torch.cat(rest, dim=1), parents=(-1, -1, 1))[2]
        cached.roll_back(2)
        alone = cached.forward(torch.cat(rest[1:], dim=1), rows=1)
        cached.roll_back(2)
        mixed = cached.forward(torch.cat(rest, dim=1), rows=1)
    except Exception:  # a model says in many ways that it takes no such mask
        return False
    error, effect = (branched - alone).abs().max(), (mixed - alone).abs().max()
    return bool(error <= effect * rounding(branched.dtype))


@within(Modes())
def _shared_position_bytes(model: PreTrainedModel) -> int | None:
    """How many bytes a position takes in a shared cache; None unless two sequences have the same logits in shared forward
    passes as alone.

    The two differ in length, and one has a tree, of which a later branch is kept. Differences that are small compared with
    those between the two sequences count as rounding.
    """
    try:
        long, short = (slots := SharedCache(model)).join(), slots.join()
        texts = {long: [3, 5, 7, 11, 13, 17], short: [2, 5]}
        slots.serve(
            [ForwardRequest(long, _ids(model, texts[long][:3]), 1), ForwardRequest(short, _ids(model, texts[short][:1]), 1)]
        )
        slots.serve([ForwardRequest(long, _ids(model, [19, *texts[long][3:5]]), 3, (-1, -1, 1))])
        long.keep([1, 2])
        answers = slots.serve(
            [ForwardRequest(long, _ids(model, texts[long][5:]), 1), ForwardRequest(short, _ids(model, texts[short][1:]), 1)]
        )
        whole = (torch.tensor([_ids(model, text)], dtype=torch.int64, device=slots.device) for text in texts.values())
        alone = [cached_model(model, new_cache(model)).forward(text, 1) for text in whole]
    except Exception:  # a model says in many ways that it takes no such mask or cache
        return None
    errors = [(answer.logits - one).abs().max() for answer, one in zip(answers, alone, strict=True)]
    effect = (alone[0] - alone[1]).abs().max()
    size = sum(part.shape[1] * part.shape[3] * part.element_size() for part in slots.parts)
    return size if max(errors) <= effect * rounding(alone[0].dtype) else None


def _ids(model: PreTrainedModel, ids: list[int]) -> list[int]:
    return [token % vocabulary_size(model) for token in ids]


_TRIED = Verdicts(_try_sharing)


def _found(model: PreTrainedModel) -> Traits:
    branches, size = _TRIED(model)
    try:
        rounds = quantization_of(model).rounds_input
    except Exception:  # unknown, and then picks aren't called exact
        rounds = True
    found: dict[str, Any] = {"branches": branches, "shares": size is not None, "position_bytes": size}
    return replace(read(model), **found, rounds_input=rounds, largest_logit=largest_logit(model))


traits = Verdicts(_found)
"""The traits of a model. It is tried once, and again after its modules, weights or settings were changed."""
