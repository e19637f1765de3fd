"""What the commands share: options, drafts and pairs by name, texts from files and stdin, output, and errors in one line."""

import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer

from xtok.errors import InvalidInputError, XTokError, reason
from xtok.pair import PAIRS, Pair, pair

DraftOption = Annotated[
    str | None,
    typer.Option(help="Hub id or path of the draft model.", show_default="the pair's draft model; needed for other targets"),
]
GuessOption = Annotated[
    str | None,
    typer.Option(
        help="Hub id or path of the draft model, heads (file or folder), lookup (prompt lookup and token recycling), or none.",
        show_default="the pair's draft model or heads; for other targets, prompt lookup and token recycling",
    ),
]
StableOption = Annotated[
    bool | None,
    typer.Option(
        "--stable/--no-stable",
        help="Give forward passes fixed shapes, so that the text is the same with any draft and in any batch.",
        show_default="in half precision, if the target allows it",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
STDIN = Path("-")


class Models(NamedTuple):
    """Options that say which target is loaded, and the device and precision of it and its drafts."""

    named: Annotated[
        str | None,
        typer.Option(
            "--pair",
            help=f"A named target with its draft model or heads: {', '.join(PAIRS)}. The last two are chat models, "
            "downloaded once (93 MB, 1.1 GB).",
            show_default="aozora",
        ),
    ] = None
    target: Annotated[
        str | None,
        typer.Option(
            help="Hub id or path (a folder, a .gguf file) of the model whose output you want.", show_default="the pair's"
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            help="Device of both models, such as cuda, or of target and draft: cuda,cpu.", show_default="the best there is"
        ),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Precision: float32, bfloat16, float16 or float64; or of target and draft: bfloat16,float32.",
            show_default="what their configurations say",
        ),
    ] = None

    @property
    def pair(self) -> Pair | None:
        """The named pair, that of Japanese models without a name, and None for another target. Raises `InvalidInputError` for
        --pair beside --target, and what `xtok.pair.pair` raises.
        """
        if self.named is not None and self.target is not None:
            raise InvalidInputError(
                f"--pair {self.named} names a target, and so does --target {self.target}. Give one of them."
            )
        if self.target in PAIRS and not Path(self.target).exists():
            raise InvalidInputError(f"{self.target} is the name of a pair. Did you mean --pair {self.target}?")
        return None if self.target else pair(self.named or "aozora")

    @property
    def source(self) -> str:
        """The target's hub id or path. A pair's is fetched if need be."""
        found = self.pair
        return str(self.target if found is None else found.target)

    def draft_model(self, draft: str | None) -> str:
        """The draft for a command that needs a draft model. Raises `InvalidInputError` if --draft names none, or no model."""
        if draft in ("none", "lookup"):
            raise InvalidInputError(f'--draft is "{draft}", and this command needs a draft model. Give a hub id or path.')
        if draft is not None and holds_heads(draft):
            raise InvalidInputError(
                f"{draft} holds heads, and this command needs a draft model. xtok bench --heads measures heads."
            )
        found = draft or (self.pair and self.pair.draft)
        if found is None:
            raise InvalidInputError(
                f"There is no draft model for {self.target or self.named}. Give a hub id or path as --draft."
            )
        return str(found)

    def guesser(self, draft: str | None) -> Any:
        """What guesses, as `XTokAssisted` takes it, by --draft. Without one: of a pair what guesses better, heads or a model;
        for other targets, what needs no model.
        """
        from xtok.drafts.given import without_a_model
        from xtok.drafts.heads import HeadsDrafter

        if draft is None and self.pair is not None:
            draft = str(self.pair.guesser)
        if draft in (None, "lookup"):
            return without_a_model()
        return None if draft == "none" else HeadsDrafter(draft) if holds_heads(draft) else draft

    @property
    def placed(self) -> dict[str, Any]:
        """`device` and `dtype`, as `XTokAssisted` and `placements` take them: one for both models, or for target and draft."""
        found = dict[str, Any]()
        for name, given in (("device", self.device), ("dtype", self.dtype)):
            parts = [part.strip() or None for part in (given or "").split(",")]
            found[name] = tuple(parts) if len(parts) == 2 else given
        return found

    def load(self, drafts: Sequence[str] = ()) -> tuple[Any, dict[str, Any]]:
        """The target and drafts by their names, each a model with its tokenizer. Heads are left to load with the target. Errors
        are those of `xtok.models.load.load`.
        """
        from xtok.drafts.heads import HeadsDrafter
        from xtok.models.cache import device_of
        from xtok.models.load import load, placements

        places = placements(**self.placed)
        big = load(self.source, "target", places[0])
        return big, {
            one: HeadsDrafter(one) if holds_heads(one) else load(one, "draft", places[1], device_of(big[0])) for one in drafts
        }

    def load_pair(self, draft: str | None) -> tuple[Any, Any]:
        """Target and draft model, each with its tokenizer. Errors are those of `load` and `draft_model`."""
        big, drafts = self.load([self.draft_model(draft)])
        return big, next(iter(drafts.values()))

    def load_as_xtok(self, draft: str | None) -> tuple[Any, Any]:
        """The target and a draft model, if one is named, as `XTokAssisted` loads them, each with its tokenizer."""
        from xtok.models.load import draft_model, placements, target_model

        places = placements(**self.placed)
        big = target_model(self.source, places[0])
        small = None if draft is None else draft_model(draft, places[1], big.traits.device)
        return (big.model, big.vocabulary.tokenizer), small and (small.model, small.vocabulary.tokenizer)


def on_the_command_line(command: Callable[..., None], code: int = 1) -> Callable[..., None]:
    """A command that reports errors of the user, and then exits with `code`. A parameter whose type is a NamedTuple of options
    stands for those options.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if hasattr(kind, "_field_defaults")}
    options = list[Parameter]()
    for one in signature(command).parameters.values():
        kind = groups.get(one.name)
        given = {one.name: hints[one.name]} if kind is None else get_type_hints(kind, include_extras=True)
        defaults = {one.name: one.default} if kind is None else kind._field_defaults
        options += [Parameter(name, Parameter.KEYWORD_ONLY, default=defaults[name], annotation=given[name]) for name in given]

    @wraps(command)
    def run(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field: given.pop(field) for field in kind._fields})
        with _reporting(code):
            command(**given)

    described: Any = run
    described.__signature__ = Signature(options)
    run.__annotations__ = {one.name: one.annotation for one in options}
    return run


@contextmanager
def _reporting(code: int) -> Iterator[None]:
    """Shows loading progress on terminals only. Reports in one line the errors that the user can fix; other errors are bugs
    of xtok and keep their tracebacks.
    """
    from transformers.utils import logging

    quiet: Any = logging
    quiet.set_verbosity_error()
    if not sys.stderr.isatty():
        quiet.disable_progress_bar()
    show = warnings.showwarning
    warnings.showwarning = partial(_show_warning, show)
    try:
        yield
    except BrokenPipeError:  # the reader of the output has closed it; typer ends silently
        raise
    except (XTokError, OSError) as error:
        message = " ".join(str(error).split()) if isinstance(error, XTokError) else reason(error)
        typer.echo(f"xtok: {message}", err=True)
        raise typer.Exit(code) from error
    finally:
        warnings.showwarning = show


def _show_warning(others: Callable[..., None], message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
    """Show a warning of xtok in one line, as errors are: no line of the user's code is to blame."""
    if category.__module__.startswith("xtok."):
        typer.echo(f"xtok: {message}", err=True)
    else:
        others(message, category, *where, **more)


def remembering(draft: Any, size: str | None) -> Any:
    """The drafts, in which prompt lookup remembers `size` bytes ("16M"). Raises `InvalidInputError` without a draft."""
    from xtok.drafts.given import as_list, without_a_model
    from xtok.drafts.lookup import PromptLookup

    if size is None:
        return draft
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", size.strip().upper())
    if found is None:
        raise InvalidInputError(f"--remember is {size!r}; give a number of bytes, such as 16M.")
    bound = round(float(found[1]) * 1024.0 ** " KMG".index(found[2] or " "))
    if draft is None:
        raise InvalidInputError("--remember has no effect with --draft none. Leave one of them out.")
    return [PromptLookup(memory=bound) if isinstance(one, PromptLookup) else one for one in as_list(draft, without_a_model())]


def holds_heads(draft: str) -> bool:
    """Whether a draft's path is that of heads."""
    from xtok.drafts.eagle3 import is_eagle3

    return draft.endswith(".safetensors") or is_eagle3(Path(draft))


def read_text(path: Path) -> str:
    """The text of a file, or of stdin for "-". Raises `InvalidInputError` if it can't be read or isn't in UTF-8."""
    name = "stdin" if path == STDIN else str(path)
    if path == STDIN and sys.stdin is None:
        raise InvalidInputError("stdin can't be read: it is closed. Give a text or a file, or pipe one in.")
    try:
        return (sys.stdin.buffer.read() if path == STDIN else path.read_bytes()).decode("utf-8-sig")
    except OSError as error:
        raise InvalidInputError(f"{name} can't be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{name} isn't text in UTF-8: {error}.") from error


def read_lines(path: Path) -> list[str]:
    """The lines of a file of texts that aren't empty, without their ends. Raises `InvalidInputError`."""
    return [line.rstrip("\r\n") for line in read_text(path).splitlines(keepends=True) if line.strip()]


def as_json(found: Any, indent: int | None = 2) -> str:
    """Dataclasses and the like as JSON. If stdout can't encode all characters, those that aren't ASCII are escaped."""
    plain = "utf" in (sys.stdout.encoding or "").lower()
    return json.dumps(found, ensure_ascii=not plain, indent=indent, default=asdict)
