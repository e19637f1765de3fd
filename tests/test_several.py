"""Several drafts at once, drafts with the target's own ids, and schedules."""

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import accumulate, islice, permutations, zip_longest
from random import Random
from statistics import mean
from types import SimpleNamespace
from typing import Any

import front_door
import pytest
import torch
from front_door import BYTES, TARGET, TOKENS
from hypothesis import example, given
from hypothesis import strategies as st
from properties import (
    CLOSE_CALL,
    Drawn,
    arguments,
    excused,
    few_close_calls,
    fresh,
    honoured,
    right,
    samplings,
    with_gap,
    without_batch_limits,
)
from scripted import ScriptedDrafter
from test_trees import paths_of, tree_of
from transformers import LogitsProcessorList
from worlds import (
    KINDS,
    TREE,
    TREE_3,
    Kind,
    budgets,
    deep,
    examples,
    fitting,
    in_turns,
    make_target_expensive,
    model_of,
    quick,
    scaled,
    texts,
    tokenizer,
)
from xtok.drafts.policy.draft import DraftPolicy, Outcome, Proposal

from xtok import Budget, Context, Generation, PromptLookup, TokenRecycling, Tree, XTokAssisted, pair
from xtok.align.tokenbytes import same_tokens, token_bytes
from xtok.align.vocabulary import Vocabulary, identity_projection
from xtok.drafts.base import Drafter, ModelDrafter, Request
from xtok.drafts.given import ModelDraft
from xtok.drafts.growth import Path, grown
from xtok.drafts.heads import HeadsDrafter, described, save_heads
from xtok.drafts.medusa import MedusaHeads
from xtok.drafts.meter import Meter
from xtok.drafts.policy.policy import Batch, DraftBudget, Policy
from xtok.drafts.session import Session
from xtok.drafts.tree import Trie
from xtok.errors import DraftFailedWarning, InvalidInputError, UnsupportedArgumentError
from xtok.models.forwards import Steps, together
from xtok.models.load import draft_model, target_model
from xtok.models.prompts import prompt_ids
from xtok.models.timing import Cost
from xtok.sampling.noise import noise

OTHER = (front_door.OTHER, BYTES)
ALONE = XTokAssisted((TARGET, TOKENS))
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
TRUTH, START = ALONE.generate("吾輩は", **GREEDY).token_ids, len(prompt_ids(TOKENS, "吾輩は"))
"""What the target writes after 吾輩は, and how many ids that is."""


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> HeadsDrafter:
    """Untrained heads of `TARGET`, which say what it says itself."""
    file = tmp_path_factory.mktemp("heads") / "heads.safetensors"
    save_heads(MedusaHeads(3, 32), described(TARGET, token_bytes(TOKENS)), file)
    return HeadsDrafter(file)


# identity, by any mixture

mixtures = st.lists(
    st.sampled_from(["model", "itself", "lookup", "corpus", "nonsense", "chain", "raises"]), min_size=1, max_size=4, unique=True
)


def nonsense(context: Context) -> Tree:
    random, trie = Random(len(context.ids)), Trie()
    for _ in range(3):
        trie.add([random.randrange(3, 40) for _ in range(4)], 0.3)
    return trie.best(len)


def raises_late(context: Context) -> list[int]:
    if len(context.ids) % 3 == 0:
        raise RuntimeError("simulated")
    return [5]


def mixed(names: list[str], target: Any, draft: Kind, seen: str) -> list[Any]:
    kinds = {
        "model": lambda: model_of(draft, copy=1),
        "itself": lambda: (deepcopy(target[0]), target[1]),
        "lookup": PromptLookup,
        "corpus": lambda: PromptLookup([seen, "吾輩は猫である。名前はまだ無い。"]),
        "nonsense": lambda: ScriptedDrafter(nonsense),
        "chain": lambda: ScriptedDrafter(lambda context: context.ids[-4:]),
        "raises": lambda: ScriptedDrafter(raises_late),
    }
    return [kinds[name]() for name in names]


@few_close_calls(0.02)
@pytest.mark.filterwarnings("ignore::xtok.errors.DraftFailedWarning")
@examples(80, share=16)
@given(target=KINDS, draft=KINDS, names=mixtures, prompt=texts(), budget=budgets(), drawn=arguments())
def test_any_mixture_of_drafts_leaves_the_ids_as_transformers_has_them(
    target: Kind, draft: Kind, names: list[str], prompt: str, budget: Budget, drawn: Drawn
) -> None:
    pair = model_of(target)
    drawn = {**honoured(pair[1], drawn), "max_new_tokens": 16}
    expected, gap = with_gap(pair, prompt_ids(pair[1], prompt, split_special_tokens=False), drawn)
    if excused(gap < CLOSE_CALL[torch.float64]):
        return
    xt = make_target_expensive(XTokAssisted(pair, mixed(names, pair, draft, prompt), budget=budget), budget.depth % 2)
    assert xt.generate(prompt, pad_token_id=0, **fresh(drawn)).token_ids == expected


