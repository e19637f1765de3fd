"""The two roles of a model: the target, and a draft model."""

from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedModel

from xtok.align.vocabulary import Vocabulary
from xtok.models.probe import traits


@dataclass(frozen=True)
class Target:
    """A target model and its vocabulary, shared by all sequences."""

    model: PreTrainedModel
    vocabulary: Vocabulary


@dataclass(frozen=True)
class DraftModel:
    """A draft model and its vocabulary, shared by all sequences. `lead`: the ids that its tokenizer puts before every text."""

    model: PreTrainedModel
    vocabulary: Vocabulary
    lead: tuple[int, ...]

    @cached_property
    def branches(self) -> bool:
        """Whether one forward pass can continue several guesses."""
        return traits(self.model).branches
