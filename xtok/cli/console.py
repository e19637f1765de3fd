"""What the commands share: options, texts from files and stdin, what is told of drafts, and errors in one line."""

import json
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from xtok.errors import InvalidInputError, XTokError, reason
from xtok.pair import DRAFT, TARGET, prompts

T = TypeVar("T")
R = TypeVar("R")
Found = TypeVar("Found")
SHIPPED = "the pair that ships"
OWN_TARGET, OWN_DRAFT = str(TARGET), str(DRAFT)
TargetOption = Annotated[str, typer.Option(help="Hub id or path of the model whose output you want.", show_default=SHIPPED)]
DraftOption = Annotated[
    str | None, typer.Option(help="Hub id or path of the model that guesses.", show_default="the small one that ships")
]
GuessOption = Annotated[
    str | None,
    typer.Option(
        help='Hub id or path of the model that guesses, a file of heads, "lookup" for what the text repeats, or "none".',
        show_default="the small one that ships; for other targets, none but lookup and token recycling",
    ),
]
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
StableOption = Annotated[
    bool | None,
    typer.Option(
        "--stable/--no-stable",
        help="Forward passes of fixed shapes: the same text with any draft and beside any other texts, in every bit.",
        show_default="in half precision, if the target can be held so",
    ),
]
EVERY = 6
"""Of the shipped prompts, every sixth is for measuring; the others are to tune on."""
STDIN = Path("-")


@contextmanager
def on_the_command_line() -> Iterator[None]:
    """Loading is shown on a terminal alone. What the user can mend is told in one line; anything else is a fault of xtok and
    keeps its traceback.
    """
    from transformers.utils import logging

    quiet: Any = logging
    quiet.set_verbosity_error()
    if not sys.stderr.isatty():
        quiet.disable_progress_bar()
    try:
        yield
    except BrokenPipeError:  # whoever read the output has seen enough; typer ends without a word
        raise
    except (XTokError, OSError) as error:
        told = " ".join(str(error).split()) if isinstance(error, XTokError) else reason(error)
        typer.echo(f"xtok: {told}", err=True)
        raise typer.Exit(1) from error


@contextmanager
def goes_on_later() -> Iterator[None]:
    """Says of a training that is stopped by Ctrl-C how to go on with it."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("xtok: stopped. What was done is kept: the same command goes on where it was.", err=True)
        raise typer.Exit(130) from None


def model_draft(target: str, draft: str | None) -> str:
    """The draft of a command that needs a model. Raises `InvalidInputError` for heads."""
    if draft is None and target != OWN_TARGET:
        typer.echo(
            "xtok: no --draft was given, so the small Japanese model that ships guesses. It was trained for no other target "
            "than its own, and fits others ill.",
            err=True,
        )
    if draft is not None and holds_heads(draft):
        raise InvalidInputError(f"{draft} holds heads, and this needs a draft model. Use xtok generate for heads.")
    return draft or OWN_DRAFT


def each(option: str | None) -> str | tuple[str | None, str | None] | None:
    """An option for both models, or with a comma for target and draft."""
    if option is None or option.count(",") != 1:
        return option
    target, draft = (part.strip() or None for part in option.split(","))
    return target, draft


def load_pair(target: str, draft: str | None, device: str | None, dtype: str | None) -> tuple[Any, Any]:
    """Target and draft, each with its tokenizer, placed as the options say. Errors are those of `load` and `model_draft`."""
    from xtok.models.cache import device_of
    from xtok.models.load import load
    from xtok.models.placement import placements

    places = placements(each(device), each(dtype), None)
    named = model_draft(target, draft)
    big = load(target, "target", places[0])
    return big, load(named, "draft", places[1], device_of(big[0]))


def holds_heads(draft: str) -> bool:
    """Whether a draft is a file of heads: models are folders and hub ids."""
    return draft.endswith(".safetensors")


def text_of(path: Path) -> str:
    """A file as text, "-" for stdin. Raises `InvalidInputError` for what can't be read or isn't in UTF-8."""
    name = "stdin" if path == STDIN else str(path)
    if path == STDIN and sys.stdin is None:
        raise InvalidInputError("stdin can't be read: it is closed. Give a text or a file, or pipe one in.")
    try:
        return (sys.stdin.buffer.read() if path == STDIN else path.read_bytes()).decode("utf-8-sig")
    except OSError as error:
        raise InvalidInputError(f"{name} can't be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{name} isn't text in UTF-8: {error}.") from error


def sample(path: Path | None) -> list[str]:
    """The lines of a file of texts; without one, the shipped prompts. Raises `InvalidInputError`."""
    return prompts() if path is None else text_of(path).splitlines(keepends=True)


def lines_of(path: Path) -> list[str]:
    """The lines of `sample` that aren't empty, without their ends. Raises `InvalidInputError`."""
    return without_ends(sample(path))


def without_ends(lines: list[str]) -> list[str]:
    """Those that aren't empty, without their ends."""
    return [line.rstrip("\r\n") for line in lines if line.strip()]


def keeping(items: Generator[T, None, R]) -> tuple[Iterator[T], list[R]]:
    """The items of a generator, and a list that gets what it returns."""
    returned: list[R] = []

    def kept() -> Iterator[T]:
        returned.append((yield from items))

    return kept(), returned


def as_json(found: Any, indent: int | None = 2) -> str:
    """JSON of dataclasses and the like. Where the output has no room for all characters, they are escaped."""
    plain = "utf" in (sys.stdout.encoding or "").lower()
    return json.dumps(found, ensure_ascii=not plain, indent=indent, default=asdict)


def tell(found: Found, show: Callable[[Found], None], json_told: bool) -> None:
    """Print what was found, as JSON or as tables."""
    if json_told:
        typer.echo(as_json(found))
    else:
        show(found)
