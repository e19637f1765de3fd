"""Predicts how long rounds and forward passes take, from measured seconds. There is no clock here."""

from bisect import bisect
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

SHARE = 0.1
"""The weight of a measurement in a smoothed one."""
ROUNDS = 64
"""For how many rounds, about, what was measured or counted holds."""
ROW = 0.02
"""What a further row of one sequence is assumed to add, as a share of the seconds of one row, where nothing was measured."""


def batch_bucket(sequences: int) -> int:
    """A batch size, rounded down to a quarter of a power of two: 1 to 8, 10, 12, 14, 16, 20, …"""
    quarter = max(0, sequences.bit_length() - 3)
    return sequences >> quarter << quarter


class _Cell(NamedTuple):
    """What was measured with similar numbers of rows: how often, the mean rows and seconds, the latest seconds, and when."""

    times: int
    rows: float
    seconds: float
    latest: float
    last: int


@dataclass
class Latency:
    """Predicts the seconds of a forward pass by how many sequences share it and how many rows each of them has.

    For each batch size, this is a curve through the means of similar numbers of rows (1, 2, 3 and 4, 5 to 8, …). If more rows
    took less time than fewer, the latest measurement is believed, so that the curve never falls. What was measured long ago is
    left out, so that a number of rows that seemed too expensive is tried again. Each row beyond what was measured adds `ROW`,
    or as much as the others did on average from the second point on. A batch size without measurements is predicted from the
    nearest one.

    `nominal`: the seconds of one row, to predict from that alone, whatever is measured; None to go by measurements.
    """

    nominal: float | None = None
    _cells: dict[int, dict[int, _Cell]] = field(default_factory=dict)
    _count: int = 0
    _curves: dict[int, tuple[list[float], list[float]]] = field(default_factory=dict)

    def add(self, rows: float, seconds: float, sequences: int = 1) -> None:
        """Add a measurement.

        Hiccups only make things slower, and seldom hit twice in a row: a measurement counts as at most 1.2 times the mean, or
        as the one before it. The first one counts only until there is a second, since the first forward pass of a shape often
        takes longer.
        """
        size = batch_bucket(sequences)
        cells, bucket = self._cells.setdefault(size, {}), (ceil(rows) - 1).bit_length()
        cell = cells.get(bucket)
        if cell is None or not cell.seconds:  # clocks of some systems tick coarsely
            cell = _Cell(0, rows, seconds, seconds, self._count)
        share, counted = max(1 / max(1, cell.times), SHARE), min(seconds, max(1.2 * cell.seconds, cell.latest))
        mean = cell.seconds + share * (counted - cell.seconds)
        found = _Cell(cell.times + 1, cell.rows + share * (rows - cell.rows), mean, seconds, self._count)
        self._count += 1
        for other, known in cells.items():
            clip = min if other < bucket else max
            cells[other] = known._replace(seconds=clip(known.seconds, found.seconds))
        cells[bucket] = found
        points = [cells[bucket] for bucket in sorted(cells) if not bucket or self._count - cells[bucket].last < ROUNDS]
        self._curves[size] = [one.rows for one in points], [one.seconds for one in points]

    def at(self, rows: float, sequences: int = 1) -> float:
        """The predicted seconds if each of `sequences` has `rows` rows; 0 before anything was measured."""
        if self.nominal is not None:
            return self.nominal * (1 + ROW * (rows - 1))
        size = batch_bucket(sequences)
        if size not in self._curves:
            if not self._curves:
                return 0.0
            size = min(self._curves, key=lambda other: abs(other - sequences))
            rows = max(1.0, rows * sequences / size)
        places, seconds = self._curves[size]
        right = bisect(places, rows)
        if right == 0:
            return seconds[0]
        if right == len(places):
            slope = (seconds[-1] - seconds[1]) / (places[-1] - places[1]) if right > 2 else seconds[0] * ROW * size
            return seconds[-1] + slope * (rows - places[-1])
        slope = (seconds[right] - seconds[right - 1]) / (places[right] - places[right - 1])
        return seconds[right] + slope * (rows - places[right])
