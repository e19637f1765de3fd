"""Questions to ask as chats, and figures by their kinds."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from xtok.bench.rows import Column
from xtok.bench.runs import Runs, Setting
from xtok.errors import InvalidInputError
from xtok.models.prompts import Chat


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
    """xtok on all questions of a kind under one setting. `speed`: by the seconds per token over all of them."""

    kind: Annotated[str, Column("")]
    setting: Annotated[str, Column()]
    questions: Annotated[int, Column()]
    tokens_per_forward: Annotated[float, Column(form=".2f")]
    speed: Annotated[float, Column(form=".2f")]


def kind_rows(setting: Setting, asked: Sequence[Question], own: Runs, alone: Runs) -> list[KindRow]:
    """A row for each kind of question. `own`, `alone`: the runs of xtok and of the target alone, one for each question."""
    rows = []
    for kind in dict.fromkeys(one.kind for one in asked):
        mine, others = (Runs(run for run, one in zip(runs, asked, strict=True) if one.kind == kind) for runs in (own, alone))
        rows.append(KindRow(kind, setting.title, len(mine), mine.tokens_per_forward, mine.total_speed(others)))
    return rows
