"""The demonstration: real chat models, or the Japanese pair that ships, each beside transformers' own `generate`."""

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
from xtok.bench.verify import TRANSFORMERS, logit_gap
from xtok.drafts.heads import HeadsDrafter
from xtok.errors import InvalidInputError
from xtok.models.capabilities import traits
from xtok.models.load import load
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
}
"""Openings of paragraphs that neither model was trained on, and what they mean."""
ANSWERED: dict[str, Any] = {"max_new_tokens": 96, "do_sample": False}
SHORTER: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False}
CONTINUED: dict[str, Any] = {"max_new_tokens": 48, "do_sample": False, "repetition_penalty": 1.3}
QUESTIONS = ("What causes the seasons on Earth? Answer in three sentences.", "Write a polite email that asks for a day off.")
IN_TWO_LANGUAGES = ("Write a Python function that checks whether a word is a palindrome.", "自然言語処理とは何ですか。")
WIDTH = 100
"""The width of the output in columns, without a terminal."""
INTRODUCTION = (
    "What you will see\n\n"
    "A target model generates each text twice: alone, and with xtok. With xtok, something small guesses the next tokens: a "
    "layer that reads the target's hidden states (heads), or a model with another tokenizer (the draft). Other guesses are "
    "what the text repeats (prompt lookup), and what the target found likely before (token recycling). One forward pass of the "
    "target verifies all guesses of a round. The target picks every token itself, so both texts must have the same tokens: "
    "a right guess saves a forward pass, a wrong one changes nothing. Greedy, one thread.\n"
)
SMALL = (
    "1. A small chat model with heads\n\n"
    "SmolLM2-135M-Instruct answers questions. Its heads were trained on its texts, with the method of xtok train-heads.\n"
)
LARGE = (
    "2. A larger model and an unrelated draft\n\n"
    "Qwen2.5-Coder-1.5B-Instruct, and SmolLM2 as its draft model, which has another tokenizer.\n"
)
BUNDLED = (
    "2. Japanese\n\n"
    "The pair that ships, two tiny models that were trained apart on public-domain books, with tokenizers that have nothing in "
    "common. It writes nonsense, with a repetition penalty of {penalty}, so that texts don't go round in circles. For Qwen "
    "1.5B in its place, in code and Japanese, download it first (1.1 GB), and see the demo again:\n\n"
    '  xtok generate "日本の首都はどこですか。" --pair qwen\n'
)
MISSING = "1. A small chat model with heads\n\nIt is left out: {reason}\n"
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


class Models(NamedTuple):
    """A target as transformers loads it, and as xtok does, without a draft and with one."""

    name: str
    plain: tuple[Any, Any]
    alone: XTokAssisted
    drafted: XTokAssisted


def demonstrate() -> bool:
    """Generate a few texts by targets alone and with their drafts. Returns whether all are as promised: the same in both ways,
    and those of transformers' `generate`, but for near ties.
    """
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(INTRODUCTION)
    quiet: Any = logging
    quiet.disable_progress_bar()
    torch.set_num_threads(1)  # small models gain nothing from more, and lose a lot on a busy machine
    texts = [*_small(console), *(_large(console) if pair("qwen").is_here else _bundled(console))]
    names = dict.fromkeys(one.target for one in texts)
    print_tables({"The texts above": [_row([one for one in texts if one.target == name]) for name in names]})
    console.print(OWN, soft_wrap=True)
    return all(text.same for text in texts)


def _small(console: Console) -> list[Compared]:
    """Answers of SmolLM2; none if it can't be downloaded."""
    real = pair("smollm2")
    try:
        models = _loaded("SmolLM2", str(real.target), HeadsDrafter(str(real.heads)))
    except InvalidInputError as error:
        console.print(MISSING.format(reason=error))
        return []
    console.print(SMALL)
    return [_compared(console, models, one, [{"role": "user", "content": one}], ANSWERED) for one in QUESTIONS]


