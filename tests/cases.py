"""The strategy of the laws of identity: targets, drafts, prompts, arguments, a caller's modes, and ways to ask for texts."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from properties import Drawn, Noise, arguments, fresh, honoured, misleading, padded, samplings
from scripted import ScriptedDrafter
from worlds import ARCHITECTURES, CORPUS, KINDS, TREE, Kind, Pair, budgets, make_target_expensive, model_of, texts

from xtok import Budget, Context, Engine, Generation, HeadsDrafter, PromptLookup, TokenRecycling, Tree, XTokAssisted
from xtok.align.tokenbytes import token_bytes
from xtok.decoding import pick
from xtok.drafts.heads import described, save_heads
from xtok.drafts.medusa import MedusaHeads
from xtok.drafts.sequential import SequentialHeads, sequential_config
from xtok.drafts.tree import Trie
from xtok.models.prompts import prompt_ids
from xtok.sampling import draws

HALVES = (torch.bfloat16, torch.float16)
LENGTH = 12


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def switched(switch: Callable[[bool], Any]) -> Iterator[None]:
    switch(True)
    try:
        yield
    finally:
        switch(False)


@contextmanager
def seeded() -> Iterator[None]:
    """Another state of the global generator, which must be what it was afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(77)
        state = torch.get_rng_state()
        yield
        assert torch.equal(torch.get_rng_state(), state)


BREAK_BIASES = ("float64", "float16", "bfloat16")
"""Modes under which transformers' own processor of `sequence_bias` fails."""
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "float64": lambda: default_dtype(torch.float64),
    "float16": lambda: default_dtype(torch.float16),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
    "meta by default": lambda: default_device("meta"),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "gradients": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": lambda: switched(torch.use_deterministic_algorithms),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "no denormals": lambda: switched(torch.set_flush_denormal),
    "another seed": seeded,
}
"""Modes of torch under which a caller may call."""


def nonsense(context: Context) -> Tree:
    random, trie = Random(len(context.ids)), Trie()
    for _ in range(3):
        trie.add([random.randrange(3, 40) for _ in range(4)], 0.3)
    return trie.best(len)


def raises_late(context: Context) -> list[int]:
    if len(context.ids) % 3 == 0:
        raise RuntimeError("simulated")
    return [5]


@cache
def heads_file(target: Kind, dtype: torch.dtype, kind: str, window: int = 8) -> Path:
    """Untrained heads for a target: Medusa's, or sequential ones, whose guesses are as good as any."""
    model, tokens = model_of(target, dtype=dtype)
    known, path = described(model, token_bytes(tokens)), Path(mkdtemp()) / "heads"
    torch.manual_seed(0)
    if kind == "Medusa":
        save_heads(MedusaHeads(3, 32), known, path)
        return path
    ids, layers = torch.randperm(model.config.vocab_size)[:40].sort().values, (0, 1, -1)
    config = sequential_config(len(ids), 32, 48, 2, 1, window)
    made = SequentialHeads(config, len(layers), model.get_input_embeddings(), model.get_output_embeddings(), ids)
    for weight in made.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    save_heads(made, replace(known, layers=layers, window=window), path)
    return path


@dataclass(frozen=True)
class Case:
    """What is asked for, and what guesses.

    `draft`: the kind of the draft model, `window` its positions. `noise`, `branches`: how the draft that knows what comes is
    wrong. `drawn`: arguments of `generate`. `prediction`: what the caller expects; None for nothing, "" for the truth. `mode`:
    of torch, one of `MODES`. `at_once`: whether picks are made after all nodes at once, as on an accelerator.
    """

    target: Kind
    dtype: torch.dtype = torch.float64
    prompts: tuple[str, ...] = ("吾輩は",)
    drafts: tuple[str, ...] = ("misleading",)
    draft: Kind = ("GPTNeoX", "byte-level BPE", 1)
    window: int = 512
    noise: Noise = field(default_factory=list)
    branches: int = 1
    budget: Budget = TREE
    drawn: Drawn = field(default_factory=dict)
    expensive: bool = False
    batch_size: int = 2
    stable: bool | None = None
    prediction: str | None = None
    mode: str = "none"
    at_once: bool = False

    @property
    def pair(self) -> Pair:
        return model_of(self.target, dtype=self.dtype)

    @property
    def asked(self) -> Drawn:
        return {"max_new_tokens": LENGTH, "pad_token_id": 0, **honoured(self.pair[1], self.drawn)}

    def ids(self) -> list[list[int]]:
        """Of its prompts."""
        return [prompt_ids(self.pair[1], prompt, split_special_tokens=False) for prompt in self.prompts]

    @contextmanager
    def under_mode(self) -> Iterator[None]:
        """Under autocast, a model in another precision than float64 would be another model, so to speak."""
        mode = MODES[self.mode if self.mode != "autocast" or self.dtype == torch.float64 else "none"]
        with pytest.MonkeyPatch.context() as patch, mode():
            for module in (draws, pick) if self.at_once else ():
                patch.setattr(module, "on_host", lambda device: False)
            yield

    def helped(self, truths: list[list[int]]) -> XTokAssisted:
        """An instance with its drafts. `truths`: what they may know."""
        known = dict(zip(map(tuple, self.ids()), truths, strict=True))

        def coming(ids: Any) -> list[int]:
            return next((new[len(ids) - len(old) :] for old, new in known.items() if tuple(ids[: len(old)]) == old), [])

        made: dict[str, Callable[[], Any]] = {
            "misleading": lambda: misleading(coming, self.noise, self.branches),
            "model": lambda: model_of(self.draft, copy=1, window=self.window),
            "itself": lambda: model_of(self.target, copy=1, dtype=self.dtype),
            "lookup": lambda: PromptLookup(memory=1 << 20),
            "corpus": lambda: PromptLookup([*self.prompts, *CORPUS[:2]]),
            "recycling": TokenRecycling,
            "Medusa": lambda: HeadsDrafter(heads_file(self.target, self.dtype, "Medusa")),
            "sequential": lambda: HeadsDrafter(heads_file(self.target, self.dtype, "sequential")),
            "nonsense": lambda: ScriptedDrafter(nonsense),
            "raises": lambda: ScriptedDrafter(raises_late),
        }
        drafts = [made[name]() for name in self.drafts]
        return make_target_expensive(XTokAssisted(self.pair, drafts, budget=self.budget, stable=self.stable), self.expensive)


