"""Law 8: other sequences change nothing. Lists and padded batches, whose texts share forwards, beside each text alone."""

import gc
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import tiny
from front_door import DRAFTS, HF_ARGUMENTS, TARGET, TOKENS, CountsItsCalls, StopsOn, encoded, forwards, guesses
from hypothesis import example, given
from hypothesis import strategies as st
from test_caches import RECURRENT
from transformers import LogitsProcessorList, StoppingCriteriaList
from worlds import (
    ARCHITECTURES,
    CHAIN,
    CORPUS,
    TREE,
    alone,
    budgets,
    deep,
    examples,
    fitting,
    make_target_expensive,
    quick,
    texts,
    tokenizer,
)

from xtok import Budget, Generation, HeadsDrafter, PromptLookup, XTokAssisted
from xtok.align.tokenbytes import token_bytes
from xtok.drafts.heads import described, save_heads
from xtok.drafts.medusa import MedusaHeads
from xtok.errors import InvalidInputError
from xtok.models.prompts import prompt_ids

BYTES = tokenizer("byte-level BPE")
LENGTH = 8 if quick() else 10
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": LENGTH, "pad_token_id": 0}
SAMPLED: dict[str, Any] = {"do_sample": True, "max_new_tokens": LENGTH, "pad_token_id": 0, "temperature": 1.3, "seed": 7}
WAYS = {"greedy": GREEDY, "sampled": SAMPLED}
TEXTS = (
    "吾輩は猫である。名前は",
    "The quick brown",
    "メロス",
    "自然言語処理とは何か。🍣",
    "a",
    "どこで生れたか",
    "123 and カ゛",
    "記憶している。",
)
WIDE = 4096
"""Positions of the targets that read long prompts."""


@cache
def target(architecture: str) -> Any:
    """In float32, as the law has it."""
    return fitting(TOKENS, architecture, 0, dtype=torch.float32, window=WIDE)


@cache
def reference(architecture: str) -> XTokAssisted:
    return XTokAssisted((target(architecture), TOKENS))


@cache
def drawn(architecture: str, prompt: str, sample: int) -> list[int]:
    """The text number `sample` of a prompt that stands in a list more than once."""
    asked = SAMPLED | {"batch_size": 1}
    return reference(architecture).generate([prompt] * (sample + 1), **asked)[sample].token_ids


@cache
def greedily(architecture: str, prompt: str) -> list[int]:
    """What transformers gives."""
    return alone(target(architecture), prompt_ids(TOKENS, prompt), **GREEDY)


SIBLING = fitting(TOKENS, "GPT2", 2, dtype=torch.float32, window=WIDE)
UNRELATED = fitting(BYTES, "GPTNeoX", 1, dtype=torch.float32, window=WIDE)
MADE: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "unrelated": lambda: [(UNRELATED, BYTES)],
    "with the target's ids": lambda: [(SIBLING, TOKENS)],
    "lookup": lambda: PromptLookup(corpus=CORPUS),
    "several": lambda: [(UNRELATED, BYTES), (SIBLING, TOKENS), PromptLookup()],
    "as it comes": lambda: (UNRELATED, BYTES),
}


def ids_of(generations: Sequence[Generation]) -> list[list[int]]:
    return [one.token_ids for one in generations]


def expected(architecture: str, prompts: Sequence[str], way: str) -> list[list[int]]:
    """What each of the texts is alone: of a prompt that comes again, the further texts that a list of it alone has."""
    if way == "greedy":
        return [greedily(architecture, prompt) for prompt in prompts]
    return [drawn(architecture, prompt, prompts[:i].count(prompt)) for i, prompt in enumerate(prompts)]


@examples(40, share=20)
@given(
    architecture=st.sampled_from(sorted(ARCHITECTURES)),
    prompts=st.lists(st.one_of(st.sampled_from(TEXTS), texts()), min_size=1, max_size=6),
    again=st.lists(st.integers(0, 5), max_size=2),
    batch_size=st.integers(1, 9),
    way=st.sampled_from(sorted(WAYS)),
    draft=st.sampled_from(sorted(MADE)),
    budget=budgets(),
    expensive=st.booleans(),
)
@example("Mistral", list(TEXTS[:4]), [0, 0], 3, "sampled", "several", TREE, False)
@example("GPT2", list(TEXTS[:4]), [1, 2], 8, "greedy", "several", CHAIN, False)
@example("Llama", list(TEXTS[:5]), [3], 4, "sampled", "as it comes", Budget(), True)
def test_a_sequence_is_the_same_alone_and_in_lists_of_any_order_written_by_any_number_at_a_time(
    architecture: str,
    prompts: list[str],
    again: list[int],
    batch_size: int,
    way: str,
    draft: str,
    budget: Budget,
    expensive: bool,
) -> None:
    """Law 8: a sequence's ids are the same alone, in any batch, in any order of joining and leaving."""
    prompts = [*prompts, *(prompts[index % len(prompts)] for index in again)]
    xt = XTokAssisted((target(architecture), TOKENS), MADE[draft](), budget=budget)
    if expensive:
        make_target_expensive(xt)
    found = xt.generate(prompts, batch_size=batch_size, **WAYS[way])
    assert ids_of(found) == expected(architecture, prompts, way)
    assert all(one.stats.shared_forwards and one.stats.draft_error is None for one in found)
    assert [one.stats.new_tokens for one in found] == [len(one.token_ids) for one in found]


