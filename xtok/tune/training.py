"""What both kinds of training share: checks of settings, the loop that keeps the best, and how guesses are measured."""

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import inf
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from transformers import get_linear_schedule_with_warmup

from xtok.assisted import XTokAssisted
from xtok.drafts.policy.settings import Budget
from xtok.errors import InvalidInputError, check_whole, shown
from xtok.models.load import Source
from xtok.models.prompts import Chat
from xtok.models.timing import perf_counter, timed
from xtok.results.progress import advanced
from xtok.tune.examples import Example, batch
from xtok.tune.writing import name_of_way, way

BATCH = 16
"""How many texts a training step has."""
_PATIENCE = 3
"""After how many epochs without a gain training stops."""
_EVERY = 300.0
"""The seconds of training after which the model is measured within an epoch; more, if measuring takes a tenth of that."""
_SEED = 42


def check(settings: Mapping[str, Any], **least: int) -> None:
    """Raises `InvalidInputError` if `out` is no path, or a setting is invalid.

    `settings`: the arguments of a training, by name. `least`: those that must be whole numbers, and the least value of each.
    """
    out: Any = settings["out"]
    sampled: float = settings["sampled"]
    if not isinstance(out, str | os.PathLike) or not str(out).strip():
        raise InvalidInputError(f"out is {shown(out)}; give the path to write to.")
    for name, smallest in least.items():
        check_whole(name, settings[name], smallest)
    if not (isinstance(sampled, Real) and 0 <= sampled <= 1):
        raise InvalidInputError(f"sampled is {shown(sampled)}; it must be a share of the texts, from 0 to 1.")
    for name, default in {"hours": 1.0, "temperature": None, "learning_rate": None}.items():
        number: float = settings.get(name, default)
        if number is not default and not (isinstance(number, Real) and 0 < number < inf):
            raise InvalidInputError(f"{name} is {shown(number)}; it must be a number above 0.")


def fit(
    model: nn.Module,
    rows: Sequence[Example],
    loss: Callable[[Any, dict[str, Tensor]], Tensor],
    measure: Callable[[], float],
    keep: Callable[[float], None],
    *,
    epochs: int,
    rate: float,
) -> list[float]:
    """Train `model` until what is measured no longer rises, and leave it as it was when that was highest.

    `loss`: the scalar loss to minimise, of a model on a `batch` of rows. `measure`: gives a figure after each epoch, and every
    few minutes of a longer one; the higher, the better. `keep`: called with each figure that exceeds all before. `rate`: the
    learning rate, which falls linearly to 0 after a warm-up. Returns the highest figure of each epoch.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    parts = range(0, len(rows), BATCH)
    optimizer = torch.optim.AdamW(weights, rate, weight_decay=0.0)
    warmup = max(10, epochs * len(rows) // BATCH // 50)
    schedule: Any = get_linear_schedule_with_warmup(optimizer, warmup, epochs * len(parts))  # type: ignore[no-untyped-call]
    found, best = list[float](), list[Tensor]()
    with advanced("learning", epochs * len(parts)) as advance, torch.random.fork_rng():
        torch.manual_seed(_SEED)
        since, wait = perf_counter(), _EVERY
        for epoch in range(epochs):
            found.append(-inf)
            shuffled = torch.Generator().manual_seed(_SEED + epoch)
            order = torch.randperm(len(rows), generator=shuffled, dtype=torch.int64, device="cpu").tolist()
            for at in parts:
                inputs = batch([rows[i] for i in order[at : at + BATCH]], weights[0].device)
                with torch.enable_grad():
                    loss(model.train(), inputs).backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(weights, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                advance(1)
                if at < parts[-1] and perf_counter() - since < wait:
                    continue
                with timed() as span, torch.random.fork_rng():
                    figure = measure()
                if figure > max(found):
                    best = [weight.detach().to("cpu", copy=True) for weight in weights]
                    keep(figure)
                found[-1] = max(found[-1], figure)
                since, wait = perf_counter(), max(_EVERY, 10 * span.seconds)
            print(f"epoch {epoch + 1}: {found[-1]:.2f} tokens per forward", file=sys.stderr, flush=True)
            if len(found) > _PATIENCE and max(found[-_PATIENCE:]) <= max(found[:-_PATIENCE]):
                break
    with torch.no_grad():
        for weight, value in zip(weights, best, strict=True):
            weight.copy_(value)
    return found


def per_forward(
    target: Source, draft: Any, prompts: Sequence[str | Chat], *, sampled: float = 0.0, **arguments: Any
) -> tuple[float, dict[str, float]]:
    """New tokens per forward pass of the target with a draft's trees of depth 5: over all prompts, and by way of picking.

    `sampled`: the share of prompts that are sampled. Raises `InvalidInputError` if the draft fails.
    """
    xt = XTokAssisted(target, draft, budget=Budget(5, width=4, schedule="constant"))
    counts: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for i, prompt in enumerate(prompts):
        kind = way(i, sampled, prompt)
        stats = xt.generate(prompt, seed=i if kind["do_sample"] else None, **kind, **arguments).stats
        if stats.draft_error is not None:
            raise InvalidInputError(f"The draft or the heads fail when they guess for this target ({stats.draft_error}).")
        count = counts[name_of_way(kind)]
        count[0] += stats.new_tokens
        count[1] += stats.target_forwards
    tokens, forwards = map(sum, zip(*counts.values(), strict=True))
    return tokens / forwards, {name: tokens / forwards for name, (tokens, forwards) in counts.items()}
