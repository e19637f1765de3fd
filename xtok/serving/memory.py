"""How many bytes the KV caches of an engine may have."""

from math import ceil

from xtok.decoding.prepare import Prepared
from xtok.decoding.setup import Setup
from xtok.errors import InvalidInputError, UnsupportedArgumentError, UnsupportedModelError
from xtok.models.probe import traits


class Memory:
    """A bound on the KV caches of all sequences and models: sequences × positions of the longest × bytes of a position."""

    def __init__(self, setup: Setup, size: int) -> None:
        """`size`: in bytes.

        Raises `InvalidInputError` for a size that makes no sense, `UnsupportedArgumentError` and `UnsupportedModelError` if
        memory can't be bounded.
        """
        if not isinstance(size, int) or size < 1:
            raise InvalidInputError(f"memory is {size!r}; give a number of bytes, as 8 * 1024**3.")
        if setup.acceptance == "rejection":
            raise UnsupportedArgumentError(
                "memory can't be bounded with acceptance='rejection': ids depend on the distribution by which a draft guesses, "
                "and that on how much of a text it reads. Leave memory out, or use acceptance='match'."
            )
        position = 0
        for model in setup.models:
            own = traits(model).position_bytes
            if own is None:
                name = type(model).__name__
                raise UnsupportedModelError(
                    f"{name} keeps a cache of its own for each sequence, so its memory isn't bounded here."
                )
            position += own
        least = setup.positions_beside() + 1
        if size < position * least:
            raise InvalidInputError(
                f"memory is {size:,} bytes; a text of one position, and {least - 1} for its guesses, takes "
                f"{position * least:,} ({position:,} for each position). Give more."
            )
        self._setup = setup
        self.positions = size // position

    def limit(self, request: Prepared) -> int:
        """How many positions the sequence of a request may get. Raises `InvalidInputError` if there is never room for it."""
        most, prediction = float(request.config.max_length), request.prediction is not None
        beside = self._setup.positions_beside(min(most, self.positions), prediction=prediction)
        if most > self.positions - beside:
            raise InvalidInputError(
                f"The text may get {request.config.max_length} positions, prompt included, and memory has room for "
                f"{self.positions - beside}, and {beside} for guesses. Ask for fewer new tokens, or give more memory."
            )
        return ceil(most)

    def fits(self, requests: list[Prepared]) -> bool:
        """Whether sequences fit beside each other: each has as many positions as the longest may get."""
        sizes = list[int]()
        for one in requests:
            most = ceil(float(one.config.max_length))
            sizes.append(most + self._setup.positions_beside(most, prediction=one.prediction is not None))
        return len(sizes) * max(sizes) <= self.positions