@pytest.mark.filterwarnings("ignore::xtok.errors.DraftFailedWarning")
@examples(80, share=16)
@given(target=KINDS, draft=KINDS, names=mixtures, prompt=texts(), budget=budgets(), drawn=arguments(), sampling=samplings())
def test_any_mixture_of_drafts_leaves_sampled_ids_as_they_are_without_a_draft(
    target: Kind, draft: Kind, names: list[str], prompt: str, budget: Budget, drawn: Drawn, sampling: Drawn
) -> None:
    pair = model_of(target)
    drawn = without_batch_limits({**honoured(pair[1], drawn), "max_new_tokens": 12, "pad_token_id": 0, **sampling})
    drawn.pop("num_return_sequences", None)
    expected = XTokAssisted(pair).generate(prompt, **fresh(drawn))
    xt = make_target_expensive(XTokAssisted(pair, mixed(names, pair, draft, prompt), budget=budget), budget.depth % 2)
    generation = xt.generate(prompt, **fresh(drawn))
    assert generation.token_ids == expected.token_ids
    mine, closest = generation.stats.min_margin, expected.stats.min_margin
    assert (mine is None) == (closest is None)
    if closest is not None:
        assert mine == pytest.approx(closest, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("sampled", [False, True])
def test_heads_among_others_leave_the_ids_as_they_are(heads: HeadsDrafter, sampled: bool) -> None:
    asked = GREEDY | ({"do_sample": True, "seed": 3} if sampled else {})
    expected = ALONE.generate("吾輩は", **asked)
    for budget in (None, TREE_3, Budget(3, width=1, schedule="constant")):
        generation = XTokAssisted((TARGET, TOKENS), [heads, OTHER, PromptLookup()], budget=budget).generate("吾輩は", **asked)
        assert generation.token_ids == expected.token_ids
        assert generation.stats.draft_error is None


# merging

trees = st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.floats(0.01, 0.2)), min_size=1, max_size=5)


