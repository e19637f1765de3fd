"""`xtok serve`: listens at once, loads the models, and ends by finishing what runs."""

import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from time import sleep
from types import FrameType
from typing import Any

import uvicorn
from sse_starlette.sse import AppStatus

from xtok.assisted import XTokAssisted
from xtok.errors import InvalidInputError, reason
from xtok.serving.engine import Engine
from xtok.serving.http.app import app_of
from xtok.serving.http.middleware import LOG
from xtok.serving.http.service import Service

_CLOSING = 2
"""How many seconds clients have to read the last event of a stream after its text was cancelled."""


class _Server(uvicorn.Server):
    """Ends the texts that still run `drain_seconds` after a signal. So streams end by an error event, before uvicorn cuts off
    what is open `_CLOSING` seconds later.
    """

    def __init__(self, config: uvicorn.Config, service: Service, drain_seconds: int) -> None:
        super().__init__(config)
        self._service, self._drain_seconds = service, drain_seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            Thread(target=self._drain, name="xtok ending", daemon=True).start()
        super().handle_exit(sig, frame)

    def _drain(self) -> None:
        if (engine := self._service.engine) is not None:
            if left := engine.stats.running + engine.stats.waiting:
                message = f"xtok: still generating {left} texts, for up to {self._drain_seconds} s; Ctrl-C again stops at once"
                print(message, file=sys.stderr, flush=True)
            sleep(self._drain_seconds)
            engine.close(cancel=True)


def run(
    service: Service,
    load: Callable[[], XTokAssisted],
    start: Callable[[XTokAssisted], Engine],
    *,
    host: str,
    port: int,
    key: str | None,
    origins: Sequence[str],
    drain_seconds: int,
) -> None:
    """Serve until SIGTERM or Ctrl-C. After that, no new requests are taken, and running ones get `drain_seconds` to end.

    `load` loads the models, and `start` makes their engine; meanwhile clients get an error that says so. `port` 0 takes any
    free port. `key`: the API key. `origins`: other sites whose pages may send requests (CORS). Raises `InvalidInputError` if
    the port can't be opened, and whatever `load` and `start` raise.
    """
    listening = listening_socket(host, port)
    host, port = listening.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    AppStatus.enable_automatic_graceful_drain = False  # else streams would be cut off at once
    app = app_of(service, key=key, origins=origins)
    quiet: dict[str, Any] = {"log_config": None, "access_log": False, "lifespan": "off", "server_header": False}
    config = uvicorn.Config(app, **quiet, timeout_graceful_shutdown=drain_seconds + _CLOSING)
    server = _Server(config, service, drain_seconds)

    def begin() -> None:
        """Load the models while clients get an error that says so. What fails ends the server."""
        print(f"xtok: {service.name} will be at {url}/v1 when it is loaded", file=sys.stderr, flush=True)
        try:
            service.xt = load()
            service.engine = start(service.xt)
        except BaseException as error:
            service.error = error
            server.should_exit = True
        else:
            print(f"xtok: {service.name} is at {url}/v1\nxtok: its page is at {url}/", file=sys.stderr, flush=True)

    Thread(target=begin, name="xtok loading", daemon=True).start()
    with _in_a_process_of_its_own(), suppress(KeyboardInterrupt):
        server.run(sockets=[listening])
    if service.engine is not None:
        service.engine.close(cancel=True)
    if service.error is not None:
        raise service.error


def listening_socket(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `InvalidInputError` if the address can't be opened."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        message = f"{host} port {port} can't be opened for listening: {reason(error)}. Give another --port or --host."
        raise InvalidInputError(message) from error


@contextmanager
def _in_a_process_of_its_own() -> Iterator[None]:
    """Log requests to stderr inside the block, as lines of JSON and nothing else. Ignore SIGTERM, which uvicorn raises again
    after it has stopped: the engine still has to be closed.
    """
    logging.getLogger("uvicorn").addHandler(logging.NullHandler())  # it would report connections that it cut off itself
    handler, level, before = logging.StreamHandler(sys.stderr), LOG.level, signal.signal(signal.SIGTERM, lambda *_: None)
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(level)
        LOG.propagate = True
        signal.signal(signal.SIGTERM, before)
