"""Lets the target write for a given time: continuations of prompts, or answers to questions, also its own."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch

from xtok.errors import InvalidInputError
from xtok.models.cache import device_of
from xtok.models.packed import running
from xtok.models.prompts import Chat, chat_ids
from xtok.models.timing import timed
from xtok.results.progress import advanced
from xtok.tune.examples import WrittenText
from xtok.tune.work import split
from xtok.tune.writing import beginnings, check_written, save, saved, write

WRITING = 0.4
"""The share of the time of making a draft or heads in which the target writes texts."""
_CHUNK = 32
"""How many prompts are answered before the clock is read again."""
_APART = 24
"""How many prompts decide when to stop, and how many others measure the gain."""
_LEAST = 8
"""How many different questions the target has to write for these, at least."""
_QUESTION = 64
"""How many tokens a question that the target writes may have."""


@dataclass(frozen=True)
class Prompts:
    """Prompts for training. `stopping`: those that decide when to stop. `kept`: those that measure the gain. `learnt`: those to
    train on; None for questions that the target writes itself.
    """

    stopping: list[str | Chat]
    kept: list[str | Chat]
    learnt: list[str | Chat] | None


def asked(question: str) -> Chat:
    """A chat that begins with a question."""
    return [{"role": "user", "content": question}]


def has_template(tokenizer: Any) -> bool:
    """Raises `InvalidInputError` for a template that refuses a chat of one message."""
    try:
        return chat_ids(tokenizer, asked("a"), {}) is not None
    except Exception as error:
        raise InvalidInputError(
            f"The target's chat template refuses a chat of one user message ({error}). Give its tokenizer another template."
        ) from error


def check_prompts(target: tuple[Any, Any], given: Sequence[str] | None, arguments: dict[str, Any]) -> None:
    """Raises `InvalidInputError` for too few prompts, or if there are none and the target can't write questions itself; and as
    `check_written`.
    """
    chats = has_template(target[1])
    if given is not None:
        different = [one for kind in split(given) for one in kind]
        check_written(target, list(map(asked, different)) if chats else different, arguments)
        return
    if not chats:
        raise InvalidInputError(
            "The target has no chat template, so it can't write questions. Give prompts: beginnings of texts like those that "
            "it will write."
        )
    if not _before_question(target[1]):
        raise InvalidInputError(
            "The target's chat template begins with the user's message, so the target can't write questions. Give prompts."
        )
    check_written(target, [asked("a")], arguments, _QUESTION)


def prompts_for(target: tuple[Any, Any], given: Sequence[str] | None, starts: int, into: Path) -> Prompts:
    """The prompts for a target: if it has a chat template, a chat for each text, otherwise `starts` beginnings of each.

    `given`: texts; None for questions that the target writes itself. Those of them to measure on are saved in the folder
    `into`. Raises `InvalidInputError` for fewer than three different texts.
    """
    if given is None:
        own: list[str | Chat] = [asked(question) for question in _questions(target, 2 * _APART, -1, into)]
        if len(own) < _LEAST:
            raise InvalidInputError(f"The target wrote only {len(own)} different questions. Give prompts.")
        return Prompts(own[::2], own[1::2], None)
    chats = has_template(target[1])
    kinds = [list(map(asked, kind)) if chats else beginnings(kind, starts) for kind in split(given)]
    stopping, kept, learnt = (list[str | Chat](kind) for kind in kinds)
    stopping, kept = stopping[:_APART], kept[:_APART]
    return Prompts(stopping, kept, [one for one in learnt if one not in stopping and one not in kept])


def write_for(
    target: tuple[Any, Any], prompts: Prompts, seconds: float, into: Path, *, sampled: float, **arguments: Any
) -> list[WrittenText]:
    """The texts that the target writes in about `seconds`, those of earlier runs included. All are saved in the folder `into`.

    Each prompt is answered both greedily and sampled, or in one of these ways if the share `sampled` is 0 or 1. After all given
    prompts, they are sampled again; greedy answers would be the same. `arguments`: those of transformers' `generate`.
    """
    texts, spent, number = list[WrittenText](), 0.0, 0
    with advanced("the target writes", ceil(seconds)) as advance:
        while spent < seconds:
            chunk = into / f"{number:05}"
            with timed() as span:
                starts, again = _chunk(target, prompts, number, chunk)
                if again and not sampled:
                    break
                share = 1.0 if again else sampled
                both = [one for one in starts for _ in range(2)] if 0 < share < 1 else starts
                texts += write(target, both, chunk, sampled=share, seed=number << 16, shows=False, **arguments)
            file = chunk / "seconds.json"
            if not isinstance(took := saved(file), float):
                took = span.seconds
                save(file, lambda half, took=took: half.write_text(json.dumps(took)))  # type: ignore[misc]
            advance(round(took))
            number, spent = number + 1, spent + took
    return texts


def _chunk(target: tuple[Any, Any], prompts: Prompts, number: int, into: Path) -> tuple[list[str | Chat], bool]:
    """The prompts of chunk `number`, and whether earlier chunks answered them."""
    learnt = prompts.learnt
    if learnt is None:
        own = map(asked, _questions(target, _CHUNK, number, into))
        return [one for one in own if one not in prompts.stopping and one not in prompts.kept], False
    first = number * _CHUNK
    return [learnt[i % len(learnt)] for i in range(first, first + min(_CHUNK, len(learnt)))], first >= len(learnt)


def _before_question(tokenizer: Any) -> list[int]:
    """The ids that the chat template puts before a user's message."""
    before = str(tokenizer.apply_chat_template(asked("\0"), tokenize=False)).partition("\0")[0]
    return list(tokenizer(before, add_special_tokens=False).input_ids)


@torch.inference_mode()
def _questions(target: tuple[Any, Any], size: int, number: int, into: Path) -> list[str]:
    """About `size` different questions that a chat model writes where its template puts a user's message (Xu et al. 2024, arXiv
    2406.08464). They are saved in the folder `into`.
    """
    file = into / "questions.json"
    if isinstance(written := saved(file), list):
        return written
    model, tokenizer = target
    start = torch.tensor([_before_question(tokenizer)], dtype=torch.int64, device=device_of(model))
    with torch.random.fork_rng(), running(model):
        torch.manual_seed((number << 16) - 1)
        rows = model.generate(
            start.repeat(size, 1),
            attention_mask=torch.ones_like(start).repeat(size, 1),
            pad_token_id=0,
            do_sample=True,
            max_new_tokens=_QUESTION,
        )
    texts = tokenizer.batch_decode(rows[:, start.shape[1] :], skip_special_tokens=True)
    found = list(dict.fromkeys(text.strip() for text in texts if text.strip()))
    into.mkdir(parents=True, exist_ok=True)
    save(file, lambda half: half.write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8"))
    return found
