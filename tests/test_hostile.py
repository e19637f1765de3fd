"""One server and hundreds of requests of a hostile client: what is finished is the target's own, and nothing stays behind.

Nothing here reads a clock, but for `PATIENCE`, after which what hangs fails.
"""

import asyncio
import gc
import json
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from batches import BYTES, TEXTS, UNRELATED, WIDE
from engines import cache_bytes
from inside import caches_of, is_empty, memory_of
from servers import CALLING_TOKENS as TOKENS
from servers import Server, data_of, held_to, serving, together, wait_for
from worlds import CORPUS, fitting

from xtok import Budget, PromptLookup, Ticket, XTokAssisted
from xtok.models.capabilities import traits
from xtok.serving.http.protocol import Limits

REQUESTS = int(os.environ.get("XTOK_HOSTILE_REQUESTS", "800"))
"""10,000 take six minutes of a quiet core."""
AT_ONCE = 64
PATIENCE = 900.0
"""Seconds within which a request ends, however busy the machine is."""
LIMITS = Limits(tokens=400, body=32_768, seconds=None)
POSITIONS = 8_000
"""How many the caches of each model have room for: fewer than sixteen of the longest requests need."""
MEMORY = 1 << 18
"""Bytes in which texts are remembered: fewer than all texts have."""
WARM_UP = 3
"""Tenths of the visits, in which memories are filled. Nothing grows after them."""
Answer = list[tuple[str, str]]
"""Of each text of an answer: what it says, and how it ended."""


# what is asked


class Asked(NamedTuple):
    """A request with one right answer: its path, and its body in JSON."""

    path: str
    body: str

    @property
    def asks(self) -> dict[str, Any]:
        return dict(json.loads(self.body))


def asking(path: str, **body: Any) -> Asked:
    return Asked(path, json.dumps(body))


SYSTEMS = ("猫として答えよ。", "".join(CORPUS) * 2)
ROW = {
    "type": "object",
    "properties": {"name": {"enum": ["fox", "メロス"]}, "lazy": {"type": "boolean"}},
    "required": ["name", "lazy"],
    "additionalProperties": False,
}
HELD = [held_to(one) for one in (ROW, {"type": "array", "items": {"enum": ["猫", "犬と猿", 5]}, "minItems": 1, "maxItems": 4})]
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.2},
    *({"temperature": 1.0, "seed": seed} for seed in range(2)),
    {"temperature": 0.7, "seed": 3, "top_k": 20},
)
FURTHER: tuple[dict[str, Any], ...] = ({}, {"n": 2}, {"stop": ["の", "a"]})


class Truths:
    """What a server answers whose target is alone, one request at a time."""

    def __init__(self, alone: Server) -> None:
        self._alone, self._known = alone, dict[Asked, Answer]()

    def of(self, asked: Asked) -> Answer:
        if asked not in self._known:
            given = {name: value for name, value in asked.asks.items() if name != "prediction"}
            self._known[asked] = read_whole(self._alone.ask(asked.path, **given).json())
        return self._known[asked]


