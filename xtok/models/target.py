"""The target model: verification of guesses."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from xtok.align.vocabulary import Vocabulary
from xtok.drafts.tree import Tree
from xtok.models.forwards import Answer, Ask, Slot, answered


@dataclass(frozen=True)
class Target:
    """A target model and its vocabulary, shared by all texts. A slot is a text's place in it: what the model keeps of it."""

    model: PreTrainedModel
    vocabulary: Vocabulary

    @staticmethod
    def verify(texts: Sequence[tuple[Slot, Sequence[int], Tree]]) -> list[Answer | Exception]:
        """Forward what each text's slot lacks of what is committed, one id at least, with a guessed tree behind it.

        Of each, 1 + guessed rows of logits are given: behind the last committed id and behind each guessed one. The nodes stand
        in the slot until `keep` ends the tree. Texts whose slots share a cache share a forward. One that fails is given as its
        error.
        """
        return answered([Ask(slot, [*ids, *tree.tokens], 1 + len(tree), tree.parents) for slot, ids, tree in texts])

    @staticmethod
    def keep(slot: Slot, path: Sequence[int]) -> None:
        """Keep the nodes of `path`, each the parent of the next and the first a child of -1; forget all others."""
        slot.keep(path)
