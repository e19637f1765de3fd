"""What a GPU makes of a large pair: the target alone beside what its memory allows, a level of the draft, and many texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from gc import collect
from itertools import cycle, islice
from statistics import median
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from xtok.assisted import XTokAssisted
from xtok.bench.batches import padded
from xtok.bench.compare import ALONE, NONE, XTOK, Setting, check_prompts, in_turns, split
from xtok.bench.widen import Shape
from xtok.drafts.policy.settings import Budget
from xtok.models.forwards import wait_for
from xtok.models.graphs import takes_graphs
from xtok.models.load import parameters
from xtok.models.timing import timed
from xtok.results.progress import bar
from xtok.results.stats import Stats

LARGE, SMALL = Shape(5120, 40, 13824, 40, 50688), Shape(768, 12, 3072, 12, 52096)
"""The shapes of llm-jp-13B, of 13.2e9 parameters, and of open-calm-small, of 165e6."""
MOVED = 1 << 32
"""How many bytes are read to see how fast memory is."""
_RUNS = 10
_LEAST, _BATCHES = 8, 2
"""A list has 8 texts, or two batches where those are more. In xtok's, the next text begins where one ends."""
_LEVELS = Budget(5, width=4, nodes=32, schedule="constant")
"""As much is guessed in every round, so that the draft has the same forwards whatever they cost."""


@dataclass(frozen=True)
class ListRow:
    """A system that writes a list of texts, `texts` of them at a time, with `graphs` (`XTokAssisted(compile=...)`) or without.

    `tokens_per_second`: of all texts, the median over repeats. `speed`: the median of the seconds of the target alone, by
    transformers' padded batches ÷ its own. `tokens_per_forward`: of a text, on the average. `differ`: how many of the `written`
    texts have other ids than transformers writes one text at a time. `replayed`: the share of the target's forwards that were
    replayed graphs. `of_bandwidth`, of systems without a draft that write one
    text at a time: the seconds that reading the weights for each token takes at the measured bandwidth ÷ its own. `split`: the
    shares of the wall clock that parts take, and `of_ceiling` that of both models' forwards: how near it is to a system in
    which all else is free. Both are known for xtok alone.
    """

    texts: int
    system: str
    graphs: bool
    tokens_per_second: float
    speed: float
    tokens_per_forward: float
    differ: int
    written: int
    replayed: float
    of_bandwidth: float | None
    split: dict[str, float] | None
    of_ceiling: float | None


@dataclass(frozen=True)
class LevelRow:
    """The draft in trees of 5 levels, 4 nodes of each of which are continued, of one text at a time.

    Medians over texts of milliseconds for each of its forwards: `forward` is the forward alone, `level` all of guessing but
    alignment.
    """

    graphs: bool
    forward: float
    level: float


