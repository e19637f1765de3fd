"""Benchmarks of a large pair on a GPU: the target's speed as a share of what memory allows, draft levels, and lists."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from gc import collect
from itertools import cycle, islice
from statistics import median
from typing import Annotated, Any

import torch
import transformers

from xtok.assisted import XTokAssisted
from xtok.bench.rows import Column
from xtok.bench.runs import (
    ALONE,
    NONE,
    XTOK,
    Runs,
    Setting,
    System,
    Written,
    by_transformers,
    by_xtok,
    check_prompts,
    seconds_of,
    write_in_turns,
)
from xtok.bench.widen import Shape
from xtok.drafts.policy.settings import Budget
from xtok.models.cache import parameters
from xtok.models.forwards import wait_for
from xtok.models.graphs import takes_graphs

LARGE, SMALL = Shape(5120, 40, 13824, 40, 50688), Shape(768, 12, 3072, 12, 52096)
"""The shapes of llm-jp-13B, of 13.2e9 parameters, and of open-calm-small, of 165e6."""
MOVED = 1 << 32
"""How many bytes are read to measure memory bandwidth."""
_RUNS = 10
"""How often they are read; the median counts."""
_LEAST, _BATCHES = 8, 2
"""A list has 8 texts, or two batches if those are more. In xtok's, the next text begins when one ends."""
_LEVELS = Budget(5, width=4, nodes=32, schedule="constant")
"""A constant budget, so that the draft has the same forward passes whatever they cost."""


@dataclass(frozen=True)
class ListRow:
    """A system that writes a list of texts, `texts` of them at a time, with `graphs` (`XTokAssisted(compile=...)`) or without.

    `of_bandwidth`: for systems without a draft that write one text at a time. `split`, `of_ceiling`: for xtok alone.
    """

    texts: Annotated[int, Column("at a time")]
    system: Annotated[str, Column("")]
    graphs: Annotated[bool, Column()]
    replayed: Annotated[float, Column(form=".0%", note="the share of the target's forwards that were replayed as CUDA graphs.")]
    tokens_per_second: Annotated[float, Column("tokens/s", form=",.1f", note="of all texts, the median over repeats.")]
    speed: Annotated[float, Column(form=".2f", note="how many times as fast as the target alone, by transformers' batches.")]
    tokens_per_forward: Annotated[float, Column(form=".2f")]
    differ: Annotated[int, Column(of="written", note="texts with other ids than transformers' own, one at a time.")]
    written: int
    of_bandwidth: Annotated[float | None, Column(form=".2f", note="of the tokens/s that memory allows. Goal: 0.8.")]
    split: Annotated[dict[str, float] | None, Column(form=".1%")]
    of_ceiling: Annotated[float | None, Column(form=".2f", note="the share of both models' forward passes. Goal: 0.9.")]


@dataclass(frozen=True)
class LevelRow:
    """The draft's time per level, in trees of 5 levels with 4 nodes of each continued, for one text at a time: medians over
    texts.
    """

    graphs: Annotated[bool, Column()]
    forward: Annotated[float, Column("ms of a forward", form=".2f", note="of the draft.")]
    level: Annotated[float, Column("ms with all of guessing", form=".2f", note="of a level, all but alignment.")]


@dataclass(frozen=True)
class GpuFigures:
    """All figures, and what they were measured on.

    `bandwidth`: the memory's, in bytes per second. `read`: how many bytes of weights a forward pass of the target reads: all
    but the input embeddings. `limit`: how many tokens per second that allows for one text without a draft.
    """

    device: str
    torch: str
    transformers: str
    dtype: str
    parameters: dict[str, int]
    bandwidth: float
    read: int
    limit: float
    setting: str
    lists: list[ListRow]
    levels: list[LevelRow]

    def __str__(self) -> str:
        """What the figures were measured on."""
        target, draft = (f"{self.parameters[role] / 1e9:.2f} B" for role in ("target", "draft"))
        return (
            f"{self.device}, {self.dtype}, torch {self.torch}, transformers {self.transformers}; {self.setting}. Forwards read "
            f"{target} parameters of the target and {draft} of the draft. Memory moves {self.bandwidth / 1e9:,.0f} GB/s, and a "
            f"token takes {self.read / 1e9:.1f} GB of the target's weights, so there are at most {self.limit:.1f} tokens/s of "
            "a text without a draft."
        )


