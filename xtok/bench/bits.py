"""What `stable=True` gives and costs: texts that differ from those of the target alone, and seconds, with it and without."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from xtok.assisted import XTokAssisted
from xtok.bench.compare import Setting, check_prompts
from xtok.results.generation import Generation
from xtok.results.progress import bar

_WARM = 8
"""How many texts are written before any are measured."""
Run = tuple[list[Generation], float]
"""The texts, and the seconds that writing them took."""


@dataclass(frozen=True)
class BitsRow:
    """A system that writes all texts, `texts` of them at a time.

    `differ`: how many have other ids than `XTokAssisted(target, stable=True)` writes without a draft, one text at a time;
    `written`: how many texts there are, with `picks` ids together. `tokens_per_second`: the median over repeats. `speed`:
    the median of the seconds of the same system without `stable` ÷ its own.
    """

    setting: str
    texts: int
    system: str
    stable: bool
    differ: int
    written: int
    picks: int
    tokens_per_second: float
    tokens_per_forward: float
    speed: float


def compare_bits(
    target: tuple[Any, Any],
    draft: tuple[Any, Any],
    prompts: Sequence[str],
    setting: Setting,
    sizes: Sequence[int],
    *,
    max_new_tokens: int,
    repeats: int = 1,
) -> list[BitsRow]:
    """Write a text behind each prompt by every system in turn, as `setting` has it, and give a row per system and size.

    Ends of text are no ends here. Sampled texts have another seed in each repeat. Raises `InvalidInputError` without prompts.
    """
    check_prompts(prompts)
    arguments = {**setting.arguments, "max_new_tokens": max_new_tokens, "eos_token_id": None, "progress": False}
    systems = {
        (name, stable): XTokAssisted(target, guesses, stable=stable)
        for name, guesses in (("no draft", None), ("draft", draft))
        for stable in (False, True)
    }
    alone = systems["no draft", True]
    runs: dict[tuple[int, str, bool], list[Run]] = {(size, *system): [] for size in sizes for system in systems}
    expected = list[list[list[int]]]()
    for size, name, stable in runs:
        _written(systems[name, stable], prompts[: max(_WARM, size)], size, 0, arguments)  # shapes are tried there
    for repeat in bar(range(repeats), f"bits, {setting.title}"):
        expected.append(_ids(_written(alone, prompts, 1, repeat, arguments)[0]))
        for size, name, stable in runs:
            runs[size, name, stable].append(_written(systems[name, stable], prompts, size, repeat, arguments))
    return [_row(setting.title, *key, runs, expected) for key in runs]


def _written(xt: XTokAssisted, prompts: Sequence[str], size: int, seed: int, arguments: dict[str, Any]) -> Run:
    start = perf_counter()
    seeded = {"seed": seed} if arguments["do_sample"] else {}
    made = xt.generate(list(prompts), batch_size=size, **seeded, **arguments)
    return made, perf_counter() - start


def _ids(made: list[Generation]) -> list[list[int]]:
    return [one.token_ids for one in made]


def _row(
    setting: str,
    size: int,
    name: str,
    stable: bool,
    runs: dict[tuple[int, str, bool], list[Run]],
    expected: list[list[list[int]]],
) -> BitsRow:
    own, plain = runs[size, name, stable], runs[size, name, False]
    made = [one for run, _ in own for one in run]
    pairs = [pair for (run, _), wanted in zip(own, expected, strict=True) for pair in zip(_ids(run), wanted, strict=True)]
    picks = sum(one.stats.new_tokens for one in made)
    return BitsRow(
        setting=setting,
        texts=size,
        system=name,
        stable=stable,
        differ=sum(ids != wanted for ids, wanted in pairs),
        written=len(made),
        picks=picks,
        tokens_per_second=picks / len(own) / median(seconds for _, seconds in own),
        tokens_per_forward=picks / sum(one.stats.target_forwards for one in made),
        speed=median(other / seconds for (_, seconds), (_, other) in zip(own, plain, strict=True)),
    )
