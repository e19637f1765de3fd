"""xtok inside the real vLLM, on a CPU, with the pair that ships: ids are vLLM's own, whatever is guessed. `make test-vllm`."""

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product
from time import sleep
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="vLLM isn't installed here; `make test-vllm` runs these tests where it is")

import torch
from chances import chi_square
from inside import caches_of, rows_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.v1.sample import rejection_sampler

from xtok import Budget, DraftedText, DraftEngine, Tree, XTokAssisted
from xtok.drafts.session import Session
from xtok.errors import DraftFailedWarning
from xtok.pair import DRAFT, TARGET, prompts
from xtok.serving.vllm import XTokProposer

LONGEST = 6
SEATS = 32
CONSTANT = {"depth": 4, "width": 4, "schedule": "constant"}
"""So that guesses come whatever they cost: the pair's target is so small that they don't pay."""
ENDLESS = {"temperature": 0.0, "ignore_eos": True}
Requests = Sequence[tuple[Sequence[int], int]]
"""The ids of prompts, and how many new ones each is to get."""


def engine(budget: dict[str, Any] | None = CONSTANT, *, guesses: bool = True, **settings: Any) -> LLM:
    drafted = {
        "speculative_config": {
            "method": "custom_class",
            "model": "xtok.serving.vllm.XTokProposer",
            "num_speculative_tokens": LONGEST,
        },
        "additional_config": {"xtok": {"draft": str(DRAFT), **({"budget": budget} if budget else {})}},
    }
    asked = {"max_model_len": 512, "max_num_seqs": SEATS, "kv_cache_memory_bytes": 1 << 27, **settings}
    made = LLM(
        str(TARGET), dtype="float32", enforce_eager=True, disable_log_stats=False, **(drafted if guesses else {}), **asked
    )
    ALIVE.append(made)
    return made


ALIVE: list[LLM] = []
"""The first of a process that goes takes what the others share with it, too."""


@pytest.fixture(scope="module")
def plain() -> LLM:
    return engine(guesses=False)


@pytest.fixture(scope="module")
def drafted() -> LLM:
    return engine()


def proposer(llm: LLM) -> XTokProposer:
    core: Any = llm.llm_engine.engine_core
    found: XTokProposer = core.engine_core.model_executor.driver_worker.worker.model_runner.drafter
    return found


def written(llm: LLM, requests: Requests) -> list[list[int]]:
    asked = [SamplingParams(max_tokens=most, **ENDLESS) for _, most in requests]
    found = llm.generate([{"prompt_token_ids": list(ids)} for ids, _ in requests], asked, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in found]


@cache
def corpus() -> tuple[list[int], ...]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    return tuple(tokenizer(text).input_ids for text in prompts())


def after(start: int, size: int) -> list[int]:
    """A prompt of so many ids, and of several paragraphs if it takes those."""
    return [1, *(token for ids in (corpus() * 2)[start:] for token in ids[1:])][:size]


RAGGED: Requests = [(after(i, 1 + 7 * i % 96), 1 + 11 * i % 48) for i in range(32)]


