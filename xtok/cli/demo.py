"""The demonstration: the shipped pair beside its target alone, and the same with a target of many more blocks."""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from transformers.utils import logging

from xtok.assisted import XTokAssisted
from xtok.bench.runs import by_transformers
from xtok.bench.stretch import forward_seconds, stretch
from xtok.models.load import load
from xtok.models.timing import timed
from xtok.pair import DRAFT, TARGET, TUNED
from xtok.results.generation import Generation
from xtok.results.progress import busy
from xtok.results.terminal import legend, tinted
from xtok.results.trace import Token

SAMPLES = {
    "といっても、八っちゃんは眼ばかりくりくりさせて、": "Even so, Hatchan only goggled, wide-eyed, and …",
    "Ｋ君はここを話すとき、その瞳はじっと私の瞳に魅り非常に緊張した様子でした。": (
        "As K told this part, his eyes held mine, and he seemed very tense."
    ),
    "お医者さんは、白い鬚の方のではない、金縁の眼がねをかけた方のだった。": (
        "The doctor wasn't the one with the white beard, but the one with the gold-rimmed glasses."
    ),
}
"""Openings of paragraphs that neither model was trained on, and what they mean."""
ARGUMENTS: dict[str, Any] = {"max_new_tokens": 48, "do_sample": False, "repetition_penalty": 1.3}
BLOCKS = 140
"""By how many blocks the target is enlarged. Deep rather than wide: a forward of several ids then costs about what one of a
single id costs, as it does on an accelerator."""
WIDTH = 100
"""In columns, if there is no terminal."""
ALONE, DRAFTED, TUNED_DRAFT = "alone", "xtok, draft", "xtok, tuned draft"
SMALL, LARGE = "as it ships", "enlarged"
INTRODUCTION = (
    "What you will see\n\n"
    "A target model writes Japanese: on its own, and by xtok. There, a small model, which has another tokenizer and was "
    "trained apart from it, guesses what comes next (the draft). So does what the text repeats (prompt lookup), and what the "
    "target held for likely before (token recycling). "
    "One forward of the target checks all guesses of a round. The target picks every token itself, so both texts must be the "
    "same, token by token: a right guess saves a forward, a wrong one changes nothing.\n"
)
SETTINGS = (
    "The target that ships is tiny: a forward takes {small:.1f} ms, one of its draft {draft:.1f} ms. Here it has {blocks} "
    "further blocks, which change nothing of what it says, so that a forward takes {large:.0f} ms, as that of a larger model "
    "would. The table at the end has both. The two texts are written in turns; the clock of one stands still while the other "
    "is written. They are greedy, with a repetition penalty of {penalty}, so that they don't go round in circles.\n"
)
OWN = """
Your own pair, by hub ids or folders:

  xtok inspect --target TARGET --draft DRAFT               # how well they fit
  xtok generate "…" --target TARGET --draft DRAFT --show   # a text, tinted by who guessed
  xtok tune-draft --target TARGET --draft DRAFT --prompts FILE --out FOLDER
"""
TITLES = "the target alone", "by xtok, with the draft"
System = tuple[str, str]
"""Which target, and what guesses."""


class Run:
    """A text while it is written by one system. `seconds`: what its own tokens took. `generation`: None until it has ended."""

    def __init__(self, xt: XTokAssisted, prompt: str) -> None:
        self.xt = xt
        self.tokens: list[Token] = []
        self.seconds = 0.0
        self.generation: Generation | None = None
        self._left = xt.stream_tokens(prompt, **ARGUMENTS)

    def advance(self) -> None:
        """Go on by a token."""
        with timed() as span:
            token = next(self._left, None)
        self.seconds += span.seconds
        if token is None:
            self.generation = self.xt.last[0]
        else:
            self.tokens.append(token)

    def gives(self, ids: list[int]) -> bool:
        """Whether its ids are these."""
        return [token.id for token in self.tokens] == ids


