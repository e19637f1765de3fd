"""Engines, and what stops, cancels or fails the texts in them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from architectures import RECURRENT, tiny
from batches import GREEDY, MADE, TEXTS, drawn, greedily, target
from inside import caches_of
from transformers import LogitsProcessorList
from worlds import TREE, tokenizer

from xtok import Engine, Ticket, XTokAssisted

TOKENS, BYTES = tokenizer("SentencePiece BPE"), tokenizer("byte-level BPE")
LM = target("Llama")
PLAIN = XTokAssisted((LM, TOKENS))
WITH_DRAFTS = XTokAssisted((LM, TOKENS), MADE["several"](), budget=TREE)
ENDLESS = {**GREEDY, "eos_token_id": None}
PATIENCE = 60.0
"""Seconds until a test that hangs fails."""


class Holds:
    """A processor that stops the engine's thread, after so many calls, until it is let go."""

    def __init__(self, after: int = 0) -> None:
        self.left = after
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == -1:
            self.reached.set()
            assert self.go.wait(PATIENCE)
        return scores

    def wait(self) -> None:
        assert self.reached.wait(PATIENCE)


class Cancels:
    """A processor that cancels its own sequence after so many calls."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.known = threading.Event()
        self.ticket: Ticket

    def of(self, ticket: Ticket) -> Ticket:
        self.ticket = ticket
        self.known.set()
        return ticket

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == -1:
            assert self.known.wait(PATIENCE)
            assert self.ticket.cancel()
        return scores


class Raises:
    """A processor that raises after so many calls."""

    def __init__(self, after: int, error: BaseException) -> None:
        self.left, self.error = after, error

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return scores


def by(*processors: Any) -> dict[str, Any]:
    return {"logits_processor": LogitsProcessorList(processors)}


@contextmanager
def held(engine: Engine, after: int = 0, **more: Any) -> Iterator[Ticket]:
    """The engine's thread stands still within a text while the block runs."""
    holds = Holds(after)
    ticket = engine.submit(TEXTS[0], **{**GREEDY, **more}, **by(holds))
    try:
        holds.wait()
        yield ticket
    finally:
        holds.go.set()


def ids(ticket: Ticket) -> list[int]:
    return ticket.result(PATIENCE).token_ids


def alone(prompt: str, way: str) -> list[int]:
    return greedily("Llama", prompt) if way == "greedy" else drawn("Llama", prompt, 0)


RECURRENT_TARGET = tiny(RECURRENT[0], len(TOKENS)).float()


def cache_bytes(engine: Engine) -> int:
    """What the caches of all sequences take, with the prefixes that are kept."""
    parts = [part for slots in caches_of(engine) for one in (slots, *(slots.prefixes or ())) for part in one.parts]
    return sum(part.numel() * part.element_size() for part in parts)
