"""The demonstration: a real chat model, and the Japanese pair that ships, each beside its target alone."""

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
from xtok.drafts.heads import HeadsDrafter
from xtok.drafts.policy.settings import Budget
from xtok.errors import InvalidInputError
from xtok.models.load import load
from xtok.models.prompts import Prompt
from xtok.models.timing import timed
from xtok.pair import DRAFT, TARGET, pair
from xtok.results.generation import Generation
from xtok.results.progress import stage
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
QUESTIONS = ("What causes the seasons on Earth? Answer in three sentences.", "Write a polite email that asks for a day off.")
ANSWERED: dict[str, Any] = {"max_new_tokens": 96, "do_sample": False}
ARGUMENTS: dict[str, Any] = {"max_new_tokens": 48, "do_sample": False, "repetition_penalty": 1.3}
ROUND = Budget(2, width=4, nodes=7, schedule="constant")
"""The budget of each round of the real pair. On a CPU, eight rows cost its target little more than one."""
BLOCKS = 140
"""How many blocks are added to the Japanese target. It is made deep rather than wide, so that a forward pass of several ids
costs about as much as one of a single id, as on an accelerator."""
WIDTH = 100
"""The width of the output in columns, without a terminal."""
ALONE, DRAFTED = "alone", "xtok"
REAL, SMALL, LARGE = "SmolLM2", "Japanese, as it ships", "Japanese, enlarged"
INTRODUCTION = (
    "What you will see\n\n"
    "A target model generates each text twice: alone, and with xtok. With xtok, something small guesses the next tokens: a "
    "layer that reads the target's hidden states (heads), or a model with another tokenizer (the draft). Other guesses are "
    "what the text repeats (prompt lookup), and what the target found likely before (token recycling). One forward pass of the "
    "target verifies all guesses of a round. The target picks every token itself, so both texts must have the same tokens: "
    "a right guess saves a forward pass, a wrong one changes nothing. The two texts are generated in turns, and only their own "
    "time counts. One thread.\n"
)
ENGLISH = (
    "1. A real chat model\n\n"
    "SmolLM2-135M-Instruct (135 M parameters, bfloat16) answers questions greedily. Its heads of {parameters:.1f} M "
    "parameters were trained on its texts, with the method of xtok train-heads. In each round they and the other guesses "
    "make a tree of 7 tokens (a fixed budget).\n"
)
MISSING = "1. A real chat model\n\nIt is left out: {reason}\n"
JAPANESE = (
    "2. Japanese\n\n"
    "The pair that ships: a target of 5.3 M parameters and a draft of 1.4 M, trained apart on public-domain books. The target "
    "is tiny: a forward pass takes {small:.1f} ms, one of its draft {draft:.1f} ms. Here it has {blocks} further blocks, which "
    "change nothing of what it says, so that a forward pass takes {large:.0f} ms, as that of a larger model would; the table "
    "at the end has both. Greedy, with a repetition penalty of {penalty}, so that texts don't go round in circles.\n"
)
OWN = """
Your own pair, by hub ids or folders:

  xtok inspect --target TARGET --draft DRAFT               # whether the draft pays
  xtok generate "…" --target TARGET --draft DRAFT --show   # a text, tinted by who guessed
  xtok train-heads --target TARGET --out FILE              # if there is no small model for yours; or make-draft
"""
TITLES = "the target alone", "by xtok"
System = tuple[str, str]
"""A target's name, and what generates: the target alone, or xtok."""


class Run:
    """A text while one system generates it. `seconds`: the time of its own rounds. `generation`: None until it has ended.
    `same`: whether its ids are as promised.
    """

    def __init__(self, xt: XTokAssisted, prompt: Prompt, arguments: dict[str, Any]) -> None:
        self.xt = xt
        self.tokens: list[Token] = []
        self.seconds = 0.0
        self.generation: Generation | None = None
        self.same = True
        self._left = xt.stream_tokens(prompt, **arguments)

    def advance(self) -> None:
        with timed() as span:
            token = next(self._left, None)
        self.seconds += span.seconds
        if token is None:
            self.generation = self.xt.last[0]
        else:
            self.tokens.append(token)

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


