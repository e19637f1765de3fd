"""The server, asked by OpenAI's own client, and by clients that are less polite. Nothing here reads a clock."""

import json
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from math import inf, nan
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import httpx
import openai
import pytest
import torch
import typer
from batches import TEXTS, UNRELATED
from commands import run
from engines import BYTES, LM, PATIENCE, TOKENS, Holds, held
from hypothesis import example, given
from hypothesis import strategies as st
from servers import (
    ALONE,
    CHAT_TOKENS,
    HTTP,
    NAME,
    ROOT,
    Server,
    alike,
    both_ways,
    check_error,
    data_of,
    held_to,
    posted,
    schemas_are_trusted,
    serving,
    together,
    tools,
    wait_for,
)
from transformers import LogitsProcessorList
from worlds import TREE, deep, examples

from xtok import Engine, XTokAssisted
from xtok.cli import commands as cli
from xtok.models.prompts import prompt_ids
from xtok.serving.http import grammars
from xtok.serving.http.command import listening_socket
from xtok.serving.http.command import run as serve
from xtok.serving.http.middleware import LOG
from xtok.serving.http.protocol import Chat, Completion, Limits, RequestError, read
from xtok.serving.http.requests import submissions_of
from xtok.serving.http.responses import Responses
from xtok.serving.http.service import Service

