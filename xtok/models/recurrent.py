"""Models with recurrent layers, whose states can't be rolled back position by position."""

from collections.abc import Sequence
from copy import deepcopy
from math import inf
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from xtok.models.cache import layers_of, new_cache
from xtok.models.cached_model import CachedModel
from xtok.models.runner import copied

_LONGEST = 16
"""How many positions may be forwarded again together with new ones. More would cost more than the forward pass they save."""
_STATES = frozenset(vars(LinearAttentionLayer()))
"""The attributes that hold a recurrent layer's states."""


def cached_model(
    model: PreTrainedModel,
    cache: Cache,
    inputs: dict[str, Any] | None = None,
    *,
    hidden_layers: Sequence[int] = (),
    snapshots: int = 1,
    prompt: tuple[Tensor, Any] | None = None,
) -> CachedModel:
    """`model` with its KV cache. `snapshots`: how many earlier states of recurrent layers are kept for roll-backs."""
    if any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers):
        return RecurrentModel(model, cache, inputs, snapshots=snapshots, hidden_layers=hidden_layers, prompt=prompt)
    return CachedModel(model, cache, inputs, hidden_layers=hidden_layers, prompt=prompt)


def without_step_limits(model: PreTrainedModel) -> PreTrainedModel:
    """`model`, or a copy of its Mamba-2 layers, and of what they are in, that computes several ids as it computes one.

    transformers' Mamba-2 layers keep the time steps of several ids within `time_step_limit`, but not that of one id after a
    state (`selective_state_update` has no limits). Generation goes on by one id at a time, so guesses are checked that way.
    """
    same = {module: module for module in model.modules() if all(map(_has_no_limits, module.modules()))}
    if model in same:
        return model
    made = copied(model, same)
    for module in made.modules():
        if not _has_no_limits(module):
            vars(module)[_LIMIT] = (0.0, inf)
    return made


_LIMIT = "time_step_limit"


def _has_no_limits(module: Any) -> bool:
    """Whether no time step, which is above 0, is out of a module's limits."""
    least, most = vars(module).get(_LIMIT) or (0.0, inf)
    return bool(least <= 0 and most == inf)


class RecurrentModel(CachedModel):
    """A causal LM with recurrent layers, for chains of guesses.

    To roll back, it restores a snapshot of an earlier state. The kept positions after that are forwarded again together with
    what comes next, so most rounds still cost one forward pass.
    """

    def __init__(self, *given: Any, snapshots: int, **more: Any) -> None:
        super().__init__(*given, **more)
        self._going_on = without_step_limits(self._model)
        self._ids = torch.zeros((1, 0), dtype=torch.int64, device=self.device)
        self._most = snapshots
        self._snapshots: dict[int, list[dict[str, Any]]] = {}  # the states of all layers, by how many positions the cache held

    @property
    def length(self) -> int:
        """How many positions are kept. The cache holds the first of them, and lacks those to be forwarded again."""
        return self._ids.shape[1]

    def prefill(self, ids: Tensor, config: Any) -> Tensor:
        logits = super().prefill(ids, config)
        # Ids that a filled cache was made from may be unknown; a prompt is never forwarded again.
        self._ids = torch.nn.functional.pad(ids, (self._held - ids.shape[1], 0))
        return logits

    def forward(self, ids: Tensor, rows: int) -> Tensor:
        if self.length - self._held > _LONGEST:
            self.settle()
        self._ids = torch.cat([self._ids, ids], dim=1)
        return self._forward_rest(rows)

    def branch(self, ids: Tensor, parents: Sequence[int]) -> Tensor:
        self._parents += parents
        assert self._parents == list(range(-1, len(self._parents) - 1)), "recurrent layers see no branches"
        return self.forward(ids, len(parents))

    def roll_back(self, length: int) -> bool:
        self._parents, self._lead = [], 0
        self._crop(self.length - length)
        return True

    def settle(self) -> None:
        if self._held < self.length:
            self._forward_rest(1)
            self._crop(0)

    def start_anew(self) -> None:
        super().start_anew()
        self._ids, self._snapshots = self._ids[:, :0], {}

    def _forward_rest(self, rows: int) -> Tensor:
        """Forward all that the cache lacks. Returns the last rows' logits, (rows, vocabulary)."""
        self._remember()
        return super().forward(self._ids[:, self._held :], rows)

    def _remember(self) -> None:
        """Take a snapshot of the states, unless there is one."""
        if self._held and self._held not in self._snapshots:
            self._snapshots[self._held] = [_states(layer) for layer in self.cache.layers]
            for oldest in list(self._snapshots)[: -self._most]:
                del self._snapshots[oldest]

    def _crop(self, excess: int) -> None:
        self._ids = self._ids[:, : self.length - excess]
        if self.length < self._held:
            self._return_to_a_snapshot()
        elif self._held:
            self._crop_attention(0)
        self._recorded = self._held

    def _return_to_a_snapshot(self) -> None:
        """Return to the newest snapshot that is old enough; or start from nothing if all are too new, or too old for what a
        sliding window still holds.
        """
        oldest = self._recorded if self._has_slid() else 0
        self._snapshots = {held: states for held, states in self._snapshots.items() if oldest <= held <= self.length}
        if not self._snapshots:
            self.cache = new_cache(self._model)
            return
        newest = max(self._snapshots)
        for layer, states in zip(self.cache.layers, self._snapshots[newest], strict=True):
            vars(layer).update(deepcopy(states))
        self._crop_attention(self._held - newest)

    def _crop_attention(self, excess: int) -> None:
        for layer in layers_of(self.cache):
            if not isinstance(layer, LinearAttentionLayer):
                layer.crop(-excess)
            elif isinstance(layer, DynamicLayer):
                DynamicLayer.crop(layer, -excess)


def _states(layer: Any) -> dict[str, Any]:
    """A copy of a recurrent layer's states. Those of its attention, if it has any, can be cropped and aren't copied."""
    if not isinstance(layer, LinearAttentionLayer):
        return {}
    return {name: deepcopy(value) for name, value in vars(layer).items() if name in _STATES}
