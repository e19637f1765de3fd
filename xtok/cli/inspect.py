"""`xtok inspect`: how well drafts fit a target: from tokenizers and configurations, and measured on a short sample."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from xtok.bench.rows import Column, print_tables
from xtok.cli.console import JsonOption, Models, as_json, holds_heads, on_the_command_line, read_text
from xtok.errors import InvalidInputError
from xtok.pair import pair
from xtok.results.progress import busy

if TYPE_CHECKING:
    from xtok.align.fit import Fit, Side
    from xtok.bench.verdict import Verdict
    from xtok.models.load import Described

GUESS_LENGTH = 5
MEASURED, MEASURED_TOKENS, SECONDS = 8, 32, 30.0
"""On how many prompts drafts are measured, how many tokens are generated for each, and after how long no further one begins."""
OWN_TOKENS = 48
"""How many tokens a text has that the target writes as a sample."""


@on_the_command_line
def inspect(
    models: Models,
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
    limit: Annotated[
        int | None, typer.Option(min=1, help="Measure on at most this many lines.", show_default=str(MEASURED))
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say whether a draft makes a target faster, and how well their tokenizers fit."""
    for name, unused in {"limit": limit, "device": models.device, "dtype": models.dtype}.items():
        if unused and not weights:
            raise InvalidInputError(f"--{name} has no effect with --no-weights. Give one of them.")
    given: list[str | None] = [*draft] if draft else [None]
    if weights and draft is None and models.pair is not None:
        given = [str(one) for one in (models.pair.guesser, models.pair.draft) if one]  # the former may be heads
    heads = [one for one in given if one is not None and holds_heads(one)]
    if heads and not weights:
        raise InvalidInputError(f"{heads[0]} holds heads, which have no tokenizer to compare. Leave out --no-weights.")
    drafts = list(dict.fromkeys(one if one in heads else models.draft_model(one) for one in given))
    from xtok.align.fit import fit
    from xtok.models.load import load_without_weights

    lines = None if text is None else read_text(text).splitlines(keepends=True)
    with busy("reading tokenizers"):
        own = load_without_weights(models.source, "target")
        described = {one: load_without_weights(one, "draft") for one in drafts if one not in heads}
    target, loaded = models.load(drafts) if weights else (None, {})
    with busy("reading the sample"):
        texts, chats = (lines, False) if lines is not None else _sample(models, target)
        fits = {
            one: fit(own.tokenizer, found.tokenizer, texts, target_window=own.window, draft_window=found.window)
            for one, found in described.items()
        }
    asked = [line.rstrip("\r\n") for line in texts if line.strip()][: limit or MEASURED]
    judged = {} if target is None else _judged(target, loaded, asked, chats)
    if json:
        found = [
            {"name": name, "target_name": models.source}
            | (asdict(fits[name]) if name in fits else {})
            | ({"verdict": asdict(judged[name])} if judged else {})
            for name in drafts
        ]
        typer.echo(as_json(found[0] if len(found) == 1 else found))
        return
    typer.echo(f"target: {models.source}")
    if target is not None:
        from xtok.models.runner import runner_of

        typer.echo(f"kernels: {runner_of(target[0]).kernels(target[0])}")
    for name in drafts:
        typer.echo(typer.style(f"draft: {name}\n", bold=len(drafts) > 1))
        typer.echo(judged[name].sentence if judged else _by_sizes(own, described[name]))
        if name in fits:
            _print_fit(fits[name])
        else:
            typer.echo()  # heads have no tokenizer to compare


def _judged(target: Any, drafts: dict[str, Any], texts: list[str], chats: bool) -> "dict[str, Verdict]":
    from xtok.assisted import XTokAssisted
    from xtok.bench.compare import measure
    from xtok.bench.runs import NONE, SETTINGS
    from xtok.bench.spec import as_chats
    from xtok.bench.verdict import CHAIN, judge

    prompts: Any = as_chats(target[1], texts) if chats else texts
    setting = SETTINGS["greedy" if chats else "penalty"]  # greedy continuations repeat themselves, which flatters drafts
    xts = {NONE: XTokAssisted(target), **{name: XTokAssisted(target, [one], budget=CHAIN) for name, one in drafts.items()}}
    runs = measure(target, xts, prompts, setting, max_new_tokens=MEASURED_TOKENS, seconds=SECONDS)
    return {name: judge(runs, name) for name in drafts}


def _sample(models: Models, target: Any) -> tuple[list[str], bool]:
    """Texts in the target's language, and whether they are questions: the pair's, the target's own, or those of all pairs."""
    if models.pair is not None:
        return models.pair.prompts, models.pair.chats
    from xtok.tune.writing import own_texts

    if target is not None and (texts := own_texts(target, MEASURED, OWN_TOKENS)):
        return texts, getattr(target[1], "chat_template", None) is not None
    return [*pair("aozora").prompts, *pair("smollm2").prompts], False


def _by_sizes(target: "Described", draft: "Described") -> str:
    share = f"{draft.parameters / target.parameters:.1%} ({draft.parameters:,} of {target.parameters:,})"
    return (
        f"A forward pass of the draft reads {share} of the parameters that one of the target reads. Whether guesses pay "
        "depends on how many are accepted: leave out --no-weights to measure it."
    )


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
