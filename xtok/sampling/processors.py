"""What is known of transformers' logits processors.

A processor is recognised by its exact class, since a derived class may do anything.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from xtok.sampling.grammar import Grammar

_WARPERS = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
)
CUTS: tuple[Any, ...] = (logits_process.TopKLogitsWarper, logits_process.TopPLogitsWarper, logits_process.MinPLogitsWarper)
"""These cut a distribution by its scores alone: they keep the ids from some score on."""
_ADDS: tuple[Any, ...] = (
    Grammar,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
)
"""These add to scores a number that follows from the ids alone, minus infinity mostly."""


def warpers(processors: Sequence[Any]) -> LogitsProcessorList:
    """The processors that shape a distribution by its probabilities alone, and so mean the same in any vocabulary."""
    return LogitsProcessorList([one for one in processors if type(one) in _WARPERS])


def known_cuts(processors: Sequence[Any]) -> int:
    """How many of the last processors only cut a distribution by its scores, if they come in the order top-k, top-p, min-p."""
    found = list[int]()
    for one in reversed(processors):
        plain = type(one) in CUTS and one.min_tokens_to_keep == 1 and one.filter_value == -torch.inf
        if not plain or (found and CUTS.index(type(one)) >= found[-1]):
            break
        found.append(CUTS.index(type(one)))
    return len(found)


def scale(processors: Sequence[Any]) -> float | None:
    """By what factor processors may enlarge the difference of two logits when they make scores of them.

    None if there is no such factor: a cut depends on all logits, and a processor of an unknown class on anything.
    """
    product = 1.0
    for one in processors:
        if type(one) is logits_process.TemperatureLogitsWarper:
            product /= one.temperature
        elif type(one) is logits_process.RepetitionPenaltyLogitsProcessor:
            product *= max(one.penalty, 1 / one.penalty)
        elif type(one) not in _ADDS:
            return None
    return product