def bandwidth(device: torch.device) -> float:
    """The memory bandwidth of a device in bytes per second: reading while it adds up `MOVED` bytes, or reading and writing
    while it copies them, whichever is faster.
    """
    source = torch.rand(MOVED // 4, dtype=torch.float32, device=device)
    copy = torch.empty_like(source)
    added = seconds_of(lambda: wait_for(source.sum()), _RUNS)
    copied = seconds_of(lambda: wait_for(copy.copy_(source)), _RUNS)
    return MOVED * max(1 / added, 2 / copied)


def compare_on_gpu(
    target: tuple[Any, Any],
    draft: tuple[Any, Any],
    prompts: Sequence[str],
    setting: Setting,
    sizes: Sequence[int],
    *,
    max_new_tokens: int,
    repeats: int = 3,
) -> GpuFigures:
    """Write lists of texts by every system in turn, at each of the batch `sizes`, and time levels of the draft.

    It runs on any device; a CPU has no graphs. End-of-text tokens are ignored. Raises `InvalidInputError` without prompts.
    """
    check_prompts(prompts)
    arguments = {**setting.arguments, "max_new_tokens": max_new_tokens, "eos_token_id": None}
    model = target[0]
    measured, read = bandwidth(model.device), parameters(model) * model.dtype.itemsize
    return GpuFigures(
        device=torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else str(model.device),
        torch=torch.__version__,
        transformers=transformers.__version__,
        dtype=str(model.dtype).removeprefix("torch."),
        parameters={"target": parameters(model), "draft": parameters(draft[0])},
        bandwidth=measured,
        read=read,
        limit=measured / read,
        setting=setting.title,
        lists=_lists(target, draft, prompts, sizes, arguments, repeats, read / measured),
        levels=_levels(target, draft, prompts[:_LEAST], arguments, repeats),
    )


def _lists(
    target: Any, draft: Any, prompts: Sequence[str], sizes: Sequence[int], arguments: dict[str, Any], repeats: int, least: float
) -> list[ListRow]:
    """The rows of all sizes. `least`: the seconds that reading the weights takes for each token."""
    rows = list[ListRow]()
    alone = dict(zip(prompts, by_transformers(target, prompts, **arguments).ids, strict=True))
    for size in sizes:
        texts = list(islice(cycle(prompts), max(_LEAST, _BATCHES * size)))
        collect()  # caches for another size, which graphs keep, would take the memory that these need
        systems: dict[tuple[str, bool], System] = {(ALONE, False): partial(by_transformers, target, **arguments)}
        for name, guesses in ((NONE, None), (XTOK, draft)):
            systems |= {(name, graphs): _xtok(target, guesses, arguments, graphs=graphs) for graphs in (False, True)}
        calls = [{"texts": texts, "size": size, "seed": repeat} for repeat in range(repeats + 1)]
        runs = write_in_turns(systems, calls, f"lists, {size} texts at a time")
        del systems
        truth = [Written([alone[text] for text in texts], 0, 0)] * repeats
        rows += [_row(size, key, runs, truth, least) for key in runs]
    return rows


def _xtok(target: Any, draft: Any, arguments: dict[str, Any], *, graphs: bool, budget: Budget | None = None) -> System:
    xt = XTokAssisted(target, draft, budget=budget, compile=graphs and takes_graphs(target[0]))
    return partial(by_xtok, xt, **arguments)


def _row(size: int, key: tuple[str, bool], runs: dict[tuple[str, bool], Runs], truth: list[Written], least: float) -> ListRow:
    """The row of one system. `truth`: the texts of transformers' own `generate`, one at a time. `least`: as for `_lists`."""
    own, (name, graphs) = runs[key], key
    parts, rate = own.split, own.tokens_per_second
    return ListRow(
        texts=size,
        system=name,
        graphs=graphs,
        replayed=sum(one.target_replays for one in own.stats) / sum(run.target_forwards for run in own),
        tokens_per_second=rate,
        speed=own.speed(runs[ALONE, False]),
        tokens_per_forward=own.tokens_per_forward,
        differ=own.texts - own.identical(truth),
        written=own.texts,
        of_bandwidth=least * rate if size == 1 and name != XTOK else None,
        split=parts,
        of_ceiling=parts["target"] + parts["draft"] if parts else None,
    )


def _levels(target: Any, draft: Any, texts: Sequence[str], arguments: dict[str, Any], repeats: int) -> list[LevelRow]:
    collect()
    systems = {graphs: _xtok(target, [draft], arguments, graphs=graphs, budget=_LEVELS) for graphs in (False, True)}
    rows = []
    for graphs, runs in write_in_turns(systems, [{"texts": texts}] * (repeats + 1), "levels of the draft").items():
        stats = [one for one in runs.stats if one.draft_forwards]
        forward = median(1000 * one.seconds_draft_forwards / one.draft_forwards for one in stats)
        level = median(1000 * one.seconds_draft / one.draft_forwards for one in stats)
        rows.append(LevelRow(graphs, forward, level))
    return rows
