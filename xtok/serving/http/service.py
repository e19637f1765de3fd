"""What a server serves: a model by its name, the engine that runs it, and their state."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from time import time

from anyio import CapacityLimiter

from xtok.assisted import XTokAssisted
from xtok.errors import EngineFullError
from xtok.serving.engine import Engine
from xtok.serving.http.formats import Parsers
from xtok.serving.http.metrics import Metrics
from xtok.serving.http.protocol import Limits, RequestError

_PREPARING = 2
"""How many requests with a grammar, or for the log-probabilities of a prompt, are prepared at a time."""
LATER = {"Retry-After": "1"}


@dataclass
class Service:
    """What is served. `xt`, `engine`: None until the models are loaded. `error`: why loading failed. `prompts`: those that the
    page suggests. `logs_texts`: whether the log may hold prompts and texts. `parsers`: how texts of chats are parsed.
    """

    name: str
    limits: Limits = field(default_factory=Limits)
    xt: XTokAssisted | None = None
    engine: Engine | None = None
    prompts: Sequence[str] = ()
    logs_texts: bool = False
    parsers: Parsers = field(default_factory=Parsers)
    error: BaseException | None = None
    created: int = field(default_factory=lambda: int(time()))

    @cached_property
    def preparing(self) -> CapacityLimiter:
        """Limits how many threads prepare requests for which that takes long."""
        return CapacityLimiter(_PREPARING)

    @cached_property
    def metrics(self) -> Metrics:
        return Metrics(lambda: None if self.engine is None else self.engine.stats)

    def state(self) -> str:
        """Returns "ready", "loading" or "broken"."""
        if self.error is not None or (self.engine is not None and self.engine.closed):
            return "broken"
        return "loading" if self.engine is None else "ready"

    def ready(self) -> tuple[XTokAssisted, Engine]:
        """The instance and its engine. Raises `RequestError` if they can't generate."""
        if self.state() != "ready" or self.xt is None or self.engine is None:
            messages = {"loading": "The models are being loaded.", "broken": "The engine has ended. Start the server again."}
            message = messages.get(self.state(), "")
            raise RequestError(message, status=503, kind="server_error", code=self.state(), headers=LATER)
        return self.xt, self.engine


def full(error: EngineFullError) -> RequestError:
    return RequestError(str(error), status=429, kind="rate_limit_error", code="rate_limit_exceeded", headers=LATER)
