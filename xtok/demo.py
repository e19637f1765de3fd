"""The demonstration: the pair that ships beside its target alone."""

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import typer

from xtok.assisted import XTokAssisted
from xtok.budget import Budget
from xtok.console import EVERY
from xtok.generation import Generation
from xtok.models.load import load
from xtok.pair import DRAFT, TARGET, TUNED, prompts

DEMO_PROMPTS = 4
DEMO_TOKENS = 64
DEMO_DRAFTS = {"With an unrelated draft": DRAFT, "With that draft, tuned on what the target writes": TUNED}


def demonstrate() -> bool:
    """Generate a few held-out prompts, with and without each draft, and say whether every token was the target's own."""
    target = load(TARGET, "target")
    halves = {
        kind: XTokAssisted(target, draft, budget=Budget(5, width=4, schedule="constant")) for kind, draft in DEMO_DRAFTS.items()
    }
    torch.set_num_threads(1)  # models this small gain nothing from more, and lose a lot on a busy machine
    texts = prompts()[::EVERY][:DEMO_PROMPTS]
    results = []
    for kind, xt in halves.items():
        typer.echo(typer.style(f"{kind}\n", bold=True, underline=True))
        _compared(xt, texts[0])  # the first run of a model pays for its start
        half = [_compared(xt, text) for text in texts]
        for text, result in zip(texts, half, strict=True):
            _print_compared(text, result)
        _print_totals(half)
        results += half
    typer.echo(
        "What xtok saves is forwards of the target, so they are the figure to look at: with a large target they are nearly all "
        "of the time, whereas this tiny one costs little more than its draft and may well be faster alone."
    )
    return all(result.identical for result in results)


@dataclass(frozen=True)
class _Compared:
    """One prompt run by xtok and by the target alone. Times are seconds of the whole call."""

    generation: Generation
    identical: bool
    seconds: float
    seconds_alone: float


def _compared(xt: XTokAssisted, prompt: str) -> _Compared:
    start = perf_counter()
    alone = _alone(xt.model, xt.tokenizer, prompt)
    between = perf_counter()
    generation = xt.generate(prompt, max_new_tokens=DEMO_TOKENS, do_sample=False)
    return _Compared(generation, generation.token_ids == alone, perf_counter() - between, between - start)


def _alone(model: Any, tokenizer: Any, prompt: str) -> list[int]:
    """The new ids that transformers' own greedy search gives, without xtok."""
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.device)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=DEMO_TOKENS, do_sample=False)
    new: list[int] = output[0, ids.shape[1] :].tolist()
    return new


def _print_compared(prompt: str, result: _Compared) -> None:
    stats = result.generation.stats
    typer.echo(typer.style(prompt, bold=True) + result.generation.text)
    typer.echo(f"  identical to the target alone: {'yes' if result.identical else 'NO'}")
    typer.echo(f"  tokens per forward of the target: {stats.tokens_per_forward:.2f} (the target alone: 1)")
    typer.echo(f"  seconds: {result.seconds:.2f} (the target alone: {result.seconds_alone:.2f})\n")


def _print_totals(results: list[_Compared]) -> None:
    stats = [result.generation.stats for result in results]
    tokens, forwards = sum(one.new_tokens for one in stats), sum(one.target_forwards for one in stats)
    same = sum(result.identical for result in results)
    seconds, alone = sum(result.seconds for result in results), sum(result.seconds_alone for result in results)
    typer.echo(
        f"{same} of {len(results)} identical; {tokens} tokens in {forwards} forwards of the target "
        f"({tokens / forwards:.2f} per forward); {seconds:.2f} s with the draft, {alone:.2f} s alone.\n"
    )
