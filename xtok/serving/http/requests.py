"""What clients may ask: OpenAI's fields, checked, as arguments of `Engine.submit`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from json import JSONDecodeError, loads
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from transformers import LogitsProcessorList
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from xtok.assisted import XTokAssisted
from xtok.drafts.lookup import Prediction as Foreseen
from xtok.errors import InvalidInputError, shown
from xtok.models.cache import context_window, vocabulary_size
from xtok.models.prompts import KnownPrompt, Prompt, is_several, prompt_ids
from xtok.serving.http.processors import Grammar, Penalties, Record, matcher_of

COMPLETION_TOKENS = 16
"""How many new tokens a completion has where the request doesn't say: OpenAI's. A chat has as many as there is room for."""
COLDEST = 1e-3
"""Of temperatures above 0, the lowest."""
MOST = 128
"""How many texts a request may ask for."""
STOPS = 16_384
"""How many characters its stops may have in all: each of a text is compared with them."""

Item = TypeVar("Item")
B = TypeVar("B", bound="Body")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list of which the first fault alone is told: a body has room for a million, and to tell all takes half a minute."""


class RequestError(Exception):
    """What a request is answered with in place of a text: a status, and OpenAI's error object."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`param`: the field that is to blame. `kind` and `code`: OpenAI's words for what is wrong."""
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        self.told = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Limits:
    """What a request may ask. `tokens`: new ones of a text. `body`: bytes. `seconds`: until a text ends as one at a limit of
    length does; None for any time.
    """

    tokens: int = 4096
    body: int = 4 * 1024**2
    seconds: float | None = 600.0


class Fields(BaseModel):
    """What isn't a field is kept, so that it can be refused by its name."""

    model_config = ConfigDict(extra="allow", strict=True)


class StreamOptions(Fields):
    """Of a stream."""

    include_usage: bool | None = None


class Schema(Fields):
    """A JSON schema by its name. It is always held to, `strict` or not."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class Prediction(Fields):
    """What much of the text is predicted to be."""

    type: Literal["content"]
    content: str | Items[dict[str, Any]]


class ResponseFormat(Fields):
    """What the text is to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


def _check_biases(given: dict[str, Any]) -> dict[str, float]:
    """Raises `ValueError` for the first that is none."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise ValueError(f"{name[:40]!r} has {shown(value)}; biases are numbers from -100 to 100")
    return given


Biases = Annotated[dict[str, Any], AfterValidator(_check_biases)]
"""Checked by a function because not every pydantic can end at the first fault of a dict."""
Penalty = Annotated[float, Field(ge=-2, le=2)]
Stop = Annotated[str, Field(min_length=1)]
Top = Annotated[int, Field(ge=0, le=20)]


class Body(Fields):
    """What all texts may be asked with. None is as if it weren't there."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    logit_bias: Biases | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    prediction: Prediction | None = None

    @property
    def stops(self) -> list[str]:
        """Behind which texts end, and before which they are cut."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def has_format(self) -> bool:
        """Whether texts are held to a format, for which a grammar is compiled."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with how many tokens there were."""
        return bool(self.stream_options and self.stream_options.include_usage)


class Completion(Body):
    """`POST /v1/completions`."""

    prompt: str | Items[int] | Items[str] | Items[Items[int]]
    logprobs: Top | None = None


