"""Law 5: caches tell the truth, shown against forwarding everything anew."""

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from architectures import RECURRENT, tiny
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scripted import ScriptedDrafter
from transformers import DynamicCache, PreTrainedModel
from worlds import (
    ARCHITECTURES,
    FAMILIES,
    alone,
    assert_close,
    examples,
    fitting,
    model,
    quick,
    texts,
    tokenizer,
    whole_generations,
)

from xtok import Budget, Context, Generation, PromptLookup, Tree, XTokAssisted
from xtok.align.continuation import Continuation
from xtok.align.encoding import encoder
from xtok.align.tokenbytes import token_bytes
from xtok.drafts.cross_tokenizer import CrossTokenizerDrafter
from xtok.drafts.meter import Meter
from xtok.drafts.reader import Reader
from xtok.errors import UnsupportedArgumentError, UnsupportedModelError
from xtok.models.cache import CACHE, context_window, new_cache
from xtok.models.cached_model import CachedModel
from xtok.models.capabilities import check_usable, traits
from xtok.models.forwards import Answer, ForwardRequest, Slot, run_forwards
from xtok.models.load import draft_model, target_model
from xtok.models.recurrent import cached_model
from xtok.models.runner import renewed
from xtok.models.shared_cache import SharedCache

VOCABULARY = 40
TOKENS = tokenizer("byte-level BPE")
ids_lists = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6)


@cache
def recurrent(name: str) -> PreTrainedModel:
    return tiny(name, VOCABULARY).float()


class Caching(RuleBasedStateMachine):
    """Law 5: caches tell the truth, after any forwards and roll-backs; a plain list holds what the cache ought to hold."""

    @initialize(architecture=st.sampled_from(sorted(ARCHITECTURES)), seed=st.integers(0, 1))
    def start(self, architecture: str, seed: int) -> None:
        self.model = model(architecture, VOCABULARY, seed, torch.float64)
        self.cached = CachedModel(self.model, new_cache(self.model))
        self.ids: list[int] = []
        self.forwards = 0

    @rule(new=ids_lists, data=st.data())
    def forward(self, new: list[int], data: st.DataObject) -> None:
        rows = data.draw(st.integers(1, len(new)))
        logits = self.cached.forward(torch.tensor([new]), rows)
        self.ids += new
        self.forwards += 1
        anew = self.model(torch.tensor([self.ids])).logits[0, -rows:]
        assert_close(logits, anew)

    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(self.ids)))
        if self.cached.roll_back(length):
            self.ids = self.ids[:length]
        else:
            assert hasattr(self.model.config, "sliding_window")
            assert len(self.ids) >= self.model.config.sliding_window

    @rule(data=st.data(), calls=st.integers(1, 3))
    def grow_a_tree_and_keep_a_path(self, data: st.DataObject, calls: int) -> None:
        window = getattr(self.model.config, "sliding_window", None)
        paths: list[list[int]] = []
        for _ in range(calls if window is None else 1):
            tokens = data.draw(ids_lists)
            first = -2 if len(self.ids) > 1 and window is None else -1
            parents = [data.draw(st.integers(first if self.ids else -1, len(paths) + i - 1)) for i in range(len(tokens))]
            logits = self.cached.branch(torch.tensor([tokens]), parents)
            self.forwards += 1
            for parent, token, row in zip(parents, tokens, logits, strict=True):
                before = paths[parent] if parent >= 0 else self.ids[: len(self.ids) + parent + 1]
                paths.append([*before, token])
                assert_close(row, self.model(torch.tensor([paths[-1]])).logits[0, -1])
        nodes = {tuple(path): node for node, path in enumerate(paths)}
        kept = data.draw(st.sampled_from([self.ids, *(path for path in paths if path[: len(self.ids)] == self.ids)]))
        path = [nodes[tuple(kept[:size])] for size in range(len(self.ids) + 1, len(kept) + 1)]
        self.cached.keep(path)
        self.ids = list(kept)

    @invariant()
    def the_cache_is_as_long_as_its_ids(self) -> None:
        if hasattr(self, "cached"):
            assert self.cached.length == len(self.ids)
            assert self.cached.forwards == self.forwards