def demonstrate() -> bool:
    """Generate a few texts by targets alone and with their drafts. Returns whether all are as promised: the same in both ways,
    and the same as transformers', except after near-ties in half precision.
    """
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(INTRODUCTION)
    quiet: Any = logging
    quiet.disable_progress_bar()
    torch.set_num_threads(1)  # models this small gain nothing from more, and lose a lot on a busy machine
    runs = _english(console) | _japanese(console)
    return _print_summary(console, runs)


def _english(console: Console) -> dict[System, list[Run]]:
    """The runs of questions to the real pair; none if it can't be downloaded."""
    real = pair("smollm2")
    try:
        folder = real.target  # fetched at first
        with stage("Loading SmolLM2"):
            target, heads = load(folder, "target"), HeadsDrafter(real.heads)
            model = heads.model_for(target[0])
    except InvalidInputError as error:
        console.print(MISSING.format(reason=error))
        return {}
    console.print(ENGLISH.format(parameters=0 if model is None else model.num_parameters() / 1e6))
    systems = {(REAL, ALONE): XTokAssisted(target), (REAL, DRAFTED): XTokAssisted(target, heads, budget=ROUND)}
    chats: dict[str, Prompt] = {question: [{"role": "user", "content": question}] for question in QUESTIONS}
    for xt in systems.values():
        xt.generate([{"role": "user", "content": "Hello!"}], max_new_tokens=8, do_sample=False)
    with stage("Generating the same answers with transformers, to compare them"):
        truth = by_transformers(target, list(chats.values()), **ANSWERED).ids
    runs = {name: [Run(xt, chat, ANSWERED) for chat in chats.values()] for name, xt in systems.items()}
    for question, ids, *raced in zip(chats, truth, *runs.values(), strict=True):
        _race(console, question, "", raced, ids)
    return runs


