"""The command line, `xtok`: a module for each group of commands.

What takes long to import is imported when it is used, so that `xtok --version`, help and completion don't wait for it.
"""

import sys
from typing import Annotated

import typer

from xtok import __version__
from xtok.cli.bench import bench
from xtok.cli.console import on_the_command_line
from xtok.cli.generate import generate
from xtok.cli.inspect import inspect
from xtok.cli.serve import serve
from xtok.cli.train import train_heads, tune_draft
from xtok.cli.verify import verify

app = typer.Typer(
    help="Lossless speculative decoding for transformers, with any draft model, even one with another tokenizer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The entry point of `xtok` and of `python -m xtok`."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal that can't show Japanese shows its escapes
    app(prog_name="xtok")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"xtok {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@on_the_command_line
def demo() -> None:
    """Answer questions with SmolLM2 (downloaded once, 93 MB) and with Qwen if it is in the cache, beside the target alone."""
    from xtok.cli.demo import demonstrate

    if not demonstrate():
        raise typer.Exit(1)


for command in (generate, serve, inspect, verify, bench, demo, tune_draft, train_heads):
    app.command()(command)