def requests_with_answers(truths: Truths) -> list[Asked]:
    """The requests that are made over and over: they begin alike, chats grow, and all that changes speed is in them."""
    draw, found = random.Random(1), list[Asked]()
    for number in range(60):
        prompt = draw.choice([SYSTEMS[1][: draw.randrange(1, 200)], draw.choice(TEXTS)])
        settings = {"max_tokens": draw.randrange(1, 12), **draw.choice(SETTINGS), **draw.choice(FURTHER)}
        settings |= {} if number % 4 else {"max_tokens": 40, **draw.choice(HELD)}
        found.append(asking("completions", prompt=prompt, **settings))
    for number in range(20):
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEMS[number % 2]}]
        for turn in range(4):
            messages = [*messages, {"role": "user", "content": TEXTS[(number + turn) % len(TEXTS)]}]
            settings = {"max_tokens": draw.randrange(1, 12), **draw.choice(SETTINGS)}
            found.append(asking("chat/completions", messages=messages, **settings))
            messages = [*messages, {"role": "assistant", "content": truths.of(found[-1])[0][0]}]
    for one in found[: len(found) // 4]:
        text = truths.of(one)[0][0]
        predicted = {"type": "content", "content": f"{text[: len(text) // 2]}月{text[len(text) // 2 :]}"}
        found.append(asking(one.path, **one.asks, prediction=predicted))
    return found


# how it is answered


def read_whole(body: dict[str, Any]) -> Answer:
    return [((one.get("message") or {"content": one["text"]})["content"], one["finish_reason"]) for one in body["choices"]]


def read_stream(data: str) -> Answer:
    """A stream's answer, put together from its events."""
    *events, last = data_of(data)
    assert last == "[DONE]"
    return [(one["text"], one["finish_reason"]) for one in together(map(json.loads, events))["choices"]]


@dataclass
class Client:
    """A client that waits, streams, or hangs up. `finished`: what was asked, with what came."""

    http: httpx.AsyncClient
    pool: Sequence[Asked]
    draw: random.Random = field(default_factory=lambda: random.Random(2))
    finished: list[tuple[Asked, Answer]] = field(default_factory=list)

    async def visit(self, number: int) -> None:
        asked = self.draw.choice(self.pool)
        if self.draw.random() < 0.2:  # what nobody asked before
            prompt = f"{SYSTEMS[number % 2][:90]}{number}"
            asked = asking("completions", prompt=prompt, max_tokens=1 + number % 5, temperature=0)
        (way,) = self.draw.choices([self.waits, self.streams, self.hangs_up], [4, 3, 2])
        await asyncio.wait_for(way(asked), PATIENCE)

    async def waits(self, asked: Asked) -> None:
        answer = await self.http.post(f"/v1/{asked.path}", json=asked.asks)
        assert answer.status_code == 200, (asked, answer.text)
        self.finished.append((asked, read_whole(answer.json())))

    async def streams(self, asked: Asked) -> None:
        answer = await self.http.post(f"/v1/{asked.path}", json={**asked.asks, "stream": True})
        assert answer.status_code == 200, (asked, answer.text)
        self.finished.append((asked, read_stream(answer.text)))

    async def hangs_up(self, _: Asked) -> None:
        """Before the first piece, or after it."""
        body = {"prompt": self.draw.choice(TEXTS), "max_tokens": 300, "logit_bias": {"2": -100}, "stream": True}
        pause = self.draw.choice([0, 0.01, 0.05, None])
        if pause is None:
            async with self.http.stream("POST", "/v1/completions", json=body) as answer:
                async for _bytes in answer.aiter_bytes():
                    break
        else:
            task = asyncio.ensure_future(self.http.post("/v1/completions", json=body))
            await asyncio.wait((task,), timeout=pause)
            task.cancel()
            with suppress(asyncio.CancelledError, httpx.HTTPError):
                await task


# what is left


def tickets() -> int:
    """How many there are."""
    gc.collect()
    return sum(type(one) is Ticket for one in gc.get_objects())


def left(server: Server) -> tuple[int, int]:
    """How many objects that may be parts of cycles, and how many tensors, are alive while nothing runs. No ticket may be."""
    server.until_idle()
    wait_for(lambda: tickets() == 0)  # requests whose clients hung up may just be ending
    objects = gc.get_objects()
    return len(objects), sum(issubclass(type(one), torch.Tensor) for one in objects)


async def visited(server: Server, pool: Sequence[Asked], number: int, truths: Truths) -> tuple[int, list[tuple[int, int]]]:
    """So many visits, `AT_ONCE` at a time. Gives how many answers came, and what is `left` after each tenth of the visits.

    Raises `AssertionError` for an answer that isn't the target's own.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # the server may close one that is idle
    found, right = list[tuple[int, int]](), 0
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, limits=limits) as http:
        for tenth in range(10):
            numbers = iter(range(tenth * number // 10, (tenth + 1) * number // 10))
            client = Client(http, pool, random.Random(tenth))

            async def visit(numbers: Iterator[int] = numbers, client: Client = client) -> None:
                for one in numbers:
                    await client.visit(one)

            await asyncio.gather(*(visit() for _ in range(AT_ONCE)))
            for asked, answer in client.finished:
                assert answer == truths.of(asked), asked
            right += len(client.finished)
            client.finished.clear()
            found.append(left(server))
    return right, found


@pytest.mark.deep
@pytest.mark.parametrize(("dtype", "number"), [(torch.float64, REQUESTS), (torch.bfloat16, REQUESTS // 4)], ids=str)
def test_a_hostile_client_gets_the_targets_own_answers_and_leaves_nothing(dtype: torch.dtype, number: int) -> None:
    # Not in float32: in one of its prompts, the two best tokens are 3e-6 from each other.
    target, lookup = fitting(TOKENS, "Llama", 0, dtype=dtype, window=WIDE), PromptLookup(memory=MEMORY)
    xt = XTokAssisted((target, TOKENS), [(UNRELATED, BYTES), lookup], budget=Budget(3, width=2, schedule="constant"))
    memory = POSITIONS * sum(traits(model).position_bytes or 0 for model in xt.setup.models)
    alone = XTokAssisted((target, TOKENS))
    with serving(alone, limits=LIMITS) as other, serving(xt, limits=LIMITS, batch_size=16, memory=memory) as server:
        truths = Truths(other)
        right, found = asyncio.run(visited(server, requests_with_answers(truths), number, truths))
        server.until_idle()
        assert all(map(is_empty, caches_of(server.engine)))
        assert cache_bytes(server.engine) <= memory
        assert server.engine.stats.positions == 0
        reported = server.metrics()
    assert right > number / 2
    (objects, tensors), (more_objects, more_tensors) = found[WARM_UP], found[-1]
    assert more_objects - objects < 2_000 + number / 5
    assert more_tensors - tensors < 50
    assert reported["xtok_prefix_cache_hits_total"] > 0
    learnt = memory_of(lookup)
    assert learnt is not None and 0 < learnt.size <= MEMORY
