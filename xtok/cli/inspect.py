"""`xtok inspect`: how well drafts fit a target, from tokenizers and configurations, or measured."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from xtok.bench.rows import Column, print_tables
from xtok.cli.console import (
    JsonOption,
    PairOption,
    TargetOption,
    as_json,
    model_draft,
    on_the_command_line,
    read_text,
    sources,
)
from xtok.errors import InvalidInputError
from xtok.pair import pair
from xtok.results.progress import busy

if TYPE_CHECKING:
    from xtok.align.fit import Fit, Side
    from xtok.align.verdict import Verdict
    from xtok.bench.drafters import DraftRow
    from xtok.models.load import Described

GUESS_LENGTH = 5
MEASURED, MEASURED_TOKENS = 8, 32
"""On how many prompts, and by how many tokens after each, drafts are measured."""


@on_the_command_line()
def inspect(
    named: PairOption = None,
    target: TargetOption = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(help="Hub id or path of a draft model. May be given again.", show_default="the pair's"),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A sample in UTF-8, one text per line.", show_default="held-out prompts")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also load the weights, and measure which draft is best on lines of the sample.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="On how many lines to measure.", show_default=str(MEASURED))] = None,
    json: JsonOption = False,
) -> None:
    """Say how well models fit, before any generation. Reads tokenizers and configurations; weights only for --measure."""
    if limit is not None and not measure:
        raise InvalidInputError("--limit has no effect without --measure. Give both.")
    target, of_pair = sources(named, target, None)
    given: list[str | None] = list(draft) if draft else [of_pair]
    drafts = list(dict.fromkeys(model_draft(target, one) for one in given))
    from xtok.models.load import load_without_weights

    with busy("reading tokenizers"):
        own = load_without_weights(target, "target")
        texts = pair(named or "aozora").prompts if text is None else read_text(text).splitlines(keepends=True)
        found = {one: _fit_and_verdict(own, load_without_weights(one, "draft"), texts) for one in drafts}
    if not json:
        for name, (fitting, judged) in found.items():
            if len(found) > 1:
                typer.echo(typer.style(f"\n{name}", bold=True))
            typer.echo(judged.sentence)
            _print_fit(fitting)
    lines = [line.rstrip("\r\n") for line in texts if line.strip()]
    rows = _measured(target, drafts, lines[: limit or MEASURED]) if measure else []
    if json:
        measured = {row.draft: {"measured": asdict(row)} for row in rows}
        fits = [
            {"name": name, **asdict(fitting), "verdict": asdict(judged), **measured.get(name, {})}
            for name, (fitting, judged) in found.items()
        ]
        typer.echo(as_json(fits[0] if len(fits) == 1 else fits))
    elif rows:
        _print_measured(rows)


def _fit_and_verdict(target: "Described", draft: "Described", texts: list[str]) -> "tuple[Fit, Verdict]":
    from xtok.align.fit import fit
    from xtok.align.verdict import verdict

    found = fit(target.tokenizer, draft.tokenizer, texts, target_window=target.window, draft_window=draft.window)
    return found, verdict(found, target.parameters, draft.parameters)


def _measured(target: str, drafts: list[str], texts: list[str]) -> "list[DraftRow]":
    """The drafts, the fastest first."""
    from xtok.bench.drafters import compare_drafts
    from xtok.models.load import load

    loaded = {one: load(one, "draft") for one in drafts}
    return compare_drafts(load(target, "target"), loaded, texts, max_new_tokens=MEASURED_TOKENS)


def _print_measured(rows: "list[DraftRow]") -> None:
    print_tables({f"measured on {rows[0].prompts} prompts, {MEASURED_TOKENS} tokens each, without prompt lookup": rows})
    if rows[0].speed > 1:
        typer.echo(f"Best here: {rows[0].draft}, {rows[0].speed:.2f} times the speed of the target alone.")
    else:
        typer.echo("The target alone is fastest here.")


class _FitRow(NamedTuple):
    name: Annotated[str, Column("")]
    target: Annotated[str, Column()]
    draft: Annotated[str, Column()]


def _print_fit(found: "Fit") -> None:
    target, draft = _cells(found.target, found), _cells(found.draft, found)
    print_tables({"": [_FitRow(name, target[name], draft[name]) for name in target]})
    length = GUESS_LENGTH * found.target_tokens_per_draft_token
    typer.echo(f"The sample has {found.texts} texts with {found.characters} characters.")
    typer.echo(f"Both vocabularies have {found.shared} byte strings in common.")
    typer.echo(f"A guess of {GUESS_LENGTH} draft tokens is about {length:.1f} target tokens long.")
    if found.same:
        typer.echo("The tokenizers are the same: guesses are ids and skip the text.")
    typer.echo("What will be lost (the output stays the target's own):" if found.losses else "Nothing will be lost.")
    for loss in found.losses:
        typer.echo(f"- {loss}")


def _cells(side: "Side", found: "Fit") -> dict[str, str]:
    return {
        "family": side.family,
        "normalizer": side.normalizer,
        "vocabulary": str(side.vocabulary),
        "different byte strings": str(side.byte_strings),
        "… that the other has": f"{side.shared:.1%}",
        "single bytes": f"{side.single_bytes} of 256",
        "tokens per character": f"{side.tokens_per_character:.2f}",
        "… ending inside one": f"{side.mid_character:.1%}",
        "unwritable characters": str(len(side.unwritable)),
        "rewritten characters": str(len(side.rewritten)),
        "altered texts": f"{side.altered_texts} of {found.texts}",
        "context window": "unknown" if side.window is None else f"{side.window} ≈ {side.reach:.0f} characters",
    }
