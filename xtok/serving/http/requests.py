"""A checked request as arguments of `Engine.submit`."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from json import dumps, loads
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from xtok.align.text import SequenceText, utf8_decoder
from xtok.assisted import XTokAssisted
from xtok.decoding.arguments import check_ids
from xtok.drafts.lookup import Prediction
from xtok.errors import InvalidInputError, UnsupportedArgumentError
from xtok.models.cache import context_window, vocabulary_size
from xtok.models.probe import traits
from xtok.models.prompts import KnownPrompt, Prompt, is_chat, is_several, prompt_ids
from xtok.sampling.grammar import Grammar
from xtok.serving.http.chats import other_forms
from xtok.serving.http.formats import AUTO, Format, Parsers, format_of
from xtok.serving.http.processors import Penalties, Picked, Record, prompt_picks
from xtok.serving.http.protocol import MOST, Body, Chat, Completion, Limits, RequestError
from xtok.serving.http.reading import Follower, Reader
from xtok.serving.http.tools import format_for, matcher_for, reader_of

COMPLETION_TOKENS = 16
"""The default number of new tokens of a completion, as in OpenAI's API."""
COLDEST = 1e-3
"""The lowest temperature above 0."""


class Echo(NamedTuple):
    """A prompt as part of an answer: its text, and its ids with their log-probabilities, if those are requested."""

    text: str
    picked: list[Picked]


@dataclass(frozen=True)
class Submission:
    """One sequence to generate. `arguments`: for `Engine.submit`, for this sequence alone. `record`: records the picks, if they
    are requested. `reader`: splits its text, `follower`, if given, as ids are committed. `echo`: the prompt, if its text is to
    begin with that.
    """

    prompt: KnownPrompt
    arguments: dict[str, Any]
    record: Record | None
    reader: Reader
    follower: Follower | None = None
    echo: Echo | None = None


def submissions_of(body: Completion | Chat, xt: XTokAssisted, limits: Limits, parsers: Parsers = AUTO) -> list[Submission]:
    """The sequences of a request: `n` for each prompt, in order, number i with `seed` + i. Raises `RequestError`."""
    known = format_for(body, format_of(xt.tokenizer, parsers)) if isinstance(body, Chat) else Format()
    template, matcher = _template(body, xt), None
    predicted = "" if body.prediction is None else _joined(body.prediction.content, "prediction")
    same = _sampling(body)
    if template:
        same["chat_template_kwargs"] = template
    if predicted:  # prepared once for all sequences
        same["prediction"] = Prediction(predicted)
    prompts, found = _prompts(body, xt), list[Submission]()
    _check_count(body, len(prompts))
    read = [_read(given, template, xt, "messages" if isinstance(body, Chat) else "prompt") for given in prompts]
    lengths_of = [_lengths(body, xt, len(prompt.ids), limits) for prompt in read]
    echoes = dict[tuple[int, ...], Echo | None]()
    for prompt, lengths in zip(read, lengths_of, strict=True):
        ids = prompt.ids
        matcher = matcher or matcher_for(body, known, xt, ids)
        if (key := tuple(ids)) not in echoes:
            echoes[key] = _echo(body, prompt, xt)
        for number in range(body.n or 1):
            record = _record(body)
            arguments = {**same, **lengths, **_processors(body, xt, record, len(ids), matcher)}
            if body.seed not in (None, -1) and body.temperature != 0:  # a greedy text is the same for any seed
                arguments["seed"] = (body.seed + number) % 2**64
            reader, follower = reader_of(body, known, xt, ids) if isinstance(body, Chat) else (Reader(stops=body.stops), None)
            if follower is not None:
                arguments["stopping_criteria"] = StoppingCriteriaList([follower])
            elif body.stops:
                arguments["stop_strings"] = body.stops
            found.append(Submission(prompt, arguments, record, reader, follower, echoes[key]))
    return found


def _echo(body: Completion | Chat, prompt: KnownPrompt, xt: XTokAssisted) -> Echo | None:
    if isinstance(body, Chat) or not body.echo:
        return None
    read, decoder, picked, offset = SequenceText(xt.target.vocabulary.view, []), utf8_decoder(), list[Picked](), 0
    picks = None if body.logprobs is None else prompt_picks(xt.model, prompt.ids, body.logprobs)
    text = prompt.prompt if isinstance(prompt.prompt, str) else read.view.to_bytes(prompt.ids).decode(errors="replace")
    for one in picks or ():
        read.append(one.id)
        picked.append(one._replace(offset=offset))
        name = "" if read.pieces[-1] else str(xt.tokenizer.convert_ids_to_tokens(one.id))
        is_written = bool(name) and text.startswith(name, offset)  # a control token that the prompt names
        offset += len(name) if is_written else len(decoder.decode(read.pieces[-1]))
    return Echo(text, picked)


