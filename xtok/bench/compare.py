"""The target alone, transformers' universal assisted generation (UAG), and xtok, side by side in one process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import zip_longest
from typing import Annotated, Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from xtok.assisted import XTokAssisted
from xtok.bench.rows import Column
from xtok.bench.runs import (
    ALONE,
    NONE,
    XTOK,
    Runs,
    Setting,
    System,
    by_transformers,
    check_prompts,
    seconds_of,
    systems_of,
    uag,
    write_in_turns,
)
from xtok.drafts.given import without_a_model
from xtok.drafts.lookup import PromptLookup
from xtok.drafts.policy.settings import Budget
from xtok.models.cache import parameters
from xtok.models.prompts import Prompt, prompt_ids

LOOKUP, NO_MODEL, DRAFT = "xtok, lookup alone", "xtok, lookup and recycling", "xtok, draft alone"
HEADS, HEADS_ALONE = "xtok, heads in place of the draft", "xtok, heads alone"
CHAIN, TREE, REJECTION = "xtok, chain of {}", "xtok, tree of depth {}", "xtok, chain of {}, rejection sampling"
UAG, UAG_LENGTH, THEIR_LOOKUP = "UAG, its defaults", "UAG, length {}", "transformers' prompt lookup"
LENGTHS = (1, 2, 3, 8, 20)
_LOOKED_UP = 10
"""How many tokens transformers' prompt lookup guesses at a time."""
_TIME = "where the time goes"
_SYSTEMS = "UAG is transformers' universal assisted generation."
_CEILING = "the share of time in forward passes of both models: at 100%, everything else would be free."
_BANDWIDTH = "of memory bandwidth, the share at which the target's weights are read; at 100%, only guesses make it faster."
_MOVED, _READS = 1 << 30, 10
"""How many bytes are read to measure memory bandwidth, and how often; the median counts."""
_SURPRISE = "nats per id, by the target's own distribution at temperature 1; draws from it have about as many as it alone."


@dataclass(frozen=True)
class Row:
    """One system over all prompts.

    Args:
        identical: None for draws that differ by nature, those of transformers and of rejection sampling.
        near_ties, elsewhere: None unless near-ties are known for each text.
        acceptance_rate, split, ceiling: For xtok alone.
        replayed, of_bandwidth: On a GPU alone, the latter for one text at a time.
        surprise: For sampled texts alone.
    """

    system: Annotated[str, Column("", note=_SYSTEMS)]
    identical: Annotated[int | None, Column("same ids", of="prompts", note="as the target alone, by xtok or `model.generate`.")]
    as_transformers: Annotated[int | None, Column(of="prompts", note="greedy texts that are those of `model.generate`.")]
    near_ties: Annotated[int | None, Column(note="picks at which `model.generate`, with other shapes, may pick another id.")]
    elsewhere: Annotated[int | None, Column(note="greedy texts that leave those of `model.generate` at no near-tie.")]
    prompts: int
    new_tokens: int
    tokens_per_forward: Annotated[float, Column(form=".2f")]
    target_forwards: int
    draft_forwards: Annotated[int, Column()]
    acceptance_rate: Annotated[float | None, Column("accepted", form=".0%", note="the share of guessed ids.")]
    speed: Annotated[float, Column(form=".2f", note="times that of the target alone, per token: the median over prompts.")]
    total_speed: Annotated[float, Column("in all", form=".2f", note="the speed by the seconds of all prompts together.")]
    split: Annotated[dict[str, float] | None, Column(form=".1%", table=_TIME)]
    ceiling: Annotated[float | None, Column(form=".1%", table=_TIME, note=_CEILING)]
    tokens_per_second: Annotated[float, Column("tokens/s", form=",.1f", table=_TIME)]
    replayed: Annotated[float | None, Column(form=".0%", table=_TIME, note="the target's forward passes by CUDA graphs.")]
    of_bandwidth: Annotated[float | None, Column(form=".0%", table=_TIME, note=_BANDWIDTH)] = None
    surprise: Annotated[float | None, Column(form=".2f", note=_SURPRISE)] = None


