"""What is known of transformers' logits processors. A class derived from one may do anything, so none is known by its base."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

_WARPERS = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
)
CUTS: tuple[Any, ...] = (TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
"""These cut a distribution by its scores alone: what is left are those from some score on."""
_ADDS = (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
"""These add to scores what follows from the ids alone; minus infinity, mostly."""


def warpers(processors: Sequence[Any]) -> LogitsProcessorList:
    """Those that shape a distribution by its probabilities alone, and so mean the same in any vocabulary."""
    return LogitsProcessorList([one for one in processors if type(one) in _WARPERS])


def known_cuts(processors: Sequence[Any]) -> int:
    """How many of the last only cut a distribution by its scores, in the order top-k, top-p, min-p; none before others."""
    found = list[int]()
    for one in reversed(processors):
        plain = type(one) in CUTS and one.min_tokens_to_keep == 1 and one.filter_value == -torch.inf
        if not plain or (found and CUTS.index(type(one)) >= found[-1]):
            break
        found.append(CUTS.index(type(one)))
    return len(found)


def scale(processors: Sequence[Any]) -> float | None:
    """How many times as large a difference of two logits may be as a difference of scores.

    None where it may be anything: a cut depends on all logits, and processors of unknown kinds on what they like.
    """
    product = 1.0
    for one in processors:
        if type(one) is TemperatureLogitsWarper:
            product /= one.temperature
        elif type(one) is RepetitionPenaltyLogitsProcessor:
            product *= max(one.penalty, 1 / one.penalty)
        elif type(one) not in _ADDS:
            return None
    return product
