"""Pearson's test of counts against what is expected."""

import torch
from torch import Tensor

_LEAST = 5.0
"""Cells that fewer are expected in are put together, as the test asks for."""


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """The p-value of `counts` under `expected`: (cells,) both, of any dtype, with equal sums.

    Where something was counted that can't happen, it is 0; where nothing can be told apart, 1.
    """
    counts, expected = counts.double(), expected.double()
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    order = expected.argsort(descending=True)
    counts, expected = counts[order], expected[order]
    kept = int((expected >= _LEAST).sum())
    if 0 < float(expected[kept:].sum()) < _LEAST:
        kept -= 1
    kept = max(kept, 0)
    counts = torch.cat([counts[:kept], counts[kept:].sum()[None]])
    expected = torch.cat([expected[:kept], expected[kept:].sum()[None]])
    held = expected > 0
    freedom = int(held.sum()) - 1
    if freedom < 1:
        return 1.0
    statistic = ((counts[held] - expected[held]) ** 2 / expected[held]).sum()
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2))
