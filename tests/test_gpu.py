"""The laws on a GPU. `make gpu` runs these if there is one."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import pytest
import torch
from front_door import BYTES, GREEDY, PROMPT, PROMPTS, TOKENS
from worlds import TREE, alone, fitting, make_target_expensive

from xtok import Engine, PromptLookup, XTokAssisted
from xtok.bench.compare import compare, rows_of
from xtok.bench.runs import SETTINGS
from xtok.models.graphs import takes_graphs
from xtok.models.prompts import prompt_ids

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

DEVICE = torch.device("cuda")
ARCHITECTURES = ("Llama", "GPTNeoX", "GPT2", "Mistral")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "penalty": {**GREEDY, "repetition_penalty": 1.3},
    "sampled": {**GREEDY, "do_sample": True, "temperature": 1.3, "top_p": 0.95, "seed": 7},
}
OTHER = deepcopy(fitting(BYTES, "GPTNeoX", 1)).to(DEVICE)
DRAFTS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "a model": lambda: (OTHER, BYTES),
    "several": lambda: [(OTHER, BYTES), PromptLookup()],
}


def target(architecture: str, dtype: torch.dtype) -> Any:
    return deepcopy(fitting(TOKENS, architecture, 0)).to(DEVICE, dtype)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("way", ["greedy", "penalty"])
@pytest.mark.parametrize("draft", sorted(DRAFTS))
@pytest.mark.parametrize("setting", [False, None])
def test_greedy_ids_are_those_of_the_target_alone(architecture: str, way: str, draft: str, setting: bool | None) -> None:
    """Law 1, with graphs and without, one text or a list, twice: what the first call captures the second one replays."""
    lm = target(architecture, torch.float64)
    xt = XTokAssisted((lm, TOKENS), DRAFTS[draft](), budget=TREE, compile=setting)
    make_target_expensive(xt)
    wanted = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt_ids(TOKENS, prompt)], device=DEVICE)
        output = lm.generate(ids, attention_mask=torch.ones_like(ids), **WAYS[way])
        wanted.append(output[0, ids.shape[1] :].tolist())
    for _ in range(2):
        assert [xt.generate(prompt, **WAYS[way]).token_ids for prompt in PROMPTS] == wanted
        assert [one.token_ids for one in xt.generate(PROMPTS, batch_size=3, **WAYS[way])] == wanted


@pytest.mark.parametrize("draft", ["a model", "several"])
def test_sampled_ids_are_those_without_a_draft_and_those_of_a_cpu(draft: str) -> None:
    lm = target("Llama", torch.float64)
    xt, without = (XTokAssisted((lm, TOKENS), guesses, budget=TREE) for guesses in (DRAFTS[draft](), None))
    cpu = XTokAssisted((fitting(TOKENS, "Llama", 0), TOKENS))
    for prompt in PROMPTS:
        wanted = cpu.generate(prompt, **WAYS["sampled"]).token_ids
        assert without.generate(prompt, **WAYS["sampled"]).token_ids == wanted
        assert xt.generate(prompt, **WAYS["sampled"]).token_ids == wanted


def test_an_engine_writes_what_its_instance_writes() -> None:
    xt = XTokAssisted((target("Llama", torch.float64), TOKENS), (OTHER, BYTES), budget=TREE)
    wanted = [xt.generate(prompt, **GREEDY).token_ids for prompt in PROMPTS]
    with Engine(xt, batch_size=3, memory=2**26) as engine:
        assert [one.result().token_ids for one in [engine.submit(prompt, **GREEDY) for prompt in PROMPTS]] == wanted


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", sorted(WAYS))
def test_stable_ids_are_those_of_the_text_alone_without_a_draft(architecture: str, dtype: torch.dtype, way: str) -> None:
    """Law of `stable`: with a draft, in a list, by captured forwards or not."""
    lm = target(architecture, dtype)
    asked = {**WAYS[way], "max_new_tokens": 64}
    plain = XTokAssisted((lm, TOKENS), stable=True, compile=False)
    wanted = [plain.generate(prompt, **asked).token_ids for prompt in PROMPTS]
    for setting in (False, None):
        xt = XTokAssisted((lm, TOKENS), [(OTHER, BYTES), PromptLookup()], budget=TREE, stable=True, compile=setting)
        make_target_expensive(xt)
        for _ in range(2):
            assert [xt.generate(prompt, **asked).token_ids for prompt in PROMPTS] == wanted
            assert [one.token_ids for one in xt.generate(PROMPTS, batch_size=3, **asked)] == wanted


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stable", [False, True])
def test_forwards_are_captured_and_replayed_also_if_caches_grew(architecture: str, dtype: torch.dtype, stable: bool) -> None:
    """A graph that gives other bits than the forward it was captured from, or none, would never be replayed."""
    lm = target(architecture, dtype)
    xt, without = (XTokAssisted((lm, TOKENS), stable=stable, compile=setting) for setting in (True, False))
    asked = {**GREEDY, "max_new_tokens": 300, "eos_token_id": None}
    wanted, stream = without.generate(PROMPT, **asked), torch.cuda.current_stream()
    assert wanted.stats.target_replays == 0
    for least in (250, 280):  # the second call has the graphs of the first one's largest cache
        found = xt.generate(PROMPT, **asked)
        assert found.stats.target_replays > least
        assert torch.cuda.current_stream() == stream
        if stable or dtype == torch.float32:  # else near-ties fall either way
            assert found.token_ids == wanted.token_ids


def test_a_forward_that_cant_be_captured_leaves_the_stream_as_it_was() -> None:
    class Waits(torch.nn.Module):
        """Decides by what is on the device."""

        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.inner(states)
            return found if bool(found.max() > -1) else -found

    lm, stream = target("Llama", torch.float64), torch.cuda.current_stream()
    wanted = XTokAssisted((lm, TOKENS), compile=False).generate(PROMPT, **GREEDY).token_ids
    lm.model.layers[1].mlp = Waits(lm.model.layers[1].mlp)
    waiting = XTokAssisted((lm, TOKENS)).generate(PROMPT, **GREEDY)
    assert waiting.stats.target_replays == 0
    assert torch.cuda.current_stream() == stream
    lm.model.layers[1].mlp = lm.model.layers[1].mlp.inner
    found = [XTokAssisted((lm, TOKENS)).generate(PROMPT, **GREEDY) for _ in range(2)]
    assert all(one.token_ids == wanted and one.stats.target_replays for one in found)


def test_requested_hidden_states_keep_nothing_from_being_captured() -> None:
    lm = target("Llama", torch.float32)
    lm(torch.tensor([[5, 6]], device=DEVICE), output_hidden_states=True)
    assert takes_graphs(lm)


def test_adapters_that_are_merged_between_calls_are_seen() -> None:
    peft = pytest.importorskip("peft")
    lm = target("Llama", torch.float64)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(lm, config).base_model.model
    captured, plain = (XTokAssisted((adapted, TOKENS), compile=setting) for setting in (None, False))
    for change in (lambda: None, lambda: None, adapted.model.layers[0].self_attn.q_proj.merge):
        change()
        assert captured.generate(PROMPT, **GREEDY).token_ids == plain.generate(PROMPT, **GREEDY).token_ids


def test_one_thread_captures_while_others_forward() -> None:
    xt = XTokAssisted((target("Llama", torch.float64), TOKENS), (OTHER, BYTES), budget=TREE)
    make_target_expensive(xt)
    wanted = [alone(fitting(TOKENS, "Llama", 0), prompt_ids(TOKENS, prompt), **GREEDY) for prompt in PROMPTS]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(lambda prompt: xt.generate(prompt, **GREEDY).token_ids, PROMPTS)) == wanted
    with Engine(xt, batch_size=3) as engine:
        tickets = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS]
        assert [xt.generate(prompt, **GREEDY).token_ids for prompt in PROMPTS] == wanted
        assert [one.result().token_ids for one in tickets] == wanted


def test_models_with_hooks_or_on_several_devices_are_not_captured() -> None:
    lm = target("Llama", torch.float32)
    assert takes_graphs(lm)
    handle = lm.get_output_embeddings().register_forward_hook(lambda *_: None)
    assert not takes_graphs(lm)
    handle.remove()
    assert takes_graphs(lm)
    lm.get_output_embeddings().to("cpu")
    assert not takes_graphs(lm)


def test_the_benchmark_says_what_is_replayed() -> None:
    pair = (target("Llama", torch.float32), TOKENS), (OTHER, BYTES)
    rows = rows_of(compare(*pair, PROMPTS, SETTINGS["greedy"], max_new_tokens=48), sampled=False)
    assert {bool(row.replayed) for row in rows if row.split} == {True}
