"""The server, asked by OpenAI's own client, and by clients that are less polite. Nothing here reads a clock."""

import asyncio
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
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
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError
from servers import (
    ALONE,
    CHAT_TOKENS,
    NAME,
    ROOT,
    Server,
    check_error,
    data_of,
    dechunked,
    held_to,
    posted,
    serving,
    tools,
    wait_for,
)
from test_batches import TEXTS, TREE, UNRELATED
from test_engine import BYTES, LM, PATIENCE, TOKENS, held
from transformers import LogitsProcessorList
from typer.testing import CliRunner
from worlds import deep, examples

from xtok import Engine, XTokAssisted
from xtok.cli import commands as cli
from xtok.models.prompts import prompt_ids
from xtok.pair import DRAFT, TARGET, prompts
from xtok.sampling.grammar import Grammar
from xtok.serving.http import compiling, processors
from xtok.serving.http.command import listening_socket
from xtok.serving.http.middleware import LOG
from xtok.serving.http.processors import matcher_of
from xtok.serving.http.protocol import Chat, Completion, Limits, RequestError, read
from xtok.serving.http.reading import Reader
from xtok.serving.http.requests import submissions_of
from xtok.serving.http.responses import Responses
from xtok.serving.http.service import Service

TOOLS = tools(look={"type": "object", "properties": {}})


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as one:
        yield one


def until_stop(text: str, stops: Sequence[str]) -> str:
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def expected(prompt: Any, asked: dict[str, Any], number: int = 0) -> tuple[str, str]:
    """What `xt.generate` gives for the same, and how it ends. No draft guesses."""
    given = {name: asked[name] for name in ("top_p", "top_k", "min_p", "temperature", "seed") if name in asked}
    if given.get("temperature") == 0:
        given = {}
    elif "seed" in given:
        given["seed"] += number
    penalty = asked.get("repetition_penalty", 1.0)
    more = {"repetition_penalty": penalty, "max_new_tokens": asked["max_tokens"], "do_sample": bool(given)}
    stops = [asked["stop"]] if isinstance(asked.get("stop"), str) else asked.get("stop") or []
    found = ALONE.generate(prompt, **given, **more, **({"stop_strings": stops} if stops else {}))
    return until_stop(found.text, stops), found.finish_reason


SAMPLING = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.7, 1.0, 1.6]), "seed": st.integers(0, 2**32)},
    optional={"top_p": st.sampled_from([0.5, 0.9, 1.0]), "top_k": st.sampled_from([3, 40]), "min_p": st.just(0.02)},
)
SETTINGS = st.tuples(
    st.one_of(st.just({"temperature": 0}), SAMPLING),
    st.fixed_dictionaries(
        {"max_tokens": st.integers(1, 12)},
        optional={
            "n": st.integers(1, 3),
            "repetition_penalty": st.sampled_from([0.8, 1.3]),
            "stop": st.one_of(st.sampled_from(["の", "a"]), st.lists(st.sampled_from(["が", "e", "1", "。"]), max_size=3)),
        },
    ),
).map(lambda both: {**both[0], **both[1]})
PROMPTS = st.one_of(
    st.sampled_from(TEXTS),
    st.sampled_from(TEXTS).map(lambda text: list(TOKENS(text).input_ids)),
    st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3),
    st.lists(st.sampled_from(TEXTS).map(lambda text: list(TOKENS(text).input_ids)), min_size=1, max_size=2),
)
OWN = ("top_k", "min_p", "repetition_penalty")


def for_client(asked: dict[str, Any]) -> dict[str, Any]:
    """What OpenAI has no name for goes beside its own arguments."""
    named = {name: value for name, value in asked.items() if name not in OWN}
    return {"model": NAME, **named, "extra_body": {name: asked[name] for name in OWN if name in asked}}


@examples(64, share=30)
@given(prompt=PROMPTS, asked=SETTINGS, streamed=st.booleans())
@example(TEXTS[0], {"temperature": 0, "max_tokens": 12, "n": 2}, True)
@example([TEXTS[1], TEXTS[0]], {"temperature": 1.0, "seed": 5, "max_tokens": 9, "n": 2, "stop": ["の", "e"]}, True)
def test_a_completion_is_what_generate_gives_for_the_same_arguments(
    server: Server, prompt: Any, asked: dict[str, Any], streamed: bool
) -> None:
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    each = [(one, number) for one in (prompt if several else [prompt]) for number in range(asked.get("n", 1))]
    with server.client() as client:
        found = client.completions.create(prompt=prompt, stream=streamed, **for_client(asked))
        texts = joined(found, len(each)) if streamed else [(one.text, one.finish_reason) for one in found.choices]
    assert texts == [expected(one, asked, number) for one, number in each]


def joined(chunks: Any, count: int) -> list[tuple[str, str]]:
    """The texts of a stream, and how each ended."""
    texts, ends = [""] * count, [""] * count
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += (choice.text if hasattr(choice, "text") else choice.delta.content) or ""
            assert not ends[choice.index]
            ends[choice.index] = choice.finish_reason or ""
    return list(zip(texts, ends, strict=True))


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_chat_goes_through_the_targets_template_with_its_tools(server: Server, streamed: bool) -> None:
    messages = [
        {"role": "system", "content": "猫として答えよ。"},
        {"role": "user", "content": [{"type": "text", "text": "名前は"}, {"type": "text", "text": "何か"}]},
    ]
    plain = [messages[0], {"role": "user", "content": "名前は何か"}]
    settings = {"do_sample": False, "max_new_tokens": 9}
    alone = ALONE.generate(plain, tools=TOOLS, chat_template_kwargs={"mood": "calm"}, **settings)
    without = ALONE.generate(plain, chat_template_kwargs={"mood": "calm"}, **settings)
    asked: dict[str, Any] = {"model": NAME, "messages": messages, "tools": TOOLS, "temperature": 0, "max_completion_tokens": 9}
    asked["extra_body"] = {"chat_template_kwargs": {"mood": "calm"}}
    with server.client() as client:
        for choice, truth in (("auto", alone), ("none", without)):
            found: Any = client.chat.completions.create(**asked, tool_choice=choice, stream=streamed)
            texts = joined(found, 1) if streamed else [(found.choices[0].message.content, found.choices[0].finish_reason)]
            assert texts == [(truth.text, truth.finish_reason)]
    assert alone.text != without.text


CALLS = (
    "{% for message in messages %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.at }}{% endfor %}{% endfor %}"
)


def test_calls_of_tools_reach_the_template_as_values() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "月"}'}}
    chat = [
        {"role": "user", "content": "見よ"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "丸い"},
    ]
    tokens = deepcopy(TOKENS)
    tokens.chat_template = CALLS
    xt = XTokAssisted((LM, tokens))
    with serving(xt) as one:
        found = one.ask("chat/completions", messages=chat, max_tokens=6).json()
        wrong = one.ask("chat/completions", messages=[{"role": "user", "tool_calls": [{"function": {"arguments": "{"}}]}])
    ids = tokens("見よ月丸い", add_special_tokens=False).input_ids
    assert found["usage"]["prompt_tokens"] == len(ids)
    assert found["choices"][0]["message"]["content"] == xt.generate(ids, do_sample=False, max_new_tokens=6).text
    check_error(wrong, 400, "messages.0.tool_calls.0")


