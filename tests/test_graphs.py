"""Forwards that are captured and replayed: with what a replay may not do on a GPU, on the CPU."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from front_door import BYTES, GREEDY, OTHER, PROMPT, PROMPTS, TARGET, TOKENS
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from test_slots import VOCABULARY, Held, Sharing, ask_one_more, filled
from transformers import LogitsProcessorList
from worlds import ARCHITECTURES, examples, fitting, make_dear, model

import xtok.models.graphs
from xtok import Budget, Engine, XTokAssisted
from xtok.errors import InvalidInputError, UnsupportedModelError
from xtok.models.forwards import Ask
from xtok.models.graphs import Graph, Graphs, Inputs, Run, state_of, takes_graphs
from xtok.models.probe import position_bytes
from xtok.models.slots import Slots


def places(forward: Any) -> list[tuple[int, torch.Size]]:
    """Where the cache is that a forward writes to."""
    layers = forward.func.__self__._layers
    return [(states.data_ptr(), states.shape) for layer in layers for states in (layer.keys, layer.values)]


def capture(forward: Run, inputs: Inputs, pool: Any) -> Graph:
    """What `graphs.capture` gives, uncaptured: all but the values at fixed places is what it was when it was captured."""
    outputs, held = forward(inputs), places(forward)

    def replay() -> None:
        assert places(forward) == held, "a graph would write where the cache was"
        for kept, new in zip(outputs, forward(inputs), strict=True):
            kept.copy_(new)

    return Graph(inputs, outputs, replay)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let all models allow to be captured. Holds how many ids each row of a replayed forward has."""
    found: list[int] = []

    def replayed(graph: Graph, inputs: Inputs) -> list[torch.Tensor]:
        found.append(inputs["ids"].shape[1])
        return own(graph, inputs)

    own = xtok.models.graphs._replayed
    monkeypatch.setattr(xtok.models.graphs, "_replayed", replayed)
    monkeypatch.setattr(xtok.models.graphs, "capture", capture)
    for module in ("xtok.models.seats", "xtok.assisted"):
        monkeypatch.setattr(f"{module}.takes_graphs", lambda model: True)
    return found


class Captured(Sharing):
    """Rows of one cache whose forwards are captured have the logits that each text has alone, too."""

    forwards = (1, 3)

    @initialize(architecture=st.sampled_from(sorted(ARCHITECTURES)), texts=st.integers(1, 4), rows=st.integers(1, 6))
    def start(self, architecture: str, texts: int, rows: int) -> None:  # type: ignore[override]
        self.own = xtok.models.graphs.capture
        xtok.models.graphs.capture = capture
        self.begin(architecture, 0, texts, rows, None)
        self.slots._graphs = Graphs()

    def teardown(self) -> None:
        if hasattr(self, "own"):
            xtok.models.graphs.capture = self.own


Captured.TestCase.settings = examples(100, stateful_step_count=24)
TestCaptured = Captured.TestCase

LM = model("Llama", VOCABULARY, 0, torch.float64)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "penalty": {**GREEDY, "repetition_penalty": 1.3},
    "sampled": {**GREEDY, "do_sample": True, "seed": 7},
}
TREE = Budget(4, width=4, schedule="constant")


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("stable", [False, True])
def test_texts_of_captured_forwards_are_those_of_others(replays: list[int], way: str, drafted: bool, stable: bool) -> None:
    """Alone, in lists, streamed and in an engine; the second call replays what the first one captured."""
    draft = (OTHER, BYTES) if drafted else None
    plain, captured = (
        XTokAssisted((TARGET, TOKENS), draft, budget=TREE, stable=stable, compile=setting) for setting in (False, None)
    )
    make_dear(captured)
    wanted = [plain.generate(prompt, **WAYS[way]).token_ids for prompt in PROMPTS]
    assert not replays
    assert [captured.generate(prompt, **WAYS[way]).token_ids for prompt in PROMPTS] == wanted
    count = len(replays)
    assert count
    assert [one.token_ids for one in captured.generate(PROMPTS, batch_size=3, **WAYS[way])] == wanted
    assert [one.token_ids for one in captured.generate(PROMPTS, batch_size=3, **WAYS[way])] == wanted
    assert len(replays) > 2 * count // len(PROMPTS)
    assert "".join(captured.stream(PROMPT, **WAYS[way])) == captured.generate(PROMPT, **WAYS[way]).text
    with Engine(captured, batch_size=2) as engine:
        assert [one.result().token_ids for one in [engine.submit(prompt, **WAYS[way]) for prompt in PROMPTS]] == wanted


def test_captured_forwards_have_widths_of_powers_of_two(replays: list[int]) -> None:
    xt = XTokAssisted((TARGET, TOKENS), (OTHER, BYTES), budget=TREE)
    make_dear(xt)
    for prompt in (*PROMPTS, *PROMPTS):
        xt.generate(prompt, **GREEDY)
    assert len(set(replays)) > 1
    assert all(width & (width - 1) == 0 for width in replays)


def test_a_cache_that_grows_forgets_what_was_captured(replays: list[int]) -> None:
    slots = Slots(LM, graphs=Graphs())
    texts = filled(slots, 5)
    for _ in range(300):  # the replay itself looks whether the cache is where it was
        ask_one_more(texts)
    assert len(replays) > 250
    texts.append(Held(slots.join()))
    for _ in range(4):
        ask_one_more(texts)


def test_a_text_that_is_shortened_is_looked_at_as_a_short_one_is(replays: list[int]) -> None:
    slots = Slots(LM, graphs=Graphs())
    (held,) = filled(slots, 250)
    for length in (250, 100, 20):
        held.slot.roll_back(length)
        held.ids = held.ids[:length]
        for _ in range(4):
            ask_one_more([held])
    assert len(replays) >= 8


