"""Prints figures as tables. Each type of row says beside its fields how they are printed."""

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any, NamedTuple, get_type_hints

import typer
from rich.console import Console
from rich.table import Table

_WIDTH, _TITLE, _NAME = 140, 12, 60
"""How wide tables may be, and how wide the title of a column, and a text in it, are before they are wrapped."""


class Column(NamedTuple):
    """How a field is printed: `speed: Annotated[float, Column(form=".2f", note="the median over prompts")]`.

    A field without a `Column` isn't printed, nor is one that is None in all rows. A dictionary has a column for each key.

    `title`: by default the field's name; the column titled "" names the row. `form`: a format specification. `of`: another
    field, printed after a slash. `note`: what the figures mean, printed once after all tables. `table`:
    the title of a separate table for this column.
    """

    title: str | None = None
    form: str = ""
    of: str = ""
    note: str = ""
    table: str = ""


def print_tables(tables: Mapping[str, Sequence[Any]]) -> None:
    """Print tables by title, and then the notes. All rows of a table have one type, a dataclass or a NamedTuple."""
    notes: dict[str, str] = {}
    for title, rows in tables.items():
        columns = _columns(rows)
        for further in dict.fromkeys(column.table for column in columns.values()):
            own = {name: one for name, one in columns.items() if one.table == further}
            shown = [row for row in rows if any(getattr(row, name) is not None for name in own)]
            named = {name: one for name, one in columns.items() if name in own or one.title == ""}
            _print(further or title, _grid(shown, named))
        filled = {name for name in columns if any(getattr(row, name) is not None for row in rows)}
        notes |= {_title(name, column): column.note for name, column in columns.items() if column.note and name in filled}
    for name, note in notes.items():
        typer.echo(f"{name}: {note}" if name else note)


def _columns(rows: Sequence[Any]) -> dict[str, Column]:
    hints = get_type_hints(type(rows[0]), include_extras=True) if rows else {}
    noted = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: one for name, found in noted.items() for one in found if isinstance(one, Column)}


def _title(name: str, column: Column) -> str:
    return name.replace("_", " ") if column.title is None else column.title


def _grid(rows: Sequence[Any], columns: Mapping[str, Column]) -> list[tuple[str, bool, list[str]]]:
    """The title of each column, whether it is text, and its cells."""
    grid = []
    for name, column in columns.items():
        values = [getattr(row, name) for row in rows]
        parts = dict.fromkeys(part for value in values if isinstance(value, Mapping) for part in value)
        grid += [(part, False, [_cell((value or {}).get(part), column) for value in values]) for part in parts]
        if not parts and any(value is not None for value in values):
            others = [f"/{getattr(row, column.of)}" if column.of else "" for row in rows]
            cells = [_cell(value, column) + other * (value is not None) for value, other in zip(values, others, strict=True)]
            grid.append((_title(name, column), any(isinstance(value, str) for value in values), cells))
    return grid


def _cell(value: Any, column: Column) -> str:
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    return format(value, column.form)


def _print(title: str, grid: list[tuple[str, bool, list[str]]]) -> None:
    table = Table(title=title)
    for name, text, cells in grid:
        table.add_column(
            "\n".join(wrap(name, _TITLE, break_long_words=False)),
            justify="left" if text else "right",
            no_wrap=text and max(map(len, cells), default=0) <= _NAME,
            overflow="fold",
        )
    for line in zip(*(cells for *_, cells in grid), strict=True):
        table.add_row(*line)
    Console(highlight=False, width=_WIDTH).print(table)
