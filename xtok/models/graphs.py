"""CUDA graphs: a forward pass of a shape that was captured is replayed, which launches all of its kernels at once.

A forward pass of one id launches hundreds of kernels, which in small models take longer to launch than to run. A graph reads
and writes fixed addresses: inputs are copied to them, and outputs from them.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from xtok.models.runner import runs_more
from xtok.models.timing import excluded

Inputs: TypeAlias = "dict[str, Tensor]"
Run: TypeAlias = Callable[[Inputs], "list[Tensor]"]
"""A forward pass as a function of its inputs. Whatever else it depends on is the same each time."""

_MOST = 1 << 30
"""How many bytes the outputs of a cache's graphs may take."""
_FREE, _REPLAYS = 8, 8
"""After the first 8 captures, there is at most one more for every 8 replays: it takes as long as some forward passes."""
_ALONE = Lock()
"""Held while a graph is captured, since a process can capture only one at a time."""
_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


@dataclass(frozen=True)
class Graph:
    """A captured forward pass: `replay` computes `outputs` from `inputs`, both at fixed addresses."""

    inputs: Inputs
    outputs: list[Tensor]
    replay: Callable[[], None]


class Graphs:
    """The captured forward passes of one cache.

    Law: `run` gives the bits of the forward pass that it is handed. A graph whose outputs differ from those is not used. After
    the first capture that fails, nothing more is captured.
    """

    def __init__(self) -> None:
        self.replays = self.captures = 0
        self._can = True
        self._pool: Any = None
        self._seen = set[Hashable]()
        self._made: OrderedDict[Hashable, Graph] = OrderedDict()

    def clear(self) -> None:
        """Drop all graphs, since the memory that they read and write is gone."""
        self._made.clear()
        self._seen.clear()
        self._pool = None  # one that no graph is left of can't be used again

    def run(self, shape: Hashable, forward: Run, inputs: Inputs) -> list[Tensor]:
        """The outputs of a forward pass, as tensors of the caller's own. A shape that came before is captured, unless too many
        were, and then replayed. `shape`: all that the forward pass depends on besides its inputs.
        """
        device = next(iter(inputs.values())).device
        if not self._can or torch.is_autocast_enabled(device.type):
            return forward(inputs)
        if shape in self._made:
            self._made.move_to_end(shape)
            self.replays += 1
            return _replayed(self._made[shape], inputs)
        outputs = forward(inputs)
        if shape in self._seen and self.captures <= _FREE + self.replays / _REPLAYS:
            with excluded():
                self._capture(shape, forward, inputs, outputs)
        self._seen.add(shape)
        return outputs

    def _capture(self, shape: Hashable, forward: Run, inputs: Inputs, outputs: list[Tensor]) -> None:
        """Capture a forward pass whose `outputs` are known. Graphs of a cache share memory, so outputs are copied at once."""
        self.captures += 1
        try:
            if self._pool is None and torch.cuda.is_available():
                self._pool = torch.cuda.graph_pool_handle()
            with _ALONE:
                graph = capture(forward, {name: part.clone() for name, part in inputs.items()}, self._pool)
            self._can = all(map(torch.equal, outputs, _replayed(graph, inputs)))
        except Exception:  # it waits for the device, or decides by what is on it, or there is no memory left
            self._can = False
        if not self._can:
            self.clear()
            return
        self._made[shape] = graph
        while sum(part.nbytes for one in self._made.values() for part in one.outputs) > _MOST:
            self._made.popitem(last=False)


def _replayed(graph: Graph, inputs: Inputs) -> list[Tensor]:
    for name, part in inputs.items():
        graph.inputs[name].copy_(part)
    graph.replay()
    return [part.clone() for part in graph.outputs]


def capture(forward: Run, inputs: Inputs, pool: Any) -> Graph:
    """Capture a forward pass that ran before. It reads `inputs` where they are in memory, and computes in a memory `pool`.

    Other threads may use the GPU meanwhile. Whatever fails, the caller's stream stays the current one, unlike with
    `torch.cuda.graph`.
    """
    graph, device = torch.cuda.CUDAGraph(), next(iter(inputs.values())).device
    if device not in _STREAMS:  # one, for libraries keep a workspace for each
        _STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]
    stream = _STREAMS[device]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(stream):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            outputs = forward(inputs)
        finally:
            graph.capture_end()
    return Graph(inputs, outputs, graph.replay)


def captures(wanted: bool | None, models: Iterable[PreTrainedModel]) -> bool:
    """Whether to capture forward passes. `wanted`: None, the default, captures those of models that allow it."""
    return wanted is not False and any(map(takes_graphs, models))


def takes_graphs(model: PreTrainedModel) -> bool:
    """Whether forward passes may be captured: on one GPU, if nothing but kernels has to run."""
    devices = {part.device for part in (*model.parameters(), *model.buffers())}
    return {device.type for device in devices} == {"cuda"} and len(devices) == 1 and not any(map(runs_more, model.modules()))