trusted = schemas_are_trusted
CHECK_COMPILES = grammars.check_compiles
TOOLS = tools(look={"type": "object", "properties": {}})
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
JSON = {"Content-Type": "application/json"}
UNENDING = {"temperature": 0, "logit_bias": {"2": -100}}
"""Fields of a greedy text that doesn't end by itself."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as one:
        yield one


# texts


def until_stop(text: str, stops: Sequence[str]) -> str:
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def expected(prompt: Any, asked: dict[str, Any], number: int = 0) -> tuple[str, str]:
    """What `xt.generate` gives for the same, and how it ends. No draft guesses."""
    given = {name: asked[name] for name in ("top_p", "top_k", "min_p", "temperature", "seed") if name in asked}
    given = {} if given["temperature"] == 0 else {**given, "seed": given["seed"] + number}
    penalty = asked.get("repetition_penalty", 1.0)
    more = {"repetition_penalty": penalty, "max_new_tokens": asked["max_tokens"], "do_sample": bool(given)}
    stops = [asked["stop"]] if isinstance(asked.get("stop"), str) else asked.get("stop") or []
    found = ALONE.generate(prompt, **given, **more, **({"stop_strings": stops} if stops else {}))
    return until_stop(found.text, stops), found.finish_reason


SAMPLING = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.7, 1.0, 1.6]), "seed": st.integers(0, 2**32)},
    optional={"top_p": st.sampled_from([0.5, 0.9, 1.0]), "top_k": st.sampled_from([3, 40]), "min_p": st.just(0.02)},
)
FURTHER = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 12)},
    optional={
        "n": st.integers(1, 3),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "stop": st.one_of(st.sampled_from(["の", "a"]), st.lists(st.sampled_from(["が", "e", "1", "。"]), max_size=3)),
    },
)
SETTINGS = st.builds(lambda one, other: {**one, **other}, st.just({"temperature": 0}) | SAMPLING, FURTHER)
IDS = st.sampled_from(TEXTS).map(lambda text: list(TOKENS(text).input_ids))
PROMPTS = st.one_of(
    st.sampled_from(TEXTS),
    IDS,
    st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3),
    st.lists(IDS, min_size=1, max_size=2),
)


@examples(64, share=30)
@given(prompt=PROMPTS, asked=SETTINGS)
@example(TEXTS[0], {"temperature": 0, "max_tokens": 12, "n": 2})
@example([TEXTS[1], TEXTS[0]], {"temperature": 1.0, "seed": 5, "max_tokens": 9, "n": 2, "stop": ["の", "e"]})
def test_a_completion_is_what_generate_gives_for_the_same_arguments(server: Server, prompt: Any, asked: dict[str, Any]) -> None:
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    each = [(one, number) for one in (prompt if several else [prompt]) for number in range(asked.get("n", 1))]
    found = both_ways(server, prompt=prompt, **asked)
    assert [(one["text"], one["finish_reason"]) for one in found["choices"]] == [expected(one, asked, n) for one, n in each]


def test_a_chat_goes_through_the_targets_template_with_its_tools(server: Server) -> None:
    parts = [{"type": "text", "text": "名前は"}, {"type": "text", "text": "何か"}]
    messages = [{"role": "system", "content": "猫として答えよ。"}, {"role": "user", "content": parts}]
    plain = [messages[0], {"role": "user", "content": "名前は何か"}]
    mood = {"chat_template_kwargs": {"mood": "calm"}}
    asked: dict[str, Any] = {"messages": messages, "tools": TOOLS, "max_completion_tokens": 9, **mood}
    truths = set()
    for choice, offered in (("none", None), ("auto", TOOLS)):
        truth = ALONE.generate(plain, tools=offered, do_sample=False, max_new_tokens=9, **mood)
        (found,) = both_ways(server, "chat/completions", **asked, tool_choice=choice)["choices"]
        assert (found["text"], found["finish_reason"]) == (truth.text, truth.finish_reason)
        truths.add(truth.text)
    assert len(truths) == 2


def test_a_stream_ends_with_figures_and_done(server: Server) -> None:
    asked = {"prompt": [TEXTS[0], TEXTS[1]], "n": 2, "max_tokens": 7, "stream": True, "stream_options": {"include_usage": True}}
    answer = server.ask(**asked)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, last = data_of(answer.text)
    chunks = [json.loads(line) for line in lines]
    assert last == "[DONE]"
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert len({(chunk["id"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    size = sum(len(prompt_ids(TOKENS, prompt)) for prompt in asked["prompt"])
    counts = {"prompt_tokens": size, "completion_tokens": 28, "total_tokens": size + 28}
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], {**counts, "prompt_tokens_details": {"cached_tokens": ANY}})
    assert [name for name in chunks[-2] if name not in chunks[0]] == ["timings"]
    reported = chunks[-2]["timings"]
    assert (reported["prompt_n"], reported["predicted_n"]) == (size, 28)
    assert 0 <= reported["draft_n_accepted"] <= reported["draft_n"]
    first = json.loads(data_of(server.ask("chat/completions", **CHAT, max_tokens=3, stream=True).text)[0])
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_a_prediction_is_guessed_from_and_what_came_of_it_is_reported(server: Server) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": TEXTS[0]}], "max_tokens": 24}
    truth = both_ways(server, "chat/completions", **asked)
    text = truth["choices"][0]["text"]
    assert "completion_tokens_details" not in truth["usage"]
    for content in (text, [{"type": "text", "text": text[:5]}, {"type": "text", "text": text[5:]}]):
        found = both_ways(server, "chat/completions", **asked, prediction={"type": "content", "content": content})
        assert found["choices"][0]["text"] == text
        reported = found["usage"]["completion_tokens_details"]
        assert reported["accepted_prediction_tokens"] > 0 <= reported["rejected_prediction_tokens"] < 24 * 32


def test_penalties_count_what_was_generated_and_a_bias_forbids_and_forces(server: Server) -> None:
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16}
    plain, start = ALONE.generate(TEXTS[0], **settings), len(prompt_ids(TOKENS, TEXTS[0]))
    for frequency, presence in ((0.0, 2.0), (1.5, -0.5)):

        def as_documented(ids: torch.Tensor, scores: torch.Tensor, by: tuple[float, float] = (frequency, presence)) -> Any:
            new = ids[0, start:].tolist()
            for token in set(new):
                scores[0, token] -= new.count(token) * by[0] + by[1]
            return scores

        truth = ALONE.generate(TEXTS[0], logits_processor=LogitsProcessorList([as_documented]), **settings)
        found = server.ask(prompt=TEXTS[0], max_tokens=16, frequency_penalty=frequency, presence_penalty=presence).json()
        assert found["choices"][0]["text"] == truth.text != plain.text
    forbidden, forced, first = (
        server.ask(prompt=TEXTS[0], max_tokens=1, logit_bias=bias, logprobs=0).json()["choices"][0]["logprobs"]["tokens"][0]
        for bias in ({plain.token_ids[0]: -100}, {40: 100}, None)
    )
    assert forbidden != first
    assert forced.encode() == (ALONE.target.vocabulary.view[40] or b"")


PICKED = {
    "new ids": (TEXTS[0], {"max_tokens": 9, "logprobs": 3}),
    "up to a stop string": (TEXTS[0], {"max_tokens": 9, "logprobs": 3, "stop": "1x"}),
    "after an echo": (TEXTS[0], {"max_tokens": 2, "logprobs": 1, "echo": True}),
    "an echo": (TOKENS(TEXTS[1]).input_ids, {"max_tokens": 0, "logprobs": 2, "echo": True}),
    "a long echo": (prompt_ids(TOKENS, "".join(TEXTS) * 40)[:300], {"max_tokens": 0, "logprobs": 1, "echo": True}),
    "an echoed id": ([5], {"max_tokens": 0, "logprobs": 1, "echo": True}),
    "an echo without": (TEXTS[0], {"max_tokens": 2, "echo": True}),
    "an echo that fills the window": ([5] * LM.config.max_position_embeddings, {"max_tokens": 0, "echo": True}),
}
"""Long prompts are scored in parts of 256 ids. lm-eval asks for echoes, with no new token at all."""


@pytest.mark.parametrize("name", PICKED)
def test_log_probabilities_are_those_of_the_targets_own_logits(server: Server, name: str) -> None:
    """Before any penalty, and whatever the temperature."""
    prompt, asked = PICKED[name]
    settings: dict[str, Any] = {"repetition_penalty": 1.3, "seed": 3, "temperature": 0.7}
    stops, ids, text, new = [asked["stop"]] if "stop" in asked else [], prompt_ids(TOKENS, prompt), "", list[int]()
    if "echo" in asked:
        text = prompt if isinstance(prompt, str) else TOKENS.decode(prompt, skip_special_tokens=True)
    if asked["max_tokens"]:
        more = {"stop_strings": stops} if stops else {}
        truth = ALONE.generate(prompt, do_sample=True, max_new_tokens=asked["max_tokens"], **settings, **more)
        text, new = text + until_stop(truth.text, stops), truth.token_ids
    found = both_ways(server, prompt=[prompt] * 2, **asked, **settings)
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (2 * len(ids), 2 * len(new))
    first, second = found["choices"]
    assert (first["text"], first["finish_reason"]) == (text, "stop" if stops else "length")
    assert alike(second, {**first, "index": 1})
    if "logprobs" not in asked:
        assert first["logprobs"] is None
        return
    with torch.no_grad():
        logits = LM(torch.tensor([ids + new])).logits[0].float().log_softmax(dim=-1)
    start = 0 if "echo" in asked else len(ids)
    tokens, picked, tops, offsets = (
        first["logprobs"][one] for one in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    assert stops or start + len(picked) == len(ids + new)
    if not start:
        assert (picked.pop(0), tops.pop(0), offsets[0]) == (None, None, 0)
    known = (ids + new)[max(start, 1) :][: len(picked)]
    rows = logits[max(start, 1) - 1 :][: len(known)]
    torch.testing.assert_close(torch.tensor(picked), rows[range(len(known)), known], rtol=0, atol=1e-4)
    for top, row in zip(tops, rows, strict=True):
        assert sorted(top.values(), reverse=True) == pytest.approx(row.topk(len(top)).values.tolist(), abs=1e-4)
    assert offsets == sorted(offsets) and offsets[-1] <= len(text)
    for token, begin, end in zip(tokens[1:], offsets[1:], offsets[2:], strict=False):
        assert token.startswith("bytes:") or text[begin:end] in (token, token.removeprefix(" "))


def test_a_text_comes_with_its_trace_if_requested(server: Server) -> None:
    for path, body, prompt in (("completions", {"prompt": TEXTS[0]}, TEXTS[0]), ("chat/completions", CHAT, CHAT["messages"])):
        trace = both_ways(server, path, **body, max_tokens=9, return_trace=True)["trace"]
        truth = ALONE.generate(prompt, max_new_tokens=9, do_sample=False)
        assert [token["id"] for token in trace["tokens"]] == trace["token_ids"] == truth.token_ids
        assert trace["drafts"] == list(server.service.xt.names)
        assert sum(one["committed"] for one in trace["rounds"]) == 9


def test_no_seed_is_meant_by_minus_one() -> None:
    """Found in reports of other servers' users: the text was the same each time."""
    for seed, seeds in ((-1, [None] * 2), (None, [None] * 2), (-2, [2**64 - 2, 2**64 - 1])):
        body = read(Completion, {"prompt": "a", "temperature": 1.5, "seed": seed, "n": 2})
        assert [one.arguments.get("seed") for one in submissions_of(body, ALONE, Limits())] == seeds


