"""The server, asked by OpenAI's own client, and by clients that are less polite. Nothing here reads a clock."""

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
from batches import TEXTS, UNRELATED
from commands import run
from engines import BYTES, LM, PATIENCE, TOKENS, held
from hypothesis import example, given
from hypothesis import strategies as st
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
    slow_socket,
    tools,
    wait_for,
)
from transformers import LogitsProcessorList
from worlds import TREE, examples

from xtok import Engine, XTokAssisted
from xtok.cli import commands as cli
from xtok.models.prompts import prompt_ids
from xtok.pair import DRAFT, TARGET, prompts
from xtok.sampling.grammar import Grammar
from xtok.serving.http import grammars
from xtok.serving.http.command import listening_socket
from xtok.serving.http.grammars import llguidance_tokenizer
from xtok.serving.http.middleware import LOG
from xtok.serving.http.processors import Picked, prompt_picks
from xtok.serving.http.protocol import Chat, Completion, Limits, RequestError, read
from xtok.serving.http.requests import submissions_of
from xtok.serving.http.responses import Responses
from xtok.serving.http.service import Service

TOOLS = tools(look={"type": "object", "properties": {}})
BOTH = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
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
OWN = ("top_k", "min_p", "repetition_penalty")
"""What OpenAI's client has no name for."""


@examples(64, share=30)
@given(prompt=PROMPTS, asked=SETTINGS, streamed=st.booleans())
@example(TEXTS[0], {"temperature": 0, "max_tokens": 12, "n": 2}, True)
@example([TEXTS[1], TEXTS[0]], {"temperature": 1.0, "seed": 5, "max_tokens": 9, "n": 2, "stop": ["の", "e"]}, True)
def test_a_completion_is_what_generate_gives_for_the_same_arguments(
    server: Server, prompt: Any, asked: dict[str, Any], streamed: bool
) -> None:
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    each = [(one, number) for one in (prompt if several else [prompt]) for number in range(asked.get("n", 1))]
    named = {name: value for name, value in asked.items() if name not in OWN}
    with server.client() as client:
        body = {name: asked[name] for name in OWN if name in asked}
        found = client.completions.create(model=NAME, prompt=prompt, stream=streamed, **named, extra_body=body)
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


def test_a_chat_goes_through_the_targets_template_with_its_tools(server: Server) -> None:
    parts = [{"type": "text", "text": "名前は"}, {"type": "text", "text": "何か"}]
    messages = [{"role": "system", "content": "猫として答えよ。"}, {"role": "user", "content": parts}]
    plain = [messages[0], {"role": "user", "content": "名前は何か"}]
    mood = {"chat_template_kwargs": {"mood": "calm"}}
    settings = {"do_sample": False, "max_new_tokens": 9, **mood}
    alone, without = ALONE.generate(plain, tools=TOOLS, **settings), ALONE.generate(plain, **settings)
    asked: dict[str, Any] = {"model": NAME, "messages": messages, "tools": TOOLS, "temperature": 0, "max_completion_tokens": 9}
    with server.client() as client:
        whole: Any = client.chat.completions.create(**asked, extra_body=mood, tool_choice="none")
        chunks = client.chat.completions.create(**asked, extra_body=mood, tool_choice="auto", stream=True)
        assert joined(chunks, 1) == [(alone.text, alone.finish_reason)]
    assert whole.choices[0].message.content == without.text != alone.text


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
    whole = server.ask(**{**asked, "stream": False, "stream_options": None}).json()
    assert {name: whole["usage"][name] for name in counts} == counts
    assert whole["timings"].keys() == reported.keys()
    first = json.loads(data_of(server.ask("chat/completions", **CHAT, max_tokens=3, stream=True).text)[0])
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_a_prediction_is_guessed_from_and_what_came_of_it_is_reported(server: Server) -> None:
    chat = [{"role": "user", "content": TEXTS[0]}]
    asked: dict[str, Any] = {"model": NAME, "messages": chat, "max_tokens": 24, "temperature": 0}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    with server.client() as client:
        truth = client.chat.completions.create(**asked)
        text = truth.choices[0].message.content
        parts = [{"type": "text", "text": text[:5]}, {"type": "text", "text": text[5:]}]
        whole = client.chat.completions.create(**asked, prediction={"type": "content", "content": text})
        chunks = [*client.chat.completions.create(**asked, prediction={"type": "content", "content": parts}, **streamed)]
    assert truth.usage.completion_tokens_details is None
    assert whole.choices[0].message.content == joined(chunks, 1)[0][0] == text
    for usage in (whole.usage, chunks[-1].usage):
        reported = usage.completion_tokens_details
        assert reported.accepted_prediction_tokens > 0
        assert reported.accepted_prediction_tokens + reported.rejected_prediction_tokens <= usage.completion_tokens * 32


