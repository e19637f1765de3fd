"""`xtok bench`: its options, and the models and texts that it passes to the benchmark."""

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xtok.cli.console import JsonOption, Models, as_json, on_the_command_line, read_lines
from xtok.errors import InvalidInputError
from xtok.pair import pair

if TYPE_CHECKING:
    from xtok.bench.spec import Question

HELD_OUT = 6
"""Every sixth of the prompts of the Japanese pair is for measuring; the others are for tuning."""


class Suite(str, Enum):
    """What is measured in place of texts to continue."""

    SPEC = "spec"


@on_the_command_line
def bench(
    models: Models,
    suite: Annotated[
        Suite | None,
        typer.Argument(help="spec: MT-Bench's questions, in English and Japanese, on one thread.", show_default=False),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="A file with one prompt per line.",
            show_default="the pair's held-out ones; for spec, MT-Bench, fetched once (0.4 MB)",
        ),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="For spec, only this kind (coding, math, …) or language (en, ja). May be given again."),
    ] = None,
    turns: Annotated[
        int, typer.Option(min=1, max=2, help="For spec, how many questions of each chat are asked, one after the other.")
    ] = 1,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Use only this many prompts.", show_default="all; for spec, one of each kind and language"),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="How to generate: greedy, penalty, sampled (T = 0.8), or own (sampled, by the target's generation config). "
            "May be given again.",
            show_default="greedy, penalty and sampled; for spec, greedy and sampled",
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
        Path | None, typer.Option(help="A file of heads, to measure as well.", show_default="for spec, those of --pair")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="How many tokens to write after each prompt.", show_default="64; for spec, 128"),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="How many texts to write at a time.")] = 1,
    json: JsonOption = False,
) -> None:
    """Measure on your machine: the target alone, transformers' assisted generation and xtok, in turns on the same prompts."""
    import torch

    from xtok.assisted import XTokAssisted
    from xtok.bench import compare, runs, spec
    from xtok.bench.rows import print_tables
    from xtok.drafts.heads import HeadsDrafter
    from xtok.models.packed import multiplies_half

    settings = runs.named_settings(setting or (["greedy", "sampled"] if suite else ["greedy", "penalty", "sampled"]))
    if (kind or turns > 1) and (file is not None or not suite):
        raise InvalidInputError("--kind and --turns choose from MT-Bench. Use them with xtok bench spec, without --prompts.")
    questions = _questions(models, suite, file, kind or ())[:limit]
    if suite and limit is None and file is None:
        questions = questions[: len({one.kind for one in questions})]
    target, small = _loaded(models, draft)
    prompts: Sequence[Any] = [one.turns[0] for one in questions]
    if suite or (file is None and models.pair and models.pair.chats):
        prompts = spec.as_chats(target[1], prompts)
    if suite:
        heads = heads or (models.pair.heads if models.named and models.pair else None)
        torch.set_num_threads(1)  # small models gain nothing from more, and the target alone is measured by the same number
    length = max_new_tokens or (128 if suite else 64)
    shape: dict[str, Any] = {"heads": None if heads is None else HeadsDrafter(heads), "max_new_tokens": length, "batch": batch}
    shape |= {"lengths": ()} if suite else {}
    if target[0].device.type == "cpu" and not multiplies_half():  # elsewhere, xtok loads as transformers does
        shape["ours"] = models.load_as_xtok(None if small is None else models.draft_model(draft))
    if turns > 1:
        answering = XTokAssisted(shape["ours"][0] if "ours" in shape else target)
        prompts = [*prompts, *spec.second_turns(answering, questions, prompts, length)]
    kinds = [one.kind for one in questions] * (len(prompts) // max(1, len(questions)))
    found, by_kind = dict[str, list[Any]](), dict[str, list[Any]]()
    for name, way in settings.items():
        done = compare.compare(target, small, prompts, way, **shape)
        found[name] = compare.rows_of(done, sampled=way.arguments["do_sample"])
        by_kind |= {name: spec.kind_rows(kinds, done)} if suite and batch == 1 else {}
    device, titles = compare.described(target[0]), {name: way.title for name, way in settings.items()}
    if json:
        typer.echo(as_json({"device": device, "max_new_tokens": length, "titles": titles, "kinds": by_kind, "settings": found}))
        return
    tables = {titles[name]: rows for name, rows in found.items()}
    print_tables({f"by kind, {titles[name]}": rows for name, rows in by_kind.items()} | tables)
    typer.echo(f"{device}, {len(prompts)} prompts, up to {length} tokens each.")


def _questions(models: Models, suite: Suite | None, file: Path | None, kinds: Sequence[str]) -> "list[Question]":
    """The lines of the file, MT-Bench's questions, or the pair's texts that no draft was tuned on."""
    from xtok.bench import spec

    if file is not None:
        return [spec.Question("of the file", (line,)) for line in read_lines(file)]
    if suite:
        return spec.questions(kinds)
    found = models.pair or pair("aozora")
    return [spec.Question("held out", (text,)) for text in found.prompts[:: HELD_OUT if found.name == "aozora" else 1]]


def _loaded(models: Models, draft: str | None) -> tuple[Any, Any]:
    """Target and draft, each with its tokenizer; no draft if none is given and there is none for the target."""
    if draft == "lookup" or (draft is None and (models.pair is None or models.pair.draft is None)):
        return models.load()[0], None
    return models.load_pair(draft)
