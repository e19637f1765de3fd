"""Several drafts at once, drafts with the target's own ids, and schedules."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import islice, permutations
from statistics import mean
from types import SimpleNamespace
from typing import Any

import front_door
import pytest
import torch
from front_door import BYTES, TARGET, TOKENS
from hypothesis import example, given
from hypothesis import strategies as st
from properties import padded, right
from scripted import ScriptedDrafter, paths_of, tree_of
from worlds import TREE_3, fitting, tokenizer

from xtok import Budget, Context, PromptLookup, TokenRecycling, Tree, XTokAssisted
from xtok.align.tokenbytes import same_tokens, token_bytes
from xtok.align.vocabulary import Vocabulary
from xtok.drafts.base import Drafter, Request
from xtok.drafts.given import ModelDraft
from xtok.drafts.meter import Meter
from xtok.drafts.policy.policy import DraftPolicy, Outcome, Policy
from xtok.drafts.session import Guess, Session
from xtok.models.forwards import run_lockstep
from xtok.models.load import draft_model, target_model
from xtok.models.prompts import prompt_ids
from xtok.sampling.noise import noise

OTHER = (front_door.OTHER, BYTES)
ALONE = XTokAssisted((TARGET, TOKENS))
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
TRUTH, START = ALONE.generate("吾輩は", **GREEDY).token_ids, len(prompt_ids(TOKENS, "吾輩は"))
"""What the target writes after 吾輩は, and how many ids that is."""


# merging

trees = st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.floats(0.01, 0.2)), min_size=1, max_size=5)


class Guesses:
    """A draft that guesses the same whatever it reads."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def start(self, request: Request) -> Drafter:
        return ScriptedDrafter(lambda context: self.tree)


def merged(guesses: Sequence[Tree], budget: Budget) -> tuple[Guess, Session]:
    request: Any = SimpleNamespace(meter=Meter(), vocabulary=SimpleNamespace(size=9, view=token_bytes(TOKENS)))
    session = Session([Guesses(tree) for tree in guesses], request, Policy([DraftPolicy() for _ in guesses]), [])
    return run_lockstep([session.propose(budget)])[0], session


@given(st.lists(trees, min_size=1, max_size=4), st.booleans(), st.integers(1, 12) | st.just(1000))
def test_merging_adds_no_candidate_and_loses_none_but_those_beyond_the_budget(
    found: list[list[tuple[list[int], float]]], silent: bool, nodes: int
) -> None:
    guesses = [tree_of(one) for one in found]
    if silent:  # a drafter that doesn't say how probable its guesses are
        guesses[0] = Tree(guesses[0].tokens, guesses[0].parents)
    guess, _ = merged(guesses, Budget(nodes=nodes, depth=5, width=4, schedule="constant"))
    candidates = {path for one in guesses for path in paths_of(one)}
    assert set(paths_of(guess.tree)) <= candidates and len(guess.tree) == min(nodes, len(candidates))
    for path, source in zip(paths_of(guess.tree), guess.owners, strict=True):
        assert source is not None and path in paths_of(guesses[source])


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


def with_more_controls(tokens: Any) -> Any:
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
    assert same(TOKENS, with_more_controls(TOKENS))
    assert same(with_more_controls(TOKENS), TOKENS)
    assert not same(BYTES, other)
    assert not same(TOKENS, BYTES)
    shuffled = tokenizer("byte-level BPE", 1)
    assert not same(BYTES, shuffled)


