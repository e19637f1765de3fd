"""What all kinds of training share: prompts split in three, saved settings, and a folder for unfinished work."""

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from xtok.models.findings import weights_shown
from xtok.models.load import Source
from xtok.models.prompts import Chat
from xtok.models.timing import timed
from xtok.tune.writing import name_of_way, save, saved, way

SETTINGS = "settings.json"
"""The file in a folder for unfinished work that says what it is for."""
Settings = dict[str, Any]
"""The settings that decide the result of a training, as JSON values."""


def settings_of(arguments: Mapping[str, Any]) -> Settings:
    """The settings of a training, from its function's arguments: a model becomes its name, and prompts a digest."""
    models = {role: name(arguments[role]) for role in ("target", "draft") if role in arguments}
    prompts = None if arguments["prompts"] is None else digest(arguments["prompts"])
    return {key: value for key, value in arguments.items() if key != "out"} | models | {"prompts": prompts}


def writing_arguments(settings: Settings) -> dict[str, Any]:
    """The arguments of `write` and of `per_forward` that settings name: `max_new_tokens`, `sampled`, and a `temperature`."""
    return {key: settings[key] for key in ("max_new_tokens", "sampled", "temperature") if settings[key] is not None}


def split(prompts: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Three disjoint lists of prompts: those that decide when to stop, those that measure the gain, and those to train on.

    Raises `InvalidInputError` for fewer than three different prompts.
    """
    different = [prompt for prompt in dict.fromkeys(listed_texts("prompts", prompts)) if prompt.strip()]
    if len(different) < 3:
        raise InvalidInputError(f"There are only {len(different)} different prompts. Give at least 3, better hundreds.")
    step = min(10, max(3, len(different) // 2))
    kinds: tuple[list[str], list[str], list[str]] = ([], [], [])
    for i, prompt in enumerate(different):
        kinds[min(i % step, 2)].append(prompt)
    return kinds


def per_forward(
    target: Source, draft: Any, prompts: Sequence[str | Chat], *, sampled: float = 0.0, **arguments: Any
) -> tuple[float, dict[str, float]]:
    """New tokens per forward pass of the target with a draft's trees of depth 5: over all prompts, and by way of picking.

    `sampled`: the share of prompts that are sampled.
    """
    xt = XTokAssisted(target, draft, budget=Budget(5, width=4, schedule="constant"))
    found = {name: by[""] for name, by in measured({"": xt}, prompts, sampled=sampled, **arguments).items()}
    tokens, forwards = (sum(getattr(one, kind) for one in found.values()) for kind in ("tokens", "forwards"))
    return tokens / forwards, {name: one.tokens / one.forwards for name, one in found.items()}


@dataclass
class Count:
    """New tokens, forward passes of the target, and seconds."""

    tokens: int = 0
    forwards: int = 0
    seconds: float = 0.0


def measured(
    systems: Mapping[str, XTokAssisted], prompts: Sequence[str | Chat], *, sampled: float, **arguments: Any
) -> dict[str, dict[str, Count]]:
    """Counts of what systems, in turns, generate for all prompts, by way of picking and by system. `sampled`: the share of
    prompts that are sampled.
    """
    found: defaultdict[str, dict[str, Count]] = defaultdict(lambda: {system: Count() for system in systems})
    for i, prompt in enumerate(prompts):
        own = way(i, sampled, prompt)
        for one, xt in zip(found[name_of_way(own)].values(), systems.values(), strict=True):
            with timed() as span:
                stats = xt.generate(prompt, seed=i if own["do_sample"] else None, **own, **arguments).stats
            if stats.draft_error is not None:
                raise InvalidInputError(f"The draft or the heads fail when they guess for this target ({stats.draft_error}).")
            one.tokens, one.forwards = one.tokens + stats.new_tokens, one.forwards + stats.target_forwards
            one.seconds += span.seconds
    return found


def name(source: Source) -> str:
    """The name of a model: its id on the hub, or that of the folder that it came from."""
    called = str(source[0].name_or_path or type(source[0]).__name__) if isinstance(source, tuple) else str(source)
    return Path(called).resolve().name if Path(called).exists() else called


def fingerprint(model: PreTrainedModel, tokenizer: Any) -> str:
    """A hash of some of a model's weights and of its tokenizer's vocabulary, 16 hexadecimal digits. The same on any device;
    models of the same name differ in it.
    """
    weights = [(shape, dtype, sums) for shape, dtype, _, *sums in weights_shown(model)]
    return sha256(json.dumps([tokenizer.get_vocab(), weights], sort_keys=True).encode()).hexdigest()[:16]


def digest(prompts: Sequence[str]) -> str:
    """A hash by which lists of prompts are compared, 16 hexadecimal digits."""
    return sha256(json.dumps(listed_texts("prompts", prompts)).encode()).hexdigest()[:16]


def check_installed(*packages: str) -> None:
    """Raises `InvalidInputError` if a package is missing."""
    if not all(map(find_spec, packages)):
        raise InvalidInputError(f"Training needs {' and '.join(packages)}. Install with: {install('tune')}")


def check(settings: Settings, out: Any, *packages: str, **least: int) -> None:
    """Raises `InvalidInputError` if `out` is no path, a package is missing, or a setting is invalid.

    `least`: the settings that must be whole numbers, and the least value of each.
    """
    if not isinstance(out, str | os.PathLike) or not str(out).strip():
        raise InvalidInputError(f"out is {shown(out)}; give the path to write to.")
    check_installed(*packages)
    for name, smallest in least.items():
        value = settings[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
            raise InvalidInputError(f"{name} is {shown(value)}; it must be a whole number, {smallest} or more.")
    sampled: float = settings["sampled"]
    hours: float = settings.get("hours", 1.0)
    if not (isinstance(sampled, Real) and 0 <= sampled <= 1):
        raise InvalidInputError(f"sampled is {shown(sampled)}; it must be a share of the texts, from 0 to 1.")
    if not (isinstance(hours, Real) and 0 < hours < inf):
        raise InvalidInputError(f"hours is {shown(hours)}; it must be a number above 0.")
    for name in ("temperature", "learning_rate"):
        number: float | None = settings.get(name)
        if number is not None and not (isinstance(number, Real) and 0 < number < inf):
            raise InvalidInputError(f"{name} is {shown(number)}; it must be above 0, or left out.")


def work_folder(work: Path, settings: Settings, out: Path) -> Path:
    """Makes the folder `work` for the unfinished work on `out`, or finds that of an earlier run.

    Raises `InvalidInputError` if the earlier run had other settings, or its settings can't be read.
    """
    file = work / SETTINGS
    if file.exists():
        before = saved(file)
        if not isinstance(before, dict):
            raise InvalidInputError(f"{file} is damaged. Remove the folder {work} to begin anew.")
        if changed := [key for key in settings if before.get(key) != settings[key]]:
            raise InvalidInputError(
                f"{out} was started with other values of {', '.join(changed)}. Use the same values, or another path."
            )
    work.mkdir(parents=True, exist_ok=True)
    save(file, lambda half: half.write_text(json.dumps(settings, indent=2), encoding="utf-8"))
    return work


def work_of_draft(out: Path, settings: Settings) -> Path:
    """The folder for the unfinished work on a draft. Raises `InvalidInputError` if `out` holds something else."""
    work = out / "work"
    if not (work / SETTINGS).exists() and out.exists() and any(path for path in out.iterdir() if path != work):
        raise InvalidInputError(f"{out} is not empty. Choose another folder for the draft.")
    return work_folder(work, settings, out)


def card_of(
    settings: Settings,
    kind: str,
    made: str,
    table: Sequence[Sequence[str]],
    when: str,
    epochs: Sequence[float],
    **metadata: str,
) -> str:
    """The card of a draft or of heads, as `kind` says. `made`: what it is, in sentences. `table`: figures, below their titles.
    `epochs`: tokens per forward pass on the prompts that decided when to stop, measured `when`. `metadata`: of the card, as on
    the Hugging Face Hub.
    """
    head = "\n".join(f"{name}: {value}" for name, value in metadata.items())
    figures, given = _rows([table[0], ["---"] * len(table[0]), *table[1:]]), _rows(settings.items())
    return f"""---
{head}
---

# {kind} for {settings["target"]}

{made} Guesses don't change what the target generates.

On prompts that had no part in training:

{figures}

On the prompts that decided when to stop, {when}: {", ".join(f"{value:.2f}" for value in epochs)}. The best of them was kept.

| setting | |
|---|---|
{given}
"""


def _rows(rows: Iterable[Sequence[Any]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows if row[1] is not None)


def finish(model: PreTrainedModel, tokenizer: Any, card: str, out: Path, work: Path) -> None:
    """Move the finished draft to its folder, file by file. The configuration comes last: without it there is no model."""
    done = work / "done"
    shutil.rmtree(done, ignore_errors=True)
    model.save_pretrained(done)
    tokenizer.save_pretrained(done)
    (done / "README.md").write_text(card, encoding="utf-8")
    for file in sorted(done.iterdir(), key=lambda file: file.name == "config.json"):
        os.replace(file, out / file.name)
    remove(work)


def remove(work: Path) -> None:
    """Remove a folder for unfinished work, its settings last: after an interruption, they say what is left there."""
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != SETTINGS:
            path.unlink()
    shutil.rmtree(work)
