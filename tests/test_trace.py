"""Who each token is from: what a generation reports of it, and how it is shown."""

import json
import pickle
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest
from batches import MADE, WAYS
from front_door import TARGET, TOKENS
from hypothesis import example, given
from hypothesis import strategies as st
from scripted import ScriptedDrafter
from worlds import budgets, texts, whole_generations

from xtok import Budget, Context, Generation, PromptLookup, Tree, XTokAssisted, chain, pair
from xtok.results.trace import Token

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
TREE = Budget(3, width=3, nodes=12, schedule="constant")


def made(draft: str = "several", prompt: str = "吾輩は猫", **more: Any) -> Generation:
    return XTokAssisted((TARGET, TOKENS), MADE[draft](), budget=TREE).generate(prompt, **{**GREEDY, **more})


@whole_generations
@given(prompt=texts(), draft=st.sampled_from(sorted(MADE)), way=st.sampled_from(sorted(WAYS)), budget=budgets())
@example(prompt="", draft="several", way="sampled", budget=TREE)
def test_what_is_reported_of_tokens_and_rounds_is_what_was_counted(prompt: str, draft: str, way: str, budget: Budget) -> None:
    generation = XTokAssisted((TARGET, TOKENS), MADE[draft](), budget=budget).generate(prompt, **WAYS[way])
    assert [one.id for one in generation.tokens] == generation.token_ids
    assert "".join(one.text for one in generation.tokens) == generation.text
    counted = dict(zip(generation.drafts, generation.stats.accepted_by_draft, strict=False))
    guessed = Counter(one.draft for one in generation.tokens if one.draft is not None)
    assert guessed == Counter({name: count for name, count in counted.items() if count})
    start = 0
    for one in generation.rounds:
        committed = generation.token_ids[start : start + one.committed]
        assert [one.tree.tokens[node] for node in one.right] == committed[: one.accepted]
        assert [one.tree.parents[node] for node in one.right] == [-1, *one.right[:-1]][: one.accepted]
        assert len(one.drafts) == one.proposed
        start += one.committed
    assert start == len(generation.token_ids)


def test_tokens_are_named_after_the_draft_that_guessed_them() -> None:
    """Two drafts are right in turns, and both guess nonsense beside and after that."""
    truth = made("none").token_ids
    places: list[int] = []

    def right_at(turn: int) -> ScriptedDrafter:
        def script(context: Context) -> Tree:
            place = len(context.ids)
            places.append(place)
            place -= places[0] - 1  # before the first guess one id was picked
            wrong = [(truth[place] + 1) % 90] if place < len(truth) else []
            return chain([truth[place], *wrong] if place // 2 % 2 == turn and place < len(truth) else wrong)

        return ScriptedDrafter(script)

    xt = XTokAssisted((TARGET, TOKENS), [right_at(0), right_at(1)], budget=TREE)
    generation = xt.generate("吾輩は猫", **GREEDY)
    assert generation.token_ids == truth
    assert generation.drafts == ("ScriptedDrafter", "ScriptedDrafter (2)")
    reported = [one.draft for one in generation.tokens]
    assert reported[0] is None
    assert all(draft in (None, generation.drafts[place // 2 % 2]) for place, draft in enumerate(reported))
    assert set(reported) == {None, *generation.drafts}


def test_a_trace_is_json_and_can_be_kept(tmp_path: Path) -> None:
    generation = made()
    reported = generation.to_dict()
    assert json.loads(json.dumps(reported)) == reported
    generation.save_trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8")) == reported
    assert reported["text"] == generation.text == "".join(one["text"] for one in reported["tokens"])
    assert [one["committed"] for one in reported["rounds"]] == [one.committed for one in generation.rounds]
    assert {guess["draft"] for one in reported["rounds"] for guess in one["guessed"]} <= set(generation.drafts)
    assert any(one["guessed"] for one in reported["rounds"])
    again = pickle.loads(pickle.dumps(generation))
    assert again == generation
    assert again.to_dict() == reported


@pytest.mark.parametrize(("draft", "way"), [("several", "sampled"), ("as it comes", "greedy")])
def test_tokens_are_streamed_as_they_are_reported_later(draft: str, way: str) -> None:
    xt = XTokAssisted((TARGET, TOKENS), MADE[draft](), budget=TREE)
    ended: list[Generation] = []

    def streamed() -> Iterator[Token]:
        ended.append((yield from xt.stream_tokens("吾輩は🍣", **WAYS[way])))

    tokens = list(streamed())
    (generation,) = ended
    assert tokens == generation.tokens
    assert generation.token_ids == xt.generate("吾輩は🍣", **WAYS[way]).token_ids
    assert "".join(xt.stream("吾輩は🍣", **WAYS[way])) == "".join(token.text for token in tokens)


@pytest.mark.parametrize("draft", ["none", "several"])
def test_a_page_has_the_whole_trace_and_needs_nothing_else(draft: str) -> None:
    generation = made(draft, "a < b & c\n<script>")
    generation = replace(generation, text=MARKUP, drafts=tuple(name + MARKUP for name in generation.drafts))
    page = generation.to_html()
    data, script = re.findall(r"<script\b[^>]*>(.*?)</script>", page, re.DOTALL)
    assert json.loads(data)["trace"] == generation.to_dict()
    assert json.loads(data)["trace"]["prompt"] == generation.prompt == "a < b & c\n<script>"
    assert "import" not in script and "export" not in script
    assert f"<pre>{escape(MARKUP)}</pre>" in re.sub(r"<pre\b[^>]*>", "<pre>", page)
    assert not re.search(r"<[^>]*\b(src|href)=", page.replace(script, ""))
    (shown,) = re.findall(r'<iframe [^>]*srcdoc="([^"]*)"', generation._repr_html_())
    assert unescape(shown) == page


MARKUP = "</script><script>alert(1)</script><!-- </pre> & \u2028"


def test_what_is_printed_is_short() -> None:
    xt = XTokAssisted((TARGET, TOKENS), MADE["several"]())
    generation = made()
    assert repr(generation) == (
        f"Generation({generation.text!r}, 12 tokens, {generation.stats.target_forwards} target forwards, 'length')"
    )
    assert repr(xt).startswith("XTokAssisted(LlamaForCausalLM, drafts=[")
    assert repr(XTokAssisted(str(pair.TARGET))).startswith(f"XTokAssisted({pair.TARGET.name}, drafts=[], kernels="), (
        "its folder"
    )
    assert "prompt lookup" in repr(xt)
    assert repr(PromptLookup(["a", "b"])) == "PromptLookup(a corpus of 2 texts)"
    assert repr(PromptLookup()) == "PromptLookup()"