class Guesses:
    """A draft that guesses the same whatever it reads."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def start(self, request: Request) -> Drafter:
        return ScriptedDrafter(lambda context: self.tree)


def merged(guesses: Sequence[Tree], budget: Budget) -> tuple[Tree, Session]:
    request: Any = SimpleNamespace(meter=Meter(), vocabulary=SimpleNamespace(size=9, view=token_bytes(TOKENS)))
    session = Session([Guesses(tree) for tree in guesses], request, Policy([DraftPolicy() for _ in guesses]), [])
    return together([session.propose(budget)])[0], session


@examples(300)
@given(st.lists(trees, min_size=1, max_size=4), st.booleans())
def test_merging_loses_no_candidate_and_adds_none(found: list[list[tuple[list[int], float]]], silent: bool) -> None:
    guesses = [tree_of(one) for one in found]
    if silent:  # a drafter that doesn't say how probable its guesses are
        guesses[0] = Tree(guesses[0].tokens, guesses[0].parents)
    tree, session = merged(guesses, Budget(nodes=1000, depth=5, width=4, schedule="constant"))
    assert set(paths_of(tree)) == {path for one in guesses for path in paths_of(one)}
    for path, source in zip(paths_of(tree), session.sources(tree), strict=True):
        assert source is not None and path in paths_of(guesses[source])


@examples(200)
@given(st.lists(trees, min_size=2, max_size=4), st.integers(1, 12))
def test_a_merged_tree_keeps_within_the_budget(found: list[list[tuple[list[int], float]]], nodes: int) -> None:
    guesses = [tree_of(one) for one in found]
    tree, _ = merged(guesses, Budget(nodes=nodes, depth=5, width=4, schedule="constant"))
    assert len(tree) == min(nodes, len({path for one in guesses for path in paths_of(one)}))


def test_what_two_drafts_guess_is_believed_more_than_what_one_does() -> None:
    one, both = tree_of([([1], 0.2)]), tree_of([([1], 0.2), ([2], 0.2)])
    tree, _ = merged([one, both], Budget(nodes=1, depth=5, width=4, schedule="constant"))
    assert tree.tokens == (1,)


def test_a_draft_that_raises_takes_none_of_the_others_with_it() -> None:
    def fails(context: Context) -> list[int]:
        raise MemoryError("simulated")

    with pytest.warns(DraftFailedWarning, match="simulated"):
        generation = XTokAssisted((TARGET, TOKENS), [ScriptedDrafter(fails), right(TRUTH, START)], budget=TREE).generate(
            "吾輩は", **GREEDY
        )
    assert generation.token_ids == TRUTH
    assert generation.stats.tokens_per_forward > 3


def test_each_draft_is_told_what_was_accepted_of_it() -> None:
    drafts = [right(TRUTH, START, 1), ScriptedDrafter(lambda context: [7]), right(TRUTH, START, 3)]
    for width in (1, 4):
        stats = (
            XTokAssisted((TARGET, TOKENS), drafts, budget=Budget(4, width, schedule="constant"))
            .generate("吾輩は", **GREEDY)
            .stats
        )
        assert sum(stats.accepted_by_draft) == stats.accepted > 8
        assert stats.accepted_by_draft[1] == 0
        assert stats.accepted_by_draft[2] > 5


# a draft with the target's ids


def padded(tokens: Any) -> Any:
    """The same tokenizer with control tokens after its own."""
    more = deepcopy(tokens)
    more.add_special_tokens({"additional_special_tokens": ["<|one|>", "<|two|>"]})
    return more


def test_tokenizers_are_the_same_by_their_tokens_and_not_by_their_sizes() -> None:
    def same(one: Any, other: Any) -> bool:
        return same_tokens(one, token_bytes(one), other, token_bytes(other))

    other = deepcopy(BYTES)
    other.add_tokens(["another"])
    assert same(TOKENS, deepcopy(TOKENS))
    assert same(TOKENS, padded(TOKENS))
    assert same(padded(TOKENS), TOKENS)
    assert not same(BYTES, other)
    assert not same(TOKENS, BYTES)
    shuffled = tokenizer("byte-level BPE", 1)
    assert not same(BYTES, shuffled)


@pytest.mark.parametrize(("width", "sampled"), [(1, True), (4, False), *deep((1, False), (4, True))])
def test_a_draft_with_the_targets_ids_that_is_the_target_is_always_right(width: int, sampled: bool) -> None:
    """In sampled texts, too: both look at the same noise. It reads ids, so nothing is lost on the way."""
    asked = GREEDY | ({"do_sample": True, "seed": 3, "temperature": 1.5} if sampled else {})
    xt = XTokAssisted(
        (TARGET, TOKENS), [(deepcopy(TARGET), padded(TOKENS))], budget=Budget(3, width=width, nodes=200, schedule="constant")
    )
    for prompt in ("吾輩は", "The quick brown", "🍣"):
        generation = xt.generate(prompt, **asked)
        assert generation.token_ids == ALONE.generate(prompt, **asked).token_ids
        committed = [one.committed for one in generation.rounds[1:-1]]
        if width == 1 or sampled:  # a greedy tree spends on what is less likely, too
            assert set(committed) == {4}
        assert mean(committed) > 3


def test_a_draft_with_the_targets_ids_and_less_of_them_guesses_what_it_knows() -> None:
    """Vocabularies may be padded to any size; an id that the draft hasn't is left out of what it reads."""
    small = fitting(TOKENS, "GPT2", 1)
    wide = fitting(padded(TOKENS), "Llama", 0)
    assert wide.config.vocab_size > small.config.vocab_size
    for target, draft in ((wide, small), (small, wide)):
        xt = XTokAssisted((target, TOKENS), [(draft, TOKENS)], budget=TREE_3)
        again = LogitsProcessorList([PicksAll()])
        generation = xt.generate("吾輩は", logits_processor=again, **GREEDY)
        assert (
            generation.token_ids
            == XTokAssisted((target, TOKENS)).generate("吾輩は", logits_processor=again, **GREEDY).token_ids
        )
        assert generation.stats.draft_error is None


