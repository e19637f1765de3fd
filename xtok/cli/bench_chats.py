"""`xtok bench chats`: questions as chats, by the target alone, by transformers' assisted generation, and by xtok."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from xtok.cli.bench_options import LimitOption, TokensOption
from xtok.cli.console import DraftOption, JsonOption, Models, on_the_command_line, print_found, read_lines
from xtok.pair import pair


@on_the_command_line
def chats(
    models: Models,
    draft: DraftOption = None,
    file: Annotated[
        Path | None,
        typer.Option("--prompts", help="A file with one question per line.", show_default="32 questions in eight kinds"),
    ] = None,
    heads: Annotated[
        Path | None, typer.Option(help="A file of heads, to measure as well.", show_default="those of --pair")
    ] = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = 128,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="How to generate: greedy, sampled (T = 0.8), or own (sampled, by the target's generation config). "
            "May be given again.",
            show_default="all three",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Chats on one thread, by kinds of questions: the target alone, transformers' assisted generation, and xtok."""
    from xtok.bench import chats, compare, runs
    from xtok.drafts.heads import HeadsDrafter

    settings = runs.named_settings(setting, known=chats.CHAT_SETTINGS)
    asked = chats.questions() if file is None else [chats.Question("of the file", line) for line in read_lines(file)]
    asked = asked[:limit]
    target, small = models.load_pair(draft)
    heads = heads or (None if models.named is None else pair(models.named).heads)
    shared: dict[str, Any] = {"max_new_tokens": max_new_tokens, "heads": None if heads is None else HeadsDrafter(heads)}
    with runs.one_thread():
        found = {name: chats.compare_chats(target, small, asked, way, **shared) for name, way in settings.items()}
    kinds = [row for rows, _ in found.values() for row in rows]
    by_setting = {name: rows for name, (_, rows) in found.items()}
    titles = {name: settings[name].title for name in found}
    shape = {"threads": 1, "dtype": str(target[0].dtype).removeprefix("torch."), "max_new_tokens": max_new_tokens}
    named = runs.XTOK if heads is None else compare.HEADS
    tables: dict[str, Sequence[Any]] = {f"by kind of question, up to {max_new_tokens} tokens: {named}": chats.by_kind(kinds)}
    tables |= {titles[name]: rows for name, rows in by_setting.items()}
    print_found({**shape, "titles": titles, "kinds": kinds, "settings": by_setting}, tables, json)
    if not json:
        typer.echo(f"One thread, {shape['dtype']}, {len(asked)} questions.")