@dataclass(frozen=True)
class GpuFigures:
    """What was found, and on what.

    `bandwidth`: bytes per second. `read`: the bytes of weights that a forward of the target reads, all but the rows that ids
    are looked up in. `limit`: how many tokens per second of one text that allows without a draft.
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


class _Run(NamedTuple):
    """The new ids of each text, what writing them took, and what xtok tells of each."""

    ids: list[list[int]]
    seconds: float
    stats: list[Stats]


_System = Callable[[Sequence[str], int, int], _Run]
"""Of texts, how many at a time, and the number of the run."""
_Runs = dict[tuple[str, bool], list[_Run]]
"""Of each system, with graphs or without."""


def bandwidth(device: torch.device, size: int = MOVED) -> float:
    """How many bytes per second a device reads when it adds `size` of them up, or reads and writes, both counted, when it
    copies them: whichever is more.
    """
    source = torch.rand(size // 4, dtype=torch.float32, device=device)
    copy = torch.empty_like(source)
    return size * max(1 / _seconds(source.sum), 2 / _seconds(lambda: copy.copy_(source)))


def _seconds(run: Callable[[], Tensor]) -> float:
    """What it takes on its device: the median of ten runs behind a first one."""
    wait_for(run())
    seconds = []
    for _ in range(_RUNS):
        with timed() as took:
            wait_for(run())
        seconds.append(took.seconds)
    return median(seconds)


def compare_on_gpu(
    target: tuple[Any, Any],
    draft: tuple[Any, Any],
    prompts: Sequence[str],
    setting: Setting,
    sizes: Sequence[int],
    *,
    max_new_tokens: int,
    repeats: int = 3,
    moved: int = MOVED,
) -> GpuFigures:
    """Write lists by every system in turn, `sizes` of texts at a time, as `setting` has it, and time levels of the draft.

    It runs wherever the models are, on a CPU, too, which has no graphs. Ends of text are no ends here. `moved`: how many bytes
    are read to see how fast memory is. Raises `InvalidInputError` without prompts.
    """
    check_prompts(prompts)
    arguments = {**setting.arguments, "max_new_tokens": max_new_tokens, "eos_token_id": None}
    model = target[0]
    measured, read = bandwidth(model.device, moved), parameters(model) * model.dtype.itemsize
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
    """The rows of all sizes. `least`: how many seconds reading the weights for a token takes."""
    alone, rows = dict[str, list[int]](), list[ListRow]()
    for size in bar(sizes, "lists"):
        texts = list(islice(cycle(prompts), max(_LEAST, _BATCHES * size)))
        for text in dict.fromkeys(texts):
            if text not in alone:
                alone[text] = padded(target, [text], 1, arguments)[0]
        systems = _systems(target, draft, arguments)
        runs = in_turns({name: partial(system, texts, size) for name, system in systems.items()}, repeats)
        rows += [_row(*system, size, runs, [alone[text] for text in texts], least) for system in runs]
    return rows


def _systems(target: Any, draft: Any, arguments: dict[str, Any]) -> dict[tuple[str, bool], _System]:
    """Those of one size of a batch. Caches of another's, which graphs keep, would take the memory that these need."""
    collect()
    found: dict[tuple[str, bool], _System] = {(ALONE, False): _transformers(target, arguments)}
    for name, guesses in ((NONE, None), (XTOK, draft)):
        for graphs in (False, True):
            found[name, graphs] = _xtok(target, guesses, arguments, graphs=graphs)
    return found


def _transformers(target: Any, arguments: dict[str, Any]) -> _System:
    def system(texts: Sequence[str], size: int, repeat: int) -> _Run:
        with timed() as took:
            ids = padded(target, texts, size, arguments)
        return _Run(ids, took.seconds, [])

    return system


def _xtok(target: Any, draft: Any, arguments: dict[str, Any], *, graphs: bool, budget: Budget | None = None) -> _System:
    xt = XTokAssisted(target, draft, budget=budget, compile=graphs and takes_graphs(target[0]))

    def system(texts: Sequence[str], size: int, repeat: int) -> _Run:
        with timed() as took:
            made = xt.generate(list(texts), batch_size=size, progress=False, **arguments)
        return _Run([one.token_ids for one in made], took.seconds, [one.stats for one in made])

    return system


def _row(system: str, graphs: bool, size: int, runs: _Runs, alone: list[list[int]], least: float) -> ListRow:
    own, beside = runs[system, graphs], runs[ALONE, False]
    stats = [one for run in own for one in run.stats]
    ids = [pair for run in own for pair in zip(run.ids, alone, strict=True)]
    tokens, whole = sum(len(one) for one, _ in ids), sum(run.seconds for run in own)
    parts = split(stats, whole) if stats else None
    speed = tokens / len(own) / median(run.seconds for run in own)
    return ListRow(
        texts=size,
        system=system,
        graphs=graphs,
        tokens_per_second=speed,
        speed=median(other.seconds / run.seconds for run, other in zip(own, beside, strict=True)),
        tokens_per_forward=tokens / sum(one.target_forwards for one in stats) if stats else 1.0,
        replayed=sum(one.target_replays for one in stats) / sum(one.target_forwards for one in stats) if stats else 0.0,
        differ=sum(one != other for one, other in ids),
        written=len(ids),
        of_bandwidth=least * speed if size == 1 and system != XTOK else None,
        split=parts,
        of_ceiling=parts["target"] + parts["draft"] if parts else None,
    )


def _levels(target: Any, draft: Any, texts: Sequence[str], arguments: dict[str, Any], repeats: int) -> list[LevelRow]:
    collect()
    systems = {graphs: _xtok(target, [draft], arguments, graphs=graphs, budget=_LEVELS) for graphs in (False, True)}
    rows = []
    for graphs, runs in in_turns({graphs: partial(one, texts, 1) for graphs, one in systems.items()}, repeats).items():
        stats = [one for run in runs for one in run.stats if one.draft_forwards]
        forward = median(1000 * one.seconds_draft_forwards / one.draft_forwards for one in stats)
        level = median(1000 * one.seconds_draft / one.draft_forwards for one in stats)
        rows.append(LevelRow(graphs, forward, level))
    return rows
