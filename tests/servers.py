"""Servers that run in a thread of the tests' process, and what is asked of them."""

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from math import isclose
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import uvicorn
from batches import MADE, WIDE
from engines import LM, PATIENCE, TOKENS
from scripted import ScriptedDrafter
from transformers import PreTrainedTokenizerFast
from worlds import CHAIN, fitting, tokenizer

from xtok import Budget, Context, Engine, XTokAssisted
from xtok.serving.http.app import app_of
from xtok.serving.http.command import listening_socket
from xtok.serving.http.protocol import Limits
from xtok.serving.http.service import Service

NAME = "tiny"
ROOT = Path(__file__).parents[1]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ mood }}"
)
CHAT_TOKENS = deepcopy(TOKENS)
CHAT_TOKENS.chat_template = TEMPLATE
ALONE = XTokAssisted((LM, CHAT_TOKENS))
"""The target of the server, alone."""
HTTP = httpx.Client(verify=False, timeout=PATIENCE, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))
"""One client for all: making one reads all certificates that this machine trusts."""
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}


def tools(**schemas: dict[str, Any]) -> list[Any]:
    """Functions that may be called, with the schemas of their arguments."""
    return [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in schemas.items()]


def held_to(schema: Any) -> dict[str, Any]:
    """The field that holds a text to a schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


@pytest.fixture(autouse=True)
def schemas_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that imports this under another name starts no process to compile a grammar first."""
    monkeypatch.setattr("xtok.serving.http.grammars.check_compiles", lambda grammar: None)


class Server:
    """One that runs in a thread, at a free port, over an engine of its own."""

    def __init__(self, service: Service, **more: Any) -> None:
        self.service = service
        self._listening = listening_socket("127.0.0.1", 0)
        self.address = self._listening.getsockname()[:2]
        self.url = "http://{}:{}".format(*self.address)
        app = app_of(service, **more)
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=5))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listening]})

    def __enter__(self) -> "Server":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()
        self._thread.join()

    def end(self) -> None:
        self._server.should_exit = True

    @property
    def engine(self) -> Engine:
        assert self.service.engine is not None
        return self.service.engine

    def client(self, **more: Any) -> openai.OpenAI:
        http = httpx.Client(verify=False, timeout=PATIENCE)
        return openai.OpenAI(base_url=f"{self.url}/v1", http_client=http, **{"api_key": "none", "max_retries": 0, **more})

    def ask(self, path: str = "completions", **body: Any) -> httpx.Response:
        return HTTP.post(f"{self.url}/v1/{path}", json={"temperature": 0, **body})

    def get(self, path: str, **more: Any) -> httpx.Response:
        return HTTP.get(f"{self.url}{path}", **more)

    def metrics(self) -> dict[str, float]:
        lines = [line.rpartition(" ") for line in self.get("/metrics").text.splitlines() if line[0] != "#"]
        return {name: float(value) for name, _, value in lines}

    def until_idle(self) -> None:
        """Ends when no text is written or waits."""
        wait_for(lambda: (stats := self.engine.stats).running + stats.waiting == 0)


@contextmanager
def serving(
    xt: XTokAssisted | None = None,
    *,
    limits: Limits | None = None,
    batch_size: int = 4,
    queue: int = 1024,
    memory: int | None = None,
    prefix_cache: bool = True,
    **more: Any,
) -> Iterator[Server]:
    xt = xt or XTokAssisted((LM, CHAT_TOKENS), MADE["unrelated"](), budget=CHAIN)
    engine = Engine(xt, batch_size=batch_size, queue=queue, memory=memory, prefix_cache=prefix_cache)
    try:
        with Server(Service(NAME, limits or Limits(), xt, engine), **more) as server:
            yield server
    finally:
        engine.close(cancel=True)
    assert engine.stats.running == engine.stats.waiting == 0


def wait_for(true: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE * 100)):
        if true():
            return
        pause.wait(0.01)
    raise AssertionError("It never came true.")


def check_error(answer: httpx.Response, status: int, param: str | None) -> None:
    """It is OpenAI's error object."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param, error


def data_of(text: str) -> list[str]:
    """The data of a stream's events."""
    return re.findall(r"^data: (.*)\n\n", text, re.MULTILINE)


