"""`xtok bench`: its commands, their options, and the models and texts that they pass to the benchmarks."""

from typing import Annotated, Any

import typer

from xtok.cli.bench_chats import chats
from xtok.cli.bench_options import (
    GuessOption,
    Sample,
    Size,
    TokensOption,
    Ways,
    unless_a_command_follows,
)
from xtok.cli.console import (
    EVERY,
    OWN_DRAFT,
    OWN_TARGET,
    DraftOption,
    JsonOption,
    Models,
    load_pair,
    needs_no_model,
    on_the_command_line,
    print_found,
)
from xtok.errors import InvalidInputError
from xtok.pair import prompts, quoting, technical

app = typer.Typer()


@app.callback(invoke_without_command=True)
@app.command("compare", help="The target alone, transformers' universal assisted generation, and xtok: the default command.")
@unless_a_command_follows
@on_the_command_line
def compare_systems(
    ctx: typer.Context,
    models: Models,
    sample: Sample,
    ways: Ways,
    size: Size,
    draft: Annotated[
        str | None,
        typer.Option(
            help='Hub id or path of the draft model, or "lookup" for prompt lookup and token recycling alone.',
            show_default="the pair's; for other targets, lookup",
        ),
    ] = None,
    max_new_tokens: TokensOption = 64,
    guess_length: GuessOption = 5,
    batch: Annotated[int, typer.Option(min=1, help="How many texts to write at a time.")] = 1,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Also fine-tune the draft, which takes minutes, and measure it. Of --prompts, every other line is for tuning.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Measure on your machine. Without a command: the target alone, transformers' universal assisted generation and xtok, in
    turns on the same prompts. Each command has options of its own.
    """
    from xtok.assisted import XTokAssisted
    from xtok.bench import compare, pairs, runs

    settings = ways.settings()
    if tune:
        from xtok.tune.work import check_installed

        check_installed("accelerate", "peft")
    texts, others = sample.prompts(models.named), [text for i, text in enumerate(prompts()) if i % EVERY]
    if tune and (sample.file is not None or models.named not in (None, "aozora")):
        texts, others = texts[::2], texts[1::2]
    target, draft = models.sources(draft)
    drafts: dict[str, Any]
    if needs_no_model(target, draft):
        if unused := [f"--{name}" for name, value in {"tune": tune, **size._asdict()}.items() if value]:
            raise InvalidInputError(f"{', '.join(unused)} has no effect without a draft model. Give one as --draft.")
        big, drafts = models.load_target(), {"that needs no model": None}
    else:
        big, own = size.enlarged(load_pair(target, draft, models.device, models.dtype))
        drafts = {"as it is": own}
        if tune:
            model, tokenizer = pairs.tuned(big, own, others)
            drafts["fine-tuned"] = model.to(own[0].device, own[0].dtype), tokenizer
    shape = {"max_new_tokens": max_new_tokens, "guess_length": guess_length, "batch": batch}
    found = {
        name: {kind: compare.compare(big, one, texts[: sample.limit], way, **shape) for kind, one in drafts.items()}
        for name, way in settings.items()
    }
    tables = {
        f"{settings[name].title}, the draft {kind}": rows for name, by_kind in found.items() for kind, rows in by_kind.items()
    }
    seconds = runs.seconds_of(lambda: XTokAssisted(big, next(iter(drafts.values()))))
    titles = {name: way.title for name, way in settings.items()}
    device = compare.described(big[0])
    print_found({"device": device, "build_seconds": seconds, "titles": titles, "settings": found}, tables, json)
    if not json:
        typer.echo(f"{device}. Making an instance of the loaded models takes {seconds:.2f} s.")


@app.command()
@on_the_command_line
def sampled(
    models: Models,
    sample: Sample,
    size: Size,
    draft: DraftOption = None,
    max_new_tokens: TokensOption = 64,
    guess_length: GuessOption = 5,
    json: JsonOption = False,
) -> None:
    """Sample at four temperatures, and test whether the texts are draws from the target's distribution."""
    from xtok.bench import sampled

    texts, pair = sample.prompts(models.named)[: sample.limit], size.enlarged(models.load_pair(draft))
    rows = sampled.compare_sampled(*pair, texts, max_new_tokens=max_new_tokens, guess_length=guess_length)
    print_found(rows, {"": rows}, json)


@app.command()
@on_the_command_line
def drafters(
    models: Models,
    sample: Sample,
    size: Size,
    draft: DraftOption = None,
    max_new_tokens: TokensOption = 64,
    json: JsonOption = False,
) -> None:
    """All ways to guess, and mixtures of them, on three kinds of prompts."""
    from xtok.bench import drafters, pairs

    texts, limit = sample.prompts(models.named), sample.limit
    target, draft = models.sources(draft)
    pair = load_pair(target, draft, models.device, models.dtype)
    drafts = {"draft": pair[1]}
    if target == OWN_TARGET and draft in (None, OWN_DRAFT):
        drafts |= pairs.shipped_drafts(pair)
    pair = size.enlarged(pair)
    kinds: dict[str, Any] = {"prose": texts[:limit], "technical": technical()[:limit], "quoting": quoting(texts)[:limit]}
    rows = drafters.compare_drafters(pair[0], drafts, kinds, max_new_tokens=max_new_tokens)
    print_found(rows, {"": rows}, json)


app.command()(chats)
