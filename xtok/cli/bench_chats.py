"""`xtok bench chats`: questions as chats, by the target alone, by transformers' assisted generation, and by xtok."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xtok.cli.bench_options import LimitOption, TokensOption
from xtok.cli.console import (
    DeviceOption,
    DraftOption,
    DtypeOption,
    JsonOption,
    PairOption,
    TargetOption,
    load_pair,
    on_the_command_line,
    print_found,
    read_lines,
    sources,
)

if TYPE_CHECKING:
    from xtok.bench.chats import Question


@on_the_command_line()
def chats(
    named: PairOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    file: Annotated[
        Path | None,
        typer.Option("--prompts", help="A file with one question per line.", show_default="32 questions in eight kinds"),
    ] = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = 128,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="How to generate: greedy, sampled (T = 0.8), or own (sampled as the target's configuration says). "
            "May be given again.",
            show_default="all three",
        ),
    ] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Questions of eight kinds as chats, on one thread: the target alone, transformers' assisted generation, and xtok."""
    from xtok.bench import chats, runs

    settings, asked = runs.named_settings(setting, known=chats.CHAT_SETTINGS), asked_questions(file, limit)
    pair = load_pair(*sources(named, target, draft), device, dtype)
    with runs.one_thread():
        found = {name: chats.compare_chats(*pair, asked, way, max_new_tokens=max_new_tokens) for name, way in settings.items()}
    kinds = [row for rows, _ in found.values() for row in rows]
    by_setting = {name: rows for name, (_, rows) in found.items()}
    titles = {name: settings[name].title for name in found}
    shape = {"threads": 1, "dtype": str(pair[0][0].dtype).removeprefix("torch."), "max_new_tokens": max_new_tokens}
    tables: dict[str, Sequence[Any]] = {f"xtok by kind of question, up to {max_new_tokens} tokens": chats.by_kind(kinds)}
    tables |= {titles[name]: rows for name, rows in by_setting.items()}
    print_found({**shape, "titles": titles, "kinds": kinds, "settings": by_setting}, tables, json)
    if not json:
        typer.echo(f"One thread, {shape['dtype']}, {len(asked)} questions.")


def asked_questions(file: Path | None, limit: int | None) -> "list[Question]":
    """All lines of a file, or the questions that ship, up to a limit."""
    from xtok.bench.chats import Question, questions

    return (questions() if file is None else [Question("of the file", line) for line in read_lines(file)])[:limit]