def compare(
    target: tuple[Any, Any],
    draft: tuple[Any, Any] | None,
    prompts: Sequence[str],
    setting: Setting,
    *,
    max_new_tokens: int,
    guess_length: int,
    batch: int = 1,
) -> list[Row]:
    """Continue every prompt by every system in turn, `batch` of them at a time. Returns a row for each system.

    xtok runs without a draft, with prompt lookup alone, with that and token recycling, with its default drafts, with the draft
    alone, and with the draft in chains and trees of `guess_length` draft tokens; when sampling, also in chains with rejection
    sampling. UAG runs with its defaults, with guesses of constant `guess_length`, and of the length that is fastest on three of
    the prompts. Without a draft model, only those that need none run, and transformers' prompt lookup. What transformers
    refuses has no rows. A prompt's number is its seed. Raises `InvalidInputError` without prompts.
    """
    check_prompts(prompts)
    arguments, sampled = {**setting.arguments, "max_new_tokens": max_new_tokens}, setting.arguments["do_sample"]
    starts = range(0, len(prompts), batch)
    calls: list[dict[str, Any]] = [{"texts": prompts[at : at + batch], "size": batch, "seed": at} for at in starts]
    xts = ways(target, draft)
    if draft is not None:
        chain = Budget(guess_length, width=1, schedule="constant")
        tree = Budget(guess_length, width=4, nodes=32, schedule="constant")
        xts[CHAIN.format(guess_length)] = XTokAssisted(target, [draft], budget=chain)
        xts[TREE.format(guess_length)] = XTokAssisted(target, [draft], budget=tree)
        if sampled:
            xts[REJECTION.format(guess_length)] = XTokAssisted(target, [draft], budget=chain, acceptance="rejection")
    systems = systems_of(target, xts, arguments)
    if draft is None:
        looked_up = partial(by_transformers, target, prompt_lookup_num_tokens=_LOOKED_UP, **arguments)
        systems |= {THEIR_LOOKUP: looked_up} if is_supported(looked_up, calls[0]) else {}
    else:
        systems |= _assisted(target, draft, calls, guess_length, setting.title, arguments)
    runs = write_in_turns(systems, [calls[0], *calls], setting.title)
    rows = rows_of(target, prompts, runs, sampled=sampled)
    if target[0].device.type != "cuda" or batch > 1:
        return rows
    read = weight_bytes(target[0]) / bandwidth(target[0].device)
    return [replace(one, of_bandwidth=read * runs[one.system].target_forwards / runs[one.system].seconds) for one in rows]


