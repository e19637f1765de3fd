"""A draft that is fine-tuned on what its target writes, while it serves."""

import warnings
from collections import deque
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from random import Random
from threading import Lock
from time import perf_counter
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from xtok.align.tokenbytes import TokenBytes
from xtok.drafts.examples import Example, WrittenText, batch, training_examples
from xtok.errors import DraftFailedWarning, InvalidInputError, install, reason, warn
from xtok.models.modes import Modes, within
from xtok.models.roles import DraftModel

SHARE = 0.03
"""How much learning may take, as a share of the time of all generations."""
_REMEMBERED = 64
_BATCH = 4
"""How many texts a step learns from: the latest, and some of the remembered ones."""
_STEPS = 4
"""The most steps per text, however long it took to generate: more would learn it by heart."""
_READ = 500
"""How many of a prompt's last characters are the context of what is learnt."""
_RANK, _RATE = 8, 3e-3


class Adapter:
    """A copy of a draft that learns the target's texts by low-rank matrices (LoRA, Hu et al. 2021, arXiv 2106.09685).

    Laws: what is generated doesn't depend on it. The caller's draft is never changed. Learning takes at most `SHARE` of the
    time of the generations that it learns from, and its memory doesn't grow. `draft`: the copy that guesses.
    """

    @within(Modes())
    def __init__(self, draft: DraftModel, target: TokenBytes) -> None:
        """`target`: its tokenizer. Raises `InvalidInputError` if peft is not installed."""
        if find_spec("peft") is None:
            raise InvalidInputError(f"adapt=True needs peft. Install it with: {install('tune')}")
        self.draft = replace(draft, model=deepcopy(draft.model))
        self._target = target
        self._learner = with_lora(_sharing_weights(draft.model), _RANK).eval()
        self._optimizer = torch.optim.AdamW([weight for weight in self._learner.parameters() if weight.requires_grad], lr=_RATE)
        self._texts: deque[Example] = deque(maxlen=_REMEMBERED)
        self._random = Random(0)
        self._lock = Lock()
        self._due = self._cost = 0.0
        self._failed = False

    def learn(self, start: str, text: str, seconds: float) -> None:
        """Learn from a `text` after `start` that took `seconds` to generate, for as long as is allowed by now. If that fails,
        it is over, with a `DraftFailedWarning`; guessing goes on.
        """
        if self._failed or not text or not self._lock.acquire(blocking=False):
            return
        try:
            with within(Modes()), torch.enable_grad():
                self._take_in(start, text, seconds)
        except Exception as error:
            self._failed = True
            warn(f"The draft learns no more ({type(error).__name__}: {error}).", DraftFailedWarning)
        finally:
            self._lock.release()

    def save(self, file: str | PathLike[str]) -> None:
        """Write what was learnt to a file, in safetensors."""
        with self._lock:
            save_file({name: weight.detach().cpu().contiguous() for name, weight in self._matrices().items()}, file)

    @within(Modes())
    def load(self, file: str | PathLike[str]) -> None:
        """Go on from what `save` wrote. Raises `InvalidInputError` for a file that is no adapter of this draft."""
        try:
            kept = load_file(Path(file))
        except (OSError, SafetensorError, TypeError, ValueError) as error:
            raise InvalidInputError(f"{file} can't be read as an adapter: {reason(error)}.") from error
        own = self._matrices()
        if {name: weight.shape for name, weight in kept.items()} != {name: weight.shape for name, weight in own.items()}:
            raise InvalidInputError(f"{file} is an adapter of another draft. Load one that was saved with this draft.")
        with self._lock:
            for name, weight in kept.items():
                own[name].copy_(weight)
            self._serve()

    def _matrices(self) -> dict[str, torch.Tensor]:
        """The trainable matrices by name, (rank, inputs) or (outputs, rank) for each linear layer."""
        return {name: weight for name, weight in self._learner.named_parameters() if weight.requires_grad}

    def _take_in(self, start: str, text: str, seconds: float) -> None:
        empty = torch.zeros((0, 1), dtype=torch.float32, device="cpu")
        with suppress(InvalidInputError):  # the draft has no ids for this text
            self._texts.extend(
                training_examples(self.draft, self._target, [WrittenText(start[-_READ:], text, [], empty.long(), empty)])
            )
        self._due = min(self._due + SHARE * seconds, SHARE * seconds + _STEPS * self._cost)
        steps = 0
        while self._texts and self._due > self._cost and steps < _STEPS:
            begin = perf_counter()
            self._step()
            took = perf_counter() - begin
            self._cost += (took - self._cost) / (2 if self._cost else 1)
            self._due, steps = self._due - took, steps + 1
        if steps:
            self._serve()

    def _step(self) -> None:
        few = self._random.sample(list(self._texts), min(_BATCH - 1, len(self._texts)))
        rows = batch([self._texts[-1], *few])
        inputs = {name: rows[name].to(self._learner.device) for name in ("input_ids", "attention_mask", "labels")}
        self._learner(**inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(self._matrices().values(), 1.0, error_if_nonfinite=True)
        self._optimizer.step()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def _serve(self) -> None:
        """Merge what was learnt into the weights of the draft that guesses, so that guessing takes no more time."""
        from peft.tuners.lora import LoraLayer

        for name, module in self._learner.get_base_model().named_modules():
            if isinstance(module, LoraLayer):
                layer: Any = module
                weight = layer.get_base_layer().weight
                served: Any = self.draft.model.get_submodule(name)
                served.weight.copy_(weight + layer.get_delta_weight("default").to(weight.dtype))


def with_lora(model: PreTrainedModel, rank: int) -> Any:
    """`model` with low-rank matrices beside all its linear layers. They alone are trainable; its own weights are frozen."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):  # the caller's random numbers stay what they are
        warnings.simplefilter("ignore")  # about what it does by itself
        torch.default_generator.manual_seed(0)
        return get_peft_model(model, config)


def _sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of `model` that shares its weights, but for those made in inference mode: gradients don't pass through them."""
    weights = {id(weight): weight.detach() for weight in model.parameters()}
    own = {key: weight.clone() if weight.is_inference() else weight for key, weight in weights.items()}
    return deepcopy(model, {key: torch.nn.Parameter(weight, requires_grad=False) for key, weight in own.items()})
