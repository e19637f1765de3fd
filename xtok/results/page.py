"""A generation as a page: the text tinted by who guessed it, and the guesses of each round beside it."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from xtok.results.stats import Stats
from xtok.results.trace import WrittenRound

TINTS = ("#9bd0f5", "#f9cf8b", "#a8dfb5", "#e3b7e0", "#f2e57e", "#f4b0a0")
"""Of drafts, in order: told apart with any kind of colour vision, and dark text is read on all of them."""
_STYLE = """
.xtok { font-family: system-ui, sans-serif; line-height: 1.9; max-width: 48rem; color: #1b1b1b; background: #fff;
  padding: 1rem 1.25rem; border-radius: .5rem; }
.xtok .text { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 1.15rem; margin: .5rem 0 1rem; }
.xtok .round { position: relative; cursor: default; border-left: 1px solid #bbb; }
.xtok .round:hover, .xtok .round:focus { outline: 2px solid #444; outline-offset: 1px; }
.xtok .token, .xtok .key { color: #1b1b1b; border-radius: .15rem; padding: .1em 0; }
.xtok .guesses { display: none; position: absolute; left: 0; top: 1.9em; z-index: 1; width: max-content; max-width: 30rem;
  max-height: 22rem; overflow: auto; background: #fff; border: 1px solid #888; border-radius: .3rem; padding: .3rem .7rem;
  font-size: .85rem; line-height: 1.6; box-shadow: 0 2px 8px #0003; }
.xtok .round:hover .guesses, .xtok .round:focus .guesses { display: block; }
.xtok .guesses ul { list-style: none; margin: 0; padding-left: 1rem; }
.xtok .guesses > ul { padding-left: 0; }
.xtok .wrong { color: #767676; }
.xtok .key { padding: .1em .5em; margin-right: .5em; white-space: nowrap; }
.xtok .plain { border: 1px solid #bbb; }
.xtok table { border-collapse: collapse; font-size: .9rem; }
.xtok th, .xtok td { text-align: right; padding: .1rem .8rem .1rem 0; font-weight: normal; }
.xtok th:first-child { text-align: left; }
.xtok tr:first-child th { color: #555; }
"""


def tints(drafts: Sequence[str]) -> dict[str, str]:
    """The colour of each draft, as #rrggbb: a background for dark text."""
    return dict(zip(drafts, TINTS * len(drafts), strict=False))


def page(rounds: Iterable[WrittenRound], drafts: Sequence[str], stats: Stats) -> str:
    """A file for a browser that needs nothing else."""
    head = '<!doctype html><html><head><meta charset="utf-8"><title>xtok: who guessed what</title>'
    view = '<meta name="viewport" content="width=device-width"></head>'
    return f"{head}{view}<body>{section(rounds, drafts, stats)}</body></html>\n"


def section(rounds: Iterable[WrittenRound], drafts: Sequence[str], stats: Stats) -> str:
    """The part of a page that shows a generation."""
    shown, colours = list(rounds), tints(drafts)
    text = "".join(_round(one, colours) for one in shown)
    keys = "".join(f'<span class="key" style="background:{tint}">{escape(name)}</span>' for name, tint in colours.items())
    keys += '<span class="key plain">the target alone</span>'
    hint = "Each round is one forward of the target. Point at it to see what was guessed."
    legend = f"<div>{keys}</div><div><small>{hint}</small></div>"
    return (
        f'<div class="xtok"><style>{_STYLE}</style>{legend}<div class="text">{text}</div>{_counts(shown, drafts, stats)}</div>'
    )


def _round(one: WrittenRound, tints: dict[str, str]) -> str:
    tokens = "".join(_tinted(token.text, tints.get(token.draft or "")) for token in one.tokens)
    guessed = f'<span class="guesses">{_branches(one, -1, tints)}</span>' if one.guesses else ""
    return f'<span class="round" tabindex="0">{tokens}{guessed}</span>'


def _tinted(text: str, tint: str | None) -> str:
    style = f' style="background:{tint}"' if tint else ""
    return f'<span class="token"{style}>{escape(text)}</span>'


def _branches(one: WrittenRound, parent: int, tints: dict[str, str]) -> str:
    """What is guessed behind a guess, as a list; a guess without rivals stands on the line of the one before it."""
    lines = [f"<li>{''.join(_line(one, node, tints))}</li>" for node in _children(one, parent)]
    return f"<ul>{''.join(lines)}</ul>" if lines else ""


def _line(one: WrittenRound, node: int, tints: dict[str, str]) -> Iterator[str]:
    following = [node]
    while len(following) == 1:
        node = following[0]
        guess = one.guesses[node]
        kind = "right" if node in one.right else "wrong"
        draft = guess.draft or "the target"
        told = draft if guess.probability is None else f"{draft}, {guess.probability:.0%}"
        style = f"background:{tints[guess.draft]}" if guess.draft and node in one.right else ""
        yield f'<span class="{kind}" style="{style}" title="{escape(told)}">{escape(_visible(guess.text))}</span> '
        following = _children(one, node)
    yield _branches(one, node, tints)


def _children(one: WrittenRound, parent: int) -> list[int]:
    return [node for node, guess in enumerate(one.guesses) if guess.parent == parent]


def _visible(text: str) -> str:
    """A guess that would not be seen, as something that is."""
    return text.replace("\n", "↵").replace(" ", "␣") or "∅"


def _counts(rounds: Sequence[WrittenRound], drafts: Sequence[str], stats: Stats) -> str:
    guesses = [(guess.draft, node in one.right) for one in rounds for node, guess in enumerate(one.guesses)]
    rows = [(name, sum(by == name for by, _ in guesses), sum(by == name and right for by, right in guesses)) for name in drafts]
    lines = "".join(f"<tr><th>{escape(name)}</th><td>{guessed}</td><td>{right}</td></tr>" for name, guessed, right in rows)
    head = "<tr><th>draft</th><th>guessed</th><th>right</th></tr>"
    told = f"{stats.new_tokens} tokens in {stats.target_forwards} forwards of the target: {stats.tokens_per_forward:.2f} each."
    return f"<div>{told}{_near_ties(stats)}</div>" + (f"<table>{head}{lines}</table>" if rows else "")


def _near_ties(stats: Stats) -> str:
    """At which tokens another shape of forward pass might have given another text, if at any."""
    if not stats.near_ties:
        return ""
    first, *others = stats.near_ties
    more = f", and at {len(others)} more" if others else ""
    return (
        f" A near-tie at token {first.position + 1} (a margin of {first.margin:.3g}){more}: model.generate, whose forward "
        "passes have other shapes, may go on otherwise there."
    )
