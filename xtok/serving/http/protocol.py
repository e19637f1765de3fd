"""What clients send and what they get instead of an answer: OpenAI's fields, checked, and its error object."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from xtok.errors import shown

MOST = 128
"""How many texts a request may ask for."""
STOPS = 16_384
"""How many characters the stop strings of a request may have in all: each character of a text is compared with them."""
COLDEST = 1e-3
"""The lowest temperature above 0: logits might overflow at a lower one."""
_REMEDIES = {
    "max_new_tokens": "Use max_tokens instead.",
    "num_return_sequences": "Use n instead.",
    "stop_strings": "Use stop instead.",
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "suffix": ("",),
}
"""Fields of OpenAI's API and vLLM's that xtok doesn't have, with the values that ask for what it does anyway."""
_LABELS = ("client_metadata", "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier")
"""Fields of OpenAI's API that change no text."""
_IGNORED = ("service_tier", "store", "verbosity")
"""Fields that are accepted without effect; the log names them."""
_FIELD = re.compile(r"(?!(str|int|float|bool)$)[a-z_]+")
"""A field's name in the place of a fault, in which pydantic also names the types that it tried."""
Fault: TypeAlias = tuple[str, Any, str]
"""A field, whether something is wrong with it, and what."""
Item = TypeVar("Item")
B = TypeVar("B", bound="Body")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose validation ends at the first fault: a body has room for a million, and to report all takes half a minute."""


class RequestError(Exception):
    """A refusal: an HTTP status, and OpenAI's error object as the `body`."""

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
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Limits:
    """Limits of a request: new `tokens` of each text, those of a chat by `default`, bytes of the `body`, and `seconds` that a
    text may take; None for any.
    """

    tokens: int = 4096
    default: int = 1024
    body: int = 4 * 1024**2
    seconds: float | None = 600.0


class Fields(BaseModel):
    """A model of JSON fields. Unknown fields are kept, so that an error can name them."""

    model_config = ConfigDict(extra="allow", strict=True)


class StreamOptions(Fields):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Schema(Fields):
    """A JSON schema with its name. Texts always follow it, whether `strict` is set or not."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class Prediction(Fields):
    type: Literal["content"]
    content: str | Items[dict[str, Any]]


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


def _check_biases(given: dict[str, Any]) -> dict[str, float]:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise ValueError(f"{name[:40]!r} has {shown(value)}; biases are numbers from -100 to 100")
    return given


Biases = Annotated[dict[str, Any], AfterValidator(_check_biases)]
"""Checked by a function because not every pydantic can end at the first fault of a dict."""
Penalty = Annotated[float, Field(ge=-2, le=2)]
Stop = Annotated[str, Field(min_length=1)]
Top = Annotated[int, Field(ge=0, le=20)]


class Common(Fields):
    """The fields of all requests. None is the same as leaving a field out."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stream: bool | None = None
    user: Annotated[str, Field(max_length=512)] | None = None

    @property
    def ignored(self) -> list[str]:
        """The names of fields that have no effect, though clients may expect one."""
        return [name for name in _IGNORED if (self.model_extra or {}).get(name)]


