"""The target model: prefill of a prompt, and verification of guesses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from xtok.align.vocabulary import Vocabulary
from xtok.models.cache import CachedModel
from xtok.stats import timed
from xtok.tree import Tree


class Checked(NamedTuple):
    """What a forward of the target says of a text.

    `logits`: behind the last committed id and behind each guessed one, (1 + guessed, vocabulary). `hidden`: the last hidden
    states there, (1 + guessed, hidden size), where they are asked for. `rows`: how many rows of logits. `seconds`: what
    the forward took.
    """

    logits: Tensor
    hidden: Tensor | None
    rows: int
    seconds: float


@dataclass(frozen=True)
class Target:
    """A target model and its vocabulary, shared by all texts. A slot is a text's place in it: what the model keeps of it.

    Each text has a cache of its own as its slot, and a forward of its own.
    """

    model: PreTrainedModel
    vocabulary: Vocabulary

    def prefill(self, slot: CachedModel, ids: Tensor, config: Any) -> Checked:
        """Forward a prompt, `ids`, (1, length), int64, as transformers does.

        Of its positions, only the last one's logits are given, (1, vocabulary). `config`: the generation's.
        """
        with timed() as took:
            logits = slot.prefill(ids, config)
            _wait(logits)
        return Checked(logits, None, 1, took.seconds)

    def verify(self, texts: Sequence[tuple[CachedModel, int, Tree]]) -> list[Checked]:
        """Forward the last committed id of each text, which its slot lacks, with a guessed tree behind it.

        Of each, 1 + guessed rows of logits are given. The nodes stand in the slot until `keep` ends the tree.
        """
        return [self._verified(*text) for text in texts]

    @staticmethod
    def _verified(slot: CachedModel, last: int, tree: Tree) -> Checked:
        new, parents = torch.tensor([[last, *tree.tokens]], device=slot.device), [-1, *(one + 1 for one in tree.parents)]
        with timed() as took:
            logits = slot.branch(new, parents)
            _wait(logits)
        return Checked(logits, slot.hidden, len(parents), took.seconds)

    @staticmethod
    def keep(slot: CachedModel, path: Sequence[int]) -> None:
        """Keep the last committed id and the nodes of `path`, each the parent of the next; forget all others."""
        slot.keep([0, *(node + 1 for node in path)])


def _wait(logits: Tensor) -> None:
    """A forward on an accelerator takes until its work is done, not until it is launched."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and logits.device.type == accelerator.type:
        torch.accelerator.synchronize(logits.device)