class PicksAll:
    """Leads through the whole vocabulary, the rows beyond the tokenizer's included."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        only = torch.full_like(scores, -torch.inf)
        only[:, -1 - input_ids.shape[1] % 9] = 0
        return only


def test_a_draft_with_the_targets_ids_sees_no_padding() -> None:
    inputs = TOKENS(["吾輩は", "吾輩は猫である。名前はまだ無い"], return_tensors="pt", padding=True, padding_side="left")
    inputs.pop("token_type_ids", None)
    xt = XTokAssisted((TARGET, TOKENS), [(deepcopy(TARGET), TOKENS)], budget=Budget(3, width=1, schedule="constant"))
    seen = []
    original = xt.setup.drafts[0]

    class Noted:
        def start(self, request: Request) -> Drafter:
            made: Any = original.start(request)
            seen.append(made.reader)
            return made

    xt._setup = replace(xt.setup, drafts=(Noted(),))
    output = TARGET.generate(**inputs, custom_generate=xt, pad_token_id=0, **GREEDY)
    expected = TARGET.generate(**inputs, pad_token_id=0, **GREEDY)
    assert torch.equal(output, expected)
    for reader, row, mask in zip(seen, inputs["input_ids"], inputs["attention_mask"], strict=True):
        held = row[mask != 0].tolist()
        assert reader._ids[: len(held)] == held


def test_the_projection_of_the_same_ids_is_each_to_itself() -> None:
    found = identity_projection(5, 7)
    assert found.draft_ids.tolist() == found.target_ids.tolist() == [0, 1, 2, 3, 4]
    assert found.weights.tolist() == [1.0] * 5


# what may be given


def test_a_model_guesses_together_with_what_the_text_repeats_and_a_list_is_taken_as_it_is() -> None:
    target = (TARGET, TOKENS)
    assert len(XTokAssisted(target, OTHER).setup.drafts) == 3
    assert len(XTokAssisted(target, [OTHER]).setup.drafts) == 1
    assert len(XTokAssisted(target, OTHER, budget=Budget(5, width=1, schedule="constant")).setup.drafts) == 1
    assert len(XTokAssisted(target, PromptLookup()).setup.drafts) == 1
    assert len(XTokAssisted(target, [OTHER, OTHER, PromptLookup()]).setup.drafts) == 3
    assert not XTokAssisted(target, []).setup.drafts


def test_what_takes_one_model_refuses_several() -> None:
    target = (TARGET, TOKENS)
    with pytest.raises(UnsupportedArgumentError, match="takes one draft model, or sequential heads, alone"):
        XTokAssisted(target, [OTHER, PromptLookup()], acceptance="rejection")


# schedules


def test_the_heuristic_schedule_guesses_two_more_after_a_guess_that_was_right_to_its_end() -> None:
    truth = ALONE.generate("吾輩は", **GREEDY | {"max_new_tokens": 40}).token_ids
    start, depths = len(prompt_ids(TOKENS, "吾輩は")), list[int]()

    class Oracle:
        """Right but in every third round."""

        def propose(self, context: Context, budget: Budget) -> Tree:
            depths.append(budget.depth)
            rest = truth[len(context.ids) - start :][: budget.depth]
            return ScriptedDrafter(lambda _: [7, *rest] if len(depths) % 3 == 0 else rest).propose(context, budget)

    xt = XTokAssisted((TARGET, TOKENS), Oracle(), budget=Budget(2, width=1, schedule="heuristic"))
    assert xt.generate("吾輩は", **GREEDY | {"max_new_tokens": 40}).token_ids == truth
    assert depths[:6] == [2, 4, 6, 5, 7, 9]


def test_a_draft_continues_only_tokens_that_it_is_confident_of() -> None:
    def expand(front: list[Path]) -> Steps[list[list[Path]]]:
        yield from ()
        return [[Path(path.probability * 0.5, 0, path.written + b"a", 0.5)] for path in front]

    def grows(first: float, confidence: float) -> int:
        budget = Budget(9, confidence=confidence, width=4, schedule="constant")
        return len(together([grown([Path(first, -1, b"x", first)], budget, expand)])[0])

    assert grows(0.9, confidence=0.6) == 2
    assert grows(0.9, confidence=0.4) == 9
    assert grows(0.3, confidence=0.4) == 1


def test_a_confident_draft_drafts_less_than_one_that_never_stops() -> None:
    runs = [
        XTokAssisted(pair.TARGET, pair.DRAFT, budget=Budget(12, width=1, confidence=confidence, schedule="constant"))
        for confidence in (0.0, 0.5)
    ]
    stats = [xt.generate(pair.prompts()[0], max_new_tokens=40, do_sample=False).stats for xt in runs]
    assert stats[1].draft_forwards < 0.8 * stats[0].draft_forwards


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"schedule": "linear"}, "schedule is 'linear'; use one of 'cost', 'constant', 'heuristic'"),
        ({"confidence": 1.5}, "confidence is 1.5"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Budget(**wrong)


# what a drafter may return, and what may fail


@pytest.mark.parametrize(
    "odd",
    [
        Tree((5,), (-1,), probabilities=(9000.0,)),
        Tree((5, 6), (-1, 0), probabilities=(float("inf"), -3.0)),
        Tree((torch.tensor(5),), (-1,), probabilities=(torch.tensor(0.5),)),  # type: ignore[arg-type]
        Tree((5,), (-1,), probabilities=(0.0,)),
    ],
)
def test_numbers_that_are_no_probabilities_are_taken_for_the_nearest_one(odd: Tree) -> None:
    for schedule in ("cost", "constant", "heuristic"):
        budget = Budget(3, schedule=schedule, width=4)
        generation = XTokAssisted((TARGET, TOKENS), [ScriptedDrafter(lambda _: odd), PromptLookup()], budget=budget).generate(
            "吾輩は", **GREEDY
        )
        assert generation.token_ids == TRUTH
        assert generation.stats.draft_error is None


@pytest.mark.parametrize(
    "wrong",
    [
        Tree((5, 6), (-1, -1), probabilities=(0.5, float("nan"))),
        Tree((5,), (-1,), probabilities=("x",)),  # type: ignore[arg-type]
        Tree((5,), (-1,), probabilities=(None,)),  # type: ignore[arg-type]
        Tree((5.5,), (-1,)),  # type: ignore[arg-type]
    ],
)
def test_a_tree_that_makes_no_sense_costs_speed_only(wrong: Tree) -> None:
    drafts = [ScriptedDrafter(lambda _: wrong), PromptLookup()]
    with pytest.warns(DraftFailedWarning):
        generation = XTokAssisted((TARGET, TOKENS), drafts).generate("吾輩は", **GREEDY)
    assert generation.token_ids == TRUTH


def test_a_draft_that_can_not_be_made_costs_speed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(texts: Sequence[str]) -> None:
        raise MemoryError("simulated")

    monkeypatch.setattr("xtok.drafts.lookup.Corpus", full)
    xt = XTokAssisted((TARGET, TOKENS), [PromptLookup(corpus=["吾輩は猫である。"]), OTHER], budget=TREE_3)
    with pytest.warns(DraftFailedWarning, match="simulated"):
        generation = xt.generate("吾輩は", **GREEDY)
    assert generation.token_ids == TRUTH
    assert generation.stats.draft_forwards


class Knows(ModelDrafter):
    """A model that guesses the same whatever it reads."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def start(self, request: Request) -> Drafter:
        self.meter = request.meter
        return self

    def guess(self, context: Context, budget: Budget) -> Steps[Tree]:
        with self.meter.drafting():
            self.meter.drafts(Cost(1, 0.0))
        return self.tree
        yield  # a generator


