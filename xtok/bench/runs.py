"""How benchmarks run: the settings that texts are generated under, the clock, and systems that take turns."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch

from xtok.assisted import XTokAssisted
from xtok.errors import InvalidInputError
from xtok.models.prompts import prompt_ids
from xtok.models.timing import timed
from xtok.results.generation import Generation
from xtok.results.progress import bar
from xtok.results.stats import Stats

K = TypeVar("K")
P = TypeVar("P")
R = TypeVar("R")
ALONE, NONE, XTOK = "target alone", "xtok, no draft", "xtok"
PLAIN: dict[str, Any] = {"do_sample": True, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0}
PLAIN |= {"eta_cutoff": 0.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
"""Sampling in which nothing but a temperature shapes the distribution, whatever the target's own configuration says."""


class Setting(NamedTuple):
    """The arguments of `generate` that texts are generated with, and what tables of them are headed by."""

    title: str
    arguments: dict[str, Any]


SETTINGS = {
    "greedy": Setting("greedily", {"do_sample": False}),
    "penalty": Setting("greedily, repetition penalty 1.2", {"do_sample": False, "repetition_penalty": 1.2}),
    "sampled": Setting("sampled, T = 0.8", {**PLAIN, "temperature": 0.8}),
}
"""Greedy texts of small models repeat themselves, which prompt lookup gains most from; those of the other two don't."""


def named_setting(name: str, penalty: float | None = None) -> Setting:
    """The setting of that name, with another repetition penalty if it has one. Raises `InvalidInputError` for other names."""
    if name not in SETTINGS:
        raise InvalidInputError(f"setting is {name!r}; use one of {', '.join(SETTINGS)}.")
    if name == "penalty" and penalty is not None:
        return Setting(f"greedily, repetition penalty {penalty:g}", {"do_sample": False, "repetition_penalty": penalty})
    return SETTINGS[name]


def named_settings(names: Sequence[str] | None, penalty: float | None) -> dict[str, Setting]:
    """The settings of these names, or all. Raises `InvalidInputError` for other names, and for a penalty without effect."""
    found = {name: named_setting(name, penalty) for name in names or SETTINGS}
    if penalty is not None and "penalty" not in found:
        raise InvalidInputError("--repetition-penalty has no effect without the setting penalty. Give --setting penalty, too.")
    return {name: found[name] for name in SETTINGS if name in found}


def check_prompts(prompts: Sequence[str]) -> None:
    """Raises `InvalidInputError` if there are none."""
    if not prompts:
        raise InvalidInputError("There are no prompts. Give a file with one prompt per line.")


@dataclass(frozen=True)
class Timed:
    """What a system made of one prompt. Only xtok gives a `generation`."""

    ids: list[int]
    seconds: float
    target_forwards: int
    draft_forwards: int
    generation: Generation | None


def by_transformers(target: tuple[Any, Any], prompt: str, **arguments: Any) -> Timed:
    """One prompt by transformers' own `generate`."""
    model, tokenizer = target
    ids = torch.tensor([prompt_ids(tokenizer, prompt)], device=model.device)
    with _counting(model) as forwards, _counting(arguments.get("assistant_model")) as drafted, timed() as span:
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    return Timed(output[0, ids.shape[1] :].tolist(), span.seconds, len(forwards), len(drafted), None)


def by_xtok(xt: XTokAssisted, prompt: str, **arguments: Any) -> Timed:
    """One prompt by xtok."""
    with timed() as span:
        generation = xt.generate(prompt, **arguments)
    stats = generation.stats
    return Timed(generation.token_ids, span.seconds, stats.target_forwards, stats.draft_forwards, generation)


@contextmanager
def _counting(model: Any) -> Iterator[list[None]]:
    """A list that grows by one with each forward of `model` inside the block."""
    calls: list[None] = []
    if model is None:
        yield calls
        return
    hook = model.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield calls
    finally:
        hook.remove()


def uag(tokenizer: Any, draft: Any, guess_length: int | None) -> dict[str, Any]:
    """The arguments of transformers' universal assisted generation.

    It changes its draft, and remembers by its tokenizers what it changed in which, so it gets copies.
    """
    model = deepcopy(draft[0])
    if guess_length is not None:
        model.generation_config.num_assistant_tokens = guess_length
        model.generation_config.num_assistant_tokens_schedule = "constant"
        model.generation_config.assistant_confidence_threshold = 0.0
    return {"assistant_model": model, "tokenizer": copy(tokenizer), "assistant_tokenizer": copy(draft[1])}