def long(size: int) -> str:
    """A prompt of about so many ids."""
    whole = "".join(CORPUS)
    ids = TOKENS(whole * (1 + size // 100), add_special_tokens=False).input_ids
    return str(TOKENS.decode(ids[:size]))


@examples(10)
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


@examples(25)
@given(
    order=st.permutations(range(6)),
    lengths=st.lists(st.integers(1, 9), min_size=6, max_size=6),
    batch_size=st.integers(1, 6),
    draft=st.sampled_from(sorted(MADE)),
)
def test_sequences_that_end_at_different_times_make_room_for_those_that_wait(
    order: list[int], lengths: list[int], batch_size: int, draft: str
) -> None:
    """Law 8: other sequences change nothing, though each ends by ids of its own."""
    ends = {tuple(greedily("Llama", TEXTS[row])[: length + 1]) for row, length in enumerate(lengths)}

    def stops(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.tensor([any(tuple(row[-len(end) :]) == end for end in ends) for row in ids.tolist()])

    xt = XTokAssisted((target("Llama"), TOKENS), MADE[draft](), budget=TREE)
    prompts = [TEXTS[row] for row in order]
    asked = {**GREEDY, "max_new_tokens": 14, "eos_token_id": None, "stopping_criteria": StoppingCriteriaList([stops])}
    found = xt.generate(prompts, batch_size=batch_size, **asked)
    whole = [alone(target("Llama"), prompt_ids(TOKENS, prompt), **asked) for prompt in prompts]
    assert ids_of(found) == whole


STATEFUL: dict[str, Callable[[], dict[str, Any]]] = {
    "processor": lambda: {"logits_processor": LogitsProcessorList([CountsItsCalls()])},
    "criterion": lambda: {"stopping_criteria": StoppingCriteriaList([StopsAtTheSecond()])},
    "both": lambda: STATEFUL["processor"]() | STATEFUL["criterion"](),
}


class StopsAtTheSecond(StopsOn):
    """Keeps a state: it stops at an even id for the third time."""

    def __init__(self) -> None:
        super().__init__(0)
        self.seen = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen += int(input_ids[0, -1]) % 2 == 0
        return torch.tensor([self.seen >= 3])


@pytest.mark.parametrize("kind", ["both", *deep("criterion", "processor")])
@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("draft", [*deep("none"), "several"])
def test_processors_and_criteria_keep_a_state_for_each_sequence(kind: str, way: str, draft: str) -> None:
    xt = XTokAssisted((target("Llama"), TOKENS), MADE[draft](), budget=TREE)
    prompts, given = [*TEXTS[:4], TEXTS[1]], STATEFUL[kind]()
    found = xt.generate(prompts, batch_size=3, **{**WAYS[way], **given})
    apart = [reference("Llama").generate(prompt, **{**WAYS[way], **STATEFUL[kind]()}).token_ids for prompt in prompts]
    assert ids_of(found)[:4] == apart[:4]
    assert found[4].token_ids == apart[4] or way == "sampled"
    assert all(one.asked == 0 for one in given.get("logits_processor", ()))


@pytest.mark.parametrize("way", sorted(WAYS))
def test_draws_that_are_judged_by_their_distribution_are_the_same_one_by_one(way: str) -> None:
    xt = XTokAssisted((target("Llama"), TOKENS), (UNRELATED, BYTES), acceptance="rejection", budget=Budget(3))
    prompts = list(TEXTS[:4])
    one_by_one = [xt.generate(prompt, **WAYS[way]).token_ids for prompt in prompts]
    for batch_size, step in ((2, 1), (4, -1)):
        assert ids_of(xt.generate(prompts[::step], batch_size=batch_size, **WAYS[way])) == one_by_one[::step]


@pytest.mark.parametrize(
    ("way", "budget"),
    [("greedy", None), ("sampled", TREE), *deep(("sampled", None), ("greedy", TREE), ("greedy", CHAIN), ("sampled", CHAIN))],
)
def test_heads_guess_for_each_sequence_by_what_the_target_thought_of_it(
    budget: Budget | None, way: str, tmp_path: Path
) -> None:
    lm = target("Llama")
    torch.manual_seed(0)
    save_heads(MedusaHeads(2, 32), described(lm, token_bytes(TOKENS)), tmp_path / "heads")
    xt = XTokAssisted((lm, TOKENS), [HeadsDrafter(tmp_path / "heads"), PromptLookup()], budget=budget)
    found = xt.generate(list(TEXTS[:5]), batch_size=3, **WAYS[way])
    assert ids_of(found) == expected("Llama", TEXTS[:5], way)
    assert all(one.stats.shared_forwards and one.stats.draft_error is None for one in found)
    assert budget is None or sum(one.stats.proposed for one in found)
    one_by_one = [xt.generate(prompt, **WAYS[way]) for prompt in TEXTS[:5]]
    assert budget is None or [guesses(one) for one in one_by_one] == [guesses(one) for one in found], "they guess the same"


@examples(25)
@given(
    prompts=st.lists(st.sampled_from(TEXTS), min_size=2, max_size=5),
    name=st.sampled_from(sorted(HF_ARGUMENTS)),
    draft=st.sampled_from(sorted(DRAFTS)),
    budget=st.sampled_from([Budget(), CHAIN, TREE]),
)
def test_a_padded_batch_is_what_transformers_makes_of_it(prompts: list[str], name: str, draft: str, budget: Budget) -> None:
    """Law 8: a padded batch changes nothing. What keeps a state is shared by rows there, so it is left out."""
    more = {} if name == "a processor with a state" else HF_ARGUMENTS[name]()
    inputs = encoded(*prompts)
    xt = XTokAssisted((TARGET, TOKENS), DRAFTS[draft], budget=budget)
    plain = TARGET.generate(**inputs, **{**GREEDY, **more})
    again = {} if name == "a processor with a state" else HF_ARGUMENTS[name]()
    assert torch.equal(TARGET.generate(**inputs, **{**GREEDY, **again}, custom_generate=xt), plain)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_padded_batch_of_any_architecture_shares_its_forwards(architecture: str) -> None:
    lm = fitting(TOKENS, architecture, 0)
    xt = XTokAssisted((lm, TOKENS), PromptLookup(), budget=CHAIN)
    xt.generate("猫", **GREEDY)  # tries the target out
    inputs = encoded(*TEXTS[:6])
    plain = lm.generate(**inputs, **GREEDY)
    with forwards(lm) as seen:
        assert torch.equal(lm.generate(**inputs, **GREEDY, custom_generate=xt), plain)
    assert max(len(ids) for ids in seen) == 6


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("way", ["greedy", *deep(*sorted(set(WAYS) - {"greedy"}))])
def test_sequences_of_a_model_that_cant_share_forwards_take_turns(name: str, way: str) -> None:
    lm = tiny(name, len(TOKENS)).float()
    xt = XTokAssisted((lm, TOKENS), PromptLookup(corpus=CORPUS), budget=CHAIN)
    prompts = list(TEXTS[:3])
    found = xt.generate(prompts, batch_size=2, **WAYS[way])
    single = [XTokAssisted((lm, TOKENS)).generate(prompt, **WAYS[way]).token_ids for prompt in prompts]
    assert ids_of(found) == single
    assert not any(one.stats.shared_forwards for one in found)
    if way == "greedy":
        assert single == [alone(lm, prompt_ids(TOKENS, prompt), **GREEDY) for prompt in prompts]


@pytest.mark.parametrize(("shares", "way"), [(False, "greedy"), (True, "sampled"), *deep((False, "sampled"), (True, "greedy"))])
def test_one_of_two_models_may_share_its_forwards_alone(shares: bool, way: str) -> None:
    recurrent, plain = tiny(RECURRENT[0], len(TOKENS)).float(), target("Llama")
    lm, draft = (plain, recurrent) if shares else (recurrent, plain)
    xt = XTokAssisted((lm, TOKENS), [(draft, TOKENS)], budget=CHAIN)
    found = xt.generate(list(TEXTS[:3]), batch_size=3, **WAYS[way])
    assert ids_of(found) == [XTokAssisted((lm, TOKENS)).generate(prompt, **WAYS[way]).token_ids for prompt in TEXTS[:3]]
    assert [one.stats.shared_forwards for one in found] == [shares] * 3
    assert all(one.stats.draft_forwards and one.stats.draft_error is None for one in found)


@pytest.mark.parametrize("architecture", ["Llama", "GPT2", "Mistral"])
@pytest.mark.parametrize("draft", [*deep("none"), "several"])
def test_prompts_that_fill_the_window_are_written_beside_short_ones(architecture: str, draft: str) -> None:
    """A text reaches the last position, and no forward has one beyond it."""
    window = 48
    lm = fitting(TOKENS, architecture, 0, dtype=torch.float32, window=window)
    xt = XTokAssisted((lm, TOKENS), MADE[draft](), budget=TREE)
    prompts = [long(size) for size in (window - 4, window - 12, 30, window - 20)]
    sizes = [len(prompt_ids(TOKENS, prompt)) for prompt in prompts]
    asked = {**GREEDY, "eos_token_id": None, "max_length": window, "max_new_tokens": None}
    found = xt.generate(prompts, batch_size=3, **asked)
    for prompt, one, size in zip(prompts, found, sizes, strict=True):
        assert one.token_ids == alone(lm, prompt_ids(TOKENS, prompt), **asked)
        assert size + len(one.token_ids) == window


@pytest.mark.parametrize(
    ("draft", "budget"),
    [("unrelated", TREE), ("lookup", CHAIN), *deep(("none", TREE), ("unrelated", CHAIN), ("lookup", TREE))],
    ids=["unrelated-tree", "lookup-chain", "none", "unrelated-chain", "lookup-tree"],
)
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


@pytest.mark.parametrize("architecture", [*deep("Llama"), "Mistral"])
@pytest.mark.parametrize("kind", ["on the right", "at the end", "a hole", "all of it"])
def test_padding_that_isnt_on_the_left_is_read_as_transformers_reads_it(kind: str, architecture: str) -> None:
    """Found by a hostile trial: such rows had other ids."""
    inputs = dict(TOKENS([long(3), long(30)], padding=True, padding_side="right", return_tensors="pt"))
    inputs.pop("token_type_ids", None)
    if kind != "on the right":
        inputs = {name: value[1:].clone() for name, value in inputs.items()}
        inputs["attention_mask"][
            0, {"at the end": slice(-1, None), "a hole": slice(-20, -5), "all of it": slice(None)}[kind]
        ] = 0
    lm = target(architecture)
    xt = XTokAssisted((lm, TOKENS), MADE["several"](), budget=TREE)
    arguments = {**GREEDY, "pad_token_id": 0}
    assert torch.equal(lm.generate(**inputs, **arguments, custom_generate=xt), lm.generate(**inputs, **arguments))


def test_padding_changes_no_sequence_if_an_id_is_no_number() -> None:
    """Found by a hostile trial: rows were padded by id 0, which may be one that no text has."""
    lm = deepcopy(target("Llama"))
    lm.get_input_embeddings().weight.data[0] = torch.nan
    xt = XTokAssisted((lm, TOKENS))
    arguments = {**GREEDY, "suppress_tokens": [0]}
    assert ids_of(xt.generate(list(TEXTS), **arguments)) == [xt.generate(text, **arguments).token_ids for text in TEXTS]


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
    [(0, 0, "greedy"), (4, 7, "sampled"), *deep((0, 0, "sampled"), (4, 7, "greedy"), (2, 1, "greedy"), (2, 1, "sampled"))],
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


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_size", value) for value in (0, -1, 1.5, "4", None, True)] + [("progress", value) for value in (1, 0, "yes", [])],
)
@pytest.mark.parametrize("prompt", ["猫", ["猫", "犬"]], ids=["a text", "a list"])
def test_a_batch_size_and_a_progress_of_wrong_kinds_are_refused(name: str, value: Any, prompt: Any) -> None:
    xt = reference("Llama")
    with forwards(xt.model) as seen, pytest.raises(InvalidInputError, match=name):
        xt.generate(prompt, **{**GREEDY, name: value})
    assert not seen


def test_a_bad_prompt_in_a_list_is_refused_before_any_forward() -> None:
    xt = reference("Llama")
    with forwards(xt.model) as seen, pytest.raises(InvalidInputError):
        xt.generate(["猫", 7], **GREEDY)  # type: ignore[list-item]
    assert not seen


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
@pytest.mark.parametrize(
    ("architecture", "draft"),
    [pair for i, pair in enumerate(product(sorted(ARCHITECTURES), sorted(MADE))) if (i + i // len(MADE)) % 3 == 0],
)
def test_a_hundred_sequences_in_one_list_are_what_each_is_alone(architecture: str, draft: str) -> None:
    """Law 8: other sequences change nothing, for many that come and go."""
    prompts = [(CORPUS[i % len(CORPUS)] + CORPUS[(i * 7) % len(CORPUS)])[i % 23 : i % 23 + 1 + i * 3 % 61] for i in range(100)]
    xt = XTokAssisted((target(architecture), TOKENS), MADE[draft](), budget=Budget(4, width=3))
    for way in WAYS:
        assert ids_of(xt.generate(prompts, batch_size=13, **WAYS[way])) == expected(architecture, prompts, way)
