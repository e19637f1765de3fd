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
from xtok.errors import InvalidInputError, UnsupportedArgumentError

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


def test_streamed_pieces_are_the_text_also_if_it_is_no_utf8(xt: XTokAssisted) -> None:
    for prompt in PROMPTS:
        assert "".join(xt.stream(prompt, **GREEDY)) == xt.generate(prompt, **GREEDY).text


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


def test_a_streamer_gets_just_what_transformers_hands_it(xt: XTokAssisted) -> None:
    for arguments in ({}, {"eos_token_id": truth()[5]}):
        theirs, ours, direct = Recorder(), Recorder(), Recorder()
        TARGET.generate(**encoded(PROMPT), streamer=theirs, **{**GREEDY, **arguments})
        TARGET.generate(**encoded(PROMPT), streamer=ours, custom_generate=xt, **{**GREEDY, **arguments})
        xt.generate(PROMPT, streamer=direct, **{**GREEDY, **arguments})
        assert theirs.calls[-1] == "end"
        assert ours.calls == theirs.calls
        assert direct.calls == theirs.calls


def test_a_streamer_gets_of_a_batch_just_what_transformers_hands_it(xt: XTokAssisted) -> None:
    for arguments in ({}, HF_ARGUMENTS["two ends"](), {**HF_ARGUMENTS["two ends"](), "pad_token_id": 9}):
        theirs, ours = Recorder(), Recorder()
        TARGET.generate(**encoded(*PROMPTS[:3]), streamer=theirs, **{**GREEDY, **arguments})
        TARGET.generate(**encoded(*PROMPTS[:3]), streamer=ours, custom_generate=xt, **{**GREEDY, **arguments})
        assert ours.calls == theirs.calls


def test_what_a_stream_can_not_do_is_refused(xt: XTokAssisted) -> None:
    with forwards(TARGET, OTHER) as seen:
        with pytest.raises(UnsupportedArgumentError, match="Call generate once per prompt"):
            xt.generate(PROMPTS, streamer=Recorder(), **GREEDY)
        with pytest.raises(UnsupportedArgumentError, match="streamer"):
            xt.stream(PROMPT, streamer=Recorder(), **GREEDY)
        with pytest.raises(InvalidInputError, match="list"):
            xt.stream(PROMPTS, **GREEDY)  # type: ignore[arg-type]
    assert not seen
