"""The target's pick: its own next token from its own logits on the committed prefix."""

import torch
from torch import Tensor
from transformers import LogitsProcessorList


def process(ids: Tensor, logits: Tensor, processors: LogitsProcessorList) -> Tensor:
    """Scores of shape (1, vocabulary) in float32, as transformers' own loop computes them.

    `ids` is the committed prefix, (1, length). Processors run once per committed token and in order, so those that keep a state
    (grammars, guidance, watermarks) see just what they would see without a draft.
    """
    scores: Tensor = processors(ids, logits)
    return scores


def pick(scores: Tensor, *, sample: bool) -> int:
    """`argmax(scores)`, or one draw from softmax(scores) by torch's generator, as transformers draws it.

    The draft draws nothing, so one draw is made per committed token and `torch.manual_seed` means the same with and without it.
    """
    if sample:
        return int(torch.multinomial(scores.softmax(dim=-1), num_samples=1))
    return int(scores.argmax(dim=-1))
