"""How much may be guessed in one round."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """`draft_tokens`: how many tokens of its own a drafter may guess. `target_tokens`: how many ids its tree may be deep."""

    draft_tokens: int
    target_tokens: int
