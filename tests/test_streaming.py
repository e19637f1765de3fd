"""`stream`, and the streamers of transformers."""

from copy import deepcopy

import pytest
from front_door import (
    BYTES,
    GREEDY,
    HF_ARGUMENTS,
    OTHER,
    PROMPT,
    PROMPTS,
    TARGET,
    TOKENS,
    Recorder,
    encoded,
    forced,
    forwards,
    helped,
    truth,
)
from scripted import ScriptedDrafter
from worlds import TREE

from xtok import XTokAssisted
from xtok.errors import UnsupportedArgumentError

xt = helped


# stream


@pytest.mark.parametrize("draft", ["none", "another", "itself", "oracle"])
def test_streamed_pieces_are_the_text_and_never_half_a_character(draft: str) -> None:
    text = "𠮷野家で🍣を、👨\u200d👩\u200d👧が。"
    start = len(BYTES(PROMPT).input_ids)
    script = BYTES(text).input_ids
    assert any("\ufffd" in BYTES.decode([token]) for token in script)
    drafts = {
        "none": None,
        "another": (TARGET, TOKENS),
        "itself": (deepcopy(OTHER), BYTES),
        "oracle": ScriptedDrafter(lambda context: script[len(context.ids) - start :][:3]),
    }
    xt = XTokAssisted((OTHER, BYTES), drafts[draft], budget=TREE)
    for length in (100, 9):
        arguments = {**GREEDY, "max_new_tokens": length, "prefix_allowed_tokens_fn": forced(text, start, BYTES)}
        pieces = list(xt.stream(PROMPT, **arguments))
        whole = xt.generate(PROMPT, **arguments).text
        assert "".join(pieces) == whole
        assert all(pieces)
        if length == 100:
            assert whole == text
            assert len(pieces) > 4
        assert whole.rstrip("\ufffd") == text[: len(whole.rstrip("\ufffd"))]
        assert not any("\ufffd" in piece for piece in pieces[:-1])


def test_a_piece_is_yielded_before_the_rest_is_generated() -> None:
    xt = XTokAssisted((OTHER, BYTES))
    start = len(BYTES(PROMPT).input_ids)
    with forwards(OTHER) as seen:
        pieces = xt.stream(PROMPT, prefix_allowed_tokens_fn=forced("吾輩は猫である。" * 4, start, BYTES), **GREEDY)
        first = next(pieces)
        made = len(seen)
        rest = list(pieces)
    assert first == "吾輩は"[: len(first)] != ""
    assert made <= 3
    assert len(seen) == GREEDY["max_new_tokens"]
    assert len(rest) > 5


def test_an_interrupted_stream_leaves_the_instance_usable(xt: XTokAssisted) -> None:
    pieces = xt.stream(PROMPT, **GREEDY)
    next(pieces)
    other = xt.stream(PROMPTS[1], **GREEDY)
    next(other)
    pieces.close()
    assert xt.generate(PROMPT, **GREEDY).token_ids == truth()
    whole = xt.generate(PROMPTS[1], **GREEDY).text
    assert whole.endswith("".join(other))
    assert "".join(xt.stream(PROMPTS[1], **GREEDY)) == whole


# streamers


def test_a_streamer_gets_just_what_transformers_hands_it_also_of_a_batch(xt: XTokAssisted) -> None:
    ends = HF_ARGUMENTS["two ends"]()
    for prompts in (PROMPTS[:1], PROMPTS[:3]):
        for more in ({}, ends, {**ends, "pad_token_id": 9}):
            theirs, ours, direct = Recorder(), Recorder(), Recorder()
            TARGET.generate(**encoded(*prompts), streamer=theirs, **{**GREEDY, **more})
            TARGET.generate(**encoded(*prompts), streamer=ours, custom_generate=xt, **{**GREEDY, **more})
            assert ours.calls == theirs.calls
            assert theirs.calls[-1] == "end"
            if len(prompts) == 1:
                xt.generate(PROMPT, streamer=direct, **{**GREEDY, **more})
                assert direct.calls == theirs.calls
    with forwards(TARGET, OTHER) as seen, pytest.raises(UnsupportedArgumentError, match="streamer"):
        xt.stream(PROMPT, streamer=Recorder(), **GREEDY)
    assert not seen
