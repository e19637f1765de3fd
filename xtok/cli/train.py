"""`xtok tune-draft` and `xtok train-heads`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from xtok.cli.console import DraftOption, Models, on_the_command_line, read_lines


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
    starts: Annotated[int, typer.Option(min=1, help="How many beginnings of each prompt the target continues.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens the target writes after each beginning.")] = 64,
    epochs: Annotated[int, typer.Option(min=1, help="The most epochs; training stops early when it gains nothing.")] = 6,
    learning_rate: Annotated[float | None, typer.Option(help="The learning rate.", show_default="by the draft's size")] = None,
    lora: Annotated[
        bool | None,
        typer.Option("--lora/--full", help="Train LoRA matrices, or all weights.", show_default="LoRA above 500 M parameters"),
    ] = None,
) -> None:
    """Fine-tune a draft on what the target writes after your prompts. If stopped, it keeps its best so far."""
    from xtok.tune import tune_draft

    with _interruptible(out / "config.json", out):
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


@on_the_command_line
def train_heads(
    out: Annotated[Path, typer.Option(help="The file for the heads.")],
    models: Models,
    picks: Picks,
    prompts_from: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="A file with one prompt per line, or a folder of such files.",
            show_default="questions that the target writes itself, if it has a chat template",
        ),
    ] = None,
    kind: Annotated[str, typer.Option(help="The kind of heads: sequential (like EAGLE's) or medusa.")] = "sequential",
    hours: Annotated[
        float, typer.Option(help="How long to take, from some minutes on: two fifths of it to write texts, the rest to train.")
    ] = 1.0,
    steps: Annotated[int, typer.Option(min=1, help="How many tokens ahead the heads learn to guess.")] = 4,
    size: Annotated[
        int | None, typer.Option(min=64, help="The width of sequential heads.", show_default="the target's hidden size")
    ] = None,
    vocabulary: Annotated[
        int, typer.Option(min=64, help="How many ids sequential heads can guess: the most frequent ones.")
    ] = 8192,
    starts: Annotated[int, typer.Option(min=1, help="How many beginnings of each prompt the target continues.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens the target writes after each beginning.")] = 192,
) -> None:
    """Train heads for a target, which stays frozen, on texts that it writes. If stopped, it keeps its best so far."""
    from xtok.tune import train_heads

    with _interruptible(out, out):
        texts = None if prompts_from is None else _lines(prompts_from)
        done = train_heads(
            models.load()[0],
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
    typer.echo(
        f"{out}: {done.after:.2f} tokens per forward pass of the target on held-out prompts; {done.parameters / 1e6:.1f} M "
        f"parameters, trained on {done.texts:,} texts with {done.tokens:,} tokens in all."
    )
    for way, value in done.ways.items():
        steps_right = ", ".join(f"step {step} {share:.0%}" for step, share in enumerate(done.right[way], start=1))
        typer.echo(f"  {way}: {value:.2f}; the most likely token was right at {steps_right or 'no step'}")


@contextmanager
def _interruptible(file: Path, out: Path) -> Iterator[None]:
    """If Ctrl-C stops the training in this block, says what is kept: a training has kept something if `file` is new."""
    existed = file.exists()
    try:
        yield
    except KeyboardInterrupt:
        has_kept = file.exists() and not existed
        typer.echo(
            f"xtok: stopped. The best so far is in {out}." if has_kept else "xtok: stopped. Nothing was trained yet.", err=True
        )
        raise typer.Exit(130) from None


def _lines(path: Path) -> list[str]:
    """The lines of a file, or of the text files of a folder, in order. Raises `InvalidInputError`."""
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    return [line for file in files for line in read_lines(file)]