class Repeats(Knows):
    """A draft that only repeats text. Like token recycling, it records what its guesses cost."""

    only_repeats = True


@pytest.mark.parametrize("first", ["model", "repeating"])
def test_what_only_repeated_text_says_shares_what_models_leave_in_whatever_order_drafts_are(first: str) -> None:
    """Found in review: a model that was cheaper than prompt lookup limited nothing, and two that agreed were limited."""
    model, repeating = Knows(tree_of([([1], 0.9), ([4], 0.05)])), Repeats(tree_of([([2], 0.3), ([3], 0.3)]))
    other, recycling = Knows(tree_of([([3], 0.4)])), Repeats(tree_of([([1], 0.8)]))
    drafts = [model, other, recycling, repeating] if first == "model" else [repeating, recycling, other, model]
    request: Any = SimpleNamespace(meter=Meter(), vocabulary=SimpleNamespace(size=9, view=token_bytes(TOKENS)))
    session = Session(drafts, request, Policy([DraftPolicy() for _ in drafts]), [])
    tree = together([session.propose(Budget(nodes=9, depth=2, width=4, schedule="constant"))])[0]
    found = dict(zip(tree.tokens, tree.probabilities, strict=True))
    assert found == pytest.approx({1: 0.9, 2: 0.3 * 0.05, 3: 0.4, 4: 0.05}), "recycling, which gives 1 0.8, limits nothing"


def test_a_probability_is_never_more_than_its_parents_whatever_rounding_does() -> None:
    """Found in review: in floats a node had more than its parent, and was kept without it."""
    trie = Trie()
    trie.mix(Tree((1, 2), (-1, 0)), [0.4942463680284966, 0.49424636804294275])
    assert trie.best(lambda probabilities: 1).tokens == (1,)
    trie.mix(Tree((1, 2), (-1, 0)), [0.9999988675117493, 0.9999988675117493], 1)
    assert trie.best(lambda probabilities: 1).tokens == (1,)


def test_the_first_time_in_a_generation_is_marked() -> None:
    _, session = merged([tree_of([([1], 0.5)]), tree_of([([2], 0.5)])], Budget(depth=5, width=4, schedule="constant"))
    assert [one.first for one in session.proposals] == [True, True]
    together([session.propose(Budget(depth=5, width=4, schedule="constant"))])
    assert [one.first for one in session.proposals] == [False, False]


class Remembers:
    """A draft whose drafters keep a state: what they were shown."""

    def __init__(self) -> None:
        self.started: list[Any] = []

    def start(self, request: Request) -> Drafter:
        self.started.append(ScriptedDrafter(lambda context: seen.append(list(context.ids)) or Tree()))  # type: ignore[func-returns-value]
        seen = self.started[-1].seen = []
        return self.started[-1]


