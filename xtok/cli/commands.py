"""The command line: `xtok generate`, `serve`, `inspect`, `demo`, `tune-draft`, `train-heads` and `bench`.

What takes long to import is imported where it is used, so that `xtok --version`, help and completion don't wait for it.
"""

import re
import sys
from collections.abc import Generator
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xtok import __version__
from xtok.cli.bench import app as bench
from xtok.cli.console import (
    OWN_DRAFT,
    OWN_TARGET,
    STDIN,
    DeviceOption,
    DraftOption,
    DtypeOption,
    GuessOption,
    StableOption,
    TargetOption,
    as_json,
    each,
    goes_on_later,
    holds_heads,
    keeping,
    lines_of,
    load_pair,
    model_draft,
    on_the_command_line,
    sample,
    text_of,
    without_ends,
)
from xtok.errors import InvalidInputError
from xtok.results.progress import busy

if TYPE_CHECKING:
    from xtok.align.fit import Fit, Side
    from xtok.align.verdict import Verdict
    from xtok.assisted import XTokAssisted
    from xtok.bench.choice import Choice
    from xtok.drafts.policy.settings import Budget
    from xtok.models.load import Described
    from xtok.results.generation import Generation
    from xtok.results.stats import Stats

GUESS_LENGTH = 5
MEASURED, MEASURED_TOKENS = 8, 32
"""On how many prompts, and tokens behind each, drafts are measured."""

app = typer.Typer(
    help="Any large language model generates with the help of any small one, and gives exactly what it alone would.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")


def main() -> None:
    """The entry point of `xtok` and of `python -m xtok`."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal that has no Japanese shows it somehow
    app(prog_name="xtok")


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"xtok {__version__}")
        raise typer.Exit


@app.callback()
def _prepare(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Tell the version.")
    ] = False,
) -> None:
    pass


@app.command()
@on_the_command_line()
def generate(
    prompt: Annotated[
        list[str] | None, typer.Argument(help='The text to continue, or "-" for what stdin holds.', show_default=False)
    ] = None,
    file: Annotated[
        list[Path] | None, typer.Option(help="A file whose text is a prompt. May be given again.", show_default=False)
    ] = None,
    prompts: Annotated[
        list[Path] | None, typer.Option(help="A file with one prompt per line. May be given again.", show_default=False)
    ] = None,
    target: TargetOption = OWN_TARGET,
    draft: GuessOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens of the target to write at most.")] = 128,
    chat: Annotated[bool, typer.Option("--chat", help="Ask each prompt as a user, in the target's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="What the chat's system message says.", show_default=False)] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the text behind this. May be given again.", show_default=False)
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Sample at this temperature; 0 is greedy.")] = 0.0,
    top_p: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Sample from the likeliest tokens of this total.", show_default="the target's"),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, help="Sample from so many of the likeliest tokens.", show_default="the target's")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed samples the same text.")] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="How much to guess in every round, as DEPTHxWIDTH: 5x4.", show_default="as much as pays"),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    stable: StableOption = None,
    show: Annotated[
        bool, typer.Option("--show", help="On a terminal: tint the text by who guessed it. Tells how much is from whom.")
    ] = False,
    json_lines: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each prompt: the text, and who guessed what.")
    ] = False,
) -> None:
    """Continue a text as the target alone would. The text goes to stdout, a summary to stderr."""
    if show and json_lines:
        raise InvalidInputError("--show has no effect with --json, which tells who guessed what. Give one of them.")
    sampling = _sampling(temperature, top_p=top_p, top_k=top_k, seed=seed)
    guessing = _budget(budget, draft)
    texts = _texts(prompt or [], file or [], prompts or [])
    if len(texts) > 1 and not json_lines:
        raise InvalidInputError(f"There are {len(texts)} prompts. Give --json for a line each, or put one in quotes.")
    asked = [_messages(text, system) if chat else text for text in texts]
    if system is not None and not chat:
        raise InvalidInputError("--system has no effect without --chat. Give both.")
    arguments = {"max_new_tokens": max_new_tokens, "do_sample": False, **sampling, **({"stop_strings": stop} if stop else {})}
    from xtok.assisted import XTokAssisted

    xt = XTokAssisted(target, _draft(target, draft), budget=guessing, device=each(device), dtype=each(dtype), stable=stable)
    if draft is None and target != OWN_TARGET:
        told = "xtok: no --draft was given, so no model guesses (prompt lookup and token recycling do). Name any small one."
        typer.echo(told, err=True)
    if json_lines:
        for text, answer in zip(texts, xt.generate(asked, **arguments), strict=True):
            typer.echo(as_json({"prompt": text, **answer.to_dict()}, indent=None))
        return
    answer = _shown(xt, asked[0], arguments) if show else _printed(xt.stream(asked[0], **arguments))
    typer.echo(_summary(answer.stats), err=True)
    if answer.seed is not None:
        typer.echo(f"seed {answer.seed}", err=True)


def _texts(given: list[str], files: list[Path], lists: list[Path]) -> list[str]:
    """All prompts that are asked for. Raises `InvalidInputError` where there is none."""
    files = [*(STDIN for text in given if text == "-"), *files]
    texts = [*(text for text in given if text != "-"), *(re.sub(r"\r?\n\Z", "", text_of(file)) for file in files)]
    texts += [line for file in lists for line in lines_of(file)]
    if not texts:
        raise InvalidInputError('There is no prompt. Give one in quotes, "-" for what stdin holds, --file or --prompts.')
    return texts


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    told = [] if system is None else [{"role": "system", "content": system}]
    return [*told, {"role": "user", "content": text}]


def _sampling(temperature: float, **settings: Any) -> dict[str, Any]:
    """The arguments that sample. Raises `InvalidInputError` for those that greedy texts don't heed."""
    given = {name: value for name, value in settings.items() if value is not None}
    if temperature:
        return {"do_sample": True, "temperature": temperature, **given}
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InvalidInputError(f"{names} has no effect on a greedy text. Leave it out, or sample with --temperature.")
    return {}


