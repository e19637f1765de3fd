"""Heads that guess one id after another: a decoder layer on the target's hidden states and the ids that it picked (EAGLE)."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, LogitsProcessorList, MistralConfig, MistralModel, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.mistral.modeling_mistral import MistralRMSNorm

from xtok.align.tokenbytes import TokenBytes
from xtok.drafts.acceptance import DrawableDrafter
from xtok.drafts.base import Context
from xtok.drafts.growth import SHARPNESS, IdPath, check_numbers, child, likeliest, next_ids
from xtok.drafts.meter import Meter
from xtok.drafts.policy.settings import Budget
from xtok.models.cache import CACHE, device_of, ids_read, output_embeddings, vocabulary_size
from xtok.models.forwards import Answer, ForwardRequest, Slot, Steps
from xtok.models.packed import PackedLinear
from xtok.sampling.draws import Distribution

HEAD_DIM = 64
"""The size of an attention head."""


class StateHeads(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call, unused-ignore]
    """The base of sequential heads. They read pairs of a hidden state of the target and the id that was picked from it. After
    each pair they give logits for the next id, and a state that stands in for the target's hidden state while that id is only
    guessed.

    `ids`: the target's ids for which there are logits, (ids,), int64. `window`: how many of the latest positions they see.
    """

    _supports_sdpa = True
    ids: Tensor
    window: int
    model: Any

    def fused(self, hidden: Tensor) -> Tensor:
        """Fuse the target's hidden states of several layers, (…, layers, hidden size), into one state each, (…, size)."""
        raise NotImplementedError

    def pairs(self, ids: Tensor, states: Tensor) -> Tensor:
        """The layer's input for pairs of `ids`, (rows, new), and `states`, (rows, new, size)."""
        raise NotImplementedError

    def logits_after(self, states: Tensor) -> Tensor:
        """Logits of `ids` by states after pairs, (…, ids)."""
        raise NotImplementedError

    def step(self, ids: Tensor, states: Tensor, **inputs: Any) -> tuple[Tensor, Any]:
        """The states after pairs, (rows, new, size), and the KV cache. `inputs`: the layer's other inputs."""
        output = self.model(inputs_embeds=self.pairs(ids, states), **inputs)
        return output.last_hidden_state, getattr(output, CACHE, None)

    def forward(
        self, input_ids: Tensor, states: Tensor | None = None, *, logits_to_keep: int = 0, **inputs: Any
    ) -> CausalLMOutputWithPast:
        """The forward pass of a causal LM, with the states as its `hidden_states`. `states`: zeros if left out."""
        for name in ("output_hidden_states", "return_dict"):
            inputs.pop(name, None)
        if states is None:
            size = (*input_ids.shape, self.config.hidden_size)
            states = torch.zeros(size, dtype=self.dtype, device=input_ids.device)
        found, cache = self.step(input_ids, states, **inputs)
        logits = self.logits_after(found[:, -logits_to_keep:] if logits_to_keep else found)
        return CausalLMOutputWithPast(logits=logits, hidden_states=(found,), **{CACHE: cache})


