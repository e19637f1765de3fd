"""Law 8: other sequences change nothing. Lists and padded batches, whose texts share forwards, beside each text alone."""

import gc
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from architectures import RECURRENT, tiny
from batches import BYTES, GREEDY, MADE, TEXTS, UNRELATED, WAYS, expected, ids_of, long, reference, target
from front_door import TOKENS, forwards
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import LogitsProcessorList
from worlds import CHAIN, CORPUS, TREE, whole_generations

from xtok import Budget, Engine, PromptLookup, XTokAssisted

LM = target("Llama")
RECURRENT_LM = tiny(RECURRENT[0], len(TOKENS)).float()


@whole_generations
@given(
    architecture=st.sampled_from(["Llama", "Mistral", "GPT2"]),
    sizes=st.lists(st.sampled_from([1, 2, 9, 60, 130, 511, 513, 700, 1100, 2000]), min_size=2, max_size=4),
    batch_size=st.integers(1, 5),
    way=st.sampled_from(sorted(WAYS)),
    draft=st.sampled_from(sorted(MADE)),
)
@example("Mistral", [2000, 1, 600, 1, 1500], 4, "greedy", "several")
def test_prompts_of_any_lengths_change_nothing_for_each_other(
    architecture: str, sizes: list[int], batch_size: int, way: str, draft: str
) -> None:
    """Law 8: other sequences change nothing, be it read in chunks while others are written."""
    prompts = [long(size) for size in sizes]
    xt = XTokAssisted((target(architecture), TOKENS), MADE[draft](), budget=TREE)
    assert ids_of(xt.generate(prompts, batch_size=batch_size, **WAYS[way])) == expected(architecture, prompts, way)


KINDS: dict[str, Callable[[], tuple[XTokAssisted, bool]]] = {
    "no draft": lambda: (reference("Llama"), True),
    "rejection": lambda: (XTokAssisted((LM, TOKENS), (UNRELATED, BYTES), acceptance="rejection", budget=Budget(3)), True),
    "a target that can't share": lambda: (
        XTokAssisted((RECURRENT_LM, TOKENS), PromptLookup(corpus=CORPUS), budget=CHAIN),
        False,
    ),
    "no model that can share": lambda: (XTokAssisted((RECURRENT_LM, TOKENS), [(LM, TOKENS)], budget=CHAIN), False),
    "a draft that can't share": lambda: (XTokAssisted((LM, TOKENS), [(RECURRENT_LM, TOKENS)], budget=TREE), True),
}
"""Instances, and whether the target's sequences share its forward passes."""


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_are_the_same_in_any_list_and_engine_whatever_can_share_forward_passes(kind: str) -> None:
    xt, shares = KINDS[kind]()
    prompts = list(TEXTS[:3])
    for way in WAYS.values():
        one_by_one = [xt.generate(prompt, **way) for prompt in prompts]
        listed = xt.generate(prompts[::-1], batch_size=2, **way)[::-1]
        with Engine(xt, batch_size=3) as engine:
            tickets = [engine.submit(prompt, **way) for prompt in prompts]
        for found in (listed, [ticket.result() for ticket in tickets]):
            for one, other in zip(found, one_by_one, strict=True):
                assert (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)
                assert one.seed == other.seed and one.stats.draft_error is None
                assert one.stats.shared_forwards == other.stats.shared_forwards == shares
        if kind != "rejection" or way is GREEDY:
            assert ids_of(one_by_one) == ids_of([XTokAssisted((xt.model, TOKENS)).generate(one, **way) for one in prompts])


@pytest.mark.parametrize(("draft", "budget"), [("unrelated", TREE), ("lookup", CHAIN)])
def test_eight_sequences_cost_fewer_forwards_than_each_alone(draft: str, budget: Budget) -> None:
    lm, prompts, asked = target("Llama"), list(TEXTS), {**GREEDY, "eos_token_id": None}
    xt = XTokAssisted((lm, TOKENS), MADE[draft](), budget=budget)
    xt.generate(prompts[0], **asked)  # tries the target out
    with forwards(lm) as together, forwards(UNRELATED) as drafted:
        found = xt.generate(prompts, batch_size=8, **asked)
    with forwards(lm) as apart, forwards(UNRELATED) as drafted_apart:
        single = [xt.generate(prompt, **asked) for prompt in prompts]
    assert ids_of(found) == ids_of(single)
    rounds = [len(one.rounds) for one in found]
    assert rounds == [len(one.rounds) for one in single]
    assert len(apart) == sum(one.stats.target_forwards for one in single)
    assert [one.stats.target_forwards for one in found] == [one.stats.target_forwards for one in single]
    assert max(rounds) <= len(together) <= 2 * max(rounds) + 8 < len(apart)
    assert len(drafted) < len(drafted_apart) / 2 or draft != "unrelated"


@pytest.mark.parametrize("kind", ["on the right", "at the end", "a hole", "all of it"])
def test_padding_that_isnt_on_the_left_is_read_as_transformers_reads_it(kind: str) -> None:
    """Found by a hostile trial: such rows had other ids."""
    inputs = dict(TOKENS([long(3), long(30)], padding=True, padding_side="right", return_tensors="pt"))
    inputs.pop("token_type_ids", None)
    if kind != "on the right":
        inputs = {name: value[1:].clone() for name, value in inputs.items()}
        inputs["attention_mask"][
            0, {"at the end": slice(-1, None), "a hole": slice(-20, -5), "all of it": slice(None)}[kind]
        ] = 0
    lm = target("Mistral")
    xt = XTokAssisted((lm, TOKENS), MADE["several"](), budget=TREE)
    arguments = {**GREEDY, "pad_token_id": 0}
    assert torch.equal(lm.generate(**inputs, **arguments, custom_generate=xt), lm.generate(**inputs, **arguments))


def test_no_more_copies_of_a_processor_are_held_than_sequences_are_written_at_a_time() -> None:
    """Found by a hostile trial: one that refers to a model was copied for each text of the list before the first forward."""
    held: list[int] = []

    class Guide:
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            held.append(sum(type(one) is Guide for one in gc.get_objects()))
            return scores

    XTokAssisted((target("Llama"), TOKENS)).generate(
        list(TEXTS), batch_size=2, logits_processor=LogitsProcessorList([Guide()]), **{**GREEDY, "max_new_tokens": 2}
    )
    assert max(held) <= 1 + 3, "the one that was given, two that are in use, and one that is left over"


def test_a_bar_of_progress_changes_no_sequence_and_is_shown_if_requested(capsys: pytest.CaptureFixture[str]) -> None:
    for progress in (None, False, True):
        found = reference("Llama").generate(list(TEXTS[:4]), batch_size=2, progress=progress, **GREEDY)
        assert ids_of(found) == expected("Llama", TEXTS[:4], "greedy")
        out, err = capsys.readouterr()
        assert out == ""
        assert bool(err) <= bool(progress)
    assert reference("Llama").generate([], **GREEDY) == []


def test_padding_changes_no_sequence_if_an_id_is_no_number() -> None:
    """Found by a hostile trial: rows were padded by id 0, which may be one that no text has."""
    lm = deepcopy(target("Llama"))
    lm.get_input_embeddings().weight.data[0] = torch.nan
    xt = XTokAssisted((lm, TOKENS))
    arguments = {**GREEDY, "suppress_tokens": [0]}
    assert ids_of(xt.generate(list(TEXTS), **arguments)) == [xt.generate(text, **arguments).token_ids for text in TEXTS]