def ignored(body: Completion | Chat, xt: XTokAssisted) -> list[str]:
    """The names of fields that have no effect on the texts of this target, though clients may expect one."""
    effort = isinstance(body, Chat) and body.reasoning_effort is not None and not _effort(body.reasoning_effort, xt)
    return [*body.ignored, *(["reasoning_effort"] if effort else [])]


def _read(prompt: Prompt, template: dict[str, Any], xt: XTokAssisted, field: str) -> KnownPrompt:
    """A prompt with its ids. A chat that the template refuses is tried in other forms. Raises `RequestError`."""
    _check_size(prompt, template, xt, field)
    refusal: InvalidInputError | UnsupportedArgumentError | None = None
    for form in other_forms(prompt) if is_chat(prompt) else [prompt]:
        try:
            ids = prompt_ids(xt.tokenizer, form, None, template)
            check_ids(torch.tensor(ids, dtype=torch.int64, device="cpu"), traits(xt.model).ids_read)
            return KnownPrompt(form, ids)
        except (InvalidInputError, UnsupportedArgumentError) as error:  # noqa: PERF203 # others may be taken
            refusal = refusal or error
    assert refusal is not None
    raise RequestError(str(refusal), field if isinstance(refusal, InvalidInputError) else "tools") from refusal


def _prompts(body: Completion | Chat, xt: XTokAssisted) -> list[Prompt]:
    if isinstance(body, Chat):
        return [[_message(message, number, _source(xt)) for number, message in enumerate(body.messages)]]
    given = body.prompt
    prompts: list[Any] = list(given) if given and is_several(given) else [given]
    return prompts


def _check_count(body: Body, prompts: int) -> None:
    """Raises `RequestError` if a request asks for too many texts."""
    texts = prompts * (body.n or 1)
    if texts > MOST:
        raise RequestError(
            f"{prompts} prompts with {body.n or 1} texts each are more than {MOST}.", "n" if body.n else "prompt"
        )
    if body.return_trace and texts > 1:
        raise RequestError("return_trace is for one text. Give one prompt, and leave n out.", "return_trace")


def _source(xt: XTokAssisted) -> str:
    """The text of the target's chat template."""
    return str(getattr(xt.tokenizer, "chat_template", None) or "")


def _check_size(prompt: Prompt, template: dict[str, Any], xt: XTokAssisted, field: str) -> None:
    """Raises `RequestError` if a prompt has more bytes than fit into the window. Encoding it would keep others waiting."""
    window = context_window(xt.model)
    if window is None:
        return
    size, most = sum(_sizes([prompt, template])), window * xt.target.vocabulary.longest
    if size > most:
        raise RequestError(
            f"The prompt has {size} bytes; the model's context window is {window} tokens, which have up to {most} bytes.",
            field,
            code="context_length_exceeded",
        )


def _sizes(given: Any) -> Iterator[int]:
    """How many bytes each text has in what JSON may hold, names of fields not counted."""
    left = [given]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield len(one.encode(errors="surrogatepass"))
        elif isinstance(one, list | dict):
            left += one.values() if isinstance(one, dict) else one


def _joined(content: Any, field: str) -> str:
    """A text; the parts of a list are joined. Raises `RequestError`."""
    text = "".join(_part(part, field) for part in content) if isinstance(content, list) else content
    if not isinstance(text, str):
        raise RequestError("content must be a text, or a list of parts of text.", field)
    return text


def _message(given: dict[str, Any], number: int, source: str) -> dict[str, Any]:
    """A message as chat templates read it: text parts are joined, and arguments of calls parsed. `source`: the template's text.
    Raises `RequestError`.
    """
    field = f"messages.{number}"
    message = {name: value for name, value in given.items() if value is not None and (name, value) != ("tool_calls", [])}
    if message.get("role") != "assistant" and not {"content", "tool_calls"} & message.keys():
        raise RequestError("A message needs content, or tool_calls.", f"{field}.content")
    if message.get("role") == "developer" and not re.search("""['"]developer['"]""", source):
        message["role"] = "system"
    message["content"] = _joined(message.get("content", ""), f"{field}.content")
    if "tool_calls" in message:
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise RequestError("tool_calls must be a list of calls of functions.", f"{field}.tool_calls")
        message["tool_calls"] = [_call(call, f"{field}.tool_calls.{index}") for index, call in enumerate(calls)]
    return message


