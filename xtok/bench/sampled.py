"""The benchmark of sampled generation: shared noise, the draft's mode, rejection, and transformers' assisted sampling."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from xtok.assisted import XTokAssisted
from xtok.bench.rows import Column
from xtok.bench.runs import PLAIN, System, by_transformers, by_xtok, check_prompts, uag, write_in_turns
from xtok.drafts.base import Draft, Drafter, Request
from xtok.drafts.policy.settings import Budget
from xtok.errors import InvalidInputError, install
from xtok.models.prompts import prompt_ids

try:
    from scipy.stats import chisquare
except ImportError as error:
    raise InvalidInputError(f"This benchmark needs SciPy. Install it with: {install('bench')}") from error

_LEAST = 5.0
TEMPERATURES = (0.5, 0.7, 1.0, 1.3)
SHARED, TREE, MODE, REJECTION = "shared noise", "shared noise, tree", "the draft's mode", "rejection"
ASSISTED = "transformers' assisted sampling"
_FEW = 6
"""How many ids are sampled to test the distribution of the first: transformers guesses nothing if only one is requested."""


@dataclass(frozen=True)
class SampledRow:
    """One system at one temperature. `failure`: the error if it raised one; then there are no figures. Noise is timed for xtok
    alone.
    """

    temperature: Annotated[float, Column("T")]
    system: Annotated[str, Column("")]
    tokens_per_forward: Annotated[float | None, Column(form=".2f")]
    surprise: Annotated[float | None, Column(form=".2f", note="mean negative log-likelihood by the target, in nats.")]
    excess: Annotated[float | None, Column(form="+.1f", note="surprise - entropy, in standard deviations; beyond 4: biased.")]
    p_value: Annotated[float | None, Column("first id, p", form=".3g", note="by exact probabilities; near 0: biased.")]
    noise_share: Annotated[float | None, Column("noise", form=".1%", note="the share of the time.")]
    failure: Annotated[str | None, Column()] = None


def compare_sampled(
    target: tuple[Any, Any],
    draft: tuple[Any, Any],
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    guess_length: int,
    draws: int = 400,
) -> list[SampledRow]:
    """Sample after every prompt by every system, at each temperature. Returns a row for each system and temperature.

    Only the temperature shapes the distribution. `draws`: how many texts of a few ids after one prompt are sampled to test
    whether the first id has the target's distribution. Raises `InvalidInputError` without prompts.
    """
    check_prompts(prompts)
    return [
        _measured(name, system, target, prompts, max_new_tokens, temperature, draws)
        for temperature in TEMPERATURES
        for name, system in _systems(target, draft, guess_length, {**PLAIN, "temperature": temperature}).items()
    ]


class _Greedy:
    """A draft that guesses a draft model's most probable text and ignores noise."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def start(self, request: Request) -> Drafter:
        return self._draft.start(replace(request, samples=False))


def _systems(target: Any, draft: Any, guess_length: int, arguments: dict[str, Any]) -> Mapping[str, System]:
    chain = Budget(guess_length, width=1, schedule="constant")
    tree = Budget(guess_length, width=4, nodes=32, schedule="constant")
    shared = XTokAssisted(target, draft, budget=chain)
    xts = {
        SHARED: shared,
        TREE: XTokAssisted(target, draft, budget=tree),
        MODE: XTokAssisted(target, [_Greedy(shared.setup.drafts[0])], budget=chain),
        REJECTION: XTokAssisted(target, draft, budget=chain, acceptance="rejection"),
    }
    assisted = partial(by_transformers, target, **arguments, **uag(target[1], draft, guess_length))
    return {name: partial(by_xtok, xt, **arguments) for name, xt in xts.items()} | {ASSISTED: assisted}


def _measured(
    name: str, system: System, target: Any, prompts: Sequence[str], max_new_tokens: int, temperature: float, draws: int
) -> SampledRow:
    title = f"T = {temperature}, {name}"
    texts = [{"texts": [text], "seed": seed, "max_new_tokens": max_new_tokens} for seed, text in enumerate(prompts)]
    firsts = [{"texts": prompts[:1], "seed": seed, "max_new_tokens": _FEW} for seed in range(draws)]
    try:
        samples, first = (write_in_turns({name: system}, [some[0], *some], title)[name] for some in (texts, firsts))
    except Exception as error:
        if name != ASSISTED:
            raise
        return SampledRow(temperature, name, None, None, None, None, None, failure=f"{type(error).__name__}: {error}")
    written, stats = [run.ids[0] for run in samples], samples.stats
    exact = [_probabilities(target, prompt, ids, temperature) for prompt, ids in zip(prompts, written, strict=True)]
    surprise, excess = _surprise(torch.cat(exact), [token for ids in written for token in ids])
    counts = torch.bincount(torch.tensor([run.ids[0][0] for run in first]), minlength=exact[0].shape[1])
    return SampledRow(
        temperature=temperature,
        system=name,
        tokens_per_forward=samples.tokens_per_forward,
        surprise=surprise,
        excess=excess,
        p_value=chi_square(counts, exact[0][0] * draws),
        noise_share=sum(one.seconds_noise for one in stats) / sum(one.seconds for one in stats) if stats else None,
    )


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """The p-value of Pearson's chi-square test of `counts` against the `expected` counts, (cells,) each, of any dtype.

    Cells with fewer than 5 expected are merged into one, as the test requires. If something impossible was counted, the
    p-value is 0; if there is only one cell, it is 1.
    """
    if bool(counts[expected == 0].any()):
        return 0.0
    order = expected.argsort(descending=True)
    counts, expected = counts.double()[order], expected.double()[order]
    large = int((expected >= _LEAST).sum())
    large -= large > 0 and float(expected[large:].sum()) < _LEAST
    if large == 0:
        return 1.0
    counts, expected = (torch.cat([cells[:large], cells[large:].sum()[None]]) for cells in (counts, expected))
    return float(chisquare(counts.numpy(), (expected * counts.sum() / expected.sum()).numpy()).pvalue)


@torch.no_grad()
def _probabilities(target: Any, prompt: str, ids: list[int], temperature: float) -> Tensor:
    """The target's own distribution at each of `ids`, (ids, vocabulary), float64."""
    before = prompt_ids(target[1], prompt)
    logits = target[0](torch.tensor([[*before, *ids]], device=target[0].device)).logits[0, len(before) - 1 : -1]
    found: Tensor = (logits.double() / temperature).softmax(dim=-1).cpu()
    return found


def _surprise(probabilities: Tensor, ids: list[int]) -> tuple[float, float]:
    """The mean surprise of `ids`, in nats, and how far it is from its expectation, in standard deviations.

    Given the ids before it, an id's expected surprise is the distribution's entropy. So the sums of the differences are a
    martingale, and their total divided by the root of the summed variances is about standard normal.
    """
    nats = -probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()
    entropy = (probabilities * nats).sum(dim=1)
    variance = (probabilities * nats**2).sum(dim=1) - entropy**2
    seen = nats[range(len(ids)), ids]
    return float(seen.mean()), float((seen - entropy).sum() / variance.sum().sqrt())
