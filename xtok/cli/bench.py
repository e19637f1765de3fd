"""`xtok bench`: its two commands, their options, and the models and texts that they pass to the benchmarks."""

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from xtok.cli.console import (
    DraftOption,
    JsonOption,
    Models,
    held_out,
    load_pair,
    needs_no_model,
    on_the_command_line,
    print_found,
    read_lines,
)
from xtok.errors import InvalidInputError
from xtok.pair import pair

LimitOption = Annotated[
    int | None, typer.Option("--limit", min=1, help="Use only this many prompts, the first ones.", show_default="all")
]
TokensOption = Annotated[int, typer.Option(min=1, help="How many tokens to write for each prompt.")]

app = typer.Typer()


def unless_a_command_follows(measure: Callable[..., None]) -> Callable[..., None]:
    """Calls `measure` if no command follows, and refuses options before the name of a command."""

    @wraps(measure)
    def run(ctx: typer.Context, **options: Any) -> None:
        sources: Any = [ctx.get_parameter_source(name) for name in options]
        if ctx.invoked_subcommand is None:
            measure(ctx=ctx, **options)
        elif any(one.name == "COMMANDLINE" for one in sources):
            ctx.fail(f"Give options after the name of the command: xtok bench {ctx.invoked_subcommand} …")

    return run


@app.callback(invoke_without_command=True)
@unless_a_command_follows
@on_the_command_line
def compare(
    ctx: typer.Context,
    models: Models,
    file: Annotated[
        Path | None, typer.Option("--prompts", help="A file with one prompt per line.", show_default="20 held-out prompts")
    ] = None,
    limit: LimitOption = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(help="How to generate: greedy, penalty or sampled. May be given again.", show_default="all three"),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help='Hub id or path of the draft model, or "lookup" for prompt lookup and token recycling alone.',
            show_default="the pair's; for other targets, lookup",
        ),
    ] = None,
    max_new_tokens: TokensOption = 64,
    guess_length: Annotated[int, typer.Option(min=1, help="How many draft tokens to guess if the length is fixed.")] = 5,
    batch: Annotated[int, typer.Option(min=1, help="How many texts to write at a time.")] = 1,
    ratio: Annotated[
        float | None,
        typer.Option(min=1, help="Enlarge the target until its forward pass takes this many times as long as the draft's."),
    ] = None,
    large: Annotated[
        bool, typer.Option("--large", help="Enlarge both models to the sizes of llm-jp-13B and open-calm-small: 27 GB.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Measure on your machine: the target alone, transformers' universal assisted generation and xtok, in turns on the same
    prompts. For chat models, use xtok bench chats.
    """
    from xtok.assisted import XTokAssisted
    from xtok.bench import compare, runs
    from xtok.bench.stretch import enlarged

    settings = runs.named_settings(setting)
    texts = held_out(models.named) if file is None else read_lines(file)
    target, draft = models.sources(draft)
    small: Any = None
    if needs_no_model(target, draft):
        if unused := [f"--{name}" for name, value in {"ratio": ratio, "large": large}.items() if value]:
            raise InvalidInputError(f"{', '.join(unused)} has no effect without a draft model. Give one as --draft.")
        big = models.load_target()
    else:
        big, small = enlarged(load_pair(target, draft, models.device, models.dtype), ratio, large)
    shape = {"max_new_tokens": max_new_tokens, "guess_length": guess_length, "batch": batch}
    found = {name: compare.compare(big, small, texts[:limit], way, **shape) for name, way in settings.items()}
    titles = {name: way.title for name, way in settings.items()}
    seconds = runs.seconds_of(lambda: XTokAssisted(big, small))
    device = compare.described(big[0])
    shown = {"device": device, "build_seconds": seconds, "titles": titles, "settings": found}
    print_found(shown, {titles[name]: rows for name, rows in found.items()}, json)
    if not json:
        typer.echo(f"{device}. Making an instance of the loaded models takes {seconds:.2f} s.")


@app.command()
@on_the_command_line
def chats(
    models: Models,
    draft: DraftOption = None,
    file: Annotated[
        Path | None,
        typer.Option("--prompts", help="A file with one question per line.", show_default="32 questions in eight kinds"),
    ] = None,
    heads: Annotated[
        Path | None, typer.Option(help="A file of heads, to measure as well.", show_default="those of --pair")
    ] = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = 128,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="How to generate: greedy, sampled (T = 0.8), or own (sampled, by the target's generation config). "
            "May be given again.",
            show_default="all three",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Chats on one thread, by kinds of questions: the target alone, transformers' assisted generation, and xtok."""
    import torch

    from xtok.bench import chats, compare, runs
    from xtok.drafts.heads import HeadsDrafter

    settings = runs.named_settings(setting, chats.CHAT_SETTINGS)
    asked = chats.questions() if file is None else [chats.Question("of the file", line) for line in read_lines(file)]
    target, small = models.load_pair(draft)
    heads = heads or (None if models.named is None else pair(models.named).heads)
    shared: dict[str, Any] = {"max_new_tokens": max_new_tokens, "heads": None if heads is None else HeadsDrafter(heads)}
    torch.set_num_threads(1)  # models this small gain nothing from more
    found = {name: chats.compare_chats(target, small, asked[:limit], way, **shared) for name, way in settings.items()}
    kinds = [row for rows, _ in found.values() for row in rows]
    by_setting = {name: rows for name, (_, rows) in found.items()}
    titles = {name: settings[name].title for name in found}
    shape = {"threads": 1, "dtype": str(target[0].dtype).removeprefix("torch."), "max_new_tokens": max_new_tokens}
    named = runs.XTOK if heads is None else compare.HEADS
    tables: dict[str, Sequence[Any]] = {f"by kind of question, up to {max_new_tokens} tokens: {named}": kinds}
    tables |= {titles[name]: rows for name, rows in by_setting.items()}
    print_found({**shape, "titles": titles, "kinds": kinds, "settings": by_setting}, tables, json)
    if not json:
        typer.echo(f"One thread, {shape['dtype']}, {len(asked[:limit])} questions.")
