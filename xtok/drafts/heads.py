"""Heads on the target itself, which guess its next tokens from its hidden states: sequential ones (EAGLE), or Medusa's."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from xtok.align.tokenbytes import TokenBytes
from xtok.drafts.acceptance import DrawnChains
from xtok.drafts.base import Drafter, Request, check_request
from xtok.drafts.eagle3 import check_eagle3, layers_of_eagle3, load_eagle3, read_eagle3
from xtok.drafts.medusa import MedusaDrafter, MedusaHeads
from xtok.drafts.sequential import SequentialDrafter, SequentialHeads, StateHeads, load_sequential
from xtok.errors import InvalidInputError, reason, shown
from xtok.models.cache import device_of, new_cache, output_embeddings
from xtok.models.modes import Modes, within
from xtok.models.recurrent import cached_model
from xtok.models.runner import Verdicts

LAST = -1
"""The layer whose hidden states make logits."""


@dataclass(frozen=True)
class HeadsInfo:
    """The target that heads were trained for, and their accuracy. `vocabulary`: a digest of the bytes of its ids. `weights`: a
    few values of its input embedding; none if those aren't known. `accuracy`, (steps, ranks): how often the most likely id, the
    second, … was right at each step. `layers`: after which of the target's layers they read hidden states. `window`: how many
    positions sequential heads see; None for Medusa's.
    """

    hidden_size: int
    vocabulary: str
    weights: tuple[float, ...] = ()
    accuracy: tuple[tuple[float, ...], ...] = ()
    layers: tuple[int, ...] = (LAST,)
    window: int | None = None


class HeadsDrafter:
    """Guesses by heads that `xtok train-heads` trained for the target, or by published EAGLE-3 heads. One object may serve
    several instances and threads.
    """

    @within(Modes())
    def __init__(self, file: str | PathLike[str]) -> None:
        """`file`: what `xtok train-heads` wrote, or a folder with EAGLE-3 heads in the format of speculators. Raises
        `InvalidInputError` if it holds neither.
        """
        self._made, self._eagle3 = Verdicts(self._for), None
        try:
            self.file = Path(file)
        except TypeError as error:
            raise InvalidInputError(f"The file of heads is {file!r}; give its path.") from error
        try:
            if (self.file / "config.json").exists():
                self._eagle3 = read_eagle3(self.file)
                return
            with safe_open(self.file, framework="pt") as kept:
                known = json.loads((kept.metadata() or {})["xtok"])
                self._tensors = _whole({name: kept.get_tensor(name) for name in kept.keys()})  # noqa: SIM118 # no iterator
            known |= {"accuracy": tuple(map(tuple, known["accuracy"])), "layers": tuple(known.get("layers", (LAST,)))}
            known["weights"] = tuple(map(float, known.get("weights", ())))
            if len(known["weights"]) not in (0, _SAMPLED):
                raise ValueError(f"it has {len(known['weights'])} values of the target's embedding")
            known.pop("target", None)  # its name, which earlier versions wrote
            self.trained = HeadsInfo(**known)
            self._hidden_size = _hidden_size(self.trained, self._tensors)
        except Exception as error:  # a file that holds something else makes no sense in many ways
            if not self.file.exists():
                raise InvalidInputError(f"{self.file} does not exist. Make heads with: xtok train-heads") from error
            is_bare = self.file.is_dir() and not (self.file / "config.json").exists()
            why = "it is a folder" if is_bare else reason(error)
            raise InvalidInputError(f"{self.file} holds no heads: {why}. Make one with: xtok train-heads") from error

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_made"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _made=Verdicts(self._for))

    @property
    def is_sequential(self) -> bool:
        """Whether these are sequential heads, and not Medusa's."""
        return self._eagle3 is not None or self.trained.window is not None

    def layers_for(self, model: PreTrainedModel) -> tuple[int, ...]:
        """After which layers of a target hidden states are read."""
        return self.trained.layers if self._eagle3 is None else layers_of_eagle3(self._eagle3[0], model)

    @within(Modes())
    def _for(self, model: PreTrainedModel) -> MedusaHeads | StateHeads:
        """The heads on a target's device, in its dtype."""
        if self._eagle3 is not None:
            return load_eagle3(*self._eagle3, model)
        if self.trained.window is not None:
            return load_sequential(self._tensors, len(self.trained.layers), self.trained.window, model)
        made = MedusaHeads(*self._tensors["weight"].shape[:2])
        made.load_state_dict(self._tensors)
        return made.to(device_of(model), model.dtype)

    def model_for(self, model: PreTrainedModel) -> StateHeads | None:
        """What is forwarded to guess for a target: sequential heads; Medusa's need no forward pass."""
        made = self._made(model)
        return made if isinstance(made, StateHeads) else None

    @within(Modes())
    def check(self, model: PreTrainedModel, view: TokenBytes) -> None:
        """Raises `InvalidInputError` unless the heads were trained for this target."""
        if not (isinstance(model, PreTrainedModel) and isinstance(view, TokenBytes)):
            raise InvalidInputError(
                f"check takes a model and the bytes of its ids (TokenBytes), and was given {shown((model, view))}."
            )
        if self._eagle3 is not None:
            check_eagle3(*self._eagle3, model)
        else:
            self._check_target(described(model, view))
        try:
            _check_layers(self.layers_for(model), model)
            self._made(model)
            ids = torch.zeros((1, 1), dtype=torch.int64, device=device_of(model))
            cached_model(model, new_cache(model), hidden_layers=self.layers_for(model)).forward(ids, rows=1)
        except Exception as error:
            raise InvalidInputError(f"{self.file} holds no heads for this target: {reason(error)}.") from error

    def _check_target(self, found: HeadsInfo) -> None:
        """Raises `InvalidInputError` unless the heads were trained for the target that is `found`."""
        mine = replace(self.trained, hidden_size=self._hidden_size)
        for name in _FACTS:
            if getattr(mine, name) != getattr(found, name):
                raise InvalidInputError(
                    f"{self.file} holds heads for a target whose {_FACTS[name]} is {getattr(mine, name)!r}; this one's is "
                    f"{getattr(found, name)!r}. Train heads for it with: xtok train-heads"
                )
        if mine.weights and found.weights and _similarity(mine.weights, found.weights) < _SIMILAR:
            raise InvalidInputError(
                f"{self.file} holds heads for a target with other weights. Train heads for this one with: xtok train-heads"
            )

    def start(self, request: Request) -> Drafter:
        """A drafter for one sequence of `request.model`, for which the heads were trained."""
        check_request(request)
        if request.model is None:
            raise InvalidInputError("Heads need the target's hidden states, and the request has no model. Use another draft.")
        made, model, view = self._made(request.model), request.model, request.vocabulary.view
        layers = self.layers_for(model)
        if not set(layers) <= set(request.hidden_layers):
            raise InvalidInputError(
                f"hidden_layers of the request is {request.hidden_layers}; these heads read layers {layers}."
            )
        columns = tuple(request.hidden_layers.index(layer) for layer in layers)
        keys = request.vocabulary.keys.to(device_of(model))
        if isinstance(made, MedusaHeads):
            return MedusaDrafter(made, columns[0], keys, output_embeddings(model), view, request.meter, request.draft_warpers)
        slot = request.slots.take(made, hidden_layers=(LAST,))
        if not slot.shares:
            raise InvalidInputError(
                f"In {model.dtype} on {model.device}, these heads give other logits in a tree than alone. Use another draft."
            )
        drafter = SequentialDrafter(made, slot, columns, keys, view, request.meter, request.draft_warpers)
        return DrawnChains(drafter) if request.independent else drafter