# formats


SCHEMA: dict[str, Any] = {"enum": [{"名": "吾輩"}, {"名": [1, 2]}, "猫"]}


def test_a_text_is_held_to_a_json_schema(server: Server) -> None:
    asked: Any = {"messages": [{"role": "user", "content": "誰"}], "max_tokens": 40, "frequency_penalty": 2.0}
    asked |= {"temperature": 1.0, "seed": 4, **held_to(SCHEMA)}
    (same,) = submissions_of(read(Chat, json.dumps(asked).encode()), ALONE, Limits())
    (choice,) = both_ways(server, "chat/completions", **asked)["choices"]
    assert choice["text"] == ALONE.generate(same.prompt, **same.arguments).text
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["text"]) in SCHEMA["enum"]
    found = server.ask(prompt="a", max_tokens=4, response_format={"type": "json_object"}).json()["choices"][0]["text"]
    assert found.lstrip().startswith("{")


CHAIN = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(40_000)}
TOO_HARD: dict[str, tuple[dict[str, Any], str]] = {
    "too deep": ({"$defs": {**CHAIN, "d40000": {"type": "integer"}}, "$ref": "#/$defs/d0"}, "llguidance failed"),
    "no pattern": ({"type": "string", "pattern": "(" + "a" * 5000}, r"^.{0,400}regex parse error.*unclosed group$"),
}
"""The first is a chain of references that llguidance follows until its stack overflows."""


