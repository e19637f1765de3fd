"""Models how long forward passes take, from measured seconds. There is no clock here."""

from bisect import bisect
from dataclasses import dataclass, field
from math import ceil

SHARE = 0.1
"""The weight of a measurement in a smoothed one."""
ROW = 0.02
"""What one more row of one sequence is assumed to add to a forward pass, as a share, until other numbers of rows were measured.
"""
_ENOUGH = 8
"""How many measurements a cell needs to count fully."""
_FAR = 10
"""A single measurement this many times the usual is a hiccup; two in a row aren't."""
_STALE = 96
"""A cell between newer ones is left out after this many other measurements since its last."""


def _cell_of(rows: float) -> int:
    """The cell for a number of rows: 1 is in cell 0, 2 in 1, 3 and 4 in 2, 5 to 8 in 3, and so on."""
    return (ceil(rows) - 1).bit_length()


@dataclass
class LatencyModel:
    """Predicts seconds from a number of rows: a curve through measurements that never falls.

    It interpolates between the numbers of rows that were measured, for latency jumps at some of them (a kernel's tile is full,
    say). `cells` maps the cell of a number of rows to a tuple: how often it was measured, the mean number of rows, the smoothed
    seconds, and after how many measurements in all it was measured last. `row`: what one more row is assumed to add, as a share
    of the seconds of one row, until two cells were measured.
    """

    cells: dict[int, tuple[int, float, float, int]] = field(default_factory=dict)
    row: float = ROW
    _count: int = 0
    _far_off: bool = False
    _curve: tuple[list[float], list[float]] | None = None

    def add(self, rows: float, seconds: float) -> None:
        """Add a measurement. It weighs more if the last one for as many rows is long ago.

        Hiccups only make things slower, so it counts as at most twice the mean so far, and that as at most twice the new one,
        unless this measurement and the one before were both far off.
        """
        cell = _cell_of(rows)
        count, mean_rows, mean, last = self.cells.get(cell) or (0, rows, self.at(rows) or seconds, self._count)
        share = max(1 / (count + 1), SHARE, min(0.5, (self._count - last) / 128))
        before, self._far_off = self._far_off, seconds > _FAR * mean
        if before and self._far_off:
            share = 1.0
        else:
            seconds, mean = min(seconds, 2 * mean), min(mean, 2 * seconds)
        self._count += 1
        self.cells[cell] = (count + 1, mean_rows + share * (rows - mean_rows), mean + share * (seconds - mean), self._count)
        self._curve = None

    def knows(self, rows: float) -> bool:
        """Whether about this many rows were measured so often that a change must be one of the machine."""
        return _cell_of(rows) in self.cells and self.cells[_cell_of(rows)][0] >= _ENOUGH

    def at(self, rows: float) -> float:
        """The predicted seconds of a forward pass with `rows` rows; 0 before anything was measured."""
        if self._curve is None:
            self._curve = self._fitted()
        places, seconds = self._curve
        if not places:
            return 0.0
        if len(places) == 1 or rows < places[0]:
            return seconds[0] * (1 + self.row * (rows - 1)) / (1 + self.row * (places[0] - 1))
        right = min(max(1, bisect(places, rows)), len(places) - 1)
        slope = (seconds[right] - seconds[right - 1]) / (places[right] - places[right - 1])
        return seconds[right] + slope * (rows - places[right])

    def _fitted(self) -> tuple[list[float], list[float]]:
        """The curve's points. Measurements that fall as rows grow are pooled (isotonic regression).

        Old measurements between newer ones are left out, so that a number of rows that seemed too expensive is tried again. Old
        ones at the ends stay: without them, nothing would be known about such numbers of rows.
        """
        pools: list[tuple[float, float, list[float]]] = []  # the weight of each, its mean, and the numbers of rows in it
        fresh = [cell for cell, (*_, last) in self.cells.items() if self._count - last < _STALE]
        for cell, (count, rows, mean, last) in sorted(self.cells.items()):
            if self._count - last >= _STALE and min(fresh) < cell < max(fresh):
                continue
            weight, places = float(min(count, _ENOUGH)), [rows]
            while pools and pools[-1][1] >= mean:
                other, other_mean, others = pools.pop()
                mean, weight, places = (weight * mean + other * other_mean) / (weight + other), weight + other, others + places
            pools.append((weight, mean, places))
        return [place for pool in pools for place in pool[2]], [mean for _, mean, places in pools for _ in places]


@dataclass
class NominalLatency(LatencyModel):
    """Predicts `seconds` for a forward pass of one row and 3% more for each further row, whatever was measured.

    SmolLM2 135M in bfloat16 on a CPU had 2.7%.
    """

    seconds: float = 1.0

    def add(self, rows: float, seconds: float) -> None:
        """Do nothing."""

    def at(self, rows: float) -> float:
        """The nominal seconds of a forward pass with `rows` rows."""
        return self.seconds * (1 + 0.03 * (rows - 1))
