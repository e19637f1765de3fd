"""`xtok generate`: a text, piece by piece, or JSON of many."""

import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from xtok.cli.console import STDIN, GuessOption, Models, StableOption, as_json, on_the_command_line, read_lines, read_text
from xtok.errors import InvalidInputError
from xtok.results.progress import busy

if TYPE_CHECKING:
    from xtok.assisted import XTokAssisted
    from xtok.results.generation import Generation

Piece = TypeVar("Piece")


@on_the_command_line
def generate(
    models: Models,
    prompt: Annotated[
        list[str] | None, typer.Argument(help='The text to continue, or "-" to read it from stdin.', show_default=False)
    ] = None,
    file: Annotated[
        list[Path] | None, typer.Option(help="A file whose text is a prompt. May be given again.", show_default=False)
    ] = None,
    prompts: Annotated[
        list[Path] | None, typer.Option(help="A file with one prompt per line. May be given again.", show_default=False)
    ] = None,
    draft: GuessOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of the target to write.")] = 128,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Send each prompt as a user's message, in the target's chat template.",
            show_default="--chat for --pair smollm2 and qwen, else --no-chat",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="The chat's system message.", show_default=False)] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop after this string. May be given again.", show_default=False)
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Sample at this temperature; 0 is greedy.")] = 0.0,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Sample from the most probable tokens that reach this sum.", show_default="the target's"
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, help="Sample from this many most probable tokens.", show_default="the target's")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed samples the same text.")] = None,
    stable: StableOption = None,
    show: Annotated[
        bool, typer.Option("--show", help="Color the text by what guessed it (on a terminal), and count each one's tokens.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON for each prompt: the text, and what guessed each token.")
    ] = False,
) -> None:
    """Continue a text as the target alone would. The text goes to stdout, a summary to stderr."""
    if show and json:
        raise InvalidInputError("--show has no effect with --json, which reports what guessed each token. Give one of them.")
    sampling = _sampling(temperature, top_p=top_p, top_k=top_k, seed=seed)
    texts = _texts(prompt or [], file or [], prompts or [])
    if len(texts) > 1 and not json:
        raise InvalidInputError(
            f"There are {len(texts)} prompts. Give --json for a line each; if it is one prompt, put it in quotes."
        )
    is_given = chat is not None
    if chat is None:
        chat = models.pair is not None and models.pair.chats
    if system is not None and not chat:
        raise InvalidInputError("--system has no effect without --chat. Give both.")
    first = [] if system is None else [{"role": "system", "content": system}]
    inputs = [[*first, {"role": "user", "content": text}] if chat else text for text in texts]
    arguments = {"max_new_tokens": max_new_tokens, "do_sample": False, **sampling, **_stops(stop)}
    from xtok.assisted import XTokAssisted

    xt = XTokAssisted(models.source, models.guesser(draft), stable=stable, **models.placed)
    _hint(xt, has_draft=draft is not None or models.pair is not None, is_chat=chat, is_given=is_given)
    if json:
        for text, answer in zip(texts, xt.generate(inputs, **arguments), strict=True):
            typer.echo(as_json(answer.to_dict() | {"prompt": text}, indent=None))
        return
    if show:
        _show(xt, inputs[0], arguments)
    else:
        _print(_started(xt.stream(inputs[0], **arguments)))
    answer = xt.last[0]
    typer.echo(_summary(answer), err=True)
    if answer.seed is not None:
        typer.echo(f"seed {answer.seed}", err=True)


def _hint(xt: "XTokAssisted", *, has_draft: bool, is_chat: bool, is_given: bool) -> None:
    """Say what the user may have missed. Raises `InvalidInputError` for a chat without a template. `is_given`: whether --chat
    or --no-chat was.
    """
    has_template = bool(getattr(xt.tokenizer, "chat_template", None))
    if is_chat and not has_template:
        raise InvalidInputError("The target's tokenizer has no chat template. Leave --chat out.")
    if not has_draft:
        typer.echo("xtok: no --draft was given, so no model guesses (prompt lookup and token recycling do).", err=True)
    if has_template and not (is_chat or is_given):
        typer.echo("xtok: the target has a chat template. To ask it as a chat, give --chat.", err=True)


def _texts(given: list[str], files: list[Path], lists: list[Path]) -> list[str]:
    """All prompts. Raises `InvalidInputError` if there is none."""
    files = [*(STDIN for text in given if text == "-"), *files]
    texts = [*(text for text in given if text != "-"), *(re.sub(r"\r?\n\Z", "", read_text(file)) for file in files)]
    texts += [line for file in lists for line in read_lines(file)]
    if not texts:
        raise InvalidInputError('There is no prompt. Give one in quotes, "-" to read stdin, --file or --prompts.')
    return texts


def _stops(given: list[str] | None) -> dict[str, Any]:
    """The argument of `generate` for stop strings. Raises `InvalidInputError` for an empty one, which would end any text."""
    if given and "" in given:
        raise InvalidInputError("--stop is empty. Give a text, or leave it out.")
    return {"stop_strings": given} if given else {}


def _sampling(temperature: float, **settings: Any) -> dict[str, Any]:
    """The arguments of `generate` that sample. Raises `InvalidInputError` for those that have no effect on greedy texts."""
    given = {name: value for name, value in settings.items() if value is not None}
    if temperature:
        return {"do_sample": True, "temperature": temperature, **given}
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InvalidInputError(f"{names} has no effect on a greedy text. Leave it out, or sample with --temperature.")
    return {}


def _started(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The pieces of a stream, after the first is there: until then the prompt is read, which takes a minute if it is long."""
    rest = iter(pieces)
    with busy("reading the prompt"):
        first = list(islice(rest, 1))
    return chain(first, rest)


def _print(pieces: Iterable[str]) -> None:
    for piece in pieces:
        print(piece, end="", flush=True)
    print(flush=True)


def _show(xt: "XTokAssisted", prompt: Any, arguments: dict[str, Any]) -> None:
    """Print a text, colored by what guessed it if stdout is a terminal, and to stderr how many tokens each guessed."""
    from rich.console import Console

    from xtok.results.terminal import legend, show

    out = Console(highlight=False)
    if out.is_terminal:
        show(out, _started(xt.stream_tokens(prompt, **arguments)), xt.names)
    else:
        _print(_started(xt.stream(prompt, **arguments)))
    Console(stderr=True, highlight=False).print(legend(xt.last[0].tokens, xt.last[0].drafts))


def _summary(answer: "Generation") -> str:
    stats = answer.stats
    guessed = f", {stats.accepted} of them guessed" if stats.proposed else ""
    ended = {"length": ", ended by the limit", "stop": ", complete"}.get(answer.finish_reason, "")
    tokens, passes = "token" + "s" * (stats.new_tokens != 1), "forward pass" + "es" * (stats.target_forwards != 1)
    return (
        f"{stats.new_tokens} {tokens}{guessed}{ended}, {stats.target_forwards} {passes} of the target, "
        f"{stats.tokens_per_forward:.2f} tokens per forward pass, {stats.seconds:.2f} s"
    )