def test_what_comes_out_stays_as_it_is_while_others_are_forwarded(replays: list[int]) -> None:
    slots = Slots(LM, graphs=Graphs())
    (held,) = filled(slots, 5)
    found = [slots.serve([Ask(held.slot, [token], 1)])[0].logits for token in range(6)]
    copies = [one.clone() for one in found]
    for token in range(6):
        slots.serve([Ask(held.slot, [token + 6], 1)])
    assert len(replays) > 6
    assert all(map(torch.equal, found, copies))
    assert len({tuple(one.flatten().tolist()) for one in found}) == 6


@pytest.mark.parametrize("stable", [False, True])
def test_caches_of_captured_forwards_stay_within_the_memory_that_they_may_have(replays: list[int], stable: bool) -> None:
    def notes(_: Any, scores: torch.Tensor) -> torch.Tensor:
        layers = [layer for slots in engine._caches._slots.values() for layer in slots._layers if layer.is_initialized]
        taken.append(sum(states.numel() * states.element_size() for layer in layers for states in (layer.keys, layer.values)))
        return scores

    taken, memory = list[int](), 700 * sum(position_bytes(lm) or 0 for lm in (TARGET, OTHER))
    xt = XTokAssisted((TARGET, TOKENS), (OTHER, BYTES), budget=TREE, stable=stable)
    make_dear(xt)
    plain = XTokAssisted((TARGET, TOKENS), stable=stable, compile=False)
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
    texts = filled(Slots(LM, graphs=Graphs()), 5, 3)
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
    texts = filled(Slots(LM, graphs=Graphs()), 5)
    for _ in range(6):
        ask_one_more(texts)
    assert len(replays) == 1


def test_no_more_graphs_are_held_than_may_be(replays: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xtok.models.graphs, "_MOST", 2)
    slots = Slots(LM, graphs=Graphs())
    texts = filled(slots, 5, 3, 4)
    assert slots._graphs is not None
    for count in (1, 2, 3, 3, 2, 1, 1, 2, 3):
        ask_one_more(texts[:count])
        ask_one_more(texts[:count])
        assert len(slots._graphs._made) <= 2


def changed_dtype(lm: Any) -> None:
    lm.to(torch.float32)


def changed_weights(lm: Any) -> None:
    lm.get_output_embeddings().weight = torch.nn.Parameter(lm.get_output_embeddings().weight.flip(0))


def changed_attention(lm: Any) -> None:
    lm.set_attn_implementation("eager")


def changed_by_a_hook(lm: Any) -> None:
    lm.get_output_embeddings().register_forward_hook(lambda _, inputs, logits: logits.flip(-1))


@pytest.mark.parametrize("change", [changed_dtype, changed_weights, changed_attention, changed_by_a_hook])
def test_a_model_that_was_changed_between_calls_computes_as_it_does_now(
    replays: list[int], change: Callable[[Any], None]
) -> None:
    lm = deepcopy(fitting(TOKENS, "Llama", 3))
    xt = XTokAssisted((lm, TOKENS))
    for _ in range(2):
        xt.generate(PROMPT, **GREEDY)
    before = state_of(lm)
    change(lm)
    assert state_of(lm) != before
    plain = XTokAssisted((lm, TOKENS), compile=False)
    assert xt.generate(PROMPT, **GREEDY).token_ids == plain.generate(PROMPT, **GREEDY).token_ids


def test_under_autocast_and_in_inference_mode_nothing_is_captured(replays: list[int]) -> None:
    xt = XTokAssisted((TARGET, TOKENS))
    wanted = XTokAssisted((TARGET, TOKENS), compile=False).generate(PROMPT, **GREEDY).token_ids
    with torch.inference_mode():
        assert xt.generate(PROMPT, **GREEDY).token_ids == wanted
    with torch.autocast("cpu", torch.bfloat16):
        xt.generate(PROMPT, **GREEDY)
    assert not replays
    for _ in range(2):  # in caches that no inference mode has made
        assert xt.generate(PROMPT, **GREEDY).token_ids == wanted
    assert replays


def test_caches_are_kept_between_calls_only_where_they_are_captured(replays: list[int]) -> None:
    kept, dropped = (XTokAssisted((TARGET, TOKENS), compile=setting) for setting in (None, False))
    for xt in (kept, dropped):
        xt.generate(PROMPTS, **GREEDY)
        next(xt.stream(PROMPT, **GREEDY))  # which is closed before its end
    assert (len(kept._pool._free), len(dropped._pool._free)) == (0, 0)
    for xt in (kept, dropped):
        xt.generate(PROMPTS, **GREEDY)
    assert (len(kept._pool._free), len(dropped._pool._free)) == (1, 0)


def test_models_whose_forwards_run_more_than_kernels_are_not_captured() -> None:
    """None is on a CPU; there is nothing to launch."""
    assert not takes_graphs(TARGET)
    assert not XTokAssisted((TARGET, TOKENS)).captures


@pytest.mark.parametrize("setting", [1, "reduce-overhead"])
def test_what_is_no_setting_is_refused(setting: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"compile is {setting!r}; it must be True, False or None"):
        XTokAssisted((TARGET, TOKENS), compile=setting)


def test_to_capture_on_a_cpu_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM can't be captured as CUDA graphs: it must be on"):
        XTokAssisted((TARGET, TOKENS), compile=True)


def test_what_an_instance_was_asked_for_is_shown() -> None:
    assert "compile=False" in repr(XTokAssisted((TARGET, TOKENS), compile=False))
