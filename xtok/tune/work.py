"""What every training needs besides its learner: prompts split in three, settings that are saved, and a folder for the work."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from importlib.util import find_spec
from math import inf
from numbers import Real
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from xtok.assisted import XTokAssisted
from xtok.decoding.arguments import listed_texts
from xtok.drafts.policy.settings import Budget
from xtok.errors import InvalidInputError, install, shown
from xtok.models.load import Source
from xtok.models.prompts import Chat
from xtok.tune.writing import PENALTY, beginnings, name_of_way, save, way

_MOST = 40
"""After how many beginnings of prompts, at most, tokens per forward pass are measured."""


@dataclass(frozen=True)
class Settings:
    """What decides the result of a training."""

    target: str
    prompts: str
    starts: int
    max_new_tokens: int
    sampled: float
    temperature: float | None
    epochs: int
    learning_rate: float | None
    draft: str | None = None
    lora: bool | None = None
    penalty: float = field(default=PENALTY, init=False)

    def measured(self, prompts: Sequence[str]) -> list[str]:
        """Some beginnings of prompts, evenly spread."""
        return beginnings(prompts, self.starts)[:: -(-len(prompts) * self.starts // _MOST)]


def writing_arguments(settings: Any) -> dict[str, Any]:
    """The arguments of `write` and of `per_forward` that settings name: `max_new_tokens`, `sampled`, and a `temperature`."""
    temperature = {} if settings.temperature is None else {"temperature": settings.temperature}
    return {"max_new_tokens": settings.max_new_tokens, "sampled": settings.sampled, **temperature}


def split(prompts: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Three disjoint lists of prompts: those that decide when to stop, those that show what was gained, and those to learn
    from.

    Raises `InvalidInputError` for less than three different prompts.
    """
    different = [prompt for prompt in dict.fromkeys(listed_texts("prompts", prompts)) if prompt.strip()]
    if len(different) < 3:
        raise InvalidInputError(f"Too few prompts that differ: {len(different)}. Give 3 or more, better hundreds.")
    step = min(10, max(3, len(different) // 2))
    kinds: tuple[list[str], list[str], list[str]] = ([], [], [])
    for i, prompt in enumerate(different):
        kinds[min(i % step, 2)].append(prompt)
    return kinds


def per_forward(
    target: Source, draft: Any, prompts: Sequence[str | Chat], *, sampled: float = 0.0, **arguments: Any
) -> tuple[float, dict[str, float]]:
    """New tokens per forward pass of the target, with trees of depth 5 of a draft: over all prompts, and by way of picking.

    `sampled`: the share of prompts that are sampled.
    """
    xt = XTokAssisted(target, draft, budget=Budget(5, width=4, schedule="constant"))
    tokens, forwards = Counter[str](), Counter[str]()
    for i, prompt in enumerate(prompts):
        own = way(i, sampled, prompt)
        stats = xt.generate(prompt, seed=i if own["do_sample"] else None, **own, **arguments).stats
        tokens[name_of_way(own)] += stats.new_tokens
        forwards[name_of_way(own)] += stats.target_forwards
    return tokens.total() / forwards.total(), {name: tokens[name] / forwards[name] for name in tokens}


def name(source: Source) -> str:
    """The name of a model: its id on the hub, or that of the folder that it came from."""
    called = str(source[0].name_or_path or type(source[0]).__name__) if isinstance(source, tuple) else str(source)
    return Path(called).name if Path(called).exists() else called


def digest(prompts: Sequence[str]) -> str:
    """A hash by which lists of prompts are compared, 16 hexadecimal digits."""
    return sha256(json.dumps(listed_texts("prompts", prompts)).encode()).hexdigest()[:16]


def check_out(given: Any) -> None:
    """Raises `InvalidInputError` unless `given` is a path."""
    if not isinstance(given, str | os.PathLike) or not str(given).strip():
        raise InvalidInputError(f"out is {shown(given)}; give the path to write to.")


def check_installed(*packages: str) -> None:
    """Raises `InvalidInputError` if a package is missing."""
    if not all(map(find_spec, packages)):
        raise InvalidInputError(f"Training needs {' and '.join(packages)}. Install with: {install('tune')}")


def check(settings: Any, **least: int) -> None:
    """Raises `InvalidInputError` for settings that make no sense. `least`: those that must be whole numbers, and the smallest
    that each may be.
    """
    for name, smallest in least.items():
        value = getattr(settings, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
            raise InvalidInputError(f"{name} is {shown(value)}; it must be a whole number, {smallest} or more.")
    sampled: float = settings.sampled
    if not (isinstance(sampled, Real) and 0 <= sampled <= 1):
        raise InvalidInputError(f"sampled is {shown(sampled)}; it is a share of the texts, from 0 to 1.")
    hours = getattr(settings, "hours", 1.0)
    if not (isinstance(hours, Real) and 0 < hours < inf):
        raise InvalidInputError(f"hours is {shown(hours)}; it must be a number above 0.")
    for name in ("temperature", "learning_rate"):
        number: float | None = getattr(settings, name, None)
        if number is not None and not (isinstance(number, Real) and 0 < number < inf):
            raise InvalidInputError(f"{name} is {shown(number)}; it must be above 0, or left out.")


def work_folder(work: Path, settings: Any, out: Path) -> Path:
    """Makes the folder `work` for the unfinished work on `out`, or returns the one of an earlier run. `settings`: a dataclass.

    Raises `InvalidInputError` unless the settings are those of that run.
    """
    file, mine = work / "settings.json", asdict(settings)
    if file.exists() and (before := json.loads(file.read_text(encoding="utf-8"))) != mine:
        changed = [key for key in mine if before.get(key) != mine[key]]
        raise InvalidInputError(
            f"{out} was started with other settings: {', '.join(changed)}. Use those again, or another name."
        )
    work.mkdir(parents=True, exist_ok=True)
    save(file, lambda half: half.write_text(json.dumps(mine, indent=2), encoding="utf-8"))
    return work


def work_of_draft(out: Path, settings: Any) -> Path:
    """The folder for the unfinished work on a draft. Raises `InvalidInputError` if `out` holds something else."""
    work = out / "work"
    if not (work / "settings.json").exists() and out.exists() and any(path for path in out.iterdir() if path != work):
        raise InvalidInputError(f"{out} is not empty. Choose another folder for the draft.")
    return work_folder(work, settings, out)


def finish(model: PreTrainedModel, tokenizer: Any, card: str, out: Path, work: Path) -> None:
    """Move the finished draft to its folder, file by file. The configuration comes last: without it there is no model."""
    done = work / "done"
    shutil.rmtree(done, ignore_errors=True)
    model.save_pretrained(done)
    tokenizer.save_pretrained(done)
    (done / "README.md").write_text(card, encoding="utf-8")
    for file in sorted(done.iterdir(), key=lambda file: file.name == "config.json"):
        os.replace(file, out / file.name)
    shutil.rmtree(work)