class Chat(Body):
    """`POST /v1/chat/completions`."""

    messages: Annotated[Items[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Race(Body):
    """A text round by round: `drafts` that take part, all without it, and whether the target writes it `alone`, too."""

    drafts: Items[str] | None = None
    alone: bool | None = None


class CompletionRace(Completion, Race):
    """`POST /v1/race/completions`."""


class ChatRace(Chat, Race):
    """`POST /v1/race/chat/completions`."""


def read(kind: type[B], data: bytes) -> B:
    """The body of a request. Raises `RequestError`, with the field's name, for whatever isn't one or can't be honoured."""
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise _refusal(error) from None
    _refuse_unknown(body)
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is for streams. Leave it out, or set stream to true.", "stream_options")
    if (size := sum(map(len, body.stops))) > STOPS:
        raise RequestError(f"stop has {size} characters in all; this server compares texts with up to {STOPS}.", "stop")
    if isinstance(body, Chat):
        _check_chat(body)
    if isinstance(body, Race):
        _check_race(body)
    return body


def _refusal(error: ValidationError) -> RequestError:
    """Of a value that may be of several kinds, the fault that lies deepest: that kind was meant."""
    fault = max(error.errors(include_url=False, include_input=False), key=lambda one: len(one["loc"]))
    if not fault["loc"]:
        return RequestError(f"The body is no JSON object of these fields: {fault['msg']}.")
    place = ".".join(map(str, fault["loc"]))
    return RequestError(f"{place}: {fault['msg']}.", str(fault["loc"][0]), code="invalid_value")


def _refuse_unknown(fields: Fields, inside: str = "") -> None:
    """Raises `RequestError` for a field that nobody would heed."""
    for name, value in (fields.model_extra or {}).items():
        if value is not None:
            raise RequestError(
                f"{inside}{name} isn't supported. Leave it out.", f"{inside}{name}", code="unsupported_parameter"
            )
    for name in type(fields).model_fields:
        if isinstance(part := getattr(fields, name), Fields):
            _refuse_unknown(part, f"{inside}{name}.")


def _check_chat(body: Chat) -> None:
    """Raises `RequestError` for fields that don't go together."""
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise RequestError(
            "max_tokens and max_completion_tokens are two names of one limit. Give one.", "max_completion_tokens"
        )
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", "top_logprobs")
    if "chat_template" in (body.chat_template_kwargs or {}):
        raise RequestError("chat_template can't be given by a request: a template is a program.", "chat_template_kwargs")


def _check_race(body: Race) -> None:
    """Raises `RequestError` for what has no place in a stream of rounds."""
    for name in ("logprobs", "top_logprobs", "stream", "stream_options", "user"):
        if getattr(body, name, None) is not None:
            raise RequestError(f"{name} isn't for races. Leave it out.", name, code="unsupported_parameter")


@dataclass(frozen=True)
class Asked:
    """A text that is asked for. `ids`: those of its prompt. `arguments`: those of `Engine.submit`, for this text alone."""

    prompt: Prompt
    ids: list[int]
    arguments: dict[str, Any]
    stops: list[str]
    record: Record | None

    @property
    def known(self) -> KnownPrompt:
        """The prompt with its ids."""
        return KnownPrompt(self.prompt, self.ids)


def texts_of(body: Completion | Chat, xt: XTokAssisted, limits: Limits) -> list[Asked]:
    """The texts of a request: `n` for each of its prompts, in order. Number i of a prompt has the request's `seed` + i.

    Raises `RequestError`.
    """
    field = "messages" if isinstance(body, Chat) else "prompt"
    template = _template(body)
    told = {"chat_template_kwargs": template} if template else {}
    matcher, predicted = _matcher(body, xt), _foreseen(body)
    prompts, found = _prompts(body), list[Asked]()
    if len(prompts) * (body.n or 1) > MOST:
        raise RequestError(f"{len(prompts)} prompts with {body.n or 1} texts each are more than {MOST}.", "n")
    for prompt in prompts:
        _check_size(prompt, template, xt, field)
        try:
            ids = prompt_ids(xt.tokenizer, prompt, None, template)
        except InvalidInputError as error:
            raise RequestError(str(error), field) from error
        lengths = _lengths(body, xt, len(ids), limits)
        shared = {**told, **_sampling(body), **lengths, **predicted, "stop_strings": body.stops or None}
        for number in range(body.n or 1):
            record = _record(body)
            own = _processors(body, xt, record, len(ids), matcher)
            found.append(Asked(prompt, ids, {**shared, **own, **_seed(body, number)}, body.stops, record))
    return found


def _prompts(body: Completion | Chat) -> list[Prompt]:
    if isinstance(body, Chat):
        return [[_message(message, number) for number, message in enumerate(body.messages)]]
    given = body.prompt
    prompts: list[Any] = list(given) if given and is_several(given) else [given]
    return prompts


def _check_size(prompt: Prompt, template: dict[str, Any], xt: XTokAssisted, field: str) -> None:
    """Raises `RequestError` for a prompt that is too long for the model whatever its ids are. To read it may take seconds, for
    which others would have to wait.
    """
    window = context_window(xt.model)
    if window is None:
        return
    size, most = sum(_sizes([prompt, template])), window * xt.target.vocabulary.longest
    if size > most:
        raise RequestError(
            f"The prompt has {size} bytes; the model reads {window} tokens in all, which have up to {most} bytes.",
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


def _foreseen(body: Body) -> dict[str, Any]:
    """The prediction, made ready once for all texts. Raises `RequestError` for what is no text."""
    text = "" if body.prediction is None else _joined(body.prediction.content, "prediction")
    return {"prediction": Foreseen(text)} if text else {}


def _joined(content: Any, field: str) -> str:
    """A text, or parts of it in one. Raises `RequestError`."""
    text = "".join(_part(part, field) for part in content) if isinstance(content, list) else content
    if not isinstance(text, str):
        raise RequestError("content is a text, or a list of parts of text.", field)
    return text


def _message(given: dict[str, Any], number: int) -> dict[str, Any]:
    """A message as templates read it: parts of text in one, and the arguments of calls, which come as JSON, as values.

    Raises `RequestError`.
    """
    message = {name: value for name, value in given.items() if value is not None}
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
        raise RequestError('Only parts of text are supported: {"type": "text", "text": "…"}.', field)
    return text


def _call(call: dict[str, Any]) -> dict[str, Any]:
    given = call["function"]["arguments"]
    return {**call, "function": {**call["function"], "arguments": loads(given) if isinstance(given, str) else given}}


def _template(body: Completion | Chat) -> dict[str, Any]:
    """The arguments of a chat's template."""
    if not isinstance(body, Chat):
        return {}
    tools = {} if body.tool_choice == "none" or not body.tools else {"tools": body.tools}
    return {**(body.chat_template_kwargs or {}), **tools}


def _sampling(body: Body) -> dict[str, Any]:
    """Without a temperature, texts are sampled, as OpenAI has it. Of a greedy text, cuts leave the best id, so they are heeded
    by doing nothing. Raises `RequestError` for a temperature by which logits would have no bounds.
    """
    if body.temperature == 0:
        return {"do_sample": False}
    if body.temperature is not None and body.temperature < COLDEST:
        raise RequestError(f"temperature is {body.temperature}; give {COLDEST} or more, or 0 for greedy texts.", "temperature")
    given = {"temperature": body.temperature, "top_p": body.top_p, "min_p": body.min_p}
    if body.top_k is not None:
        given["top_k"] = max(0, body.top_k)
    return {"do_sample": True, **{name: value for name, value in given.items() if value is not None}}


def _seed(body: Body, number: int) -> dict[str, Any]:
    """A greedy text is the same for any seed."""
    if body.seed is None or body.temperature == 0:
        return {}
    return {"seed": (body.seed + number) % 2**64}


def _lengths(body: Completion | Chat, xt: XTokAssisted, read: int, limits: Limits) -> dict[str, Any]:
    """How long a text may get whose prompt has `read` ids. Raises `RequestError` for what there is no room for."""
    field = "max_completion_tokens" if isinstance(body, Chat) and body.max_tokens is None else "max_tokens"
    asked = body.max_tokens if field == "max_tokens" else getattr(body, field)
    window = context_window(xt.model)
    room = limits.tokens if window is None else window - read
    if asked is not None and asked > limits.tokens:
        raise RequestError(f"{field} is {asked}; this server writes up to {limits.tokens} tokens.", field)
    usual = limits.tokens if isinstance(body, Chat) else COMPLETION_TOKENS
    wanted = min(usual, limits.tokens, room) if asked is None else asked
    if room < max(wanted, 1):
        raise RequestError(
            f"The prompt has {read} tokens, and {max(wanted, 1)} more are asked for; the model reads {window} in all.",
            "messages" if isinstance(body, Chat) else "prompt",
            code="context_length_exceeded",
        )
    return {"max_new_tokens": wanted, **({} if limits.seconds is None else {"max_time": limits.seconds})}


def _record(body: Completion | Chat) -> Record | None:
    if isinstance(body, Chat):
        return Record(body.top_logprobs or 0) if body.logprobs else None
    return None if body.logprobs is None else Record(body.logprobs)


def _processors(body: Body, xt: XTokAssisted, record: Record | None, start: int, matcher: Any) -> dict[str, Any]:
    """Those of one text, in transformers' order. What records stands in front: it is shown the target's own logits."""
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
    """As transformers' processor takes it. Raises `RequestError` for what is no id of the target."""
    for name in given:
        if not (name.isascii() and name.isdigit() and len(name) <= 20 and int(name) < size):
            raise RequestError(f"logit_bias has {name[:40]!r}; the target's ids are from 0 to {size - 1}.", "logit_bias")
    return [[[int(name)], float(value)] for name, value in given.items()]


def _matcher(body: Body, xt: XTokAssisted) -> Any:
    """What holds texts to a format, None for any text. Raises `RequestError` where nothing can."""
    asked = body.response_format
    if asked is None or not body.has_format:
        return None
    schema = {"type": "object"} if asked.type == "json_object" else asked.json_schema and asked.json_schema.schema_
    if schema is None:
        raise RequestError("response_format of type json_schema needs json_schema.schema.", "response_format")
    try:
        return matcher_of(xt.tokenizer, _end(xt), schema)
    except (ImportError, ValueError) as error:
        raise RequestError(f"Texts can't be held to this response_format: {error}", "response_format") from error


def _end(xt: XTokAssisted) -> int | None:
    """The id that ends texts, the first of several; None where the tokenizer's own does."""
    ends = xt.model.generation_config.eos_token_id
    return int(ends[0]) if isinstance(ends, list) else ends