def test_a_stream_ends_with_figures_and_done(server: Server) -> None:
    asked = {"prompt": [TEXTS[0], TEXTS[1]], "n": 2, "max_tokens": 7, "stream": True, "stream_options": {"include_usage": True}}
    answer = server.ask(**asked)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, last = data_of(answer.text)
    chunks = [json.loads(line) for line in lines]
    assert last == "[DONE]"
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert len({(chunk["id"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    read = sum(len(prompt_ids(TOKENS, prompt)) for prompt in asked["prompt"])
    assert chunks[-1]["choices"] == []
    counts = {"prompt_tokens": read, "completion_tokens": 28, "total_tokens": read + 28}
    assert chunks[-1]["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": ANY}}
    assert [name for name in chunks[-2] if name not in chunks[0]] == ["timings"]
    reported = chunks[-2]["timings"]
    assert (reported["prompt_n"], reported["predicted_n"]) == (read, 28)
    assert 0 <= reported["draft_n_accepted"] <= reported["draft_n"]
    whole = server.ask(**{**asked, "stream": False, "stream_options": None}).json()
    assert {name: whole["usage"][name] for name in counts} == counts
    assert whole["timings"].keys() == reported.keys()


@pytest.mark.parametrize(("streamed", "parts"), [(False, False), (True, True), *deep((False, True), (True, False))])
def test_a_prediction_is_guessed_from_and_what_came_of_it_is_reported(server: Server, streamed: bool, parts: bool) -> None:
    chat = [{"role": "user", "content": TEXTS[0]}]
    asked: dict[str, Any] = {"model": NAME, "messages": chat, "max_tokens": 24, "temperature": 0}
    usage = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
    with server.client() as client:
        truth = client.chat.completions.create(**asked)
        text = truth.choices[0].message.content
        predicted = [{"type": "text", "text": text[:5]}, {"type": "text", "text": text[5:]}] if parts else text
        found = client.chat.completions.create(**asked, prediction={"type": "content", "content": predicted}, **usage)
        chunks = [*found] if streamed else [found]
    if streamed:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text
    else:
        assert found.choices[0].message.content == text
    assert truth.usage.completion_tokens_details is None
    reported = chunks[-1].usage.completion_tokens_details
    assert reported.accepted_prediction_tokens > 0
    assert reported.accepted_prediction_tokens + reported.rejected_prediction_tokens <= chunks[-1].usage.completion_tokens * 32


def test_a_chats_stream_begins_with_the_role(server: Server) -> None:
    with server.client() as client:
        found = client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "a"}], max_tokens=3, temperature=0, stream=True
        )
        first = next(iter(found))
        assert (first.object, first.choices[0].delta.role, first.choices[0].delta.content) == (
            "chat.completion.chunk",
            "assistant",
            "",
        )


class OpenAIPenalties:
    """As OpenAI's documents write the formula."""

    def __init__(self, frequency: float, presence: float, start: int) -> None:
        self.frequency, self.presence, self.start = frequency, presence, start

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        new = ids[0, self.start :].tolist()
        for token in set(new):
            scores[0, token] -= new.count(token) * self.frequency + self.presence
        return scores


def test_penalties_count_what_was_generated(server: Server) -> None:
    start = len(prompt_ids(TOKENS, TEXTS[0]))
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16}
    plain = ALONE.generate(TEXTS[0], **settings).text
    for frequency, presence in ((0.0, 2.0), (1.5, -0.5)):
        own = LogitsProcessorList([OpenAIPenalties(frequency, presence, start)])
        truth = ALONE.generate(TEXTS[0], logits_processor=own, **settings)
        found = server.ask(prompt=TEXTS[0], max_tokens=16, frequency_penalty=frequency, presence_penalty=presence).json()
        assert found["choices"][0]["text"] == truth.text
        assert truth.text != plain


def test_a_bias_forbids_and_forces(server: Server) -> None:
    first = ALONE.generate(TEXTS[0], do_sample=False, max_new_tokens=1).token_ids[0]
    wanted = TOKENS.convert_tokens_to_ids("猫") if "猫" in TOKENS.get_vocab() else 40
    reported = [
        server.ask(prompt=TEXTS[0], max_tokens=1, logit_bias=bias, logprobs=0).json() for bias in ({first: -100}, {wanted: 100})
    ]
    tokens = [one["choices"][0]["logprobs"]["tokens"][0] for one in reported]
    plain = server.ask(prompt=TEXTS[0], max_tokens=1, logprobs=0).json()["choices"][0]["logprobs"]["tokens"][0]
    assert tokens[0] != plain
    assert tokens[1].encode() == (ALONE.target.vocabulary.view[wanted] or b"")


@pytest.mark.parametrize(("streamed", "stop"), [(False, None), (True, "の"), *deep((False, "の"), (True, None))])
def test_log_probabilities_are_those_of_the_targets_own_logits(server: Server, streamed: bool, stop: str | None) -> None:
    """Before any penalty, and whatever the temperature."""
    settings: dict[str, Any] = {"repetition_penalty": 1.3, "seed": 3, "temperature": 0.7, "max_tokens": 9, "stop": stop}
    own = {"do_sample": True, "repetition_penalty": 1.3, "temperature": 0.7, "seed": 3, "max_new_tokens": 9}
    truth = ALONE.generate(TEXTS[0], **own, **({"stop_strings": stop} if stop else {}))
    ids = prompt_ids(TOKENS, TEXTS[0])
    with torch.no_grad():
        logits = LM(torch.tensor([ids + truth.token_ids])).logits[0, len(ids) - 1 : -1].float().log_softmax(dim=-1)
    kept = until_stop(truth.text, [stop] if stop else [])
    found = server.ask(prompt=TEXTS[0], logprobs=3, stream=streamed, **settings)
    chunks = (
        [json.loads(line) for line in re.findall(r"^data: ({.*)", found.text, re.MULTILINE)] if streamed else [found.json()]
    )
    reported = [one["choices"][0]["logprobs"] for one in chunks if one["choices"][0]["logprobs"] is not None]
    picked = [value for one in reported for value in one["token_logprobs"]]
    offsets = [value for one in reported for value in one["text_offset"]]
    assert "".join(one["choices"][0]["text"] for one in chunks) == kept
    assert stop is not None or len(picked) == len(truth.token_ids)
    assert all(offset <= len(kept) for offset in offsets)
    rows = range(len(picked))
    torch.testing.assert_close(torch.tensor(picked), logits[rows, truth.token_ids[: len(picked)]], rtol=0, atol=1e-4)
    tops = [sorted(top.values(), reverse=True) for one in reported for top in one["top_logprobs"]]
    torch.testing.assert_close(torch.tensor(tops), logits[rows].topk(3).values, rtol=0, atol=1e-4)


def test_the_client_reads_the_log_probabilities_of_a_chat(server: Server) -> None:
    with server.client() as client:
        found = client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "名前"}],
            max_tokens=8,
            temperature=0,
            logprobs=True,
            top_logprobs=2,
        )
    choice = found.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    data = b"".join(bytes(one.bytes or []) for one in choice.logprobs.content)
    assert data.decode(errors="replace") == choice.message.content
    assert all(len(one.top_logprobs) == 2 and one.top_logprobs[0].logprob == one.logprob for one in choice.logprobs.content)


SCHEMA: dict[str, Any] = {"enum": [{"名": "吾輩", "数": [1, 2]}, {"名": "メロス", "数": []}, "猫"]}


