"""Whether counts are those of a distribution."""

import torch
from scipy.stats import chisquare
from torch import Tensor

_LEAST = 5.0


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """The p-value of Pearson's chi-square test of `counts` against the `expected` counts, (cells,) each, of any dtype.

    Cells with fewer than 5 expected are merged into one, as the test requires. If something impossible was counted, the
    p-value is 0; if there is only one cell, it is 1.
    """
    if bool(counts[expected == 0].any()):
        return 0.0
    order = expected.argsort(descending=True)
    counts, expected = counts.double()[order], expected.double()[order]
    large = int((expected >= _LEAST).sum())
    large -= large > 0 and float(expected[large:].sum()) < _LEAST
    if large == 0:
        return 1.0
    counts, expected = (torch.cat([cells[:large], cells[large:].sum()[None]]) for cells in (counts, expected))
    return float(chisquare(counts.numpy(), (expected * counts.sum() / expected.sum()).numpy()).pvalue)
