"""`xtok serve` with a draft and without one, and `transformers serve`, side by side, with several clients at once."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from operator import eq
from pathlib import Path
from statistics import median
from threading import Thread
from time import perf_counter, sleep
from typing import Annotated, Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from xtok.assisted import XTokAssisted
from xtok.bench.rows import Column
from xtok.bench.runs import check_prompts, in_turns
from xtok.errors import InvalidInputError
from xtok.models.timing import timed
from xtok.serving.engine import Engine

XTOK, NONE, TRANSFORMERS = "xtok serve", "xtok serve --draft none", "transformers serve"
_EACH = 3
"""How many requests each client makes, one after another."""
_TIMEOUT = 600.0
_OPEN = build_opener(ProxyHandler({})).open
"""Opens URLs of this machine, ignoring proxies that the environment names."""
_TRANSFORMERS = "from transformers.cli.transformers import main; main()"


@dataclass(frozen=True)
class ServerRow:
    """A server to which `clients` clients send requests at once."""

    clients: Annotated[int, Column()]
    system: Annotated[str, Column("")]
    requests_per_second: Annotated[float, Column("requests/s", form=".2f", note="the median over repeats.")]
    first_text: Annotated[float, Column(form=".2f", note="seconds to the first text of a request, the median over all.")]
    speed: Annotated[float, Column(form=".2f", note="how many times as fast as transformers serve.")]
    identical: Annotated[float, Column("as transformers", form=".0%", note="texts that are those of transformers serve.")]


class Load(NamedTuple):
    """The texts of some requests, the seconds to the first piece of each, and the seconds until all ended."""

    texts: list[str]
    firsts: list[float]
    seconds: float


def compare_servers(
    target: str, draft: str, prompts: Sequence[str], clients: Sequence[int], *, max_new_tokens: int, repeats: int
) -> list[ServerRow]:
    """Send requests to all servers in turn. Returns a row for each server and number of clients. `target`, `draft`: paths.

    Raises `InvalidInputError` without prompts, and if a server doesn't start.
    """
    check_prompts(prompts)
    rows = []
    with ExitStack() as stack:
        ports = {name: stack.enter_context(_serving(name, target, draft)) for name in (XTOK, NONE, TRANSFORMERS)}
        models = {name: target if name == TRANSFORMERS else Path(target).resolve().name for name in ports}
        loads = {name: partial(_load, port, models[name], max_new_tokens) for name, port in ports.items()}
        for count in clients:
            call = {"texts": list(islice(cycle(prompts), _EACH * count)), "clients": count}
            runs = in_turns(loads, [call] * (repeats + 1), f"{count} clients")
            rows += [_row(count, name, runs) for name in runs]
    return rows


def measure_added(xt: XTokAssisted, prompts: Sequence[str], *, max_new_tokens: int, repeats: int) -> float:
    """How much time the server adds to that of its engine, as a share: the median over texts, each measured between two runs of
    the engine alone.
    """
    with _in_thread(xt) as (engine, port):

        def alone(texts: Sequence[str]) -> float:
            with timed() as span:
                engine.submit(texts[0], max_new_tokens=max_new_tokens, do_sample=False).result()
            return span.seconds

        def served(texts: Sequence[str]) -> float:
            return _load(port, "xtok", max_new_tokens, texts, 1).seconds

        calls = [{"texts": [prompt]} for prompt in [*prompts[:1], *list(prompts) * repeats]]
        before, between, after = in_turns({"before": alone, "served": served, "after": alone}, calls, "texts").values()
    return median(2 * two / (one + three) - 1 for one, two, three in zip(before, between, after, strict=True))


def _row(clients: int, name: str, runs: dict[str, list[Load]]) -> ServerRow:
    own, others = runs[name], runs[TRANSFORMERS]
    texts, expected = ([text for load in loads for text in load.texts] for loads in (own, others))
    return ServerRow(
        clients,
        name,
        requests_per_second=median(len(load.texts) / load.seconds for load in own),
        first_text=median(first for load in own for first in load.firsts),
        speed=median(other.seconds / load.seconds for load, other in zip(own, others, strict=True)),
        identical=sum(map(eq, texts, expected)) / len(texts),
    )


def _load(port: int, model: str, max_new_tokens: int, texts: Sequence[str], clients: int) -> Load:
    """Continue all texts with requests from `clients` clients at once."""
    body = {"model": model, "max_tokens": max_new_tokens, "temperature": 0, "stream": True}
    with timed() as span, ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda text: _answer(port, {**body, "prompt": text}), texts))
    return Load([text for text, _ in answers], [first for _, first in answers], span.seconds)


def _answer(port: int, body: dict[str, Any]) -> tuple[str, float]:
    """The text of one request, and the seconds to its first piece. Raises `InvalidInputError` if the server refuses."""
    start, first, pieces = perf_counter(), 0.0, list[str]()
    url, data = f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode()
    try:
        with _OPEN(Request(url, data, {"Content-Type": "application/json"}), timeout=_TIMEOUT) as answer:
            for line in answer:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                if piece := "".join(choice["text"] for choice in json.loads(line[6:])["choices"]):
                    first = first or perf_counter() - start
                    pieces.append(piece)
    except HTTPError as error:
        raise InvalidInputError(f"A server refused to write: {error.read(500).decode(errors='replace')}") from error
    return "".join(pieces), first


@contextmanager
def _serving(name: str, target: str, draft: str) -> Iterator[int]:
    """The port of a server in a process of its own, once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["-m", "xtok", "serve", "--target", target, "--draft", draft if name == XTOK else "none", "--batch-size", "32"]
    if name == TRANSFORMERS:
        command = ["-c", _TRANSFORMERS, "serve", target]
    arguments = [sys.executable, *command, "--port", str(port)]
    started = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(started, name, port)
        yield port
    finally:
        started.kill()
        started.wait()


def _wait(started: "subprocess.Popen[bytes]", name: str, port: int) -> None:
    """Wait until a server is ready. Raises `InvalidInputError` if it ends or takes too long."""
    for _ in range(int(_TIMEOUT)):
        if started.poll() is not None:
            raise InvalidInputError(f"{name} ended with status {started.returncode}. Run it yourself to see why.")
        try:
            with _OPEN(f"http://127.0.0.1:{port}/health", timeout=_TIMEOUT):
                return
        except OSError:
            sleep(1)
    raise InvalidInputError(f"{name} wasn't ready within {_TIMEOUT:.0f} seconds.")


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
