"""Lets the target write the texts to train on: continuations of prompts, or answers to questions, also its own."""

from collections.abc import Sequence
from math import ceil
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from xtok.align.tokenbytes import token_bytes
from xtok.assisted import XTokAssisted
from xtok.decoding.arguments import listed_texts
from xtok.errors import InvalidInputError
from xtok.models.cache import context_window, end_ids
from xtok.models.prompts import Chat, prompt_ids
from xtok.models.timing import timed
from xtok.results.progress import advanced, bar
from xtok.tune.examples import WrittenText

PENALTY = 1.2
"""The repetition penalty under which every other greedy text is written."""
_BATCH = 32
_TOP = 32
"""How many of the most likely ids are kept of each of the target's distributions."""
_HELD_OUT = 32
"""How many prompts decide when to stop, and how many others measure the gain, at most."""
_LEAST_QUESTIONS = 8
"""How many different questions the target has to write for these, at least."""
_QUESTION = 64
"""How many tokens a question that the target writes may have."""


def split(prompts: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Three disjoint lists of prompts: those that decide when to stop, those that measure the gain, and those to train on.

    Raises `InvalidInputError` for fewer than three different prompts.
    """
    different = [prompt for prompt in dict.fromkeys(listed_texts("prompts", prompts)) if prompt.strip()]
    if len(different) < 3:
        raise InvalidInputError(f"There are only {len(different)} different prompts. Give at least 3, better hundreds.")
    step = min(10, max(3, len(different) // 2))
    kinds: tuple[list[str], list[str], list[str]] = ([], [], [])
    for i, prompt in enumerate(different):
        kinds[min(i % step, 2)].append(prompt)
    return kinds


def beginnings(prompts: Sequence[str], count: int) -> list[str]:
    """`count` beginnings of each prompt, evenly spaced in length up to the whole prompt, shuffled and without duplicates."""
    found = [prompt[: ceil(len(prompt) * part / count)] for prompt in prompts for part in range(1, count + 1)]
    found = list(dict.fromkeys(found))
    Random(0).shuffle(found)
    return found


def way(index: int, sampled: float, start: str | Chat = "") -> dict[str, Any]:
    """How to pick the tokens of text number `index`, as arguments of `generate`: sampled, greedy, or greedy with a repetition
    penalty.

    Greedy continuations of small models repeat themselves, and nothing is learnt from repetitions. So every other one is
    written under a repetition penalty, but not answers in a chat, which don't need it. `sampled`: the share of texts that are
    sampled, evenly spread.
    """
    before = int(index * sampled)  # how many texts before it are sampled
    if int((index + 1) * sampled) > before:
        return {"do_sample": True}
    is_penalised = (index - before) % 2 and isinstance(start, str)
    return {"do_sample": False} | ({"repetition_penalty": PENALTY} if is_penalised else {})


def name_of_way(way: dict[str, Any]) -> str:
    penalised = f"greedy, repetition penalty {PENALTY}"
    return "sampled" if way["do_sample"] else penalised if "repetition_penalty" in way else "greedy"


def check_written(target: tuple[Any, Any], starts: Sequence[str | Chat], arguments: dict[str, Any], further: int = 0) -> None:
    """Check that the target can continue texts, by letting it write one token.

    `arguments`: those of `write`. `further`: how many tokens longer than `starts` texts may begin. Raises `InvalidInputError`
    if the target's context window is too short for a text, and whatever `generate` raises for what the target or its
    generation config has that xtok doesn't support.
    """
    window, longest = context_window(target[0]), max(len(prompt_ids(target[1], one)) for one in starts) + further
    if window is not None and longest + arguments["max_new_tokens"] > window:
        raise InvalidInputError(
            f"The longest prompt takes {longest} tokens, and max_new_tokens is {arguments['max_new_tokens']}: more than the "
            f"target's context window of {window}. Shorten the prompts, or lower max_new_tokens."
        )
    XTokAssisted(target).generate(starts[0], max_new_tokens=1, do_sample=False)


def write(
    target: tuple[Any, Any],
    starts: Sequence[str | Chat],
    *,
    sampled: float,
    seed: int = 0,
    shows: bool = True,
    **arguments: Any,
) -> list[WrittenText]:
    """The target's continuation of each start, each picked in its own `way`; those of one way follow one another.

    `target`: a model and its tokenizer. `shows`: whether to show progress. `arguments`: those of `generate`. Texts end before
    their first end id.
    """
    ways = [way(index, sampled, start) for index, start in enumerate(starts)]
    batches = list[tuple[dict[str, Any], list[str | Chat]]]()
    for kind in [kind for i, kind in enumerate(ways) if kind not in ways[:i]]:
        alike = [start for start, own in zip(starts, ways, strict=True) if own == kind]
        batches += [(kind, alike[at : at + _BATCH]) for at in range(0, len(alike), _BATCH)]
    xt, texts = XTokAssisted(target, stable=False), list[WrittenText]()
    view, ends = token_bytes(target[1]), {target[1].eos_token_id, *end_ids(target[0])} - {None}
    for index, (kind, some) in enumerate(bar(batches, "the target writes") if shows else batches):
        seen, own = _Likeliest(), {**arguments, **kind, **({"seed": seed + index} if kind["do_sample"] else {})}
        made = xt.generate(some, batch_size=len(some), logits_processor=[seen], max_time=None, progress=False, **own)
        for start, one in zip(some, made, strict=True):
            count = next((place for place, token in enumerate(one.token_ids) if token in ends), len(one.token_ids))
            ids, whole = one.token_ids[:count], [*prompt_ids(target[1], start), *one.token_ids]
            text = view.to_bytes(ids, before=b"a").decode(errors="ignore")  # without an unfinished character
            after = [seen.after[tuple(whole[:end])] for end in range(len(whole) - len(one.token_ids), len(whole))]
            likeliest, probabilities = (torch.stack(parts)[:count] for parts in zip(*after, strict=True))
            ended = count < len(one.token_ids)
            texts.append(WrittenText(start, text, ids, likeliest, probabilities, ended, name_of_way(kind)))
    return texts


class _Likeliest(LogitsProcessor):
    """Keeps the likeliest ids after each sequence of ids, and their probabilities, (few,) each: the target's own at temperature
    1, or after a repetition penalty. It changes nothing.
    """

    def __init__(self) -> None:
        self.after = dict[tuple[int, ...], tuple[Tensor, Tensor]]()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Likeliest":
        return self  # one for all sequences

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`input_ids`: (1, length). `scores`: (1, vocabulary)."""
        top = scores[0].float().softmax(dim=-1).topk(min(_TOP, scores.shape[-1]))
        self.after[tuple(input_ids[0].tolist())] = top.indices.cpu(), top.values.cpu()
        return scores


def asked(question: str) -> Chat:
    """A chat that begins with a question."""
    return [{"role": "user", "content": question}]


def given_prompts(
    target: tuple[Any, Any], given: Sequence[str], starts: int, arguments: dict[str, Any], *, chats: bool
) -> tuple[list[Any], list[Any], list[Any]]:
    """The prompts to train with: those that decide when to stop, those that measure the gain, and those to train on: for each
    text a chat if `chats`, else `starts` beginnings.

    `arguments`: those of `write`. Raises `InvalidInputError` for fewer than three different texts, and as `check_written`.
    """
    kinds = split(given)
    check_written(target, [asked(one) if chats else one for kind in kinds for one in kind], arguments)
    stopping, kept, learnt = ([*map(asked, kind)] if chats else beginnings(kind, starts) for kind in kinds)
    return stopping[:_HELD_OUT], kept[:_HELD_OUT], [one for one in learnt if one not in stopping and one not in kept]


def own_questions(target: tuple[Any, Any], arguments: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """As `given_prompts`, of questions that the target writes itself, without those to train on.

    Raises `InvalidInputError` for a target that can't write questions, and as `check_written`.
    """
    if getattr(target[1], "chat_template", None) is None:
        raise InvalidInputError(
            "The target can't write questions, since it has no chat template. Give prompts: beginnings of texts like those "
            "that it will write."
        )
    check_written(target, [asked("a")], arguments, _QUESTION)
    if not _before_question(target[1]):
        raise InvalidInputError(
            "The target can't write questions, since its chat template begins with the user's message. Give prompts."
        )
    own = [asked(question) for question in own_texts(target, 2 * _HELD_OUT, _QUESTION)]
    if len(own) < _LEAST_QUESTIONS:
        raise InvalidInputError(f"The target wrote only {len(own)} different questions. Give prompts.")
    return own[::2], own[1::2]


def write_for(
    target: tuple[Any, Any],
    learnt: Sequence[Any] | None,
    apart: Sequence[Any],
    seconds: float,
    *,
    sampled: float,
    **arguments: Any,
) -> list[WrittenText]:
    """The texts that the target writes in about `seconds` after the prompts `learnt`; if they are None, after questions that it
    writes itself and that aren't among those held `apart`.

    Each prompt is answered both greedily and sampled, or in one of these ways if the share `sampled` is 0 or 1. After all given
    prompts, they are sampled again; greedy answers would be the same. `arguments`: those of transformers' `generate`.
    """
    texts, spent, number = list[WrittenText](), 0.0, 0
    with advanced("the target writes", ceil(seconds)) as advance:
        while spent < seconds:
            first = number * _BATCH
            again = learnt is not None and first >= len(learnt)
            if again and not sampled:
                break
            share = 1.0 if again else sampled
            with timed() as span:
                if learnt is None:
                    starts = [one for one in map(asked, own_texts(target, _BATCH, _QUESTION, number + 1)) if one not in apart]
                else:
                    starts = [learnt[i % len(learnt)] for i in range(first, first + min(_BATCH, len(learnt)))]
                starts = [one for one in starts for _ in range(2 if 0 < share < 1 else 1)]
                texts += write(target, starts, sampled=share, seed=number << 16, shows=False, **arguments)
            advance(round(span.seconds))
            number, spent = number + 1, spent + span.seconds
    return texts


def _before_question(tokenizer: Any) -> list[int]:
    """The ids that the chat template puts before a user's message."""
    before = str(tokenizer.apply_chat_template(asked("\0"), tokenize=False)).partition("\0")[0]
    return list(tokenizer(before, add_special_tokens=False).input_ids)


def own_texts(target: tuple[Any, Any], size: int, length: int, seed: int = 0) -> list[str]:
    """About `size` different texts of `length` tokens that the target writes from nothing, sampled: where its chat template, if
    it has one, puts a user's message, so that they are questions (Xu et al. 2024, arXiv 2406.08464).
    """
    _, tokenizer = target
    if getattr(tokenizer, "chat_template", None) is not None:
        start = _before_question(tokenizer)
    elif tokenizer.bos_token_id is tokenizer.eos_token_id is None:
        return []  # there is nothing to begin with
    else:
        start = prompt_ids(tokenizer, "")
    arguments: dict[str, Any] = {"do_sample": True, "seed": seed, "max_new_tokens": length, "max_time": None}
    made = XTokAssisted(target, stable=False).generate([start] * size, batch_size=size, progress=False, **arguments)
    return list(dict.fromkeys(text for one in made if (text := one.text.strip())))