_SCALE = ".scale"
"""What the name of a matrix's scales ends in, after the matrix's own name."""
_FACTS = {"hidden_size": "hidden size", "vocabulary": "vocabulary"}
"""What a target must have in common with the one that heads were trained for, as error messages call it."""


def _check_layers(layers: tuple[int, ...], model: PreTrainedModel) -> None:
    """Raises `ValueError` for layers that a target doesn't have. They are indices of transformers' `hidden_states`: 0 for the
    embeddings, -1 for what makes logits.
    """
    count = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    if not layers or not all(type(layer) is int and -count - 1 <= layer <= count for layer in layers):
        raise ValueError(f"hidden states are read after layers {shown(layers)}, and the target has {count}")


def _hidden_size(known: HeadsInfo, tensors: dict[str, Tensor]) -> int:
    """The hidden size of the target that heads were made for. Raises `KeyError` or `ValueError` unless tensors have the shapes
    of heads: memory is taken by them, and a file may claim any.
    """
    strange = [name for name, one in tensors.items() if one.is_floating_point() == (name == "ids") or one.is_complex()]
    if strange:
        raise ValueError(", ".join(f"{name} is of {tensors[name].dtype}" for name in strange))
    if known.window is not None:
        if type(known.window) is not int or known.window < 1:
            raise ValueError(f"window is {known.window!r}")
        hidden, count = tensors["out.weight"].shape[0], len(known.layers)
        if tensors["fuse.weight"].shape[1] != hidden * count or tensors["ids"].dim() != 1 or not len(tensors["ids"]):
            raise ValueError(f"fuse has shape {tuple(tensors['fuse.weight'].shape)}, out {tuple(tensors['out.weight'].shape)}")
        return hidden
    weight, bias = tensors["weight"], tensors["bias"]
    count, size = bias.shape if bias.dim() == 2 else (0, 0)
    if not count or not size or weight.shape != (count, size, size):
        raise ValueError(f"weight has shape {tuple(weight.shape)}, bias {tuple(bias.shape)}")
    return size


