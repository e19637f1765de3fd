"""The benchmark as a picture: how fast each system is, and where xtok's time goes."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from xtok.bench.compare import Row
from xtok.errors import InvalidInputError, install
from xtok.pair import DRAFT, TARGET

_COLOURS = {"target": "#4c78a8", "draft": "#f58518", "guess": "#eeca3b", "align": "#54a24b", "pick": "#9d9da1"}


def draw(tables: Mapping[str, Sequence[Row]], title: str, path: Path) -> None:
    """Draw a benchmark into the file `path`, a PNG or SVG by its suffix: two charts for each of the titled tables."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 0.4 + 3.4 * len(tables)), layout="constrained")
    figure.suptitle(title, fontsize=11)
    charts = figure.subplots(len(tables), 2, squeeze=False)
    for (heading, rows), (speeds, splits) in zip(tables.items(), charts, strict=True):
        _draw_speeds(speeds, heading, rows)
        _draw_splits(splits, [row for row in rows if row.split is not None])
    figure.savefig(path)


def title(target: str, draft: str, model: Any, ratio: float | None, large: bool) -> str:
    """The models' names, precision, device and sizes. `model`: the target, as it is measured."""
    names = [Path(one).name if Path(one).exists() else one for one in (target, draft)]
    parts = ["the pair that ships" if (target, draft) == (str(TARGET), str(DRAFT)) else " with ".join(names)]
    parts += [str(model.dtype).removeprefix("torch."), str(model.device)]
    parts += ["both enlarged to 13 B and 160 M parameters"] * large
    parts += [] if ratio is None else [f"the target enlarged to {ratio:g} forwards of the draft"]
    return ", ".join(parts)


def check_drawable(path: Path) -> None:
    """Raises `InvalidInputError` if `path` can't be drawn to. Called before anything is measured."""
    if path.suffix not in (".png", ".svg"):
        raise InvalidInputError(f"A picture can't be {path.name!r}. Use a name that ends in .png or .svg.")
    if not path.parent.is_dir():
        raise InvalidInputError(f"There is no folder {path.parent} for the picture. Make it, or choose another.")
    if find_spec("matplotlib") is None:
        raise InvalidInputError(f"Drawing needs matplotlib. Install it with: {install('plot')}")


def _draw_speeds(chart: Any, heading: str, rows: Sequence[Row]) -> None:
    names = [row.system for row in rows]
    bars = chart.barh(names, [row.speed for row in rows], color=["#4c78a8" if "xtok" in name else "#bab0ac" for name in names])
    chart.bar_label(bars, [f" {row.speed:.2f} ({row.tokens_per_forward:.2f} tokens per forward)" for row in rows], fontsize=8)
    chart.axvline(1, color="black", linewidth=0.8, linestyle=":")
    chart.set_xlim(0, 1.9 * max(row.speed for row in rows))
    chart.set_title(f"speed, {heading} (the target alone: 1)", fontsize=10)
    chart.invert_yaxis()


def _draw_splits(chart: Any, rows: Sequence[Row]) -> None:
    left = [0.0] * len(rows)
    for part, colour in _COLOURS.items():
        shares = [100 * (row.split or {})[part] for row in rows]
        chart.barh([row.system for row in rows], shares, left=left, label=part, color=colour)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    chart.set_title("where xtok's time goes, in %", fontsize=10)
    chart.set_ylim(len(rows) + 0.6, -0.6)
    chart.legend(ncols=len(_COLOURS), fontsize=8, loc="lower center", frameon=False, columnspacing=1)