@pytest.mark.parametrize("way", ["list", "batch", "samples"])
def test_a_draft_of_the_callers_own_starts_a_drafter_for_each_text_and_shows_it_that_text_alone(way: str) -> None:
    draft = Remembers()
    xt = XTokAssisted((TARGET, TOKENS), [draft], budget=TREE_3)
    if way == "batch":
        ids = torch.tensor([[5, 6], [7, 8]])
        texts = TARGET.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=xt, pad_token_id=0, **GREEDY).tolist()
    elif way == "list":
        made = xt.generate(PROMPTS, **GREEDY)
        texts = [prompt_ids(TOKENS, prompt) + one.token_ids for prompt, one in zip(PROMPTS, made, strict=True)]
    else:
        made = xt.generate("吾輩は", **{**GREEDY, "do_sample": True, "num_return_sequences": 3, "seed": 3})
        texts = [prompt_ids(TOKENS, "吾輩は") + one.token_ids for one in made]
    assert len(draft.started) == len(texts)
    for drafter, text in zip(draft.started, texts, strict=True):
        assert drafter.seen
        assert all(text[: len(ids)] == ids for ids in drafter.seen)


class Both(Remembers):
    """A drafter with a `start` that means something else, as a thread's does."""

    def start(self) -> None:  # type: ignore[override]
        raise AssertionError("not meant for xtok")

    def propose(self, context: Context, budget: Budget) -> Tree:
        self.started.append(context)
        return Tree((5, 6), (-1, 0))


def test_what_has_propose_is_a_drafter_whatever_else_it_has() -> None:
    drafter = Both()
    assert not XTokAssisted((TARGET, TOKENS), drafter).generate("吾輩は", **GREEDY).stats.draft_error
    assert drafter.started


@pytest.mark.parametrize("given", [PromptLookup, HeadsDrafter, ScriptedDrafter])
def test_a_class_in_place_of_a_draft_is_refused(given: Any) -> None:
    with pytest.raises(InvalidInputError, match="The draft is the class"):
        XTokAssisted((TARGET, TOKENS), given)


class Empty(ScriptedDrafter):
    """A drafter without anything in it yet, and one that no truth can be had of."""

    def __len__(self) -> int:
        return 0


class Undecided(ScriptedDrafter):
    def __bool__(self) -> bool:
        raise RuntimeError("neither")


@pytest.mark.parametrize("kind", [Empty, Undecided])
def test_a_drafter_is_asked_whatever_its_truth_is(kind: Any) -> None:
    xt = XTokAssisted((TARGET, TOKENS), kind(lambda _: Tree((5,), (-1,))), budget=Budget(schedule="constant"))
    assert xt.generate("吾輩は", **GREEDY).stats.proposed


@pytest.mark.parametrize(
    "wrong", [{"guess": torch.tensor([1, 2])}, {"guess": 5}, {"distributions": 5}, {"distributions": (5, None)}]
)
@pytest.mark.parametrize("width", [1, 4])
def test_a_tree_whose_extras_make_no_sense_is_taken_without_them(wrong: dict[str, Any], width: int) -> None:
    drafts = [ScriptedDrafter(lambda _: Tree((5, 6), (-1, 0), **wrong)), PromptLookup()]
    xt = XTokAssisted((TARGET, TOKENS), drafts, budget=Budget(3, width, schedule="constant"))
    generation = xt.generate("吾輩は", **GREEDY)
    assert generation.token_ids == TRUTH
    assert generation.stats.draft_error is None


def test_a_start_that_gives_no_drafter_is_reported() -> None:
    class Nothing:
        def start(self, request: Request) -> None:
            return None

    with pytest.warns(DraftFailedWarning, match="must return a drafter"):
        XTokAssisted((TARGET, TOKENS), [Nothing()]).generate("吾輩は", **GREEDY)


def test_a_budget_may_be_of_a_class_of_its_own() -> None:
    @dataclass(frozen=True)
    class Named(Budget):
        name: str = "mine"

    expected = TRUTH
    assert XTokAssisted((TARGET, TOKENS), OTHER, budget=Named(3)).generate("吾輩は", **GREEDY).token_ids == expected


# one policy for all texts of an instance

PROMPTS = ["吾輩は", "The quick brown", "🍣", "メロス"]


