"""Heads on the target itself, which guess several of its next tokens from one hidden state (Medusa)."""

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LogitsProcessorList, PreTrainedModel

from xtok.align.tokenbytes import TokenBytes
from xtok.drafts.base import Context, ModelDrafter, Request, check_request
from xtok.drafts.growth import IdPath, grown, likeliest, next_ids, tree_of
from xtok.drafts.meter import Meter
from xtok.drafts.policy.settings import Budget
from xtok.drafts.tree import Tree
from xtok.errors import InvalidInputError, reason, shown
from xtok.models.cache import device_of, output_embeddings
from xtok.models.forwards import Steps
from xtok.models.modes import Modes, within


class Heads(nn.Module):
    """Residual blocks on a target's last hidden state h, one for each further token: h + SiLU(W h + b) (Medusa, Cai et al.
    2024, arXiv 2401.10774). The target's own output embedding turns their outputs into logits. Untrained, each gives h.

    `weight`, W: (count, size, size) and `bias`, b: (count, size), with the hidden size `size`.
    """

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, size, size, dtype=torch.float32, device="cpu"))
        self.bias = nn.Parameter(torch.zeros(count, size, dtype=torch.float32, device="cpu"))

    def forward(self, hidden: Tensor) -> Tensor:
        """Takes hidden states, (…, size), to those for the tokens after the next one, (…, count, size)."""
        return hidden[..., None, :] + nn.functional.silu(torch.einsum("...i,koi->...ko", hidden, self.weight) + self.bias)


@dataclass(frozen=True)
class HeadsInfo:
    """Which target heads were trained for, and how accurate they are. `target`: the last part of its name. `vocabulary`: a
    digest of the bytes of its ids. `accuracy`: how often the first, second, … guess of each head was right, (heads, ranks).
    """

    target: str
    hidden_size: int
    vocabulary: str
    accuracy: tuple[tuple[float, ...], ...] = ()


class HeadsDrafter:
    """Guesses by heads that `xtok train-heads` trained for the target. One object may serve several instances and threads."""

    @within(Modes())
    def __init__(self, file: str | PathLike[str]) -> None:
        """Raises `InvalidInputError` for a file that holds no heads."""
        try:
            self.file = Path(file)
        except TypeError as error:
            raise InvalidInputError(f"The file of heads is {file!r}; give its path.") from error
        try:
            with safe_open(self.file, framework="pt") as kept:
                known = json.loads((kept.metadata() or {})["xtok"])
                weight, bias = kept.get_tensor("weight"), kept.get_tensor("bias")
            self.trained = HeadsInfo(**{**known, "accuracy": tuple(map(tuple, known["accuracy"]))})
            _check_shapes(weight, bias)
            self.heads = Heads(*weight.shape[:2])
            self.heads.load_state_dict({"weight": weight, "bias": bias})
            self._copies = dict[tuple[torch.device, torch.dtype], Heads]()
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            why = "it is a folder" if Path(self.file).is_dir() else reason(error)
            raise InvalidInputError(f"{self.file} holds no heads: {why}. Make one with: xtok train-heads") from error

    def check(self, model: PreTrainedModel, view: TokenBytes) -> None:
        """Raises `InvalidInputError` unless the heads were trained for this target."""
        if not (isinstance(model, PreTrainedModel) and isinstance(view, TokenBytes)):
            raise InvalidInputError(
                f"Heads are checked against a model and the bytes of its ids (TokenBytes); given was {shown((model, view))}."
            )
        mine, found = replace(self.trained, hidden_size=self.heads.weight.shape[-1]), described(model, view)
        for name in ("target", "hidden_size", "vocabulary"):
            if getattr(mine, name) != getattr(found, name):
                raise InvalidInputError(
                    f"{self.file} holds heads for a target whose {name.replace('_', ' ')} is {getattr(mine, name)!r}; "
                    f"this one's is {getattr(found, name)!r}. Train heads for it with: xtok train-heads"
                )

    def start(self, request: Request) -> "HeadsGuesser":
        """A drafter for one sequence of `request.model`, for which the heads were trained."""
        check_request(request)
        if request.model is None:
            raise InvalidInputError("Heads guess from the target's hidden states, and no target is at hand. Use another draft.")
        head, kind = output_embeddings(request.model), (device_of(request.model), request.model.dtype)
        if kind not in self._copies:
            self._copies[kind] = deepcopy(self.heads).to(*kind)
        keys = request.vocabulary.keys.to(kind[0])
        return HeadsGuesser(self._copies[kind], keys, head, request.vocabulary.view, request.meter, request.shapes)


