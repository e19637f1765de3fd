"""Fine-tuning of a draft, by transformers' own trainer."""

import json
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from xtok.align.projection import Projection
from xtok.models.timing import timed
from xtok.results.progress import stage
from xtok.tune.examples import IGNORED, Example, batch
from xtok.tune.writing import save, saved

_MEASURED = "tokens_per_forward"
_EPOCHS = 12
BATCH = 16
"""How many texts a training step has."""
_PATIENCE = 3
"""After how many epochs without a gain training stops."""
_LARGE = 500e6
"""Drafts with more parameters than this are trained by LoRA, unless settings say otherwise."""
_RANK = 16
_HARD = 0.5
"""The weight of the text's own id at positions for which the target's distribution is known, too."""
_LEAST = 1e-6
"""Smaller probabilities count as this one, so that logarithms are finite."""


@dataclass(frozen=True)
class TrainingSettings:
    """How to train a draft. `epochs`: the most. `learning_rate`, `lora`: None to choose by the draft's size."""

    epochs: int
    learning_rate: float | None = None
    lora: bool | None = None


def train(
    draft: PreTrainedModel,
    rows: Sequence[Example],
    seen: Projection,
    measure: Callable[[PreTrainedModel], float],
    into: Path,
    settings: TrainingSettings,
) -> tuple[PreTrainedModel, list[float]]:
    """Train `draft` itself, in float32, until `measure` no longer rises.

    Returns the model of the best epoch, and what was measured after each.

    Law: in float32 on a CPU, the weights are the same however often training was stopped in between. Each epoch is saved in the
    folder `into`. `seen`: the draft's ids projected onto the target's. `measure`: tokens per forward pass of the target on
    texts that aren't learnt.
    """
    size = sum(weight.numel() for weight in draft.parameters())
    adapts = size > _LARGE if settings.lora is None else settings.lora
    model: Any = _with_lora(draft, _RANK) if adapts else draft
    learner: Any = draft
    caches = draft.config.use_cache
    seen = Projection(*(part.to(draft.device) for part in (seen.draft_ids, seen.target_ids, seen.weights)))

    def loss(learning: Any, inputs: dict[str, Tensor]) -> Tensor:
        output = learning(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        return guessing_loss(output.logits, inputs["labels"], inputs["likeliest"], inputs["probabilities"], seen)

    rate = settings.learning_rate or (2e-4 if adapts else full_rate(size))
    found = fit(model, rows, loss, lambda: measure(learner.eval()), into, epochs=settings.epochs, rate=rate)
    draft.config.use_cache = caches  # the trainer switches it off
    return (model.merge_and_unload() if adapts else model).eval(), found


def fit(
    model: nn.Module,
    rows: Sequence[Example],
    loss: Callable[[Any, dict[str, Tensor]], Tensor],
    measure: Callable[[], float],
    into: Path,
    *,
    epochs: int,
    rate: float,
) -> list[float]:
    """Train `model` until `measure` no longer rises, and leave it as it was after its best epoch.

    Law: as for `train`. `loss`: the scalar loss to minimise, of a model on a `batch` of rows. `measure`: gives a figure after
    each epoch; the higher, the better. `rate`: the learning rate. Returns the figures.
    """
    device = next(model.parameters()).device
    latest, found = _latest(into)
    arguments = TrainingArguments(
        output_dir=str(into),
        num_train_epochs=len(found) if _stalls(found) else epochs,
        per_device_train_batch_size=BATCH,
        learning_rate=rate,
        warmup_steps=max(10, epochs * len(rows) // BATCH // 50),
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model=_MEASURED,
        greater_is_better=True,
        remove_unused_columns=False,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=device.type == "cuda" and torch.cuda.is_bf16_supported(),
        use_cpu=device.type == "cpu",
        dataloader_pin_memory=device.type == "cuda",
    )
    bar = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with bar, torch.enable_grad(), torch.random.fork_rng():  # the trainer seeds torch when it is made
        trainer = _Trainer(
            model=model,
            args=arguments,
            train_dataset=list(rows),
            eval_dataset=list(rows[:1]),
            data_collator=batch,
            callbacks=[_Watch(bar)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.loss, trainer.measure = loss, measure
        trainer.train(resume_from_checkpoint=latest)
    return _measured(trainer.state.log_history)


class Plan(NamedTuple):
    """How a model is trained. `bf16`: forward passes are in bfloat16; weights are in float32."""

    epochs: int
    bf16: bool


def planned(model: nn.Module, rows: Sequence[Example], loss: Callable[..., Tensor], seconds: float, file: Path) -> Plan:
    """How many epochs fit into `seconds`, and in which precision steps are faster. The plan is saved in `file`, since another
    run would measure something else. `loss`: the loss of a model on a batch; it takes `bf16`.
    """
    if not isinstance(plan := saved(file), list):
        with stage("timing a few steps of training"):
            took = {bf16: _seconds_per_step(deepcopy(model), rows, partial(loss, bf16=bf16)) for bf16 in (False, True)}
        bf16 = took[True] < took[False]
        epochs = max(1, min(_EPOCHS, int(seconds / (took[bf16] * len(rows) / BATCH))))
        plan = [epochs, bf16]
        save(file, lambda half: half.write_text(json.dumps(plan)))
    return Plan(*plan)


def _seconds_per_step(model: nn.Module, rows: Sequence[Example], loss: Callable[..., Tensor]) -> float:
    optimizer, spans = torch.optim.AdamW(model.parameters()), []
    inputs = {name: part.to(next(model.parameters()).device) for name, part in batch(rows[:BATCH]).items()}
    for _ in range(3):
        with timed() as span, torch.enable_grad():
            found: Any = loss(model, inputs)
            found.backward()
            optimizer.step()
        spans.append(span.seconds)
    return min(spans)


def guessing_loss(logits: Tensor, labels: Tensor, top_ids: Tensor, probabilities: Tensor, seen: Projection) -> Tensor:
    """The mean loss of a draft's ids, a scalar: cross-entropy with the text, and with the target's distribution if known.

    `logits`: (rows, positions, draft's vocabulary). `labels`: (rows, positions), int64. `top_ids`, int64, `probabilities`,
    float32, (rows, positions, few): the target's distribution at each position, zeros if it isn't known. For that part, the
    draft's distribution is projected onto the target's ids by `seen`, as it is when the draft guesses.
    """
    logits, labels = logits[:, :-1].float(), labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    known = probabilities[:, 1:].sum(dim=-1) > 0
    predicted = _projected(logits[known].softmax(dim=-1), top_ids[:, 1:][known], seen)
    soft = -(_with_rest(probabilities[:, 1:][known]) * _with_rest(predicted).clamp_min(_LEAST).log()).sum(dim=-1)
    losses = losses.masked_scatter(known, _HARD * losses[known] + soft)
    return losses.sum() / (labels != IGNORED).sum()


def _with_rest(probabilities: Tensor) -> Tensor:
    """Adds to the probabilities of a few ids that of all others together: from (positions, few) to (positions, few + 1)."""
    return torch.cat([probabilities, (1 - probabilities.sum(dim=-1, keepdim=True)).clamp_min(0)], dim=-1)


def _projected(probabilities: Tensor, chosen: Tensor, seen: Projection) -> Tensor:
    """The projected probabilities of `chosen` ids, (positions, few), by the draft's, (positions, draft's vocabulary)."""
    found: Any = torch.unique
    columns, own = found(chosen, return_inverse=True)  # few of the target's ids, whose vocabulary may be large
    if not len(columns):
        return probabilities.new_zeros(chosen.shape)
    places = torch.searchsorted(columns, seen.target_ids).clamp_max(len(columns) - 1)
    meant = columns[places] == seen.target_ids
    shares = probabilities[:, seen.draft_ids[meant]] * seen.weights[meant].to(probabilities.dtype)
    return probabilities.new_zeros(len(probabilities), len(columns)).index_add(1, places[meant], shares).gather(1, own)


class _Trainer(Trainer):
    """transformers' trainer with the given `loss`, which evaluates by `measure`."""

    loss: Callable[[Any, dict[str, Tensor]], Tensor]
    measure: Callable[[], float]

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, *_: Any, **__: Any) -> Any:
        loss = self.loss(model, inputs)
        return (loss, {}) if return_outputs else loss

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        with torch.random.fork_rng():
            found = {f"eval_{_MEASURED}": self.measure()}
        self.log(found)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        return found


class _Watch(TrainerCallback):
    """Stops training when nothing is gained any more; shows a bar of steps, and what was measured after each epoch."""

    def __init__(self, bar: Progress) -> None:
        self.bar = bar

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.task = self.bar.add_task("learning", total=state.max_steps, completed=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.update(self.task, completed=state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        found = _measured(state.log_history)
        self.bar.print(f"epoch {len(found)}: {found[-1]:.2f} tokens per forward")
        control.should_training_stop |= _stalls(found)


def _measured(log: Sequence[dict[str, float]]) -> list[float]:
    """What was measured after each epoch, by the trainer's log."""
    return [entry[f"eval_{_MEASURED}"] for entry in log if f"eval_{_MEASURED}" in entry]


def _stalls(found: Sequence[float]) -> bool:
    return len(found) > _PATIENCE and max(found[-_PATIENCE:]) <= max(found[:-_PATIENCE])


def full_rate(parameters: int) -> float:
    """The default learning rate for full fine-tuning. At the rates that small models need, large ones forget what they know."""
    return min(1e-3, 1e-3 * math.sqrt(5e6 / parameters))


def _latest(into: Path) -> tuple[str | None, list[float]]:
    """The latest complete checkpoint (its state, written last, can be read), if any; and what was measured up to it.

    Its state names the best one by the path that it had when it was written. The folder may have been moved since.
    """
    steps = {int(path.name.split("-")[1]): path for path in into.glob("checkpoint-*") if path.name.split("-")[1].isdigit()}
    for _, path in sorted(steps.items(), reverse=True):
        file = path / "trainer_state.json"
        state = saved(file)
        if isinstance(state, dict) and "log_history" in state and (best := state.get("best_model_checkpoint")):
            state["best_model_checkpoint"] = str(into / Path(best).name)
            if Path(state["best_model_checkpoint"]).exists():
                save(file, lambda half, state=state: half.write_text(json.dumps(state), encoding="utf-8"))  # type: ignore[misc]
                return str(path), _measured(state["log_history"])
    return None, []


def _with_lora(model: PreTrainedModel, rank: int) -> Any:
    """`model` with low-rank matrices beside all its linear layers. They alone are trainable; its own weights are frozen."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):  # the caller's random numbers stay what they are
        warnings.simplefilter("ignore")  # about what peft handles by itself
        torch.default_generator.manual_seed(0)
        return get_peft_model(model, config)
