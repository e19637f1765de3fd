"""How many bytes the KV caches of an engine may have."""

from math import ceil

from xtok.decoding.prepare import Prepared
from xtok.decoding.setup import Setup
from xtok.errors import InvalidInputError, UnsupportedArgumentError, UnsupportedModelError
from xtok.models.probe import traits


class Memory:
    """A bound on the KV caches of all sequences and models: sequences × positions of the longest × bytes of a position."""

    def __init__(self, setup: Setup, size: int) -> None:
        """`size`: in bytes. Raises an error of `xtok.errors` if it makes no sense or memory can't be bounded."""
        if not isinstance(size, int) or size < 1:
            raise InvalidInputError(f"memory is {size!r}; give a number of bytes, as 8 * 1024**3.")
        if setup.acceptance == "rejection":
            raise UnsupportedArgumentError(
                "memory can't be bounded with acceptance='rejection': ids depend on the distribution by which a draft guesses, "
                "and that on how much of a text it reads. Leave memory out, or use acceptance='match'."
            )
        position = 0
        for model in setup.models:
            if (own := traits(model).position_bytes) is None:
                name = type(model).__name__
                raise UnsupportedModelError(f"{name} keeps a cache of its own for each sequence, so its memory isn't bounded.")
            position += own
        least = setup.positions_beside() + 1
        if size < position * least:
            raise InvalidInputError(
                f"memory is {size:,} bytes; a text of one position, and {least - 1} for its guesses, takes "
                f"{position * least:,} ({position:,} for each position). Give more."
            )
        self._setup = setup
        self.positions = size // position

    def limit(self, prepared: Prepared) -> int:
        """How many positions a sequence may get. Raises `InvalidInputError` if there is never room for it."""
        most, prediction = float(prepared.config.max_length), prepared.prediction is not None
        beside = self._setup.positions_beside(min(most, self.positions), prediction=prediction)
        if most > self.positions - beside:
            raise InvalidInputError(
                f"The text may get {prepared.config.max_length} positions, prompt included, and memory has room for "
                f"{self.positions - beside}, and {beside} for guesses. Ask for fewer new tokens, or give more memory."
            )
        return ceil(most)

    def fits(self, several: list[Prepared]) -> bool:
        """Whether sequences fit beside each other: each has as many positions as the longest may get."""
        sizes = [(ceil(float(one.config.max_length)), one.prediction is not None) for one in several]
        longest = max(most + self._setup.positions_beside(most, prediction=prediction) for most, prediction in sizes)
        return len(sizes) * longest <= self.positions
