"""Servers side by side: `xtok serve` with a draft and without one, and `transformers serve`, asked by clients at once."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from threading import Thread
from time import perf_counter, sleep
from typing import Any

from xtok.assisted import XTokAssisted
from xtok.bench.compare import check_prompts, in_turns
from xtok.errors import InvalidInputError
from xtok.results.progress import bar
from xtok.serving.engine import Engine

XTOK, NONE, TRANSFORMERS = "xtok serve", "xtok serve --draft none", "transformers serve"
_EACH = 3
"""How many requests each client makes, one behind another."""
_PATIENCE = 600.0
_TRANSFORMERS = "from transformers.cli.transformers import main; main()"


@dataclass(frozen=True)
class ServerRow:
    """A server that so many `clients` ask at once.

    `requests_per_second` and `first_text`, the seconds to the first text of a request, are medians: of repeats, and of all
    requests. `speed`: the median over repeats of the seconds of `transformers serve` ÷ its own. `identical`: the share of texts
    that are those of `transformers serve`.
    """

    clients: int
    system: str
    requests_per_second: float
    first_text: float
    speed: float
    identical: float


@dataclass(frozen=True)
class ServerFigures:
    """`added`: what the server adds to the seconds of a text of its engine, as a share of those."""

    added: float
    rows: list[ServerRow]


@dataclass(frozen=True)
class Load:
    """What came of some requests: their texts, the seconds to the first piece of each, and those of all together."""

    texts: list[str]
    firsts: list[float]
    seconds: float


def compare_servers(
    target: str, draft: str, prompts: Sequence[str], clients: Sequence[int], *, max_new_tokens: int, repeats: int
) -> list[ServerRow]:
    """Ask all servers in turn, greedily by the target's generation configuration, and give a row per server and number of
    clients. `target`, `draft`: paths.

    Raises `InvalidInputError` without prompts, and where a server doesn't start.
    """
    check_prompts(prompts)
    rows = []
    with ExitStack() as stack:
        ports = {name: stack.enter_context(_serving(name, target, draft)) for name in (XTOK, NONE, TRANSFORMERS)}
        for count in bar(clients, "clients"):
            texts = list(islice(cycle(prompts), _EACH * count))
            asks = {
                name: partial(_asked, port, _model(name, target), texts, count, max_new_tokens) for name, port in ports.items()
            }
            runs = in_turns(asks, repeats)
            rows += [_row(count, name, runs) for name in runs]
    return rows


def measure_added(xt: XTokAssisted, prompts: Sequence[str], *, max_new_tokens: int, repeats: int) -> float:
    """What the server adds to a text of its engine, as a share of that: the median over texts, each by the engine before and
    behind.
    """
    shares = []
    with _in_thread(xt) as (engine, port):

        def alone(prompt: str) -> float:
            start = perf_counter()
            engine.submit(prompt, max_new_tokens=max_new_tokens, do_sample=False).result()
            return perf_counter() - start

        def served(prompt: str) -> float:
            return _asked(port, "xtok", [prompt], 1, max_new_tokens).seconds

        for prompt in bar([*prompts[:1], *list(prompts) * repeats], "texts"):
            first, again, second = alone(prompt), served(prompt), alone(prompt)
            shares.append(2 * again / (first + second) - 1)
    return median(shares[1:])  # the first teaches what pays


def _row(clients: int, name: str, runs: dict[str, list[Load]]) -> ServerRow:
    own, others = runs[name], runs[TRANSFORMERS]
    same = [
        text == other for one, two in zip(own, others, strict=True) for text, other in zip(one.texts, two.texts, strict=True)
    ]
    return ServerRow(
        clients,
        name,
        median(len(one.texts) / one.seconds for one in own),
        median(first for one in own for first in one.firsts),
        median(two.seconds / one.seconds for one, two in zip(own, others, strict=True)),
        sum(same) / len(same),
    )


def _asked(port: int, model: str, texts: Sequence[str], clients: int, max_new_tokens: int, _run: int = 0) -> Load:
    """All texts, by so many clients at once, whatever the number of the run."""
    asked = {"model": model, "max_tokens": max_new_tokens, "temperature": 0, "stream": True}
    start = perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        told = list(pool.map(lambda text: _answer(port, {**asked, "prompt": text}), texts))
    return Load([text for text, _ in told], [first for _, first in told], perf_counter() - start)


def _answer(port: int, body: dict[str, Any]) -> tuple[str, float]:
    """A text, and the seconds to its first piece. Raises `InvalidInputError` where there is none."""
    start, first, pieces = perf_counter(), 0.0, list[str]()
    connection = HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise InvalidInputError(f"A server refused to write: {answer.read(500).decode(errors='replace')}")
        for data in _events(answer):
            if piece := "".join(choice["text"] for choice in data["choices"]):
                first = first or perf_counter() - start
                pieces.append(piece)
    finally:
        connection.close()
    return "".join(pieces), first


def _events(answer: Any) -> Iterator[dict[str, Any]]:
    for line in answer:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[6:])


def _model(name: str, target: str) -> str:
    return target if name == TRANSFORMERS else Path(target).resolve().name


@contextmanager
def _serving(name: str, target: str, draft: str) -> Iterator[int]:
    """The port of a server in a process of its own, once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = subprocess.Popen(_command(name, target, draft, port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(started, name, port)
        yield port
    finally:
        started.kill()
        started.wait()


def _command(name: str, target: str, draft: str, port: int) -> list[str]:
    if name == TRANSFORMERS:
        return [sys.executable, "-c", _TRANSFORMERS, "serve", target, "--port", str(port)]
    models = ["--target", target, "--draft", draft if name == XTOK else "none"]
    return [sys.executable, "-m", "xtok", "serve", *models, "--port", str(port), "--batch-size", "32"]


def _wait(started: "subprocess.Popen[bytes]", name: str, port: int) -> None:
    """Raises `InvalidInputError` where it ends, or doesn't begin."""
    for _ in range(int(_PATIENCE)):
        if started.poll() is not None:
            raise InvalidInputError(f"{name} ended with status {started.returncode}. Start it by hand to see why.")
        try:
            connection = HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        sleep(1)
    raise InvalidInputError(f"{name} wasn't ready within {_PATIENCE:.0f} seconds.")


@contextmanager
def _in_thread(xt: XTokAssisted) -> Iterator[tuple[Engine, int]]:
    """An engine, and the port of a server over it, in this process."""
    import uvicorn

    from xtok.serving.http.app import app_of
    from xtok.serving.http.service import Service

    listening = socket.create_server(("127.0.0.1", 0))
    with Engine(xt) as engine:
        app = app_of(Service("xtok", xt=xt, engine=engine))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        thread = Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield engine, listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