MAKES = ["misleading", "misleading", "model", "itself", "lookup", "corpus", "recycling", "Medusa", "sequential", "nonsense"]


def cases(dtypes: tuple[torch.dtype, ...], *, sampled: bool) -> st.SearchStrategy[Case]:
    """Cases in one of some precisions, greedy or sampled."""

    def drawn(first: Drawn, second: Drawn) -> Drawn:
        """Of each argument the one of the sampling, of which there is one sequence for each prompt."""
        return {name: one for name, one in {**first, **second}.items() if name != "num_return_sequences"}

    few = st.tuples(st.sampled_from(sorted(ARCHITECTURES)), st.just("SentencePiece BPE"), st.just(0))
    drafts = st.lists(st.sampled_from([*MAKES, "raises"]), min_size=1, max_size=3, unique=True).map(one_with_heads)
    return st.builds(
        Case,
        target=few if dtypes == HALVES else KINDS,  # so that shapes aren't tried for a new model each time
        dtype=st.sampled_from(dtypes),
        prompts=st.lists(texts(), min_size=1, max_size=3, unique=True).map(tuple),
        drafts=drafts,
        draft=KINDS,
        window=st.sampled_from([24, 512]),
        noise=st.lists(st.tuples(st.integers(0, 9), st.integers(-2, 700)), max_size=24),
        branches=st.integers(1, 4),
        budget=budgets(),
        drawn=st.builds(drawn, arguments(), samplings() if sampled else st.just({})),
        expensive=st.booleans(),
        batch_size=st.integers(1, 4),
        stable=st.sampled_from([None, None, None, True]),
        prediction=st.one_of(st.none(), st.none(), st.just(""), texts()),
        mode=st.one_of(st.just("none"), st.sampled_from(sorted(MODES))),
        at_once=st.booleans(),
    ).filter(lambda case: "sequence_bias" not in case.drawn or case.mode not in BREAK_BIASES)


def one_with_heads(names: list[str]) -> tuple[str, ...]:
    """There may be heads of one kind."""
    return tuple(name for name in names if name != "Medusa" or "sequential" not in names)


# ways to ask


def generated(xt: XTokAssisted, case: Case, asked: Callable[[int], Drawn]) -> list[Generation]:
    return [xt.generate(prompt, **asked(i)) for i, prompt in enumerate(case.prompts)]


def listed(xt: XTokAssisted, case: Case, asked: Callable[[int], Drawn]) -> list[Generation]:
    return xt.generate([*case.prompts], batch_size=case.batch_size, **asked(0))


def streamed(xt: XTokAssisted, case: Case, asked: Callable[[int], Drawn]) -> list[Generation]:
    """In turns."""
    found: dict[int, Generation] = {}

    def pieces(index: int) -> Iterator[str]:
        found[index] = yield from xt.stream(case.prompts[index], **asked(index))

    turns = zip_longest(*(pieces(index) for index in range(len(case.prompts))), fillvalue="")
    written = ["".join(one) for one in zip(*turns, strict=True)]
    assert not written or written == [found[index].text for index in range(len(case.prompts))]
    return [found[index] for index in range(len(case.prompts))]


def submitted(xt: XTokAssisted, case: Case, asked: Callable[[int], Drawn]) -> list[Generation]:
    """Twice: the second time, prefixes are known."""
    with Engine(xt, batch_size=case.batch_size) as engine:
        tickets = [engine.submit(prompt, **asked(i)) for _ in range(2) for i, prompt in enumerate(case.prompts)]
        found = [ticket.result(60) for ticket in tickets]
    half = len(case.prompts)
    assert [one.token_ids for one in found[half:]] == [one.token_ids for one in found[:half]]
    return found[:half]


WAYS: dict[str, Callable[[XTokAssisted, Case, Callable[[int], Drawn]], list[Generation]]] = {
    "generate": generated,
    "list": listed,
    "stream": streamed,
    "engine": submitted,
}


def written(way: str, xt: XTokAssisted, case: Case, truths: list[list[int]]) -> list[Generation]:
    """What is written for a case's prompts in one of the ways, under its mode."""

    def asked(index: int) -> Drawn:
        guess = xt.tokenizer.decode(truths[index], skip_special_tokens=True) if case.prediction == "" else case.prediction
        return {**fresh(case.asked), **({} if case.prediction is None else {"prediction": guess})}

    with case.under_mode():
        return WAYS[way](xt, case, asked)


def by_transformers(case: Case, xt: XTokAssisted | None) -> list[list[int]]:
    """What the target's own `generate` gives for the prompts in a padded batch; `xt`: what it generates by."""
    model, tokens = case.pair
    inputs, how = padded(case.ids()), {} if xt is None else {"custom_generate": xt}
    mode = nullcontext() if xt is None or case.mode.startswith("meta") else case.under_mode()  # under which it fails
    with mode:
        rows = model.generate(**inputs, tokenizer=tokens, **how, **fresh(case.asked))
    return rows[:, inputs["input_ids"].shape[1] :].tolist()
