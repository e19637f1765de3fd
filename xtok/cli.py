"""The command line: `xtok generate`, `xtok inspect`, `xtok demo`, `xtok tune-draft`, `xtok train-heads` and `xtok bench`."""

import json
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from xtok.align.fit import Fit, Side, fit
from xtok.assisted import XTokAssisted
from xtok.bench.report import app as bench
from xtok.budget import Budget
from xtok.console import (
    EVERY,
    OWN_DRAFT,
    OWN_TARGET,
    SHIPPED,
    DeviceOption,
    DraftOption,
    DtypeOption,
    TargetOption,
    each,
    errors_in_one_line,
    load_pair,
    sample,
)
from xtok.generation import Generation
from xtok.models.load import load, load_without_weights
from xtok.models.placement import placements
from xtok.pair import DRAFT, TARGET, TUNED, prompts
from xtok.stats import Stats
from xtok.version import __version__

Found = TypeVar("Found")

GUESS_LENGTH = 5
LARGE, SMALL = (13e9, 40), (160e6, 12)
"""Parameters and blocks of llm-jp-13B and of open-calm-small."""
DEMO_PROMPTS = 4
DEMO_TOKENS = 64
DEMO_DRAFTS = {"With an unrelated draft": DRAFT, "With that draft, tuned on what the target writes": TUNED}

app = typer.Typer(
    help="Any large language model generates with the help of any small one, and gives exactly what it alone would.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")


def main() -> None:
    """The entry point of `xtok` and of `python -m xtok`."""
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
    quiet: Any = logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()


@app.command()
@errors_in_one_line()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.", show_default=False)],
    target: TargetOption = OWN_TARGET,
    draft: Annotated[
        str, typer.Option(help='Hub id or path of the model that guesses, or "none".', show_default=SHIPPED)
    ] = OWN_DRAFT,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens of the target to write at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="Sample at this temperature; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Sample from the likeliest tokens of this total.")] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed samples the same text.")] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Continue a text as the target alone would. The text goes to stdout, a summary to stderr."""
    helper = None if draft == "none" else draft
    xt = XTokAssisted(target, helper, device=each(device), dtype=each(dtype))
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "seed": seed} if temperature else {}
    generation = _printed(xt.stream(prompt, max_new_tokens=max_new_tokens, **{"do_sample": False, **sampling}))
    typer.echo(_summary(generation.stats), err=True)
    if generation.seed is not None:
        typer.echo(f"seed {generation.seed}", err=True)


def _printed(pieces: Generator[str, None, Generation]) -> Generation:
    """Print a text piece by piece, and give what it was."""
    generations: list[Generation] = []

    def keep() -> Iterator[str]:
        generations.append((yield from pieces))

    for piece in keep():
        print(piece, end="", flush=True)
    print()
    return generations[0]


def _summary(stats: Stats) -> str:
    parts = [
        f"{stats.new_tokens} tokens",
        f"{stats.target_forwards} forwards of the target",
        f"{stats.tokens_per_forward:.2f} tokens per forward",
    ]
    if stats.proposed:
        parts.append(f"{stats.acceptance_rate:.0%} of the guesses accepted")
    return ", ".join([*parts, f"{stats.seconds:.2f} s"])