def _check_shapes(weight: Tensor, bias: Tensor) -> None:
    """Raises `ValueError` unless both have the shapes of `Heads`: memory is taken by them, and a file may claim any."""
    count, size = bias.shape if bias.dim() == 2 else (0, 0)
    if not count or not size or weight.shape != (count, size, size):
        raise ValueError(f"weight has shape {tuple(weight.shape)}, bias {tuple(bias.shape)}")
    if not (weight.is_floating_point() and bias.is_floating_point()):
        raise ValueError(f"weight is of {weight.dtype}, bias of {bias.dtype}")


def described(model: PreTrainedModel, view: TokenBytes) -> HeadsInfo:
    """The info of heads for this target. Raises `InvalidInputError` if its output embedding doesn't take its hidden states."""
    size = int(model.config.get_text_config(decoder=True).hidden_size)
    head = output_embeddings(model)
    if head is None or getattr(head, "in_features", None) != size:
        raise InvalidInputError(
            f"{type(model).__name__} has no output embedding of its hidden size, {size}, that heads could share."
        )
    digest = sha256(b"\0".join(b"\1" if piece is None else b"\2" + piece for piece in view.table)).hexdigest()
    return HeadsInfo(Path(str(model.name_or_path)).name, size, digest[:16])


def save_heads(heads: Heads, trained: HeadsInfo, file: Path) -> None:
    """Write a file that `HeadsDrafter` reads, in float16."""
    tensors = {name: tensor.detach().cpu().half().contiguous() for name, tensor in heads.state_dict().items()}
    save_file(tensors, file, metadata={"xtok": json.dumps(asdict(trained))})


@dataclass(eq=False, repr=False)
class HeadsGuesser(ModelDrafter):
    """The drafter of `HeadsDrafter` for one sequence. `head`: the target's output embedding. `keys`: of its ids, for noise."""

    heads: Heads
    keys: Tensor
    head: Any
    view: TokenBytes
    meter: Meter
    warpers: LogitsProcessorList

    @torch.no_grad()
    def guess(self, context: Context, budget: Budget) -> Steps[Tree]:
        """The likeliest guesses by the product of the heads' probabilities; none as long as the hidden state isn't known."""
        if context.hidden is None:
            return Tree()
        with self.meter.drafting():
            distributions = self._distributions(context.hidden)
            first = (yield from self._children(context, distributions, [IdPath(1.0, -1, b"")]))[0]
        budget = replace(budget, depth=min(budget.depth, len(distributions[0])))  # a head for each id
        found = yield from grown(first, budget, lambda front: self._expanded(context, distributions, front))
        return tree_of(found, budget)

    def _distributions(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The distribution of each head: ids, int64, and probabilities, float32, (heads, ids) each. `hidden`: (size,)."""
        logits = self.head(self.heads(hidden.to(self.heads.weight.device)))
        ids, probabilities = likeliest(logits.to(self.keys.device), self.warpers)
        if ids is None:
            ids = torch.arange(probabilities.shape[1], dtype=torch.int64, device=probabilities.device)
            ids = ids.expand(len(probabilities), -1)
        return ids, probabilities

    def _expanded(
        self, context: Context, distributions: tuple[Tensor, Tensor], front: Sequence[IdPath]
    ) -> Steps[list[list[IdPath]]]:
        with self.meter.drafting():
            return (yield from self._children(context, distributions, front))

    def _children(
        self, context: Context, distributions: tuple[Tensor, Tensor], front: Sequence[IdPath]
    ) -> Steps[list[list[IdPath]]]:
        """The continuations of each guess by the distribution of its next head."""
        heads = [len(guess.ids) for guess in front]
        ids, own = (part[heads] for part in distributions)
        return (yield from next_ids(self.meter, context, front, ids, own, self.keys, self.view))
