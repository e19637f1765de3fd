"""Pearson's test of counts against what is expected."""

import torch
from torch import Tensor

_LEAST = 5.0
"""Cells that fewer are expected in are put together, as the test asks for."""


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """The p-value of `counts` under `expected` (both one-dimensional, equal sums).

    Where something was counted that can't happen, it is 0.
    """
    counts, expected = counts.double(), expected.double()
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    rare = expected < _LEAST
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    held = expected > 0
    statistic = ((counts[held] - expected[held]) ** 2 / expected[held]).sum()
    freedom = int(held.sum()) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2))
