"""One server and hundreds of requests of a hostile client: what is finished is the target's own, and nothing stays behind.

Nothing here reads a clock, but for `PATIENCE`, after which what hangs fails.
"""

import asyncio
import gc
import json
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import httpx
import pytest
import torch
from batches import BYTES, TEXTS, UNRELATED, WIDE
from engines import cache_bytes
from inside import caches_of, is_empty, memory_of
from servers import CALLING_TOKENS as TOKENS
from servers import Server, data_of, held_to, serving, wait_for
from worlds import CORPUS, fitting

from xtok import Budget, Context, PromptLookup, Ticket, Tree, XTokAssisted, chain
from xtok.drafts.base import Request
from xtok.models.probe import traits
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


class Treacherous:
    """A draft that guesses nonsense, and raises now and then, at once or later."""

    def __init__(self) -> None:
        self._random = random.Random(5)

    def start(self, request: Request) -> "Treacherous":
        if self._random.random() < 0.1:
            raise RuntimeError("I won't begin.")
        return self

    def propose(self, context: Context, budget: Budget) -> Tree:
        if self._random.random() < 0.05:
            raise ArithmeticError("I won't guess.")
        return chain([self._random.randrange(-2, 500) for _ in range(self._random.randrange(4))])


# what is asked


@dataclass(frozen=True)
class Asked:
    """A request with one right answer."""

    path: str
    body: str

    @property
    def asks(self) -> dict[str, Any]:
        return dict(json.loads(self.body))

    def sent(self, **more: Any) -> bytes:
        return json.dumps({**self.asks, **more}).encode()


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


NONSENSE: list[tuple[str, Any]] = [
    ("completions", {"prompt": "a", "model": "another"}),
    *((path, body) for path in ("completions", "chat/completions", "responses") for body in (b"{", b"\xff\x00")),
    ("completions", b"[" * 20_000),
    ("completions", {"prompt": "a", "n": 1000}),
    ("completions", {"prompt": "あ" * 9_000}),
    ("completions", {"prompt": "a" * LIMITS.body * 9}),
    ("chat/completions", {"messages": [5]}),
]
"""What is refused: a path and a body."""


# how it is answered


def read_whole(body: dict[str, Any]) -> Answer:
    return [((one.get("message") or {"content": one["text"]})["content"], one["finish_reason"]) for one in body["choices"]]


def read_stream(data: str) -> Answer:
    """A stream's answer, put together from its events."""
    *events, last = data_of(data)
    assert last == "[DONE]"
    written = dict[int, tuple[list[str], list[str]]]()
    for choice in (choice for event in events for choice in json.loads(event)["choices"]):
        said, ends = written.setdefault(choice["index"], ([], []))
        said.append((choice.get("delta") or {"content": choice.get("text")}).get("content") or "")
        ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    return [("".join(said), *ends) for _, (said, ends) in sorted(written.items())]


# how a client behaves


