"""Questions as chats, by kind: the target alone, transformers' assisted generation, and xtok by several ways to guess."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from xtok.assisted import XTokAssisted
from xtok.bench.compare import HEADS, HEADS_ALONE, UAG, Row, is_supported, rows_of, ways
from xtok.bench.rows import Column
from xtok.bench.runs import (
    ALONE,
    SETTINGS,
    XTOK,
    Runs,
    Setting,
    by_transformers,
    check_prompts,
    systems_of,
    uag,
    write_in_turns,
)
from xtok.drafts.heads import HeadsDrafter
from xtok.errors import InvalidInputError
from xtok.models.prompts import Chat

CHAT_SETTINGS = {
    "greedy": SETTINGS["greedy"],
    "sampled": SETTINGS["sampled"],
    "own": Setting("sampled, the model's own settings", {"do_sample": True}),
}
"""How answers are generated: without a repetition penalty, which models that are tuned for chats don't need."""

_FIRST = "What do you like best about autumn?"
"""A warm-up question, which no answer counts for. It is none of the others, since token recycling remembers what it saw."""


class Question(NamedTuple):
    """What a user asks, and its kind."""

    kind: str
    text: str


def questions() -> list[Question]:
    """32 questions of eight kinds, in alternating order."""
    kinds = json.loads(Path(__file__).with_name("questions.json").read_text(encoding="utf-8"))
    rounds = zip(*kinds.values(), strict=True)
    return [Question(kind, text) for texts in rounds for kind, text in zip(kinds, texts, strict=True)]


def as_chats(tokenizer: Any, texts: Sequence[str]) -> list[Chat]:
    """Each text as the first message of a chat. Raises `InvalidInputError` if the target's tokenizer has no chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise InvalidInputError(
            "The target's tokenizer has no chat template, so it can't be asked questions. Use a target that is tuned for "
            "chats (--pair smollm2), or measure on texts to continue, with xtok bench."
        )
    return [[{"role": "user", "content": text}] for text in texts]


@dataclass(frozen=True)
class KindRow:
    """xtok on all questions of a kind under one setting. `speed`: by the seconds per token over all of them, where the target
    alone has 1.
    """

    kind: Annotated[str, Column("")]
    setting: Annotated[str, Column()]
    questions: Annotated[int, Column()]
    tokens_per_forward: Annotated[float, Column(form=".2f")]
    speed: Annotated[float, Column(form=".2f")]


def compare_chats(
    target: tuple[Any, Any],
    draft: tuple[Any, Any],
    asked: Sequence[Question],
    setting: Setting,
    *,
    max_new_tokens: int,
    heads: HeadsDrafter | None = None,
) -> tuple[list[KindRow], list[Row]]:
    """Let every system answer each question in turn. Returns a row for each kind of question, of xtok, and one for each system.

    xtok runs without a draft, with prompt lookup alone, with that and token recycling, with its default drafts, and with the
    draft alone. With `heads`, it also runs with them, lookup and recycling (the rows by kind are then of this), and with heads
    alone. transformers' universal assisted generation runs with its defaults and a copy of the draft. If it refuses the pair
    (vocabularies of one size), it has no row. A question's number is its seed. Raises `InvalidInputError` without questions,
    and for a target without a chat template.
    """
    first, *chats = as_chats(target[1], [_FIRST, *(one.text for one in asked)])
    check_prompts(chats)
    arguments = {**setting.arguments, "max_new_tokens": max_new_tokens}
    calls: list[dict[str, Any]] = [{"texts": [chat], "seed": seed} for seed, chat in enumerate(chats)]
    xts = ways(target, draft)
    if heads is not None:
        xts |= {HEADS: XTokAssisted(target, heads), HEADS_ALONE: XTokAssisted(target, [heads])}
    systems = systems_of(target, xts, arguments)
    assisted = partial(by_transformers, target, **uag(target[1], draft, None), **arguments)
    if is_supported(assisted, {"texts": [first]}):
        systems[UAG] = assisted
    runs = write_in_turns(systems, [{"texts": [first]}, *calls], setting.title)
    named = XTOK if heads is None else HEADS
    kinds = [_kind_row(kind, setting, asked, runs, named) for kind in dict.fromkeys(one.kind for one in asked)]
    return kinds, rows_of(target, chats, runs, sampled=setting.arguments["do_sample"])


def _kind_row(kind: str, setting: Setting, asked: Sequence[Question], runs: dict[str, Runs], system: str) -> KindRow:
    chosen = [number for number, one in enumerate(asked) if one.kind == kind]
    own, alone = (Runs(runs[name][number] for number in chosen) for name in (system, ALONE))
    return KindRow(kind, setting.title, len(own), own.tokens_per_forward, own.total_speed(alone))