@pytest.mark.parametrize("name", [*TOO_HARD, *deep("too slow")])
def test_what_is_wrong_with_a_schema_is_reported(server: Server, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The slow one was found by a hostile trial: it took llguidance minutes. What was refused for that isn't compiled here."""
    monkeypatch.setattr(grammars, "check_compiles", CHECK_COMPILES)
    if name == "too slow":
        monkeypatch.setattr(grammars, "SECONDS", 1.0)
    slow = {"type": "integer", "multipleOf": 100_000_007}, "more than 1 seconds"
    schema, words = TOO_HARD.get(name, slow)
    answer = server.ask(prompt="a", **held_to(schema))
    check_error(answer, 400, "response_format")
    assert re.search(words, answer.json()["error"]["message"])


def test_a_schema_that_gets_too_hard_is_reported_as_the_cause(server: Server) -> None:
    """Found by a hostile trial: a pattern on which llguidance gives up after some ids was reported as a fault of the server."""
    held = held_to({"type": "string", "pattern": r"^((.*\w.{29})|(.*\d.{31})|(.*\s.{33})|(.+.{35}x)){30}$"})
    answer = server.ask(prompt="a", max_tokens=100, temperature=1, seed=3, stream=True, **held)
    error = json.loads(data_of(answer.text)[-2])["error"]
    assert (error["param"], error["type"]) == (None, "invalid_request_error")
    assert "can't follow the grammar of this request's format or tools any further: " in error["message"]
    assert "<state>" not in error["message"]


def test_texts_do_not_wait_for_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by a hostile trial: as many schemas as there were threads, and no text was written any more."""
    still, compiled = threading.Event(), list[str]()
    monkeypatch.setattr(grammars, "check_compiles", lambda grammar: compiled.append(grammar) or still.wait(PATIENCE))
    asked = {"prompt": "a", "max_tokens": 1, **held_to({"enum": ["a"]})}
    with serving(ALONE) as one, ThreadPoolExecutor(50) as pool:
        answers = [pool.submit(one.ask, **asked) for _ in range(50)]
        wait_for(lambda: len(compiled) == 2)
        assert one.ask(prompt="a", max_tokens=1).status_code == 200
        assert len(compiled) == 2
        still.set()
        assert {answer.result().status_code for answer in answers} == {200}


# what is refused


ENDLESS: list[dict[str, Any]] = [
    {"$ref": "#"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"type": "object", "properties": {f"p{i}": {} for i in range(600)}},
]
"""Schemas that llguidance takes, and can't follow."""
PADDED = {"padding": "max_length", "max_length": 99}
"""Found by a hostile trial: a request for 10**9 ids of padding took all memory, before it was refused."""
VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "completions": {
        "prediction": ("a", {"type": "content", "content": [{"type": "image_url"}]}),
        "temperature": (1e-300, "1", -1),
        "repetition_penalty": (0,),
        "max_tokens": (0,),
        "n": (0, 1000),
        "seed": (2**64,),
        "stop": ("", ["a"] * 17, ["a" * 8193] * 2),
        "logprobs": (21,),
        "logit_bias": (*({name: 5} for name in ("-1", "99999", "٣", "0" * 5000 + "1", "9" * 5000)), {"1": 500}, {"1": True}),
        "stream_options": ({"include_usage": True},),
        "response_format": (
            {"type": "json_schema"},
            *(held_to(schema)["response_format"] for schema in (*ENDLESS, {"type": 5})),
        ),
        "prompt": (None, [], [[]], [1, True], [-1], [10**30], "a b " * 4900),
    },
    "chat/completions": {
        "messages.0.tool_calls": ([{"role": "user", "tool_calls": 5}],),
        "messages.1.tool_calls.0": tuple(
            [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]
            for call in (5, {}, {"function": {"arguments": "{}"}}, {"function": {"name": "a", "arguments": 5}})
        ),
        "messages.0.content": tuple(
            [{"role": "user", "content": content}] for content in (5, None, [{"type": "image_url", "image_url": {}}])
        ),
        "messages": ([], [{"content": "a"}]),
        "chat_template_kwargs": ({"chat_template": "{{ 1 }}"},),
        "top_logprobs": (3,),
        "tool_choice": ("required",),
        "tools": (
            *([{"type": "function", "function": {"name": "a", **one}}] for one in ({"name": "a b"}, {"parameters": []})),
            [{"type": "web_search"}],
        ),
        "functions": ([],),
    },
    "responses": {
        "previous_response_id": ("resp_1",),
        "background": (True,),
        "include": (["message.output_text.logprobs"],),
        "truncation": ("auto",),
        "max_tokens": (5,),
        "tools": ([{"type": "web_search"}],),
        "tool_choice": ({"type": "function", "name": "none"},),
        "text": ({"format": {"type": "json_schema", "name": "n"}},),
        "input": ([], "a b " * 4900),
        "input.0": ([{"type": "item_reference", "id": "msg_1"}], [{"role": "user", "content": [{"type": "input_image"}]}]),
    },
}
"""Values that are refused, by the path of the request and the field that the error names."""
LEAST: dict[str, dict[str, Any]] = {"completions": {"prompt": "a"}, "chat/completions": CHAT, "responses": {"input": "a"}}
REFUSED: list[tuple[str, dict[str, Any], str | None]] = [
    *(
        (path, {name.partition(".")[0]: value}, name)
        for path, fields in VALUES.items()
        for name, values in fields.items()
        for value in values
    ),
    *(("completions", {"safety_identifier": value}, None) for value in (nan, [{"b": -inf}])),
    ("completions", {"prompt": ["a"] * 65, "n": 2}, "n"),
    ("completions", {"prompt": ["a", "b"], "return_trace": True}, "return_trace"),
    ("completions", {"stream": True, "stream_options": {"other": True}}, "stream_options.other"),
    *(("completions", {"prompt": [5, token], "echo": True, "max_tokens": 0}, "prompt") for token in (999_999, -3)),
    *(
        ("chat/completions", {"chat_template_kwargs": given}, "messages")
        for given in ({"tokenize": False}, PADDED, {"tokenizer_kwargs": PADDED})
    ),
    ("chat/completions", {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ("chat/completions", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "a"}}}, "tool_choice"),
    (
        "chat/completions",
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
        "tool_choice",
    ),
    *(("chat/completions", {"tools": tools(a=one), "tool_choice": "required"}, "tools") for one in ENDLESS),
]
BODIES: dict[str, tuple[bytes, int]] = {
    "no JSON": (b"not JSON", 400),
    "not UTF-8": (b'{"prompt": "\xff"}', 400),
    "half a character": (b'{"prompt": "\\ud83d"}', 400),
    "too deep": (b'{"prompt": ' + b"[" * 9000, 400),
    "huge": (b" " * 100_000, 413),
    "endless": (b" " * 1_000_000, 413),
    **{  # found by a hostile trial: what was echoed was no JSON any more
        number[:9]: (f'{{"prompt": "a", "safety_identifier": {number}}}'.encode(), 400)
        for number in ("-1E+999", "9" * 400 + ".0", f"1{'0' * 280}e99")
    },
}
"""What is no body at all, and the status of the answer."""


