"""How many bytes the KV caches of an engine may have."""

from math import ceil

from xtok.decoding.prepare import Prepared
from xtok.decoding.setup import Setup
from xtok.errors import InvalidInputError, UnsupportedModelError
from xtok.models.capabilities import traits


class Memory:
    """A bound on the KV caches of all models: for each, sequences × positions of the longest × bytes per position."""

    def __init__(self, setup: Setup, size: int) -> None:
        """`size`: in bytes. Raises an error of `xtok.errors` if it is too small or no number, or memory can't be bounded."""
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise InvalidInputError(f"memory is {size!r}; give a number of bytes, such as 8 * 1024**3.")
        position = 0
        for model in setup.models:
            if (own := traits(model).position_bytes) is None:
                name = type(model).__name__
                raise UnsupportedModelError(
                    f"{name} needs a cache for each sequence, so memory can't bound it. Leave memory out."
                )
            position += own
        least = setup.positions_beside() + 1
        if size < position * least:
            raise InvalidInputError(
                f"memory is {size:,} bytes, but one position and {least - 1} more for guesses take {position * least:,} bytes "
                f"({position:,} each). Give more."
            )
        self._setup = setup
        self.positions = size // position

    def limit(self, prepared: Prepared) -> int:
        """How many positions a sequence may take. Raises `InvalidInputError` if that is more than memory can ever hold."""
        most, prediction = float(prepared.config.max_length), prepared.prediction is not None
        beside = self._setup.positions_beside(min(most, self.positions), prediction=prediction)
        if most > self.positions - beside:
            raise InvalidInputError(
                f"The text may take {prepared.config.max_length} positions, prompt included, and memory has room for "
                f"{self.positions - beside}, besides {beside} for guesses. Ask for fewer new tokens, or give more memory."
            )
        return ceil(most)

    def fits(self, several: list[Prepared]) -> bool:
        """Whether sequences fit into memory together: each takes as many positions as the longest of them may."""
        sizes = [(ceil(float(one.config.max_length)), one.prediction is not None) for one in several]
        longest = max(most + self._setup.positions_beside(most, prediction=prediction) for most, prediction in sizes)
        return len(sizes) * longest <= self.positions