@dataclass
class Client:
    """A client that behaves in many ways. `finished`: what was asked, with what came; `right`: how many answers were checked;
    `refused`: statuses that came in place of an answer.
    """

    server: Server
    http: httpx.AsyncClient
    pool: Sequence[Asked]
    draw: random.Random = field(default_factory=lambda: random.Random(2))
    finished: list[tuple[Asked, Answer]] = field(default_factory=list)
    right: int = 0
    refused: Counter[int] = field(default_factory=Counter)
    nonsense: Iterator[tuple[str, Any]] = field(default_factory=lambda: cycle(NONSENSE))

    async def visit(self, number: int) -> None:
        ways: list[Callable[[Asked], Awaitable[None]]] = [self.waits, self.streams, self.hangs_up, self.fails]
        (way,) = self.draw.choices(ways, [36, 30, 17, 17])
        asked = self.draw.choice(self.pool)
        if self.draw.random() < 0.2:  # what nobody asked before
            asked = asking(
                "completions", prompt=f"{SYSTEMS[number % 2][:90]}{number}", max_tokens=1 + number % 5, temperature=0
            )
        await asyncio.wait_for(way(asked), PATIENCE)

    def check(self, truths: Truths) -> None:
        """Raises `AssertionError` unless all that was finished since the last call is the target's own."""
        for asked, answer in self.finished:
            assert answer == truths.of(asked), asked
        self.right += len(self.finished)
        self.finished.clear()

    async def waits(self, asked: Asked) -> None:
        answer = await self.post(asked.path, asked.sent())
        assert answer.status_code == 200, (asked, answer.text)
        self.finished.append((asked, read_whole(answer.json())))

    async def streams(self, asked: Asked) -> None:
        answer = await self.post(asked.path, asked.sent(stream=True))
        assert answer.status_code == 200, (asked, answer.text)
        self.finished.append((asked, read_stream(answer.text)))

    async def hangs_up(self, asked: Asked) -> None:
        """Before the first piece, or after it."""
        path, longer = "completions", {"max_tokens": 300, "logit_bias": {"2": -100}}
        body = asking(path, prompt=self.draw.choice(TEXTS), **longer).sent(stream=True)
        pause = self.draw.choice([0, 0.01, 0.05, None])
        if pause is None:
            async with self.http.stream("POST", f"/v1/{path}", content=body, headers=JSON) as answer:
                async for _ in answer.aiter_bytes():
                    break
        else:
            task = asyncio.ensure_future(self.post(path, body))
            await asyncio.wait((task,), timeout=pause)
            task.cancel()
            with suppress(asyncio.CancelledError, httpx.HTTPError):
                await task

    async def fails(self, _: Asked) -> None:
        path, body = next(self.nonsense)
        with suppress(httpx.WriteError, httpx.RemoteProtocolError, httpx.ReadError):  # it may hang up before all is sent
            answer = await self.post(path, body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode())
            assert answer.json()["error"]["message"]
            self.refused[answer.status_code] += 1

    async def post(self, path: str, body: bytes) -> httpx.Response:
        return await self.http.post(f"/v1/{path}", content=body, headers=JSON)


JSON = {"Content-Type": "application/json"}


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


async def visited(server: Server, pool: Sequence[Asked], number: int, truths: Truths) -> tuple[Client, list[tuple[int, int]]]:
    """So many visits, `AT_ONCE` at a time. Gives what is `left` after each tenth of them, too.

    Raises `AssertionError` for an answer that isn't the target's own.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # the server may close one that is idle
    found = list[tuple[int, int]]()
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, limits=limits) as http:
        client = Client(server, http, pool)
        for tenth in range(10):
            numbers = iter(range(tenth * number // 10, (tenth + 1) * number // 10))

            async def visit(numbers: Iterator[int] = numbers) -> None:
                for one in numbers:
                    await client.visit(one)

            await asyncio.gather(*(visit() for _ in range(AT_ONCE)))
            client.check(truths)
            found.append(left(server))
    return client, found


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::xtok.errors.DraftFailedWarning")
@pytest.mark.parametrize(("dtype", "number"), [(torch.float64, REQUESTS), (torch.bfloat16, REQUESTS // 4)], ids=str)
def test_a_hostile_client_gets_the_targets_own_answers_and_leaves_nothing(dtype: torch.dtype, number: int) -> None:
    # Not in float32: in one of its prompts, the two best tokens are 3e-6 from each other.
    target = fitting(TOKENS, "Llama", 0, dtype=dtype, window=WIDE)
    lookup = PromptLookup(memory=MEMORY)
    drafts = [(UNRELATED, BYTES), lookup, Treacherous()]
    xt = XTokAssisted((target, TOKENS), drafts, budget=Budget(3, width=2, schedule="constant"))
    memory = POSITIONS * sum(traits(model).position_bytes or 0 for model in xt.setup.models)
    alone = XTokAssisted((target, TOKENS))
    with serving(alone, limits=LIMITS) as other, serving(xt, limits=LIMITS, batch_size=16, memory=memory) as server:
        truths = Truths(other)
        client, found = asyncio.run(visited(server, requests_with_answers(truths), number, truths))
        server.until_idle()
        assert all(map(is_empty, caches_of(server.engine)))
        assert cache_bytes(server.engine) <= memory
        assert server.engine.stats.positions == 0
        reported = server.metrics()
    assert client.right > number / 2
    assert {400, 404} <= set(client.refused) <= {400, 404, 413}
    (objects, tensors), (more_objects, more_tensors) = found[WARM_UP], found[-1]
    assert more_objects - objects < 2_000 + number / 5
    assert more_tensors - tensors < 50
    assert reported["xtok_prefix_cache_hits_total"] > 0
    learnt = memory_of(lookup)
    assert learnt is not None and 0 < learnt.size <= MEMORY