@pytest.fixture(scope="module")
def strict() -> Iterator[Server]:
    """One with limits that are soon reached."""
    with serving(ALONE, limits=Limits(tokens=64, body=20_000), key="日本", origins=["https://example.org"]) as one:
        yield one


AUTHORIZED = {"Authorization": "Bearer 日本".encode()}


@pytest.mark.parametrize("param", {param: None for *_, param in REFUSED}, ids=str)
def test_what_cannot_be_honoured_is_refused_by_the_fields_name(strict: Server, param: str | None) -> None:
    before = strict.engine.stats.tokens
    for path, body, name in REFUSED:
        if name == param:
            content = json.dumps({**LEAST[path], **body})
            check_error(HTTP.post(f"{strict.url}/v1/{path}", content=content, headers={**AUTHORIZED, **JSON}), 400, param)
    stats = strict.engine.stats
    assert (stats.running, stats.waiting, stats.tokens) == (0, 0, before)


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_none_is_answered_by_an_error(strict: Server, name: str) -> None:
    body, status = BODIES[name]
    try:
        check_error(HTTP.post(f"{strict.url}/v1/completions", content=body, headers={**AUTHORIZED, **JSON}), status, None)
    except (httpx.WriteError, httpx.RemoteProtocolError, httpx.ReadError):
        assert name == "endless"  # nobody reads all of that
    assert strict.get("/v1/models", headers=AUTHORIZED).status_code == 200


@pytest.mark.parametrize("field", ["prompt", "messages", "tools"])
def test_a_prompt_that_is_too_long_in_any_case_is_not_read(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    """Found by a hostile trial: others waited for seconds while a prompt of 4 MB was read, only to be refused."""
    longest = ALONE.target.vocabulary.longest
    for text in [*TEXTS, *CHAT_TOKENS.get_added_vocab()]:
        assert len(text.encode()) <= longest * len(CHAT_TOKENS(text, add_special_tokens=False).input_ids)
    long = "名前" * LM.config.max_position_embeddings * longest
    content: Any = {"prompt": long, "messages": [{"role": "user", "content": long}], "tools": [{**TOOLS[0], "a": [long]}]}
    body = {**(CHAT if field == "tools" else {}), field: content[field]}
    monkeypatch.setattr("xtok.serving.http.requests.prompt_ids", None)
    with pytest.raises(RequestError, match=r"context window is .* tokens, which have up to .* bytes") as refused:
        submissions_of(read(Completion if field == "prompt" else Chat, body), ALONE, Limits())
    assert refused.value.body["error"]["code"] == "context_length_exceeded"


MANY: dict[str, Any] = {"prompt": [[{}] * 1000] * 1000, "stop": [""] * 1000, "logit_bias": {str(i): "a" for i in range(1000)}}
MANY |= {"messages": [5] * 1000, "tools": [5] * 1000, "prediction": {"type": "content", "content": [5] * 1000}}


@pytest.mark.parametrize("field", MANY)
def test_of_many_faults_few_are_reported(field: str) -> None:
    """Found by a hostile trial: a body of 4 MB, of which each item is wrong, held up everybody for half a minute."""
    with pytest.raises(ValueError, match=field) as found:
        (Chat if field in ("messages", "tools") else Completion).model_validate({field: MANY[field]})
    assert found.value.error_count() < 40


def raw(server: Server, data: bytes) -> socket.socket:
    one = socket.create_connection(server.address, timeout=PATIENCE)
    one.sendall(data)
    return one


def test_a_body_that_is_half_sent_and_given_up_harms_nobody(server: Server) -> None:
    """A page of any site may send a form to this machine, and no JSON: it is refused, too."""
    before = server.engine.stats.tokens
    with raw(server, posted({"prompt": "a"}, length=500)), raw(server, b"POST /v1/compl"), raw(server, b"\x00\xff\r\n\r\n"):
        pass
    answer = HTTP.post(f"{server.url}/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    check_error(answer, 415, None)
    assert server.ask(prompt="a", max_tokens=2).status_code == 200
    assert server.engine.stats.tokens == before + 2


def test_fields_that_change_nothing_are_taken(server: Server) -> None:
    """Found by a trial as a new user: frameworks send them."""
    neutral: dict[str, Any] = {"metadata": {"a": "b"}, "store": True, "service_tier": "flex", "modalities": ["text"]}
    empty = dict.fromkeys(("best_of", "stop", "logprobs", "response_format"))
    plain = server.ask(prompt="a", max_tokens=3).json()["choices"]
    for more in ({"best_of": 1, "echo": False, **neutral}, empty, {"seed": 5, "top_p": 0.5}):
        assert server.ask(prompt="a", max_tokens=3, **more).json()["choices"] == plain


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"ignore_eos": True}, r"isn't supported"),
    ({"modalities": ["audio"]}, r"isn't supported"),
    ({"reasoning_effort": "low"}, r"isn't supported"),
    ({"stop": [""]}, r"400 - .*stop\.0: String should have at least 1 character"),
    ({"max_new_tokens": 2}, r"max_new_tokens isn't supported\. Use max_tokens instead\."),
    ({"max_tokenz": 2}, r"max_tokenz isn't supported\. Did you mean max_tokens\?"),
]