def _budget(given: str | None, draft: str | None) -> "Budget | None":
    """A fixed guess. Raises `InvalidInputError` for what is none, and where nothing guesses."""
    if given is None:
        return None
    if draft == "none":
        raise InvalidInputError('--budget has no effect with --draft none. Leave it out, or give a draft ("lookup" at least).')
    found = re.fullmatch(r"(\d+)x(\d+)", given)
    if found is None:
        raise InvalidInputError(f"--budget is {given!r}; give a depth and a width, as 5x4. 5x1 is a chain.")
    from xtok.drafts.policy.settings import Budget

    return Budget(int(found[1]), width=int(found[2]), schedule="constant")


def _draft(target: str, given: str | None) -> Any:
    """What guesses. A draft that isn't named is the target's own where that ships, and else what does without a model."""
    from xtok.drafts.given import without_a_model
    from xtok.drafts.heads import HeadsDrafter
    from xtok.drafts.lookup import PromptLookup

    if given == "none":
        return None
    if given is None and target == OWN_TARGET:
        return OWN_DRAFT
    if given is None:
        return without_a_model()
    if given == "lookup":
        return PromptLookup()
    return HeadsDrafter(given) if holds_heads(given) else given


def _printed(pieces: "Generator[str, None, Generation]") -> "Generation":
    """Print a text piece by piece, and give what it was."""
    kept, ended = keeping(pieces)
    for piece in kept:
        print(piece, end="", flush=True)
    print(flush=True)
    return ended[0]


def _shown(xt: "XTokAssisted", prompt: Any, arguments: dict[str, Any]) -> "Generation":
    """Print a text tinted by who guessed it, plainly where that is no terminal, and how much is from whom to stderr."""
    from rich.console import Console

    from xtok.results.terminal import legend, show

    out = Console(highlight=False)
    if out.is_terminal:
        tokens, ended = keeping(xt.stream_tokens(prompt, **arguments))
        show(out, tokens, xt.names)
        answer = ended[0]
    else:
        answer = _printed(xt.stream(prompt, **arguments))
    Console(stderr=True, highlight=False).print(legend(answer.tokens, answer.drafts))
    return answer


