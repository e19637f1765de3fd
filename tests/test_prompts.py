"""Prompts of all kinds: chats with their templates' arguments, texts out of a template, ids and encodings."""

from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from front_door import BYTES, CHAT, GREEDY, OTHER, PROMPT, PROMPTS, TARGET, TOKENS, encoded, forwards, truth, with_template
from transformers import pipeline
from worlds import TREE, alone

from xtok import Engine, XTokAssisted
from xtok.errors import InvalidInputError
from xtok.models.prompts import prompt_ids

TEMPLATE = (
    "<s>{% if tools %}{% for tool in tools %}({{ tool['function']['name'] }}){% endfor %}{% endif %}"
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking is false %}…{% endif %}{{ mood or '' }}{% endif %}"
)
OTHER_TEMPLATE = "[{{ mood or '' }}{% for m in messages %}{{ m['content'] }}{% endfor %}]"
SHORT = {**GREEDY, "max_new_tokens": 5}
TALKING = with_template(TOKENS, TEMPLATE)
XT = XTokAssisted((TARGET, TALKING), (OTHER, with_template(BYTES, OTHER_TEMPLATE)), budget=TREE)


def weather(place: str) -> str:
    """Tell the weather.

    Args:
        place: Where.
    """
    return place


def templated(**arguments: Any) -> list[int]:
    ids: list[int] = TALKING.apply_chat_template(CHAT, **{"add_generation_prompt": True, "return_dict": True, **arguments})[
        "input_ids"
    ]
    return ids


ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tools": ({"tools": [weather]}, {"tools": [weather]}),
    "no thinking": ({"enable_thinking": False}, {"enable_thinking": False}),
    "any argument": ({"chat_template_kwargs": {"mood": "calm"}}, {"mood": "calm"}),
    "several": ({"tools": [weather], "chat_template_kwargs": {"mood": "calm"}}, {"tools": [weather], "mood": "calm"}),
    "a turn to go on with": (
        {"chat_template_kwargs": {"continue_final_message": True}},
        {"continue_final_message": True, "add_generation_prompt": False},
    ),
    "another template": ({"chat_template_kwargs": {"chat_template": OTHER_TEMPLATE}}, {"chat_template": OTHER_TEMPLATE}),
    "none": ({"tools": None, "enable_thinking": None, "chat_template_kwargs": None}, {}),
}


@pytest.mark.parametrize("name", ASKED)
def test_arguments_of_a_chat_reach_the_targets_template(name: str) -> None:
    given, expected = ASKED[name]
    ids = templated(**expected)
    assert (ids == templated()) == (name == "none")
    with forwards(TARGET) as seen:
        generation = XT.generate(CHAT, **given, **SHORT)
    assert seen[0][0].tolist() == ids
    assert generation.token_ids == alone(TARGET, ids, **SHORT)
    assert generation.stats.draft_error is None
    if name == "several":
        assert "".join(XT.stream(CHAT, **given, **SHORT)) == generation.text
        assert [one.token_ids for one in XT.generate([CHAT, CHAT], **given, **SHORT)] == [generation.token_ids] * 2
        with Engine(XT) as engine:
            assert engine.submit(CHAT, **given, **SHORT).result().token_ids == generation.token_ids


