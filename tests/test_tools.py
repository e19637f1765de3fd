"""Calls of tools and reasoning, in chats and responses: what the target writes comes back as what it means."""

import json
import re
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import openai
import pytest
import torch
from batches import WIDE
from hypothesis import example, given
from hypothesis import strategies as st
from servers import (
    CALL,
    CHATS,
    QUESTION,
    ROOT,
    TOOLS,
    calling_client,
    calling_server,
    held_to,
    schemas_are_trusted,
    serving,
    tools,
    writing,
)
from servers import CALLING_LM as LM
from servers import CALLING_TOKENS as TOKENS
from tokenizers import AddedToken
from worlds import examples, fitting, tokenizer

from xtok import PromptLookup, XTokAssisted
from xtok.errors import InvalidInputError, UnsupportedArgumentError
from xtok.serving.http.formats import CALL_FORMATS, Format, Parsers, format_for, format_of
from xtok.serving.http.grammars import matcher_for
from xtok.serving.http.protocol import Chat, Limits, RequestError, fields_of, read
from xtok.serving.http.reading import Reader, Written
from xtok.serving.http.requests import submissions_of
from xtok.serving.http.responses import Responses, chat_of

server, client, writes, trusted = calling_server, calling_client, writing, schemas_are_trusted
THINK = ("<think>", "</think>")
NO_JSON = '{"name": "a", "arguments": {"b": NaN}}'
OWN = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|says|>",
    "fields": {
        "thinking": {"open": "<|thinks|>", "close": "<|/thinks|>"},
        "tool_calls": {
            "open_pattern": r"<\|calls\|>(?P<name>\w+)",
            "close": "<|/calls|>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<|end|>"},
    },
}
"""A response template as a tokenizer may have it."""

READ: list[tuple[str, str, str, tuple[str, str, list[tuple[str, Any]]]]] = [
    ("hermes", "", "今日は。 a < b\n", ("今日は。 a < b\n", "", [])),
    (
        "hermes",
        "",
        f"<think>\nどこ？ <tool_call>\n</think>\n\n京都だ。<tool_call>{CALL}</tool_call>",
        ("京都だ。", "どこ？ <tool_call>", [("weather", {"city": "京都"})]),
    ),
    ("hermes", "<think>\n", "うむ\n</think>\n\nはい", ("はい", "うむ", [])),
    ("hermes", "", "<tool_call>\nno\n</tool_call> と", ("<tool_call>\nno\n</tool_call> と", "", [])),
    ("hermes", "", '<tool_call>{"name": "a", "arguments": {"b"', ('<tool_call>{"name": "a", "arguments": {"b"', "", [])),
    ("hermes", "", '<tool_call>{"name": "a", "arguments": "{}"}', ("", "", [("a", {})])),
    ("hermes", "", f"<tool_call>{NO_JSON}</tool_call>", (f"<tool_call>{NO_JSON}</tool_call>", "", [])),
    ("llama3_json", "", '{"name": "weather", "parameters": {"city": "a"}}', ("", "", [("weather", {"city": "a"})])),
    ("llama3_json", "", '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b"}', ("", "", [("a", {}), ("b", {})])),
    ("llama3_json", "", '{"answer": 5} です', ('{"answer": 5} です', "", [])),
    ("llama3_json", "", 'はい {"name": "a"}', ('はい {"name": "a"}', "", [])),
    ("mistral", "", f"[TOOL_CALLS] [{CALL}, {CALL}]", ("", "", [("weather", {"city": "京都"})] * 2)),
    ("mistral", "", '待て[TOOL_CALLS]a[ARGS]{"b": 1}[TOOL_CALLS]c{}', ("待て", "", [("a", {"b": 1}), ("c", {})])),
    ("own", "a<|says|>", '<|thinks|>う<|/thinks|>は<|calls|>a{"b": 1}<|/calls|><|end|>', ("は", "う", [("a", {"b": 1})])),
    ("own", "a<|says|><|thinks|>", "う<|/thinks|>は", ("は", "う", [])),
    ("own", "<|says|>", "は<|calls|>a{b<|/calls|>い<|end|>", ("は<|calls|>a{b<|/calls|>い<|end|>", "", [])),
]


