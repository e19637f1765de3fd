"""What the commands share: options, files of texts, and errors in one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from xtok.errors import InvalidInputError, XTokError
from xtok.pair import DRAFT, TARGET, prompts

SHIPPED = "the pair that ships"
TargetOption = Annotated[str, typer.Option(help="Hub id or path of the model whose output you want.", show_default=SHIPPED)]
DraftOption = Annotated[str, typer.Option(help="Hub id or path of the model that guesses.", show_default=SHIPPED)]
OWN_TARGET, OWN_DRAFT = str(TARGET), str(DRAFT)
EVERY = 6
"""Of the shipped prompts, every sixth is for measuring; the others are to tune on."""


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """What the user can mend is told in one line; anything else is a fault of xtok and keeps its traceback."""
    try:
        yield
    except (XTokError, OSError) as error:
        typer.echo(f"xtok: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from error


def sample(path: Path | None) -> list[str]:
    """The lines of a file of texts; without one, the shipped prompts. Raises `InvalidInputError`."""
    if path is None:
        return prompts()
    try:
        return path.read_text(encoding="utf-8").splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path} isn't text in UTF-8: {error}.") from error