class Written(NamedTuple):
    """What a system made of a list of texts: the new ids of each, the seconds of all together, and xtok's stats of each."""

    ids: list[list[int]]
    seconds: float
    stats: list[Stats]


ListSystem = Callable[[Sequence[str], int, int], Written]
"""A system that gets texts, how many of them at a time, and a seed."""


def list_arguments(prompts: Sequence[str], setting: Setting, max_new_tokens: int) -> dict[str, Any]:
    """The arguments that lists of texts are generated with. End-of-text tokens end nothing, so that all have as much to do.

    Raises `InvalidInputError` without prompts.
    """
    check_prompts(prompts)
    return {**setting.arguments, "max_new_tokens": max_new_tokens, "eos_token_id": None}


def times_as_fast(own: Sequence[Written], others: Sequence[Written]) -> float:
    """How many times as fast as others a system is, over runs in turns: the median."""
    return median(other.seconds / run.seconds for run, other in zip(own, others, strict=True))


def list_by_xtok(xt: XTokAssisted, texts: Sequence[str], size: int, seed: int, arguments: dict[str, Any]) -> Written:
    """A list of texts by xtok, `size` at a time. `seed` is for sampled ones."""
    seeded = {"seed": seed} if arguments["do_sample"] else {}
    with timed() as span:
        made = xt.generate(list(texts), batch_size=size, progress=False, **seeded, **arguments)
    return Written([one.token_ids for one in made], span.seconds, [one.stats for one in made])


def list_by_transformers(target: tuple[Any, Any], texts: Sequence[str], size: int, seed: int, arguments: Any) -> Written:
    """A list of texts by transformers' own `generate`, in padded batches of `size`. `seed` is for sampled ones."""
    model, tokenizer = target
    new = list[list[int]]()
    torch.manual_seed(seed)
    with timed() as span:
        for first in range(0, len(texts), size):
            read = [prompt_ids(tokenizer, text) for text in texts[first : first + size]]
            longest = max(map(len, read))
            ids = torch.tensor([[0] * (longest - len(one)) + one for one in read], device=model.device)
            mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in read], device=model.device)
            new += model.generate(ids, attention_mask=mask, pad_token_id=0, **arguments)[:, longest:].tolist()
    return Written(new, span.seconds, [])


def each_prompt(
    systems: Mapping[str, Callable[[P, int], Timed]], prompts: Sequence[P], title: str, repeats: int = 1
) -> dict[str, list[Timed]]:
    """What systems make of all prompts, in turns on each. A system is called with a prompt and its number, its seed."""
    runs: dict[str, list[Timed]] = {name: [] for name in systems}
    for seed, prompt in bar(list(enumerate(prompts)) * repeats, title):
        for name, system in systems.items():
            runs[name].append(system(prompt, seed))
    return runs


def in_turns(systems: Mapping[K, Callable[[int], R]], repeats: int) -> dict[K, list[R]]:
    """What systems give, each called with the number of the run, in turns.

    The first run of each, in which budgets learn what forwards take and graphs are captured, is left out.
    """
    runs: dict[K, list[R]] = {name: [] for name in systems}
    for repeat in range(repeats + 1):
        for name, system in systems.items():
            runs[name].append(system(repeat))
    return {name: found[1:] for name, found in runs.items()}


def speed(runs: Sequence[Timed], alone: Sequence[Timed]) -> float:
    """The median over prompts of the seconds per new token of the target alone ÷ those of a system."""
    pairs = zip(runs, alone, strict=True)
    return median((other.seconds / len(other.ids)) / (run.seconds / len(run.ids)) for run, other in pairs)


def split(stats: Sequence[Stats], whole: float) -> dict[str, float]:
    """The shares of the `whole` of seconds: both models' forwards, the rest of guessing, alignment, and all else."""
    parts = {
        "target": sum(one.seconds_target for one in stats),
        "draft": sum(one.seconds_draft_forwards for one in stats),
        "guess": sum(one.seconds_draft - one.seconds_draft_forwards for one in stats),
        "align": sum(one.seconds_align for one in stats),
    }
    return {name: seconds / whole for name, seconds in parts.items()} | {"pick": 1 - sum(parts.values()) / whole}


def build_seconds(target: tuple[Any, Any], draft: tuple[Any, Any]) -> float:
    """How long it takes to make an instance of loaded models."""
    with timed() as span:
        XTokAssisted(target, draft)
    return span.seconds