@pytest.mark.parametrize("settings", [*deep({"temperature": 0}), {"temperature": 1.0, "seed": 4}], ids=["greedy", "sampled"])
def test_a_text_is_held_to_a_json_schema(server: Server, settings: dict[str, Any]) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "who", "schema": SCHEMA, "strict": True}}
    asked: Any = {"messages": [{"role": "user", "content": "誰"}], "max_tokens": 60, "frequency_penalty": 2.0, **settings}
    (same,) = submissions_of(read(Chat, json.dumps({**asked, "response_format": wanted}).encode()), ALONE, Limits())
    with server.client() as client:
        choice = client.chat.completions.create(model=NAME, response_format=wanted, **asked).choices[0]
    assert choice.message.content == ALONE.generate(same.prompt, **same.arguments).text
    assert choice.finish_reason == "stop"
    assert json.loads(choice.message.content or "") in SCHEMA["enum"]


def test_a_tokenizer_whose_last_call_padded_is_read_as_any_other() -> None:
    padding = deepcopy(TOKENS)
    padding(["a", "b b b b"], padding="max_length", truncation=True, max_length=3)
    allowed = []
    for tokens in (TOKENS, padding):
        matcher = matcher_of(tokens, 2, *['start: %json {"enum": ["名前"]}'] * 2, [{"enum": ["名前"]}])
        scores = Grammar(matcher, 0)(torch.zeros((1, 0), dtype=torch.int64), torch.zeros((1, len(tokens))))
        allowed.append(scores.isfinite())
    assert allowed[0].any()
    assert torch.equal(*allowed)


def test_any_json_object_may_be_requested(server: Server) -> None:
    found = server.ask(prompt="a", max_tokens=4, response_format={"type": "json_object"}).json()["choices"][0]["text"]
    assert found.lstrip().startswith("{")


@pytest.mark.deep
def test_a_schema_that_takes_too_long_to_compile_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by a hostile trial: these took llguidance minutes. What was refused for that isn't compiled here."""
    monkeypatch.setattr(compiling, "SECONDS", 1.0)
    for schema in ({"multipleOf": 100_000_007}, {"anyOf": [{"type": "integer", "multipleOf": 9001 + i} for i in range(20)]}):
        answer = server.ask(prompt="a", **held_to({"type": "integer", **schema}))
        check_error(answer, 400, "response_format")
        assert "more than 1 seconds" in answer.json()["error"]["message"]