def reader_for(name: str, prompt: str, **more: Any) -> Reader:
    known = Format(own=OWN) if name == "own" else Format(CALL_FORMATS[name], THINK)
    return Reader(known.template(True), known.prefix(prompt), TOOLS, **more)


def written(reader: Reader, pieces: Sequence[str]) -> Written:
    found = Written()
    for part in [part for piece in pieces for part in reader.read(piece)] + reader.end():
        found.add(part)
    return found


def said(found: Written) -> tuple[str, str, list[tuple[str, Any]]]:
    return found.text("content"), found.text("reasoning"), [(call.name, json.loads(call.text)) for call in found.calls]


@pytest.mark.parametrize(("name", "prompt", "text", "expected"), READ, ids=lambda one: one[:24] if isinstance(one, str) else "")
def test_a_text_is_read_as_what_it_means_whatever_its_pieces(name: str, prompt: str, text: str, expected: Any) -> None:
    for size in (1, 3, len(text)):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert said(written(reader_for(name, prompt), pieces)) == expected


MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|python_tag|>", CALL, *"{}\n <猫"]


@examples(200)
@given(st.sampled_from([*CALL_FORMATS, "own"]), st.lists(st.sampled_from([*MARKS, *OWN["fields"]]), max_size=8), st.data())
def test_whole_and_streamed_texts_say_the_same(name: str, marks: list[str], data: st.DataObject) -> None:
    text = "".join(marks)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert said(written(reader_for(name, ""), pieces)) == said(written(reader_for(name, ""), [text]))


@examples(80)
@given(st.text(max_size=30))
def test_a_text_without_marks_is_content_to_the_character(text: str) -> None:
    assert said(written(reader_for("hermes", ""), [text])) == said(written(Reader(), [text])) == (text, "", [])


TEMPLATES = {
    "{{ '<tool_call>' }}<function=": "none",
    '<tool_call>\n{"name"': "hermes",
    "[TOOL_CALLS][": "mistral",
    "tool_calls '\"parameters\": '": "llama3_json",
    "{{ message.content }}": "none",
}


@pytest.mark.parametrize(("template", "name"), TEMPLATES.items())
def test_formats_are_known_by_the_chat_template(template: str, name: str) -> None:
    tokens = templated(template + "<think>")
    assert format_of(tokens, Parsers()).calls == CALL_FORMATS.get(name)
    assert format_of(tokens, Parsers()).reasoning == THINK
    assert format_of(tokens, Parsers("none", "none")) == Format()
    tokens.response_template = OWN
    assert format_of(tokens, Parsers()).own == OWN
    assert format_of(tokens, Parsers()).reasoning == ("<|thinks|>", "<|/thinks|>")
    assert format_of(tokens, Parsers("mistral")) == Format(CALL_FORMATS["mistral"], THINK)


def asked(client: openai.OpenAI, **more: Any) -> tuple[Any, str]:
    """The message of an answer and how it ended, of which a stream, put together by OpenAI's client, has to say the same."""
    whole = client.chat.completions.create(**{**QUESTION, **more}).choices[0]
    with client.chat.completions.stream(**{**QUESTION, **more}) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert meant(whole.message) == meant(streamed.message)
    assert whole.finish_reason == streamed.finish_reason
    return whole.message, whole.finish_reason


