"""Trees of guesses: which models take them, what is merged into them, and how deep and wide they pay to be."""

from copy import deepcopy

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from scripted import paths_of, tree_of
from transformers import AutoModelForCausalLM
from worlds import TREE, fitting, tokenizer

from xtok import Budget, Tree, XTokAssisted
from xtok.drafts.growth import IdPath, grown
from xtok.drafts.growth import tree_of as grown_tree
from xtok.drafts.tree import Trie
from xtok.models.capabilities import traits
from xtok.models.forwards import Steps, run_lockstep

SMALL = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 0}
guesses = st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.floats(0.01, 0.2)), min_size=1, max_size=5)
claimed = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.sampled_from([0.0, 0.2, 0.5, 0.7])),
    min_size=1,
    max_size=4,
)


def built(name: str, **more: object) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**SMALL, **more)).eval()
    for weight in made.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.3)
    return made


@pytest.mark.parametrize("name", ["Bloom", "Falcon", "GPTNeo"])
def test_models_whose_keys_count_by_their_order_take_none(name: str) -> None:
    more = {"Falcon": {"alibi": True}, "GPTNeo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}}
    assert not traits(built(name, **more.get(name, {}))).branches


@pytest.mark.parametrize("budget", [None, TREE])
def test_a_target_that_takes_no_tree_checks_the_likeliest_chain(budget: Budget | None) -> None:
    tokens = tokenizer("byte-level BPE")
    torch.manual_seed(0)
    config = transformers.BloomConfig(**{**SMALL, "vocab_size": len(tokens)}, bos_token_id=1, eos_token_id=2)
    target = AutoModelForCausalLM.from_config(config).double().eval()
    asked = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    expected = XTokAssisted((target, tokens)).generate("吾輩は", **asked).token_ids
    for draft in ((fitting(tokens, "Llama", 0), tokens), (deepcopy(target), tokens)):
        generation = XTokAssisted((target, tokens), draft, budget=budget).generate("吾輩は", **asked)
        assert generation.token_ids == expected
        assert generation.stats.draft_error is None
        assert generation.stats.chains_only
    assert not XTokAssisted((target, tokens)).generate("吾輩は", **asked).stats.chains_only


@given(guesses=guesses, count=st.integers(0, 20))
def test_the_likeliest_nodes_of_merged_guesses_are_a_tree(guesses: list[tuple[list[int], float]], count: int) -> None:
    trie, mass_of = Trie(), dict[tuple[int, ...], float]()
    for tokens, probability in guesses:
        trie.add(tokens, probability)
        for size in range(1, len(tokens) + 1):
            mass_of[tuple(tokens[:size])] = mass_of.get(tuple(tokens[:size]), 0) + probability
    tree = trie.best(lambda probabilities: min(count, len(probabilities)))
    paths = paths_of(tree)
    assert len(set(paths)) == len(paths) == min(count, len(mass_of))
    assert all(probability == pytest.approx(mass_of[path]) for probability, path in zip(tree.probabilities, paths, strict=True))
    left = [probability for path, probability in mass_of.items() if path not in paths]
    assert min(tree.probabilities, default=1) >= max(left, default=0) - 1e-9


def with_probabilities(tree: Tree) -> dict[tuple[int, ...], float]:
    return dict(zip(paths_of(tree), tree.probabilities, strict=True))


@given(sources=st.lists(claimed, max_size=4))
def test_sources_are_merged_as_their_probabilities_say(sources: list[list[tuple[list[int], float]]]) -> None:
    """A node is as probable, if all before it is right, as the source that believes most in it says."""
    trie, trees = Trie(), [tree_of(one) for one in sources]
    for source, tree in enumerate(trees):
        trie.mix(tree, tree.probabilities, source)
    claims = [with_probabilities(tree) for tree in trees]
    found = with_probabilities(trie.best(len))
    assert found.keys() == {path for one in claims for path in one}
    for path, probability in found.items():
        given = [(one[path], one.get(path[:-1], 1.0)) for one in claims if path in one]
        most = max(part / whole if whole else 0.0 for part, whole in given)
        assert probability == pytest.approx(found.get(path[:-1], 1.0) * min(1.0, most), abs=1e-9)
        assert 0 <= probability <= found.get(path[:-1], 1.0)


@pytest.mark.parametrize(("given", "owner"), [([0.4, 0.7], 0), ([0.1, 0.8], 1), ([0.3, 0.5, 0.7], 2), ([0.0, 0.1], 1)])
def test_a_guess_counts_for_the_first_unless_a_later_one_gives_it_twice_as_much(given: list[float], owner: int) -> None:
    """Found by measurement: tokens of heads counted for token recycling, which gave them next to nothing."""
    trie = Trie()
    for source, probability in enumerate(given):
        trie.mix(Tree((5,), (-1,)), [probability], source)
    assert trie.owner(0) == owner


@given(guesses=guesses, longest=st.integers(0, 6))
def test_a_tree_within_a_depth_has_the_nodes_up_to_it(guesses: list[tuple[list[int], float]], longest: int) -> None:
    tree = tree_of(guesses)
    assert paths_of(tree.within(longest)) == [path for path in paths_of(tree) if len(path) <= longest]
    first = tree.subset(tree.likeliest_path(longest))
    assert first.parents == tuple(range(-1, len(first) - 1))
    assert not len(first) or tuple(first.tokens) in paths_of(tree)


@given(
    data=st.data(),
    budget=st.builds(
        Budget,
        depth=st.integers(1, 4),
        width=st.integers(1, 3),
        nodes=st.integers(1, 12),
        longest=st.integers(0, 4),
        schedule=st.just("constant"),
    ),
)
def test_a_grown_tree_holds_the_most_likely_guesses(data: st.DataObject, budget: Budget) -> None:
    def expand(front: list[IdPath]) -> Steps[list[list[IdPath]]]:
        yield from ()
        return [children(guess) for guess in front]

    def children(guess: IdPath) -> list[IdPath]:
        shares = data.draw(st.lists(st.sampled_from([0.1, 0.3, 0.5, 1.0, 1.0 + 1e-7]), max_size=3))
        return [
            IdPath(guess.probability * share, -1, guess.written + b"%d" % token, share, ids=(*guess.ids, token))
            for token, share in enumerate(shares)
        ]

    found = run_lockstep([grown(children(IdPath(1.0, -1, b"")), budget, expand)])[0]
    tree = grown_tree(found, budget)
    expected = {guess.ids: guess.probability for guess in found if len(guess.ids) <= budget.longest}
    kept = with_probabilities(tree)
    assert len(tree) == len(kept) == min(budget.nodes, len(expected))
    assert kept == {path: expected[path] for path in kept}
    assert min(kept.values(), default=2) >= max((one for path, one in expected.items() if path not in kept), default=0)


@given(
    parents=st.integers(0, 20).flatmap(lambda n: st.tuples(*(st.integers(-1, i - 1) for i in range(n)))),
    data=st.data(),
    nodes=st.integers(0, 24),
)
def test_the_likeliest_nodes_of_a_tree_are_one(parents: tuple[int, ...], data: st.DataObject, nodes: int) -> None:
    """Masses needn't fall along a path: a drafter may be anybody's."""
    probabilities = data.draw(st.one_of(st.just(()), st.tuples(*(st.floats(0, 1) for _ in parents))))
    tree = Tree(tuple(range(len(parents))), parents, probabilities=probabilities)
    kept = tree.likeliest(nodes)
    assert len(kept) == min(nodes, len(tree))
    assert all(kept.parents[i] == -1 or kept.tokens[kept.parents[i]] == parents[token] for i, token in enumerate(kept.tokens))
    if (
        probabilities
        and len(set(probabilities)) == len(probabilities)
        and all(
            parent < 0 or probabilities[parent] > probability
            for parent, probability in zip(parents, probabilities, strict=True)
        )
    ):
        assert sorted(kept.probabilities) == sorted(probabilities, reverse=True)[:nodes][::-1]