class Body(Common):
    """The fields of completions and chats. `field`: the name of that with the prompt."""

    field: ClassVar[str]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST)] | None = None
    logit_bias: Biases | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    prediction: Prediction | None = None
    return_trace: bool | None = None

    @property
    def stops(self) -> list[str]:
        """The strings that end a text. They are no part of it."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def has_format(self) -> bool:
        return self.response_format is not None and self.response_format.type != "text"

    def faults(self) -> list[Fault]:
        """What may be wrong with the fields together."""
        size, unstreamed = sum(map(len, self.stops)), self.stream_options is not None and not self.stream
        cold = f"temperature is {self.temperature}; give {COLDEST} or more, or 0 for greedy texts."
        return [
            ("temperature", 0 < (self.temperature or 0) < COLDEST, cold),
            ("stream_options", unstreamed, "stream_options needs a stream. Leave it out, or set stream to true."),
            ("stop", size > STOPS, f"stop has {size} characters in all; this server allows {STOPS}."),
        ]

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class Completion(Body):
    """`POST /v1/completions`."""

    field: ClassVar = "prompt"
    functions: ClassVar[list[dict[str, Any]]] = []
    forced: ClassVar[list[dict[str, Any]]] = []
    prompt: str | Items[int] | Items[str] | Items[Items[int]]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Top | None = None
    echo: bool | None = None

    def faults(self) -> list[Fault]:
        message = "max_tokens is 0, which needs echo to be true. Ask for at least one token."
        return [*super().faults(), ("max_tokens", self.max_tokens == 0 and not self.echo, message)]

    @property
    def top(self) -> int | None:
        """How many of the likeliest ids to report beside each that is picked; None to report no log-probabilities."""
        return self.logprobs


_FUNCTION_NAME = re.compile(r"[\w.-]{1,64}")


def _check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise ValueError('tools are functions: {"type": "function", "function": {"name": …, "parameters": …}}')
    if not (isinstance(name := function.get("name"), str) and _FUNCTION_NAME.fullmatch(name)):
        raise ValueError("the name of a function must have 1 to 64 characters: letters, digits, or _ . -")
    if not isinstance(function.get("parameters"), dict | None):
        raise ValueError("the parameters of a function must be a JSON schema, which is an object")
    return tool


Tool = Annotated[dict[str, Any], AfterValidator(_check_tool)]


class FunctionName(Fields):
    name: str


class ToolChoice(Fields):
    """A function that has to be called."""

    type: Literal["function"]
    function: FunctionName


class Chat(Body):
    """`POST /v1/chat/completions`."""

    field: ClassVar = "messages"
    messages: Annotated[Items[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def faults(self) -> list[Fault]:
        limits, forces = {self.max_tokens, self.max_completion_tokens} - {None}, self.tool_choice not in (None, "auto", "none")
        return [
            *super().faults(),
            ("max_completion_tokens", len(limits) > 1, "max_tokens and max_completion_tokens are one limit. Give only one."),
            ("top_logprobs", self.top_logprobs and not self.logprobs, "top_logprobs needs logprobs to be true."),
            ("tool_choice", forces and not self.forced, "tool_choice needs tools, and may name only a function among them."),
            ("tool_choice", self.forced and self.has_format, "A call can't be forced beside a response_format. Leave one out."),
            (
                "chat_template_kwargs",
                "chat_template" in (self.chat_template_kwargs or {}),
                "A template is a program: leave it out.",
            ),
        ]

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The functions that may be called."""
        return [] if self.tool_choice == "none" else [tool["function"] for tool in self.tools or ()]

    @property
    def forced(self) -> list[dict[str, Any]]:
        """The functions of which one must be called; none if the target may choose."""
        if isinstance(self.tool_choice, ToolChoice):
            return [one for one in self.functions if one["name"] == self.tool_choice.function.name][:1]
        return self.functions if self.tool_choice == "required" else []

    @property
    def calls_once(self) -> bool:
        """Whether no more than one call may be made."""
        return isinstance(self.tool_choice, ToolChoice) or self.parallel_tool_calls is False

    @property
    def top(self) -> int | None:
        """How many of the likeliest ids to report beside each that is picked; None to report no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


F = TypeVar("F", bound=Fields)


def fields_of(kind: type[F], given: bytes | dict[str, Any]) -> F:
    """Parse and validate JSON. Raises `RequestError`, with the field's name, for what isn't valid."""
    try:
        fields = kind.model_validate(_values(given) if isinstance(given, bytes) else given)
    except ValidationError as error:
        raise _refusal(error) from None
    _refuse_unknown(fields)
    return fields


def _values(given: bytes) -> Any:
    """Parse JSON. Raises `RequestError` if it is invalid, or has a number that is too large for a float."""
    try:
        found = from_json(given, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"The body isn't valid JSON (NaN and Infinity aren't allowed): {error}.") from None
    if any(isinstance(one, float) and not isfinite(one) for one in leaves(found)):
        raise RequestError("The body has a number that is too large for a float.")
    return found


def leaves(given: Any) -> Iterator[Any]:
    """What there is in lists and objects of JSON that is neither, without the names of fields."""
    left = [given]
    while left:
        if isinstance(one := left.pop(), list | dict):
            left += one.values() if isinstance(one, dict) else one
        else:
            yield one


def read(kind: type[B], given: bytes | dict[str, Any]) -> B:
    """The body of a request. Raises `RequestError`, with the field's name, for what can't be honoured."""
    body = fields_of(kind, given)
    for name, is_fault, message in body.faults():
        if is_fault:
            raise RequestError(message, name)
    return body


def _refusal(error: ValidationError) -> RequestError:
    """The error to report. If a value may be of several types, the deepest fault is reported: its type was probably meant."""
    fault = max(error.errors(include_url=False, include_input=False), key=lambda one: len(one["loc"]))
    if not fault["loc"]:
        return RequestError(f"The body is not a JSON object with this API's fields: {fault['msg']}.")
    path = ".".join(str(part) for part in fault["loc"] if isinstance(part, int) or _FIELD.fullmatch(part))
    return RequestError(f"{path}: {fault['msg'].removeprefix('Value error, ')}.", str(fault["loc"][0]), code="invalid_value")


def _refuse_unknown(fields: Fields, inside: str = "") -> None:
    """Raises `RequestError` for a field that would have no effect."""
    for name, value in (fields.model_extra or {}).items():
        is_neutral = not inside and (name in (*_LABELS, *_IGNORED) or value in _NEUTRAL.get(name, ()))
        if value is not None and not is_neutral:
            field = f"{inside}{name}"
            near = get_close_matches(name, type(fields).model_fields, 1, cutoff=0.85)
            remedy = _REMEDIES.get(name) or (f"Did you mean {inside}{near[0]}?" if near else "Leave it out.")
            raise RequestError(f"{field} isn't supported. {remedy}", field, code="unsupported_parameter")
    for name in type(fields).model_fields:
        if isinstance(part := getattr(fields, name), Fields):
            _refuse_unknown(part, f"{inside}{name}.")
