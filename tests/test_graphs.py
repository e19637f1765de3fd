"""Forwards that are captured and replayed: with what a replay may not do on a GPU, on the CPU."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import cache_bytes
from front_door import BYTES, GREEDY, OTHER, PROMPT, PROMPTS, TARGET, TOKENS
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from rows import VOCABULARY, Held, Sharing, ask_one_more, filled
from transformers import LogitsProcessorList
from worlds import ARCHITECTURES, deep, examples, fitting, make_target_expensive, model

import xtok.models.graphs
from xtok import Budget, Engine, XTokAssisted
from xtok.errors import UnsupportedModelError
from xtok.models.capabilities import traits
from xtok.models.graphs import Graph, Graphs, Inputs, Run
from xtok.models.runner import runs_more
from xtok.models.shared_cache import SharedCache


def places(forward: Any) -> list[tuple[int, torch.Size]]:
    """Where the cache is that a forward writes to."""
    slots = getattr(forward.func, "__self__", forward.keywords.get("slots"))
    return [(part.data_ptr(), part.shape) for part in slots.parts]


REPLAYED: list[int] = []
"""How many ids each row of a replayed forward has."""


def capture(forward: Run, inputs: Inputs, pool: Any) -> Graph:
    """What `graphs.capture` gives, uncaptured: all but the values at fixed places is what it was when it was captured."""
    outputs, held = forward(inputs), places(forward)

    def replay() -> None:
        REPLAYED.append(inputs["ids"].shape[1])
        assert places(forward) == held, "a graph would write where the cache was"
        for kept, new in zip(outputs, forward(inputs), strict=True):
            kept.copy_(new)

    return Graph(inputs, outputs, replay)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let all models allow to be captured. Holds how many ids each row of a replayed forward has."""
    REPLAYED.clear()
    monkeypatch.setattr(xtok.models.graphs, "capture", capture)
    for module in ("xtok.models.cache_set", "xtok.models.graphs", "xtok.decoding.assemble"):
        monkeypatch.setattr(f"{module}.takes_graphs", lambda model: True)
    return REPLAYED


class Captured(Sharing):
    """Rows of one cache whose forwards are captured have the logits that each text has alone, too."""

    forwards = (1, 3)

    @initialize(architecture=st.sampled_from(sorted(ARCHITECTURES)), texts=st.integers(1, 4), rows=st.integers(1, 6))
    def start(self, architecture: str, texts: int, rows: int) -> None:  # type: ignore[override]
        self.own = xtok.models.graphs.capture
        xtok.models.graphs.capture = capture
        self.begin(architecture, 0, texts, rows, None)
        self.slots = SharedCache(self.model, rows=rows, graphs=Graphs())
        self.texts = [Held(self.slots.join()) for _ in range(texts)]

    def teardown(self) -> None:
        if hasattr(self, "own"):
            xtok.models.graphs.capture = self.own


Captured.TestCase.settings = examples(80, stateful_step_count=20)
TestCaptured = Captured.TestCase

LM = model("Llama", VOCABULARY, 0, torch.float64)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "penalty": {**GREEDY, "repetition_penalty": 1.3},
    "sampled": {**GREEDY, "do_sample": True, "seed": 7},
}
TREE = Budget(4, width=4, schedule="constant")


@pytest.mark.parametrize(
    ("way", "drafted", "stable"), [("penalty", True, False), ("sampled", True, True), *deep(("greedy", False, True))]
)
def test_texts_of_captured_forwards_are_those_of_others(replays: list[int], way: str, drafted: bool, stable: bool) -> None:
    """Alone, in lists, streamed and in an engine; the second call replays what the first one captured."""
    prompts = PROMPTS[:2]
    draft = (OTHER, BYTES) if drafted else None
    plain, captured = (
        XTokAssisted((TARGET, TOKENS), draft, budget=TREE, stable=stable, compile=setting) for setting in (False, None)
    )
    make_target_expensive(captured)
    wanted = [plain.generate(prompt, **WAYS[way]).token_ids for prompt in prompts]
    assert not replays
    assert [captured.generate(prompt, **WAYS[way]).token_ids for prompt in prompts] == wanted
    count = len(replays)
    assert count
    assert [one.token_ids for one in captured.generate(prompts, batch_size=3, **WAYS[way])] == wanted
    assert [one.token_ids for one in captured.generate(prompts, batch_size=3, **WAYS[way])] == wanted
    assert len(replays) > 2 * count // len(prompts)
    assert "".join(captured.stream(PROMPT, **WAYS[way])) == captured.generate(PROMPT, **WAYS[way]).text
    with Engine(captured, batch_size=2) as engine:
        assert [one.result().token_ids for one in [engine.submit(prompt, **WAYS[way]) for prompt in prompts]] == wanted


def test_a_cache_that_grows_forgets_what_was_captured(replays: list[int]) -> None:
    slots = SharedCache(LM, graphs=Graphs())
    texts = filled(slots, 5)
    for _ in range(140):  # the replay itself looks whether the cache is where it was
        ask_one_more(texts)
    assert len(replays) > 100
    texts.append(Held(slots.join()))
    for _ in range(4):
        ask_one_more(texts)