def test_arguments_of_a_chat_reach_the_drafts_template() -> None:
    own = with_template(BYTES, OTHER_TEMPLATE).apply_chat_template(CHAT, mood="calm", return_dict=True)["input_ids"]
    with forwards(OTHER) as seen:
        XT.generate(CHAT, chat_template_kwargs={"mood": "calm"}, **GREEDY)
    assert seen[0][0, : len(own)].tolist() == own


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ([{"content": "a"}], {}, r"Message 1 of the chat has no role.*'role': 'user'"),
    ([*CHAT, {"role": 5, "content": "a"}], {}, r"Message 2 of the chat has the role 5; it must be a text"),
    (CHAT[0], {}, r"The prompt is one message, \{'role': .*Put it in a list: generate\(\[message\]\)"),
    (PROMPT, {"tools": [weather]}, r"tools is for chats, and the prompt is a text"),
    ([5, 6], {"enable_thinking": True}, r"enable_thinking is for chats, and the prompt is token ids"),
    (CHAT, {"chat_template_kwargs": ["mood"]}, r"chat_template_kwargs is \['mood'\]"),
    (CHAT, {"chat_template_kwargs": {"tokenize": False}}, r"tokenize can't be set.*Leave it out"),
    (
        CHAT,
        {"chat_template_kwargs": {"tokenizer_kwargs": {"padding": "max_length", "max_length": 99}}},
        r"tokenizer_kwargs can't be set",
    ),
    (CHAT, {"chat_template_kwargs": {"chat_template": "{{ raise_exception('no users') }}"}}, r"chat template.*no users"),
    (CHAT, {"split_special_tokens": True}, r"split_special_tokens is for texts"),
    ([5, 6], {"split_special_tokens": False}, r"split_special_tokens is for texts"),
    (torch.tensor([[5, 6], [7, 8]]), {}, r"ids of 2 texts.*a list of prompts"),
    (TOKENS(PROMPTS[:2]), {}, r"ids of 2 texts.*a list of prompts"),
    (torch.tensor([0.5]), {}, r"0\.5.*whole numbers"),
    (torch.tensor([], dtype=torch.int64), {}, r"no ids"),
    ([5, 99999], {}, r"the id 99999"),
    ([5, 1 << 70], {}, r"whole numbers"),
    ([-1], {}, r"the id -1"),
    (torch.tensor(5), {}, r"whole numbers"),
    ({"input_ids": [5, 6], "attention_mask": [1]}, {}, r"attention_mask.*1.*2"),
    ({"input_ids": [5, 6], "pixel_values": [1]}, {}, r"pixel_values"),
    ({"input_ids": None}, {}, r"Give a list of whole numbers"),
    ({"input_ids": 5}, {}, r"Give a list of whole numbers"),
    ({"input_ids": [5, 6], "attention_mask": 5}, {}, r"Give a list of whole numbers"),
    ([5, PROMPT], {}, r"The prompt is 5\. Pass a text"),
]


@pytest.mark.parametrize(("prompt", "arguments", "reported"), REFUSED)
def test_what_is_no_prompt_is_refused_before_any_work(prompt: Any, arguments: dict[str, Any], reported: str) -> None:
    with forwards(TARGET, OTHER) as seen, pytest.raises(InvalidInputError, match=reported):
        XT.generate(prompt, **arguments, **GREEDY)
    assert not seen


def test_an_encoding_may_have_a_mask_of_truth_values() -> None:
    ids, mask = torch.tensor([[0, 0, 5, 6, 7]]), torch.tensor([[False, False, True, True, True]])
    assert (
        XT.generate({"input_ids": ids, "attention_mask": mask}, **GREEDY).token_ids
        == XT.generate([5, 6, 7], **GREEDY).token_ids
    )


def test_an_encoding_taken_apart_is_refused_with_how_to_pass_it() -> None:
    call: Any = XT.generate
    with pytest.raises(InvalidInputError, match=r"generate\(encoding\), not generate\(\*\*encoding\)"):
        call(**TOKENS(PROMPT, return_tensors="pt"), **GREEDY)


def test_a_text_that_went_through_a_template_gets_no_second_beginning() -> None:
    text = TALKING.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert text.startswith("<s>")
    assert (
        XT.generate(text, **GREEDY).token_ids == XT.generate(CHAT, **GREEDY).token_ids == alone(TARGET, templated(), **GREEDY)
    )
    assert XT.generate(PROMPT, **GREEDY).token_ids == truth()
    untold = XTokAssisted((TARGET, TOKENS))  # without a template there is nothing that it could have gone through
    assert untold.generate("<s>" + PROMPT, **GREEDY).token_ids == truth("<s>" + PROMPT)


