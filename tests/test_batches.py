"""Law 8: other sequences change nothing. Lists and padded batches, whose texts share forwards, beside each text alone."""

import gc
from copy import deepcopy
from typing import Any

import pytest
import torch
from architectures import RECURRENT, tiny
from batches import (
    BYTES,
    GREEDY,
    MADE,
    SAMPLED,
    TEXTS,
    UNRELATED,
    WAYS,
    expected,
    greedily,
    ids_of,
    long,
    reference,
    target,
)
from front_door import TOKENS, CountsItsCalls, StopsOn, encoded, forwards
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import LogitsProcessorList, StoppingCriteriaList
from worlds import (
    CHAIN,
    CORPUS,
    TREE,
    alone,
    fitting,
    whole_generations,
)

from xtok import Budget, PromptLookup, XTokAssisted
from xtok.models.prompts import prompt_ids


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


def stateful() -> dict[str, Any]:
    criteria = StoppingCriteriaList([StopsAtTheSecond()])
    return {"logits_processor": LogitsProcessorList([CountsItsCalls()]), "stopping_criteria": criteria}


class StopsAtTheSecond(StopsOn):
    """Keeps a state: it stops at an even id for the third time."""

    def __init__(self) -> None:
        super().__init__(0)
        self.seen = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen += int(input_ids[0, -1]) % 2 == 0
        return torch.tensor([self.seen >= 3])


@pytest.mark.parametrize("way", sorted(WAYS))
def test_processors_and_criteria_keep_a_state_for_each_sequence(way: str) -> None:
    xt = XTokAssisted((target("Llama"), TOKENS), MADE["several"](), budget=TREE)
    prompts, given = [*TEXTS[:4], TEXTS[1]], stateful()
    found = xt.generate(prompts, batch_size=3, **{**WAYS[way], **given})
    apart = [reference("Llama").generate(prompt, **{**WAYS[way], **stateful()}).token_ids for prompt in prompts]
    assert ids_of(found)[:4] == apart[:4]
    assert found[4].token_ids == apart[4] or way == "sampled"
    assert all(one.asked == 0 for one in given["logits_processor"])


@pytest.mark.parametrize("way", sorted(WAYS))
def test_draws_that_are_judged_by_their_distribution_are_the_same_one_by_one(way: str) -> None:
    xt = XTokAssisted((target("Llama"), TOKENS), (UNRELATED, BYTES), acceptance="rejection", budget=Budget(3))
    prompts = list(TEXTS[:4])
    one_by_one = [xt.generate(prompt, **WAYS[way]).token_ids for prompt in prompts]
    for batch_size, step in ((2, 1), (4, -1)):
        assert ids_of(xt.generate(prompts[::step], batch_size=batch_size, **WAYS[way])) == one_by_one[::step]


@pytest.mark.parametrize("architecture", ["Llama", "Mistral"])
def test_a_padded_batch_of_any_architecture_shares_its_forwards(architecture: str) -> None:
    lm = fitting(TOKENS, architecture, 0)
    xt = XTokAssisted((lm, TOKENS), PromptLookup(), budget=CHAIN)
    xt.generate("猫", **GREEDY)  # tries the target out
    inputs = encoded(*TEXTS[:6])
    plain = lm.generate(**inputs, **GREEDY)
    with forwards(lm) as seen:
        assert torch.equal(lm.generate(**inputs, **GREEDY, custom_generate=xt), plain)
    assert max(len(ids) for ids in seen) == 6


@pytest.mark.parametrize("way", sorted(WAYS))
def test_sequences_of_a_model_that_cant_share_forwards_take_turns(way: str) -> None:
    lm = tiny(RECURRENT[0], len(TOKENS)).float()
    xt = XTokAssisted((lm, TOKENS), PromptLookup(corpus=CORPUS), budget=CHAIN)
    prompts = list(TEXTS[:3])
    found = xt.generate(prompts, batch_size=2, **WAYS[way])
    single = [XTokAssisted((lm, TOKENS)).generate(prompt, **WAYS[way]).token_ids for prompt in prompts]
    assert ids_of(found) == single
    assert not any(one.stats.shared_forwards for one in found)
    if way == "greedy":
        assert single == [alone(lm, prompt_ids(TOKENS, prompt), **GREEDY) for prompt in prompts]


@pytest.mark.parametrize(("shares", "way"), [(False, "greedy"), (True, "sampled")])
def test_one_of_two_models_may_share_its_forwards_alone(shares: bool, way: str) -> None:
    recurrent, plain = tiny(RECURRENT[0], len(TOKENS)).float(), target("Llama")
    lm, draft = (plain, recurrent) if shares else (recurrent, plain)
    xt = XTokAssisted((lm, TOKENS), [(draft, TOKENS)], budget=CHAIN)
    found = xt.generate(list(TEXTS[:3]), batch_size=3, **WAYS[way])
    assert ids_of(found) == [XTokAssisted((lm, TOKENS)).generate(prompt, **WAYS[way]).token_ids for prompt in TEXTS[:3]]
    assert [one.stats.shared_forwards for one in found] == [shares] * 3
    assert all(one.stats.draft_forwards and one.stats.draft_error is None for one in found)