@pytest.mark.parametrize(("width", "sampled"), [(1, True), (4, False)])
def test_a_draft_with_the_targets_ids_that_is_the_target_is_always_right(width: int, sampled: bool) -> None:
    """In sampled texts, too: both look at the same noise. It reads ids, so nothing is lost on the way."""
    asked = GREEDY | ({"do_sample": True, "seed": 3, "temperature": 1.5} if sampled else {})
    xt = XTokAssisted(
        (TARGET, TOKENS),
        [(deepcopy(TARGET), with_more_controls(TOKENS))],
        budget=Budget(3, width=width, nodes=200, schedule="constant"),
    )
    for prompt in ("吾輩は", "🍣"):
        generation = xt.generate(prompt, **asked)
        assert generation.token_ids == ALONE.generate(prompt, **asked).token_ids
        committed = [one.committed for one in generation.rounds[1:-1]]
        if width == 1 or sampled:  # a greedy tree spends on what is less likely, too
            assert set(committed) == {4}
        assert mean(committed) > 3


@pytest.mark.parametrize("is_small", [True, False])
def test_a_draft_with_the_targets_ids_and_less_or_more_of_them_guesses_what_it_knows(is_small: bool) -> None:
    """Vocabularies may be padded to any size; an id that the draft hasn't is left out of what it reads."""
    models = fitting(with_more_controls(TOKENS), "Llama", 0), fitting(TOKENS, "GPT2", 1)
    target, draft = models if is_small else models[::-1]

    def leads(_: int, ids: torch.Tensor) -> list[int]:
        """Through the last rows of the vocabulary, beyond the tokenizer's."""
        return [target.config.vocab_size - 1 - len(ids) % 9]

    alone, helped = (
        XTokAssisted((target, TOKENS), drafts, budget=TREE_3).generate("吾輩は", prefix_allowed_tokens_fn=leads, **GREEDY)
        for drafts in (None, [(draft, TOKENS)])
    )
    assert helped.token_ids == alone.token_ids and helped.stats.draft_error is None


# what may be given


def test_a_model_guesses_together_with_what_the_text_repeats_and_a_list_is_taken_as_it_is() -> None:
    target = (TARGET, TOKENS)
    assert len(XTokAssisted(target, OTHER).setup.drafts) == 3
    assert len(XTokAssisted(target, [OTHER]).setup.drafts) == 1
    assert len(XTokAssisted(target, OTHER, budget=Budget(5, width=1, schedule="constant")).setup.drafts) == 1
    assert len(XTokAssisted(target, PromptLookup()).setup.drafts) == 1
    assert len(XTokAssisted(target, [OTHER, OTHER, PromptLookup()]).setup.drafts) == 3
    assert not XTokAssisted(target, []).setup.drafts


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


# what a drafter may return, and what may fail


class Remembers:
    """A draft whose drafters keep a state: what they were shown."""

    def __init__(self) -> None:
        self.started: list[Any] = []

    def start(self, request: Request) -> Drafter:
        self.started.append(ScriptedDrafter(lambda context: seen.append(list(context.ids)) or Tree()))  # type: ignore[func-returns-value]
        seen = self.started[-1].seen = []
        return self.started[-1]


@pytest.mark.parametrize("way", ["batch", "samples"])
def test_a_draft_of_the_callers_own_starts_a_drafter_for_each_text_and_shows_it_that_text_alone(way: str) -> None:
    draft = Remembers()
    xt = XTokAssisted((TARGET, TOKENS), [draft], budget=TREE_3)
    if way == "batch":
        inputs = padded([[5, 6, 9], [7, 8]])
        texts = TARGET.generate(**inputs, custom_generate=xt, pad_token_id=0, **GREEDY).tolist()
        texts[1] = texts[1][1:]  # no draft is shown the padding
    else:
        made = xt.generate("吾輩は", **{**GREEDY, "do_sample": True, "num_return_sequences": 3, "seed": 3})
        texts = [prompt_ids(TOKENS, "吾輩は") + one.token_ids for one in made]
    assert len(draft.started) == len(texts)
    for drafter, text in zip(draft.started, texts, strict=True):
        assert drafter.seen
        assert all(text[: len(ids)] == ids for ids in drafter.seen)


# guesses after a carried token

CARRIED = 4


