"""Fine-tuning of a draft, by transformers' own trainer."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from xtok.align.projection import Projection
from xtok.drafts.adapt import with_lora
from xtok.drafts.lessons import Lesson, batch
from xtok.results.progress import console
from xtok.tune.loss import guessing_loss

_MEASURED = "tokens_per_forward"
_PATIENCE = 3
"""Epochs without a gain until training stops."""
_LARGE = 500e6
"""Drafts of more parameters than that learn by LoRA."""
_RANK = 16


def train(
    draft: PreTrainedModel,
    rows: Sequence[Lesson],
    seen: Projection,
    measure: Callable[[PreTrainedModel], float],
    into: Path,
    *,
    epochs: int,
    learning_rate: float | None,
    lora: bool | None,
) -> tuple[PreTrainedModel, list[float]]:
    """Train `draft` itself, in float32, until what it is measured by no longer rises.

    Returns the model of the best epoch, and what was measured after each.

    Law: in float32 on a CPU, the same weights however often it was stopped in between. Each epoch is kept whole in `into`.
    `seen`: the draft's ids as the target sees them. `measure`: tokens per forward of the target on texts held out.
    """
    size = sum(weight.numel() for weight in draft.parameters())
    adapts = size > _LARGE if lora is None else lora
    model: Any = with_lora(draft, _RANK) if adapts else draft
    learner: Any = draft
    caches = draft.config.use_cache
    seen = Projection(*(part.to(draft.device) for part in (seen.own, seen.theirs, seen.weights)))

    def loss(learning: Any, inputs: dict[str, Tensor]) -> Tensor:
        output = learning(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        return guessing_loss(output.logits, inputs["labels"], inputs["likeliest"], inputs["probabilities"], seen)

    rate = learning_rate or (2e-4 if adapts else full_rate(size))
    found = fit(model, rows, batch, loss, lambda: measure(learner.eval()), into, epochs=epochs, rate=rate, device=draft.device)
    draft.config.use_cache = caches  # the trainer switches it off
    return (model.merge_and_unload() if adapts else model).eval(), found


def fit(
    model: nn.Module,
    rows: Sequence[Any],
    collate: Callable[[Sequence[Any]], dict[str, Tensor]],
    loss: Callable[[Any, dict[str, Tensor]], Tensor],
    measure: Callable[[], float],
    into: Path,
    *,
    epochs: int,
    rate: float,
    device: torch.device,
) -> list[float]:
    """Train `model` until `measure` no longer rises, and leave it as it was after its best epoch.

    `collate` makes a batch of rows, tensors by name, (rows, …) each; `loss` gives the scalar loss of `model` on one.

    Law: as `train`. Returns what was measured after each epoch.
    """
    latest, found = _latest(into)
    arguments = TrainingArguments(
        output_dir=str(into),
        num_train_epochs=len(found) if _stalls(found) else epochs,
        per_device_train_batch_size=16,
        learning_rate=rate,
        warmup_steps=10,
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
    bar = Progress(console=console(), transient=True)
    with bar, torch.enable_grad(), torch.random.fork_rng():  # the trainer seeds torch where it is made
        trainer = _Trainer(
            model=model,
            args=arguments,
            train_dataset=list(rows),
            eval_dataset=list(rows[:1]),
            data_collator=collate,
            callbacks=[_Watch(bar)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.loss, trainer.measure = loss, measure
        trainer.train(resume_from_checkpoint=latest)
    return _measured(trainer.state.log_history)


class _Trainer(Trainer):
    """Learns by a loss, and evaluates by what the model is for."""

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
    """Ends the training where nothing is gained any more; shows a bar of the steps, and what each epoch was measured by."""

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
    """What each epoch was measured by."""
    return [entry[f"eval_{_MEASURED}"] for entry in log if f"eval_{_MEASURED}" in entry]


def _stalls(found: Sequence[float]) -> bool:
    return len(found) > _PATIENCE and max(found[-_PATIENCE:]) <= max(found[:-_PATIENCE])


def full_rate(parameters: int) -> float:
    """The learning rate of full fine-tuning: large models forget what they know at the rates that small ones need."""
    return min(1e-3, 1e-3 * math.sqrt(5e6 / parameters))


def _latest(into: Path) -> tuple[str | None, list[float]]:
    """The latest checkpoint that is whole, and what was measured up to it.

    The trainer writes its state last, so that a checkpoint whose state can be read has all the rest.
    """
    for path in sorted(into.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]), reverse=True):
        try:
            state = json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return str(path), _measured(state["log_history"])
    return None, []
