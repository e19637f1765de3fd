"""MT-Bench, the prompts by which the field measures speculative decoding, in English and Japanese, and figures by their kinds.

Zheng et al. 2023, arXiv 2306.05685; Stability AI's Japanese version. Both come from flexeval's package (Apache-2.0).
"""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from zipfile import ZipFile

from xtok.assisted import XTokAssisted
from xtok.bench.rows import Column
from xtok.bench.runs import ALONE, Runs
from xtok.errors import InvalidInputError
from xtok.models.prompts import Chat
from xtok.pair.fetch import DAMAGED, cached, downloaded

LANGUAGES = {
    "en": "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
    "ja": "e0b4bb06c909386a9b932e247f87a5efd8877808aa886062ef17f87c29e479a4",
}
"""SHA-256 of the prompts in each language."""
_NAME, _PACKAGE, _VERSION = "mt-bench", "flexeval", "0.18.3"
WITHIN = "flexeval/core/chat_dataset/chatbot_bench_datasets/mt-{}.jsonl"


class Question(NamedTuple):
    """A question of MT-Bench, its kind and language, such as "coding, ja", and the next question in the same chat."""

    kind: str
    turns: tuple[str, ...]


def questions(wanted: Sequence[str] = ()) -> list[Question]:
    """The questions of MT-Bench, in turn of each kind and language. They are fetched once.

    `wanted`: kinds ("coding") and languages ("ja") to choose from; all by default. Raises `InvalidInputError` for unknown ones,
    and if they can't be fetched.
    """
    folder, found = cached(_NAME, _is_whole, _fetch), dict[tuple[str, str], list[Question]]()
    for language in LANGUAGES:
        for line in (folder / f"{language}.jsonl").read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            kind = one["category"]
            found.setdefault((kind, language), []).append(Question(f"{kind}, {language}", tuple(one["turns"])))
    known = dict.fromkeys([*(kind for kind, _ in found), *LANGUAGES])
    if unknown := [one for one in wanted if one not in known]:
        raise InvalidInputError(f"MT-Bench has no kind {unknown[0]!r}. Choose from {', '.join(known)}.")
    languages = [one for one in LANGUAGES if one in wanted] or [*LANGUAGES]
    kinds = [one for one in known if one in wanted and one not in LANGUAGES] or [kind for kind, _ in found]
    turns = [found[kind, language] for kind in dict.fromkeys(kinds) for language in languages]
    return [one for some in zip(*turns, strict=True) for one in some]


def _is_whole(folder: Path) -> bool:
    files = {language: folder / f"{language}.jsonl" for language in LANGUAGES}
    return all(files[one].exists() and sha256(files[one].read_bytes()).hexdigest() == LANGUAGES[one] for one in LANGUAGES)


def _fetch(folder: Path) -> None:
    work = folder.with_name(f"{_NAME}.part")
    instead = "Without it: xtok bench spec --prompts FILE."
    (wheel,) = downloaded("MT-Bench", [_PACKAGE], _VERSION, work, "0.4 MB", instead=instead)
    folder.mkdir(exist_ok=True)
    try:
        with ZipFile(wheel) as packed:
            for language in LANGUAGES:
                (folder / f"{language}.jsonl").write_bytes(packed.read(WITHIN.format(language)))
    except (*DAMAGED, KeyError):
        pass  # which the next line finds
    shutil.rmtree(work)
    if not _is_whole(folder):
        raise InvalidInputError(f"{_PACKAGE} {_VERSION}, as fetched, doesn't hold MT-Bench as published. Check pip's index.")


def as_chats(tokenizer: Any, texts: Iterable[str]) -> list[Chat]:
    """Each text as the first message of a chat. Raises `InvalidInputError` if the target's tokenizer has no chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise InvalidInputError(
            "The target's tokenizer has no chat template, so it can't be asked questions. Use a target that is tuned for "
            "chats (--pair smollm2), or measure on texts to continue, with xtok bench."
        )
    return [[{"role": "user", "content": text}] for text in texts]


def second_turns(xt: XTokAssisted, asked: Sequence[Question], firsts: Sequence[Chat], length: int) -> list[Chat]:
    """The chats continued by the target's greedy answers of up to `length` tokens and the next questions."""
    answers = [xt.generate(chat, max_new_tokens=length, do_sample=False).text for chat in firsts]
    return [
        [*chat, {"role": "assistant", "content": answer}, {"role": "user", "content": one.turns[1]}]
        for chat, answer, one in zip(firsts, answers, asked, strict=True)
    ]


@dataclass(frozen=True)
class KindRow:
    """All questions of a kind, by systems: speed by the seconds per token over all of them, and tokens per forward pass."""

    kind: Annotated[str, Column("")]
    questions: Annotated[int, Column()]
    speed: Annotated[dict[str, float], Column(form=".2f")]
    tokens_per_forward: Annotated[dict[str, float], Column(form=".2f", table="tokens per forward pass of the target")]


def kind_rows(kinds: Sequence[str], runs: Mapping[str, Runs]) -> list[KindRow]:
    """A row for each kind. `kinds`: of each prompt. `runs`: of each system, a run for each prompt."""
    rows = []
    for kind in dict.fromkeys(kinds):
        own = {name: Runs(run for run, one in zip(some, kinds, strict=True) if one == kind) for name, some in runs.items()}
        speeds = {name: some.total_speed(own[ALONE]) for name, some in own.items() if name != ALONE}
        rows.append(KindRow(kind, len(own[ALONE]), speeds, {name: own[name].tokens_per_forward for name in speeds}))
    return rows
