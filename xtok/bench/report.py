"""`xtok bench`: what its commands measure, as tables or JSON."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from xtok.bench.batches import BatchRow, compare_batches
from xtok.bench.compare import SETTINGS, Row, build_seconds, check_settings, compare, tuned, useless_drafts
from xtok.bench.context import ContextRow, compare_contexts
from xtok.bench.drafters import DrafterRow, compare_drafters
from xtok.bench.plot import check_drawable, draw
from xtok.bench.sampled import SampledRow, compare_sampled
from xtok.bench.stretch import forward_seconds, shortened, sized, stretched_to, with_vocabulary
from xtok.bench.vocabulary import VocabularyRow, compare_vocabularies
from xtok.console import (
    EVERY,
    OWN_DRAFT,
    OWN_TARGET,
    DeviceOption,
    DraftOption,
    DtypeOption,
    TargetOption,
    errors_in_one_line,
    load_pair,
    sample,
)
from xtok.drafts.heads import HeadsDrafter
from xtok.errors import InvalidInputError
from xtok.models.load import load, load_without_weights
from xtok.pair import HEADS, TUNED, prompts, quoting, technical

Found = TypeVar("Found")

GUESS_LENGTH = 5
LARGE, SMALL = (13e9, 40), (160e6, 12)
"""Parameters and blocks of llm-jp-13B and of open-calm-small."""


class _Commands(TyperGroup):
    """Without the name of a command, systems are compared."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the name in."""
        named = args and (not args[0].startswith("-") or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else ["compare", *args])


app = typer.Typer(cls=_Commands, help="Measure on your machine: systems side by side, in turns, on the same work.")