def test_a_schema_that_ends_llguidance_ends_no_server(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    crashes = tmp_path / "crashes.py"
    crashes.write_text("import os; os.abort()")
    monkeypatch.setattr(compiling, "__file__", str(crashes))
    check_error(server.ask(prompt="a", **held_to({"enum": ["ends llguidance"]})), 400, "response_format")


def test_texts_do_not_wait_for_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by a hostile trial: as many schemas as there were threads, and no text was written any more."""
    still, compiled = threading.Event(), list[str]()

    def slowly(grammar: str) -> None:
        compiled.append(grammar)
        still.wait(PATIENCE)

    monkeypatch.setattr(processors, "check_compiles", slowly)
    asked = {"prompt": "a", "max_tokens": 1, **held_to({"enum": ["a"]})}
    with serving() as one, ThreadPoolExecutor(50) as pool:
        answers = [pool.submit(one.ask, **asked) for _ in range(50)]
        wait_for(lambda: len(compiled) == 2)
        assert one.ask(prompt="a", max_tokens=1).status_code == 200
        assert len(compiled) == 2
        still.set()
        assert {answer.result().status_code for answer in answers} == {200}


def test_a_schema_is_compiled_once_for_all_texts_of_a_request(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = counted(monkeypatch, "xtok.serving.http.tools.matcher_of")
    asked = {"prompt": ["a", "b"], "n": 2, "temperature": 1.0, "max_tokens": 60, **held_to({"enum": ["吾輩", "猫", 5]})}
    choices = server.ask(**asked).json()["choices"]
    assert all(json.loads(one["text"]) in ["吾輩", "猫", 5] for one in choices)
    assert (len(choices), len(compiled)) == (4, 1)


def test_what_is_wrong_with_a_pattern_is_reported(server: Server) -> None:
    for pattern in ("(", "(" + "a" * 5000):
        message = server.ask(prompt="a", **held_to({"type": "string", "pattern": pattern})).json()["error"]["message"]
        assert "regex parse error" in message
        assert message.endswith("unclosed group")
        assert "\n" not in message
        assert len(message) < 500


@pytest.mark.parametrize("streamed", [*deep(False), True], ids=["whole", "streamed"])
def test_a_schema_that_gets_too_hard_is_reported_as_the_cause(server: Server, streamed: bool) -> None:
    """Found by a hostile trial: a pattern on which llguidance gives up after some ids was reported as a fault of the server."""
    pattern = r"^((.*\w.{29})|(.*\d.{31})|(.*\s.{33})|(.+.{35}x)){30}$"
    answer = server.ask(
        prompt="a", max_tokens=100, temperature=1, seed=3, stream=streamed, **held_to({"type": "string", "pattern": pattern})
    )
    found = data_of(answer.text)[-2] if streamed else answer.text
    assert answer.status_code == (200 if streamed else 400)
    error = json.loads(found)["error"]
    assert (error["param"], error["type"]) == (None, "invalid_request_error")
    assert "can't follow the grammar of this request's format or tools any further: " in error["message"]
    assert "<state>" not in error["message"]


ENDLESS: list[dict[str, Any]] = [
    {"$ref": "#"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"type": "object", "properties": {f"p{i}": {} for i in range(1500)}},
]
"""Schemas that llguidance takes, and can't follow."""
CHAT = {"messages": [{"role": "user", "content": "a"}]}
PADDED = {"padding": "max_length", "max_length": 99}
"""Found by a hostile trial: a request for 10**9 ids of padding took all memory, before it was refused."""
REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": "a", "best_of": 2}, "best_of"),
    ({"prompt": "a", "prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction"),
    ({"prompt": "a", "prediction": {"type": "text", "content": "a"}}, "prediction"),
    ({"prompt": "a", "prediction": "a"}, "prediction"),
    ({"prompt": "a", "temperature": 1e-300}, "temperature"),
    ({"prompt": "a", "repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"prompt": "a", "temperature": "1"}, "temperature"),
    ({"prompt": "a", "temperature": -1}, "temperature"),
    *(({"prompt": "a", name: value}, None) for name in ("temperature", "safety_identifier") for value in (inf, nan)),
    ({"prompt": "a", "metadata": {"a": [{"b": -inf}]}}, None),
    ({"prompt": "a", "temperature": True}, "temperature"),
    ({"prompt": "a", "top_p": 1.5}, "top_p"),
    ({"prompt": "a", "top_k": 1.5}, "top_k"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "a", "frequency_penalty": 3}, "frequency_penalty"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 1000}, "n"),
    ({"prompt": "a", "seed": 2**64}, "seed"),
    ({"prompt": "a", "stop": ""}, "stop"),
    ({"prompt": "a", "stop": ["a"] * 17}, "stop"),
    ({"prompt": "a", "stop": ["a" * 8193] * 2}, "stop"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logit_bias": {"-1": 5}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"99999": 5}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"٣": 5}}, "logit_bias"),
    *(({"prompt": "a", "logit_bias": {"1": value}}, "logit_bias") for value in (500, True, "5", None)),
    ({"prompt": "a", "logit_bias": {"0" * 5000 + "1": 5}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"9" * 5000: 5}}, "logit_bias"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "stream": True, "stream_options": {"other": True}}, "stream_options.other"),
    ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format"),
    ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format"),
    *(
        ({"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}, "response_format")
        for schema in ENDLESS
    ),
    ({"messages": [{"role": "user", "tool_calls": 5}]}, "messages.0.tool_calls"),
    *(
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]},
            "messages.1.tool_calls.0",
        )
        for call in (5, {}, {"function": {"arguments": "{}"}}, {"function": {"name": "a", "arguments": 5}})
    ),
    ({"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}}, "response_format"),
    ({}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a"] * 65, "n": 2}, "n"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": "a b " * 4900, "max_tokens": 64}, "prompt"),
    ({"messages": []}, "messages"),
    ({"messages": [{"content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({**CHAT, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({**CHAT, "top_logprobs": 3}, "top_logprobs"),
    ({**CHAT, "tool_choice": "required"}, "tool_choice"),
    ({**CHAT, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "hear"}}}, "tool_choice"),
    ({**CHAT, "tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ({**CHAT, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({**CHAT, "tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools"),
    ({**CHAT, "tools": [{"type": "web_search"}]}, "tools"),
    *(({**CHAT, "tools": tools(a=schema), "tool_choice": "required"}, "tools") for schema in ENDLESS),
    ({**CHAT, "functions": []}, "functions"),
    ({**CHAT, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    ({**CHAT, "chat_template_kwargs": {"tokenize": False}}, "messages"),
    *(({**CHAT, "chat_template_kwargs": padded}, "messages") for padded in (PADDED, {"tokenizer_kwargs": PADDED})),
]


@pytest.fixture(scope="module")
def strict() -> Iterator[Server]:
    """One with limits that are soon reached."""
    with serving(ALONE, limits=Limits(tokens=64, body=20_000), key="日本", origins=["https://example.org"]) as one:
        yield one


AUTHORIZED = {"Authorization": "Bearer 日本".encode()}


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=lambda one: str(one)[:40])
def test_what_cannot_be_honoured_is_refused_by_the_fields_name(strict: Server, body: dict[str, Any], param: str | None) -> None:
    path = "chat/completions" if "messages" in body else "completions"
    headers = {**AUTHORIZED, "Content-Type": "application/json"}
    check_error(httpx.post(f"{strict.url}/v1/{path}", content=json.dumps(body), headers=headers), 400, param)
    assert strict.engine.stats.running + strict.engine.stats.waiting == 0


def counted(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[Any]:
    """What the functions of these names are called with from now on."""
    called = list[Any]()

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: called.append(given) or real(*given)

    for name in names:
        module, _, function = name.rpartition(".")
        monkeypatch.setattr(name, counting(getattr(sys.modules[module], function)))
    return called


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "名前" * 2},
        {"messages": [{"role": "user", "content": "名前" * 2}]},
        {**CHAT, "tools": [{**TOOLS[0], "a": ["名前" * 2]}]},
    ],
)
def test_a_prompt_that_is_too_long_in_any_case_is_not_read(monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]) -> None:
    """Found by a hostile trial: others waited for seconds while a prompt of 4 MB was read, only to be refused."""
    xt = XTokAssisted((LM, CHAT_TOKENS))
    monkeypatch.setattr("xtok.serving.http.requests.context_window", lambda _: 1)
    monkeypatch.setitem(xt.target.vocabulary.__dict__, "longest", 11)
    called = counted(monkeypatch, "xtok.serving.http.requests.prompt_ids")
    asked = read(Chat if "messages" in body else Completion, json.dumps(body).encode())
    with pytest.raises(RequestError) as refused:
        submissions_of(asked, xt, Limits())
    assert refused.value.body["error"]["code"] == "context_length_exceeded"
    assert "up to 11 bytes" in str(refused.value)
    assert not called


MANY: dict[str, Any] = {
    "prompt": [{}] * 1000,
    "messages": [5] * 1000,
    "tools": [5] * 1000,
    "stop": [""] * 1000,
    "prediction": {"type": "content", "content": [5] * 1000},
    "logit_bias": {str(i): "a" for i in range(1000)},
}


@pytest.mark.parametrize("field", [*MANY, "ids"])
def test_of_many_faults_few_are_reported(field: str) -> None:
    """Found by a hostile trial: a body of 4 MB, of which each item is wrong, held up everybody for half a minute."""
    body = {"prompt": [[{}] * 1000] * 1000} if field == "ids" else {field: MANY[field]}
    with pytest.raises(ValidationError) as found:
        (Chat if field in ("messages", "tools") else Completion).model_validate_json(json.dumps(body))
    assert found.value.error_count() < 40


def test_no_prompt_is_longer_than_what_its_ids_may_decode_to() -> None:
    tokens = XTokAssisted((LM, CHAT_TOKENS)).target.vocabulary
    names = [*CHAT_TOKENS.get_added_vocab()]
    for text in [*TEXTS, *names]:
        assert len(text.encode()) <= tokens.longest * len(CHAT_TOKENS(text, add_special_tokens=False).input_ids)


def test_a_prompt_is_read_once_for_all_of_its_texts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    called = counted(monkeypatch, "xtok.serving.http.requests.prompt_ids", "xtok.models.prompts.prompt_ids")
    server.ask(prompt=["a", "b"], n=3, max_tokens=1)
    assert len(called) == 2
    server.ask("chat/completions", **CHAT, n=3, max_tokens=1)
    assert len(called) == 3


def test_none_is_as_if_it_were_not_there(server: Server) -> None:
    found = server.ask(prompt="a", max_tokens=2, best_of=None, stop=None, logprobs=None, response_format=None)
    assert found.json()["choices"] == server.ask(prompt="a", max_tokens=2).json()["choices"]
    assert server.ask(prompt="a", seed=5, top_p=0.5, max_tokens=2).json()["choices"] == found.json()["choices"]


BODIES = {
    "no JSON": (b"not JSON", 400),
    "half JSON": (b'{"prompt": "a", "max_tokens', 400),
    "a list": (b"[]", 400),
    "not UTF-8": (b'{"prompt": "\xff"}', 400),
    "half a character": (b'{"prompt": "\\ud83d"}', 400),
    "too deep": (b'{"prompt": ' + b"[" * 9000, 400),
    "empty": (b"", 400),
    "huge": (b" " * 100_000, 413),
    "endless": (b" " * 1_000_000, 413),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_none_is_answered_by_an_error(strict: Server, name: str) -> None:
    body, status = BODIES[name]
    headers = {**AUTHORIZED, "Content-Type": "application/json"}
    try:
        check_error(httpx.post(f"{strict.url}/v1/completions", content=body, headers=headers), status, None)
    except (httpx.WriteError, httpx.RemoteProtocolError, httpx.ReadError):
        assert name == "endless"  # nobody reads all of that
    assert httpx.get(f"{strict.url}/v1/models", headers=AUTHORIZED).status_code == 200


def raw(server: Server, data: bytes) -> socket.socket:
    one = socket.create_connection(server.address, timeout=PATIENCE)
    one.sendall(data)
    return one


def test_a_body_that_is_half_sent_and_given_up_harms_nobody(server: Server) -> None:
    before = server.engine.stats.tokens
    with raw(server, posted({"prompt": "a"}, length=500)), raw(server, b"POST /v1/compl"), raw(server, b"\x00\xff\r\n\r\n"):
        pass
    assert server.ask(prompt="a", max_tokens=2).status_code == 200
    assert server.engine.stats.tokens == before + 2


def test_other_kinds_of_bodies_are_refused(server: Server) -> None:
    """A page of any site may send a form to this machine, and no JSON."""
    answer = httpx.post(f"{server.url}/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    check_error(answer, 415, None)


def test_fields_of_openai_that_change_nothing_are_taken(server: Server) -> None:
    """Found by a trial as a new user: frameworks send them."""
    with server.client() as client:
        plain = client.completions.create(model=NAME, prompt="a", max_tokens=3, temperature=0)
        neutral: dict[str, Any] = {"metadata": {"a": "b"}, "store": True, "service_tier": "flex", "modalities": ["text"]}
        found = client.completions.create(
            model=NAME, prompt="a", max_tokens=3, temperature=0, best_of=1, echo=False, extra_body=neutral
        )
        assert found.choices[0].text == plain.choices[0].text
        for wrong in ({"ignore_eos": True}, {"modalities": ["audio"]}, {"reasoning_effort": "low"}):
            with pytest.raises(openai.BadRequestError, match="isn't supported"):
                client.completions.create(model=NAME, prompt="a", extra_body=wrong)
        with pytest.raises(openai.BadRequestError, match=r"400 - .*stop\.0: String should have at least 1 character"):
            client.completions.create(model=NAME, prompt="a", stop=[""])


def test_errors_are_those_that_the_client_knows(server: Server, strict: Server) -> None:
    with server.client() as client, strict.client(api_key="wrong") as stranger:
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(model=NAME, prompt="a", best_of=2)
        with pytest.raises(openai.BadRequestError, match=r"max_new_tokens isn't supported\. Use max_tokens instead\."):
            client.completions.create(model=NAME, prompt="a", extra_body={"max_new_tokens": 2})
        with pytest.raises(openai.BadRequestError, match=r"max_tokenz isn't supported\. Did you mean max_tokens\?"):
            client.completions.create(model=NAME, prompt="a", extra_body={"max_tokenz": 2})
        with pytest.raises(openai.NotFoundError) as unknown:
            client.completions.create(model="gpt", prompt="a")
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt")
        with pytest.raises(openai.AuthenticationError) as closed:
            stranger.models.list()
        assert [one.id for one in client.models.list()] == [client.models.retrieve(NAME).id] == [NAME]
    assert (bad.value.param, bad.value.code) == ("best_of", "unsupported_parameter")
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    assert closed.value.code == "invalid_api_key"
    check_error(httpx.get(f"{server.url}/v1/nothing"), 404, None)
    check_error(httpx.get(f"{server.url}/v1/completions"), 405, None)


def test_the_key_opens_and_health_and_metrics_need_none(strict: Server) -> None:
    asked = {"prompt": "a", "max_tokens": 1}
    for headers in ({}, {"Authorization": "日本".encode()}, {"Authorization": b"Bearer"}, {"Authorization": b"Bearer \xe6"}):
        check_error(httpx.post(f"{strict.url}/v1/completions", json=asked, headers=headers), 401, None)
    assert httpx.post(f"{strict.url}/v1/completions", json=asked, headers=AUTHORIZED).status_code == 200
    assert httpx.get(f"{strict.url}/health").json() == {"status": "ready"}
    assert httpx.get(f"{strict.url}/metrics").status_code == 200


def test_pages_of_other_sites_may_ask_if_they_were_named(server: Server, strict: Server) -> None:
    for one, origin, allowed in (
        (server, "https://example.org", None),
        (strict, "https://example.org", "https://example.org"),
        (strict, "https://example.com", None),
    ):
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        answer = httpx.options(f"{one.url}/v1/completions", headers=headers)
        assert answer.headers.get("access-control-allow-origin") == allowed
    assert httpx.get(f"{strict.url}/v1/models", headers={"Origin": "https://example.org"}).headers[
        "access-control-allow-origin"
    ]


def test_a_server_says_whether_it_is_loading_ready_or_broken() -> None:
    service = Service(NAME)
    with Server(service) as one:
        assert (httpx.get(f"{one.url}/health").status_code, one.metrics()["xtok_num_requests_running"]) == (503, 0)
        answer = one.ask(prompt="a")
        check_error(answer, 503, None)
        assert answer.headers["retry-after"] == "1"
        service.xt, service.engine = ALONE, Engine(ALONE)
        assert httpx.get(f"{one.url}/health").status_code == 200
        assert one.ask(prompt="a", max_tokens=1).status_code == 200
        service.engine.close()
        assert httpx.get(f"{one.url}/health").json() == {"status": "broken"}
        check_error(one.ask(prompt="a"), 503, None)


def test_a_full_queue_is_refused_with_when_to_come_again() -> None:
    with serving(ALONE, batch_size=1, queue=1) as one:
        with held(one.engine), ThreadPoolExecutor(1) as pool:
            check_error(one.ask(prompt="a", n=2, max_tokens=2), 429, None)
            assert one.engine.stats.waiting == 1  # the first of the two, given up, is dropped with the next round
            later = pool.submit(one.ask, prompt="a", max_tokens=2)
            answer = one.ask(prompt="a", max_tokens=2)
            check_error(answer, 429, None)
            assert answer.headers["retry-after"] == "1"
            with one.client() as client, pytest.raises(openai.RateLimitError):
                client.completions.create(model=NAME, prompt="a")
        assert later.result().status_code in (200, 429)
        one.until_idle()
        assert one.ask(prompt="a", max_tokens=2).status_code == 200


def test_a_text_ends_when_its_time_is_over(server: Server) -> None:
    with serving(ALONE, limits=Limits(seconds=1e-9)) as one:
        found = one.ask(prompt=TEXTS[0], max_tokens=9).json()
    assert found["usage"]["completion_tokens"] == 1
    assert found["choices"][0]["finish_reason"] == "length"


class Fails:
    """A processor that raises."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("秘密")


def test_a_text_that_fails_is_reported_as_a_fault_and_harms_nobody(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("xtok.serving.http.requests.Penalties", lambda *_: Fails())
    whole = server.ask(prompt="a", frequency_penalty=1)
    check_error(whole, 500, None)
    stream = server.ask(prompt="a", frequency_penalty=1, stream=True)
    lines = data_of(stream.text)
    assert json.loads(lines[0])["error"] == whole.json()["error"]
    assert lines[1:] == ["[DONE]"]
    assert "秘密" not in whole.text + stream.text
    with server.client() as client, pytest.raises(openai.APIError, match="ArithmeticError"):
        list(client.completions.create(model=NAME, prompt="a", frequency_penalty=1, stream=True))
    assert server.ask(prompt="a", max_tokens=1).status_code == 200


def test_the_log_has_a_line_for_each_request_and_no_texts(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="xtok.serving.http"):
        asked = {"prompt": TEXTS[0], "max_tokens": 5, "user": "someone"}
        answer = httpx.post(f"{server.url}/v1/completions", json=asked | {"temperature": 0}, headers={"X-Request-Id": "mine-1"})
        other = server.ask(prompt=TEXTS[0], max_tokens=5, stream=True)
        names = [one.headers["x-request-id"] for one in (answer, other, server.ask(prompt=TEXTS[0], nonsense=1))]
        httpx.get(f"{server.url}/health")
        wait_for(lambda: {*names} <= {json.loads(line)["request"] for line in caplog.messages})
    assert names[0] == "mine-1"
    assert re.fullmatch(r"[0-9a-f]{32}", names[1])
    lines = [json.loads(line) for line in caplog.messages]
    first, second, third = (line for line in lines if line["request"] in names)
    assert all(line["path"] != "/health" for line in lines)
    assert (first["request"], first["status"], first["user"], first["stream"]) == ("mine-1", 200, "someone", False)
    assert first["completion_tokens"] == second["completion_tokens"] == 5
    assert (first["finish_reasons"], third["status"]) == (["length"], 400)
    assert third["error"] == "nonsense isn't supported. Leave it out."
    assert all(datetime.fromisoformat(line["time"]).utcoffset() == timedelta(0) for line in lines)
    assert answer.json()["id"] == "cmpl-mine-1"
    assert answer.json()["choices"][0]["text"] not in json.dumps([first, second], ensure_ascii=False)
    assert TEXTS[0] not in "".join(map(str, (first, second, third)))


def test_the_log_counts_what_a_client_that_disconnected_left(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": TEXTS[0], "max_tokens": 64, "temperature": 0, "stream": True, "logit_bias": {"2": -100}}
    with caplog.at_level(logging.INFO, logger="xtok.serving.http"):
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "n": 4}, timeout=PATIENCE) as answer:
            name, lines = answer.headers["x-request-id"], answer.iter_lines()
            next(lines)
        wait_for(lambda: any(name in line for line in caplog.messages))
    line = next(found for found in map(json.loads, caplog.messages) if found["request"] == name)
    assert 0 < line["completion_tokens"] <= 4 * 64
    assert (line["status"], len(line["finish_reasons"])) == (200, 4)
    assert set(line["finish_reasons"]) <= {"abort", "length"}
    assert 0 <= line["draft_n_accepted"] <= line["draft_n"]


@pytest.mark.parametrize("texts", [False, True])
def test_the_log_quotes_a_prompt_that_is_refused_only_if_texts_are_logged(
    texts: bool, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server.service, "logs_texts", texts)
    monkeypatch.setattr(CHAT_TOKENS, "chat_template", "{{ raise_exception(messages[0]['content']) }}")
    with caplog.at_level(logging.INFO, logger="xtok.serving.http"):
        answer = server.ask("chat/completions", messages=[{"role": "user", "content": "秘密"}])
        wait_for(lambda: bool(caplog.messages))
    (line,) = map(json.loads, caplog.messages)
    assert (answer.status_code, line["status"]) == (400, 400)
    assert ("秘密" in line["error"]) == texts
    assert texts or line["error"] == "messages: InvalidInputError"


def test_the_log_has_texts_if_requested(caplog: pytest.LogCaptureFixture) -> None:
    chat = [{"role": "user", "content": TEXTS[1]}]
    with serving() as one, caplog.at_level(logging.INFO, logger="xtok.serving.http"):
        one.service.logs_texts = True
        text = one.ask(prompt=TEXTS[0], max_tokens=5, n=2, stream=True)
        answer = one.ask("chat/completions", messages=chat, max_tokens=5)
        wait_for(lambda: len(caplog.messages) == 2)
    first, second = (json.loads(line) for line in caplog.messages)
    whole = ALONE.generate(TEXTS[0], max_new_tokens=5, do_sample=False).text
    assert (first["asked"], first["written"]) == (TEXTS[0], [whole, whole])
    assert (second["asked"], second["written"]) == (chat, [answer.json()["choices"][0]["message"]["content"]])
    assert text.status_code == 200


def test_metrics_count_what_the_drafts_did() -> None:
    with serving(XTokAssisted((LM, CHAT_TOKENS), (UNRELATED, BYTES), budget=TREE)) as one:
        found = one.ask(prompt=TEXTS[0], max_tokens=9, n=2).json()
        one.ask(prompt=TEXTS[0], max_tokens=9, stream=True)
        wait_for(lambda: one.metrics()["xtok_e2e_request_latency_seconds_count"] == 2)
        reported = one.metrics()
    sums = [
        sum(value for name, value in reported.items() if name.startswith(f"xtok_spec_decode_num_{what}_total{{draft="))
        for what in ("drafts", "draft_tokens", "accepted_tokens")
    ]
    assert reported["xtok_prompt_tokens_total"] == 2 * found["usage"]["prompt_tokens"]
    assert reported["xtok_generation_tokens_total"] == 27
    assert reported['xtok_request_success_total{finished_reason="length"}'] == 3
    assert reported["xtok_time_to_first_token_seconds_count"] == 2
    assert sums[0] > 0
    assert sums[1] >= found["timings"]["draft_n"] > 0
    assert sums[1] >= sums[2] >= found["timings"]["draft_n_accepted"]
    assert {name for name in reported if 'draft="prompt lookup"' in name}


@pytest.mark.parametrize("keeps", [True, False])
def test_a_client_learns_how_much_of_its_prompts_was_not_read_again(keeps: bool) -> None:
    with serving(ALONE, prefix_cache=keeps) as one:
        found = [one.ask(prompt=prompt, max_tokens=5).json() for prompt in (TEXTS[0], TEXTS[0], [TEXTS[1], TEXTS[0]])]
        reported = one.metrics()
    size, other = (len(prompt_ids(TOKENS, prompt)) for prompt in TEXTS[:2])
    begin = next(
        i for i, pair in enumerate(zip(*(prompt_ids(TOKENS, one) for one in TEXTS[:2]), strict=False)) if len({*pair}) > 1
    )
    hits = [0, size - 1, begin + size - 1] if keeps else [0, 0, 0]
    assert [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in found] == hits
    assert reported["xtok_prefix_cache_queries_total"] == 3 * size + other
    assert reported["xtok_prefix_cache_hits_total"] == sum(hits)


LONG = 3000
"""Tokens that no test waits for."""


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_client_that_hangs_up_frees_its_rows(streamed: bool) -> None:
    with serving(ALONE) as one:
        body = {"prompt": TEXTS[0], "n": 2, "max_tokens": LONG, "stream": streamed, "temperature": 0, "logit_bias": {"2": -100}}
        with raw(one, posted(body)) as client:
            wait_for(lambda: one.engine.stats.tokens > 4)
            if streamed:
                client.recv(10)
        one.until_idle()
        assert one.engine.stats.tokens < LONG
        wait_for(lambda: one.metrics().get('xtok_request_success_total{finished_reason="abort"}') == 2)
        assert one.ask(prompt="a", max_tokens=2).status_code == 200


def test_a_client_that_reads_slowly_holds_nobody_up_and_gets_all() -> None:
    with serving(ALONE) as one:
        body = {"prompt": TEXTS[0], "max_tokens": 200, "stream": True, "temperature": 0, "logprobs": 20}
        body["logit_bias"] = {"2": -100}
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.settimeout(PATIENCE)
            slow.connect(one.address)
            slow.sendall(posted(body))
            wait_for(lambda: one.engine.stats.tokens >= 200)
            assert one.ask(prompt="a", max_tokens=5).status_code == 200
            data = until(slow, b"data: [DONE]\n\n")
        chunks = [json.loads(line) for line in re.findall(r"^data: ({.*)", dechunked(data), re.MULTILINE)]
        whole = one.ask(**{**body, "stream": False}).json()
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]


def until(one: socket.socket, end: bytes) -> bytes:
    """What comes until `end`."""
    data = b""
    while end not in data[-100:]:
        data += one.recv(3000)
    return data


async def visitors(one: Server, count: int) -> list[tuple[int, str | None]]:
    """Many at once, of ragged lengths; every third hangs up after a piece or before the first. Gives what the others read."""
    async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:

        async def visit(number: int) -> tuple[int, str | None]:
            asked: Any = {"model": NAME, **visited(number)}
            if number % 3 == 0:
                text = asyncio.ensure_future(client.completions.create(**{**asked, "max_tokens": LONG}, stream=number % 2 == 0))
                if number % 2:
                    await asyncio.wait((text,), timeout=0.05)
                    text.cancel()
                else:
                    stream = await text
                    async for _ in stream:
                        break
                    await stream.close()
                return number, None
            if number % 2:
                return number, (await client.completions.create(**asked)).choices[0].text
            return number, "".join(
                [chunk.choices[0].text async for chunk in await client.completions.create(**asked, stream=True)]
            )

        return await asyncio.gather(*map(visit, range(count)))


def visited(number: int) -> dict[str, Any]:
    asked: dict[str, Any] = {"prompt": TEXTS[number % len(TEXTS)], "max_tokens": 1 + number * 7 % 19}
    return {**asked, **({"temperature": 0} if number % 4 else {"temperature": 1.0, "seed": number})}


@pytest.mark.parametrize("count", [18, *deep(64)])
def test_many_clients_of_whom_a_third_hang_up(count: int) -> None:
    """Law 8, through HTTP: all others get the target's own text, and no row leaks."""
    with serving(batch_size=8) as one:
        found = asyncio.run(visitors(one, count))
        one.until_idle()
    for number, text in found:
        if text is not None:
            assert text == expected(visited(number)["prompt"], visited(number))[0]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_text_comes_with_its_trace_if_requested(server: Server, streamed: bool) -> None:
    for path, body in (("completions", {"prompt": TEXTS[0]}), ("chat/completions", CHAT)):
        answer = server.ask(path, **body, max_tokens=9, return_trace=True, stream=streamed)
        *_, found = map(json.loads, data_of(answer.text)[:-1]) if streamed else [answer.json()]
        prompt = body.get("prompt") or CHAT["messages"]
        truth = ALONE.generate(prompt, max_new_tokens=9, do_sample=False)
        assert [token["id"] for token in found["trace"]["tokens"]] == found["trace"]["token_ids"] == truth.token_ids
        assert found["trace"]["drafts"] == list(server.service.xt.names)
        assert sum(one["committed"] for one in found["trace"]["rounds"]) == 9
    for several in ({"prompt": "a", "n": 2}, {"prompt": ["a", "b"]}):
        check_error(server.ask(**several, return_trace=True), 400, "return_trace")


def test_the_page_learns_what_is_served(server: Server) -> None:
    known = {"model": NAME, "drafts": list(server.service.xt.names), "tokens": 4096, "chats": True, "prompts": []}
    assert httpx.get(f"{server.url}/v1/page").json() == known


@pytest.mark.parametrize("path", ["", "page/main.js", "page/style.css", "page/tints"])
def test_the_page_is_there_while_models_are_loaded_and_needs_no_key(path: str) -> None:
    with Server(Service(NAME), key="secret") as one:
        answer = httpx.get(f"{one.url}/{path}")
        assert answer.status_code == 200
        for way_out in ("%2e%2e/app.py", "..%2fapp.py", "%2e%2e%2fapp.py", "//etc/passwd"):
            assert httpx.get(f"{one.url}/page/{way_out}").status_code == 404
        assert httpx.get(f"{one.url}/v1/page").status_code == 401
    if not path:
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert not re.findall(r"https?://", answer.text)


@given(
    pieces=st.lists(st.text(alphabet="abのé", max_size=4), max_size=8),
    stops=st.lists(st.text(alphabet="abのé", min_size=1, max_size=3), max_size=3),
)
def test_a_cut_text_is_that_before_the_first_stop_whatever_its_pieces(pieces: list[str], stops: list[str]) -> None:
    """Of stops that overlap, the one that is complete first decides, as it does where a text is ended."""
    reader = Reader(stops=stops)
    found = "".join(part.text for part in [*[part for piece in pieces for part in reader.read(piece)], *reader.end()])
    text = "".join(pieces)
    assert text.startswith(found)
    assert not any(stop in found for stop in stops)
    assert found == text or any(text[len(found) :].startswith(stop) for stop in stops)
    assert reader.size == len(found.encode())


def test_what_serves_is_imported_only_when_it_is_requested() -> None:
    names = ("fastapi", "uvicorn", "prometheus_client", "sse_starlette", "xtok.serving.http")
    code = f"import sys, xtok, xtok.cli.commands; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_port_that_is_taken_is_reported_in_one_line() -> None:
    with listening_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        found = CliRunner().invoke(cli.app, ["serve", "--port", str(port)])
    assert found.exit_code == 1
    assert re.fullmatch(
        rf"xtok: 127\.0\.0\.1 port {port} can't be opened for listening: .*in use.*\. Give another --port.*\n", found.stderr
    )
    assert "xtok: nowhere.invalid port" in CliRunner().invoke(cli.app, ["serve", "--host", "nowhere.invalid"]).stderr


@contextmanager
def command(*more: str) -> Iterator[tuple["subprocess.Popen[str]", str, list[str]]]:
    """`xtok serve` as a process of its own: it, its address once it is ready, and the lines of its log."""
    started = subprocess.Popen(
        [sys.executable, "-m", "xtok", "serve", "--port", "0", "--device", "cpu", *more], stderr=subprocess.PIPE, text=True
    )
    lines: list[str] = []
    assert started.stderr is not None
    try:
        for line in started.stderr:
            lines.append(line)
            if found := re.fullmatch(r"xtok: \S+ is at (http\S+)/v1\n", line):
                yield started, found[1], lines
                break
        else:
            raise AssertionError(lines)
        lines.extend(started.stderr)
    finally:
        started.kill()
        started.wait()


def test_a_server_that_ends_finishes_what_it_writes() -> None:
    with serving(ALONE) as one, one.client() as client:
        asked: dict[str, Any] = {"model": NAME, "prompt": TEXTS[0], "max_tokens": 60, "temperature": 0}
        asked["logit_bias"] = {"2": -100}
        truth = client.completions.create(**asked).choices[0].text
        stream = client.completions.create(**asked, stream=True)
        text = next(iter(stream)).choices[0].text
        one.end()
        assert text + "".join(chunk.choices[0].text for chunk in stream) == truth
        wait_for(lambda: not one.running)
        with pytest.raises(openai.APIConnectionError):
            client.models.list()


@pytest.mark.deep
def test_sigterm_lets_what_runs_end(tmp_path: Path) -> None:
    """A process that is asked to end finishes the texts that it writes, takes no more, and ends well."""
    truth = XTokAssisted(TARGET, DRAFT).generate(prompts()[0], max_new_tokens=60, do_sample=False).text
    with command() as (process, url, lines):
        asked = {"prompt": prompts()[0], "max_tokens": 60, "temperature": 0}
        with ThreadPoolExecutor(2) as pool, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            whole = pool.submit(httpx.post, f"{url}/v1/completions", json=asked, timeout=PATIENCE)
            stream = client.completions.create(model="xtok-pair", stream=True, **asked)  # type: ignore[call-overload]
            text = next(iter(stream)).choices[0].text
            process.send_signal(signal.SIGTERM)
            text += "".join(chunk.choices[0].text for chunk in stream)
            assert text == truth == whole.result().json()["choices"][0]["text"]
        assert process.wait(PATIENCE) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
    assert sum('"status": 200' in line for line in lines) == 2
    assert truth[:9] not in "".join(lines)


@pytest.mark.deep
def test_what_does_not_end_in_time_after_sigterm_is_cut_off() -> None:
    with command("--drain-seconds", "1", "--max-tokens", "400") as (process, url, lines):
        body = {"prompt": prompts()[0], "max_tokens": 400, "temperature": 0, "stream": True, "logit_bias": {"2": -100}}
        with httpx.stream("POST", f"{url}/v1/completions", json={**body, "n": 16}, timeout=PATIENCE) as answer:
            events = answer.iter_lines()
            next(events)
            process.send_signal(signal.SIGTERM)
            *_, error, done = [line for line in events if line.startswith("data: ")]
            assert process.wait(PATIENCE) == 0
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "server_stopping"
    assert done == "data: [DONE]"
    reasons = next(found for line in lines if line.startswith("{") and (found := json.loads(line).get("finish_reasons")))
    assert reasons == ["error"] * 16
    assert any("still generating 16 texts, for up to 1 s; Ctrl-C again stops at once" in line for line in lines)


def test_a_model_that_is_not_there_ends_the_server_by_one_line(tmp_path: Path) -> None:
    handlers = signal.getsignal(signal.SIGTERM), list(LOG.handlers)
    found = CliRunner().invoke(cli.app, ["serve", "--port", "0", "--target", str(tmp_path)])
    assert found.exit_code == 1
    assert found.stderr.splitlines()[-1].startswith(f"xtok: The target {tmp_path}")
    assert handlers == (signal.getsignal(signal.SIGTERM), list(LOG.handlers))


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


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("prompt", [TEXTS[0], TOKENS(TEXTS[1]).input_ids], ids=["text", "ids"])
def test_an_echo_has_the_prompt_with_the_log_probabilities_of_one_forward_pass(
    server: Server, prompt: Any, streamed: bool
) -> None:
    """What lm-eval sends, and then with no new token at all."""
    ids = prompt_ids(TOKENS, prompt)
    with torch.no_grad():
        truth = LM(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    text = prompt if isinstance(prompt, str) else TOKENS.decode(prompt, skip_special_tokens=True)
    asked: dict[str, Any] = {"model": NAME, "prompt": [prompt] * 2, "echo": True, "temperature": 0}
    with server.client() as client:
        new = client.completions.create(**{**asked, "echo": None}, max_tokens=2).choices[0].text
        for most, logprobs in ((0, 2), (2, 1), (0, None)):
            found: Any = client.completions.create(**asked, max_tokens=most, logprobs=logprobs, stream=streamed)
            if streamed:
                chunks = list(found)
                assert joined(chunks, 2) == [(text + new * bool(most), "length")] * 2
                parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].index == 1]
                parts = [one for one in parts if one is not None]
            else:
                assert [(one.text, one.finish_reason) for one in found.choices] == [(text + new * bool(most), "length")] * 2
                parts = [found.choices[1].logprobs] if logprobs else []
                assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (2 * len(ids), 2 * most)
            if logprobs is None:
                assert parts == []
                continue
            given = [one for part in parts for one in part.token_logprobs]
            assert given[0] is None
            expected = [float(truth[i, token]) for i, token in enumerate(ids[1:])]
            assert given[1 : len(ids)] == pytest.approx(expected, abs=1e-4)
            assert len(given) == len(ids) + most
            tops = [one for part in parts for one in part.top_logprobs]
            assert tops[0] is None
            for top, row in zip(tops[1:], truth, strict=False):
                assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
            offsets = [one for part in parts for one in part.text_offset]
            assert (offsets[0], offsets == sorted(offsets), len(offsets)) == (0, True, len(given))
            tokens = [one for part in parts for one in part.tokens]
            for token, start, end in zip(tokens[1 : len(ids)], offsets[1:], offsets[2:], strict=False):
                assert token.startswith("bytes:") or text[start:end] in (token, token.removeprefix(" "))
            assert not most or offsets[len(ids)] == len(text)


@pytest.mark.parametrize("ids", [[5, 999_999], [5, -3]])
def test_ids_that_the_target_lacks_are_not_echoed(server: Server, ids: list[int]) -> None:
    for more in ({"logprobs": 1}, {}):
        check_error(server.ask(prompt=ids, echo=True, max_tokens=0, **more), 400, "prompt")


def test_a_prompt_that_fills_the_window_is_echoed(server: Server) -> None:
    window = LM.config.max_position_embeddings
    for size, status in ((window, 200), (window + 1, 400)):
        assert server.ask(prompt=[5] * size, echo=True, max_tokens=0).status_code == status
    check_error(server.ask(prompt=[5] * window, max_tokens=1), 400, "prompt")


def test_a_long_prompt_is_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt_ids(TOKENS, TEXTS[0])
    monkeypatch.setattr(processors, "_CHUNK", 3)
    found = processors.prompt_picks(LM, ids, 1)
    with torch.no_grad():
        truth = LM(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    assert [one.id for one in found] == ids
    assert [one.logprob for one in found[1:]] == pytest.approx([float(truth[i, token]) for i, token in enumerate(ids[1:])])
    assert processors.prompt_picks(LM, ids[:1], 1) == [processors.Picked(ids[0], None, None)]


def test_no_seed_is_meant_by_minus_one() -> None:
    """Found in reports of other servers' users: the text was the same each time."""
    for seed in (-1, None, -2):
        body = read(Completion, {"prompt": "a", "temperature": 1.5, "seed": seed, "n": 2})
        seeds = [one.arguments.get("seed") for one in submissions_of(body, ALONE, Limits())]
        assert seeds == ([2**64 - 2, 2**64 - 1] if seed == -2 else [None, None])


def test_a_limit_beyond_the_window_is_cut_to_what_fits(strict: Server) -> None:
    """Found in reports of other servers' users: agents ask for more tokens than small models have room for."""
    for body in ({"prompt": "a"}, CHAT):
        path = "completions" if "prompt" in body else "chat/completions"
        answer = httpx.post(f"{strict.url}/v1/{path}", json={**body, "max_tokens": 10**6, "temperature": 0}, headers=AUTHORIZED)
        found = answer.json()
        assert (found["usage"]["completion_tokens"], found["choices"][0]["finish_reason"]) == (64, "length")


def test_numbers_too_large_for_json_are_refused(server: Server) -> None:
    """Found by a hostile trial: what was echoed was no JSON any more."""
    for number in ("1e999", "-1E+999", "9" * 400 + ".0", f"1{'0' * 280}e99"):
        for path, body in (("responses", '"input": "a"'), ("completions", '"prompt": "a"')):
            content = f'{{{body}, "safety_identifier": {number}}}'
            answer = httpx.post(f"{server.url}/v1/{path}", content=content, headers={"Content-Type": "application/json"})
            check_error(answer, 400, None)