class OpenAIPenalties:
    """As OpenAI's documents write the formula."""

    def __init__(self, frequency: float, presence: float, start: int) -> None:
        self.frequency, self.presence, self.start = frequency, presence, start

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        new = ids[0, self.start :].tolist()
        for token in set(new):
            scores[0, token] -= new.count(token) * self.frequency + self.presence
        return scores


def test_penalties_count_what_was_generated_and_a_bias_forbids_and_forces(server: Server) -> None:
    start = len(prompt_ids(TOKENS, TEXTS[0]))
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16}
    plain = ALONE.generate(TEXTS[0], **settings)
    for frequency, presence in ((0.0, 2.0), (1.5, -0.5)):
        own = LogitsProcessorList([OpenAIPenalties(frequency, presence, start)])
        truth = ALONE.generate(TEXTS[0], logits_processor=own, **settings)
        found = server.ask(prompt=TEXTS[0], max_tokens=16, frequency_penalty=frequency, presence_penalty=presence).json()
        assert found["choices"][0]["text"] == truth.text != plain.text
    forbidden, forced, first = (
        server.ask(prompt=TEXTS[0], max_tokens=1, logit_bias=bias, logprobs=0).json()["choices"][0]["logprobs"]["tokens"][0]
        for bias in ({plain.token_ids[0]: -100}, {40: 100}, None)
    )
    assert forbidden != first
    assert forced.encode() == (ALONE.target.vocabulary.view[40] or b"")


@pytest.mark.parametrize(("streamed", "stop"), [(False, None), (True, "の")])
def test_log_probabilities_are_those_of_the_targets_own_logits(server: Server, streamed: bool, stop: str | None) -> None:
    """Before any penalty, and whatever the temperature."""
    settings: dict[str, Any] = {"repetition_penalty": 1.3, "seed": 3, "temperature": 0.7}
    own = {"do_sample": True, "max_new_tokens": 9, **settings, **({"stop_strings": stop} if stop else {})}
    truth = ALONE.generate(TEXTS[0], **own)
    ids = prompt_ids(TOKENS, TEXTS[0])
    with torch.no_grad():
        logits = LM(torch.tensor([ids + truth.token_ids])).logits[0, len(ids) - 1 : -1].float().log_softmax(dim=-1)
    kept = until_stop(truth.text, [stop] if stop else [])
    found = server.ask(prompt=TEXTS[0], logprobs=3, stream=streamed, max_tokens=9, stop=stop, **settings)
    chunks = [json.loads(line) for line in data_of(found.text)[:-1]] if streamed else [found.json()]
    reported = [one["choices"][0]["logprobs"] for one in chunks if one["choices"][0]["logprobs"] is not None]
    picked = [value for one in reported for value in one["token_logprobs"]]
    assert "".join(one["choices"][0]["text"] for one in chunks) == kept
    assert stop is not None or len(picked) == len(truth.token_ids)
    assert all(offset <= len(kept) for one in reported for offset in one["text_offset"])
    rows = range(len(picked))
    torch.testing.assert_close(torch.tensor(picked), logits[rows, truth.token_ids[: len(picked)]], rtol=0, atol=1e-4)
    tops = [sorted(top.values(), reverse=True) for one in reported for top in one["top_logprobs"]]
    torch.testing.assert_close(torch.tensor(tops), logits[rows].topk(3).values, rtol=0, atol=1e-4)


def test_the_client_reads_the_log_probabilities_of_a_chat(server: Server) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "名前"}], "max_tokens": 8, "temperature": 0}
    with server.client() as client:
        (choice,) = client.chat.completions.create(model=NAME, **asked, logprobs=True, top_logprobs=2).choices
    data = b"".join(bytes(one.bytes or []) for one in choice.logprobs.content)
    assert data.decode(errors="replace") == choice.message.content
    assert all(len(one.top_logprobs) == 2 and one.top_logprobs[0].logprob == one.logprob for one in choice.logprobs.content)