def described(model: PreTrainedModel) -> str:
    """What a model runs on, and for a GPU what limits its speed without guesses."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    found = f"{model.device.type}, {str(model.dtype).removeprefix('torch.')}, {versions}"
    if model.device.type != "cuda":
        return found
    moved, read = bandwidth(model.device) / 1e9, weight_bytes(model) / 1e9
    name = torch.cuda.get_device_name(model.device)
    return f"{name}, {found}. Memory moves {moved:,.0f} GB/s, and a forward pass of the target reads {read:.1f} GB of weights"


def weight_bytes(model: PreTrainedModel) -> int:
    """How many bytes of weights a forward pass reads: all but the input embeddings."""
    return parameters(model) * model.dtype.itemsize


@cache
def bandwidth(device: torch.device) -> float:
    """The memory bandwidth of a device in bytes per second, measured by adding up numbers."""
    source = torch.rand(_MOVED // 4, dtype=torch.float32, device=device)
    return _MOVED / seconds_of(lambda: source.sum().item(), _READS)


def is_supported(system: System, call: Mapping[str, Any]) -> bool:
    """Whether transformers' own speculative decoding takes a pair: it refuses vocabularies of one size and batches, and
    fails on some pairs when sampling.
    """
    try:
        system(**call)
    except (ValueError, AttributeError):
        return False
    return True


def _assisted(
    target: Any, draft: Any, calls: Sequence[Mapping[str, Any]], guess_length: int, title: str, arguments: Mapping[str, Any]
) -> dict[str, System]:
    """UAG with its defaults, with guesses of `guess_length`, and of the length that is fastest on three calls. Empty if
    transformers doesn't take the pair.
    """
    lengths = {UAG: None, **{UAG_LENGTH.format(length): length for length in sorted({guess_length, *LENGTHS})}}
    assisted = {
        name: partial(by_transformers, target, **uag(target[1], draft, length), **arguments) for name, length in lengths.items()
    }
    if not is_supported(assisted[UAG], calls[0]):
        return {}
    tried = write_in_turns(assisted, [calls[0], *calls[:3]], f"lengths of guesses, {title}")
    best = min(list(lengths)[1:], key=lambda name: sum(run.seconds / run.tokens for run in tried[name]))
    return {name: assisted[name] for name in lengths if name in (UAG, UAG_LENGTH.format(guess_length), best)}


def ways(target: Any, draft: Any) -> dict[str, XTokAssisted]:
    """Instances of xtok that guess as much as pays: without a draft, with lookup, with lookup and recycling, with all drafts,
    and with the draft alone. If `draft` is None, the last two are left out.
    """
    found = {
        NONE: XTokAssisted(target),
        LOOKUP: XTokAssisted(target, PromptLookup()),
        NO_MODEL: XTokAssisted(target, without_a_model()),
    }
    return found if draft is None else {**found, XTOK: XTokAssisted(target, draft), DRAFT: XTokAssisted(target, [draft])}


def rows_of(target: tuple[Any, Any], prompts: Sequence[Prompt], runs: dict[str, Runs], *, sampled: bool) -> list[Row]:
    """A row for each system in `runs`, which generated a text after each of the prompts."""
    found = [_row(name, runs, sampled=sampled) for name in runs]
    if not sampled:
        return found
    nats = surprises(target, prompts, runs)
    return [replace(one, surprise=nats[one.system]) for one in found]


def _row(name: str, runs: dict[str, Runs], *, sampled: bool) -> Row:
    """The figures of one of the systems in `runs`, beside those of the target alone and of xtok without a draft."""
    own, shares = runs[name], runs[name].split
    ties = [one.near_ties for one in own.stats]
    known = bool(ties) and None not in ties
    proposed = sum(one.proposed for one in own.stats)
    return Row(
        system=name,
        identical=None if sampled and (not shares or "rejection" in name) else own.identical(runs[NONE if shares else ALONE]),
        as_transformers=None if sampled else own.identical(runs[ALONE]),
        near_ties=sum(len(some or ()) for some in ties) if known else None,
        elsewhere=_elsewhere(own, runs[ALONE]) if known and not sampled else None,
        prompts=own.texts,
        new_tokens=own.tokens,
        tokens_per_forward=own.tokens_per_forward,
        target_forwards=own.target_forwards,
        draft_forwards=sum(run.draft_forwards for run in own),
        acceptance_rate=sum(one.accepted for one in own.stats) / proposed if proposed else None,
        speed=own.speed(runs[ALONE]),
        total_speed=own.total_speed(runs[ALONE]),
        split=shares,
        ceiling=shares["target"] + shares["draft"] if shares else None,
        tokens_per_second=own.tokens / own.seconds,
        replayed=sum(one.target_replays for one in own.stats) / own.target_forwards or None,
    )


def _elsewhere(own: Runs, alone: Runs) -> int:
    """How many texts first differ from those of the target alone at a pick that isn't a near-tie."""
    new = [ids for run in own for ids in run.ids]
    expected = [ids for run in alone for ids in run.ids]
    count = 0
    for ids, others, stats in zip(new, expected, own.stats, strict=True):
        parting = next((at for at, (one, other) in enumerate(zip_longest(ids, others)) if one != other), None)
        count += parting is not None and parting not in {tie.position for tie in stats.near_ties or ()}
    return count


def surprises(target: tuple[Any, Any], prompts: Sequence[Prompt], runs: dict[str, Runs]) -> dict[str, float]:
    """The mean negative log-likelihood of each system's ids under the target's own distribution at temperature 1, in nats."""
    texts = {name: list(enumerate(tuple(ids) for run in found for ids in run.ids)) for name, found in runs.items()}
    distinct = {text for found in texts.values() for text in found}
    nats = {(number, ids): _nats(target, prompts[number], ids) for number, ids in distinct}
    return {name: sum(nats[text] for text in found) / runs[name].tokens for name, found in texts.items()}


@torch.no_grad()
def _nats(target: tuple[Any, Any], prompt: Prompt, ids: Sequence[int]) -> float:
    """The negative log-likelihood of all new ids after a prompt."""
    model, before = target[0], prompt_ids(target[1], prompt)
    given = torch.tensor([*before, *ids], device=model.device)
    logits = model(given[None]).logits[0, len(before) - 1 : -1]
    return float(cross_entropy(logits.float(), given[len(before) :], reduction="sum"))
