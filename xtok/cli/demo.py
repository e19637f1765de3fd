"""The demonstration: a real chat model, and the Japanese pair that ships, each beside its target alone."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from rich.console import Console
from rich.text import Text
from transformers.utils import logging

from xtok.assisted import XTokAssisted
from xtok.bench.rows import Column, print_tables
from xtok.bench.runs import Written, by_transformers, first_difference
from xtok.drafts.heads import HeadsDrafter
from xtok.drafts.policy.settings import Budget
from xtok.errors import InvalidInputError
from xtok.models.load import Placement, load
from xtok.models.prompts import Prompt
from xtok.pair import DRAFT, TARGET, pair
from xtok.results.generation import Generation
from xtok.results.progress import stage
from xtok.results.terminal import legend, tinted

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
PRECISION = torch.bfloat16
"""That of the Japanese pair."""
ARGUMENTS: dict[str, Any] = {"max_new_tokens": 48, "do_sample": False, "repetition_penalty": 1.3}
ROUND = Budget(2, width=4, nodes=7, schedule="constant")
"""The budget of each round of the real pair. On a CPU, eight rows cost its target little more than one."""
WIDTH = 100
"""The width of the output in columns, without a terminal."""
INTRODUCTION = (
    "What you will see\n\n"
    "A target model generates each text twice: alone, and with xtok. With xtok, something small guesses the next tokens: a "
    "layer that reads the target's hidden states (heads), or a model with another tokenizer (the draft). Other guesses are "
    "what the text repeats (prompt lookup), and what the target found likely before (token recycling). One forward pass of the "
    "target verifies all guesses of a round. The target picks every token itself, so both texts must have the same tokens: "
    "a right guess saves a forward pass, a wrong one changes nothing. One thread.\n"
)
ENGLISH = (
    "1. A real chat model\n\n"
    "SmolLM2-135M-Instruct (135 M parameters, bfloat16) answers questions greedily. Its heads of {parameters:.1f} M "
    "parameters were trained on its texts, with the method of xtok train-heads. In each round they and the other guesses "
    "make a tree of 7 tokens (a fixed budget). In bfloat16, xtok's forward passes have fixed shapes.\n"
)
MISSING = "1. A real chat model\n\nIt is left out: {reason}\n"
BUNDLED = (
    "2. Japanese\n\n"
    "The pair that ships, in bfloat16: a target of 11.7 M parameters and a draft of 1.4 M, trained apart on public-domain "
    "books, with tokenizers that have nothing in common. Greedy, with a repetition penalty of {penalty}, so that texts don't "
    "go round in circles.\n"
)
OWN = """
Your own pair, by hub ids or folders (in a checkout, xtok is .venv/bin/xtok):

  xtok inspect --target TARGET --draft DRAFT               # whether the draft pays
  xtok generate "…" --target TARGET --draft DRAFT --show   # a text, tinted by who guessed
  xtok train-heads --target TARGET --out FILE              # if there is no small model for yours
"""


class Compared(NamedTuple):
    """A text by transformers, by xtok without a draft and by xtok. `same`: whether the ids are as promised."""

    target: str
    truth: Written
    alone: Generation
    drafted: Generation
    same: bool


def demonstrate() -> bool:
    """Generate a few texts by targets alone and with their drafts. Returns whether all are as promised: the same in both ways,
    and the same as transformers', except after near-ties in half precision.
    """
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(INTRODUCTION)
    quiet: Any = logging
    quiet.disable_progress_bar()
    torch.set_num_threads(1)  # models this small gain nothing from more, and lose a lot on a busy machine
    texts = [*_english(console), *_japanese(console)]
    names = dict.fromkeys(one.target for one in texts)
    print_tables({"The texts above": [_row([one for one in texts if one.target == name]) for name in names]})
    console.print(OWN, soft_wrap=True)
    return all(text.same for text in texts)


def _english(console: Console) -> list[Compared]:
    """Answers of the real pair; none if it can't be downloaded."""
    real = pair("smollm2")
    try:
        folder = real.target  # fetched at first
        with stage("Loading SmolLM2"):
            target, heads = load(folder, "target"), HeadsDrafter(str(real.heads))
            model = heads.model_for(target[0])
    except InvalidInputError as error:
        console.print(MISSING.format(reason=error))
        return []
    console.print(ENGLISH.format(parameters=0 if model is None else model.num_parameters() / 1e6))
    xts = XTokAssisted(target), XTokAssisted(target, heads, budget=ROUND)
    asked: dict[str, Prompt] = {question: [{"role": "user", "content": question}] for question in QUESTIONS}
    return [_compared(console, target, "SmolLM2", xts, *one, ANSWERED) for one in asked.items()]