def described(model: PreTrainedModel, view: TokenBytes) -> HeadsInfo:
    """The info of heads for this target. Raises `InvalidInputError` if its output embedding doesn't take its hidden states."""
    size = int(model.config.get_text_config(decoder=True).hidden_size)
    head = output_embeddings(model)
    if head is None or getattr(head, "in_features", None) != size:
        raise InvalidInputError(
            f"{type(model).__name__} has no output embedding of its hidden size, {size}, which heads need to share."
        )
    digest = sha256(b"\0".join(b"\1" if piece is None else b"\2" + piece for piece in view.table)).hexdigest()
    return HeadsInfo(size, digest[:16], _some_weights(model, len(view.table) * size))


_SAMPLED, _SPREAD = 64, 2_654_435_761
"""How many values of the input embedding are compared, and a number that spreads them over rows and columns."""
_SIMILAR = 0.9
"""The least cosine similarity of these values. Rounded to 4 bits in blocks of 32, SmolLM2's have 0.98, to 3 bits 0.92; those of
another model about 0.
"""


@torch.no_grad()
def _some_weights(model: PreTrainedModel, size: int) -> tuple[float, ...]:
    """A few of the first `size` values of a target's input embedding; none if they can't be read, as on no device."""
    weight: Any = getattr(model.get_input_embeddings(), "weight", None)
    places = torch.arange(1, _SAMPLED + 1, dtype=torch.int64, device="cpu") * _SPREAD % size
    try:
        values = weight.reshape(-1)[places.to(weight.device)].float().tolist()
        return tuple(float(f"{value:.4g}") for value in values)
    except Exception:  # quantised kinds may say in any way that they can't be indexed
        return ()


def _similarity(one: Sequence[float], other: Sequence[float]) -> float:
    """The cosine similarity of two rows of numbers."""
    first, second = torch.tensor([list(one), list(other)], dtype=torch.float64, device="cpu")
    return float(torch.cosine_similarity(first, second, dim=0))


def save_heads(heads: MedusaHeads | SequentialHeads, trained: HeadsInfo, file: Path) -> None:
    """Write a file that `HeadsDrafter` reads: matrices in int8 with a scale for each row, all else in float32."""
    tensors = dict[str, Tensor]()
    for name, tensor in heads.state_dict().items():
        tensors[name] = tensor.detach().cpu().float().contiguous()
        if tensor.dim() > 1:
            scale = (tensors[name].abs().amax(dim=-1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
            tensors |= {name: (tensors[name] / scale[..., None]).round().to(torch.int8), name + _SCALE: scale}
    if isinstance(heads, SequentialHeads):
        tensors["ids"] = heads.ids.to(torch.int32)
    save_file(tensors, file, metadata={"xtok": json.dumps(asdict(trained))})


def _whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file, matrices in int8 multiplied by their scales, in float16. Raises `KeyError` for a scale that is
    missing, and `ValueError` for one of another shape or type, before it allocates memory.
    """
    made = {name: one for name, one in tensors.items() if not name.endswith(_SCALE)}
    for name, one in made.items():
        if one.dtype == torch.int8:
            scale = tensors[name + _SCALE]
            if scale.shape != one.shape[:-1] or not scale.is_floating_point():
                raise ValueError(f"{name} has shape {tuple(one.shape)}, its scale {tuple(scale.shape)}, {scale.dtype}")
            made[name] = (one * scale[..., None]).half()
    return made
