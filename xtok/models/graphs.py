"""CUDA graphs: a forward of a shape that came before is replayed, which launches all of its kernels at once.

A forward of one id launches some hundreds of kernels, each of which takes longer to launch than to run where a model is small.
What a graph reads and writes stands at fixed places: inputs are copied to them, and what comes out from them.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from xtok.models.cache import device_of

Inputs: TypeAlias = "dict[str, Tensor]"
Run: TypeAlias = Callable[[Inputs], "list[Tensor]"]
"""A forward, by its inputs. Whatever else it depends on is the same each time."""

_MOST = 64
"""How many graphs a cache has at a time. Their inputs and outputs take memory."""
_ALONE = Lock()
"""In a process one graph at a time can be captured."""
_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


@dataclass(frozen=True)
class Graph:
    """A forward as it was captured: `replay` computes `outputs` from `inputs`, at the places that those have."""

    inputs: Inputs
    outputs: list[Tensor]
    replay: Callable[[], None]


class Graphs:
    """The captured forwards of one cache.

    Law: `run` gives the bits that the forward gives which it is handed. A graph whose outputs differ from those of the forward
    that it was captured from is not used, and where one can't be captured, none is from then on.
    """

    def __init__(self) -> None:
        self._can = True
        self._pool: Any = None
        self._made: OrderedDict[Hashable, Graph | None] = OrderedDict()

    def clear(self) -> None:
        """Forget all: what was captured reads and writes at places that are no longer there."""
        self._made.clear()

    def run(self, shape: Hashable, forward: Run, inputs: Inputs) -> list[Tensor]:
        """The outputs of a forward. It is captured where forwards of this shape came before, and then replayed.

        `shape` is all that it depends on beside its inputs. Outputs are the caller's own.
        """
        device = next(iter(inputs.values())).device
        if not self._can or torch.is_autocast_enabled(device.type) or torch.is_inference_mode_enabled():
            return forward(inputs)
        graph = self._made.get(shape)
        if graph is None:
            return self._captured(shape, forward, inputs)
        self._made.move_to_end(shape)
        return _replayed(graph, inputs)

    def _captured(self, shape: Hashable, forward: Run, inputs: Inputs) -> list[Tensor]:
        """Forward, and capture it where it isn't the first of its shape."""
        if shape not in self._made:
            self._made[shape] = None
            return forward(inputs)
        outputs = forward(inputs)
        try:
            graph = self._capture(forward, inputs)
            self._can = all(map(torch.equal, outputs, _replayed(graph, inputs)))
        except Exception:  # it waits for the device, or decides by what is on it, or there is no memory left
            self._can = False
        if self._can:
            self._made[shape] = graph
            while len(self._made) > _MOST:
                self._made.popitem(last=False)
        else:
            self._made.clear()
        return outputs

    def _capture(self, forward: Run, inputs: Inputs) -> Graph:
        """Graphs of a cache share their memory: what comes out of one is copied before another is replayed."""
        own = {name: part.clone() for name, part in inputs.items()}
        if self._pool is None and torch.cuda.is_available():
            self._pool = torch.cuda.graph_pool_handle()
        with _ALONE:
            return capture(forward, own, self._pool)


def _replayed(graph: Graph, inputs: Inputs) -> list[Tensor]:
    for name, part in inputs.items():
        graph.inputs[name].copy_(part)
    graph.replay()
    return [part.clone() for part in graph.outputs]


def capture(forward: Run, inputs: Inputs, pool: Any) -> Graph:
    """Capture a forward that ran before, with what it reads at the places of `inputs`, and what it computes in a `pool`."""
    graph, device = torch.cuda.CUDAGraph(), next(iter(inputs.values())).device
    if device not in _STREAMS:  # one, for libraries keep a workspace for each
        _STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]
    with torch.cuda.device(device), torch.cuda.graph(graph, pool, _STREAMS[device], capture_error_mode="thread_local"):
        outputs = forward(inputs)  # meanwhile other threads may use the GPU
    return Graph(inputs, outputs, graph.replay)


def takes_graphs(model: PreTrainedModel) -> bool:
    """Whether forwards may be captured: on one GPU, where nothing but kernels has to run."""
    devices = {part.device for part in (*model.parameters(), *model.buffers())}
    return {device.type for device in devices} == {"cuda"} and len(devices) == 1 and not any(map(_runs_more, model.modules()))


def _runs_more(module: nn.Module) -> bool:
    """Whether a module has hooks, or a method of its own in place of its class's: what those do may be more than kernels."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def state_of(model: PreTrainedModel) -> Hashable:
    """What captured forwards have in them of a model: where its weights are, and how its modules compute."""
    modules: list[Any] = list(model.modules())
    return (
        device_of(model),
        torch.get_float32_matmul_precision(),
        str(model.config.get_text_config(decoder=True)._attn_implementation),
        *((id(one), one.training, _runs_more(one), _adapters(one), _places(one)) for one in modules),
    )


def _adapters(module: Any) -> tuple[str, str]:
    """Which adapters of peft take part in a layer."""
    return str(getattr(module, "active_adapters", None)), str(getattr(module, "disable_adapters", None))


def _places(module: nn.Module) -> tuple[tuple[int, torch.dtype], ...]:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return tuple((part.data_ptr(), part.dtype) for part in own)