class Replaying(RuleBasedStateMachine):
    """The same of models with recurrent layers, which take chains: the logits are those of a text forwarded as a whole."""

    @initialize(name=st.sampled_from(RECURRENT), snapshots=st.integers(1, 3))
    def start(self, name: str, snapshots: int) -> None:
        self.model = recurrent(name)
        self.cached = cached_model(self.model, new_cache(self.model), snapshots=snapshots)
        self.ids: list[int] = []

    @rule(new=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20), data=st.data())
    def forward(self, new: list[int], data: st.DataObject) -> None:
        rows = data.draw(st.integers(1, len(new)))
        logits = self.cached.forward(torch.tensor([new]), rows)
        self.ids += new
        self.check(logits)

    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(max(0, len(self.ids) - 25), len(self.ids)))
        assert self.cached.roll_back(length)
        self.ids = self.ids[:length]

    @rule(guess=ids_lists, data=st.data())
    def guess_and_keep_some(self, guess: list[int], data: st.DataObject) -> None:
        logits = self.cached.branch(torch.tensor([guess]), range(-1, len(guess) - 1))
        self.ids += guess
        self.check(logits)
        kept = data.draw(st.integers(0, len(guess)))
        self.cached.keep(range(kept))
        self.ids = self.ids[: len(self.ids) - len(guess) + kept]

    @rule()
    def settle(self) -> None:
        self.cached.settle()

    @rule()
    def start_anew(self) -> None:
        self.cached.start_anew()
        self.ids = []

    def check(self, logits: torch.Tensor) -> None:
        anew = self.model(torch.tensor([self.ids])).logits[0, -len(logits) :]
        torch.testing.assert_close(logits, anew, rtol=1e-4, atol=1e-4)

    @invariant()
    def as_many_positions_are_kept_as_there_are_ids(self) -> None:
        if hasattr(self, "cached"):
            assert self.cached.length == len(self.ids)


Replaying.TestCase.settings = examples(60, stateful_step_count=12)
TestReplaying = Replaying.TestCase


@pytest.mark.parametrize("name", RECURRENT[::3])
def test_a_round_costs_a_recurrent_model_one_forward_mostly(name: str) -> None:
    """A guess of five, of which one comes true, in each of thirty rounds."""
    lm = recurrent(name)
    cached = cached_model(lm, new_cache(lm))
    cached.forward(torch.tensor([[3, 5, 7]]), rows=1)
    for _ in range(30):
        cached.branch(torch.tensor([[3, 5, 7, 9, 11]]), range(-1, 4))
        cached.keep([0, 1])
    assert cached.length == 3 + 30 * 2
    assert 31 < cached.forwards <= 31 + 30 * 2 / 16


@pytest.mark.parametrize("name", RECURRENT[::3])
def test_a_recurrent_targets_cache_can_be_gone_on_with(name: str) -> None:
    """What a generation hands back holds what transformers' own hands back."""
    lm = tiny(name, len(TOKENS)).float()
    ids = torch.tensor([TOKENS("吾輩は猫である").input_ids])
    plain = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    xt = XTokAssisted((lm, TOKENS), PromptLookup())
    ours, theirs = (lm.generate(ids, **plain, custom_generate=way) for way in (xt, None))
    assert torch.equal(ours.sequences, theirs.sequences)
    following = [lm(theirs.sequences[:, -1:], **{CACHE: made[CACHE]}).logits for made in (ours, theirs)]
    torch.testing.assert_close(*following, rtol=1e-4, atol=1e-4)


Caching.TestCase.settings = examples(160, stateful_step_count=15)
TestCaching = Caching.TestCase


