"""`xtok tune-draft` and `xtok train-heads`."""

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from xtok.bench.rows import Column, print_tables
from xtok.cli.console import DraftOption, Models, on_the_command_line, read_lines, resumable

PromptsOption = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        help="A file with one prompt per line, or a folder of such files.",
        show_default="questions that the target writes itself, if it has a chat template",
    ),
]
HoursOption = Annotated[
    float, typer.Option(help="How long to take, from some minutes on: two fifths of it to write texts, the rest to train.")
]
StartsOption = Annotated[int, typer.Option(min=1, help="How many beginnings of each prompt the target continues.")]
TokensOption = Annotated[int, typer.Option(min=1, help="How many tokens the target writes after each beginning.")]
EpochsOption = Annotated[int, typer.Option(min=1, help="The most epochs; training stops early when it gains nothing.")]


class Picks(NamedTuple):
    """Options that say how the target's tokens are picked."""

    sampled: Annotated[
        float,
        typer.Option(min=0, max=1, help="The share of texts that the target samples, from 0 to 1; the others are greedy."),
    ] = 0.5
    temperature: Annotated[
        float | None, typer.Option(help="The temperature of sampled texts.", show_default="the target's")
    ] = None


@on_the_command_line
def tune_draft(
    prompts_from: Annotated[Path, typer.Option("--prompts", help="A file with one prompt per line, or a folder of them.")],
    out: Annotated[Path, typer.Option(help="The folder for the tuned draft.")],
    models: Models,
    picks: Picks,
    draft: DraftOption = None,
    starts: StartsOption = 8,
    max_new_tokens: TokensOption = 64,
    epochs: EpochsOption = 6,
    learning_rate: Annotated[float | None, typer.Option(help="The learning rate.", show_default="by the draft's size")] = None,
    lora: Annotated[
        bool | None,
        typer.Option("--lora/--full", help="Train LoRA matrices, or all weights.", show_default="LoRA above 500 M parameters"),
    ] = None,
) -> None:
    """Fine-tune a draft on what the target writes after your prompts. If stopped, it resumes when run again."""
    from xtok.tune import tune_draft

    with resumable():
        texts = _lines(prompts_from)
        done = tune_draft(
            *models.load_pair(draft),
            texts,
            out,
            starts=starts,
            max_new_tokens=max_new_tokens,
            **picks._asdict(),
            epochs=epochs,
            learning_rate=learning_rate,
            lora=lora,
        )
    figures = f"{done.after:.2f} tokens per forward pass of the target with it, {done.before:.2f} with the draft as it was"
    typer.echo(f"{out}: on held-out prompts, {figures} (trained on {done.texts} texts).")
    for way, (before, after) in done.ways.items():
        typer.echo(f"  {way}: {after:.2f}, before {before:.2f}")
    if round(done.after, 2) <= round(done.before, 2):
        typer.echo("Nothing was gained. Keep the draft as it was, or give more prompts that are like those you will use.")


class _StepRow(NamedTuple):
    step: Annotated[int, Column()]
    guesses: Annotated[dict[str, float], Column(form=".3f")]


class _WayRow(NamedTuple):
    picked: Annotated[str, Column()]
    tokens_per_forward: Annotated[float, Column(form=".2f")]
    right: Annotated[dict[str, float], Column(form=".0%")]


@on_the_command_line
def train_heads(
    out: Annotated[Path, typer.Option(help="The file for the heads; a card is written beside it, FILE.md.")],
    models: Models,
    picks: Picks,
    prompts_from: PromptsOption = None,
    kind: Annotated[str, typer.Option(help="The kind of heads: sequential (like EAGLE's) or medusa.")] = "sequential",
    hours: HoursOption = 1.0,
    steps: Annotated[int, typer.Option(min=1, help="How many tokens ahead the heads learn to guess.")] = 4,
    size: Annotated[
        int | None, typer.Option(min=64, help="The width of sequential heads.", show_default="the target's hidden size")
    ] = None,
    vocabulary: Annotated[
        int, typer.Option(min=64, help="How many ids sequential heads can guess: the most frequent ones.")
    ] = 8192,
    starts: StartsOption = 4,
    max_new_tokens: TokensOption = 192,
) -> None:
    """Train heads for a target, which stays frozen, on texts that it writes. If stopped, it resumes when run again."""
    from xtok.tune import train_heads

    with resumable():
        texts = None if prompts_from is None else _lines(prompts_from)
        done = train_heads(
            models.load_target(),
            out,
            texts,
            kind=kind,  # type: ignore[arg-type] # which is checked there
            hours=hours,
            steps=steps,
            size=size,
            vocabulary=vocabulary,
            starts=starts,
            max_new_tokens=max_new_tokens,
            **picks._asdict(),
        )
    names = ("1st", "2nd", "3rd", "4th", "5th")
    rows = [_StepRow(i, dict(zip(names, ranks, strict=True))) for i, ranks in enumerate(done.accuracy, start=1)]
    ways = [
        _WayRow(way, value, {f"step {step}": share for step, share in enumerate(done.right[way], start=1)})
        for way, value in done.ways.items()
    ]
    print_tables(
        {"how often the most likely ids of each step were right, on held-out prompts": rows, "by way of picking": ways}
    )
    typer.echo(
        f"{out}: {done.after:.2f} tokens per forward pass of the target on held-out prompts; {done.parameters / 1e6:.1f} M "
        f"parameters, trained on {done.texts:,} texts with {done.tokens:,} tokens in all."
    )


def _lines(path: Path) -> list[str]:
    """The lines of a file, or of the text files of a folder, in order. Raises `InvalidInputError`."""
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    return [line for file in files for line in read_lines(file)]