def _summary(stats: "Stats") -> str:
    parts = [
        f"{stats.new_tokens} tokens",
        f"{stats.target_forwards} forwards of the target",
        f"{stats.tokens_per_forward:.2f} tokens per forward",
    ]
    if stats.proposed:
        parts.append(f"{stats.acceptance_rate:.0%} of the guesses accepted")
    return ", ".join([*parts, f"{stats.seconds:.2f} s"])


@app.command()
@on_the_command_line()
def serve(
    target: TargetOption = OWN_TARGET,
    draft: GuessOption = None,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 for any that is free.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="XTOK_API_KEY", help="What clients have to give.", show_default=False)
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="A site whose pages may ask, as https://example.org. May be given again.", show_default=False),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="How many texts are written at a time.")] = 16,
    queue: Annotated[int, typer.Option(min=0, help="How many more may wait.")] = 256,
    memory: Annotated[
        float | None, typer.Option(min=0, help="How many GiB the caches of all texts may have.", show_default="any")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="How many new tokens a text may have.")] = 4096,
    max_body: Annotated[int, typer.Option(min=1, help="How many bytes a request may have.")] = 4 * 1024**2,
    max_seconds: Annotated[float, typer.Option(min=0, help="How long a text may take, waiting included; 0: any time.")] = 600.0,
    log_texts: Annotated[bool, typer.Option("--log-texts", help="Write prompts and texts to the log, too.")] = False,
    drain_seconds: Annotated[int, typer.Option(min=0, help="How long what runs may go on after SIGTERM.")] = 30,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    stable: StableOption = None,
) -> None:
    """Serve texts over HTTP, by OpenAI's API. Ends by SIGTERM or Ctrl-C."""
    try:
        from xtok.serving.http.command import run
        from xtok.serving.http.protocol import Limits
        from xtok.serving.http.service import Service
    except ImportError as error:
        raise InvalidInputError("Serving needs further packages. Install them with: pip install 'xtok[serve]'") from error
    from xtok.assisted import XTokAssisted
    from xtok.cli.demo import SAMPLES
    from xtok.serving.engine import Engine

    name = "xtok-pair" if target == OWN_TARGET else Path(target).resolve().name if Path(target).exists() else target
    if memory is not None and not isfinite(memory * 1024**3):
        raise InvalidInputError(f"--memory is {memory}; give a finite number of GiB, as 8, or leave it out for any.")
    size = None if memory is None else int(memory * 1024**3)
    shown = list(SAMPLES)[::-1] if target == OWN_TARGET else []
    run(
        Service(name, Limits(max_tokens, max_body, max_seconds or None), prompts=shown, logs_texts=log_texts),
        lambda: XTokAssisted(target, _draft(target, draft), device=each(device), dtype=each(dtype), stable=stable),
        lambda xt: Engine(xt, batch_size=batch_size, queue=queue, memory=size),
        host=host,
        port=port,
        key=api_key,
        origins=cors_origin or (),
        drain_seconds=drain_seconds,
    )


