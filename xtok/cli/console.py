"""What the commands share: options, drafts and pairs by name, texts from files and stdin, output, and errors in one line."""

import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer

from xtok.errors import InvalidInputError, XTokError, reason
from xtok.pair import DRAFT, PAIRS, TARGET, pair, prompts

OWN_TARGET, OWN_DRAFT = str(TARGET), str(DRAFT)
PairOption = Annotated[
    str | None,
    typer.Option(
        "--pair",
        help=f"A named target with its draft model and heads: {' or '.join(PAIRS)}, a chat model, downloaded once (93 MB).",
        show_default="aozora",
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option(help="Hub id or path (a folder, a .gguf file) of the model whose output you want.", show_default="the pair's"),
]
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
DeviceOption = Annotated[
    str | None,
    typer.Option(
        help="Device of both models, such as cuda, or of target and draft: cuda,cpu.", show_default="the best there is"
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        help="Precision: float32, bfloat16, float16 or float64; or of target and draft: bfloat16,float32.",
        show_default="what their configurations say",
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
EVERY = 6
"""Every sixth of the shipped prompts is for measuring; the others are for tuning."""
STDIN = Path("-")


class Models(NamedTuple):
    """Options that say which target is loaded, and the device and precision of it and its drafts."""

    named: PairOption = None
    target: TargetOption = None
    device: DeviceOption = None
    dtype: DtypeOption = None

    def sources(self, draft: str | None = None) -> tuple[str, str | None]:
        """The target and the draft that --pair, --target and --draft name; no draft if none is named.

        Raises `InvalidInputError` for --pair beside --target, and what `pair` and its target raise.
        """
        if self.named is None:
            if self.target in PAIRS and not Path(self.target).exists():
                raise InvalidInputError(f"{self.target} is the name of a pair. Did you mean --pair {self.target}?")
            return self.target or OWN_TARGET, draft
        if self.target is not None:
            raise InvalidInputError(
                f"--pair {self.named} names a target, and so does --target {self.target}. Give one of them."
            )
        found = pair(self.named)
        return str(found.target), draft or str(found.draft)

    def guess_sources(self, draft: str | None) -> tuple[str, str | None]:
        """As `sources`, for commands that take heads, too. Without --draft, a named pair gives what guesses better: heads or
        draft model.
        """
        found, of_pair = self.sources(draft)
        return found, of_pair if self.named is None or draft else str(pair(self.named).guesser)

    @property
    def placed(self) -> dict[str, Any]:
        """`device` and `dtype`, as `XTokAssisted` and `placements` take them."""
        return {"device": by_model(self.device), "dtype": by_model(self.dtype)}

    def load_target(self) -> tuple[Any, Any]:
        """The target and its tokenizer. Errors are those of `load`."""
        from xtok.models.load import load, placements

        return load(self.sources()[0], "target", placements(**self.placed)[0])

    def load_pair(self, draft: str | None) -> tuple[Any, Any]:
        """Target and draft, each with its tokenizer. Errors are those of `load` and `model_draft`."""
        return load_pair(*self.sources(draft), self.device, self.dtype)


def on_the_command_line(command: Callable[..., None]) -> Callable[..., None]:
    """A command that reports errors of the user. A parameter whose type is a NamedTuple of options stands for those options."""
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
        with _reporting():
            command(**given)

    described: Any = run
    described.__signature__ = Signature(options)
    run.__annotations__ = {one.name: one.annotation for one in options}
    return run


@contextmanager
def _reporting() -> Iterator[None]:
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
        raise typer.Exit(1) from error
    finally:
        warnings.showwarning = show


def _show_warning(others: Callable[..., None], message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
    """Show a warning of xtok in one line, as errors are: no line of the user's code is to blame."""
    if category.__module__.startswith("xtok."):
        typer.echo(f"xtok: {message}", err=True)
    else:
        others(message, category, *where, **more)


def held_out(named: str | None) -> list[str]:
    """Prompts to measure on: those of a named pair, or every sixth of those of the pair that ships."""
    return prompts()[::EVERY] if named is None or named == "aozora" else pair(named).prompts


def model_draft(target: str, draft: str | None) -> str:
    """The draft for a command that needs a draft model. Raises `InvalidInputError` if --draft names none, or no model."""
    if draft is None and target != OWN_TARGET:
        raise InvalidInputError(f"There is no draft model for {target}. Give a hub id or path as --draft.")
    if draft in ("none", "lookup"):
        raise InvalidInputError(f'--draft is "{draft}", and this command needs a draft model. Give a hub id or path.')
    if draft is not None and holds_heads(draft):
        raise InvalidInputError(
            f"{draft} holds heads, and this command needs a draft model. xtok bench chats --heads measures heads."
        )
    return draft or OWN_DRAFT


def needs_no_model(target: str, draft: str | None) -> bool:
    """Whether no model guesses: --draft is "lookup", or is left out for a target without a draft model."""
    return draft == "lookup" or (draft is None and target != OWN_TARGET)


def drafts_of(target: str, draft: str | None) -> Any:
    """What guesses, as `XTokAssisted` takes it, by --draft. Without one: the shipped draft for the shipped target, and what
    needs no model for others.
    """
    from xtok.drafts.given import without_a_model
    from xtok.drafts.heads import HeadsDrafter

    if draft == "none":
        return None
    if needs_no_model(target, draft):
        return without_a_model()
    if draft is None:
        return OWN_DRAFT
    return HeadsDrafter(draft) if holds_heads(draft) else draft


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


def by_model(option: str | None) -> str | tuple[str | None, str | None] | None:
    """An option for both models, or for target and draft if it has a comma."""
    if option is None or option.count(",") != 1:
        return option
    target, draft = (part.strip() or None for part in option.split(","))
    return target, draft


def load_pair(target: str, draft: str | None, device: str | None, dtype: str | None) -> tuple[Any, Any]:
    """Target and draft, each with its tokenizer, placed as the options say. Errors are those of `load` and `model_draft`."""
    big, drafts = load_models(target, [model_draft(target, draft)], device, dtype)
    return big, next(iter(drafts.values()))


def load_models(target: str, drafts: Sequence[str], device: str | None, dtype: str | None) -> tuple[Any, dict[str, Any]]:
    """As `load_pair`, for several drafts, by their names. Heads are left to load with the target."""
    from xtok.drafts.heads import HeadsDrafter
    from xtok.models.cache import device_of
    from xtok.models.load import load, placements

    places = placements(device=by_model(device), dtype=by_model(dtype))
    big = load(target, "target", places[0])
    return big, {
        one: HeadsDrafter(one) if holds_heads(one) else load(one, "draft", places[1], device_of(big[0])) for one in drafts
    }


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


def print_found(found: Any, tables: Mapping[str, Sequence[Any]], as_plain_json: bool) -> None:
    from xtok.bench.rows import print_tables

    if as_plain_json:
        typer.echo(as_json(found))
    else:
        print_tables(tables)
