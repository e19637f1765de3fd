"""A causal LM with a KV cache of its own, forwarded alone."""

from collections.abc import Sequence
from functools import cached_property
from math import ceil
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from xtok.models.cache import (
    CACHE,
    context_window,
    device_of,
    layer_kinds,
    layers_of,
    new_cache,
    record_past,
    stacked,
    supports_logits_to_keep,
    vocabulary_size,
)
from xtok.models.forwards import Answer, ForwardRequest, Slot, wait_for
from xtok.models.masks import NewIds, grown, model_inputs
from xtok.models.rope import isolated_rope
from xtok.models.runner import running
from xtok.models.timing import Cost, timed
from xtok.models.traits import layer_windows


class CachedModel(Slot):
    """A causal LM and its KV cache.

    Law: after each call but `branch`, the cache holds exactly the positions of `ids[:length]`, where `ids` is what was
    forwarded and kept. After `branch`, the nodes of a tree follow those, until `keep` or `roll_back` ends the tree.

    `inputs`: further inputs of the model for the prompt (attention mask, positions), which transformers continues for new ids.
    `hidden_layers`: after which layers `hidden` has the hidden states, (ids, layers, hidden size), of the latest `forward` or
    `branch`; None after `prefill`. `prompt`: its ids, (1, length), int64, padding included, and the generation config; the
    first forward pass reads it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: Cache,
        inputs: dict[str, Any] | None = None,
        *,
        hidden_layers: Sequence[int] = (),
        prompt: tuple[Tensor, Any] | None = None,
    ) -> None:
        self._prompt = prompt
        self._lead = 0
        self._model: Any = running(model)
        self._isolated = isolated_rope(self._model)  # once, since it takes a millisecond
        self._going_on = self._model  # after the prompt
        rows = {"logits_to_keep": 1} if supports_logits_to_keep(model) else {}
        self._inputs = {**rows, **(inputs or {}), "use_cache": True}
        self._recorded = 0
        self._prefilled = 0
        self._parents = list[int]()
        self._hidden_layers = tuple(hidden_layers)
        self.hidden: Tensor | None = None
        self.cache = cache
        self.forwards = 0
        self.limit = context_window(model)
        self.device = device_of(model)
        self.vocabulary = vocabulary_size(model)

    @property
    def length(self) -> int:
        return self._held

    @property
    def _held(self) -> int:
        return int(self.cache.get_seq_length())

    @property
    def branched(self) -> int:
        return len(self._parents)

    @property
    def server(self) -> "CachedModel":
        return self

    def leave(self, *, keep: bool = False) -> None:
        """Does nothing, since it serves one sequence."""

    def groups(self, asks: Sequence[ForwardRequest]) -> list[list[ForwardRequest]]:
        return [[ask] for ask in asks]

    def serve(self, asks: Sequence[ForwardRequest]) -> list[Answer]:
        (ask,) = asks
        with timed() as took:
            logits = self._answered(ask)
            wait_for(logits)
        hidden = None if self.hidden is None else self.hidden[-len(ask.ids) :]
        return [Answer(logits, hidden, Cost(len(ask.ids), took.seconds))]

    def _answered(self, ask: ForwardRequest) -> Tensor:
        if self._prompt is not None:
            prompt, self._prompt = self._prompt, None
            return self.prefill(*prompt)
        ids = torch.tensor([list(ask.ids)], dtype=torch.int64, device=self.device)
        if not ask.parents:
            return self.forward(ids, ask.rows)
        lead = len(ask.ids) - len(ask.parents)
        self._lead = self._lead or lead
        nodes = [parent + lead if parent >= 0 else (lead - 1 if lead else parent) for parent in ask.parents]
        return self.branch(ids, [*range(-1, lead - 1), *nodes])[-ask.rows :]

    @torch.no_grad()
    def prefill(self, ids: Tensor, config: Any) -> Tensor:
        """Forward a prompt, `ids`, (1, length), int64, as transformers does (in chunks, after a filled cache).

        Returns the logits of its last position, (1, vocabulary). `config`: the generation's.
        """
        held = self._held
        inputs = {**self._inputs, CACHE: self.cache}
        with self._isolated():
            outputs = self._model._prefill(ids, config, inputs)
        self._adopt(outputs)
        record_past(self.cache)
        self._prefilled = self._recorded = self._held
        self.forwards += ceil((self._held - held) / (config.prefill_chunk_size or self._held))
        logits: Tensor = outputs.logits[0, -1:]
        return logits

    def forward(self, ids: Tensor, rows: int) -> Tensor:
        """Forward new `ids`, (1, new), int64, after the cache. Returns the last rows' logits, (rows, vocabulary)."""
        return self._forward(self._prepared(ids), rows)

    def branch(self, ids: Tensor, parents: Sequence[int]) -> Tensor:
        """Forward nodes of a tree, `ids`, (1, new), int64. `parents`: as in a request. Returns logits, (new, vocabulary)."""
        inputs = self._prepared(ids)
        held, earlier, new = self.length - len(self._parents), len(self._parents), len(parents)
        self._parents += parents
        if self._parents == list(range(-1, earlier + new - 1)):
            return self._forward(inputs, new)  # a chain needs no mask
        tree = NewIds(held + earlier, held, [0] * new, grown([], self._parents))
        like = torch.empty(0, dtype=self._model.dtype, device=self.device)
        seen = model_inputs([tree], new, held + earlier + new, self._windows, like)
        given = inputs.get("position_ids")  # which begin after padding, and have several kinds with multimodal models
        inputs["position_ids"] = (
            seen["positions"] if given is None else given[..., :1] + (seen["positions"][0] - held - earlier)
        )
        inputs["attention_mask"] = self._of_layers(seen, new, inputs.get("attention_mask"))
        return self._forward(inputs, new)

    def keep(self, path: Sequence[int]) -> None:
        path = [*range(self._lead), *(node + self._lead for node in path)]
        size = len(self._parents)
        self._parents, self._lead = [], 0
        if path != list(range(len(path))):
            kept = torch.tensor(path, dtype=torch.int64, device=self.device)
            for layer in layers_of(self.cache):
                for states in (layer.keys, layer.values) if layer.is_initialized else ():
                    nodes = states[..., -size:, :]  # (1, heads, nodes, size)
                    nodes[..., : len(path), :] = nodes[..., kept.to(nodes.device), :]
        self._crop(size - len(path))

    def _prepared(self, ids: Tensor) -> dict[str, Any]:
        """The model's inputs for new ids, (1, new), after the cache, as transformers' own generation has them."""
        new = ids.shape[1]
        if self._held > self._recorded and not hasattr(self.cache, "is_croppable") and self._has_slid():
            self._crop(0)  # transformers 5.16's sliding layers take one forward pass per crop
        beyond = self._held + new - self._prefilled
        inputs = self._model._update_model_kwargs_for_generation({}, dict(self._inputs), num_new_tokens=beyond)
        prepared: dict[str, Any] = self._model.prepare_inputs_for_generation(
            ids, next_sequence_length=new, is_first_iteration=False, **{CACHE: self.cache}, **inputs
        )
        return prepared

    @torch.no_grad()
    def _forward(self, inputs: dict[str, Any], rows: int) -> Tensor:
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = rows
        if self._hidden_layers:
            inputs["output_hidden_states"] = True
        with self._isolated():
            outputs = self._going_on(**inputs, return_dict=True)
        self._adopt(outputs)
        self.hidden = stacked(outputs, self._hidden_layers)[0] if self._hidden_layers else None
        self.forwards += 1
        logits: Tensor = outputs.logits[0, -rows:]
        return logits

    def _adopt(self, outputs: Any) -> None:
        """Go on with the cache that the model filled: Phi-3 starts one of its own if a sequence crosses longrope's boundary."""
        filled = getattr(outputs, CACHE, None)
        if filled is not None and filled is not self.cache:
            self.cache = filled
            record_past(filled)

    @cached_property
    def _windows(self) -> dict[str, int | None]:
        """The model's own, by kinds of layers: a cache that a caller made may keep more."""
        return dict(zip(layer_kinds(self._model), layer_windows(new_cache(self._model)), strict=False))

    def _of_layers(self, masks: dict[str, Tensor], new: int, padding: Tensor | None) -> Any:
        """What nodes see, (1, 1, new, keys), of the positions that each kind of layer keeps: one mask, or one for each kind.

        `masks`: what they see of all positions. `padding`: the attention mask, (1, positions).
        """
        if padding is not None and not bool(padding.all()):
            for kind in self._windows:
                hidden = padding[0, : masks[kind].shape[-1]] == 0
                masks[kind][..., : len(hidden)].masked_fill_(hidden, torch.finfo(masks[kind].dtype).min)
        found = {}
        for kind, layer in dict(zip(layer_kinds(self._model), layers_of(self.cache), strict=False)).items():
            size, first = layer.get_mask_sizes(new)
            found[kind] = masks[kind][..., first : first + size]
        return found if len(found) > 1 else found.popitem()[1]

    def roll_back(self, length: int) -> bool:
        if length < self._recorded and self._has_slid():
            return False
        self._parents, self._lead = [], 0
        self._crop(self.length - length)
        return True

    def _crop(self, excess: int) -> None:
        if self.length:
            self.cache.crop(-excess)
        self._recorded = self.length

    def stop_recording(self) -> None:
        """Put the cache into the state in which transformers leaves it, since the caller may get it back."""
        for layer in layers_of(self.cache):
            if hasattr(layer, "record_past"):
                layer.record_past = False

    def settle(self) -> None:
        """Let the cache hold all positions that are kept."""

    def start_anew(self) -> None:
        self.cache = new_cache(self._model)
        self._parents, self._lead = [], 0
        self._recorded = 0

    def _has_slid(self) -> bool:
        """Whether some layer's window has dropped positions that a further roll-back would need."""
        layers = (layer for layer in layers_of(self.cache) if getattr(layer, "is_sliding", False))
        return any(layer.get_seq_length() >= layer.sliding_window for layer in layers)