def demonstrate() -> bool:
    """Write a few texts by the target alone and with its drafts. Whether every token was what transformers gives."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(INTRODUCTION)
    quiet: Any = logging
    quiet.disable_progress_bar()
    torch.set_num_threads(1)  # models this small gain nothing from more, and lose a lot on a busy machine
    with busy("loading the models, and enlarging the target"):
        systems = _systems()
        alone = systems[SMALL, ALONE].model, systems[SMALL, ALONE].tokenizer
        truth = by_transformers(alone, list(SAMPLES), **ARGUMENTS).ids
        settings = _settings(systems)
    console.print(settings)
    runs = {name: [Run(xt, prompt) for prompt in SAMPLES] for name, xt in systems.items()}
    for prompt, ids, *raced in zip(SAMPLES, truth, runs[LARGE, ALONE], runs[LARGE, DRAFTED], strict=True):
        _race(console, prompt, raced, ids)
    console.print("Now the same texts are timed, which takes some ten seconds …\n")  # a spinner would take some of the time
    for run in (run for some in runs.values() for run in some):
        _finish([run])
    return _print_summary(console, runs, truth)


def _systems() -> dict[System, XTokAssisted]:
    """Both targets with each draft. The first texts of a pair pay for its start, so each has written one."""
    small = load(TARGET, "target")
    targets = {SMALL: small, LARGE: (stretch(small[0], BLOCKS, small[0].config.intermediate_size), small[1])}
    drafts = {ALONE: None, DRAFTED: load(DRAFT, "draft"), TUNED_DRAFT: load(TUNED, "draft")}
    systems = {(target, draft): XTokAssisted(targets[target], drafts[draft]) for target in targets for draft in drafts}
    for xt in systems.values():
        xt.generate("吾輩は猫である。", **ARGUMENTS | {"max_new_tokens": ARGUMENTS["max_new_tokens"] // 2})
    return systems


def _settings(systems: dict[System, XTokAssisted]) -> str:
    small, draft = systems[SMALL, DRAFTED].setup.models
    models = {"small": small, "draft": draft, "large": systems[LARGE, ALONE].model}
    milliseconds = {name: 1000 * forward_seconds(model) for name, model in models.items()}
    return SETTINGS.format(blocks=BLOCKS, penalty=ARGUMENTS["repetition_penalty"], **milliseconds)


def _finish(runs: list[Run], show: Callable[[], object] = lambda: None) -> None:
    """Write texts to their ends, always going on with the one that has taken less time so far."""
    while going := [run for run in runs if run.generation is None]:
        min(going, key=lambda run: run.seconds).advance()
        show()


def _race(console: Console, prompt: str, runs: list[Run], truth: list[int]) -> None:
    """Write a text by two systems: side by side on a terminal, else one below the other."""
    console.print(Text(prompt, style="bold"), soft_wrap=True)
    console.print(Text(f"({SAMPLES[prompt]})", style="italic"), soft_wrap=True)
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            _finish(runs, lambda: live.update(_columns(runs), refresh=True))
    else:
        _finish(runs)
        for title, run in zip(TITLES, runs, strict=True):
            console.print(f"\n{title}:", *_cell(run), sep="\n", soft_wrap=True)
    same = all(run.gives(truth) for run in runs)
    answer, color = ("yes", "green") if same else ("NO", "red")
    console.print(Text(f"identical to the target alone: {answer}\n", style=f"bold {color}"))


def _columns(runs: list[Run]) -> Table:
    table = Table(expand=True)
    for title in TITLES:
        table.add_column(title, ratio=1, overflow="fold")
    table.add_row(*(Group(*_cell(run)) for run in runs))
    return table


def _cell(run: Run) -> tuple[Text, Text, Text]:
    """The text so far, its figures, and who guessed how much of it."""
    forwards = f", {run.generation.stats.target_forwards} forwards of the target" if run.generation else ""
    figures = Text(f"\n{len(run.tokens)} tokens{forwards}, {run.seconds:.1f} s")
    return tinted(run.tokens, run.xt.names), figures, legend(run.tokens, run.xt.names)


def _print_summary(console: Console, runs: dict[System, list[Run]], truth: list[list[int]]) -> bool:
    """Print what was measured, what is slower, and how to go on. Whether all texts are those of the target alone."""
    same = {name: all(run.gives(ids) for run, ids in zip(some, truth, strict=True)) for name, some in runs.items()}
    seconds = {name: sum(run.seconds for run in some) for name, some in runs.items()}
    speeds = {(target, by): seconds[target, ALONE] / own for (target, by), own in seconds.items()}
    table = Table(title=f"The same {len(truth)} texts, measured just now")
    for title in ("target", "by", "tokens per forward", "by draft", "by other guesses", "speed", "identical"):
        named = title in ("target", "by")
        table.add_column(title, justify="left" if named else "right", no_wrap=named)
    for (target, by), some in runs.items():
        name, answer = (target if by == ALONE else "", by), "yes" if same[target, by] else "NO"
        table.add_row(*name, *_shares(some), f"{speeds[target, by]:.2f}", answer, end_section=by == TUNED_DRAFT)
    console.print(table)
    console.print(_comment(speeds))
    console.print(OWN, soft_wrap=True)
    return all(same.values())


def _shares(runs: list[Run]) -> list[str]:
    """Tokens per forward, and what share of them was guessed by a draft, and by prompt lookup and token recycling."""
    sources = Counter(token.draft for run in runs for token in run.tokens)
    tokens, others = sources.total(), sources["prompt lookup"] + sources["token recycling"]
    forwards = sum(run.generation.stats.target_forwards for run in runs if run.generation)
    shares = (tokens - others - sources[None], others)
    return [f"{tokens / forwards:.2f}", *(f"{share / tokens:.0%}" for share in shares)]


def _comment(speeds: dict[System, float]) -> str:
    """What the speeds are, and what is slower than the target alone."""
    text = "Speed is in multiples of the target alone. Every text was compared with that of transformers' own generate. "
    slower = [f"{by}, beside the target {target} ({speed:.2f})" for (target, by), speed in speeds.items() if speed < 1]
    if slower:
        text += f"Slower than the target alone: {'; '.join(slower)}. "
    return text + (
        "xtok saves forwards of the target: if they cost little more than the draft's, as the tiny target's do, there is "
        "nothing to gain."
    )
