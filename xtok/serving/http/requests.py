"""A checked request as arguments of `Engine.submit`."""

from collections.abc import Mapping
from dataclasses import dataclass
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
from xtok.models.capabilities import traits
from xtok.models.prompts import KnownPrompt, Prompt, is_chat, is_several, prompt_ids
from xtok.sampling.grammar import Grammar
from xtok.serving.http.chats import joined, messages_of, other_forms, template_arguments
from xtok.serving.http.formats import AUTO, Format, Parsers, follower_of, format_for, format_of
from xtok.serving.http.grammars import matcher_for
from xtok.serving.http.processors import Penalties, Picked, Record, prompt_picks
from xtok.serving.http.protocol import MOST, Chat, Completion, Limits, RequestError, leaves
from xtok.serving.http.reading import Follower

COMPLETION_TOKENS = 16
"""The default number of new tokens of a completion, as in OpenAI's API."""


class Echo(NamedTuple):
    """A prompt as part of an answer: its text, and its ids with their log-probabilities, if those are requested."""

    text: str
    picked: list[Picked]


@dataclass(frozen=True)
class Submission:
    """One sequence to generate. `arguments`: for `Engine.submit`, for this sequence alone. `follower`: reads its text. `echo`:
    the prompt, if its text is to begin with that.
    """

    prompt: KnownPrompt
    arguments: dict[str, Any]
    follower: Follower
    echo: Echo | None


def submissions_of(body: Completion | Chat, xt: XTokAssisted, limits: Limits, parsers: Parsers = AUTO) -> list[Submission]:
    """The sequences of a request: `n` for each prompt, in order, number i with `seed` + i. Raises `RequestError`."""
    known = format_for(body, format_of(xt.tokenizer, parsers)) if isinstance(body, Chat) else Format()
    template, same = template_arguments(body, xt), _sampling(body)
    if template:
        same["chat_template_kwargs"] = template
    if body.prediction is not None and (predicted := joined(body.prediction.content, "prediction")):
        same["prediction"] = Prediction(predicted)  # prepared once for all sequences
    prompts, found = _prompts(body, xt), list[Submission]()
    _check_count(body, len(prompts))
    read = [_read(given, template, xt, body.field) for given in prompts]
    lengths_of = [_lengths(body, xt, len(prompt.ids), limits) for prompt in read]
    matcher = matcher_for(body, known, xt, read[0].ids)
    echoes = {tuple(prompt.ids): prompt for prompt in read} if isinstance(body, Completion) and body.echo else {}
    echoed = {key: _echo(prompt, body.top, xt) for key, prompt in echoes.items()}
    for prompt, lengths in zip(read, lengths_of, strict=True):
        ids, echo = prompt.ids, echoed.get(tuple(prompt.ids))
        for number in range(body.n or 1):
            record = None if body.top is None else Record(body.top)
            arguments = {**same, **lengths, **_processors(body, xt, record, len(ids), matcher)}
            if body.seed not in (None, -1) and body.temperature != 0:  # a greedy text is the same for any seed
                arguments["seed"] = (body.seed + number) % 2**64
            follower = follower_of(body, known, xt, ids, record, len(echo.text) if echo else 0)
            arguments["stopping_criteria"] = StoppingCriteriaList([follower])
            found.append(Submission(prompt, arguments, follower, echo))
    return found


def _echo(prompt: KnownPrompt, top: int | None, xt: XTokAssisted) -> Echo:
    read, decoder, picked, offset = SequenceText(xt.target.vocabulary.view, []), utf8_decoder(), list[Picked](), 0
    picks = [] if top is None else prompt_picks(xt.model, prompt.ids, top)
    text = prompt.prompt if isinstance(prompt.prompt, str) else read.view.to_bytes(prompt.ids).decode(errors="replace")
    for one in picks:
        read.append(one.id)
        picked.append(one._replace(offset=offset))
        name = "" if read.pieces[-1] else str(xt.tokenizer.convert_ids_to_tokens(one.id))
        is_written = bool(name) and text.startswith(name, offset)  # a control token that the prompt names
        offset += len(name) if is_written else len(decoder.decode(read.pieces[-1]))
    return Echo(text, picked)


def _read(prompt: Prompt, template: dict[str, Any], xt: XTokAssisted, field: str) -> KnownPrompt:
    """A prompt with its ids. A chat that the template refuses is tried in other forms. Raises `RequestError`."""
    _check_size(prompt, template, xt, field)
    refusals = list[InvalidInputError | UnsupportedArgumentError]()
    for form in other_forms(prompt) if is_chat(prompt) else [prompt]:
        try:
            ids = prompt_ids(xt.tokenizer, form, None, template)
            check_ids(torch.tensor(ids, dtype=torch.int64, device="cpu"), traits(xt.model).ids_read)
            return KnownPrompt(form, ids)
        except (InvalidInputError, UnsupportedArgumentError) as error:  # noqa: PERF203 # others may be taken
            refusals.append(error)
    raise RequestError(str(refusals[0]), field if isinstance(refusals[0], InvalidInputError) else "tools") from refusals[0]


def _prompts(body: Completion | Chat, xt: XTokAssisted) -> list[Prompt]:
    given: Any = [messages_of(body, xt)] if isinstance(body, Chat) else body.prompt
    return list(given) if given and is_several(given) else [given]


def _check_count(body: Completion | Chat, prompts: int) -> None:
    """Raises `RequestError` if a request asks for too many texts."""
    texts = prompts * (body.n or 1)
    if texts > MOST:
        message = f"{prompts} prompts with {body.n or 1} texts each are more than {MOST}."
        raise RequestError(message, "n" if body.n else "prompt")
    if body.return_trace and texts > 1:
        raise RequestError("return_trace is for one text. Give one prompt, and leave n out.", "return_trace")


def _check_size(prompt: Prompt, template: dict[str, Any], xt: XTokAssisted, field: str) -> None:
    """Raises `RequestError` if a prompt has more bytes than fit into the window. Encoding it would keep others waiting."""
    window = context_window(xt.model)
    if window is None:
        return
    texts = (one for one in leaves([prompt, template]) if isinstance(one, str))
    size, most = sum(len(one.encode(errors="surrogatepass")) for one in texts), window * xt.target.vocabulary.longest
    if size > most:
        raise RequestError(
            f"The prompt has {size} bytes; the model's context window is {window} tokens, which have up to {most} bytes.",
            field,
            code="context_length_exceeded",
        )


def _sampling(body: Completion | Chat) -> dict[str, Any]:
    """The sampling arguments; sampling is OpenAI's default."""
    if body.temperature == 0:  # then top_k and the like leave the best id
        return {"do_sample": False}
    given = body.model_dump(include={"temperature", "top_p", "min_p", "top_k"}, exclude_none=True)
    return {"do_sample": True, **given, **({"top_k": 0} if body.top_k == -1 else {})}


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
            body.field,
            code="context_length_exceeded",
        )
    wanted = min(COMPLETION_TOKENS if requested is None else requested, room)
    return {"max_new_tokens": wanted, **({} if limits.seconds is None else {"max_time": limits.seconds})}


def _processors(body: Completion | Chat, xt: XTokAssisted, record: Record | None, start: int, matcher: Any) -> dict[str, Any]:
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
