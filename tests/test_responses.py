"""OpenAI's Responses API, asked by OpenAI's own client: the texts and calls are those of the same chat."""

import json
import logging
from copy import deepcopy
from typing import Any

import openai
import pytest
from servers import CALL, CHATS, TOOLS, calling_client, calling_server, schemas_are_trusted, serving, wait_for, writing
from servers import CALLING_LM as LM
from servers import CALLING_TOKENS as TOKENS

from xtok import XTokAssisted
from xtok.serving.http.middleware import LOG
from xtok.serving.http.protocol import fields_of
from xtok.serving.http.responses import Responses, chat_of

server, client, writes, trusted = calling_server, calling_client, writing, schemas_are_trusted
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
ASKED: Any = {"model": "tiny", "input": "天気は", "temperature": 0, "max_output_tokens": 200}
WRITTEN = f"<think>\n見よう。</think>\n\n待て。<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"


def answered(client: openai.OpenAI, **more: Any) -> Any:
    """The response. A stream of the same has to end with it."""
    whole = client.responses.create(**{**ASKED, **more})
    events: list[Any] = list(client.responses.create(**{**ASKED, **more}, stream=True))
    streamed = events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{streamed.status}"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == streamed.output_text
    assert [event.item for event in events if event.type == "response.output_item.done"] == streamed.output
    assert timeless(streamed) == timeless(whole)
    return whole


def timeless(response: Any) -> Any:
    """A response without what differs each time."""
    found = response.to_dict()
    items = [{name: one for name, one in item.items() if name not in ("id", "call_id")} for item in found.pop("output")]
    return items, {name: one for name, one in found.items() if name not in ("id", "created_at", "usage", "timings")}


def test_a_text_is_that_of_the_same_chat(client: openai.OpenAI) -> None:
    chat = [{"role": "system", "content": "猫として"}, {"role": "user", "content": "天気は"}]
    truth = client.chat.completions.create(model="tiny", messages=chat, temperature=1, seed=3, max_tokens=9)  # type: ignore[arg-type]
    settings = {"temperature": 1, "max_output_tokens": 9, "extra_body": {"seed": 3}, "metadata": {"a": "b"}}
    response = answered(client, instructions="猫として", **settings)
    assert response.output_text == truth.choices[0].message.content
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"
    assert truth.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (truth.usage.prompt_tokens, 9)
    assert (response.model, response.instructions, response.metadata, response.store) == ("tiny", "猫として", {"a": "b"}, False)


def test_reasoning_text_and_calls_are_items_and_input_of_the_next_request(client: openai.OpenAI, writes: Any) -> None:
    writes(WRITTEN)
    first = answered(client, tools=FLAT)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    assert first.output[0].content[0].text == "見よう。"
    assert (first.output_text, first.status) == ("待て。", "completed")
    assert [(item.name, json.loads(item.arguments)) for item in first.output[2:]] == [("weather", {"city": "京都"})] * 2
    assert len({item.id for item in first.output} | {item.call_id for item in first.output[2:]}) == 6
    thought = len(TOKENS("\n見よう。", add_special_tokens=False).input_ids)
    assert 0 <= thought - first.usage.output_tokens_details.reasoning_tokens <= 2  # without blanks
    results = [{"type": "function_call_output", "call_id": item.call_id, "output": "晴れ"} for item in first.output[2:]]
    given = [{"role": "user", "content": "天気は"}, *(item.to_dict() for item in first.output), *results]
    writes("晴れだ")
    with client.responses.stream(**{**ASKED, "input": given}, tools=FLAT) as stream:  # which the client puts together
        assert stream.get_final_response().output_text == "晴れだ"
    chat = chat_of(fields_of(Responses, json.dumps({"input": given, "instructions": "猫"}).encode()))
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "tool", "tool"]
    assert (chat.messages[2]["content"], chat.messages[2]["reasoning_content"]) == ("待て。", "見よう。")
    assert [call["id"] for call in chat.messages[2]["tool_calls"]] == [item.call_id for item in first.output[2:]]


def test_texts_are_held_to_formats_and_calls_are_forced(writes: Any, client: openai.OpenAI) -> None:
    """Found in reports of other servers' users: the JSON was in the reasoning, and the text empty."""
    held: Any = {"format": {"type": "json_schema", "name": "n", "schema": {"enum": ["猫", "犬"]}}}
    short = [{"type": "function", "name": "f", "parameters": {"enum": [{"n": 1}]}}]
    tokens = deepcopy(TOKENS)
    tokens.chat_template = CHATS.replace("<think>", "")
    with serving(XTokAssisted((LM, tokens))) as one, one.client() as own:
        assert json.loads(answered(own, text=held).output_text) in ("猫", "犬")
        for choice in ("required", {"type": "function", "name": "f"}):
            (call,) = answered(own, tools=short, tool_choice=choice, parallel_tool_calls=False).output
            assert (call.name, json.loads(call.arguments)) == ("f", {"n": 1})
    writes('見よう。</think>\n\n"猫"')
    response = answered(client, text=held, extra_body={"chat_template_kwargs": {"ending": "<think>\n"}})
    assert (response.output_text, response.output[0].content[0].text) == ('"猫"', "見よう。")


def test_a_text_that_fails_is_reported(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, text: str) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr("xtok.serving.http.reading.Reader.read", fails)
    *_, last = client.responses.create(**ASKED, stream=True)
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    assert "RuntimeError" in last.response.error.message
    assert "secret" not in last.response.error.message
    with pytest.raises(openai.InternalServerError, match="RuntimeError"):
        client.responses.create(**ASKED)


def test_what_agents_send_is_taken_and_what_has_no_effect_is_logged(
    client: openai.OpenAI, writes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Found in reports of other servers' users: agents of OpenAI and others were refused at the first of these."""
    caplog.set_level(logging.INFO, logger=LOG.name)
    writes("はい")
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "犬"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "天気は"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAA"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "天気は"}]},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "猿"}]},
    ]
    more: dict[str, Any] = {
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "high", "summary": "auto"},
        "text": {"verbosity": "low"},
        "store": True,
        "service_tier": "flex",
        "prompt_cache_key": "a",
        "extra_body": {"client_metadata": {"a": "b"}},
    }
    response = answered(client, instructions="猫", input=items, tools=FLAT, **more)
    assert (response.output_text, response.store, response.reasoning.effort) == ("はい", False, "high")
    plain = client.responses.create(**ASKED)
    assert plain.text.format.type == response.text.format.type == "text"
    wait_for(lambda: len(caplog.records) == 3)
    names = {"include", "reasoning.summary", "reasoning_effort", "service_tier", "store", "text.verbosity"}
    assert [set(json.loads(record.message).get("ignored", [])) for record in caplog.records] == [names] * 2 + [set()]
