"""`xtok bench`: its options, and the models and texts that it passes to the benchmark."""

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from xtok.cli.console import JsonOption, Models, as_json, on_the_command_line, read_lines
from xtok.errors import InvalidInputError
from xtok.pair import pair

HELD_OUT = 6
"""Every sixth of the prompts of the Japanese pair is for measuring; the others are for tuning."""


class Asked(str, Enum):
    """What is measured in place of texts to continue."""

    CHATS = "chats"


@on_the_command_line
def bench(
    models: Models,
    asked: Annotated[
        Asked | None, typer.Argument(help="Ask prompts as questions in chats, by kinds, on one thread.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="A file with one prompt per line.",
            show_default="20 held-out prompts; for chats, 32 questions in eight kinds",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only this many prompts, the first ones.", show_default="all")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="How to generate: greedy, penalty, sampled (T = 0.8), or own (sampled, by the target's generation config). "
            "May be given again.",
            show_default="greedy, penalty and sampled; for chats, greedy, sampled and own",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help='Hub id or path of the draft model, or "lookup" for prompt lookup and token recycling alone.',
            show_default="the pair's; for other targets, lookup",
        ),
    ] = None,
    heads: Annotated[
        Path | None, typer.Option(help="A file of heads, to measure as well.", show_default="for chats, those of --pair")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="How many tokens to write after each prompt.", show_default="64; for chats, 128"),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="How many texts to write at a time.")] = 1,
    large: Annotated[
        bool, typer.Option("--large", help="Enlarge both models to the sizes of llm-jp-13B and open-calm-small: 27 GB.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Measure on your machine: the target alone, transformers' assisted generation and xtok, in turns on the same prompts."""
    import torch

    from xtok.bench import compare, runs
    from xtok.bench.chats import Question, as_chats, kind_rows, questions
    from xtok.bench.rows import print_tables
    from xtok.drafts.heads import HeadsDrafter
    from xtok.models.load import placements, target_model
    from xtok.models.packed import multiplies_half

    settings = runs.named_settings(setting or (["greedy", "sampled", "own"] if asked else ["greedy", "penalty", "sampled"]))
    if file is not None:
        lines = [Question("of the file", line) for line in read_lines(file)]
    else:
        lines = questions() if asked else [Question("held-out", text) for text in _held_out(models)]
    lines = lines[:limit]
    target, small = _loaded(models, draft, large)
    prompts: Sequence[Any] = [one.text for one in lines]
    if asked:
        prompts = as_chats(target[1], [one.text for one in lines])
        heads = heads or (models.pair.heads if models.named and models.pair else None)
        torch.set_num_threads(1)  # models this small gain nothing from more
    length = max_new_tokens or (128 if asked else 64)
    shape: dict[str, Any] = {"heads": None if heads is None else HeadsDrafter(heads), "max_new_tokens": length, "batch": batch}
    if target[0].device.type == "cpu" and not (large or multiplies_half()):  # elsewhere, xtok loads as transformers does
        made = target_model(models.source, placements(**models.placed)[0])
        shape["ours"] = made.model, made.vocabulary.tokenizer
    found, kinds = dict[str, list[Any]](), list[Any]()
    for name, way in settings.items():
        done = compare.compare(target, small, prompts, way, **shape)
        found[name] = compare.rows_of(done, sampled=way.arguments["do_sample"])
        own = next(system for system in (compare.HEADS, runs.XTOK, compare.NO_MODEL) if system in done)
        kinds += kind_rows(way, lines, done[own], done[runs.ALONE]) if asked and batch == 1 else []
    device, titles = compare.described(target[0]), {name: way.title for name, way in settings.items()}
    if json:
        typer.echo(as_json({"device": device, "max_new_tokens": length, "titles": titles, "kinds": kinds, "settings": found}))
        return
    tables = {f"by kind of question, up to {length} tokens: {own}": kinds} if kinds else {}
    print_tables(tables | {titles[name]: rows for name, rows in found.items()})
    typer.echo(f"{device}, {len(lines)} prompts.")


def _held_out(models: Models) -> list[str]:
    """Prompts that no draft was tuned on."""
    found = models.pair or pair("aozora")
    return found.prompts[:: HELD_OUT if found.name == "aozora" else 1]


def _loaded(models: Models, draft: str | None, large: bool) -> tuple[Any, Any]:
    """Target and draft, each with its tokenizer; no draft if none is given and there is none for the target."""
    if draft == "lookup" or (draft is None and models.pair is None):
        if large:
            raise InvalidInputError("--large has no effect without a draft model. Give one as --draft.")
        return models.load()[0], None
    big: Any
    (big, tokens), (small, pieces) = models.load_pair(draft)
    if large:
        from xtok.bench.stretch import LARGE, SMALL, sized

        big, small = sized(big, *LARGE), sized(small, *SMALL)
    return (big, tokens), (small, pieces)