@pytest.mark.parametrize("architecture", ["Llama", "GPT2", "Mistral"])
def test_prompts_that_fill_the_window_are_written_beside_short_ones(architecture: str) -> None:
    """A text reaches the last position, and no forward has one beyond it."""
    window = 48
    lm = fitting(TOKENS, architecture, 0, dtype=torch.float32, window=window)
    xt = XTokAssisted((lm, TOKENS), MADE["several"](), budget=TREE)
    prompts = [long(size) for size in (window - 4, window - 12, 30, window - 20)]
    sizes = [len(prompt_ids(TOKENS, prompt)) for prompt in prompts]
    asked = {**GREEDY, "eos_token_id": None, "max_length": window, "max_new_tokens": None}
    found = xt.generate(prompts, batch_size=3, **asked)
    for prompt, one, size in zip(prompts, found, sizes, strict=True):
        assert one.token_ids == alone(lm, prompt_ids(TOKENS, prompt), **asked)
        assert size + len(one.token_ids) == window


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


def test_results_come_in_the_order_of_the_list() -> None:
    prompts = [long(400), "猫", long(90), "The", TEXTS[3]]
    found = reference("Llama").generate(prompts, batch_size=2, **GREEDY)
    assert ids_of(found) == expected("Llama", prompts, "greedy")
    assert isinstance(found, list)
    assert reference("Llama").generate([], **GREEDY) == []
    (one,) = reference("Llama").generate(["猫"], **GREEDY)
    assert one.token_ids == greedily("Llama", "猫")


def test_several_samples_of_each_prompt_stand_beside_each_other() -> None:
    xt = XTokAssisted((target("Llama"), TOKENS), MADE["several"](), budget=TREE)
    found = xt.generate(list(TEXTS[:3]), batch_size=4, num_return_sequences=3, **SAMPLED)
    apart = [reference("Llama").generate(prompt, num_return_sequences=3, **SAMPLED) for prompt in TEXTS[:3]]
    assert ids_of(found) == [text.token_ids for three in apart for text in three]
    assert len({tuple(one.token_ids) for one in found}) == 9


class RaisesBehind:
    """Raises after one of the prompts, when so many ids are new."""

    def __init__(self, prompt: str, new: int) -> None:
        self.start, self.new = prompt_ids(TOKENS, prompt), new

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        row = ids[0].tolist()
        if row[: len(self.start)] == self.start and len(row) == len(self.start) + self.new:
            raise OSError("simulated")
        return scores


@pytest.mark.parametrize(
    ("faulty", "new", "way"),
    [(0, 0, "greedy"), (4, 7, "sampled")],
)
def test_what_a_sequence_of_a_list_raises_is_raised_and_leaves_the_instance_as_it_was(faulty: int, new: int, way: str) -> None:
    xt = XTokAssisted((target("Llama"), TOKENS), MADE["several"](), budget=TREE)
    prompts = list(TEXTS[:5])
    fails = LogitsProcessorList([RaisesBehind(prompts[faulty], new)])
    asked = {**WAYS[way], "eos_token_id": None}
    whole = ids_of(reference("Llama").generate(prompts, **asked))
    with pytest.raises(OSError, match="simulated"):
        xt.generate(prompts, batch_size=3, logits_processor=fails, **asked)
    others = [prompt for prompt in prompts if prompt != prompts[faulty]]
    assert ids_of(xt.generate(others, batch_size=3, logits_processor=fails, **asked)) == [*whole[:faulty], *whole[faulty + 1 :]]
    assert ids_of(xt.generate(prompts, **asked)) == whole


@pytest.mark.parametrize("progress", [None, False, True])
def test_a_bar_of_progress_changes_no_sequence_and_is_shown_if_requested(
    progress: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    found = reference("Llama").generate(list(TEXTS[:4]), batch_size=2, progress=progress, **GREEDY)
    assert ids_of(found) == expected("Llama", TEXTS[:4], "greedy")
    out, err = capsys.readouterr()
    assert out == ""
    assert bool(err) <= bool(progress)


@pytest.mark.deep
@pytest.mark.parametrize(("architecture", "draft"), [("Llama", "several"), ("Mistral", "lookup")])
def test_a_hundred_sequences_in_one_list_are_what_each_is_alone(architecture: str, draft: str) -> None:
    """Law 8: other sequences change nothing, for many that come and go."""
    prompts = [(CORPUS[i % len(CORPUS)] + CORPUS[(i * 7) % len(CORPUS)])[i % 23 : i % 23 + 1 + i * 3 % 61] for i in range(100)]
    xt = XTokAssisted((target(architecture), TOKENS), MADE[draft](), budget=Budget(4, width=3))
    for way in WAYS:
        assert ids_of(xt.generate(prompts, batch_size=13, **WAYS[way])) == expected(architecture, prompts, way)


def test_padding_changes_no_sequence_if_an_id_is_no_number() -> None:
    """Found by a hostile trial: rows were padded by id 0, which may be one that no text has."""
    lm = deepcopy(target("Llama"))
    lm.get_input_embeddings().weight.data[0] = torch.nan
    xt = XTokAssisted((lm, TOKENS))
    arguments = {**GREEDY, "suppress_tokens": [0]}
    assert ids_of(xt.generate(list(TEXTS), **arguments)) == [xt.generate(text, **arguments).token_ids for text in TEXTS]
