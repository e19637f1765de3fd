"""How benchmarks run: the settings that texts are generated under, systems that take turns, and figures of their runs."""

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from itertools import zip_longest
from math import inf
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from xtok.assisted import XTokAssisted
from xtok.errors import InvalidInputError
from xtok.models.prompts import Prompt, prompt_ids
from xtok.models.timing import timed
from xtok.results.generation import Generation, Stats
from xtok.results.progress import bar
from xtok.serving.engine import Engine

ALONE, NONE, XTOK = "target alone", "xtok, no draft", "xtok"
_LEAST = 3
"""How many calls are measured at least."""
PLAIN: dict[str, Any] = {"do_sample": True, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0}
PLAIN |= {"eta_cutoff": 0.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
"""Sampling in which only a temperature shapes the distribution, whatever the target's generation config says."""


class Setting(NamedTuple):
    """A way to generate: the title for tables, and the arguments of `generate`."""

    title: str
    arguments: dict[str, Any]


SETTINGS = {
    "greedy": Setting("greedily", {"do_sample": False}),
    "penalty": Setting("greedily, repetition penalty 1.2", {"do_sample": False, "repetition_penalty": 1.2}),
    "sampled": Setting("sampled, T = 0.8", {**PLAIN, "temperature": 0.8}),
    "own": Setting("sampled, the model's own settings", {"do_sample": True}),
}
"""Greedy texts of small models repeat themselves, which prompt lookup gains most from; those of the others don't."""


def named_settings(names: Sequence[str]) -> dict[str, Setting]:
    """The settings with these names. Raises `InvalidInputError` for unknown names."""
    if unknown := [name for name in names if name not in SETTINGS]:
        raise InvalidInputError(f"setting is {unknown[0]!r}; use one of {', '.join(SETTINGS)}.")
    return {name: way for name, way in SETTINGS.items() if name in names}


class Counted(NamedTuple):
    """A round with guesses: ids of the target that were guessed, and how many of them were accepted."""

    guessed: int
    accepted: int


class Written(NamedTuple):
    """A run: the new ids of each text, the seconds and forward passes of all texts together, and xtok's stats of each text, and
    its rounds with guesses.

    A forward pass counts once for each text that shares it.
    """

    ids: list[list[int]]
    seconds: float
    target_forwards: int
    draft_forwards: int = 0
    stats: Sequence[Stats] = ()
    rounds: Sequence[Counted] = ()

    @property
    def tokens(self) -> int:
        """How many new ids all texts have."""
        return sum(map(len, self.ids))


System = Callable[..., Written]
"""A system: a function that continues `texts`, `size` of them at a time, with `seed` if they are sampled."""


def by_transformers(
    target: tuple[Any, Any], texts: Sequence[Prompt], *, size: int = 1, seed: int = 0, **arguments: Any
) -> Written:
    """Texts by transformers' own `generate`, in padded batches."""
    model, tokenizer = target
    new = list[list[int]]()
    torch.manual_seed(seed)
    with _counting(model) as forwards, _counting(arguments.get("assistant_model")) as drafted, timed() as span:
        for first in range(0, len(texts), size):
            rows = [torch.tensor(prompt_ids(tokenizer, text), dtype=torch.int64) for text in texts[first : first + size]]
            ids = pad_sequence(rows, batch_first=True, padding_side="left").to(model.device)
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left").to(model.device)
            new += model.generate(ids, attention_mask=mask, pad_token_id=0, **arguments)[:, ids.shape[1] :].tolist()
    return Written(new, span.seconds, sum(forwards), sum(drafted))


def by_xtok(xt: XTokAssisted, texts: Sequence[Prompt], *, size: int = 1, seed: int = 0, **arguments: Any) -> Written:
    """Texts by xtok's `generate`."""
    with timed() as span:
        made = xt.generate(list(texts), batch_size=size, progress=False, **_seeded(seed, arguments))
    return _written(made, span.seconds)


def by_engine(xt: XTokAssisted, texts: Sequence[Prompt], *, size: int = 1, seed: int = 0, **arguments: Any) -> Written:
    """Texts by an engine to which all are submitted at once."""
    with timed() as span, Engine(xt, batch_size=size) as engine:
        tickets = [engine.submit(text, **_seeded(seed, arguments)) for text in texts]
        made = [ticket.result() for ticket in tickets]
    return _written(made, span.seconds)


def _seeded(seed: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments | ({"seed": seed} if arguments["do_sample"] else {})


def _written(made: Sequence[Generation], seconds: float) -> Written:
    stats = [one.stats for one in made]
    forwards = sum(one.target_forwards for one in stats), sum(one.draft_forwards for one in stats)
    rounds = [Counted(one.proposed, one.accepted) for text in made for one in text.rounds if one.proposed]
    return Written([one.token_ids for one in made], seconds, *forwards, stats, rounds)


def first_difference(own: Sequence[int], other: Sequence[int]) -> tuple[int, int | None, int | None] | None:
    """The first position at which two texts differ, and both ids, None where a text has ended; None if all are equal."""
    return next(((i, mine, theirs) for i, (mine, theirs) in enumerate(zip_longest(own, other)) if mine != theirs), None)


def check_prompts(prompts: Sequence[Prompt]) -> None:
    """Raises `InvalidInputError` if there are none."""
    if not prompts:
        raise InvalidInputError("There are no prompts. Give a file with one prompt per line.")


@contextmanager
def _counting(model: Any) -> Iterator[list[int]]:
    """Yields a list to which each forward pass of `model` in the block adds its number of rows. `model` may be None."""
    rows: list[int] = []
    if model is None:
        yield rows
        return
    hook = model.register_forward_pre_hook(lambda _, __, given: rows.append(len(given["input_ids"])), with_kwargs=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield rows
    finally:
        hook.remove()


def uag(tokenizer: Any, draft: Any, guess_length: int | None) -> dict[str, Any]:
    """The arguments of transformers' universal assisted generation.

    It gets copies of draft and tokenizer, since it modifies its draft and keeps state for each tokenizer.
    """
    model = deepcopy(draft[0])
    if guess_length is not None:
        model.generation_config.num_assistant_tokens = guess_length
        model.generation_config.num_assistant_tokens_schedule = "constant"
        model.generation_config.assistant_confidence_threshold = 0.0
    return {"assistant_model": model, "tokenizer": copy(tokenizer), "assistant_tokenizer": copy(draft[1])}


class Runs(list[Written]):
    """What a system wrote, run by run, and its figures over all of them."""

    @property
    def stats(self) -> list[Stats]:
        """The stats of each text, from xtok; empty for other systems."""
        return [one for run in self for one in run.stats]

    @property
    def texts(self) -> int:
        return sum(len(run.ids) for run in self)

    @property
    def tokens(self) -> int:
        return sum(run.tokens for run in self)

    @property
    def seconds(self) -> float:
        return sum(run.seconds for run in self)

    @property
    def target_forwards(self) -> int:
        return sum(run.target_forwards for run in self)

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.target_forwards

    def speed(self, others: "Runs") -> float:
        """The median over runs of the seconds per new token of another system ÷ those of this one."""
        pairs = zip(self, others, strict=True)
        return median((other.seconds / other.tokens) / (run.seconds / run.tokens) for run, other in pairs)

    def total_speed(self, others: "Runs") -> float:
        """The same over all runs together: the seconds per new token of another system ÷ those of this one."""
        return (others.seconds / others.tokens) / (self.seconds / self.tokens)

    def identical(self, others: "Runs") -> int:
        """How many texts have the same ids as another system's in the same run."""
        pairs = (pair for run, other in zip(self, others, strict=True) for pair in zip(run.ids, other.ids, strict=True))
        return sum(own == theirs for own, theirs in pairs)

    @property
    def split(self) -> dict[str, float] | None:
        """The shares of xtok's time: both models' forward passes, the rest of guessing, alignment, and all else; else None."""
        stats, whole = self.stats, self.seconds
        if not stats:
            return None
        parts = {
            "target": sum(one.seconds_target for one in stats),
            "draft": sum(one.seconds_draft_forwards for one in stats),
            "guess": sum(one.seconds_draft - one.seconds_draft_forwards for one in stats),
            "align": sum(one.seconds_align for one in stats),
        }
        return {name: seconds / whole for name, seconds in parts.items()} | {"pick": 1 - sum(parts.values()) / whole}


def write_in_turns(
    systems: Mapping[str, System], calls: Sequence[Mapping[str, Any]], title: str, seconds: float = inf
) -> dict[str, Runs]:
    """Call all systems with the arguments of each call, in turns. Returns their runs. `title`: the progress bar's. `seconds`:
    after how many no further call begins, if `_LEAST` have been measured.

    Each call begins with the next system, so that none always runs after the same one. Runs of the first call are left out: in
    it, budgets learn what forward passes take, and graphs are captured.
    """
    runs, order = {name: Runs() for name in systems}, deque(systems)
    for number, arguments in enumerate(bar(calls, f"{title} (the first one warms up)")):
        if number > _LEAST and sum(found.seconds for found in runs.values()) > seconds:
            break
        for name in order:
            one = systems[name](**arguments)
            runs[name] += [one] if number else []
        order.rotate(-1)
    return runs