def after_carried(found: Sequence[Sequence[tuple[list[int], float]]], budget: Budget) -> tuple[Guess, Session]:
    """What drafts that guess each of some trees after the carried token make together."""
    _, session = merged([tree_of(one) for one in found], budget)
    session.extend([7], carried=CARRIED)
    return run_lockstep([session.propose(budget)])[0], session


@given(st.lists(trees, min_size=1, max_size=3), st.integers(1, 12), st.integers(1, 5), st.integers(0, 12))
@example([[([1], 0.5)]], 1, 1, 0)
def test_a_carried_token_is_guessed_first_and_drafts_are_merged_after_it(
    found: list[list[tuple[list[int], float]]], nodes: int, longest: int, left: int
) -> None:
    budget = Budget(nodes=nodes, longest=longest, depth=5, width=4, schedule="constant")
    guess, _ = after_carried(found, budget)
    rest = replace(budget, nodes=max(1, nodes - 1), longest=longest - 1 if nodes > 1 else 0)
    plain, _ = merged([tree_of(one) for one in found], rest)
    assert paths_of(guess.tree) == [(CARRIED,), *((CARRIED, *path) for path in paths_of(plain.tree))]
    assert [*guess.owners] == [None, *plain.owners]
    cut = guess.cut(left)
    assert len(cut.tree) == len(cut.owners) == min(left, len(guess.tree)) and set(paths_of(cut.tree)) <= set(
        paths_of(guess.tree)
    )
    assert not cut.tree or (cut.tree.tokens[0] == CARRIED and cut.owners[0] is None)


@pytest.mark.parametrize(
    ("block", "accepted", "learnt"), [([CARRIED, 1, 2], [1], True), ([CARRIED], [0], False), ([5, 1, 2], [0], False)]
)
def test_guesses_are_judged_only_if_the_carried_token_before_them_was_right(
    block: list[int], accepted: list[int], learnt: bool
) -> None:
    _, session = after_carried([[([1], 0.5), ([3], 0.2)]], Budget(depth=5, width=4))
    session.policy.observe([Outcome()], 1.0)
    guess = run_lockstep([session.propose(Budget(depth=5, width=4))])[0]
    assert guess.tree.tokens[0] == CARRIED
    session.extend(block)
    outcome = session.outcome(guess, block, 4)
    (proposal,) = outcome.proposals
    assert (proposal.right, proposal.accepted) == ((1, 1) if learnt else (0, 0))
    assert proposal.seconds > 0, "what it took is known, whatever became of it"
    assert session._meter.accepted_by_draft == accepted


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


@pytest.mark.parametrize("kind", ["its own ids", "other ids", "recycling"])
def test_a_last_id_that_another_one_replaces_changes_no_guess(kind: str) -> None:
    """With fixed shapes the last id that drafters are shown may not be committed: then another one comes in its place."""
    target = target_model((TARGET, TOKENS)).vocabulary
    draft, view = drafts_of(target)[kind], target.view
    guessed, budget = 0, Budget(3, width=4, nodes=999, schedule="constant")
    sampled = noise(7, 0, b"")

    def guess(drafter: Drafter, ids: list[int]) -> Tree:
        return drafter.propose(Context(ids, view.to_bytes(ids), 0, noise=sampled), budget)

    def started() -> Drafter:
        return draft.start(Request(target, Meter(), samples=True))

    for prompt in ("吾輩は猫である。吾輩は猫", "The quick"):
        ids = TOKENS(prompt, add_special_tokens=False).input_ids
        used = started()
        for wrong, fits in islice(permutations(TOKENS("名 った brown", add_special_tokens=False).input_ids, 2), 0, None, 16):
            guess(used, [*ids, wrong])
            again, anew = guess(used, [*ids, fits]), guess(started(), [*ids, fits])
            guessed += len(anew)
            assert again.tokens == anew.tokens and again.parents == anew.parents
            assert again.probabilities == pytest.approx(anew.probabilities, rel=1e-3)
            ids = [*ids, fits]
    assert guessed > 5
