"""How a draft learns: its loss, and its weights, or low-rank matrices beside them."""

import math
import warnings
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from xtok.align.vocabulary import Projection
from xtok.errors import InvalidInputError, install
from xtok.models.cache import parameter_count
from xtok.tune.examples import IGNORED

_LARGE = 500e6
"""Drafts with more parameters than this are trained by LoRA, unless settings say otherwise."""
_RANK = 16
_HARD = 0.5
"""The weight of the text's own id at positions for which the target's distribution is known, too."""
_LEAST = 1e-6
"""Smaller probabilities count as this one, so that logarithms are finite."""


def trains_by_lora(draft: PreTrainedModel, lora: bool | None) -> bool:
    """Whether to train a draft by LoRA: `lora`, or by its size. Raises `InvalidInputError` if peft is missing for that."""
    adapts = parameter_count(draft) > _LARGE if lora is None else lora
    if adapts and not find_spec("peft"):
        raise InvalidInputError(f"LoRA needs peft; or set lora to False. Install with: {install('tune')}")
    return adapts


def rate_for(draft: PreTrainedModel, lora: bool) -> float:
    """The default learning rate. At the rates that small models need in full fine-tuning, large ones forget what they know."""
    return 2e-4 if lora else min(1e-3, 1e-3 * math.sqrt(5e6 / parameter_count(draft)))


def loss_of(draft: Any, inputs: dict[str, Tensor], seen: Projection) -> Tensor:
    """The `guessing_loss` of a draft, a scalar. `inputs`: a batch of `xtok.tune.examples.batch`."""
    device = inputs["input_ids"].device
    half = device.type == "cuda" and torch.cuda.is_bf16_supported()
    with torch.autocast(device.type, torch.bfloat16, enabled=half):
        output = draft(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False)
    return guessing_loss(output.logits, inputs["labels"], inputs["likeliest"], inputs["probabilities"], seen)


def guessing_loss(logits: Tensor, labels: Tensor, top_ids: Tensor, probabilities: Tensor, seen: Projection) -> Tensor:
    """The mean loss of a draft's ids, a scalar: cross-entropy with the text, and with the target's distribution if known.

    `logits`: (rows, positions, draft's vocabulary). `labels`: (rows, positions), int64. `top_ids`, int64, `probabilities`,
    float32, (rows, positions, few): the target's distribution at each position, zeros if it isn't known. For that part, the
    draft's distribution is projected onto the target's ids by `seen`, as it is when the draft guesses.
    """
    logits, labels = logits[:, :-1].float(), labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    known = probabilities[:, 1:].sum(dim=-1) > 0
    predicted = _projected(logits[known].softmax(dim=-1), top_ids[:, 1:][known], seen)
    soft = -(_with_rest(probabilities[:, 1:][known]) * _with_rest(predicted).clamp_min(_LEAST).log()).sum(dim=-1)
    losses = losses.masked_scatter(known, _HARD * losses[known] + soft)
    return losses.sum() / (labels != IGNORED).sum()


def _with_rest(probabilities: Tensor) -> Tensor:
    """Adds to the probabilities of a few ids that of all others together: from (positions, few) to (positions, few + 1)."""
    return torch.cat([probabilities, (1 - probabilities.sum(dim=-1, keepdim=True)).clamp_min(0)], dim=-1)


def _projected(probabilities: Tensor, chosen: Tensor, seen: Projection) -> Tensor:
    """The projected probabilities of `chosen` ids, (positions, few), by the draft's, (positions, draft's vocabulary)."""
    found: Any = torch.unique
    columns, own = found(chosen, return_inverse=True)  # few of the target's ids, whose vocabulary may be large
    if not len(columns):
        return probabilities.new_zeros(chosen.shape)
    places = torch.searchsorted(columns, seen.target_ids).clamp_max(len(columns) - 1)
    meant = columns[places] == seen.target_ids
    shares = probabilities[:, seen.draft_ids[meant]] * seen.weights[meant].to(probabilities.dtype)
    return probabilities.new_zeros(len(probabilities), len(columns)).index_add(1, places[meant], shares).gather(1, own)


def with_lora(model: PreTrainedModel) -> Any:
    """`model` with low-rank matrices beside all its linear layers. They alone are trainable; its own weights are frozen."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=_RANK, lora_alpha=2 * _RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):  # the caller's random numbers stay what they are
        warnings.simplefilter("ignore")  # about what peft handles by itself
        torch.default_generator.manual_seed(0)
        return get_peft_model(model, config)
