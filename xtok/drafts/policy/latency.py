"""How long forward passes take and how fast a run is, as measured. Seconds come in as numbers: there is no clock here."""

from dataclasses import dataclass, field

_MEMORY = 0.9
"""What a round keeps of its weight when the next one comes."""
_SHARE = 0.1
"""The weight of a measurement in a smoothed one."""
_HANGS = 10
"""If two measurements in a row are more than so many times the usual, the new time is believed."""
_ENOUGH = 8
"""From how many measurements on a number of rows counts fully."""
_ROW = 0.02
"""What one more row is assumed to add, as a share of a forward pass of one row, until other numbers of rows were measured."""


def rounded_down(number: int) -> int:
    """A number, rounded down to a quarter of a power of two: 1 to 8, 10, 12, 14, 16, 20, …"""
    quarter = max(0, number.bit_length() - 3)
    return number >> quarter << quarter


@dataclass
class LatencyModel:
    """Predicts the seconds of a forward pass from its number of rows, by a straight line fitted to measurements.

    `cells` maps a rounded number of rows to a tuple: how often it was measured, the mean number of rows, and the smoothed
    seconds.
    """

    cells: dict[int, tuple[int, float, float]] = field(default_factory=dict)
    _line: tuple[float, float] | None = None
    _far_off: bool = False

    def add(self, rows: int, seconds: float) -> None:
        """Take in a measurement. A single outlier is damped as a hiccup of the machine; two in a row are believed."""
        cell = rounded_down(rows)
        count, mean_rows, mean = self.cells.get(cell) or (0, float(rows), self.at(rows) or seconds)
        before, self._far_off = self._far_off, seconds > _HANGS * mean
        if before and self._far_off:
            count, mean = 0, seconds
        share = max(1 / (count + 1), _SHARE)
        seconds = min(seconds, 2 * mean)
        self.cells[cell] = (count + 1, mean_rows + share * (rows - mean_rows), mean + share * (seconds - mean))
        self._line = None

    def fit(self) -> tuple[float, float]:
        """The line: seconds of a forward pass of no rows, and seconds per row, neither below 0.

        If all measurements had the same number of rows, the seconds per row are assumed.
        """
        if self._line is None:
            self._line = self._fit()
        return self._line

    def _fit(self) -> tuple[float, float]:
        if not self.cells:
            return 0.0, 0.0
        weights = [(min(count, _ENOUGH), rows, seconds) for count, rows, seconds in self.cells.values()]
        total = sum(weight for weight, _, _ in weights)
        rows = sum(weight * row for weight, row, _ in weights) / total
        seconds = sum(weight * second for weight, _, second in weights) / total
        variance = sum(weight * (row - rows) ** 2 for weight, row, _ in weights)
        slope = _ROW * seconds / (1 + _ROW * max(0.0, rows - 1))
        if variance:
            slope = sum(weight * (row - rows) * (second - seconds) for weight, row, second in weights) / variance
        slope = min(max(slope, 0.0), seconds / max(rows, 1.0))
        return seconds - slope * rows, slope

    def at(self, rows: float) -> float:
        """The predicted seconds of a forward pass of so many rows."""
        start, slope = self.fit()
        return start + slope * rows

    def share(self, rows: float, sequences: int) -> float:
        """The predicted seconds per sequence, if so many sequences share a forward pass and have `rows` rows each."""
        return self.at(rows * sequences) / sequences


@dataclass
class Throughput:
    """Picks and seconds of the latest rounds, weighted: each round counts 0.9 times as much as the one after it."""

    picks: float = 0.0
    seconds: float = 0.0
    rounds: float = 0.0

    def add(self, picks: int, seconds: float) -> None:
        """Take in a round."""
        self.picks, self.seconds = _MEMORY * self.picks + picks, _MEMORY * self.seconds + seconds
        self.rounds = _MEMORY * self.rounds + 1

    @property
    def rate(self) -> float:
        """Picks per second."""
        return self.picks / self.seconds if self.seconds else 0.0

    @property
    def seconds_per_round(self) -> float:
        """Seconds per round."""
        return self.seconds / self.rounds if self.rounds else 0.0