def test_caches_of_captured_forwards_stay_within_the_memory_that_they_may_have(replays: list[int]) -> None:
    def notes(_: Any, scores: torch.Tensor) -> torch.Tensor:
        taken.append(cache_bytes(engine))
        return scores

    taken, memory = list[int](), 700 * sum(traits(lm).position_bytes or 0 for lm in (TARGET, OTHER))
    xt = XTokAssisted((TARGET, TOKENS), (OTHER, BYTES), budget=TREE, stable=True)
    make_target_expensive(xt)
    plain = XTokAssisted((TARGET, TOKENS), stable=True, compile=False)
    asked = {**GREEDY, "eos_token_id": None}
    prompts = [[5 + (3 * i + size) % 300 for i in range(size)] for size in (103, 101, 102, 9, 100, 200)]  # most get up to 127
    with Engine(xt, batch_size=3, memory=memory) as engine:
        tickets = [engine.submit(prompt, **asked, logits_processor=LogitsProcessorList([notes])) for prompt in prompts]
        for prompt, ticket in zip(prompts, tickets, strict=True):
            assert ticket.result().token_ids == plain.generate(prompt, **asked).token_ids
    assert replays
    assert 0 < min(taken) <= max(taken) <= memory


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted"), torch.OutOfMemoryError("simulated")])
def test_what_cant_be_captured_is_forwarded_as_ever(
    replays: list[int], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: Any) -> Graph:
        tries.append(1)
        raise error

    tries: list[int] = []
    monkeypatch.setattr(xtok.models.graphs, "capture", fails)
    texts = filled(SharedCache(LM, graphs=Graphs()), 5, 3)
    for _ in range(6):
        ask_one_more(texts)
    assert (len(tries), replays) == (1, [])


def test_a_graph_that_gives_other_bits_is_not_used(replays: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def other(forward: Run, inputs: Inputs, pool: Any) -> Graph:
        graph = capture(forward, inputs, pool)

        def replay() -> None:
            graph.replay()
            graph.outputs[0][0, 0, 0] += 1e-9

        return replace(graph, replay=replay)

    monkeypatch.setattr(xtok.models.graphs, "capture", other)
    texts = filled(SharedCache(LM, graphs=Graphs()), 5)
    for _ in range(6):
        ask_one_more(texts)
    assert len(replays) == 1


def test_a_model_that_was_changed_computes_as_it_does_now(replays: list[int]) -> None:
    """Between calls, and in an engine when nothing runs."""
    lm: Any = deepcopy(fitting(TOKENS, "Llama", 3))
    xt = XTokAssisted((lm, TOKENS))
    with Engine(xt) as engine:
        for change in (
            lambda: lm.float(),
            lambda: setattr(lm.lm_head, "weight", torch.nn.Parameter(lm.lm_head.weight.flip(0))),
        ):
            for _ in range(2):
                xt.generate(PROMPT, **GREEDY)
                engine.submit(PROMPT, **GREEDY).result()
            change()
            wanted = XTokAssisted((lm, TOKENS), compile=False).generate(PROMPT, **GREEDY).token_ids
            assert xt.generate(PROMPT, **GREEDY).token_ids == wanted
            assert engine.submit(PROMPT, **GREEDY).result().token_ids == wanted
    assert replays


def test_hooks_that_collect_hidden_states_dont_keep_a_model_from_being_captured() -> None:
    """Found by review: transformers leaves them behind."""
    lm, compiled = (deepcopy(fitting(TOKENS, "Llama", 3)) for _ in range(2))
    lm(torch.tensor([[1, 2]]), output_hidden_states=True)
    assert not any(map(runs_more, lm.modules()))
    lm.get_output_embeddings().register_forward_pre_hook(lambda *_: None)
    compiled.compile()
    assert all(any(map(runs_more, one.modules())) for one in (lm, compiled))


def test_replays_are_reported(replays: list[int]) -> None:
    xt = XTokAssisted((TARGET, TOKENS))
    reported = [xt.generate(PROMPT, **GREEDY).stats for _ in range(2)]
    assert sum(one.target_replays for one in reported) == len(replays) - 1  # one of which was tried where it was captured
    assert 0 < reported[1].target_replays < reported[1].target_forwards
    assert XTokAssisted((TARGET, TOKENS), compile=False).generate(PROMPT, **GREEDY).stats.target_replays == 0


def test_the_callers_modes_leave_ids_and_graphs_as_they_are(replays: list[int]) -> None:
    """Under autocast nothing is captured, and no cache is shared with other calls; inference mode changes nothing."""
    xt = XTokAssisted((TARGET, TOKENS))
    wanted = XTokAssisted((TARGET, TOKENS), compile=False).generate(PROMPT, **GREEDY).token_ids
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            xt.generate(PROMPT, **GREEDY)
    assert not replays
    with torch.inference_mode():
        assert [xt.generate(PROMPT, **GREEDY).token_ids for _ in range(2)] == [wanted, wanted]
    before = len(replays)
    assert before
    assert xt.generate(PROMPT, **GREEDY).token_ids == wanted
    assert len(replays) > before


def test_to_capture_on_a_cpu_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM, on cpu, can't be captured as CUDA graphs: it must"):
        XTokAssisted((TARGET, TOKENS), compile=True)
