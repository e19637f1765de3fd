"""What the commands share: options, files of texts, and errors in one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from xtok.errors import InvalidInputError, XTokError, reason
from xtok.models.cache import device_of
from xtok.models.load import load
from xtok.models.placement import placements
from xtok.pair import DRAFT, TARGET, prompts

SHIPPED = "the pair that ships"
TargetOption = Annotated[str, typer.Option(help="Hub id or path of the model whose output you want.", show_default=SHIPPED)]
DraftOption = Annotated[str, typer.Option(help="Hub id or path of the model that guesses.", show_default=SHIPPED)]
DeviceOption = Annotated[
    str | None,
    typer.Option(help="Where the models are: cpu, cuda, … Target and draft apart: cuda,cpu.", show_default="the best there is"),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        help="Their precision: float32, bfloat16, float16 or float64. Target and draft apart: bfloat16,float32.",
        show_default="what their configurations say",
    ),
]
OWN_TARGET, OWN_DRAFT = str(TARGET), str(DRAFT)
EVERY = 6
"""Of the shipped prompts, every sixth is for measuring; the others are to tune on."""


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """What the user can mend is told in one line; anything else is a fault of xtok and keeps its traceback."""
    try:
        yield
    except (XTokError, OSError) as error:
        told = " ".join(str(error).split()) if isinstance(error, XTokError) else reason(error)
        typer.echo(f"xtok: {told}", err=True)
        raise typer.Exit(1) from error


def sample(path: Path | None) -> list[str]:
    """The lines of a file of texts; without one, the shipped prompts. Raises `InvalidInputError`."""
    if path is None:
        return prompts()
    try:
        return path.read_text(encoding="utf-8").splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path} isn't text in UTF-8: {error}.") from error


def each(option: str | None) -> str | tuple[str | None, str | None] | None:
    """An option for both models, or with a comma for target and draft."""
    if option is None or option.count(",") != 1:
        return option
    target, draft = (part.strip() or None for part in option.split(","))
    return target, draft


def load_pair(target: str, draft: str, device: str | None, dtype: str | None) -> tuple[Any, Any]:
    """Target and draft, each with its tokenizer, placed as the options say. Errors are those of `load`."""
    places = placements(each(device), each(dtype), None)
    big = load(target, "target", places[0])
    return big, load(draft, "draft", places[1], device_of(big[0]))
