"""One model with its KV cache. Target and draft are both held by it."""

import inspect
import sys
from collections.abc import Sequence
from functools import cached_property
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from xtok.models.forwards import Answer, Ask, Slot, wait_for
from xtok.models.rope import turns
from xtok.models.timing import Cost, timed

CACHE_NAMES = ("cache", "past_key_values")
CACHE = CACHE_NAMES["cache" not in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters]
"""The argument, and the output, that holds a model's cache: `cache` from transformers 5.24 on, `past_key_values` before."""


def new_cache(model: PreTrainedModel) -> Cache:
    """An empty KV cache for `model`, ready to be rolled back."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    record_past(cache)
    return cache


def layers_of(cache: Cache) -> list[Any]:
    """A cache's layers. What they have besides the methods that all have differs from kind to kind."""
    return list(cache.layers)


def record_past(cache: Cache) -> None:
    """Let layers with a window remember what a roll-back may need. Recurrent ones would remember too little."""
    for layer in layers_of(cache):
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.activate_past_recording()  # type: ignore[no-untyped-call, unused-ignore]


def windows(cache: Cache) -> list[int | None]:
    """For each layer, of how many positions it keeps what is needed; None for all."""
    return [layer.sliding_window if getattr(layer, "is_sliding", False) else None for layer in layers_of(cache)]


def device_of(model: PreTrainedModel) -> torch.device:
    """Where `model` takes its ids. One whose weights lie elsewhere or in several places says so by the hooks of accelerate."""
    modules = model.modules() if hasattr(model, "_hf_hook") else ()
    devices = (getattr(getattr(module, "_hf_hook", None), "execution_device", None) for module in modules)
    return torch.device(next((device for device in devices if device is not None), model.device))


def context_window(model: PreTrainedModel) -> int | None:
    """How many positions `model` was made for; None where its configuration doesn't say."""
    config = model.config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
    return next((int(size) for name in names if (size := getattr(config, name, None))), None)


def positions(model: PreTrainedModel, slot: Slot) -> int | None:
    """How many positions a text may have: those that `model` was made for, and that its slot has room for; None for any."""
    return min((size for size in (context_window(model), slot.most) if size), default=None)


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many ids `model` has logits for, those without a token included."""
    head = output_embeddings(model)  # a quantised one's weights have shapes of their own
    return int(getattr(head, "out_features", None) or model.config.get_text_config(decoder=True).vocab_size)


def weights(model: PreTrainedModel) -> int:
    """How many weights `model` has, 1 at least."""
    return max(1, sum(weight.numel() for weight in model.parameters()))


def output_embeddings(model: Any) -> Any:
    """What makes logits of a model's last hidden states; None where it has no such module."""
    return model.get_output_embeddings()


def keeps_rows(model: Any) -> bool:
    """Whether `model` can leave out the logits of all but the last positions."""
    return bool(model._supports_logits_to_keep())


def ids_read(model: PreTrainedModel) -> int:
    """How many ids `model` can read, those without a token included."""
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    return int(rows or model.config.get_text_config(decoder=True).vocab_size)