def _large(console: Console) -> list[Compared]:
    """Answers of Qwen, which is in the cache folder."""
    real = pair("qwen")
    models = _loaded("Qwen", str(real.target), str(real.draft))
    console.print(LARGE)
    return [_compared(console, models, one, [{"role": "user", "content": one}], SHORTER) for one in IN_TWO_LANGUAGES]


def _bundled(console: Console) -> list[Compared]:
    """Openings of paragraphs, continued by the pair that ships."""
    models = _loaded("Japanese", str(TARGET), str(DRAFT))
    console.print(BUNDLED.format(penalty=CONTINUED["repetition_penalty"]))
    return [_compared(console, models, one, one, CONTINUED) for one in SAMPLES]


def _loaded(name: str, target: str, draft: Any) -> Models:
    with stage(f"Loading {name}"):
        drafted = XTokAssisted(target, draft)
        return Models(name, load(target, "target"), XTokAssisted((drafted.model, drafted.tokenizer)), drafted)


def _compared(console: Console, models: Models, shown: str, prompt: Prompt, arguments: Mapping[str, Any]) -> Compared:
    """Write a text by the target alone and by xtok, one below the other, and unseen by transformers."""
    console.print(Text(shown, style="bold"), soft_wrap=True)
    if shown in SAMPLES:
        console.print(Text(f"({SAMPLES[shown]})", style="italic"), soft_wrap=True)
    if not models.drafted.last:  # the first text of an instance pays for its start
        for xt in (models.alone, models.drafted):
            xt.generate(prompt, **{**arguments, "max_new_tokens": 2})
        by_transformers(models.plain, [prompt], **{**arguments, "max_new_tokens": 2})
    truth = by_transformers(models.plain, [prompt], **arguments)
    alone, drafted = (xt.generate(prompt, **arguments) for xt in (models.alone, models.drafted))
    for title, one in (("the target alone", alone), ("by xtok", drafted)):
        figures = (
            f"{one.stats.new_tokens} tokens, {one.stats.target_forwards} forwards of the target, {one.stats.seconds:.1f} s"
        )
        console.print(f"\n{title}:", tinted(one.tokens, one.drafts), f"\n{figures}", sep="\n", soft_wrap=True)
    console.print(legend(drafted.tokens, drafted.drafts), soft_wrap=True)
    same, said = verdict(models, prompt, alone.token_ids, drafted.token_ids, truth.ids[0])
    console.print(Text(said + "\n", style=f"bold {'green' if same else 'red'}"), soft_wrap=True)
    return Compared(models.name, truth, alone, drafted, same)


def verdict(models: Models, prompt: Prompt, alone: list[int], drafted: list[int], truth: list[int]) -> tuple[bool, str]:
    """Whether the ids of a text are as promised, compared with each other and with transformers', and a sentence about it."""
    if alone != drafted:
        return False, "identical to the target alone: NO"
    found = first_difference(drafted, truth)
    if found is None:
        return True, f"identical to the target alone, and to {TRANSFORMERS}: yes"
    first, own, other = found
    apart = logit_gap((models.drafted.model, models.drafted.tokenizer), prompt, drafted[:first], own, other)
    if apart is None or apart > traits(models.plain[0]).tolerance:
        return False, f"identical to {TRANSFORMERS}: NO"
    return True, (
        f"identical to the target alone: yes. {TRANSFORMERS} goes on otherwise from token {first + 1} on: the two best were "
        f"{apart:.2f} logits apart there, less than rounding makes in {str(models.plain[0].dtype).removeprefix('torch.')}."
    )


class Row(NamedTuple):
    """The texts of a target: tokens per forward pass, who guessed them, and the speeds of xtok."""

    target: Annotated[str, Column("")]
    tokens_per_forward: Annotated[float, Column(form=".2f")]
    by_draft_or_heads: Annotated[float, Column(form=".0%")]
    by_other_guesses: Annotated[float, Column(form=".0%")]
    speed: Annotated[float, Column(form=".2f", note="times that of transformers' own generate, as it loads the target.")]
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