def meant(message: Any) -> tuple[str | None, str | None, list[tuple[str, str, str]]]:
    """The content, reasoning and calls of a message."""
    calls = [(call.type, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return message.content or None, getattr(message, "reasoning_content", None), calls


SCHEMA = {"type": "object", "properties": {"n": {"enum": [7, 8]}}, "required": ["n"], "additionalProperties": False}
HELD = held_to(SCHEMA)
OPENED: Any = {"extra_body": {"chat_template_kwargs": {"ending": "<think>\n"}}}
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "a"}}\n</tool_call>'
AUTO: Any = {**HELD, "tools": TOOLS[:1]}
CALLS = f"待て。<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"
STOPS = ["Q:", "\n\n"]
QUOTED = CALL.replace("京都", "a\\n\\nQ:")
ANSWERED: dict[str, list[tuple[str, dict[str, Any], tuple[str | None, str | None, list[str], str]]]] = {
    "calls and reasoning": [
        (f"<think>\n見よう。</think>\n\n{CALLS}", {"tools": TOOLS}, ("待て。", "見よう。", ["京都"] * 2, "tool_calls")),
        (CALLS, {"tools": TOOLS, "parallel_tool_calls": False}, ("待て。", None, ["京都"], "tool_calls")),
        (CALLS, {}, (CALLS, None, [], "stop")),
        (CALLS, {"tools": TOOLS, "tool_choice": "none"}, (CALLS, None, [], "stop")),
        (WEATHER, {"tools": TOOLS}, (None, None, ["a"], "tool_calls")),
        ("晴れ", {"tools": TOOLS}, ("晴れ", None, [], "stop")),
    ],
    "a format holds after the reasoning": [  # found in reports of other servers' users: the JSON was in it, no content
        *(
            (f'{begun}見る {{ "n": 5 }}</think>\n\n{{"n": 7}}', {**held, **opened}, ('{"n": 7}', '見る { "n": 5 }', [], "stop"))
            for held in (HELD, {"response_format": {"type": "json_object"}})
            for begun, opened in (("<think>\n", {}), ("", OPENED))
        ),
        ('{"n": 7}', HELD, ('{"n": 7}', None, [], "stop")),
    ],
    "calls may take the place of a format": [  # found in reports of other servers' users: the grammar made them impossible
        (WEATHER, AUTO, (None, None, ["a"], "tool_calls")),
        ('{"n": 8}', AUTO, ('{"n": 8}', None, [], "stop")),
    ],
    "stops are looked for in content alone": [  # found in reports of other servers' users: with stops, answers were empty
        (
            f"<think>\nQ: a\n\nb</think>\n\n待て。 Q<tool_call>{QUOTED}</tool_call>",
            {"tools": TOOLS, "stop": STOPS},
            ("待て。 Q", "Q: a\n\nb", ["a\n\nQ:"], "tool_calls"),
        ),
        *(
            (f"<think>\nQ: a\n\n</think>\n\n{text}", {"stop": STOPS}, (content, "Q: a", [], "stop"))
            for text, content in (("はい\n\nQ", "はい"), ("は Q: い", "は "), ("は Q", "は Q"))
        ),
    ],
}
"""What the target writes, what else is asked for, and the content, reasoning, cities and finish reason of the answer."""


@pytest.mark.parametrize("name", ANSWERED)
def test_calls_and_reasoning_reach_the_client(client: openai.OpenAI, writes: Any, name: str) -> None:
    for text, more, (content, reasoning, cities, ended) in ANSWERED[name]:
        writes(text)
        message, reason = asked(client, **more)
        calls = [("function", "weather", city) for city in cities]
        assert all(re.fullmatch("[a-z0-9]{9}", call.id) for call in message.tool_calls or ())  # as templates of Mistral take
        found = [(kind, name, json.loads(given)["city"]) for kind, name, given in meant(message)[2]]
        assert (message.content, meant(message)[1], found, reason) == (content, reasoning, calls, ended)


def test_a_call_that_is_cut_off_is_text_and_one_without_arguments_has_an_empty_object(
    client: openai.OpenAI, writes: Any
) -> None:
    writes(f"<tool_call>\n{CALL}\n</tool_call>")
    (choice,) = client.chat.completions.create(**{**QUESTION, "max_tokens": 12}, tools=TOOLS).choices
    assert choice.message.content.startswith("<tool_call>")
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "length")
    writes('<tool_call>{"name": "weather", "arguments": " "}</tool_call>')
    assert asked(client, tools=TOOLS)[0].tool_calls[0].function.arguments == "{}"


@pytest.mark.parametrize("name", ["mistral", "own"])
def test_control_tokens_mark_calls(writes: Any, name: str) -> None:
    known = "[TOOL_CALLS]<|says|>" if name == "own" else "{# [TOOL_CALLS] #}{{ '' if true else '[TOOL_CALLS]' }}"
    tokens = templated((TOKENS.chat_template + known).replace("<tool_call>", "<call>"))
    tokens.response_template = OWN if name == "own" else None
    writes(f"は[TOOL_CALLS][{CALL}]" if name == "mistral" else 'は<|calls|>weather{"city": "京都"}<|/calls|><|end|>')
    with serving(XTokAssisted((LM, tokens))) as one, one.client() as own:
        message, reason = asked(own, tools=TOOLS, logprobs=True, stop=["猫"])
    assert (message.content, reason, len(message.tool_calls)) == ("は", "tool_calls", 1)
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "京都"}


