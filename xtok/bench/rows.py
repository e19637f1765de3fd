"""Prints figures as tables. Each type of row says beside its fields how they are printed."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

import typer
from rich.console import Console
from rich.table import Table

_WIDTH, _NAME = 140, 60
"""How wide tables may be, and how wide a text in a column is before it is wrapped."""


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
            _print(further or title, shown, {name: one for name, one in columns.items() if name in own or one.title == ""})
        notes |= {_title(name, column): column.note for name, column in columns.items() if column.note}
    for name, note in notes.items():
        typer.echo(f"{name}: {note}" if name else note)


def _columns(rows: Sequence[Any]) -> dict[str, Column]:
    """The columns of fields that aren't None in all rows."""
    hints = get_type_hints(type(rows[0]), include_extras=True) if rows else {}
    noted = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    found = {name: one for name, about in noted.items() for one in about if isinstance(one, Column)}
    return {name: one for name, one in found.items() if any(getattr(row, name) is not None for row in rows)}


def _title(name: str, column: Column) -> str:
    return name.replace("_", " ") if column.title is None else column.title


def _print(title: str, rows: Sequence[Any], columns: Mapping[str, Column]) -> None:
    table, cells = Table(title=title), list[list[str]]()
    for name, column in columns.items():
        values = [getattr(row, name) for row in rows]
        parts = dict.fromkeys(part for value in values if isinstance(value, Mapping) for part in value)
        split = {part: [(value or {}).get(part) for value in values] for part in parts} or {_title(name, column): values}
        for head, own in split.items():
            texts = ["" if value is None else format(value, column.form) for value in own]
            if column.of:
                texts = [text and f"{text}/{getattr(row, column.of)}" for text, row in zip(texts, rows, strict=True)]
            is_text = any(isinstance(value, str) for value in own)
            no_wrap = is_text and max(map(len, texts)) <= _NAME
            table.add_column(head, justify="left" if is_text else "right", no_wrap=no_wrap, overflow="fold")
            cells.append(texts)
    for line in zip(*cells, strict=True):
        table.add_row(*line)
    Console(highlight=False, width=_WIDTH).print(table)