def together(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """A whole answer of the chunks of its stream."""
    found, choices = dict[str, Any](), dict[int, dict[str, Any]]()
    for chunk in chunks:
        found |= chunk
        for choice in chunk["choices"]:
            one = choices.setdefault(choice["index"], {"text": "", "logprobs": None, "finish_reason": None})
            assert one["finish_reason"] is None
            one["text"] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            one["finish_reason"] = choice["finish_reason"]
            for name, more in (choice["logprobs"] or {}).items():
                one["logprobs"] = one["logprobs"] or {}
                one["logprobs"][name] = one["logprobs"].get(name, []) + more if more is not None else None
    return {**found, "choices": [one for _, one in sorted(choices.items())]}


def alike(one: Any, other: Any) -> bool:
    """Whether two values are equal, but for the last bits of numbers."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    return isclose(one, other, abs_tol=1e-4) if isinstance(one, float) else one == other


def both_ways(server: Server, path: str = "completions", **body: Any) -> dict[str, Any]:
    """The whole answer to a request, of which a stream has to say the same. Of a chat, too, `text` is what it says."""
    answer = server.ask(path, **body)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    *chunks, done = data_of(server.ask(path, **body, stream=True, stream_options={"include_usage": True}).text)
    assert done == "[DONE]"
    streamed = together(map(json.loads, chunks))
    for one in whole["choices"]:
        one["text"] = one["message"]["content"] if "message" in one else one["text"]
    for one, other in zip(whole["choices"], streamed["choices"], strict=True):
        assert alike({name: one[name] for name in other}, other)
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [whole["usage"][name] for name in counts] == [streamed["usage"][name] for name in counts]
    assert {*whole} == {*streamed}
    return dict(whole)


def posted(body: dict[str, Any], *, path: str = "completions", length: int | None = None) -> bytes:
    """A request as bytes. `length`: that which it claims to have."""
    data = json.dumps(body).encode()
    head = [f"POST /v1/{path} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    return "\r\n".join([*head, f"Content-Length: {length or len(data)}", "", ""]).encode() + data


# targets that call functions


TOOLS = tools(weather=CITY, 天気={"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}, "$defs": {"N": {"const": 7}}})
CALL = '{"name": "weather", "arguments": {"city": "京都"}}'
QUESTION: Any = {"model": NAME, "messages": [{"role": "user", "content": "天気は"}], "temperature": 0, "max_tokens": 200}
CONTROLS = ["[TOOL_CALLS]", "<|says|>", "<|thinks|>", "<|/thinks|>", "<|calls|>", "<|/calls|>", "<|end|>"]
CHATS = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{% for message in messages %}{{ message.role }}:"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }} {{ call.function.arguments.city }}</tool_call>"
    "{% endfor %}{{ '\\n' }}{% endfor %}assistant:{{ ending }}"
)


def made() -> tuple[Any, PreTrainedTokenizerFast]:
    """A target whose tokenizer has control tokens to write calls with, and a chat template."""
    tokens = deepcopy(tokenizer("byte-level BPE"))
    tokens.add_special_tokens({"additional_special_tokens": CONTROLS})
    tokens.chat_template = CHATS
    return fitting(tokens, "Llama", 0, dtype=torch.float32, window=WIDE), tokens


CALLING_LM, CALLING_TOKENS = made()


SCRIPT: list[int] = []
"""The ids that `CALLING_LM` writes last in place of its own, which its draft guesses."""


class Writes:
    """A processor by which the target writes one text, and ends."""

    def __init__(self, script: list[int]) -> None:
        self._ids = [*script, CALLING_TOKENS.eos_token_id]
        self._start: int | None = None

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._start = ids.shape[1] if self._start is None else self._start
        found = torch.full_like(scores, -torch.inf)
        found[:, self._ids[min(ids.shape[1] - self._start, len(self._ids) - 1)]] = 0.0
        return found


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets the text that `CALLING_LM` writes in place of its own."""
    monkeypatch.setattr(CALLING_LM.generation_config, "repetition_penalty", 2.0)
    name = "xtok.serving.http.requests.RepetitionPenaltyLogitsProcessor"

    def writes(text: str) -> None:
        SCRIPT[:] = CALLING_TOKENS(text, add_special_tokens=False).input_ids
        monkeypatch.setattr(name, lambda _: Writes([*SCRIPT]))

    return writes


def coming(context: Context) -> list[int]:
    """What follows the part of the script that a text ends with."""
    known = next((size for size in range(len(SCRIPT), 0, -1) if [*context.ids[-size:]] == SCRIPT[:size]), 0)
    return SCRIPT[known : known + 12]


@pytest.fixture(scope="module")
def calling_server() -> Iterator[Server]:
    with serving(
        XTokAssisted((CALLING_LM, CALLING_TOKENS), ScriptedDrafter(coming), budget=Budget(12, schedule="constant"))
    ) as one:
        yield one


@pytest.fixture
def calling_client(calling_server: Server) -> Iterator[openai.OpenAI]:
    with calling_server.client() as one:
        yield one