@contextmanager
def without_failures(llm: LLM, *, accepts: bool = True) -> Iterator[None]:
    """Within the block guesses come, and some of them come true."""
    asked, accepted = proposer(llm), 0
    failures, propose = asked.failures, asked.propose

    def counting(sampled: list[list[int]], *rest: Any, **more: Any) -> list[list[int]]:
        nonlocal accepted
        accepted += sum(len(new) - 1 for new in sampled if new)
        return propose(sampled, *rest, **more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(asked, "propose", counting)
        yield
    assert asked.failures == failures
    assert not accepts or accepted


def test_ragged_requests_are_what_vllm_writes_alone(plain: LLM, drafted: LLM) -> None:
    with without_failures(drafted):
        assert written(drafted, RAGGED) == written(plain, RAGGED)


def test_guesses_are_those_of_xtoks_own_loop_in_the_same_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains of the draft alone, of which both commit the same."""
    chains = {"depth": 4, "width": 1, "longest": LONGEST, "schedule": "constant"}
    llm, guessed = engine(chains), dict[tuple[int, ...], tuple[int, ...]]()
    propose = DraftEngine.propose

    def recording(own: DraftEngine, texts: Sequence[DraftedText], longest: int) -> list[Tree]:
        trees = propose(own, texts, longest)
        guessed.update({tuple(text.ids): tree.tokens for text, tree in zip(texts, trees, strict=True)})
        return trees

    monkeypatch.setattr(DraftEngine, "propose", recording)
    requests: Requests = [(after(i, 12 + 3 * i), 32) for i in range(6)]
    found, xt = written(llm, requests), XTokAssisted(TARGET, DRAFT, budget=Budget(**chains))
    compared = 0
    for (ids, most), new in zip(requests, found, strict=True):
        expected = xt.generate(list(ids), max_new_tokens=most, do_sample=False, eos_token_id=None)
        assert expected.token_ids == new
        place = 0
        for one in expected.rounds:
            if place and place + LONGEST < most:  # the first has no guess, and near the end xtok's are cut
                assert guessed[(*ids, *new[:place])] == one.tree.tokens
                compared += len(one.tree) > 1
            place += one.committed
    assert compared > 20


def test_requests_that_begin_as_others_end_are_what_vllm_writes_alone(plain: LLM) -> None:
    llm = engine(max_num_seqs=3)
    with without_failures(llm):
        assert written(llm, RAGGED) == written(plain, RAGGED)


def test_prompts_read_in_chunks_are_what_vllm_writes_alone(plain: LLM) -> None:
    long: Requests = [*RAGGED[:8], (after(3, 200), 40), (after(9, 150), 24), *RAGGED[8:16]]
    llm = engine(max_num_batched_tokens=SEATS + 16)
    with without_failures(llm):
        assert written(llm, long) == written(plain, long)


def test_requests_that_are_preempted_are_what_vllm_writes_alone(plain: LLM) -> None:
    long: Requests = [(after(i, 60), 100) for i in range(12)]
    llm = engine(kv_cache_memory_bytes=3 << 22, max_model_len=256)
    with without_failures(llm):
        assert written(llm, long) == written(plain, long)
    assert sum(one.value for one in llm.get_metrics() if one.name == "vllm:num_preemptions")  # of the engine made last


def test_requests_with_the_same_prompt_are_what_vllm_writes_alone(plain: LLM, drafted: LLM) -> None:
    same: Requests = [(after(5, 20), 24 + number % 3) for number in range(9)]
    continued: Requests = [*same, ([*same[0][0], *written(plain, same[:1])[0][:9]], 20)]
    with without_failures(drafted):
        assert written(drafted, continued) == written(plain, continued)


def test_texts_beyond_the_drafts_window_and_up_to_the_targets_are_what_vllm_writes_alone(plain: LLM, drafted: LLM) -> None:
    """The draft sees 256 positions, and near the last of the target's vLLM asks for no guesses, for no request."""
    long: Requests = [(after(0, 300), 60), (after(30, 400), 112), (after(60, 470), 42), (after(2, 250), 100)]
    with without_failures(drafted):
        assert written(drafted, long) == written(plain, long)


def test_costs_decide_how_much_is_guessed_and_nothing_else(plain: LLM) -> None:
    llm = engine(budget=None)
    with without_failures(llm):
        for _ in range(3):
            assert written(llm, RAGGED) == written(plain, RAGGED)


def draft_model(llm: LLM) -> Any:
    drafting: Any = proposer(llm)._engine
    return drafting._drafts[0].model


@pytest.mark.filterwarnings("ignore::xtok.errors.DraftFailedWarning")
def test_a_draft_that_raises_and_one_that_hangs_cost_speed_only(
    plain: LLM, drafted: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, calls = type(draft_model(drafted)), list[int]()
    forward = kind.forward

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        sleep(0.5 if len(calls) == 4 else 0)
        return forward(self, *args, **kwargs) if len(calls) < 9 else 1 / 0

    with monkeypatch.context() as patched, without_failures(drafted, accepts=False), pytest.warns(DraftFailedWarning):
        patched.setattr(kind, "forward", fails)
        assert written(drafted, RAGGED[:8]) == written(plain, RAGGED[:8])
    assert len(calls) >= 9
    with without_failures(drafted):
        assert written(drafted, RAGGED[:8]) == written(plain, RAGGED[:8])


def test_a_fault_of_xtok_is_counted_and_reported_once(
    plain: LLM, drafted: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drafting, before = proposer(drafted)._engine, proposer(drafted).failures
    assert drafting is not None
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "xtok"):
        patched.setattr(drafting, "propose", lambda texts, longest: [][1])
        assert written(drafted, RAGGED[:8]) == written(plain, RAGGED[:8])
    assert proposer(drafted).failures > before + 8
    assert [one.name for one in caplog.records].count("xtok.serving.vllm") == 1
    with without_failures(drafted):
        assert written(drafted, RAGGED[:8]) == written(plain, RAGGED[:8])


def state(llm: LLM) -> tuple[int, ...]:
    """How much is held: numbers of the draft's caches, and their rows; texts, and sessions alive."""
    drafting: Any = proposer(llm)._engine
    gc.collect()
    slots = caches_of(drafting)
    held = [part.numel() for one in slots for part in one.parts]
    sessions = sum(type(one) is Session for one in gc.get_objects())
    return sum(held), sum(len(rows_of(one)) for one in slots), len(drafting.texts), sessions


def test_a_thousand_requests_leave_nothing_behind(drafted: LLM) -> None:
    requests: Requests = [(after(number % 100, 8 + number % 16), 2 + number % 7) for number in range(SEATS)]
    last: Requests = [(after(7, 9), 4)]
    written(drafted, requests * 2 + last)
    before = state(drafted)
    assert before[2] <= 1
    written(drafted, requests * 32 + last)
    assert state(drafted) == before


def expanded(one: torch.Tensor, ends: torch.Tensor, rows: int, replace_from: float = 0, replace_to: float = 0) -> torch.Tensor:
    """A setting of each request for each of its guesses, which vLLM leaves out on a CPU (vllm-project/vllm 55005)."""
    each = one.repeat_interleave(torch.diff(ends, prepend=ends.new_zeros(1)), output_size=rows)
    return torch.where(each == replace_from, replace_to, each) if replace_from != replace_to else each


@torch.no_grad()
def law(ids: Sequence[int], allowed: Sequence[int]) -> torch.Tensor:
    """How probable it is that the target, if it draws none but some ids, draws each three of them after others, (n, n, n)."""
    model, n = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float64), len(allowed)
    logits = model(torch.tensor([[*ids, *pair] for pair in product(allowed, repeat=2)])).logits[:, -3:, list(allowed)]
    first, second, third = logits.softmax(dim=-1).reshape(n, n, 3, n).unbind(dim=2)
    return first[0, 0][:, None, None] * second[:, 0][:, :, None] * third


def test_drawn_ids_are_draws_from_the_targets_law(drafted: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", expanded)
    given, draws = after(5, 20), 1200
    guessed = {token for new in written(drafted, [(given, 6)]) for token in new}
    allowed = sorted([*guessed, *({5, 259, 275, 277} - guessed)][:4])
    asked = SamplingParams(max_tokens=3, allowed_token_ids=allowed, ignore_eos=True)
    with without_failures(drafted):
        found = drafted.generate([{"prompt_token_ids": given}] * draws, asked, use_tqdm=False)
    counts = torch.zeros(4, 4, 4)
    for one in found:
        counts[tuple(map(allowed.index, one.outputs[0].token_ids))] += 1
    assert chi_square(counts.flatten(), draws * law(given, allowed).flatten()) > 1e-4