def test_errors_are_those_that_the_client_knows(server: Server, strict: Server) -> None:
    with server.client() as client, strict.client(api_key="wrong") as stranger:
        for body, message in UNSUPPORTED:
            with pytest.raises(openai.BadRequestError, match=message) as bad:
                client.completions.create(model=NAME, prompt="a", extra_body=body)
        with pytest.raises(openai.NotFoundError) as unknown:
            client.completions.create(model="gpt", prompt="a")
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt")
        with pytest.raises(openai.AuthenticationError) as closed:
            stranger.models.list()
        assert [one.id for one in client.models.list()] == [client.models.retrieve(NAME).id] == [NAME]
    assert (bad.value.param, bad.value.code) == ("max_tokenz", "unsupported_parameter")
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    assert closed.value.code == "invalid_api_key"
    for path, status in (("nothing", 404), ("completions", 405), ("responses/resp_1", 404)):
        check_error(server.get(f"/v1/{path}"), status, None)


def test_the_key_opens_and_pages_of_other_sites_may_ask_if_they_were_named(server: Server, strict: Server) -> None:
    for path in ("completions", "responses"):
        for key in (None, "日本".encode(), b"Bearer", b"Bearer \xe6"):
            headers = {} if key is None else {"Authorization": key}
            check_error(HTTP.post(f"{strict.url}/v1/{path}", json={}, headers=headers), 401, None)
    assert strict.get("/health").json() == {"status": "ready"}
    assert strict.get("/metrics").status_code == 200
    org, com, allows = "https://example.org", "https://example.com", "access-control-allow-origin"
    for one, origin, allowed in ((server, org, None), (strict, org, org), (strict, com, None)):
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        assert HTTP.options(f"{one.url}/v1/completions", headers=headers).headers.get(allows) == allowed
    assert strict.get("/v1/models", headers={"Origin": org}).headers[allows]


def test_a_limit_beyond_the_window_is_cut_to_what_fits_and_a_text_ends_when_its_time_is_over(strict: Server) -> None:
    """Found in reports of other servers' users: agents ask for more tokens than small models have room for."""
    with serving(ALONE, limits=Limits(seconds=1e-9)) as one:
        found = [one.ask(prompt=TEXTS[0], max_tokens=9).json()]
    asked = {**CHAT, "max_tokens": 10**6, "temperature": 0}
    found.append(HTTP.post(f"{strict.url}/v1/chat/completions", json=asked, headers=AUTHORIZED).json())
    assert [(one["usage"]["completion_tokens"], one["choices"][0]["finish_reason"]) for one in found] == [
        (1, "length"),
        (64, "length"),
    ]


# the server's state


def test_a_server_says_whether_it_is_loading_ready_or_broken_and_its_page_needs_no_key(server: Server) -> None:
    known = {"model": NAME, "drafts": list(server.service.xt.names), "tokens": 4096, "chats": True, "prompts": []}
    assert server.get("/v1/page").json() == known
    service = Service(NAME)
    with Server(service) as one, Server(service, key="secret") as closed:
        assert (one.get("/health").status_code, one.metrics()["xtok_num_requests_running"]) == (503, 0)
        check_error(answer := one.ask(prompt="a"), 503, None)
        assert answer.headers["retry-after"] == "1"
        for path in ("page/main.js", "page/style.css", "page/tints", "view/view.js"):
            assert closed.get(f"/{path}").status_code == 200
        assert [closed.get(f"/{path}").status_code for path in ("page/..%2fapp.py", "v1/page")] == [404, 401]
        answer = closed.get("/")
        assert "default-src 'self'" in (policy := answer.headers["content-security-policy"])
        assert "frame-ancestors 'none'" in policy and not re.findall(r"https?://", answer.text)
        service.xt, service.engine = ALONE, Engine(ALONE)
        assert one.get("/health").status_code == 200
        assert one.ask(prompt="a", max_tokens=1).status_code == 200
        service.engine.close()
        assert one.get("/health").json() == {"status": "broken"}
        check_error(one.ask(prompt="a"), 503, None)


def test_a_full_queue_is_refused_with_when_to_come_again() -> None:
    with serving(ALONE, batch_size=1, queue=1) as one:
        with held(one.engine), ThreadPoolExecutor(1) as pool:
            check_error(one.ask(prompt="a", n=2, max_tokens=2), 429, None)
            assert one.engine.stats.waiting == 1  # the first of the two, given up, is dropped with the next round
            later = pool.submit(one.ask, prompt="a", max_tokens=2)
            check_error(answer := one.ask(prompt="a", max_tokens=2), 429, None)
            assert answer.headers["retry-after"] == "1"
        assert later.result().status_code in (200, 429)
        one.until_idle()
        assert one.ask(prompt="a", max_tokens=2).status_code == 200