def test_log_probabilities_of_a_chat_with_calls_are_those_of_all_ids(client: openai.OpenAI, writes: Any) -> None:
    writes(text := f"待て<tool_call>{CALL}</tool_call>")
    more: Any = {"tools": TOOLS, "logprobs": True, "top_logprobs": 2, "n": 2}
    whole = client.chat.completions.create(**QUESTION, **more)
    chunks = list(client.chat.completions.create(**QUESTION, **more, stream=True))
    for choice in whole.choices:
        found = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        streamed = [one.token for part in found if part.logprobs for one in part.logprobs.content]
        assert [one.token for one in choice.logprobs.content] == streamed
        assert b"".join(bytes(one.bytes or []) for one in choice.logprobs.content).decode() == text
        assert len(streamed) == len(TOKENS(text, add_special_tokens=False).input_ids) + 1  # the end of text
        assert all(one.top_logprobs[0].logprob >= one.logprob for one in choice.logprobs.content)
        assert [call.index for part in found for call in part.delta.tool_calls or ()] == [0]


def test_what_the_documents_show_runs(client: openai.OpenAI, writes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    document = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```py\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)
    person, code = '{"name": "Ada", "age": 36}', "def area(radius):\n    return 3.14 * radius ** 2\n"
    texts = ("猫", f"待て<tool_call>{CALL}</tool_call>", "犬", person, code)
    known: dict[str, Any] = {"client": client, "name": "tiny"}
    for part, text in zip([one for one in shown if "client." in one and "OpenAI(" not in one], texts, strict=True):
        writes(text)
        exec(compile(part, "serving.md", "exec"), known)
    *written, accepted = capsys.readouterr().out.splitlines()
    assert written == ["猫", "待て", "犬", f"犬{person}"]
    assert int(accepted) > 0


FORCED: dict[str, tuple[str, str]] = {
    "hermes": ("<tool_call>", "<think>"),
    "mistral": ("[TOOL_CALLS]", "[THINK]"),
    "none": ("<tool_call><function=", "-"),
}


@pytest.mark.parametrize("name", FORCED)
def test_a_target_that_must_call_does(name: str) -> None:
    short = {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}, "required": ["n"], "$defs": {"N": {"enum": [7, 8]}}}
    offered = tools(a={**short, "additionalProperties": False}, 二={**short, "additionalProperties": False})
    tokens = templated(f"{{{{ messages[0].content }}}}{{{{ tools | length if tools else '' }}}}{{# {''.join(FORCED[name])} #}}")
    sampled = {"temperature": 1.0, "seed": 8, "max_tokens": 600, "tools": offered, "frequency_penalty": 2.0}
    with serving(XTokAssisted((LM, tokens), PromptLookup())) as one, one.client() as client:
        required, reason = asked(client, tool_choice="required", parallel_tool_calls=False, **sampled)
        named, _ = asked(client, tool_choice={"type": "function", "function": {"name": "二"}}, **sampled)
    assert (reason, len(required.tool_calls), len(named.tool_calls)) == ("tool_calls", 1, 1)
    assert required.tool_calls[0].function.name in ("a", "二")
    assert named.tool_calls[0].function.name == "二"
    assert json.loads(named.tool_calls[0].function.arguments)["n"] in (7, 8)
    assert not required.content


def test_tools_that_the_template_ignores_are_refused() -> None:
    """Found by a trial as a new user: the answer was the same as without tools, and nothing said so."""
    offered, ignores = tools(a={"type": "object"}), "{{ messages[0].content }}"
    with pytest.raises(UnsupportedArgumentError, match="chat template ignores tools"):
        XTokAssisted((LM, templated(ignores))).generate([{"role": "user", "content": "猫"}], tools=offered, max_new_tokens=4)
    with pytest.raises(RequestError, match="chat template ignores tools"):
        rendered(ignores, ("user", "猫"), tools=offered)
    with pytest.raises(RequestError, match="A message needs content, or tool_calls"):  # which got an answer, too
        rendered(CHATS, {"role": "user"})


def allows(text: str, template: str, **more: Any) -> bool:
    """Whether the grammar of a chat allows a whole text. `template`: what the target's chat template holds besides."""
    tokens = templated(f"{{{{ messages[0].content }}}}{{# {template} #}}")
    body = read(Chat, {"messages": [{"role": "user", "content": "a"}], **more})
    ids = tokens("a<think>\n\n</think>\n" if "closed" in template else "a<think>" if "opened" in template else "a").input_ids
    matcher = matcher_for(body, format_for(body, format_of(tokens, Parsers())), XTokAssisted((LM, tokens)), ids)
    return all(map(matcher.try_consume_tokens, [[token] for token in tokens(text).input_ids])) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("template", "more", "allowed", "forbidden"),
    [
        ("", HELD, ['{"n": 7}'], ["7", "a", '<think>a</think>{"n": 7}']),
        (
            "<think>",
            HELD,
            ['{"n": 7}', '<think>a</think>\n{"n": 7}'],
            ["<think>a</think>", "<think>a</think>b", 'a</think>{"n": 7}'],
        ),
        ("<think> opened", HELD, ['a</think>{"n": 7}', '{"n": 5}</think>{"n": 7}'], ["a</think>7"]),
        ("<think> closed", HELD, ['{"n": 7}'], ['<think>a</think>{"n": 7}', 'a</think>{"n": 7}']),
        ("<tool_call>", AUTO, [WEATHER, f"{WEATHER}\n{WEATHER}", '{"n": 8}'], ["a", f'{WEATHER}{{"n": 8}}']),
        ("<tool_call><think>", AUTO, [f"<think>a</think>{WEATHER}", '<think>a</think>{"n": 8}'], ["<think>a</think>"]),
        ("<tool_call>", {**AUTO, "parallel_tool_calls": False}, [WEATHER], [f"{WEATHER}\n{WEATHER}"]),
        ("<tool_call>", {**AUTO, "tool_choice": "none"}, ['{"n": 8}'], [WEATHER]),
    ],
)
def test_grammars_allow_reasoning_then_calls_or_the_schema(template: str, more: Any, allowed: Any, forbidden: Any) -> None:
    assert [text for text in allowed if not allows(text, template, **more)] == []
    assert [text for text in forbidden if allows(text, template, **more)] == []


def test_tools_and_a_format_that_cannot_be_told_apart_are_refused() -> None:
    for template in ('tool_calls "parameters": ', "<tool_call><function=", "-"):
        with pytest.raises(RequestError, match="response_format can't be combined with tools") as refused:
            allows("", template, **AUTO)
        assert refused.value.body["error"]["param"] == "response_format"
        assert allows('{"n": 7}', template, **AUTO, tool_choice="none")


@examples(400)
@example(["aの\n"], ["aの\n", "の"], "")
@given(
    pieces=st.lists(st.text(alphabet="aの\n<", max_size=4), max_size=8),
    stops=st.lists(st.text(alphabet="aの\n<", min_size=1, max_size=3), min_size=1, max_size=3),
    thought=st.text(alphabet="aの\n", max_size=5),
)
def test_content_ends_before_its_first_stop_whatever_was_thought(pieces: list[str], stops: list[str], thought: str) -> None:
    """Of stops that overlap, the one that is complete first decides, and of those the longest."""
    known, text = Format(CALL_FORMATS["hermes"], THINK), "b" + "".join(pieces)
    reader = Reader(known.template(True), "", TOOLS, stops=stops)
    found = said(written(reader, [f"<think>{thought}", "</think>", "b", *pieces]))
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    assert found[0] == text[: sum(min(ends)) if ends else len(text)]
    assert found[1].strip() == thought.strip()
    assert reader.stopped == bool(ends)


@pytest.mark.parametrize("given", ["", " \n", "{}", '{"city": 5}', "a city", "[1]", '{"city": ', "[" * 9000 + "]" * 9000])
def test_calls_that_are_sent_back_are_taken_whatever_their_arguments(given: str) -> None:
    """Found in reports of other servers' users: one such call, and each later turn of the chat was refused."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": given}}
    for message in ({"role": "assistant", "tool_calls": [call]}, {"role": "assistant", "content": "a", "tool_calls": []}):
        assert rendered(CHATS, ("user", "天気は"), message, ("user", "b"), tools=TOOLS)
    item = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": given}
    body = json.dumps({"input": [{"role": "user", "content": "天気は"}, item]})
    assert submissions_of(chat_of(fields_of(Responses, body.encode())), XTokAssisted((LM, TOKENS)), Limits())


TURN = "{{ m.role }}:{{ m.content }}{{ '\\n' }}"
KEYS = "{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}{{ k }}{% endfor %}{% endfor %}"
REFUSES = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System first') }}{% endif %}"
ITEMS, FIRST, KNOWN, ONE_SYSTEM, LAST = (
    f"{{% for m in messages %}}{turn}{{% endfor %}}"
    for turn in (
        TURN + KEYS,
        REFUSES + TURN,
        "{% if m.role in ['system', 'user', 'assistant'] %}" + TURN + "{% endif %}",
        "{% if m.role != 'system' or loop.first %}" + TURN + "{% endif %}",
        "{% if m.role != 'system' %}{{ messages[0].content if loop.last and m.role == 'user' }}{{ m.content }}{% endif %}",
    )
)
"""Chat templates: one that needs objects as arguments; one that refuses later system messages; one that ignores all roles but
the usual ones; one that ignores later system messages; and one that renders the system message only if the user's is the last.
"""


def templated(template: str) -> Any:
    tokens = deepcopy(TOKENS)
    tokens.chat_template = template
    return tokens


def rendered(template: str, *messages: tuple[str, str] | dict[str, Any], **more: Any) -> str:
    """What the target reads of a chat's messages, which are roles with contents, or whole."""
    given = [one if isinstance(one, dict) else {"role": one[0], "content": one[1]} for one in messages]
    tokens = templated(template)
    (one,) = submissions_of(read(Chat, {"messages": given, **more}), XTokAssisted((LM, tokens)), Limits())
    return str(tokens.decode(one.prompt.ids))


SYSTEMS = ("system", "猫"), ("user", "a"), ("developer", "犬"), ("user", "b")
MERGED = "system:猫\n\n犬\nuser:a\nuser:b\n"
CALL_OF: Any = {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": '{"b": 1}'}}] * 2}
THOUGHT = {**CALL_OF, "content": "b", "reasoning_content": "c"}
NO_OBJECT: Any = {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "no JSON"}}]}
ONE_CALL, NO_BOTH, WRITTEN_OUT = (
    f"{{% for m in messages %}}{turn}{TURN}{{% endfor %}}"
    for turn in (
        "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}",
        "{% if m.tool_calls and (m.content and m.reasoning_content) %}{{ raise_exception('not both') }}{% endif %}",
        "{% for c in m.tool_calls or [] %}{{ '[' + c.function.arguments + ']' }}{% endfor %}",
    )
)
WEATHER_CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "京都"}'}}
CALLED: Any = {"role": "assistant", "content": None, "reasoning_content": "見る", "tool_calls": [WEATHER_CALL]}
LONG = "5" + "b" * 40
RESULT = {"role": "tool", "tool_call_id": "a", "content": "晴れ"}
RENDERED: dict[str, list[tuple[str, tuple[Any, ...], dict[str, Any], str]]] = {
    "developers are systems unless the template has them": [
        (KNOWN, (("developer", "猫"), ("user", "a")), {}, "system:猫\nuser:a\n"),
        (KNOWN.replace("'system'", "'developer'"), (("developer", "猫"), ("user", "a")), {}, "developer:猫\nuser:a\n"),
    ],
    "system messages are merged into the first if the template takes one": [
        (FIRST, SYSTEMS, {}, MERGED),
        (ONE_SYSTEM, SYSTEMS, {}, MERGED),
        (FIRST, SYSTEMS[1:], {}, "system:犬\nuser:a\nuser:b\n"),
        (CHATS, SYSTEMS, {}, "system:猫\nuser:a\nsystem:犬\nuser:b\nassistant:"),
    ],
    "the system message may be rendered in the user's turns alone": [
        (LAST, (("system", "猫"), ("user", "a"), ("tool", "5")), {}, "a5"),
        (LAST, (("system", "猫"), ("user", "a")), {}, "猫a"),
    ],
    "arguments that a template can't read are left out": [(ITEMS, (("user", "a"), NO_OBJECT), {}, "user:a\nassistant:\n")],
    "calls are sent back in the form that the template takes": [
        (
            CHATS,
            (("user", "天気は"), CALLED, RESULT),
            {"tools": TOOLS},
            "weather 天気 user:天気は\nassistant:<think>見る</think><tool_call>weather 京都</tool_call>\ntool:晴れ\nassistant:",
        ),
        (ONE_CALL, (("user", "a"), CALL_OF), {}, "user:a\nassistant:\nassistant:\n"),
        (NO_BOTH, (("user", "a"), THOUGHT), {}, "user:a\nassistant:b\n"),
        (WRITTEN_OUT, (("user", "a"), THOUGHT), {}, 'user:a\n[{"b": 1}][{"b": 1}]assistant:b\n'),
    ],
    "reasoning effort is the template's switch": [
        (ONE_SYSTEM + source, (("user", "a"),), {"reasoning_effort": effort}, f"user:a\n{seen}")
        for source, effort, seen in (
            ("{{ reasoning_effort }}", "low", "low"),
            ("{{ enable_thinking }}", "none", "False"),
            ("{{ enable_thinking }}", "high", "True"),
            ("", "high", ""),
        )
    ],
    "tools that a template needs are not ignored by it": [
        (KNOWN + "{{ tools | length }}", (("user", "a"),), {"tools": TOOLS}, f"user:a\n{len(TOOLS)}")
    ],
    "contents of which a template cuts one end are not ignored": [
        (
            f"{{% for m in messages %}}{{{{ m.content[{cut}] }}}}{{% endfor %}}",
            (("user", "a"), ("tool", "5" + "b" * 40)),
            {},
            seen,
        )
        for cut, seen in ((":20", "a5" + "b" * 19), ("-20:", "a" + "b" * 20))
    ],
}
"""What was lost without a word, refused in the next turn, or ended in a raw error, here or in other servers."""


@pytest.mark.parametrize("name", RENDERED)
def test_chats_are_rendered_as_the_template_takes_them(name: str) -> None:
    for template, messages, more, seen in RENDERED[name]:
        assert rendered(template, *messages, **more) == seen


@pytest.mark.parametrize("role", ["function", "tool"])
def test_messages_that_the_template_ignores_are_refused(role: str) -> None:
    chat = [{"role": name, "content": text} for name, text in (("user", "a"), (role, "5"), ("user", "b"))]
    with pytest.raises(RequestError, match=rf"ignores message 2 of the chat, of role '{role}'") as refused:
        rendered(KNOWN, *chat)
    assert refused.value.body["error"]["param"] == "messages"
    with pytest.raises(InvalidInputError, match="ignores message 2"):
        XTokAssisted((LM, templated(KNOWN))).generate(chat, max_new_tokens=1)
    assert rendered(CHATS, *chat) == f"user:a\n{role}:5\nuser:b\nassistant:"


def test_markers_that_are_added_tokens_are_no_text_for_grammars() -> None:
    """Found by a hostile trial: the grammar forbade the id of the marker that it wanted, and requests were refused."""
    tokens = deepcopy(tokenizer("byte-level BPE"))
    markers = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # no control tokens, as Qwen's
    tokens.add_tokens([AddedToken(name, special=False, normalized=False) for name in markers])
    tokens.chat_template = "{{ messages[0].content }}{{ tools | length if tools else '' }}{# <tool_call> <think> #}"
    xt = XTokAssisted((fitting(tokens, "Llama", 0, dtype=torch.float32, window=WIDE), tokens), PromptLookup())
    call, marks = f"<tool_call>\n{CALL}\n</tool_call>".replace("京都", "a"), ("<think>", "</think>", "<tool_call>")
    chat: Any = {"messages": [{"role": "user", "content": "a <tool_call>"}], "tools": TOOLS[:1]}
    for more, others in (({"tool_choice": "required"}, []), (HELD, ['<think>b</think>{"n": 7}', '{"n": 7}'])):
        body = read(Chat, {**chat, **more})
        matcher = matcher_for(body, format_for(body, format_of(tokens, Parsers())), xt, tokens("a").input_ids)
        for text in (call, f"<think>\nb\n</think>\n{call}", *others):
            one, ids = matcher.deep_copy(), tokens(text).input_ids
            assert {tokens.convert_tokens_to_ids(mark) for mark in marks if mark in text} <= {*ids}
            assert all(one.consume_token(token) for token in ids) and one.is_accepting(), text
    with serving(xt) as running:
        assert running.ask("chat/completions", **chat, tool_choice="required", max_tokens=9).status_code == 200
