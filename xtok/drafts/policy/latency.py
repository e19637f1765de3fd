"""Models how long forward passes and rounds take, from measured seconds. There is no clock here."""

from bisect import bisect
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil
from typing import NamedTuple

SHARE = 0.1
"""The weight of a measurement in a smoothed one."""
ENOUGH = round(1 / SHARE)
"""How many measurements tell more than chance."""
ROUNDS = 64
"""For how many rounds, about, what was measured or counted holds. All trials together may lose one token in twice as many."""
ROW = 0.02
"""What one more row of one sequence is assumed to add to a forward pass, as a share, until other numbers of rows were measured.
"""


def _cell_of(rows: float) -> int:
    """The cell for a number of rows: 1 is in cell 0, 2 in 1, 3 and 4 in 2, 5 to 8 in 3, and so on."""
    return (ceil(rows) - 1).bit_length()


class _Cell(NamedTuple):
    """What was measured with similar numbers of rows: how often, the mean number of rows, the smoothed seconds, the latest
    seconds, and after how many measurements in all those came.
    """

    times: int
    rows: float
    seconds: float
    latest: float
    last: int


@dataclass
class LatencyModel:
    """Predicts seconds from a number of rows: a curve through measurements that never falls.

    It interpolates between the numbers of rows that were measured, for latency jumps at some of them (a kernel's tile is
    full, say). `cells`: what was measured, by the cell of a number of rows. `row`: what one more row is assumed to add, as a
    share of the seconds of one row, while the curve has at most two points.
    """

    cells: dict[int, _Cell] = field(default_factory=dict)
    row: float = ROW
    _count: int = 0
    _curve: tuple[list[float], list[float]] | None = None

    def add(self, rows: float, seconds: float) -> None:
        """Add a measurement. The first one counts only until there is a second, since a forward pass of a new shape often takes
        longer the first time.

        Hiccups only make things slower, and seldom hit two successive measurements of a cell. So it counts as at most 1.2
        times the mean so far, or as the measurement before. The first counts as at most 1.5 times the prediction, and the
        second as at most the first. The mean counts as at most twice the new one.
        """
        cell = _cell_of(rows)
        count, mean_rows, mean, latest, _ = self.cells.get(cell) or _Cell(0, rows, self.at(rows), 0.0, 0)
        mean = mean or seconds  # clocks of some systems tick coarsely
        share = max(1 / max(1, count), SHARE)
        counted = min(seconds, max({0: 1.5, 1: 1.0}.get(count, 1.2) * mean, latest))
        mean = min(mean, 2 * counted)
        self._count += 1
        rows, mean = mean_rows + share * (rows - mean_rows), mean + share * (counted - mean)
        self.cells[cell] = _Cell(count + 1, rows, mean, seconds, self._count)
        self._curve = None

    def knows(self, rows: float) -> bool:
        """Whether about this many rows were measured so often that a change must be one of the machine."""
        cell = self.cells.get(_cell_of(rows))
        return cell is not None and cell.times >= ENOUGH

    def at(self, rows: float) -> float:
        """The predicted seconds of a forward pass with `rows` rows; 0 before anything was measured.

        If more rows took less time than fewer rows, both are taken to take less. If the curve has only two points, they may
        differ by what guessing itself takes, however many rows there are. So each row beyond them is then assumed to add no
        more than `row`. With more points, it is assumed to add no less than the others did on average from the second point
        on: two that happened to take the same time would make any number of rows look free.
        """
        if self._curve is None:
            self._curve = self._fitted()
        places, seconds = self._curve
        if not places:
            return 0.0
        if len(places) == 1 or rows < places[0]:
            return seconds[0] * (1 + self.row * (rows - 1)) / (1 + self.row * (places[0] - 1))
        right = min(max(1, bisect(places, rows)), len(places) - 1)
        slope = (seconds[right] - seconds[right - 1]) / (places[right] - places[right - 1])
        if rows > places[-1]:
            later = (seconds[-1] - seconds[1]) / max(1.0, places[-1] - places[1])
            slope = min(slope, self.row * seconds[0]) if len(places) == 2 else max(slope, later)
        return seconds[right] + slope * (rows - places[right])

    def _fitted(self) -> tuple[list[float], list[float]]:
        """The curve's points.

        Old measurements between newer ones are left out, so that a number of rows that seemed too expensive is tried again. Old
        ones at the ends stay: without them, nothing would be known about such numbers of rows.
        """
        fresh = [number for number, cell in self.cells.items() if self._count - cell.last < ROUNDS]
        points = [
            cell for number, cell in sorted(self.cells.items()) if number in fresh or not min(fresh) < number < max(fresh)
        ]
        return [cell.rows for cell in points], [*accumulate((cell.seconds for cell in reversed(points)), min)][::-1]


class NominalLatency(LatencyModel):
    """Predicts `seconds` for a forward pass of one row, and the share `ROW` of it for each further row, whatever was measured.

    SmolLM2 135M in bfloat16 on a CPU had 2.7% for each row.
    """

    def __init__(self, seconds: float = 1.0) -> None:
        super().__init__({0: _Cell(1, 1.0, seconds, seconds, 0)})

    def add(self, rows: float, seconds: float) -> None:
        """Do nothing."""


@dataclass
class BatchSize:
    """What is known of rounds with one (rounded) number of sequences that share forward passes.

    `rounds`: predicts the seconds of a round, without those of drafts, by the rows of each sequence. `spacing`: after how many
    rounds with guesses comes one without; `since`: how many there were since the last. `picks`, `plain`: picks of a sequence in
    the latest rounds, and how many rounds without guesses would have taken as long. `rows`: how many rows a sequence usually
    has in rounds with guesses.
    """

    rounds: LatencyModel = field(default_factory=LatencyModel)
    spacing: int = 4
    since: int = 4
    picks: float = 0.0
    plain: float = 0.0
    rows: float = 4.0

    @property
    def speedup(self) -> float:
        """The speed with guesses, in multiples of the speed without any: at least 1."""
        return max(1.0, self.picks / self.plain) if self.plain else 1.0

    def add(self, picks: float, plain: float) -> None:
        """Learn from a round. One far better than others, such as amid a repetition, counts as at most twice as good."""
        picks = min(picks, 1 + 2 * self.speedup * plain)
        self.picks, self.plain = (1 - SHARE) * self.picks + picks, (1 - SHARE) * self.plain + plain