def judged(generations: Sequence[Generation], length: int) -> int:
    """How many rounds could have had a guess: not the prefill, and not the one that the last id is left for."""
    committed = [list(accumulate(one.committed for one in text.rounds)) for text in generations]
    return sum(before < length - 1 for text in committed for before in text[:-1])


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences each round has that policies observe."""
    sizes, right = list[int](), Policy.observe

    def observe(self: Policy, batch: Batch, outcomes: Sequence[Outcome], seconds: float, **named: Any) -> None:
        assert batch.sequences >= len(outcomes) > 0 < seconds
        sizes.append(len(outcomes))
        right(self, batch, outcomes, seconds, **named)

    monkeypatch.setattr(Policy, "observe", observe)
    return sizes


@pytest.mark.parametrize("schedule", ["cost", *deep("constant")])
@pytest.mark.parametrize("way", ["list", "one by one", "samples", "batch", "streams"])
def test_the_policy_knows_all_rounds_of_all_texts(way: str, schedule: Any, observed: list[int]) -> None:
    """Found in review: each text of a list had a policy of its own, and the last to end replaced those of the others."""
    xt = XTokAssisted((TARGET, TOKENS), [OTHER, PromptLookup()], budget=Budget(3, schedule=schedule, width=4))
    generations: list[Generation] = []
    if way == "list":
        generations = xt.generate(PROMPTS, **GREEDY)
    elif way == "one by one":
        generations = [xt.generate(prompt, **GREEDY) for prompt in PROMPTS]
    elif way == "samples":
        generations = xt.generate("吾輩は", **{**GREEDY, "do_sample": True, "num_return_sequences": 4, "seed": 3})
    elif way == "batch":
        TARGET.generate(torch.tensor([[5, 6], [7, 8]]), custom_generate=xt, pad_token_id=0, **GREEDY)
    else:
        list(zip_longest(*(ended(xt.stream(prompt, **GREEDY), generations) for prompt in PROMPTS)))
    if generations:
        assert sum(observed) >= judged(generations, 24)
        assert sum(observed) == sum(len(one.rounds) - 1 for one in generations)
    else:
        assert sum(observed) > 24, "more than one row can have"
    assert (max(observed) > 1) == (way in ("list", "samples", "batch"))


@pytest.mark.parametrize(("texts", "guesses"), in_turns([1, 2, 4], [[True], [False], [True, False, False]]))
def test_drafts_guess_in_rounds_whose_batch_guesses(texts: int, guesses: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    decided, guessed, judged = list[bool](), list[bool](), list[tuple[int, int]]()

    def decides(_: Policy, sequences: int) -> Batch:
        decided.append(guesses[len(decided) % len(guesses)])
        return Batch(sequences, decided[-1])

    def guess(_: Context) -> list[int]:
        guessed.append(decided[-1])
        return [5]

    def observe(_: Policy, batch: Batch, outcomes: Sequence[Outcome], seconds: float, *, is_pure: bool) -> None:
        assert seconds > 0
        judged.append((batch.sequences, sum(one.picks for one in outcomes)))

    wanted = ALONE.generate(PROMPTS[:texts], **GREEDY)
    monkeypatch.setattr(Policy, "batch", decides)
    monkeypatch.setattr(Policy, "observe", observe)
    made = XTokAssisted((TARGET, TOKENS), ScriptedDrafter(guess)).generate(PROMPTS[:texts], **GREEDY)
    assert [one.token_ids for one in made] == [one.token_ids for one in wanted]
    assert all(guessed) and bool(guessed) == (True in guesses)
    assert decided and judged
    assert all(size == texts <= picks for size, picks in judged[:4])


def ended(pieces: Any, generations: list[Generation]) -> Iterator[str]:
    """A stream that keeps what it returns."""
    generations.append((yield from pieces))


@pytest.mark.scaled
def test_no_round_of_any_thread_is_lost() -> None:
    policy, threads, rounds = Policy([DraftPolicy(), DraftPolicy()]), 8, scaled(2000)
    tree = Tree((1, 2), (-1, 0), probabilities=(0.9, 0.5))

    def play(thread: int) -> None:
        for step in range(rounds):
            batch = policy.batch(1)
            limit = DraftBudget.of(Budget(), policy, policy.drafts[0], batch, 0.0, 1, ())
            policy.asks(0, 0.0, batch), limit.expanded(1, [0.9, 0.5]), limit.verified([0.9, 0.5]), policy.probabilities(1, tree)
            asked = [Proposal(tree, 0.0, [Cost(1 << step % 6, 0.1)], own=frozenset([draft])) for draft in range(2)]
            policy.observe(batch, [Outcome(3, 3, 0.2, asked, [1, 2, 3], [0, 1])], 1.0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(play, range(threads)))
    finally:
        sys.setswitchinterval(interval)
    assert [sum(cell[0] for cell in one.rounds.cells.values()) for one in policy.shared.sizes.values()] == [threads * rounds]
    assert [sum(cell[0] for cell in draft.forward.cells.values()) for draft in policy.drafts] == [threads * rounds] * 2


def test_a_copy_of_an_instance_begins_with_nothing_learnt() -> None:
    xt = XTokAssisted((TARGET, TOKENS), [PromptLookup()])
    xt.generate("吾輩は", **GREEDY)
    other = deepcopy(xt)
    assert xt.setup.policy.shared.sizes
    assert not other.setup.policy.shared.sizes
    assert other.generate("吾輩は", **GREEDY).token_ids == xt.generate("吾輩は", **GREEDY).token_ids


# guesses after a carried token

CARRIED = 4


def after_carried(found: Sequence[Sequence[tuple[list[int], float]]], budget: Budget) -> tuple[Tree, Session]:
    """What drafts that guess each of some trees after the carried token make together, and by whom."""
    _, session = merged([tree_of(one) for one in found], budget)
    session.extend([7], carried=CARRIED)
    return together([session.propose(budget)])[0], session


@examples(100)
@given(st.lists(trees, min_size=1, max_size=3), st.integers(1, 12), st.integers(1, 5), st.integers(0, 12))
@example([[([1], 0.5)]], 1, 1, 0)
def test_a_carried_token_is_guessed_first_and_drafts_are_merged_after_it(
    found: list[list[tuple[list[int], float]]], nodes: int, longest: int, left: int
) -> None:
    budget = Budget(nodes=nodes, longest=longest, depth=5, width=4, schedule="constant")
    tree, session = after_carried(found, budget)
    rest = replace(budget, nodes=max(1, nodes - 1), longest=longest - 1 if nodes > 1 else 0)
    plain, other = merged([tree_of(one) for one in found], rest)
    assert paths_of(tree) == [(CARRIED,), *((CARRIED, *path) for path in paths_of(plain))]
    assert session.sources(tree) == (None, *other.sources(plain))
    cut = session.cut(left)
    assert len(cut) == min(left, len(tree)) and set(paths_of(cut)) <= set(paths_of(tree))
    assert not cut or (cut.tokens[0] == CARRIED and session.sources(cut)[0] is None)


@pytest.mark.parametrize(
    ("block", "accepted", "learnt"), [([CARRIED, 1, 2], [1], True), ([CARRIED], [0], False), ([5, 1, 2], [], False)]
)
def test_guesses_are_judged_only_if_the_carried_token_before_them_was_right(
    block: list[int], accepted: list[int], learnt: bool
) -> None:
    _, session = after_carried([[([1], 0.5), ([3], 0.2)]], Budget(depth=5, width=4))
    session.policy.observe(Batch(), [Outcome()], 1.0)
    tree = together([session.propose(Budget(depth=5, width=4))])[0]
    assert tree.tokens[0] == CARRIED
    before = deepcopy(session.policy.drafts[0].calibration)
    session.extend(block)
    outcome = session.outcome(4)
    session.policy.observe(Batch(), [outcome], 1.0)
    assert (session.policy.drafts[0].calibration != before) == learnt
    assert outcome.picks == len(block)
    assert (session._meter.accepted_by_draft or []) == (accepted or [0])


def drafts_of(target: Vocabulary) -> dict[str, Any]:
    recycling = TokenRecycling()
    learner = recycling.start(Request(target, Meter()))
    generator = torch.Generator().manual_seed(0)
    for first in range(0, target.size, 64):
        ids = [*range(first, min(first + 64, target.size))]
        learner.learn(ids, 3 * torch.randn(len(ids), target.size, generator=generator))
        learner.propose(Context([], b"", 0), Budget())
    models = {"its own ids": (fitting(TOKENS, "GPTNeoX", 3), TOKENS), "other ids": OTHER}
    return {"recycling": recycling} | {name: ModelDraft(draft_model(model), target) for name, model in models.items()}


@pytest.mark.parametrize("width", [*deep(1), 4])
@pytest.mark.parametrize("samples", [*deep(False), True])
@pytest.mark.parametrize("kind", ["its own ids", "other ids", "recycling"])
def test_a_last_id_that_another_one_replaces_changes_no_guess(kind: str, samples: bool, width: int) -> None:
    """With fixed shapes the last id that drafters are shown may not be committed: then another one comes in its place."""
    target = target_model((TARGET, TOKENS)).vocabulary
    draft, view = drafts_of(target)[kind], target.view
    guessed, budget = 0, Budget(3, width=width, nodes=999, schedule="constant")
    sampled, step = noise(7, 0, b"") if samples else None, 8 if quick() else 1

    def guess(drafter: Drafter, ids: list[int]) -> Tree:
        return drafter.propose(Context(ids, view.to_bytes(ids), 0, noise=sampled), budget)

    def started() -> Drafter:
        return draft.start(Request(target, Meter(), samples=samples))

    for prompt in ("吾輩は猫である。吾輩は猫", "メロスは激", "The quick brown"):
        ids = TOKENS(prompt, add_special_tokens=False).input_ids
        used = started()
        for wrong, fits in islice(permutations(TOKENS("名 った brown", add_special_tokens=False).input_ids, 2), 0, None, step):
            guess(used, [*ids, wrong])
            again, anew = guess(used, [*ids, fits]), guess(started(), [*ids, fits])
            guessed += len(anew)
            assert again.tokens == anew.tokens and again.parents == anew.parents
            assert again.probabilities == pytest.approx(anew.probabilities, rel=1e-3)
            ids = [*ids, fits]
    assert guessed > 10