IDS: list[int] = TOKENS(PROMPT).input_ids
ONE: list[Any] = [
    IDS,
    tuple(IDS),
    torch.tensor(IDS),
    torch.tensor([IDS]),
    np.array(IDS),
    TOKENS(PROMPT),
    TOKENS(PROMPT, return_tensors="pt"),
    TOKENS([PROMPT]),
    TOKENS([PROMPT], padding="max_length", max_length=60, padding_side="left", return_tensors="pt"),
]
"""Ids and encodings of the prompt."""


def test_ids_and_encodings_are_prompts() -> None:
    expected, other = (truth(prompt, **SHORT) for prompt in PROMPTS[:2])
    assert [one.token_ids for one in XT.generate([*ONE, PROMPTS[1]], **SHORT)] == [*[expected] * len(ONE), other]
    text = XT.generate(PROMPT, **SHORT).text
    with Engine(XT) as engine:
        for prompt in ONE:
            assert XT.generate(prompt, **SHORT).token_ids == engine.submit(prompt, **SHORT).result().token_ids == expected
            assert "".join(XT.stream(prompt, **SHORT)) == text
    assert [one.token_ids for one in XT.generate([IDS], **SHORT)] == [expected]
    assert [one.token_ids for one in XT.generate(TOKENS(PROMPTS[:2]).input_ids, **SHORT)] == [expected, other]
    sampled = {**SHORT, "do_sample": True, "seed": 3}
    assert XT.generate(IDS, **sampled).token_ids == XT.generate(PROMPT, **sampled).token_ids


# what the last call gave


def test_the_last_call_is_kept_for_its_thread() -> None:
    xt = XTokAssisted((TARGET, TOKENS), (OTHER, BYTES))
    assert xt.last == []
    TARGET.generate(**encoded(*PROMPTS[:2]), **GREEDY, custom_generate=xt)
    assert [one.token_ids[: len(truth(text))] for one, text in zip(xt.last, PROMPTS, strict=False)] == list(
        map(truth, PROMPTS[:2])
    )
    assert all(one.stats.new_tokens == len(one.token_ids) and one.rounds for one in xt.last)
    seen: list[Any] = []

    def other() -> None:
        seen.append(xt.last)
        xt.generate(PROMPTS[2], **GREEDY)
        seen.append(xt.last)

    thread = Thread(target=other)
    thread.start()
    thread.join()
    assert seen[0] == []
    assert [one.token_ids for one in seen[1]] == [truth(PROMPTS[2])]
    assert len(xt.last) == 2
    given = xt.generate([PROMPT, "a"], **GREEDY)
    assert xt.last == given
    assert XTokAssisted((TARGET, TOKENS)).last == []
    text = "".join(xt.stream(PROMPT, **GREEDY))
    assert [one.text for one in xt.last] == [text]


def test_a_pipeline_generates_by_xtok_and_leaves_its_stats() -> None:
    xt = XTokAssisted((TARGET, TOKENS), (OTHER, BYTES))
    settings: Any = {**GREEDY, "return_tensors": True}
    plain = pipeline("text-generation", model=TARGET, tokenizer=TOKENS)
    helped = pipeline("text-generation", model=TARGET, tokenizer=TOKENS, custom_generate=xt)
    assert helped(PROMPT, **settings) == plain(PROMPT, **settings)
    (last,) = xt.last
    assert last.token_ids == truth()
    assert last.stats.target_forwards >= 1


# a seed


def test_a_misspelt_role_is_refused() -> None:
    """Found by two trials as a new user: the model got it, and nothing said so."""
    tokens = with_template(
        TOKENS, "{% for m in messages %}{{ m['role'] if m['role'] != 'users' else '?' }}{{ m.content }}{% endfor %}"
    )
    for role in ("user", "system", "tool", "narrator", "users"):
        assert prompt_ids(tokens, [{"role": role, "content": "a"}])
    for role in ("usr", "User", "assistent"):
        with pytest.raises(InvalidInputError, match=rf"has the role '{role}'\. Did you mean '(user|assistant)'"):
            prompt_ids(tokens, [{"role": role, "content": "a"}])
