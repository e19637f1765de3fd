"""`xtok inspect`: how well drafts fit a target, from tokenizers and configurations, or measured."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from xtok.bench.rows import Column, print_tables
from xtok.cli.console import (
    OWN_TARGET,
    JsonOption,
    Models,
    as_json,
    holds_heads,
    load_models,
    model_draft,
    on_the_command_line,
    read_text,
)
from xtok.errors import InvalidInputError
from xtok.pair import pair
from xtok.results.progress import busy

if TYPE_CHECKING:
    from xtok.align.fit import Fit, Side
    from xtok.bench.verdict import DraftRow, Verdict
    from xtok.models.load import Described
    from xtok.models.prompts import Prompt

GUESS_LENGTH = 5
MEASURED, MEASURED_TOKENS = 8, 32
"""On how many prompts drafts are measured, and how many tokens are generated for each."""


@on_the_command_line
def inspect(
    options: Models,
    draft: Annotated[
        list[str] | None,
        typer.Option(help="Hub id or path of a draft model, or heads. May be given again.", show_default="the pair's"),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="A file with sample texts, such as your prompts, one per line, in UTF-8.",
            show_default="the pair's prompts; for other targets, texts that they write",
        ),
    ] = None,
    weights: Annotated[
        bool,
        typer.Option(
            "--weights/--no-weights", help="Load the models and measure for some seconds whether guesses pay on the sample."
        ),
    ] = True,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Also measure which draft is fastest, on whole generations after lines of the sample."),
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Measure on at most this many lines.", show_default=str(MEASURED))
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say whether a draft makes a target faster, and how well their tokenizers fit."""
    for name, given in {"measure": measure, "limit": limit, "device": options.device, "dtype": options.dtype}.items():
        if given and not weights:
            raise InvalidInputError(f"--{name} has no effect with --no-weights. Give one of them.")
    target, of_pair = options.sources()
    by_default: list[str | None] = [options.guess_sources(None)[1], of_pair] if weights else [of_pair]
    given_drafts = draft or by_default
    heads = [one for one in given_drafts if one is not None and holds_heads(one)]
    if heads and not weights:
        raise InvalidInputError(f"{heads[0]} holds heads, which have no tokenizer to compare. Leave out --no-weights.")
    drafts = list(dict.fromkeys(one if one in heads else model_draft(target, one) for one in given_drafts))
    from xtok.align.fit import fit
    from xtok.models.load import load_without_weights

    lines = None if text is None else read_text(text).splitlines(keepends=True)
    with busy("reading tokenizers"):
        own = load_without_weights(target, "target")
        described = {one: load_without_weights(one, "draft") for one in drafts if one not in heads}
    models = load_models(target, drafts, options.device, options.dtype) if weights else None
    with busy("reading the sample"):
        texts, chats = (lines, False) if lines is not None else _sample(options.named, target, models and models[0])
        fits = {
            one: fit(own.tokenizer, found.tokenizer, texts, target_window=own.window, draft_window=found.window)
            for one, found in described.items()
        }
    asked = [line.rstrip("\r\n") for line in texts if line.strip()][: limit or MEASURED]
    judged, rows = _measured(models, asked, chats, compares=measure) if models else ({}, [])
    if json:
        typer.echo(as_json(_as_json(target, drafts, fits, judged, rows)))
        return
    typer.echo(f"target: {target}")
    for name in drafts:
        typer.echo(typer.style(f"draft: {name}\n", bold=len(drafts) > 1))
        typer.echo(judged[name].sentence if judged else _by_sizes(own, described[name]))
        if name in fits:
            _print_fit(fits[name])
        else:
            typer.echo()  # heads have no tokenizer to compare
    if rows:
        _print_measured(rows, "as chats, greedily" if chats else "greedily, with a repetition penalty")