def _part(part: Any, field: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise RequestError('Only text parts are supported: {"type": "text", "text": "…"}.', field)
    return text


def _call(call: Any, field: str) -> dict[str, Any]:
    """A call as chat templates read it, with its arguments parsed: {} for none. What isn't JSON stays a text, since models may
    write that, and clients send it back. Raises `RequestError`.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(
            f'{field} must be a call of a function: {{"type": "function", "function": {{"name": …, "arguments": …}}}}.', field
        )
    given = function.get("arguments", "")
    if not isinstance(given, str | dict | None):
        raise RequestError(f"{field}, which calls {function['name']!r}, must have arguments in a text of JSON.", field)
    arguments: Any = given or {}
    if isinstance(given, str):
        try:
            arguments = loads(given) if given.strip() else {}
            dumps(arguments, ensure_ascii=False).encode()  # half a character can't be
        except (RecursionError, ValueError):
            arguments = given
    return {**call, "function": {**function, "arguments": arguments}}


def _template(body: Completion | Chat, xt: XTokAssisted) -> dict[str, Any]:
    """The arguments of the chat template."""
    if not isinstance(body, Chat):
        return {}
    tools = {} if body.tool_choice == "none" or not body.tools else {"tools": body.tools}
    effort = {} if body.reasoning_effort is None else _effort(body.reasoning_effort, xt)
    return {**effort, **(body.chat_template_kwargs or {}), **tools}


def _effort(effort: str, xt: XTokAssisted) -> dict[str, Any]:
    """The argument of the chat template that sets how much to reason; none if it has no such argument."""
    source = _source(xt)
    if "reasoning_effort" in source:
        return {"reasoning_effort": effort}
    return {"enable_thinking": effort != "none"} if "enable_thinking" in source else {}


def _sampling(body: Body) -> dict[str, Any]:
    """The sampling arguments; sampling is OpenAI's default. Raises `RequestError` if the temperature makes logits overflow."""
    if body.temperature == 0:  # then top_k and the like leave the best id
        return {"do_sample": False}
    if body.temperature is not None and body.temperature < COLDEST:
        raise RequestError(f"temperature is {body.temperature}; give {COLDEST} or more, or 0 for greedy texts.", "temperature")
    given = {"temperature": body.temperature, "top_p": body.top_p, "min_p": body.min_p}
    if body.top_k is not None:
        given["top_k"] = max(0, body.top_k)
    return {"do_sample": True, **{name: value for name, value in given.items() if value is not None}}


def _lengths(body: Completion | Chat, xt: XTokAssisted, read: int, limits: Limits) -> dict[str, Any]:
    """How long a text after a prompt of `read` ids may get: as long as requested, if that fits into the context window and the
    server's limit. Raises `RequestError` if nothing fits.
    """
    requested, window = body.max_tokens, context_window(xt.model)
    if isinstance(body, Chat):
        requested = requested or body.max_completion_tokens or limits.default
    room = limits.tokens if window is None else min(limits.tokens, window - read)
    if room < (requested != 0):
        raise RequestError(
            f"The prompt has {read} tokens; the model's context window is {window}, which leaves no room for a text.",
            "messages" if isinstance(body, Chat) else "prompt",
            code="context_length_exceeded",
        )
    wanted = min(COMPLETION_TOKENS if requested is None else requested, room)
    return {"max_new_tokens": wanted, **({} if limits.seconds is None else {"max_time": limits.seconds})}


def _record(body: Completion | Chat) -> Record | None:
    if isinstance(body, Chat):
        return Record(body.top_logprobs or 0) if body.logprobs else None
    return None if body.logprobs is None else Record(body.logprobs)


def _processors(body: Body, xt: XTokAssisted, record: Record | None, start: int, matcher: Any) -> dict[str, Any]:
    """The processors of one sequence, in transformers' order. `record` comes first, so it sees the target's own logits."""
    repetition = body.repetition_penalty or xt.model.generation_config.repetition_penalty or 1.0
    made: list[Any] = [] if record is None else [record]
    if body.logit_bias:
        made.append(SequenceBiasLogitsProcessor(_bias(body.logit_bias, vocabulary_size(xt.model))))
    if repetition != 1.0:
        made.append(RepetitionPenaltyLogitsProcessor(repetition))
    if body.frequency_penalty or body.presence_penalty:
        made.append(Penalties(start, body.frequency_penalty or 0.0, body.presence_penalty or 0.0))
    if matcher is not None:
        made.append(Grammar(matcher.deep_copy(), start))
    return {"repetition_penalty": 1.0, "logits_processor": LogitsProcessorList(made)}


def _bias(given: Mapping[str, float], size: int) -> list[list[Any]]:
    """Biases as transformers' processor takes them. Raises `RequestError` for ids that the target lacks."""
    for name in given:
        if not (name.isascii() and name.isdigit() and len(name) <= 20 and int(name) < size):
            raise RequestError(f"logit_bias has {name[:40]!r}; the target's ids are from 0 to {size - 1}.", "logit_bias")
    return [[[int(name)], float(value)] for name, value in given.items()]
