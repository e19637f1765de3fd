"""What the tests of the front door have in common: models, prompts, drafts, and code such as users hand in."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from scripted import ScriptedDrafter
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer
from worlds import TREE, alone, fitting, quick, tokenizer

from xtok import XTokAssisted

PROMPT = "吾輩は猫である。名前は"
PROMPTS = [PROMPT, "The quick brown fox", "自然言語処理とは何か。🍣", "メロス"]
LENGTH = 10 if quick() else 16
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": LENGTH, "pad_token_id": 0}
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}<s>assistant:"
OTHER_TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
STRICT_TEMPLATE = "{{ raise_exception('this template knows no roles') }}"
CHAT = [{"role": "user", "content": "自然言語処理とは何か。"}]

TOKENS = tokenizer("SentencePiece BPE")
TARGET = fitting(TOKENS, "Llama", 0)
BYTES = tokenizer("byte-level BPE")
OTHER = fitting(BYTES, "GPTNeoX", 1)


def oracle(model: Any) -> ScriptedDrafter:
    """Guesses what the model alone would write, so that blocks of several ids are committed."""
    twin = deepcopy(model)

    @cache
    def coming(known: tuple[int, ...]) -> list[int]:
        ids = torch.tensor([known])
        output = twin.generate(ids, attention_mask=(ids != 0).long(), do_sample=False, max_new_tokens=3, pad_token_id=0)
        return output[0, ids.shape[1] :].tolist()

    return ScriptedDrafter(lambda context: coming(tuple(context.ids)))


@pytest.fixture(scope="module")
def helped() -> XTokAssisted:
    """An instance with an unrelated draft model and one that is right. A file that asks for it as `xt` says `xt = helped`."""
    return XTokAssisted((TARGET, TOKENS), [(OTHER, BYTES), oracle(TARGET)], budget=TREE)


def encoded(*prompts: str, tokens: Any = TOKENS) -> dict[str, torch.Tensor]:
    """What a user of transformers hands to `model.generate(**inputs)`."""
    settings = {"padding": True, "padding_side": "left", "return_tensors": "pt", "return_token_type_ids": False}
    return dict(tokens(list(prompts), **settings))


def forced(text: str, start: int, tokens: Any) -> Any:
    """Makes any model write `text` after a prompt of `start` ids."""
    script = [*tokens(text, add_special_tokens=False).input_ids, 2]
    return lambda batch, ids: script[len(ids) - start : len(ids) - start + 1] or [2]


def truth(prompt: str = PROMPT, **arguments: Any) -> list[int]:
    """What the target alone writes. Many tests ask for the same."""
    if all(isinstance(value, int | float) for value in arguments.values()):
        return list(_truth(prompt, tuple(sorted(arguments.items()))))
    return alone(TARGET, TOKENS(prompt).input_ids, **{**GREEDY, **arguments})


@cache
def _truth(prompt: str, arguments: tuple[tuple[str, Any], ...]) -> list[int]:
    return alone(TARGET, TOKENS(prompt).input_ids, **{**GREEDY, **dict(arguments)})


STOP = next(text for token in truth()[3:] if len(text := TOKENS.decode([token])) > 1 and text.isprintable())
"""A piece of the text that the target writes after the prompt."""


@contextmanager
def forwards(*models: Any) -> Iterator[list[torch.Tensor]]:
    """The input ids of every forward of some models."""
    seen: list[torch.Tensor] = []
    handles = [
        model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs.get("input_ids")), with_kwargs=True)
        for model in models
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def with_template(tokens: Any, template: str) -> Any:
    made = deepcopy(tokens)
    made.chat_template = template
    return made


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append((tuple(value.shape), value.dtype, value.tolist()))

    def end(self) -> None:
        self.calls.append("end")


class CountsItsCalls(LogitsProcessor):
    """Keeps a state: what it does depends on how often it was asked."""

    def __init__(self, most: float = 9.0) -> None:
        self.asked, self.most = 0, most

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        return scores + torch.roll(torch.linspace(0, self.most, scores.shape[-1], device=scores.device), 7 * self.asked)


class StopsOn(StoppingCriteria):
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token


def even_or_odd_by_row(batch: int, ids: torch.Tensor) -> list[int]:
    return list(range(3 + batch % 2, 200, 2 + batch))


HF_ARGUMENTS: dict[str, Any] = {
    "plain": dict,
    "repetition penalty": lambda: {"repetition_penalty": 1.4},
    "an early end": lambda: {"eos_token_id": [2, *truth()[7:9]]},
    "two ends": lambda: {"eos_token_id": [truth(PROMPTS[0])[3], truth(PROMPTS[1])[7]]},
    "a prefix function": lambda: {"prefix_allowed_tokens_fn": even_or_odd_by_row},
    "a time limit that is far away": lambda: {"max_time": 1e6},
    "a prefill in chunks": lambda: {"prefill_chunk_size": 3},
    "penalties on the prompt": lambda: {"encoder_repetition_penalty": 0.5, "encoder_no_repeat_ngram_size": 2},
    "a watermark": lambda: {"watermarking_config": {"bias": 9.0, "seeding_scheme": "selfhash"}},
}


def guesses(generation: Any) -> list[Any]:
    """How much was guessed and what was right in each round: the order of guesses hangs on rounding, which a batch changes."""
    return [
        (one.offset, one.proposed, [one.tree.tokens[node] for node in one.right], one.committed) for one in generation.rounds
    ]