def test_a_text_that_fails_is_reported_as_a_fault_and_harms_nobody(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("秘密")

    monkeypatch.setattr("xtok.serving.http.requests.Penalties", lambda *_: fails)
    whole = server.ask(prompt="a", frequency_penalty=1)
    check_error(whole, 500, None)
    stream = server.ask(prompt="a", frequency_penalty=1, stream=True)
    error, done = data_of(stream.text)
    assert (json.loads(error)["error"], done) == (whole.json()["error"], "[DONE]")
    assert "秘密" not in whole.text + stream.text
    with server.client() as client, pytest.raises(openai.APIError, match="ArithmeticError"):
        list(client.completions.create(model=NAME, prompt="a", frequency_penalty=1, stream=True))
    assert server.ask(prompt="a", max_tokens=1).status_code == 200


@pytest.mark.parametrize("texts", [False, True])
def test_the_log_has_a_line_for_each_request_and_texts_only_if_requested(
    texts: bool, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Errors of templates quote them, too."""
    monkeypatch.setattr(server.service, "logs_texts", texts)
    with caplog.at_level(logging.INFO, logger=LOG.name):
        asked = {"prompt": TEXTS[0], "max_tokens": 5, "n": 2, "user": "someone", "temperature": 0}
        answer = HTTP.post(f"{server.url}/v1/completions", json=asked, headers={"X-Request-Id": "mine-1"})
        other = server.ask(prompt=TEXTS[0], nonsense=1)
        server.get("/health")
        server.ask("chat/completions", **CHAT, max_tokens=5, stream=True)
        monkeypatch.setattr(CHAT_TOKENS, "chat_template", "{{ raise_exception(messages[0]['content']) }}")
        check_error(server.ask("chat/completions", messages=[{"role": "user", "content": "秘密"}]), 400, "messages")
        wait_for(lambda: len(caplog.messages) == 4)
    first, second, third, fourth = lines = [json.loads(line) for line in caplog.messages]
    assert (first["request"], answer.json()["id"]) == ("mine-1", "cmpl-mine-1")
    assert (first["path"], first["status"], first["user"], first["stream"]) == ("/v1/completions", 200, "someone", False)
    assert (first["completion_tokens"], first["finish_reasons"]) == (10, ["length"] * 2)
    assert second["request"] == other.headers["x-request-id"] and re.fullmatch(r"[0-9a-f]{32}", second["request"])
    assert (second["status"], second["error"]) == (400, "nonsense isn't supported. Leave it out.")
    assert all(datetime.fromisoformat(line["time"]).utcoffset() == timedelta(0) for line in lines)
    written = ALONE.generate(TEXTS[0], max_new_tokens=5, do_sample=False).text
    assert (first.get("asked"), first.get("written")) == ((TEXTS[0], [written] * 2) if texts else (None, None))
    assert (third["stream"], third.get("asked")) == (True, CHAT["messages"] if texts else None)
    assert ("秘密" in fourth["error"]) == texts
    assert texts or fourth["error"] == "messages: InvalidInputError"
    assert texts or not any(text in "".join(caplog.messages) for text in (TEXTS[0], written))


@pytest.mark.parametrize("keeps", [True, False])
def test_metrics_count_what_the_drafts_did_and_how_much_of_the_prompts_was_not_read_again(keeps: bool) -> None:
    ids, other = (prompt_ids(TOKENS, prompt) for prompt in TEXTS[:2])
    begin = next(i for i, pair in enumerate(zip(ids, other, strict=False)) if len({*pair}) > 1)
    with serving(XTokAssisted((LM, CHAT_TOKENS), (UNRELATED, BYTES), budget=TREE), prefix_cache=keeps) as one:
        found = [one.ask(prompt=prompt, max_tokens=5).json() for prompt in (TEXTS[0], TEXTS[0], [TEXTS[1], TEXTS[0]])]
        one.ask(prompt=TEXTS[0], max_tokens=9, n=2, stream=True)
        wait_for(lambda: one.metrics()["xtok_e2e_request_latency_seconds_count"] == 4)
        reported = one.metrics()
    drafts, guessed, accepted = (
        sum(value for name, value in reported.items() if name.startswith(f"xtok_spec_decode_num_{what}_total{{draft="))
        for what in ("drafts", "draft_tokens", "accepted_tokens")
    )
    hits = [0, len(ids) - 1, begin + len(ids) - 1] if keeps else [0, 0, 0]
    assert [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in found] == hits
    assert reported["xtok_prefix_cache_queries_total"] == 5 * len(ids) + len(other)
    assert (reported["xtok_prefix_cache_hits_total"] > sum(hits)) == keeps
    assert reported["xtok_prompt_tokens_total"] == 4 * len(ids) + len(other)
    assert reported["xtok_generation_tokens_total"] == 38
    assert reported['xtok_request_success_total{finished_reason="length"}'] == 6
    assert reported["xtok_time_to_first_token_seconds_count"] == 4
    assert drafts > 0
    assert guessed >= sum(one["timings"]["draft_n"] for one in found) > 0
    assert guessed >= accepted >= sum(one["timings"]["draft_n_accepted"] for one in found)
    assert {name for name in reported if 'draft="prompt lookup"' in name}


# clients that hang up


LONG = 3000
"""Tokens that no test waits for."""


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_client_that_hangs_up_frees_its_rows_and_is_logged(
    streamed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While the engine stands still within its two texts."""
    holds = Holds(after=9)
    monkeypatch.setattr("xtok.serving.http.requests.Penalties", lambda *_: holds)
    asked = posted({"prompt": TEXTS[0], "n": 2, "max_tokens": 99, "stream": streamed, "frequency_penalty": 1, **UNENDING})
    with serving(ALONE) as one, caplog.at_level(logging.INFO, logger=LOG.name):
        with raw(one, asked) as client:
            holds.wait()
            assert not streamed or client.recv(10)
        wait_for(lambda: len(caplog.messages) == 1)
        holds.go.set()
        one.until_idle()
        assert one.metrics()['xtok_request_success_total{finished_reason="abort"}'] == 2
        assert one.ask(prompt="a", max_tokens=2).status_code == 200
    line = json.loads(caplog.messages[0])
    assert (0 < line["completion_tokens"] < 10, line["finish_reasons"]) == (True, ["abort"] * 2)


# the command, the documents


def test_a_port_or_a_model_that_is_not_to_be_had_ends_the_server_by_one_line(tmp_path: Path) -> None:
    handlers = signal.getsignal(signal.SIGTERM), list(LOG.handlers)
    with listening_socket("127.0.0.1", 0) as first:
        port = str(first.getsockname()[1])
        taken = rf"xtok: 127\.0\.0\.1 port {port} can't be opened for listening: .*in use.*\. Give another --port.*\n"
        assert re.fullmatch(taken, run("serve", "--port", port, code=1)[1])
    assert "xtok: nowhere.invalid port" in run("serve", "--host", "nowhere.invalid", code=1)[1]
    printed = run("serve", "--port", "0", "--target", str(tmp_path), code=1)[1]
    assert printed.splitlines()[-1].startswith(f"xtok: The target {tmp_path}")
    assert run("serve", "--port", "0", "--tool-call-parser", "gpt", code=1)[1].count("xtok: --tool-call-parser is 'gpt'") == 1
    assert handlers == (signal.getsignal(signal.SIGTERM), list(LOG.handlers))


@pytest.mark.parametrize("ends", [True, False])
def test_after_sigterm_what_runs_may_end_and_is_cut_off_if_it_does_not_in_time(
    ends: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Meanwhile no more is taken, and the server ends well. The text doesn't go on before the signal has come."""
    service, holds, printed = Service(NAME, Limits(seconds=None)), Holds(after=3), [""]
    monkeypatch.setattr("xtok.serving.http.requests.Penalties", lambda *_: holds)
    monkeypatch.setattr("xtok.serving.http.command._CLOSING", PATIENCE)
    asked = {"prompt": TEXTS[0], "max_tokens": 9 if ends else 4000, "stream": True, "frequency_penalty": 1, **UNENDING}

    def is_printed(words: str) -> Any:
        printed[0] += capsys.readouterr().err
        return re.search(words, printed[0])

    def client() -> tuple[str, list[str]]:
        wait_for(lambda: is_printed(r"tiny is at (\S+)/v1\n"))
        url = is_printed(r"tiny is at (\S+)/v1\n")[1]
        with HTTP.stream("POST", f"{url}/v1/completions", json=asked) as answer:
            holds.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: is_printed("still generating 1 texts?, for up to .* s; Ctrl-C again stops at once"))
            wait_for(lambda: ends or service.state() == "broken")
            holds.go.set()
            return url, data_of(answer.read().decode())

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(client)
        serve(service, lambda: ALONE, Engine, host="127.0.0.1", port=0, key=None, origins=(), drain_seconds=60 if ends else 0)
    url, (*chunks, last, done) = found.result()
    with pytest.raises(httpx.ConnectError):
        HTTP.get(f"{url}/health")
    assert done == "[DONE]"
    assert is_printed(r'(?m)^({.*"finish_reasons".*})$')
    line = json.loads(is_printed(r'(?m)^({.*"finish_reasons".*})$')[1])
    if ends:
        truth = ALONE.generate(TEXTS[0], max_new_tokens=9, do_sample=False, logits_processor=LogitsProcessorList([holds]))
        assert together(map(json.loads, (*chunks, last)))["choices"][0]["text"] == truth.text
        assert (line["status"], line["finish_reasons"]) == (200, ["length"])
        assert truth.text not in printed[0]
    else:
        assert json.loads(last)["error"]["code"] == "server_stopping"
        assert line["finish_reasons"] == ["error"]


def test_what_the_documents_show_runs(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    document = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    shown = next(code for code in re.findall(r"^```py\n(.*?)^```$", document, re.MULTILINE | re.DOTALL) if "OpenAI" in code)
    exec(compile(shown.replace("http://127.0.0.1:8000", server.url), "serving.md", "exec"), {})
    truth = ALONE.generate("吾輩は", max_new_tokens=32, do_sample=True, temperature=0.8, seed=7)
    assert capsys.readouterr().out == truth.text + "\n"
    body = json.loads(re.findall(r"-d '({.*})'", document)[0])
    assert server.ask(**body).text.endswith("data: [DONE]\n\n")


def test_every_field_metric_and_option_is_documented(server: Server) -> None:
    document = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    fields = {name for kind in (Completion, Chat, Responses) for name in kind.model_fields}
    assert {name for name in fields if f"`{name}" not in document} == set()
    names = {re.sub(r"_(bucket|count|sum|created)$", "", name.partition("{")[0]) for name in server.metrics()}
    assert {name for name in names if name.removeprefix("xtok_").removesuffix("_total") not in document} == set()
    command: Any = typer.main.get_command(cli.app)
    options = {option for one in command.commands["serve"].params for option in (*one.opts, *one.secondary_opts)}
    assert {option for option in options if f"`{option}`" not in document} == set()
