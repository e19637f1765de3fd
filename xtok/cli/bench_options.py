"""What the commands of `xtok bench` share: options, which may also come before a command's name."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import typer

from xtok.cli.console import held_out, read_lines

if TYPE_CHECKING:
    from xtok.bench.runs import Setting

PromptsOption = Annotated[
    Path | None, typer.Option("--prompts", help="A file with one prompt per line.", show_default="20 held-out prompts")
]
LimitOption = Annotated[
    int | None, typer.Option("--limit", min=1, help="Use only this many prompts, the first ones.", show_default="all")
]
TokensOption = Annotated[int, typer.Option(min=1, help="How many tokens to write for each prompt.")]
GuessOption = Annotated[int, typer.Option(min=1, help="How many draft tokens to guess where the length is fixed.")]


class Sample(NamedTuple):
    """Options that say which prompts to measure on."""

    file: PromptsOption = None
    limit: LimitOption = None

    def prompts(self, named: str | None) -> list[str]:
        """All lines of the file, or the prompts of the pair that is named, whatever the limit is."""
        return held_out(named) if self.file is None else read_lines(self.file)


class Ways(NamedTuple):
    """Options that say how to generate."""

    setting: Annotated[
        list[str] | None,
        typer.Option(help="How to generate: greedy, penalty or sampled. May be given again.", show_default="all three"),
    ] = None
    penalty: Annotated[
        float | None,
        typer.Option("--repetition-penalty", min=1, help="The repetition penalty for --setting penalty.", show_default="1.2"),
    ] = None

    def settings(self) -> "dict[str, Setting]":
        """The settings to measure under, by name. Errors are those of `named_settings`."""
        from xtok.bench.runs import named_settings

        return named_settings(self.setting, self.penalty)


class Size(NamedTuple):
    """Options that enlarge the models."""

    ratio: Annotated[
        float | None,
        typer.Option(min=1, help="Enlarge the target until its forward pass takes this many times as long as the draft's."),
    ] = None
    large: Annotated[
        bool, typer.Option("--large", help="Enlarge both models to the sizes of llm-jp-13B and open-calm-small: 27 GB.")
    ] = False

    def enlarged(self, pair: tuple[Any, Any]) -> tuple[Any, Any]:
        """A pair of models, enlarged."""
        from xtok.bench.pairs import enlarged

        return enlarged(pair, self.ratio, self.large)


def unless_a_command_follows(measure: Callable[..., None]) -> Callable[..., None]:
    """Passes options that come before the name of a command on to that command, instead of calling `measure`."""

    @wraps(measure)
    def run(ctx: typer.Context, **options: Any) -> None:
        name, group = ctx.invoked_subcommand, ctx.command
        if name is None:
            return measure(ctx=ctx, **options)
        sources: Any = {option: ctx.get_parameter_source(option) for option in options}
        given = {option: ctx.params[option] for option in options if sources[option].name == "COMMANDLINE"}
        known = {option.name for option in cast("Any", group).commands[name].params}
        if others := [option.opts[0] for option in group.params if option.name in given.keys() - known]:
            ctx.fail(f"{', '.join(others)} has no effect on xtok bench {name}. Leave it out.")
        ctx.default_map = {name: given}
        return None

    return run
