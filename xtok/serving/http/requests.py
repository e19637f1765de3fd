"""A checked request as arguments of `Engine.submit`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from json import JSONDecodeError, loads
from typing import Any

from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from xtok.assisted import XTokAssisted
from xtok.drafts.lookup import Prediction
from xtok.errors import InvalidInputError, UnsupportedArgumentError
from xtok.models.cache import context_window, end_ids, vocabulary_size
from xtok.models.prompts import KnownPrompt, Prompt, is_several, prompt_ids
from xtok.sampling.grammar import Grammar
from xtok.serving.http.formats import AUTO, Format, Parsers, format_of
from xtok.serving.http.processors import Penalties, Record, matcher_of
from xtok.serving.http.protocol import MOST, Body, Chat, Completion, Limits, RequestError
from xtok.serving.http.reading import Marked, Reader
from xtok.serving.http.tools import format_for, matcher_of_tools, reader_of

COMPLETION_TOKENS = 16
"""The default number of new tokens of a completion, as in OpenAI's API. A chat gets as many as fit."""
COLDEST = 1e-3
"""The lowest temperature above 0."""


@dataclass(frozen=True)
class Submission:
    """One sequence to generate. `arguments`: for `Engine.submit`, for this sequence alone. `stops`: its stop strings. `record`:
    records the picks, if they are requested. `reader`: splits its text, in which `marked`, if given, writes out control tokens.
    """

    prompt: KnownPrompt
    arguments: dict[str, Any]
    stops: list[str]
    record: Record | None
    reader: Reader
    marked: Marked | None = None


def submissions_of(body: Completion | Chat, xt: XTokAssisted, limits: Limits, parsers: Parsers = AUTO) -> list[Submission]:
    """The sequences of a request: `n` for each prompt, in order, number i with `seed` + i. Raises `RequestError`."""
    field = "messages" if isinstance(body, Chat) else "prompt"
    template, matcher = _template(body), _matcher(body, xt)
    known = format_for(body, format_of(xt.tokenizer, parsers)) if isinstance(body, Chat) else Format()
    predicted = "" if body.prediction is None else _joined(body.prediction.content, "prediction")
    same: dict[str, Any] = {"stop_strings": body.stops or None, **_sampling(body)}
    if template:
        same["chat_template_kwargs"] = template
    if predicted:  # prepared once for all sequences
        same["prediction"] = Prediction(predicted)
    prompts, found = _prompts(body), list[Submission]()
    if len(prompts) * (body.n or 1) > MOST:
        raise RequestError(f"{len(prompts)} prompts with {body.n or 1} texts each are more than {MOST}.", "n")
    for prompt in prompts:
        _check_size(prompt, template, xt, field)
        try:
            ids = prompt_ids(xt.tokenizer, prompt, None, template)
        except (InvalidInputError, UnsupportedArgumentError) as error:
            raise RequestError(str(error), field if isinstance(error, InvalidInputError) else "tools") from error
        lengths = _lengths(body, xt, len(ids), limits)
        if isinstance(body, Chat) and body.forced:
            matcher = matcher_of_tools(body, known, xt, ids)
        for number in range(body.n or 1):
            record = _record(body)
            arguments = {**same, **lengths, **_processors(body, xt, record, len(ids), matcher)}
            if body.seed is not None and body.temperature != 0:  # a greedy text is the same for any seed
                arguments["seed"] = (body.seed + number) % 2**64
            reader, marked = reader_of(body, known, xt, ids) if isinstance(body, Chat) else (Reader(), None)
            if marked is not None:
                arguments["stopping_criteria"] = StoppingCriteriaList([marked])
            found.append(Submission(KnownPrompt(prompt, ids), arguments, body.stops, record, reader, marked))
    return found


def _prompts(body: Completion | Chat) -> list[Prompt]:
    if isinstance(body, Chat):
        return [[_message(message, number) for number, message in enumerate(body.messages)]]
    given = body.prompt
    prompts: list[Any] = list(given) if given and is_several(given) else [given]
    return prompts


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


def _message(given: dict[str, Any], number: int) -> dict[str, Any]:
    """A message as chat templates read it: text parts are joined, and arguments of calls parsed. Raises `RequestError`."""
    message = {name: value for name, value in given.items() if value is not None}
    if "content" not in message and "tool_calls" not in message:
        raise RequestError("A message needs content, or tool_calls.", f"messages.{number}.content")
    message["content"] = _joined(message.get("content", ""), f"messages.{number}.content")
    if "tool_calls" in message:
        try:
            message["tool_calls"] = [_call(call) for call in message["tool_calls"]]
        except (AttributeError, JSONDecodeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise RequestError(
                "tool_calls must be a list of calls of functions, whose arguments are JSON that isn't nested too deeply.",
                f"messages.{number}.tool_calls",
            ) from error
    return message


def _part(part: Any, field: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise RequestError('Only text parts are supported: {"type": "text", "text": "…"}.', field)
    return text


def _call(call: dict[str, Any]) -> dict[str, Any]:
    given = call["function"]["arguments"]
    return {**call, "function": {**call["function"], "arguments": loads(given) if isinstance(given, str) else given}}


def _template(body: Completion | Chat) -> dict[str, Any]:
    if not isinstance(body, Chat):
        return {}
    tools = {} if body.tool_choice == "none" or not body.tools else {"tools": body.tools}
    return {**(body.chat_template_kwargs or {}), **tools}


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
    """How long a text after a prompt of `read` ids may get. Raises `RequestError` if they don't fit."""
    field = "max_completion_tokens" if isinstance(body, Chat) and body.max_tokens is None else "max_tokens"
    requested = body.max_tokens if field == "max_tokens" else getattr(body, field)
    window = context_window(xt.model)
    room = limits.tokens if window is None else window - read
    if requested is not None and requested > limits.tokens:
        raise RequestError(f"{field} is {requested}; this server writes up to {limits.tokens} tokens (--max-tokens).", field)
    usual = limits.tokens if isinstance(body, Chat) else COMPLETION_TOKENS
    wanted = min(usual, limits.tokens, room) if requested is None else requested
    if room < max(wanted, 1):
        raise RequestError(
            f"The prompt has {read} tokens, and {max(wanted, 1)} more are requested; the model's context window is {window}.",
            "messages" if isinstance(body, Chat) else "prompt",
            code="context_length_exceeded",
        )
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


def _matcher(body: Body, xt: XTokAssisted) -> Any:
    """The matcher for a response format; None if any text will do. Raises `RequestError` if none can be made."""
    requested = body.response_format
    if requested is None or not body.has_format:
        return None
    schema = {"type": "object"} if requested.type == "json_object" else requested.json_schema and requested.json_schema.schema_
    if schema is None:
        raise RequestError("response_format of type json_schema needs json_schema.schema.", "response_format")
    try:
        return matcher_of(xt.tokenizer, next(iter(end_ids(xt.model)), None), schema)
    except (ImportError, ValueError) as error:
        raise RequestError(f"Texts can't follow this response_format: {error}", "response_format") from error