def _sample(named: str | None, target: str, model: Any) -> tuple[list[str], bool]:
    """Texts in the target's language, and whether they are questions: the pair's, the target's own, or those of all pairs."""
    if named is not None and pair(named).chats:
        from xtok.bench.chats import questions

        return [one.text for one in questions()], True
    if named is not None or target == OWN_TARGET:
        return pair(named or "aozora").prompts, False
    from xtok.bench.verdict import own_texts

    if model is not None and (texts := own_texts(model, MEASURED)):
        return texts, getattr(model[1], "chat_template", None) is not None
    return [*pair("aozora").prompts, *pair("smollm2").prompts], False


def _by_sizes(target: "Described", draft: "Described") -> str:
    share = f"{draft.parameters / target.parameters:.1%} ({draft.parameters:,} of {target.parameters:,})"
    return (
        f"A forward pass of the draft reads {share} of the parameters that one of the target reads. Whether guesses pay "
        "depends on how many are accepted: leave out --no-weights to measure it."
    )


def _measured(
    models: tuple[Any, dict[str, Any]], texts: Sequence[str], chats: bool, *, compares: bool
) -> "tuple[dict[str, Verdict], list[DraftRow]]":
    """The verdict for each draft, and, if `compares`, the drafts, the fastest first: both on the same prompts."""
    from xtok.bench.chats import as_chats
    from xtok.bench.runs import SETTINGS
    from xtok.bench.verdict import compare_drafts, judge

    prompts: Sequence[Prompt] = as_chats(models[0][1], texts) if chats else list(texts)
    # greedy continuations repeat themselves, which flatters drafts
    shared: dict[str, Any] = {**SETTINGS["greedy" if chats else "penalty"].arguments, "max_new_tokens": MEASURED_TOKENS}
    with busy("measuring"):
        judged = judge(*models, prompts, **shared)
    return judged, compare_drafts(*models, prompts, **shared) if compares else []


def _as_json(
    target: str, names: Sequence[str], fits: "dict[str, Fit]", judged: "dict[str, Verdict]", rows: "list[DraftRow]"
) -> Any:
    measured = {row.draft: {"measured": asdict(row)} for row in rows}
    verdicts = {name: {"verdict": asdict(one)} for name, one in judged.items()}
    found = [
        {
            "name": name,
            "target_name": target,
            **(asdict(fits[name]) if name in fits else {}),
            **verdicts.get(name, {}),
            **measured.get(name, {}),
        }
        for name in names
    ]
    return found[0] if len(found) == 1 else found


def _print_measured(rows: "list[DraftRow]", setting: str) -> None:
    title = f"measured on {rows[0].prompts} prompts, {setting}, {MEASURED_TOKENS} tokens each, without prompt lookup"
    print_tables({title: rows})
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
    typer.echo(f"The sample has {found.texts} texts with {found.characters:,} characters.")
    typer.echo(f"The vocabularies have {found.shared:,} byte strings in common.")
    typer.echo(f"A guess of {GUESS_LENGTH} draft tokens is about {length:.1f} target tokens long.")
    if found.same:
        typer.echo("The tokenizers are the same, so guesses are passed on as ids, without a detour through text.")
    typer.echo("What will be lost (the output stays the target's own):" if found.losses else "Nothing will be lost.")
    for loss in found.losses:
        typer.echo(f"- {loss}")


def _cells(side: "Side", found: "Fit") -> dict[str, str]:
    inside = round(side.mid_character * side.tokens)
    return {
        "family": side.family,
        "normalizer": side.normalizer,
        "vocabulary": f"{side.vocabulary:,}",
        "different byte strings": f"{side.byte_strings:,}",
        "byte strings that the other has, too": f"{side.shared:.1%} ({found.shared:,} of {side.byte_strings:,})",
        "single bytes": f"{side.single_bytes} of 256",
        "tokens per character": f"{side.tokens_per_character:.2f} ({side.tokens:,} in {found.characters:,})",
        "tokens that end inside a character": f"{side.mid_character:.1%} ({inside:,} of {side.tokens:,})",
        "unwritable characters": str(len(side.unwritable)),
        "rewritten characters": str(len(side.rewritten)),
        "altered texts": f"{side.altered_texts} of {found.texts}",
        "context window": "unknown" if side.window is None else f"{side.window:,} tokens, about {side.reach:,.0f} characters",
    }
