"""Heads that each guess one further token from the same hidden state of the target (Medusa)."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList

from xtok.align.tokenbytes import TokenBytes
from xtok.drafts.base import Context
from xtok.drafts.growth import IdPath, TreeDrafter, likeliest, next_ids
from xtok.drafts.meter import Meter
from xtok.drafts.policy.settings import Budget
from xtok.models.forwards import Steps


class MedusaHeads(nn.Module):
    """Residual blocks on a target's last hidden state h, one for each further token: h + SiLU(W h + b) (Medusa, Cai et al.
    2024, arXiv 2401.10774). The target's own output embedding turns their outputs into logits. Untrained, each gives h.

    `weight`, W: (count, size, size) and `bias`, b: (count, size), with the hidden size `size`.
    """

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, size, size, dtype=torch.float32, device="cpu"))
        self.bias = nn.Parameter(torch.zeros(count, size, dtype=torch.float32, device="cpu"))

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps hidden states, (…, size), to those for the tokens after the next one, (…, count, size)."""
        return hidden[..., None, :] + nn.functional.silu(torch.einsum("...i,koi->...ko", hidden, self.weight) + self.bias)


@dataclass(eq=False, repr=False)
class MedusaDrafter(TreeDrafter[IdPath]):
    """The drafter of Medusa's heads for one sequence. `column`: the index, among the layers that drafters are shown, of the one
    to read. `keys`: the noise keys of the target's ids. `head`: the target's output embedding. `view`: the bytes of its ids.
    """

    heads: MedusaHeads
    column: int
    keys: Tensor
    head: Any
    view: TokenBytes
    meter: Meter
    warpers: LogitsProcessorList
    _hidden: Tensor | None = None
    _distributions: tuple[Tensor, Tensor] | None = None

    def take_hidden(self, start: int, hidden: Tensor) -> None:
        """Keep the last of these hidden states, (picks, layers, hidden size), from which the last id was picked."""
        self._hidden = hidden[-1, self.column]

    def begin(self, context: Context, budget: Budget) -> tuple[IdPath, Budget] | None:
        """None as long as the hidden state isn't known."""
        self._distributions = None
        limit = replace(budget, depth=min(budget.depth, len(self.heads.bias)))  # a head for each id
        return None if self._hidden is None else (IdPath(1.0, -1, b""), limit)

    def expanded(self, context: Context, front: list[IdPath], budget: Budget) -> Steps[list[list[IdPath]]]:
        """The continuations of each guess by the distribution of its next head."""
        if self._distributions is None:
            assert self._hidden is not None
            self._distributions = self._distributions_after(self._hidden)
        heads = [len(guess.ids) for guess in front]
        ids, probabilities = (part[heads] for part in self._distributions)
        return (yield from next_ids(self.meter, context, front, ids, probabilities, self.keys, self.view))

    def _distributions_after(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The distribution of each head: ids, int64, and probabilities, float32, (heads, ids) each. `hidden`: (size,)."""
        logits = self.head(self.heads(hidden.to(self.heads.weight.device)))
        ids, probabilities = likeliest(logits.to(self.keys.device), self.warpers)
        if ids is None:
            ids = torch.arange(probabilities.shape[1], dtype=torch.int64, device=probabilities.device)
            ids = ids.expand(len(probabilities), -1)
        return ids, probabilities