class CachedModel:
    """A causal LM and its KV cache.

    Law: after each call but `branch` the cache holds exactly the positions of `ids[:length]`, where `ids` is what was forwarded
    and kept. The nodes of a tree stand behind those until `keep` or `roll_back` ends it.
    `inputs` are further inputs of the model for the prompt (attention mask, positions); they are continued for new positions as
    transformers' own generation continues them.
    `hidden`, with `shows_hidden`: the last hidden states, (rows, hidden size), of the rows that the latest `forward` or
    `branch` gave logits of.
    `prompt`: ids, (1, length), int64, padding included, and the configuration that the first of all forwards is to be the
    prefill of.
    As a `Slot` it has a forward of its own.
    """

    shares = False
    chunk: int | None = None
    most: int | None = None
    fixed = False
    tolerance = 0.0

    def __init__(
        self,
        model: PreTrainedModel,
        cache: Cache,
        inputs: dict[str, Any] | None = None,
        *,
        shows_hidden: bool = False,
        prompt: tuple[Tensor, Any] | None = None,
    ) -> None:
        self._prompt = prompt
        self._lead = 0
        self._model: Any = model
        self._turn = turns(model)
        rows = {"logits_to_keep": 1} if keeps_rows(model) else {}
        self._inputs = {**rows, **(inputs or {}), "use_cache": True}
        self._recorded = 0
        self._prefilled = 0
        self._nodes = Nodes()
        self._shows_hidden = shows_hidden
        self.hidden: Tensor | None = None
        self.cache = cache
        self.forwards = 0
        self.device = device_of(model)
        self.vocabulary = vocabulary_size(model)

    @property
    def length(self) -> int:
        """How many positions are kept."""
        return self._held

    @property
    def _held(self) -> int:
        """How many positions the cache holds."""
        return int(self.cache.get_seq_length())

    @property
    def branched(self) -> int:
        """How many nodes of a tree stand behind what is kept."""
        return len(self._nodes)

    @property
    def server(self) -> "CachedModel":
        """Itself: it is forwarded alone."""
        return self

    def takes(self, new: int, prompt: int) -> int:
        """All."""
        return new

    def guesses(self, new: int) -> int:
        """As many as there are."""
        return sys.maxsize

    def groups(self, asks: Sequence[Ask]) -> list[list[Ask]]:
        """Each ask alone."""
        return [[ask] for ask in asks]

    def serve(self, asks: Sequence[Ask]) -> list[Answer]:
        """The answer to one ask."""
        (ask,) = asks
        with timed() as took:
            logits = self._answered(ask)
            wait_for(logits)
        return [Answer(logits, self.hidden, Cost(len(ask.ids), took.seconds))]

    def _answered(self, ask: Ask) -> Tensor:
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

    def leave(self) -> None:
        """Nothing: it serves one text."""

    @torch.no_grad()
    def prefill(self, ids: Tensor, config: Any) -> Tensor:
        """Forward a prompt, `ids`, (1, length), int64, as transformers does (in chunks, behind a filled cache).

        Returns the logits of its last position, (1, vocabulary). `config`: the generation's.
        """
        held = self._held
        inputs = {**self._inputs, CACHE: self.cache}
        with self._turn():
            outputs = self._model._prefill(ids, config, inputs)
        self._adopt(outputs)
        record_past(self.cache)
        self._prefilled = self._recorded = self._held
        self.forwards += ceil((self._held - held) / (config.prefill_chunk_size or self._held))
        return self._last(outputs.logits, 1)

    def forward(self, ids: Tensor, rows: int) -> Tensor:
        """Forward new `ids`, (1, new), int64, behind the cache. Returns the last rows' logits, (rows, vocabulary)."""
        return self._forward(self._prepared(ids), rows)

    def branch(self, ids: Tensor, parents: Sequence[int]) -> Tensor:
        """Forward nodes of a tree, `ids`, (1, new), int64, behind the cache. Returns their logits, (new, vocabulary).

        A parent is the index of an earlier node, those of earlier calls counted, or -1 for all that the cache held before the
        tree, or -2 for that less its last position (where a window has slid, one less at its other end, too). A node sees its
        ancestors alone, and its position is its depth.
        """
        inputs = self._prepared(ids)
        held = self.length - len(self._nodes)
        new = slice(len(self._nodes), len(self._nodes) + len(parents))
        self._nodes.add(parents)
        if self._nodes.is_chain:
            return self._forward(inputs, len(parents))  # it needs no mask
        first = inputs["position_ids"][0, 0] - new.start if inputs.get("position_ids") is not None else held
        inputs["position_ids"] = (first + torch.from_numpy(self._nodes.depths[new]).to(ids.device))[None]
        inputs["attention_mask"] = self._tree_masks(held, new, inputs.get("attention_mask"))
        return self._forward(inputs, len(parents))

    def keep(self, path: Sequence[int]) -> None:
        """End a tree: keep the nodes of `path`, each the parent of the next and the first a child of -1. Drop the others."""
        path = [*range(self._lead), *(node + self._lead for node in path)]
        size = len(self._nodes)
        self._nodes, self._lead = Nodes(), 0
        if list(path) != list(range(len(path))):
            kept = torch.tensor(path, dtype=torch.int64, device=self.device)
            for layer in layers_of(self.cache):
                if layer.is_initialized:
                    _move_to_front(layer.keys[..., -size:, :], kept.to(layer.keys.device))
                    _move_to_front(layer.values[..., -size:, :], kept.to(layer.values.device))
        self._crop(size - len(path))

    def _prepared(self, ids: Tensor) -> dict[str, Any]:
        """The model's inputs for new ids, (1, new), behind the cache, as transformers' own generation has them."""
        new = ids.shape[1]
        if self._held > self._recorded and not hasattr(self.cache, "is_croppable") and self._has_slid():
            self._crop(0)  # transformers 5.16's sliding layers take one forward per crop
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
        if self._shows_hidden:
            inputs["output_hidden_states"] = True
        with self._turn():
            outputs = self._model(**inputs, return_dict=True)
        self._adopt(outputs)
        self.hidden = outputs.hidden_states[-1][0, -rows:] if self._shows_hidden else None
        self.forwards += 1
        return self._last(outputs.logits, rows)

    def _adopt(self, outputs: Any) -> None:
        """Go on with the cache that the model filled: Phi-3 begins one of its own where a text crosses longrope's boundary."""
        filled = getattr(outputs, CACHE, None)
        if filled is not None and filled is not self.cache:
            self.cache = filled
            record_past(filled)

    def _tree_masks(self, held: int, new: slice, padding: Tensor | None) -> Any:
        """What each new node sees, (1, 1, new, keys), additive: one mask, or one for each kind of layer that a model names.

        `held`: how many positions the tree stands behind. `padding`: the attention mask, (1, positions).
        """
        kinds = getattr(self._model.config.get_text_config(decoder=True), "layer_types", None) or [""]
        layers = dict(zip(kinds, zip(self.cache.layers, self._windows, strict=False), strict=False))
        padded = None if padding is None or bool(padding.all()) else padding[0].cpu().numpy() == 0
        masks = {kind: self._tree_mask(layer, window, held, new, padded) for kind, (layer, window) in layers.items()}
        return masks if len(masks) > 1 else masks.popitem()[1]

    @cached_property
    def _windows(self) -> list[int | None]:
        """The model's own: a cache that a caller made may keep more."""
        return windows(new_cache(self._model))

    def _tree_mask(self, layer: Any, window: int | None, held: int, new: slice, padded: Any) -> Tensor:
        """One such mask, (1, 1, new, keys), in the model's dtype. `padded`: (positions,), bool, or None."""
        size, first = layer.get_mask_sizes(new.stop - new.start)
        trunk, nodes = slice(0, max(0, held - first)), self._nodes
        visible = np.ones((new.stop - new.start, size), dtype=bool)
        visible[:, trunk.stop :] = nodes.ancestors[new, max(0, first - held) : new.stop]
        visible[nodes.shortened[new], trunk.stop - 1 : trunk.stop] = False
        if padded is not None:
            visible[:, trunk] &= ~padded[first : first + trunk.stop]
        if window is not None:
            positions = np.concatenate([np.arange(-trunk.stop, 0), nodes.depths[max(0, first - held) :]])
            visible &= positions > nodes.depths[new, None] - window
        mask = torch.zeros(visible.shape, dtype=self._model.dtype, device="cpu")
        return mask.masked_fill_(torch.from_numpy(~visible), torch.finfo(mask.dtype).min)[None, None].to(self.device)

    def roll_back(self, length: int) -> bool:
        """Take the newest positions back until `length` are left. False, and nothing done, where the cache forgot too much."""
        if length < self._recorded and self._has_slid():
            return False
        self._nodes, self._lead = Nodes(), 0
        self._crop(self.length - length)
        return True

    def _crop(self, excess: int) -> None:
        if self.length:
            self.cache.crop(-excess)
        self._recorded = self.length

    def stop_recording(self) -> None:
        """Leave the cache as transformers leaves it, for it may be handed back."""
        for layer in layers_of(self.cache):
            if hasattr(layer, "record_past"):
                layer.record_past = False

    def settle(self) -> None:
        """Let the cache hold all positions that are kept."""

    def start_anew(self) -> None:
        """Forget everything."""
        self.cache = new_cache(self._model)
        self._nodes, self._lead = Nodes(), 0
        self._recorded = 0

    def _has_slid(self) -> bool:
        """Whether some layer's window has moved past positions that a deeper roll-back would need again."""
        layers = (layer for layer in layers_of(self.cache) if getattr(layer, "is_sliding", False))
        return any(layer.get_seq_length() >= layer.sliding_window for layer in layers)

    @staticmethod
    def _last(logits: Tensor, rows: int) -> Tensor:
        """(1, positions, vocabulary) → (rows, vocabulary)."""
        return logits[0, -rows:]