def _japanese(console: Console) -> list[Compared]:
    """Openings of paragraphs, continued by the pair that ships."""
    with stage("Loading the Japanese models"):
        target, draft = (load(path, name, Placement(dtype=PRECISION)) for path, name in ((TARGET, "target"), (DRAFT, "draft")))
        xts = XTokAssisted(target), XTokAssisted(target, draft)
    console.print(BUNDLED.format(penalty=ARGUMENTS["repetition_penalty"]))
    return [_compared(console, target, "Japanese", xts, one, one, ARGUMENTS) for one in SAMPLES]


def _compared(
    console: Console,
    model: tuple[Any, Any],
    target: str,
    xts: tuple[XTokAssisted, XTokAssisted],
    shown: str,
    prompt: Prompt,
    arguments: Mapping[str, Any],
) -> Compared:
    """Write a text by the target alone and by xtok, one below the other, and unseen by transformers."""
    console.print(Text(shown, style="bold"), soft_wrap=True)
    if shown in SAMPLES:
        console.print(Text(f"({SAMPLES[shown]})", style="italic"), soft_wrap=True)
    if not xts[0].last:  # the first text of an instance pays for its start
        for xt in xts:
            xt.generate(prompt, **{**arguments, "max_new_tokens": 2})
        by_transformers(model, [prompt], **{**arguments, "max_new_tokens": 2})
    truth = by_transformers(model, [prompt], **arguments)
    alone, drafted = (xt.generate(prompt, **arguments) for xt in xts)
    for title, one in (("the target alone", alone), ("by xtok", drafted)):
        figures = (
            f"{one.stats.new_tokens} tokens, {one.stats.target_forwards} forwards of the target, {one.stats.seconds:.1f} s"
        )
        console.print(f"\n{title}:", tinted(one.tokens, one.drafts), f"\n{figures}", sep="\n", soft_wrap=True)
    console.print(legend(drafted.tokens, drafted.drafts), soft_wrap=True)
    same, said = verdict(alone, drafted.token_ids, truth.ids[0])
    console.print(Text(said + "\n", style=f"bold {'green' if same else 'red'}"), soft_wrap=True)
    return Compared(target, truth, alone, drafted, same)


def verdict(alone: Generation, drafted: list[int], truth: list[int]) -> tuple[bool, str]:
    """Whether the ids of a text are as promised, compared with each other and with transformers', and a sentence about it."""
    if alone.token_ids != drafted:
        return False, "identical to the target alone: NO"
    if (difference := first_difference(drafted, truth)) is None:
        return True, "identical to the target alone: yes"
    first = difference[0]
    ties = [tie for tie in alone.stats.near_ties or () if tie.position <= first]
    if not ties:
        return False, "identical to transformers' own generate: NO"
    return True, (
        f"identical to the target alone: yes. transformers' own generate differs from token {first} on: its forward "
        f"passes differ in the last bits of bfloat16, and at token {ties[-1].position} the two best were "
        f"{ties[-1].margin:.2f} logits apart. xtok's have fixed shapes (stable=True), so its ids are the same with any draft."
    )


class Row(NamedTuple):
    """The texts of a target: tokens per forward pass, who guessed them, and the speeds of xtok."""

    target: Annotated[str, Column("")]
    tokens_per_forward: Annotated[float, Column(form=".2f")]
    by_draft_or_heads: Annotated[float, Column(form=".0%")]
    by_other_guesses: Annotated[float, Column(form=".0%")]
    speed: Annotated[float, Column(form=".2f", note="times that of transformers' own generate.")]
    without_a_draft: Annotated[float, Column("speed without a draft", form=".2f")]
    same_as_alone: Annotated[str, Column()]


def _row(texts: Sequence[Compared]) -> Row:
    sources = Counter(token.draft for one in texts for token in one.drafted.tokens)
    tokens, others = sources.total(), sources["prompt lookup"] + sources["token recycling"]
    forwards = sum(one.drafted.stats.target_forwards for one in texts)
    theirs = sum(one.truth.seconds for one in texts) / sum(one.truth.tokens for one in texts) * tokens
    speed, without = (theirs / sum(getattr(one, kind).stats.seconds for one in texts) for kind in ("drafted", "alone"))
    same = "yes" if all(one.same for one in texts) else "NO"
    shares = (tokens - others - sources[None]) / tokens, others / tokens
    return Row(texts[0].target, tokens / forwards, *shares, speed, without, same)