class SequentialHeads(StateHeads):  # type: ignore[no-untyped-call, unused-ignore]
    """A decoder layer on the target's hidden states (as in EAGLE, Li et al. 2024, arXiv 2401.15077, and EAGLE-3, 2025, arXiv
    2503.01840), as xtok trains it.

    Hidden states of several layers are fused into one. Input embeddings are the target's. Logits are made by the rows of its
    output embedding for `ids`, the ids that it writes most. The heads see a window of positions, as many as in training.

    `scales`, (layers,): factors that bring the hidden states of all layers to about the same size.
    """

    config_class = MistralConfig

    def __init__(self, config: MistralConfig, layers: int, embedding: nn.Module, output: nn.Module, ids: Tensor) -> None:
        """`layers`: how many layers' hidden states are read. `embedding`, `output`: the target's input and output embeddings.
        `ids`: (ids,), int64.
        """
        super().__init__(config)
        size, hidden = config.hidden_size, int(output.in_features)  # type: ignore[arg-type]
        self.fuse = nn.Linear(layers * hidden, size, bias=False)
        self.norm_id, self.norm_state = MistralRMSNorm(hidden), MistralRMSNorm(size)
        self.mix = nn.Linear(hidden + size, size, bias=False)
        self.model = MistralModel(config)
        self.model.embed_tokens = nn.Identity()
        self.out = nn.Linear(size, hidden, bias=False)
        self._targets = (embedding, output)  # in a tuple: these aren't its modules
        self.rows = _rows(output, ids)
        self.scales = nn.Buffer(torch.ones(layers, dtype=torch.float32, device="cpu"))
        self.ids, self.window = ids, int(config.sliding_window or 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SequentialHeads":
        """A copy that shares the target's embeddings."""
        made = type(self).__new__(type(self))
        memo |= {id(self): made, **{id(part): part for part in self._targets}}
        vars(made).update(deepcopy(vars(self), memo))
        return made

    def get_input_embeddings(self) -> nn.Module:
        return self._targets[0]

    def get_output_embeddings(self) -> None:
        return None

    def fused(self, hidden: Tensor) -> Tensor:
        return self.fuse((hidden.to(self.fuse.weight) * self.scales[:, None]).flatten(-2))  # type: ignore[no-any-return]

    def pairs(self, ids: Tensor, states: Tensor) -> Tensor:
        embedded = self._targets[0](ids).detach().to(states.dtype)  # the target is frozen
        return self.mix(torch.cat([self.norm_id(embedded), self.norm_state(states)], dim=-1))  # type: ignore[no-any-return]

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Logits of `ids`, (…, ids), from last hidden states of the target, as `self.out` predicts them."""
        if self.rows is None:
            logits: Tensor = self._targets[1](hidden)
            return logits[..., self.ids.to(logits.device)]
        if self.rows.weight.dtype == hidden.dtype:
            return self.rows(hidden)  # type: ignore[no-any-return]
        return nn.functional.linear(hidden, *(one.to(hidden.dtype) for one in self.rows.buffers()))  # in training

    def logits_after(self, states: Tensor) -> Tensor:
        return self.logits_of(self.out(states))


def _rows(output: Any, ids: Tensor) -> nn.Linear | None:
    """The rows of an output embedding for some ids, as a layer, in buffers that files of heads don't hold; None if the
    embedding is quantised or offloaded.
    """
    if type(output) is not nn.Linear and not isinstance(output, PackedLinear):
        return None
    weight, bias = output.weight, output.bias
    if not weight.is_floating_point() or weight.is_meta:
        return None
    made = nn.Linear(weight.shape[1], len(ids), bias=bias is not None, device="meta")
    for name, part in (("weight", weight), ("bias", bias)):
        if part is not None:
            delattr(made, name)
            made.register_buffer(name, part.detach()[ids.to(part.device)].clone(), persistent=False)
    return made


def sequential_config(ids: int, size: int, inner: int, heads: int, groups: int, window: int) -> MistralConfig:
    """The configuration of the layer. `ids`: how many ids have logits. `size`: the hidden size. `inner`: the MLP's size.
    `heads`, `groups`: how many attention heads and key-value heads there are. `window`: how many positions the layer sees.
    """
    return MistralConfig(
        vocab_size=ids,
        hidden_size=size,
        intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=HEAD_DIM,
        sliding_window=window,
        max_position_embeddings=2**20,
        bos_token_id=None,
        eos_token_id=None,
    )


def load_sequential(tensors: Mapping[str, Tensor], layers: int, window: int, model: PreTrainedModel) -> SequentialHeads:
    """Heads of these `tensors` for a target, on its device and in its dtype."""
    size, inner = tensors["fuse.weight"].shape[0], tensors["model.layers.0.mlp.gate_proj.weight"].shape[0]
    heads, groups = (tensors[f"model.layers.0.self_attn.{name}_proj.weight"].shape[0] // HEAD_DIM for name in "qk")
    own = {name: tensor for name, tensor in tensors.items() if name != "ids"}
    config = sequential_config(len(tensors["ids"]), size, inner, heads, groups, window)
    ids = checked_ids(tensors["ids"], model)
    shared = model.get_input_embeddings(), output_embeddings(model)
    return built(lambda: SequentialHeads(config, layers, *shared, ids), own, model)


Made = TypeVar("Made", bound=StateHeads)


def built(make: Callable[[], Made], tensors: Mapping[str, Tensor], model: PreTrainedModel) -> Made:
    """The module that `make` makes, with these tensors, on the device and in the dtype of a target. Raises `ValueError` if the
    tensors have other names or shapes, before it allocates memory.
    """
    with torch.device("meta"):  # draws nothing from the caller's generator
        made: Any = make()
    expected = {name: one.shape for name, one in made.state_dict().items()}
    found = {name: one.shape for name, one in tensors.items()}
    if wrong := sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)):
        shapes = (tuple(one[wrong[0]]) if wrong[0] in one else None for one in (found, expected))
        raise ValueError("{} has shape {}, and should have {}".format(wrong[0], *shapes))
    device = device_of(model)
    made.load_state_dict({name: one.to(device, model.dtype) for name, one in tensors.items()}, assign=True)
    made.model.rotary_emb = type(made.model.rotary_emb)(made.config).to(device)  # its buffers aren't among the tensors
    return made.eval()  # type: ignore[no-any-return]


def checked_ids(ids: Tensor, model: PreTrainedModel) -> Tensor:
    """`ids` as int64. Raises `ValueError` unless they are distinct ids that the target reads and has logits for."""
    size = min(vocabulary_size(model), ids_read(model))
    if ids.dim() != 1 or ids.is_floating_point() or not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= size:
        raise ValueError(f"its ids aren't all from 0 to {size - 1:,}")
    if len(set(ids.tolist())) < len(ids):
        raise ValueError("some of its ids occur twice")
    return ids.long()


@dataclass(eq=False, repr=False)
class SequentialDrafter(DrawableDrafter):
    """The drafter of sequential heads for one sequence. `slot`: its cache slot in the heads. `columns`: the indices, among the
    layers that drafters are shown, of those to read. `keys`: the noise keys of the target's ids.

    The slot holds the pairs of the ids from `_start` on, and those of a tree's nodes while it grows. `_hidden`: the hidden
    states of the `_waiting` pairs after those, which are yet to be read, in parts, (pairs, layers, hidden size) each.
    `_states`: after the last pair, and after each node.
    """

    heads: StateHeads
    slot: Slot
    columns: tuple[int, ...]
    keys: Tensor
    view: TokenBytes
    meter: Meter
    warpers: LogitsProcessorList
    _start: int = 0
    _hidden: list[Tensor] = field(default_factory=list)
    _waiting: int = 0
    _states: list[Tensor] = field(default_factory=list)

    def take_hidden(self, start: int, hidden: Tensor) -> None:
        """Keep the hidden states, (picks, layers, hidden size), from which the ids from `start` on were picked.

        This does as little as it can, for it is called in each round, even if the heads are seldom asked. Parts farther back
        than the window are dropped.
        """
        if (excess := len(hidden) - self.heads.window) > 0:
            start, hidden = start + excess, hidden[excess:].clone()
        self.slot.roll_back(self.slot.length)  # ends the tree
        known = start - self._start
        if not 0 <= known <= self.slot.length + self._waiting:
            self._restart(start)
            known = 0
        if known < self.slot.length:
            self.slot.roll_back(known)
        unread = known - self.slot.length
        while self._waiting > unread:  # states of ids that weren't picked after all
            last = self._hidden.pop()
            self._waiting -= len(last)
            if self._waiting < unread:
                self._hidden.append(last[: unread - self._waiting])
                self._waiting = unread
        self._hidden.append(hidden)
        self._waiting += len(hidden)
        while self._waiting - len(self._hidden[0]) >= self.heads.window:
            self._start += self.slot.length + len(self._hidden[0])
            self._waiting -= len(self._hidden.pop(0))
            self.slot.start_anew()

    def _restart(self, start: int, hidden: Sequence[Tensor] = ()) -> None:
        """Forget what was read, and start with the `hidden` states, in parts, of the ids from `start` on."""
        self.slot.start_anew()
        self._start, self._hidden, self._waiting = start, list(hidden), sum(map(len, hidden))

    def begin(self, context: Context, budget: Budget) -> tuple[IdPath, Budget] | None:
        """None also while no hidden state is known."""
        if (excess := self._waiting - self.heads.window) > 0:
            self._restart(self._start + self.slot.length + excess, [torch.cat(self._hidden)[excess:]])
        if not self._waiting or len(context.ids) - self._start - self.slot.length != self._waiting or not budget.longest:
            return None
        return IdPath(1.0, -1, b""), replace(budget, depth=min(budget.depth, budget.longest))

    def _read_pairs(self, ids: Sequence[int]) -> Steps[Tensor]:
        """Read the waiting pairs, whose ids are given. Returns the logits after the last, (1, ids)."""
        states = self.heads.fused(torch.cat(self._hidden)[:, list(self.columns)])
        size = self.slot.chunk or len(ids)
        for at in range(0, len(ids), size):
            some = slice(at, at + size)
            answer = yield from self._forward(ForwardRequest(self.slot, list(ids[some]), 1, (), states[some]))
        assert answer.hidden is not None
        self._states, self._hidden, self._waiting = [answer.hidden[-1, 0]], [], 0
        return answer.logits

    def _forward(self, ask: ForwardRequest) -> Steps[Answer]:
        with self.meter.away():
            answer: Answer = yield ask
        self.meter.drafts(answer.cost)
        return answer

    def read(self, context: Context, front: Sequence[IdPath]) -> Steps[Tensor]:
        """The logits after each guess, (guesses, ids). A guess's `parent` becomes its own node."""
        if not front[0].ids:
            return (yield from self._read_pairs(context.ids[self._start + self.slot.length :]))
        parents = [guess.parent for guess in front]
        for node, guess in enumerate(front, start=self.slot.branched):
            guess.parent = node
        states = torch.stack([self._states[parent + 1] for parent in parents])
        answer = yield from self._forward(
            ForwardRequest(self.slot, [guess.ids[-1] for guess in front], len(front), parents, states)
        )
        assert answer.hidden is not None
        self._states += answer.hidden[:, 0]
        return answer.logits

    def expanded(self, context: Context, front: list[IdPath], budget: Budget) -> Steps[list[list[IdPath]]]:
        logits = yield from self.read(context, front)
        ids, probabilities = self._likeliest(logits if context.noise is not None else logits * SHARPNESS)
        found = yield from next_ids(self.meter, context, front, ids, probabilities, self.keys, self.view)
        return [children[:1] for children in found] if budget.width == 1 else found

    def _likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """As `growth.likeliest`, in the target's ids: (rows, ids) each."""
        own, probabilities = likeliest(logits.to(self.keys.device), self.warpers)
        table = self.heads.ids.to(self.keys.device)
        return table.expand(len(logits), -1) if own is None else table[own], probabilities

    def distribution(self, logits: Tensor) -> Distribution:
        ids, probabilities = self._likeliest(logits)
        check_numbers(logits, probabilities[:, :1].tolist())
        found, kept = probabilities[0].double(), probabilities[0] > 0
        return Distribution(ids[0][kept], found[kept] / found.sum())

    def child(self, context: Context, guess: IdPath, token: int, probability: float) -> IdPath:
        return child(context, self.view, guess, probability, token)