class Nodes:
    """The nodes of a tree behind a cache.

    `depths`: (nodes,), int64, 0 for children of the whole context. `shortened`: (nodes,), bool, whether a node doesn't see the
    context's last position. `ancestors`: (nodes, nodes), bool, whether the column's node is on the row's path, itself included.
    """

    def __init__(self) -> None:
        self.depths = np.zeros(0, dtype=np.int64)
        self.shortened = np.zeros(0, dtype=bool)
        self.ancestors = np.zeros((0, 0), dtype=bool)
        self.is_chain = True

    def __len__(self) -> int:
        return len(self.depths)

    def add(self, parents: Sequence[int]) -> None:
        """Add a node per parent, each an earlier node or -1 or -2."""
        before, more = len(self), len(parents)
        self.is_chain = self.is_chain and list(parents) == list(range(before - 1, before + more - 1))
        self.depths = np.concatenate([self.depths, np.zeros(more, dtype=np.int64)])
        self.shortened = np.concatenate([self.shortened, np.zeros(more, dtype=bool)])
        grown = np.zeros((before + more, before + more), dtype=bool)
        grown[:before, :before] = self.ancestors
        self.ancestors = grown
        for node, parent in enumerate(parents, start=before):
            if parent >= 0:
                self.ancestors[node] = self.ancestors[parent]
            self.ancestors[node, node] = True
            self.depths[node] = self.depths[parent] + 1 if parent >= 0 else parent + 1
            self.shortened[node] = self.shortened[parent] if parent >= 0 else parent == -2


def _move_to_front(states: Tensor, kept: Tensor) -> None:
    """Move some positions of a layer's keys or values, (1, heads, positions, size), to the front, in place.

    `kept`: those positions, (kept,), int64.
    """
    states[..., : len(kept), :] = states[..., kept, :]