@whole_generations
@given(
    draft=st.tuples(st.sampled_from(sorted(ARCHITECTURES)), st.sampled_from(sorted(FAMILIES))),
    target=st.sampled_from(sorted(FAMILIES)),
    pieces=st.lists(texts(), min_size=1, max_size=5),
    window=st.sampled_from([16, 512]),
    width=st.integers(1, 3),
    shares=st.booleans(),
)
def test_a_drafts_cache_holds_its_own_reading_of_the_context_and_its_guess(
    draft: tuple[str, str], target: str, pieces: list[str], window: int, width: int, shares: bool
) -> None:
    """Law 5: caches tell the truth, also a draft's, after each round."""
    tokens, draft_tokens = tokenizer(target), tokenizer(draft[1])
    draft_lm = fitting(draft_tokens, draft[0], 0, window=window)
    continuation = Continuation(encoder(tokens, token_bytes(tokens)))
    made = draft_model((draft_lm, draft_tokens))
    slot: Slot = SharedCache(draft_lm).join() if shares else CachedModel(draft_lm, new_cache(draft_lm))
    reader = Reader(made, Meter(), slot=slot)
    drafter = CrossTokenizerDrafter(made, reader, continuation, 2, Meter())
    data = b""
    for piece in pieces:
        data += piece.encode()
        ids = tokens(data.decode(), add_special_tokens=False).input_ids
        tree = drafter.propose(Context(ids, data, 0), Budget(4, width, longest=6, schedule="constant"))
        assert len(tree.within(6)) == len(tree)
        if not slot.roll_back(kept_by(slot)):
            assert isinstance(slot, CachedModel)
            assert slot._has_slid()
            assert not hasattr(slot.cache, "is_croppable"), "transformers 5.16's sliding layers alone forget so soon"
            continue
        cached = reader._ids[reader._start : reader._start + reader._held]
        assert slot.length == len(cached)
        assert slot.branched == 0
        assert slot.length <= context_window(draft_lm)
        if cached:
            (probe,) = run_forwards([ForwardRequest(slot, [3], 1)])
            assert isinstance(probe, Answer)
            anew = draft_lm(torch.tensor([[*cached, 3]])).logits[0, -1:] if len(cached) < window else probe.logits
            assert_close(probe.logits, anew)
            assert slot.roll_back(len(cached))


def kept_by(slot: Slot) -> int:
    """How many positions a slot keeps, without those of a tree."""
    return slot.length - slot.branched if isinstance(slot, CachedModel) else slot.length


# caches that callers hand in

LENGTH = 12 if quick() else 24
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": LENGTH, "eos_token_id": None, "pad_token_id": 0}
PROMPT = "吾輩は猫である。名前はまだ無い"
IDS = torch.tensor([TOKENS(PROMPT).input_ids])


@cache
def windowed(name: str) -> PreTrainedModel:
    """A target with a window of nine positions in all layers, or, if it has two kinds of layers, in the first."""
    return tiny(name, len(TOKENS)).double()


def filled(lm: PreTrainedModel, made: DynamicCache, length: int) -> DynamicCache:
    with torch.no_grad():
        lm(IDS[:, :length], **{CACHE: made}) if length else None
    return made


def branching(lm: PreTrainedModel, wrong: int) -> ScriptedDrafter:
    """Guesses what the model alone would write, after and beside wrong ids."""
    truth = lm.generate(IDS, **GREEDY)[0].tolist()

    def guess(context: Context) -> Tree:
        right = truth[len(context.ids) :][:3]
        parents = [-1] * (wrong + 1) + list(range(wrong, wrong + len(right) - 1))
        return Tree((*[7] * wrong, *right, 9, 9), (*parents[: wrong + len(right)], wrong, -1)) if right else Tree()

    return ScriptedDrafter(guess)


def continued(lm: PreTrainedModel, kept: DynamicCache, wrong: int = 1) -> Generation:
    """A generation after a cache that holds a part of the prompt."""
    xt = XTokAssisted((lm, TOKENS), branching(lm, wrong), budget=Budget(4, width=4, schedule="constant"))
    return xt.generate(PROMPT, **{CACHE: kept}, **GREEDY)


@whole_generations
@example("mistral", 12, 1)
@example("gemma2", 12, 1)
@example("gemma3_text", 0, 2)
@given(st.sampled_from(["mistral", "gemma2", "gemma3_text"]), st.integers(0, IDS.shape[1] - 1), st.integers(0, 2))
def test_a_cache_without_a_configuration_gives_what_the_target_gives_after_it(name: str, length: int, wrong: int) -> None:
    """Found in review: such a cache keeps all positions, and branches saw those, too, that the target's window hides."""
    lm = windowed(name)
    expected = alone(lm, IDS[0].tolist(), **{CACHE: filled(lm, DynamicCache(), length)}, **GREEDY)
    generation = continued(lm, filled(lm, DynamicCache(), length), wrong)
    assert generation.token_ids == expected
    assert not generation.stats.chains_only
    assert generation.stats.accepted > LENGTH // 2


def with_window(lm: PreTrainedModel, size: int | None) -> Any:
    config = deepcopy(lm.config)
    config.sliding_window = size
    return config


def test_a_cache_that_remembers_more_than_the_targets_window_is_good_for_chains() -> None:
    lm = windowed("mistral")
    kept = [filled(lm, DynamicCache(config=with_window(lm, 14)), 12) for _ in range(2)]
    expected = alone(lm, IDS[0].tolist(), **{CACHE: kept[0]}, **GREEDY)
    generation = continued(lm, kept[1], wrong=0)
    assert generation.token_ids == expected
    assert generation.stats.chains_only
    assert generation.stats.accepted


