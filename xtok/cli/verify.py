"""`xtok verify`: that drafts, batches and engines change no id of a target's texts, on this machine and in this precision."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xtok.cli.console import (
    GuessOption,
    JsonOption,
    Models,
    StableOption,
    as_json,
    on_the_command_line,
    read_lines,
)
from xtok.results.progress import stage

if TYPE_CHECKING:
    from xtok.bench.verify import Difference, Verified

SHOWN = 16
"""How many differences are printed."""


@partial(on_the_command_line, code=2)  # 1 says that ids differ
def verify(
    models: Models,
    draft: GuessOption = None,
    file: Annotated[
        Path | None,
        typer.Option("--prompts", help="A file with one prompt per line.", show_default="8 in English, code and Japanese"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only this many prompts, the first ones.", show_default="all")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of the target to write.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="The seed of sampled texts.")] = 0,
    stable: StableOption = None,
    json: JsonOption = False,
) -> None:
    """Check on your models, machine and precision that neither drafts nor batches change any id of a text.

    Exits with 0 if all ids are equal but for near ties, which in half precision excuse `model.generate` alone; with 1 if not;
    with 2 if it can't run.
    """
    name = models.pair.name if models.pair else models.target
    lines = None if file is None else read_lines(file)[:limit]
    with stage(f"Verifying {name}: texts, greedy and sampled, with and without drafts, in batches"):
        from xtok.bench.compare import described
        from xtok.bench.verify import PROMPTS, verify

        guess = models.guesser(draft)
        target, small = models.load_as_xtok(guess if isinstance(guess, str) else None)
    texts = PROMPTS[:limit] if lines is None else lines
    found = verify(target, small or guess, texts, max_new_tokens=max_new_tokens, seed=seed, stable=stable)
    if json:
        typer.echo(as_json({"holds": found.holds, "device": described(target[0]), "seed": seed, **vars(found)}))
    else:
        _print(found, target[1])
        typer.echo(f"{described(target[0])}, seed {seed}.")
    raise typer.Exit(0 if found.holds else 1)


def _print(found: "Verified", tokenizer: Any) -> None:
    """Print what equals what, what doesn't, and what follows."""
    from xtok.bench.rows import print_tables
    from xtok.bench.verify import ALONE, TRANSFORMERS

    print_tables(found.settings)
    if found.drafts:
        typer.echo(f"drafts: {', '.join(found.drafts)}.")
    typer.echo(f"Sampled texts are compared with {ALONE}: {TRANSFORMERS} draws by another generator.")
    wrong, ties = ([one for one in found.differences if one.is_allowed == allowed] for allowed in (False, True))
    for one in [*wrong, *ties][:SHOWN]:
        typer.echo(_described(one, tokenizer, found.tolerance))
    if len(found.differences) > SHOWN:
        typer.echo(f"… and {len(found.differences) - SHOWN} more differences, all of which --json prints.")
    if not all(row.exact for rows in found.settings.values() for row in rows):
        typer.echo("Equal ids aren't promised for this target in this precision (stats.exact is False).")
    if wrong:
        typer.echo(f"NOT EQUAL: {len(wrong)} texts in {len({(one.setting, one.way) for one in wrong})} ways.")
    elif ties:
        typer.echo(f"Equal, but for {len(ties)} texts that go on otherwise from a near tie on.")
    else:
        typer.echo("Equal: all ids.")


def _described(one: "Difference", tokenizer: Any, tolerance: float) -> str:
    own, other = ("the end" if token is None else f"{token} ({tokenizer.decode([token])!r})" for token in (one.own, one.other))
    kind = "near tie" if one.near_tie else "NO NEAR TIE" if one.margin is not None else "DIFFERENT"
    apart = "" if one.margin is None else f"; their logits are {one.margin:.2g} apart, a near tie up to {tolerance:.2g}"
    return (
        f"{kind}: {one.setting}, {one.way}, {one.prompt[:24]!r}, token {one.position}: {own}, by {one.reference} {other}{apart}"
    )