@pytest.mark.parametrize(("prompt", "streamed"), [(TEXTS[0], False), (TOKENS(TEXTS[1]).input_ids, True)], ids=["text", "ids"])
def test_an_echo_has_the_prompt_with_the_log_probabilities_of_one_forward_pass(
    server: Server, prompt: Any, streamed: bool
) -> None:
    """What lm-eval sends, and then with no new token at all."""
    ids = prompt_ids(TOKENS, prompt)
    with torch.no_grad():
        truth = LM(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    text = prompt if isinstance(prompt, str) else TOKENS.decode(prompt, skip_special_tokens=True)
    asked: dict[str, Any] = {"prompt": [prompt] * 2, "echo": True, "stream": streamed}
    new = server.ask(prompt=prompt, max_tokens=2).json()["choices"][0]["text"]
    for most, logprobs in ((0, 2), (2, 1), (0, None)):
        answer = server.ask(**asked, max_tokens=most, logprobs=logprobs)
        chunks = [json.loads(line) for line in data_of(answer.text)[:-1]] if streamed else [answer.json()]
        parts = [one for chunk in chunks for one in chunk["choices"] if one["index"] == 1]
        assert ("".join(one["text"] for one in parts), parts[-1]["finish_reason"]) == (text + new * bool(most), "length")
        if logprobs is None:
            assert not any(one["logprobs"] for one in parts)
            continue
        tokens, given, tops, offsets = (
            [one for part in parts for one in (part["logprobs"] or {name: []})[name]]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        )
        assert (given[0], tops[0], len(given)) == (None, None, len(ids) + most)
        assert given[1 : len(ids)] == pytest.approx([float(truth[i, token]) for i, token in enumerate(ids[1:])], abs=1e-4)
        for top, row in zip(tops[1:], truth, strict=False):
            assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
        assert (offsets[0], offsets == sorted(offsets), len(offsets)) == (0, True, len(given))
        for token, start, end in zip(tokens[1 : len(ids)], offsets[1:], offsets[2:], strict=False):
            assert token.startswith("bytes:") or text[start:end] in (token, token.removeprefix(" "))
        assert not most or offsets[len(ids)] == len(text)
    assert streamed or (answer.json()["usage"]["prompt_tokens"], answer.json()["usage"]["completion_tokens"]) == (
        2 * len(ids),
        0,
    )


def test_a_long_prompt_is_echoed_and_scored_in_parts(server: Server) -> None:
    window = LM.config.max_position_embeddings
    for size, status in ((window, 200), (window + 1, 400)):
        assert server.ask(prompt=[5] * size, echo=True, max_tokens=0).status_code == status
    check_error(server.ask(prompt=[5] * window, max_tokens=1), 400, "prompt")
    ids = (prompt_ids(TOKENS, "".join(TEXTS)) * 40)[:300]  # a part has 256
    found = prompt_picks(LM, ids, 1)
    with torch.no_grad():
        truth = LM(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    assert [one.id for one in found] == ids
    own = [float(truth[i, token]) for i, token in enumerate(ids[1:])]
    assert [one.logprob for one in found[1:]] == pytest.approx(own, abs=1e-4)
    assert prompt_picks(LM, ids[:1], 1) == [Picked(ids[0], None, None)]


def test_a_text_comes_with_its_trace_if_requested(server: Server) -> None:
    for streamed, path, body in ((False, "completions", {"prompt": TEXTS[0]}), (True, "chat/completions", CHAT)):
        answer = server.ask(path, **body, max_tokens=9, return_trace=True, stream=streamed)
        *_, found = map(json.loads, data_of(answer.text)[:-1]) if streamed else [answer.json()]
        truth = ALONE.generate(body.get("prompt") or CHAT["messages"], max_new_tokens=9, do_sample=False)
        assert [token["id"] for token in found["trace"]["tokens"]] == found["trace"]["token_ids"] == truth.token_ids
        assert found["trace"]["drafts"] == list(server.service.xt.names)
        assert sum(one["committed"] for one in found["trace"]["rounds"]) == 9


def test_no_seed_is_meant_by_minus_one() -> None:
    """Found in reports of other servers' users: the text was the same each time."""
    for seed, seeds in ((-1, [None] * 2), (None, [None] * 2), (-2, [2**64 - 2, 2**64 - 1])):
        body = read(Completion, {"prompt": "a", "temperature": 1.5, "seed": seed, "n": 2})
        assert [one.arguments.get("seed") for one in submissions_of(body, ALONE, Limits())] == seeds


# formats


SCHEMA: dict[str, Any] = {"enum": [{"名": "吾輩", "数": [1, 2]}, {"名": "メロス", "数": []}, "猫"]}


def test_a_text_is_held_to_a_json_schema(server: Server) -> None:
    asked: Any = {"messages": [{"role": "user", "content": "誰"}], "max_tokens": 60, "frequency_penalty": 2.0}
    asked |= {"temperature": 1.0, "seed": 4, **held_to(SCHEMA)}
    (same,) = submissions_of(read(Chat, json.dumps(asked).encode()), ALONE, Limits())
    with server.client() as client:
        (choice,) = client.chat.completions.create(model=NAME, **asked).choices
    assert choice.message.content == ALONE.generate(same.prompt, **same.arguments).text
    assert choice.finish_reason == "stop"
    assert json.loads(choice.message.content or "") in SCHEMA["enum"]
    found = server.ask(prompt="a", max_tokens=4, response_format={"type": "json_object"}).json()["choices"][0]["text"]
    assert found.lstrip().startswith("{")


def test_a_tokenizer_whose_last_call_padded_is_read_as_any_other() -> None:
    from llguidance import LLMatcher

    padding = deepcopy(TOKENS)
    padding(["a", "b b b b"], padding="max_length", truncation=True, max_length=3)
    allowed = []
    for tokens in (TOKENS, padding):
        matcher = LLMatcher(llguidance_tokenizer(tokens, 2), LLMatcher.grammar_from_json_schema('{"enum": ["名前"]}'))
        scores = Grammar(matcher, 0)(torch.zeros((1, 0), dtype=torch.int64), torch.zeros((1, len(tokens))))
        allowed.append(scores.isfinite())
    assert allowed[0].any()
    assert torch.equal(*allowed)


@pytest.mark.deep
def test_a_schema_that_takes_too_long_to_compile_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by a hostile trial: this took llguidance minutes. What was refused for that isn't compiled here."""
    monkeypatch.setattr(grammars, "SECONDS", 1.0)
    answer = server.ask(prompt="a", **held_to({"type": "integer", "multipleOf": 100_000_007}))
    check_error(answer, 400, "response_format")
    assert "more than 1 seconds" in answer.json()["error"]["message"]


def test_a_schema_that_ends_llguidance_ends_no_server(server: Server) -> None:
    """A chain of references that llguidance follows until its stack overflows."""
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(40_000)}
    answer = server.ask(prompt="a", **held_to({"$defs": {**chain, "d40000": {"type": "integer"}}, "$ref": "#/$defs/d0"}))
    check_error(answer, 400, "response_format")
    assert "llguidance failed" in answer.json()["error"]["message"]


def test_texts_do_not_wait_for_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by a hostile trial: as many schemas as there were threads, and no text was written any more."""
    still, compiled = threading.Event(), list[str]()

    def slowly(grammar: str) -> None:
        compiled.append(grammar)
        still.wait(PATIENCE)

    monkeypatch.setattr(grammars, "check_compiles", slowly)
    asked = {"prompt": "a", "max_tokens": 1, **held_to({"enum": ["a"]})}
    with serving() as one, ThreadPoolExecutor(50) as pool:
        answers = [pool.submit(one.ask, **asked) for _ in range(50)]
        wait_for(lambda: len(compiled) == 2)
        assert one.ask(prompt="a", max_tokens=1).status_code == 200
        assert len(compiled) == 2
        still.set()
        assert {answer.result().status_code for answer in answers} == {200}


def counted(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[Any]:
    """What the functions of these names are called with from now on."""
    called = list[Any]()

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: called.append(given) or real(*given)

    for name in names:
        module, _, function = name.rpartition(".")
        monkeypatch.setattr(name, counting(getattr(sys.modules[module], function)))
    return called


def test_prompts_and_schemas_are_read_once_for_all_texts_of_a_request(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = counted(monkeypatch, "xtok.serving.http.grammars.check_compiles")
    called = counted(monkeypatch, "xtok.serving.http.requests.prompt_ids", "xtok.models.prompts.prompt_ids")
    asked = {"prompt": ["a", "b"], "n": 2, "temperature": 1.0, "max_tokens": 60, **held_to({"enum": ["吾輩", "猫", 5]})}
    choices = server.ask(**asked).json()["choices"]
    assert all(json.loads(one["text"]) in ["吾輩", "猫", 5] for one in choices)
    assert (len(choices), len(compiled), len(called)) == (4, 1, 2)
    server.ask("chat/completions", **CHAT, n=3, max_tokens=1)
    assert len(called) == 3


def test_what_is_wrong_with_a_pattern_is_reported(server: Server) -> None:
    message = server.ask(prompt="a", **held_to({"type": "string", "pattern": "(" + "a" * 5000})).json()["error"]["message"]
    assert re.fullmatch(".*regex parse error.*unclosed group", message)
    assert len(message) < 500


def test_a_schema_that_gets_too_hard_is_reported_as_the_cause(server: Server) -> None:
    """Found by a hostile trial: a pattern on which llguidance gives up after some ids was reported as a fault of the server."""
    pattern = r"^((.*\w.{29})|(.*\d.{31})|(.*\s.{33})|(.+.{35}x)){30}$"
    held = held_to({"type": "string", "pattern": pattern})
    answer = server.ask(prompt="a", max_tokens=100, temperature=1, seed=3, stream=True, **held)
    error = json.loads(data_of(answer.text)[-2])["error"]
    assert (error["param"], error["type"]) == (None, "invalid_request_error")
    assert "can't follow the grammar of this request's format or tools any further: " in error["message"]
    assert "<state>" not in error["message"]


# what is refused


ENDLESS: list[dict[str, Any]] = [
    {"$ref": "#"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"type": "object", "properties": {f"p{i}": {} for i in range(600)}},
]
"""Schemas that llguidance takes, and can't follow."""
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
PADDED = {"padding": "max_length", "max_length": 99}
"""Found by a hostile trial: a request for 10**9 ids of padding took all memory, before it was refused."""
PROMPT_FAULTS: dict[str | None, list[dict[str, Any]]] = {
    "best_of": [{"best_of": 2}],
    "prediction": [
        {"prediction": one}
        for one in ("a", {"type": "text", "content": "a"}, {"type": "content", "content": [{"type": "image_url"}]})
    ],
    "temperature": [{"temperature": value} for value in (1e-300, "1", -1, True)],
    "repetition_penalty": [{"repetition_penalty": value} for value in (0, 1e-300)],
    None: [
        *({name: value} for name in ("temperature", "safety_identifier") for value in (inf, nan)),
        {"metadata": {"a": [{"b": -inf}]}},
    ],
    "top_p": [{"top_p": 1.5}],
    "top_k": [{"top_k": 1.5}],
    "frequency_penalty": [{"frequency_penalty": 3}],
    "max_tokens": [{"max_tokens": 0}],
    "n": [{"n": 0}, {"n": 1000}, {"prompt": ["a"] * 65, "n": 2}],
    "return_trace": [{"n": 2, "return_trace": True}, {"prompt": ["a", "b"], "return_trace": True}],
    "seed": [{"seed": 2**64}],
    "stop": [{"stop": stop} for stop in ("", ["a"] * 17, ["a" * 8193] * 2)],
    "logprobs": [{"logprobs": 21}],
    "logit_bias": [
        *({"logit_bias": {name: 5}} for name in ("-1", "99999", "٣", "0" * 5000 + "1", "9" * 5000)),
        *({"logit_bias": {"1": value}} for value in (500, True)),
    ],
    "stream_options": [{"stream_options": {"include_usage": True}}],
    "stream_options.other": [{"stream": True, "stream_options": {"other": True}}],
    "response_format": [
        *({"response_format": {"type": kind}} for kind in ("xml", "json_schema")),
        *map(held_to, [*ENDLESS, {"type": 5}]),
    ],
    "prompt": [
        *({"prompt": prompt} for prompt in (None, [], [[]], [1, True], [-1], [10**30])),
        *({"prompt": [5, token], "echo": True, "max_tokens": 0} for token in (999_999, -3)),
        {"prompt": "a b " * 4900, "max_tokens": 64},
    ],
}
CHAT_FAULTS: dict[str, list[dict[str, Any]]] = {
    "messages.0.tool_calls": [{"messages": [{"role": "user", "tool_calls": 5}]}],
    "messages.1.tool_calls.0": [
        {"messages": [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]}
        for call in (5, {}, {"function": {"arguments": "{}"}}, {"function": {"name": "a", "arguments": 5}})
    ],
    "messages.0.content": [
        {"messages": [{"role": "user", "content": content}]} for content in (5, None, [{"type": "image_url", "image_url": {}}])
    ],
    "messages": [
        {"messages": []},
        {"messages": [{"content": "a"}]},
        *({"chat_template_kwargs": given} for given in ({"tokenize": False}, PADDED, {"tokenizer_kwargs": PADDED})),
    ],
    "chat_template_kwargs": [{"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}],
    "max_completion_tokens": [{"max_tokens": 3, "max_completion_tokens": 4}],
    "top_logprobs": [{"top_logprobs": 3}],
    "tool_choice": [
        {"tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "hear"}}},
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
    ],
    "tools": [
        *({"tools": [{"type": "function", "function": {"name": "a", **one}}]} for one in ({"name": "a b"}, {"parameters": []})),
        {"tools": [{"type": "web_search"}]},
        *({"tools": tools(a=schema), "tool_choice": "required"} for schema in ENDLESS),
    ],
    "functions": [{"functions": []}],
}
REFUSED = [
    *(("completions", {"prompt": "a", **body}, param) for param, bodies in PROMPT_FAULTS.items() for body in bodies),
    *(("chat/completions", {**CHAT, **body}, param) for param, bodies in CHAT_FAULTS.items() for body in bodies),
]


@pytest.fixture(scope="module")
def strict() -> Iterator[Server]:
    """One with limits that are soon reached."""
    with serving(ALONE, limits=Limits(tokens=64, body=20_000), key="日本", origins=["https://example.org"]) as one:
        yield one


AUTHORIZED = {"Authorization": "Bearer 日本".encode()}


@pytest.mark.parametrize("param", {param: None for *_, param in REFUSED}, ids=str)
def test_what_cannot_be_honoured_is_refused_by_the_fields_name(strict: Server, param: str | None) -> None:
    with httpx.Client(headers={**AUTHORIZED, **JSON}, timeout=PATIENCE) as client:
        for path, body, name in REFUSED:
            if name == param:
                check_error(client.post(f"{strict.url}/v1/{path}", content=json.dumps(body)), 400, param)
    assert strict.engine.stats.running + strict.engine.stats.waiting == 0


@pytest.mark.parametrize("field", ["prompt", "messages", "tools"])
def test_a_prompt_that_is_too_long_in_any_case_is_not_read(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    """Found by a hostile trial: others waited for seconds while a prompt of 4 MB was read, only to be refused."""
    longest = ALONE.target.vocabulary.longest
    for text in [*TEXTS, *CHAT_TOKENS.get_added_vocab()]:
        assert len(text.encode()) <= longest * len(CHAT_TOKENS(text, add_special_tokens=False).input_ids)
    long = "名前" * LM.config.max_position_embeddings * longest
    content: Any = {"prompt": long, "messages": [{"role": "user", "content": long}], "tools": [{**TOOLS[0], "a": [long]}]}
    given = {**(CHAT if field == "tools" else {}), field: content[field]}
    called = counted(monkeypatch, "xtok.serving.http.requests.prompt_ids")
    with pytest.raises(RequestError, match=r"context window is .* tokens, which have up to .* bytes") as refused:
        submissions_of(read(Completion if field == "prompt" else Chat, json.dumps(given).encode()), ALONE, Limits())
    assert refused.value.body["error"]["code"] == "context_length_exceeded"
    assert not called


MANY: list[tuple[str, Any]] = [
    ("prompt", [{}] * 1000),
    ("prompt", [[{}] * 1000] * 1000),
    ("messages", [5] * 1000),
    ("tools", [5] * 1000),
    ("stop", [""] * 1000),
    ("prediction", {"type": "content", "content": [5] * 1000}),
    ("logit_bias", {str(i): "a" for i in range(1000)}),
]


def test_of_many_faults_few_are_reported() -> None:
    """Found by a hostile trial: a body of 4 MB, of which each item is wrong, held up everybody for half a minute."""
    for field, value in MANY:
        with pytest.raises(ValueError, match=field) as found:
            (Chat if field in ("messages", "tools") else Completion).model_validate_json(json.dumps({field: value}))
        assert found.value.error_count() < 40


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
    **{  # found by a hostile trial: what was echoed was no JSON any more
        number[:9]: (f'{{"prompt": "a", "safety_identifier": {number}}}'.encode(), 400)
        for number in ("1e999", "-1E+999", "9" * 400 + ".0", f"1{'0' * 280}e99")
    },
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_none_is_answered_by_an_error(strict: Server, name: str) -> None:
    body, status = BODIES[name]
    try:
        check_error(httpx.post(f"{strict.url}/v1/completions", content=body, headers={**AUTHORIZED, **JSON}), status, None)
    except (httpx.WriteError, httpx.RemoteProtocolError, httpx.ReadError):
        assert name == "endless"  # nobody reads all of that
    assert httpx.get(f"{strict.url}/v1/models", headers=AUTHORIZED).status_code == 200


def raw(server: Server, data: bytes) -> socket.socket:
    one = socket.create_connection(server.address, timeout=PATIENCE)
    one.sendall(data)
    return one


def test_a_body_that_is_half_sent_and_given_up_harms_nobody(server: Server) -> None:
    """A page of any site may send a form to this machine, and no JSON: it is refused, too."""
    before = server.engine.stats.tokens
    with raw(server, posted({"prompt": "a"}, length=500)), raw(server, b"POST /v1/compl"), raw(server, b"\x00\xff\r\n\r\n"):
        pass
    answer = httpx.post(f"{server.url}/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
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
    check_error(httpx.get(f"{server.url}/v1/nothing"), 404, None)
    check_error(httpx.get(f"{server.url}/v1/completions"), 405, None)


def test_the_key_opens_and_pages_of_other_sites_may_ask_if_they_were_named(server: Server, strict: Server) -> None:
    asked = {"prompt": "a", "max_tokens": 1}
    for headers in ({}, {"Authorization": "日本".encode()}, {"Authorization": b"Bearer"}, {"Authorization": b"Bearer \xe6"}):
        check_error(httpx.post(f"{strict.url}/v1/completions", json=asked, headers=headers), 401, None)
    assert httpx.post(f"{strict.url}/v1/completions", json=asked, headers=AUTHORIZED).status_code == 200
    assert httpx.get(f"{strict.url}/health").json() == {"status": "ready"}
    assert httpx.get(f"{strict.url}/metrics").status_code == 200
    org, com, allows = "https://example.org", "https://example.com", "access-control-allow-origin"
    for one, origin, allowed in ((server, org, None), (strict, org, org), (strict, com, None)):
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        assert httpx.options(f"{one.url}/v1/completions", headers=headers).headers.get(allows) == allowed
    assert httpx.get(f"{strict.url}/v1/models", headers={"Origin": org}).headers[allows]


def test_a_limit_beyond_the_window_is_cut_to_what_fits_and_a_text_ends_when_its_time_is_over(strict: Server) -> None:
    """Found in reports of other servers' users: agents ask for more tokens than small models have room for."""
    with serving(ALONE, limits=Limits(seconds=1e-9)) as one:
        found = one.ask(prompt=TEXTS[0], max_tokens=9).json()
        assert (found["usage"]["completion_tokens"], found["choices"][0]["finish_reason"]) == (1, "length")
    for path, body in (("completions", {"prompt": "a"}), ("chat/completions", CHAT)):
        asked = {**body, "max_tokens": 10**6, "temperature": 0}
        found = httpx.post(f"{strict.url}/v1/{path}", json=asked, headers=AUTHORIZED).json()
        assert (found["usage"]["completion_tokens"], found["choices"][0]["finish_reason"]) == (64, "length")


# the server's state


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


def test_the_log_has_a_line_for_each_request(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=LOG.name):
        asked = {"prompt": TEXTS[0], "max_tokens": 5, "user": "someone", "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=asked, headers={"X-Request-Id": "mine-1"})
        names = [one.headers["x-request-id"] for one in (answer, server.ask(prompt=TEXTS[0], nonsense=1))]
        httpx.get(f"{server.url}/health")
        wait_for(lambda: {*names} <= {json.loads(line)["request"] for line in caplog.messages})
    lines = [json.loads(line) for line in caplog.messages]
    first, second = (line for line in lines if line["request"] in names)
    assert all(line["path"] != "/health" for line in lines)
    assert (names[0], answer.json()["id"]) == ("mine-1", "cmpl-mine-1")
    assert re.fullmatch(r"[0-9a-f]{32}", names[1])
    assert (first["request"], first["status"], first["user"], first["stream"]) == ("mine-1", 200, "someone", False)
    assert (first["completion_tokens"], first["finish_reasons"]) == (5, ["length"])
    assert (second["status"], second["error"]) == (400, "nonsense isn't supported. Leave it out.")
    assert all(datetime.fromisoformat(line["time"]).utcoffset() == timedelta(0) for line in lines)


@pytest.mark.parametrize("texts", [False, True])
def test_the_log_has_texts_only_if_requested(
    texts: bool, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Errors of templates quote them, too."""
    monkeypatch.setattr(server.service, "logs_texts", texts)
    with caplog.at_level(logging.INFO, logger=LOG.name):
        server.ask(prompt=TEXTS[0], max_tokens=5, n=2, stream=True)
        server.ask("chat/completions", **CHAT, max_tokens=5)
        monkeypatch.setattr(CHAT_TOKENS, "chat_template", "{{ raise_exception(messages[0]['content']) }}")
        check_error(server.ask("chat/completions", messages=[{"role": "user", "content": "秘密"}]), 400, "messages")
        wait_for(lambda: len(caplog.messages) == 3)
    first, second, third = map(json.loads, caplog.messages)
    assert first["completion_tokens"] == 10
    whole = ALONE.generate(TEXTS[0], max_new_tokens=5, do_sample=False).text
    assert (first.get("asked"), first.get("written")) == ((TEXTS[0], [whole, whole]) if texts else (None, None))
    assert second.get("asked") == (CHAT["messages"] if texts else None)
    assert ("秘密" in third["error"]) == texts
    assert texts or third["error"] == "messages: InvalidInputError"
    assert texts or not any(text in "".join(caplog.messages) for text in (TEXTS[0], whole))


def test_metrics_count_what_the_drafts_did() -> None:
    with serving(XTokAssisted((LM, CHAT_TOKENS), (UNRELATED, BYTES), budget=TREE)) as one:
        found = one.ask(prompt=TEXTS[0], max_tokens=9, n=2).json()
        one.ask(prompt=TEXTS[0], max_tokens=9, stream=True)
        wait_for(lambda: one.metrics()["xtok_e2e_request_latency_seconds_count"] == 2)
        reported = one.metrics()
    drafts, guessed, accepted = (
        sum(value for name, value in reported.items() if name.startswith(f"xtok_spec_decode_num_{what}_total{{draft="))
        for what in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert reported["xtok_prompt_tokens_total"] == 2 * found["usage"]["prompt_tokens"]
    assert reported["xtok_generation_tokens_total"] == 27
    assert reported['xtok_request_success_total{finished_reason="length"}'] == 3
    assert reported["xtok_time_to_first_token_seconds_count"] == 2
    assert drafts > 0
    assert guessed >= found["timings"]["draft_n"] > 0
    assert guessed >= accepted >= found["timings"]["draft_n_accepted"]
    assert {name for name in reported if 'draft="prompt lookup"' in name}


def test_a_client_learns_how_much_of_its_prompts_was_not_read_again() -> None:
    ids, other = (prompt_ids(TOKENS, prompt) for prompt in TEXTS[:2])
    begin = next(i for i, pair in enumerate(zip(ids, other, strict=False)) if len({*pair}) > 1)
    for keeps, hits in ((True, [0, len(ids) - 1, begin + len(ids) - 1]), (False, [0, 0, 0])):
        with serving(ALONE, prefix_cache=keeps) as one:
            found = [one.ask(prompt=prompt, max_tokens=5).json() for prompt in (TEXTS[0], TEXTS[0], [TEXTS[1], TEXTS[0]])]
            reported = one.metrics()
        assert [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in found] == hits
        assert reported["xtok_prefix_cache_queries_total"] == 3 * len(ids) + len(other)
        assert reported["xtok_prefix_cache_hits_total"] == sum(hits)


# clients that hang up


LONG = 3000
"""Tokens that no test waits for."""


@BOTH
def test_a_client_that_hangs_up_frees_its_rows_and_is_logged(streamed: bool, caplog: pytest.LogCaptureFixture) -> None:
    asked = posted({"prompt": TEXTS[0], "n": 2, "max_tokens": LONG, "stream": streamed, **UNENDING})
    with serving(ALONE) as one, caplog.at_level(logging.INFO, logger=LOG.name):
        with raw(one, asked) as client:
            wait_for(lambda: one.engine.stats.tokens > 4)
            if streamed:
                client.recv(10)
        one.until_idle()
        assert one.engine.stats.tokens < LONG
        wait_for(lambda: one.metrics().get('xtok_request_success_total{finished_reason="abort"}') == 2)
        wait_for(lambda: len(caplog.messages) == 1)
        assert one.ask(prompt="a", max_tokens=2).status_code == 200
    line = json.loads(caplog.messages[0])
    assert (4 < line["completion_tokens"] < LONG, line["finish_reasons"]) == (True, ["abort"] * 2)


def test_a_client_that_reads_slowly_holds_nobody_up_and_gets_all() -> None:
    with serving(ALONE) as one:
        body = {"prompt": TEXTS[0], "max_tokens": 200, "stream": True, "logprobs": 20, **UNENDING}
        with slow_socket(PATIENCE) as slow:
            slow.connect(one.address)
            slow.sendall(posted(body))
            wait_for(lambda: one.engine.stats.tokens >= 200)
            assert one.ask(prompt="a", max_tokens=5).status_code == 200
            data = b""
            while b"data: [DONE]\n\n" not in data[-100:]:
                data += slow.recv(3000)
        chunks = [json.loads(line) for line in data_of(dechunked(data))[:-1]]
        whole = one.ask(**{**body, "stream": False}).json()
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]


# the page, the command, the documents


def test_the_page_is_there_while_models_are_loaded_and_needs_no_key(server: Server) -> None:
    known = {"model": NAME, "drafts": list(server.service.xt.names), "tokens": 4096, "chats": True, "prompts": []}
    assert httpx.get(f"{server.url}/v1/page").json() == known
    with Server(Service(NAME), key="secret") as one:
        for path in ("page/main.js", "page/style.css", "page/tints", "view/view.js"):
            assert httpx.get(f"{one.url}/{path}").status_code == 200
        for way_out in ("%2e%2e/app.py", "..%2fapp.py", "%2e%2e%2fapp.py", "//etc/passwd"):
            assert httpx.get(f"{one.url}/page/{way_out}").status_code == 404
        assert httpx.get(f"{one.url}/v1/page").status_code == 401
        answer = httpx.get(one.url)
    for rule in ("default-src 'self'", "frame-ancestors 'none'"):
        assert rule in answer.headers["content-security-policy"]
    assert not re.findall(r"https?://", answer.text)


def test_a_port_or_a_model_that_is_not_to_be_had_ends_the_server_by_one_line(tmp_path: Path) -> None:
    handlers = signal.getsignal(signal.SIGTERM), list(LOG.handlers)
    with listening_socket("127.0.0.1", 0) as first:
        port = str(first.getsockname()[1])
        taken = rf"xtok: 127\.0\.0\.1 port {port} can't be opened for listening: .*in use.*\. Give another --port.*\n"
        assert re.fullmatch(taken, run("serve", "--port", port, code=1)[1])
    assert "xtok: nowhere.invalid port" in run("serve", "--host", "nowhere.invalid", code=1)[1]
    printed = run("serve", "--port", "0", "--target", str(tmp_path), code=1)[1]
    assert printed.splitlines()[-1].startswith(f"xtok: The target {tmp_path}")
    assert handlers == (signal.getsignal(signal.SIGTERM), list(LOG.handlers))


def test_a_server_that_ends_finishes_what_it_writes() -> None:
    with serving(ALONE) as one, one.client() as client:
        asked: dict[str, Any] = {"model": NAME, "prompt": TEXTS[0], "max_tokens": 60, **UNENDING}
        truth = client.completions.create(**asked).choices[0].text
        stream = client.completions.create(**asked, stream=True)
        text = next(iter(stream)).choices[0].text
        one.end()
        assert text + "".join(chunk.choices[0].text for chunk in stream) == truth
        wait_for(lambda: not one.running)
        with pytest.raises(openai.APIConnectionError):
            client.models.list()


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


@pytest.mark.deep
def test_sigterm_lets_what_runs_end() -> None:
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
        body = {"prompt": prompts()[0], "max_tokens": 400, "stream": True, "n": 16, **UNENDING}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as answer:
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