@app.command()
@on_the_command_line()
def inspect(
    target: TargetOption = OWN_TARGET,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="Hub id or path of a model that guesses. May be given again.", show_default="the small one that ships"
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A sample in UTF-8, one text per line.", show_default="held-out prompts")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Load the weights, too, and measure which draft is best on lines of the sample.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="On how many lines to measure.", show_default=str(MEASURED))] = None,
    json_told: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say how well models fit, before any generation. Reads tokenizers and configurations, and weights for --measure alone."""
    if limit is not None and not measure:
        raise InvalidInputError("--limit has no effect without --measure. Give both.")
    given: list[str | None] = list(draft) if draft else [None]
    drafts = list(dict.fromkeys(model_draft(target, one) for one in given))
    from xtok.models.load import load_without_weights

    with busy("reading tokenizers"):
        own, texts = load_without_weights(target, "target"), sample(text)
        found = {one: _judged(own, load_without_weights(one, "draft"), texts) for one in drafts}
    if not json_told:
        _print_judged(found)
    choices = _choices(target, drafts, without_ends(texts)[: limit or MEASURED]) if measure else []
    if json_told:
        measured = {one.draft: {"measured": asdict(one)} for one in choices}
        told = [
            {"name": name, **asdict(fitting), "verdict": asdict(judged), **measured.get(name, {})}
            for name, (fitting, judged) in found.items()
        ]
        typer.echo(as_json(told[0] if len(told) == 1 else told))
    elif choices:
        _print_choices(choices)


def _judged(target: "Described", draft: "Described", texts: list[str]) -> "tuple[Fit, Verdict]":
    from xtok.align.fit import fit
    from xtok.align.verdict import verdict

    found = fit(target.tokenizer, draft.tokenizer, texts, target_window=target.window, draft_window=draft.window)
    return found, verdict(found, target.parameters, draft.parameters)


def _print_judged(found: "dict[str, tuple[Fit, Verdict]]") -> None:
    for name, (fitting, judged) in found.items():
        if len(found) > 1:
            typer.echo(typer.style(f"\n{name}", bold=True))
        typer.echo(judged.told)
        _print_fit(fitting)


def _choices(target: str, drafts: list[str], prompts: list[str]) -> "list[Choice]":
    """The drafts, the fastest first."""
    from xtok.bench.choice import compare_drafts
    from xtok.models.load import load

    loaded = {one: load(one, "draft") for one in drafts}
    return compare_drafts(load(target, "target"), loaded, prompts, max_new_tokens=MEASURED_TOKENS)


def _print_choices(choices: "list[Choice]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"measured on {choices[0].prompts} prompts, {MEASURED_TOKENS} tokens each, without prompt lookup")
    for name in ("draft", "tokens per forward", "guesses that were right", "speed"):
        table.add_column(name, justify="left" if name == "draft" else "right")
    for one in choices:
        table.add_row(one.draft, f"{one.tokens_per_forward:.2f}", f"{one.accepted:.0%}", f"{one.speed:.2f}")
    Console(highlight=False).print(table)
    best = choices[0]
    if best.speed > 1:
        typer.echo(f"Best here: {best.draft}, {best.speed:.2f} times the speed of the target alone.")
    else:
        typer.echo("The target alone is fastest here.")


def _print_fit(found: "Fit") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "target", "draft")
    for name, of_target, of_draft in zip(_ROWS, _cells(found.target, found), _cells(found.draft, found), strict=True):
        table.add_row(name, of_target, of_draft)
    Console(highlight=False).print(table)
    length = GUESS_LENGTH * found.target_tokens_per_draft_token
    typer.echo(f"The sample has {found.texts} texts with {found.characters} characters.")
    typer.echo(f"Both vocabularies have {found.shared} byte strings in common.")
    typer.echo(f"A guess of {GUESS_LENGTH} draft tokens is about {length:.1f} target tokens long.")
    if found.same:
        typer.echo("The tokenizers are the same: guesses are ids and skip the text.")
    typer.echo("What will be lost (the output stays the target's own):" if found.losses else "Nothing will be lost.")
    for loss in found.losses:
        typer.echo(f"- {loss}")


_ROWS = (
    "family",
    "normalizer",
    "vocabulary",
    "different byte strings",
    "… that the other has",
    "single bytes",
    "tokens per character",
    "… ending inside one",
    "unspellable characters",
    "rewritten characters",
    "altered texts",
    "context window",
)


def _cells(side: "Side", found: "Fit") -> tuple[str, ...]:
    return (
        side.family,
        side.normalizer,
        str(side.vocabulary),
        str(side.spellings),
        f"{side.shared:.1%}",
        f"{side.single_bytes} of 256",
        f"{side.tokens_per_character:.2f}",
        f"{side.mid_character:.1%}",
        str(len(side.unspellable)),
        str(len(side.rewritten)),
        f"{side.altered_texts} of {found.texts}",
        "unknown" if side.window is None else f"{side.window} ≈ {side.reach:.0f} characters",
    )


@app.command()
@on_the_command_line()
def demo() -> None:
    """Run the pair that ships on a few held-out prompts, beside the target alone, and compare every token.

    First with a draft that is unrelated to the target, then with the same draft tuned on the target's texts.
    """
    from xtok.cli.demo import demonstrate

    if not demonstrate():
        raise typer.Exit(1)


@app.command("tune-draft")
@on_the_command_line()
def tune(
    prompts_from: Annotated[Path, typer.Option("--prompts", help="A file with a prompt per line, or a folder of such files.")],
    out: Annotated[Path, typer.Option(help="The folder for the tuned draft.")],
    target: TargetOption = OWN_TARGET,
    draft: DraftOption = None,
    starts: Annotated[int, typer.Option(min=1, help="Behind how many beginnings of each prompt the target writes.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens it writes at a time.")] = 64,
    sampled: Annotated[float, typer.Option(min=0, max=1, help="The share of texts to sample; 0: all are greedy.")] = 0.5,
    temperature: Annotated[float | None, typer.Option(help="Of the sampled ones.", show_default="the target's")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="At most; it stops where nothing is gained.")] = 6,
    learning_rate: Annotated[float | None, typer.Option(help="Of the training.", show_default="by the draft's size")] = None,
    lora: Annotated[
        bool | None, typer.Option("--lora/--full", help="Train small matrices, or all.", show_default="LoRA above 500 M")
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Fine-tune a draft on what the target writes behind your prompts. Stopped, it goes on where it was when run again."""
    from xtok.tune import tune_draft

    texts = [line for file in _files(prompts_from) for line in lines_of(file)]
    shape: dict[str, Any] = {"starts": starts, "max_new_tokens": max_new_tokens, "sampled": sampled, "temperature": temperature}
    with goes_on_later():
        pair = load_pair(target, draft, device, dtype)
        done = tune_draft(*pair, texts, out, epochs=epochs, learning_rate=learning_rate, lora=lora, **shape)
    typer.echo(
        f"{out}: tokens per forward of the target, on prompts kept apart: {done.after:.2f} with it, {done.before:.2f} with the "
        f"draft as it was ({done.texts} texts learnt)."
    )
    for way, (before, after) in done.ways.items():
        typer.echo(f"  {way}: {after:.2f}, before {before:.2f}")


@app.command("train-heads")
@on_the_command_line()
def heads(
    data: Annotated[Path, typer.Option(help="A file with the beginning of a text per line, or a folder of such files.")],
    out: Annotated[Path, typer.Option(help="The file for the heads.")],
    target: TargetOption = OWN_TARGET,
    count: Annotated[int, typer.Option("--heads", min=1, help="How many tokens they guess behind the next one.")] = 4,
    starts: Annotated[int, typer.Option(min=1, help="Behind how many beginnings of each text the target writes.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens it writes at a time.")] = 64,
    sampled: Annotated[float, typer.Option(min=0, max=1, help="The share of texts to sample; 0: all are greedy.")] = 0.0,
    temperature: Annotated[float | None, typer.Option(help="Of the sampled ones.", show_default="the target's")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="At most; it stops where nothing is gained.")] = 8,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Train heads on the frozen target, on what it writes. Stopped, it goes on where it was when run again."""
    from rich.console import Console
    from rich.table import Table

    from xtok.models.load import load
    from xtok.models.placement import placements
    from xtok.tune import train_heads

    texts = [line for file in _files(data) for line in lines_of(file)]
    shape: dict[str, Any] = {"starts": starts, "max_new_tokens": max_new_tokens, "sampled": sampled, "temperature": temperature}
    with goes_on_later():
        model = load(target, "target", placements(each(device), each(dtype), None)[0])
        done = train_heads(model, texts, out, heads=count, epochs=epochs, **shape)
    table = Table(title="how often a head's guesses were right, on texts kept apart")
    for name in ("head", "1st", "2nd", "3rd", "4th", "5th"):
        table.add_column(name, justify="right")
    for i, ranks in enumerate(done.accuracy, start=1):
        table.add_row(str(i), *(f"{share:.3f}" for share in ranks))
    Console(highlight=False, width=100).print(table)
    typer.echo(f"{out}: {done.after:.2f} tokens per forward of the target on texts kept apart ({done.texts} texts learnt).")


def _files(path: Path) -> list[Path]:
    """The file, or the text files of a folder, in order."""
    return sorted(path.rglob("*.txt")) if path.is_dir() else [path]