def _japanese(console: Console) -> dict[System, list[Run]]:
    """Openings of paragraphs, continued by the pair that ships, its target enlarged; and the same texts by it as it is."""
    with stage("Loading the Japanese models, and enlarging the target"):
        small, draft = load(TARGET, "target"), load(DRAFT, "draft")
        large = stretch(small[0], BLOCKS, small[0].config.intermediate_size), small[1]
        systems = {
            (name, by): XTokAssisted(target, guessed)
            for name, target in ((SMALL, small), (LARGE, large))
            for by, guessed in ((ALONE, None), (DRAFTED, draft))
        }
        for xt in systems.values():  # the first text of an instance pays for its start
            xt.generate("吾輩は猫である。", **ARGUMENTS | {"max_new_tokens": ARGUMENTS["max_new_tokens"] // 2})
        truth = by_transformers(small, list(SAMPLES), **ARGUMENTS).ids
        milliseconds = {
            name: 1000 * forward_seconds(model[0]) for name, model in (("small", small), ("draft", draft), ("large", large))
        }
    console.print(JAPANESE.format(blocks=BLOCKS, penalty=ARGUMENTS["repetition_penalty"], **milliseconds))
    runs = {name: [Run(xt, prompt, ARGUMENTS) for prompt in SAMPLES] for name, xt in systems.items()}
    for (prompt, meaning), ids, *raced in zip(SAMPLES.items(), truth, runs[LARGE, ALONE], runs[LARGE, DRAFTED], strict=True):
        _race(console, prompt, meaning, raced, ids)
    for ids, *some in zip(truth, runs[SMALL, ALONE], runs[SMALL, DRAFTED], strict=True):
        _finish(some)
        _verdict(some, ids)
    return runs


def _finish(runs: list[Run], show: Callable[[], object] = lambda: None) -> None:
    """Generate texts to their ends, always continuing the one that took less time so far."""
    while going := [run for run in runs if run.generation is None]:
        min(going, key=lambda run: run.seconds).advance()
        show()


def _race(console: Console, prompt: str, meaning: str, runs: list[Run], truth: list[int]) -> None:
    """Write a text by two systems: side by side on a terminal, else one below the other. `truth`: transformers' own ids."""
    console.print(Text(prompt, style="bold"), soft_wrap=True)
    if meaning:
        console.print(Text(f"({meaning})", style="italic"), soft_wrap=True)
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            _finish(runs, lambda: live.update(_columns(runs), refresh=True))
    else:
        _finish(runs)
        for title, run in zip(TITLES, runs, strict=True):
            console.print(f"\n{title}:", *_cell(run), sep="\n", soft_wrap=True)
    console.print(Text(_verdict(runs, truth) + "\n", style=f"bold {'green' if runs[0].same else 'red'}"), soft_wrap=True)


def _verdict(runs: list[Run], truth: list[int]) -> str:
    """A sentence that compares two texts with each other and with transformers' ids. Sets `same` of both."""
    alone, drafted = runs
    first = next((i for i, (own, other) in enumerate(zip(alone.ids, truth, strict=False)) if own != other), None)
    ties = {tie.position: tie.margin for tie in (alone.generation.stats.near_ties if alone.generation else None) or ()}
    before = max((position for position in ties if first is not None and position <= first), default=None)
    same = alone.ids == drafted.ids and (alone.ids == truth or before is not None)
    alone.same = drafted.same = same
    if not same:
        other = "transformers' own generate" if alone.ids == drafted.ids else "the target alone"
        return f"identical to {other}: NO"
    if before is None:
        return "identical to the target alone: yes"
    return (
        f"identical to the target alone: yes. transformers' own generate differs from token {first} on: its forward "
        f"passes differ in the last bits of bfloat16, and at token {before} the two best were {ties[before]:.2f} logits apart. "
        "xtok's have fixed shapes (stable=True), so its ids are the same with any draft, each time."
    )


def _columns(runs: list[Run]) -> Table:
    table = Table(expand=True)
    for title in TITLES:
        table.add_column(title, ratio=1, overflow="fold")
    table.add_row(*(Group(*_cell(run)) for run in runs))
    return table


def _cell(run: Run) -> tuple[Text, Text, Text]:
    """The text so far, its figures, and how many of its tokens each draft guessed."""
    forwards = f", {run.generation.stats.target_forwards} forwards of the target" if run.generation else ""
    figures = Text(f"\n{len(run.tokens)} tokens{forwards}, {run.seconds:.1f} s")
    return tinted(run.tokens, run.xt.names), figures, legend(run.tokens, run.xt.names)


def _print_summary(console: Console, runs: dict[System, list[Run]]) -> bool:
    """Print what was measured, what is slower, and what to try next. Returns whether all texts are as promised."""
    seconds = {name: sum(run.seconds for run in some) for name, some in runs.items()}
    speeds = {(target, by): seconds[target, ALONE] / own for (target, by), own in seconds.items()}
    same = {name: all(run.same for run in some) for name, some in runs.items()}
    table = Table(title="The texts above, and the Japanese ones by the target as it ships")
    for title in ("target", "by", "tokens per forward pass", "by draft or heads", "by other guesses", "speed", "same as alone"):
        named = title in ("target", "by")
        table.add_column(title, justify="left" if named else "right", no_wrap=named)
    for (target, by), some in runs.items():
        name, answer = (target if by == ALONE else "", by), "yes" if same[target, by] else "NO"
        table.add_row(*name, *_shares(some), f"{speeds[target, by]:.2f}", answer, end_section=by == DRAFTED)
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
    text = (
        "Speed is in multiples of the target alone, whose ids the last column compares with. Each text was also compared with "
        "that of transformers' own generate: where they differ, after a near-tie of bfloat16, it is said below the text. "
    )
    slower = [f"{by}, beside the target {target} ({speed:.2f})" for (target, by), speed in speeds.items() if speed < 1]
    if slower:
        text += f"Slower than the target alone: {'; '.join(slower)}. "
    return text + (
        "xtok saves forward passes of the target. If they cost little more than the draft's, as the tiny target's do, there is "
        "nothing to gain."
    )