PromptsOption = Annotated[
    Path | None, typer.Option("--prompts", help="A file with one prompt per line.", show_default="20 held-out prompts")
]
TokensOption = Annotated[int, typer.Option(min=1, help="How many tokens to write per prompt.")]
GuessOption = Annotated[int, typer.Option(min=1, help="How many draft tokens a fixed guess has.")]
RatioOption = Annotated[
    float | None, typer.Option(min=1, help="Enlarge the target until its forward costs so many of the draft's.")
]
LargeOption = Annotated[
    bool, typer.Option("--large", help="Enlarge both models to the sizes of llm-jp-13B and open-calm-small: 27 GB.")
]
SettingOption = Annotated[
    list[str] | None,
    typer.Option(help="Only that way to ask for texts: greedy, penalty or sampled. May be given again.", show_default="all"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@app.command("compare")
@errors_in_one_line()
def systems(
    target: TargetOption = OWN_TARGET,
    draft: DraftOption = OWN_DRAFT,
    file: PromptsOption = None,
    max_new_tokens: TokensOption = 64,
    guess_length: GuessOption = GUESS_LENGTH,
    repeats: Annotated[int, typer.Option(min=1, help="How often to run each prompt.")] = 1,
    tune: Annotated[bool, typer.Option("--tune", help="Also with the draft tuned on the target's text, in minutes.")] = False,
    setting: SettingOption = None,
    ratio: RatioOption = None,
    large: LargeOption = False,
    vocabularies: Annotated[
        tuple[int, int] | None,
        typer.Option(help="Enlarge the vocabularies of target and draft to so many ids.", show_default=False),
    ] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    useless: Annotated[bool, typer.Option("--useless", help="Also with useless drafts: a random one, and a dear one.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw bars and a breakdown of the time, as PNG or SVG.")] = None,
    as_json: JsonOption = False,
) -> None:
    """The target alone, transformers' universal assisted generation and xtok. (What `xtok bench` does.)"""
    _check_asked(setting or [], plot, tune=tune, unsaved=large and vocabularies is not None)
    pair = load_pair(target, draft, device, dtype)
    texts, others = _bench_prompts(file)
    narrow, pair = pair[1], _widened(pair, vocabularies)
    pair = _enlarged(*pair, ratio, large)
    compared = {"as it is": pair[1]} | (_tuned(pair, narrow, others, vocabularies) if tune else {})
    compared |= useless_drafts(*pair) if useless else {}
    shape = {"max_new_tokens": max_new_tokens, "guess_length": guess_length, "repeats": repeats}
    settings = {
        name: {kind: compare(pair[0], one, texts, name, **shape) for kind, one in compared.items()}
        for name in SETTINGS
        if name in (setting or SETTINGS)
    }
    if plot is not None:
        draw(next(iter(settings.values())), plot)
    _tell({"build_seconds": build_seconds(*pair), "settings": settings}, _print_bench, as_json)


@app.command("sampled")
@errors_in_one_line()
def sampling(
    target: TargetOption = OWN_TARGET,
    draft: DraftOption = OWN_DRAFT,
    file: PromptsOption = None,
    max_new_tokens: TokensOption = 64,
    guess_length: GuessOption = GUESS_LENGTH,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sampling at four temperatures: are the texts draws from the target's law?"""
    pair = load_pair(target, draft, device, dtype)
    rows = compare_sampled(*pair, _bench_prompts(file)[0], max_new_tokens=max_new_tokens, guess_length=guess_length)
    _tell(rows, _print_sampled, as_json)


@app.command("drafters")
@errors_in_one_line()
def ways_to_guess(
    target: TargetOption = OWN_TARGET,
    draft: DraftOption = OWN_DRAFT,
    file: PromptsOption = None,
    max_new_tokens: TokensOption = 64,
    ratio: RatioOption = None,
    large: LargeOption = False,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """All ways to guess and mixtures of them, on three kinds of prompts."""
    pair = load_pair(target, draft, device, dtype)
    texts = _bench_prompts(file)[0]
    own = _own_drafts(pair, (target, draft))
    pair = _enlarged(*pair, ratio, large)
    kinds: dict[str, Any] = {"prose": texts, "technical": technical(), "quoting": quoting(texts)}
    _tell(compare_drafters(pair[0], own, kinds, max_new_tokens=max_new_tokens), _print_drafters, as_json)


@app.command("contexts")
@errors_in_one_line()
def lengths(
    target: TargetOption = OWN_TARGET, draft: DraftOption = OWN_DRAFT, file: PromptsOption = None, as_json: JsonOption = False
) -> None:
    """What a round costs beside the models, by the length of the context."""
    _tell(compare_contexts(*_tokenizers(target, draft), _bench_prompts(file)[0]), _print_contexts, as_json)


@app.command("vocabularies")
@errors_in_one_line()
def sizes(target: TargetOption = OWN_TARGET, draft: DraftOption = OWN_DRAFT, as_json: JsonOption = False) -> None:
    """What is computed over vocabularies beside the models, by their sizes."""
    _tell(compare_vocabularies(*_tokenizers(target, draft)), _print_vocabularies, as_json)


@app.command("batches")
@errors_in_one_line()
def batches(
    target: TargetOption = OWN_TARGET,
    draft: DraftOption = OWN_DRAFT,
    file: PromptsOption = None,
    max_new_tokens: TokensOption = 64,
    batch: Annotated[str, typer.Option(help="How many texts at once, with commas.")] = "1,2,4,8,16,32",
    repeats: Annotated[int, typer.Option(min=1, help="How often to run each batch.")] = 3,
    setting: SettingOption = None,
    ratio: RatioOption = None,
    large: LargeOption = False,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Many texts at once: transformers' padded batch, and xtok's shared forwards without a draft and with one."""
    check_settings(setting or [])
    texts = _sizes(batch)
    pair = _enlarged(*load_pair(target, draft, device, dtype), ratio, large)
    shape: Any = {"max_new_tokens": max_new_tokens, "repeats": repeats}
    names = [name for name in SETTINGS if name in (setting or SETTINGS)]
    rows = [row for name in names for row in compare_batches(*pair, _bench_prompts(file)[0], name, texts, **shape)]
    _tell(rows, _print_batches, as_json)


def _sizes(batch: str) -> list[int]:
    """Numbers with commas. Raises `InvalidInputError` for anything else."""
    if not all(one.strip().isdecimal() and int(one) for one in batch.split(",")):
        raise InvalidInputError(f"batch is {batch!r}; give numbers from 1 with commas, as 1,8,32.")
    return [int(one) for one in batch.split(",")]


def _check_asked(settings: list[str], plot: Path | None, *, tune: bool, unsaved: bool) -> None:
    """Raises `InvalidInputError` for what can't be done, before anything is loaded."""
    check_settings(settings)
    if plot is not None:
        check_drawable(plot)
    if tune:
        from xtok.tune import check_tunable

        check_tunable()
    if tune and unsaved:
        raise InvalidInputError("A draft is tuned before its vocabulary is enlarged. Leave --large or --vocabularies out.")


def _tuned(pair: tuple[Any, Any], narrow: Any, others: list[str], vocabularies: tuple[int, int] | None) -> dict[str, Any]:
    """The draft, tuned before its vocabulary is enlarged: a model of an enlarged one can't be saved."""
    model, tokenizer = tuned(pair[0], pair[1] if vocabularies is None else narrow, others)
    model = model.to(pair[1][0].device, pair[1][0].dtype)
    return {"fine-tuned": (model, tokenizer) if vocabularies is None else with_vocabulary(model, tokenizer, vocabularies[1])}


def _tell(found: Found, show: Callable[[Found], None], as_json: bool) -> None:
    """Print what was found, as JSON or as tables."""
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False, indent=2, default=asdict))
    else:
        show(found)


def _own_drafts(pair: tuple[Any, Any], given: tuple[str, str]) -> dict[str, Any]:
    """The draft, and of the shipped pair the tuned one, the heads and the target's lower blocks, which have its own ids."""
    if given != (OWN_TARGET, OWN_DRAFT):
        return {"draft": pair[1]}
    model, tokenizer = load(TUNED, "draft")
    tuned_draft = model.to(pair[1][0].device, pair[1][0].dtype), tokenizer
    lower = shortened(pair[0][0], 1), pair[0][1]
    return {"draft": pair[1], "tuned draft": tuned_draft, "lower blocks": lower, "heads": HeadsDrafter(HEADS)}


def _tokenizers(target: str, draft: str) -> tuple[Any, Any]:
    """Those alone: what is measured on random models needs no weights of these."""
    return load_without_weights(target, "target")[0], load_without_weights(draft, "draft")[0]


def _widened(pair: tuple[Any, Any], vocabularies: tuple[int, int] | None) -> tuple[Any, Any]:
    """The pair with vocabularies of such sizes."""
    if vocabularies is None:
        return pair
    target, draft = (with_vocabulary(model, tokenizer, n) for (model, tokenizer), n in zip(pair, vocabularies, strict=True))
    return target, draft


def _enlarged(target: Any, draft: Any, ratio: float | None, large: bool) -> tuple[Any, Any]:
    """The pair as dear as a large one, or the target until its forward costs `ratio` forwards of the draft."""
    big, small = target[0], draft[0]
    if large:
        big, small = sized(big, *LARGE), sized(small, *SMALL)
    if ratio is not None:
        big = stretched_to(big, ratio * forward_seconds(small))
    return (big, target[1]), (small, draft[1])


def _bench_prompts(file: Path | None) -> tuple[list[str], list[str]]:
    """The prompts to measure on, and others to tune on: of the shipped ones every sixth, of a file every other one."""
    if file is None:
        return prompts()[::EVERY], [text for i, text in enumerate(prompts()) if i % EVERY]
    texts = [line for line in sample(file) if line.strip()]
    return [text.rstrip("\n") for text in texts[::2]], [text.rstrip("\n") for text in texts[1::2]]


def _print_drafters(rows: list[DrafterRow]) -> None:
    for kind in dict.fromkeys(row.kind for row in rows):
        table = Table(title=kind)
        for name in ("", "same ids", "tokens per\nforward", "draft\nforwards", "speed"):
            table.add_column(name, justify="right" if name else "left", no_wrap=not name)
        for row in (row for row in rows if row.kind == kind):
            figures = f"{row.tokens_per_forward:.2f}", str(row.draft_forwards), f"{row.speed:.2f}"
            table.add_row(row.system, "" if row.identical is None else f"{row.identical}/{row.prompts}", *figures)
        Console(highlight=False, width=100).print(table)
    typer.echo("speed: median over prompts of the seconds of the target alone ÷ those of the system.")


def _print_bench(report: dict[str, Any]) -> None:
    typer.echo(f"Making an instance of the loaded models takes {report['build_seconds']:.2f} s.")
    for setting, drafts in report["settings"].items():
        for kind, rows in drafts.items():
            _print_rows(f"{SETTINGS[setting].title}, the draft {kind}", rows)
    typer.echo("same ids: as the target alone; of sampled texts, as xtok without a draft for the same seeds.")
    typer.echo("chain, tree: of the draft alone, without prompt lookup, as much guessed in every round.")
    typer.echo("UAG: transformers' universal assisted generation.")
    typer.echo("speed: median over prompts of the seconds per token of the target alone ÷ those of the system.")
    typer.echo("lost: the target's tokens inside what the draft guessed right, yet not accepted.")
    typer.echo("ceiling: the share of both models' forwards; at 100% all else would be free.")


def _print_rows(title: str, rows: list[Row]) -> None:
    table = Table(title=title)
    for name in ("", "same ids", "tokens per\nforward", "target\nforwards", "draft\nforwards", "speed", "lost per\nround"):
        table.add_column(name, justify="right" if name else "left", no_wrap=not name)
    for row in rows:
        table.add_row(*_bench_cells(row))
    Console(highlight=False, width=100).print(table)
    _print_split([row for row in rows if row.split is not None])


def _print_split(rows: list[Row]) -> None:
    table = Table(title="where the time goes")
    parts = list(rows[0].split or {}) if rows else []
    for name in ("", *parts, "ceiling"):
        table.add_column(name, justify="right" if name else "left", no_wrap=not name)
    for row in rows:
        table.add_row(row.system, *(f"{share:.1%}" for share in (row.split or {}).values()), f"{row.ceiling or 0:.1%}")
    Console(highlight=False, width=100).print(table)


def _print_contexts(rows: list[ContextRow]) -> None:
    table = Table(title="milliseconds per round beside the models' forwards")
    for name in ("context", "", "align", "guess", "pick"):
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        table.add_row(f"{row.context:,}", row.budget, *(f"{part:.2f}" for part in (row.align, row.guess, row.pick)))
    Console(highlight=False, width=100).print(table)


def _print_vocabularies(rows: list[VocabularyRow]) -> None:
    sizes = list(dict.fromkeys((row.target, row.draft) for row in rows))
    times = {(row.what, row.target, row.draft): f"{row.milliseconds:,.2f}" for row in rows}
    table = Table(title="milliseconds beside the models' forwards, by the ids of target and draft")
    for name in ("", *(f"{target:,} × {draft:,}" for target, draft in sizes)):
        table.add_column(name, justify="right" if name else "left")
    for what in dict.fromkeys(row.what for row in rows):
        table.add_row(what, *(times[(what, *size)] for size in sizes))
    Console(highlight=False, width=100).print(table)


def _print_batches(rows: list[BatchRow]) -> None:
    for setting in dict.fromkeys(row.setting for row in rows):
        table = Table(title=f"{SETTINGS[setting].title}: tokens per second of all texts")
        for name in ("texts", "", "tokens/s", "speed", "tokens per\nforward", "identical", "target", "draft", "rest"):
            table.add_column(name, justify="right" if name else "left", no_wrap=not name)
        for row in (row for row in rows if row.setting == setting):
            same = "" if row.identical is None else f"{row.identical:.0%}"
            speed = f"{row.tokens_per_second:,.0f}", f"{row.speed:.2f}", f"{row.tokens_per_forward:.2f}"
            shares = [f"{row.split[part]:.0%}" if row.split else "" for part in ("target", "draft", "rest")]
            table.add_row(str(row.texts), row.system, *speed, same, *shares)
        Console(highlight=False, width=110).print(table)
    typer.echo("speed: how many times as fast as transformers' batches of as many texts. identical: texts with their ids.")
    typer.echo("target, draft, rest: shares of the time: of the target's forwards, of the draft's, and of all else.")


def _print_sampled(rows: list[SampledRow]) -> None:
    table = Table()
    for name in ("T", "", "tokens per\nforward", "surprise", "excess", "law of the\nfirst id", "noise"):
        table.add_column(name, justify="right" if name else "left", no_wrap=not name)
    for row in rows:
        figures = (row.failure or "failed",) if row.tokens_per_forward is None else _sampled_cells(row)
        table.add_row(str(row.temperature), row.system, *figures)
    Console(highlight=False, width=100).print(table)
    typer.echo("surprise: mean negative log-likelihood of the ids under the target's own law, in nats.")
    typer.echo(
        "excess: its distance from that law's entropy in standard deviations; beyond 4, they are draws from another law."
    )
    typer.echo("law: p-value of the first ids against their exact probabilities; near 0, they are draws from another law.")


def _sampled_cells(row: SampledRow) -> tuple[str, ...]:
    share = "" if row.noise_share is None else f"{row.noise_share:.1%}"
    return f"{row.tokens_per_forward:.2f}", f"{row.surprise:.2f}", f"{row.excess:+.1f}", f"{row.law:.3g}", share


def _bench_cells(row: Row) -> tuple[str, ...]:
    return (
        row.system,
        "" if row.identical is None else f"{row.identical}/{row.prompts}",
        f"{row.tokens_per_forward:.2f}",
        str(row.target_forwards),
        str(row.draft_forwards),
        f"{row.speed:.2f}",
        "" if row.lost_per_round is None else f"{row.lost_per_round:.3f}",
    )
