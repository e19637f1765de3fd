"""Tokens on a terminal, tinted by who guessed them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich import get_console
from rich.console import Console
from rich.text import Text

from xtok.results.page import TINTS, tints
from xtok.results.trace import Token

_INK = "#1b1b1b"
_NAMED = "cyan", "magenta", "yellow", "green", "bright_yellow", "red"
"""Backgrounds in place of `TINTS` on terminals of 16 colours, of which rich would take the same for most tints."""


def tinted(tokens: Iterable[Token], drafts: Sequence[str]) -> Text:
    """The text of some tokens; what the target picked by itself has no colour."""
    styles = _styles(drafts)
    return Text.assemble(*((token.text, styles[token.draft]) for token in tokens))


def legend(tokens: Sequence[Token], drafts: Sequence[str]) -> Text:
    """A legend: each draft in its colour, and how many tokens it guessed."""
    styles, counts = _styles(drafts), Counter(token.draft for token in tokens)
    parts = [(f" {name or 'the target'} {counts[name]} ", styles[name]) for name in (*drafts, None)]
    return Text("  ").join(Text(*part) for part in parts)


def show(console: Console, tokens: Iterator[Token], drafts: Sequence[str]) -> None:
    for token in tokens:
        console.print(tinted([token], drafts), end="", soft_wrap=True)
    console.print()


def _styles(drafts: Sequence[str]) -> dict[str | None, str]:
    named = dict(zip(TINTS.values(), _NAMED, strict=True)) if get_console().color_system == "standard" else {}
    ink = "black" if named else _INK
    return {None: ""} | {name: f"{ink} on {named.get(tint, tint)}" for name, tint in tints(drafts).items()}
