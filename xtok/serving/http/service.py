"""What a server serves: a model by its name, the engine that runs it, their state, and metrics for Prometheus."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from time import time

from anyio import CapacityLimiter
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from xtok.assisted import XTokAssisted
from xtok.results.generation import Generation
from xtok.serving.engine import Engine, EngineStats
from xtok.serving.http.formats import Parsers
from xtok.serving.http.protocol import Limits, RequestError

_PREPARING = 2
"""How many requests with a grammar, or for the log-probabilities of a prompt, are prepared at a time."""
LATER = {"Retry-After": "1"}
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """The metrics of one server, with vLLM's names and meanings, in a registry of its own. `stats`: gives the engine's; None
    until there is an engine.
    """

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self.registry = CollectorRegistry()
        for figure, name, help_text in (
            ("running", "num_requests_running", "Texts that are being generated."),
            ("waiting", "num_requests_waiting", "Texts that wait to be generated."),
            ("positions", "cache_positions", "Positions of running texts in the target's KV cache."),
        ):
            gauge = Gauge(f"xtok_{name}", help_text, registry=self.registry)
            gauge.set_function(lambda figure=figure: getattr(stats(), figure, 0))  # type: ignore[misc]
        counter = partial(Counter, namespace="xtok", registry=self.registry)
        histogram = partial(Histogram, namespace="xtok", registry=self.registry)
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self._queries = counter("prefix_cache_queries", "Tokens of prompts that were looked up in the prefix cache.")
        self._hits = counter("prefix_cache_hits", "Tokens of prompts that were found in the prefix cache.")
        self._generated = counter("generation_tokens", "New tokens.")
        self.ended = counter("request_success", "Texts by what ended them.", ["finished_reason"])
        self.time_to_first_token = histogram("time_to_first_token_seconds", "Seconds until the first text.", buckets=_LONG)
        self._each = histogram("request_time_per_output_token_seconds", "Seconds per token after the first.", buckets=_SHORT)
        whole = "Seconds from a request to the end of its texts."
        self._whole = histogram("e2e_request_latency_seconds", whole, buckets=_LONG)
        self._drafts = counter("spec_decode_num_drafts", "Rounds in which a draft guessed.", ["draft"])
        self._guessed = counter("spec_decode_num_draft_tokens", "Tokens that a draft guessed.", ["draft"])
        self._accepted = counter("spec_decode_num_accepted_tokens", "Guessed tokens that were accepted.", ["draft"])

    def ends(self, text: Generation, read: int) -> None:
        """Count a text that has ended. `read`: how many tokens its prompt has."""
        self._queries.inc(read)
        self._hits.inc(text.stats.cached_tokens)
        self._generated.inc(len(text.token_ids))
        self.ended.labels(text.finish_reason).inc()
        for number, name in enumerate(text.drafts):
            self._drafts.labels(name).inc(sum(number in one.drafts for one in text.rounds))
            self._guessed.labels(name).inc(sum(one.drafts.count(number) for one in text.rounds))
            self._accepted.labels(name).inc(sum(one.drafts[node] == number for one in text.rounds for node in one.right))

    def answers(self, seconds: float, generating: float, tokens: int) -> None:
        """Count a request that was answered in so many seconds, `generating` of them after its first text."""
        self._whole.observe(seconds)
        if tokens > 1:
            self._each.observe(generating / (tokens - 1))


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
        if (state := self.state()) != "ready" or self.xt is None or self.engine is None:
            broken = "The engine has ended. Start the server again."
            message = broken if state == "broken" else "The models are being loaded."
            raise RequestError(message, status=503, kind="server_error", code=state, headers=LATER)
        return self.xt, self.engine