@pytest.mark.parametrize(("name", "window"), [("llama", 9), ("mistral", 5)])
@pytest.mark.parametrize("length", [0, 12])
def test_a_cache_that_forgets_what_the_target_sees_is_refused(name: str, window: int, length: int) -> None:
    """What several ids at once see of it is more than each would have seen alone."""
    lm = windowed(name)
    kept = filled(lm, DynamicCache(config=with_window(windowed("mistral"), window)), length)
    with pytest.raises(UnsupportedArgumentError, match=rf"keeps {window} .* DynamicCache\(config=model\.config\)"):
        continued(lm, kept)


@pytest.mark.parametrize("name", RECURRENT[:1])
def test_an_empty_cache_without_a_configuration_is_refused_for_other_layers_than_those_of_attention(name: str) -> None:
    lm = tiny(name, len(TOKENS)).float()
    xt = XTokAssisted((lm, TOKENS), PromptLookup())
    with pytest.raises(
        UnsupportedArgumentError, match=r"made without a configuration.* Leave \w+ out, or use DynamicCache\(conf"
    ):
        xt.generate(PROMPT, **{CACHE: DynamicCache()}, **GREEDY)
    assert xt.generate(PROMPT, **{CACHE: DynamicCache(config=lm.config)}, **GREEDY).token_ids


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek_v4", "The cache of DeepseekV4ForCausalLM can't be rolled back"),
        ("mamba", "The cache of MambaForCausalLM can't be rolled back"),
        ("jamba", "JambaForCausalLM keeps no cache after which several ids at once can be forwarded"),
        ("openai-gpt", "OpenAIGPTLMHeadModel keeps no cache"),
        ("prophetnet", "ProphetNetForCausalLM can't be forwarded after its own cache"),
        ("xlm", "XLMWithLMHeadModel (isn't causal|can't be forwarded after its own cache)"),
    ],
)
def test_a_model_that_cant_check_guesses_is_refused_by_name(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{reason}.* as target"):
        target_model((tiny(name, len(TOKENS)), TOKENS))


def test_what_a_cache_keeps_beside_its_layers_is_found_out() -> None:
    """Found with transformers 5.20: what Qwen4 kept there wasn't taken back, and after wrong guesses it picked other ids."""
    lm = deepcopy(model("Llama", VOCABULARY, 0, torch.float64))
    check_usable(lm, "target")

    def keeps(_: Any, args: Any, kwargs: Any) -> None:
        kwargs[CACHE].position_ids = torch.arange(9)

    other = deepcopy(lm)
    other.register_forward_pre_hook(keeps, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match="The cache of LlamaForCausalLM can't be rolled back"):
        check_usable(other, "target")


def test_a_model_whose_layers_are_replaced_is_tried_again() -> None:
    lm = deepcopy(model("Llama", VOCABULARY, 0, torch.float32))
    check_usable(lm, "target")

    class LooksAhead(torch.nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            states = super().forward(ids)
            return states + states.mean(dim=1, keepdim=True)

    lm.model.embed_tokens = LooksAhead(*lm.model.embed_tokens.weight.shape)
    renewed(lm)
    with pytest.raises(UnsupportedModelError, match="isn't causal"):
        check_usable(lm, "target")


@pytest.mark.parametrize("value", [-torch.inf, torch.finfo(torch.float32).min])
def test_ids_that_a_model_masks_widen_no_tolerance(value: float) -> None:
    """Nor what passes for rounding: here a model that isn't causal, with masked ids."""
    plain, masked = (deepcopy(model("Llama", VOCABULARY, 0, torch.float32)) for _ in range(2))

    def mask(_: Any, inputs: Any, logits: Any) -> Any:
        return logits.index_fill(-1, torch.tensor([1, 4]), value)

    masked.lm_head.register_forward_hook(mask)
    for one in (plain, masked):
        check_usable(one, "target")
    assert 0 < traits(masked).tolerance <= traits(plain).tolerance

    def looks_ahead(_: Any, inputs: Any, states: Any) -> Any:
        return states + states.mean(dim=1, keepdim=True)

    other = deepcopy(masked)
    other.model.embed_tokens.register_forward_hook(looks_ahead)
    with pytest.raises(UnsupportedModelError, match="isn't causal"):
        check_usable(other, "target")