@app.command()
@errors_in_one_line()
def inspect(
    target: TargetOption = OWN_TARGET,
    draft: DraftOption = OWN_DRAFT,
    text: Annotated[Path | None, typer.Option(help="A sample text in UTF-8.", show_default="held-out prompts")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say how well two models fit, before any generation. Reads their tokenizers and configurations, not their weights."""
    target_tokenizer, target_window = load_without_weights(target, "target")
    draft_tokenizer, draft_window = load_without_weights(draft, "draft")
    found = fit(target_tokenizer, draft_tokenizer, sample(text), target_window=target_window, draft_window=draft_window)
    if as_json:
        typer.echo(json.dumps(asdict(found), ensure_ascii=False, indent=2))
    else:
        _print_fit(found)


def _print_fit(found: Fit) -> None:
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


def _cells(side: Side, found: Fit) -> tuple[str, ...]:
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
@errors_in_one_line()
def demo() -> None:
    """Run the pair that ships on a few held-out prompts, beside the target alone, and compare every token.

    First with a draft that is unrelated to the target, then with the same draft tuned on the target's texts.
    """
    target = load(TARGET, "target")
    halves = {
        kind: XTokAssisted(target, draft, budget=Budget(5, width=4, schedule="constant")) for kind, draft in DEMO_DRAFTS.items()
    }
    torch.set_num_threads(1)  # models this small gain nothing from more, and lose a lot on a busy machine
    texts = prompts()[::EVERY][:DEMO_PROMPTS]
    results = []
    for kind, xt in halves.items():
        typer.echo(typer.style(f"{kind}\n", bold=True, underline=True))
        _compared(xt, texts[0])  # the first run of a model pays for its start
        half = [_compared(xt, text) for text in texts]
        for text, result in zip(texts, half, strict=True):
            _print_compared(text, result)
        _print_totals(half)
        results += half
    typer.echo(
        "What xtok saves is forwards of the target, so they are the figure to look at: with a large target they are nearly all "
        "of the time, whereas this tiny one costs little more than its draft and may well be faster alone."
    )
    if not all(result.identical for result in results):
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Compared:
    """One prompt run by xtok and by the target alone. Times are seconds of the whole call."""

    generation: Generation
    identical: bool
    seconds: float
    seconds_alone: float


def _compared(xt: XTokAssisted, prompt: str) -> _Compared:
    start = perf_counter()
    alone = _alone(xt.model, xt.tokenizer, prompt)
    between = perf_counter()
    generation = xt.generate(prompt, max_new_tokens=DEMO_TOKENS, do_sample=False)
    return _Compared(generation, generation.token_ids == alone, perf_counter() - between, between - start)


def _alone(model: Any, tokenizer: Any, prompt: str) -> list[int]:
    """The new ids that transformers' own greedy search gives, without xtok."""
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.device)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=DEMO_TOKENS, do_sample=False)
    new: list[int] = output[0, ids.shape[1] :].tolist()
    return new


def _print_compared(prompt: str, result: _Compared) -> None:
    stats = result.generation.stats
    typer.echo(typer.style(prompt, bold=True) + result.generation.text)
    typer.echo(f"  identical to the target alone: {'yes' if result.identical else 'NO'}")
    typer.echo(f"  tokens per forward of the target: {stats.tokens_per_forward:.2f} (the target alone: 1)")
    typer.echo(f"  seconds: {result.seconds:.2f} (the target alone: {result.seconds_alone:.2f})\n")


def _print_totals(results: list[_Compared]) -> None:
    stats = [result.generation.stats for result in results]
    tokens, forwards = sum(one.new_tokens for one in stats), sum(one.target_forwards for one in stats)
    same = sum(result.identical for result in results)
    seconds, alone = sum(result.seconds for result in results), sum(result.seconds_alone for result in results)
    typer.echo(
        f"{same} of {len(results)} identical; {tokens} tokens in {forwards} forwards of the target "
        f"({tokens / forwards:.2f} per forward); {seconds:.2f} s with the draft, {alone:.2f} s alone.\n"
    )


@app.command("tune-draft")
@errors_in_one_line()
def tune(
    prompts_from: Annotated[Path, typer.Option("--prompts", help="A file with a prompt per line, or a folder of such files.")],
    out: Annotated[Path, typer.Option(help="The folder for the tuned draft.")],
    target: TargetOption = OWN_TARGET,
    draft: DraftOption = OWN_DRAFT,
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

    texts = [line.rstrip("\n") for file in _files(prompts_from) for line in sample(file)]
    pair = load_pair(target, draft, device, dtype)
    shape: dict[str, Any] = {"starts": starts, "max_new_tokens": max_new_tokens, "sampled": sampled, "temperature": temperature}
    done = tune_draft(*pair, texts, out, epochs=epochs, learning_rate=learning_rate, lora=lora, **shape)
    typer.echo(
        f"{out}: tokens per forward of the target, on prompts kept apart: {done.after:.2f} with it, {done.before:.2f} with the "
        f"draft as it was ({done.texts} texts learnt)."
    )
    for way, (before, after) in done.ways.items():
        typer.echo(f"  {way}: {after:.2f}, before {before:.2f}")


@app.command("train-heads")
@errors_in_one_line()
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
    from xtok.tune import train_heads

    texts = [line.rstrip("\n") for file in _files(data) for line in sample(file)]
    shape: dict[str, Any] = {"starts": starts, "max_new_tokens": max_new_tokens, "sampled": sampled, "temperature": temperature}
    model = load(target, "target", placements(device, dtype, None)[0])
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
