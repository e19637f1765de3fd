"""OpenAI's objects: answers and their chunks, messages, log-probabilities, token counts; and llama.cpp's timings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json import dumps
from typing import Any

from xtok.align.tokenbytes import TokenBytes
from xtok.results.generation import Generation
from xtok.serving.http.processors import Picked
from xtok.serving.http.reading import Part, Written
from xtok.serving.http.requests import Submission


def sse_data(event: dict[str, Any]) -> str:
    """JSON in one line, even for clients that take any Unicode line separator for the end of a line."""
    text = dumps(event, ensure_ascii=False)
    return text.replace("\x85", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@dataclass(frozen=True)
class Answer:
    """The objects that answer one request. `text_of`: a token's text and its bytes."""

    id: str
    model: str
    created: int
    chat: bool
    text_of: Callable[[int], tuple[str, bytes]]

    def body(self, choices: list[dict[str, Any]], *, is_chunk: bool = False, **more: Any) -> dict[str, Any]:
        """A whole answer, or a chunk of a stream."""
        kind = f"chat.completion{'.chunk' if is_chunk else ''}" if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more}

    def choice(self, index: int, written: Written, picked: list[Picked] | None, finish_reason: str) -> dict[str, Any]:
        """A whole text. `picked` is None if nothing is recorded."""
        content = {"message": _message(written)} if self.chat else {"text": written.text("content")}
        return {"index": index, **content, "logprobs": self._logprobs(picked), "finish_reason": finish_reason}

    def delta(
        self, index: int, delta: dict[str, Any], picked: list[Picked] | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        content = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        return {"index": index, **content, "logprobs": self._logprobs(picked), "finish_reason": finish_reason}

    def _logprobs(self, picked: list[Picked] | None) -> dict[str, Any] | None:
        if picked is None:
            return None
        if self.chat:
            content = [
                {**self._entry(one.id, one.logprob), "top_logprobs": [self._entry(*pair) for pair in one.top or ()]}
                for one in picked
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [self.text_of(one.id)[0] for one in picked],
            "token_logprobs": [one.logprob for one in picked],
            "top_logprobs": [
                None if one.top is None else {self.text_of(token)[0]: logprob for token, logprob in one.top} for one in picked
            ],
            "text_offset": [one.offset for one in picked],
        }

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text, data = self.text_of(token)
        return {"token": text, "logprob": logprob, "bytes": list(data)}


def _message(written: Written) -> dict[str, Any]:
    content, reasoning = written.text("content"), written.text("reasoning")
    calls = [call_of(part) for part in written.calls]
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    return message | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})


def delta_of(part: Part, calls: int) -> dict[str, Any]:
    """What a chunk of a chat says. `calls`: how many there were before."""
    if part.kind == "call":
        return {"tool_calls": [{"index": calls, **call_of(part)}]}
    return {"content" if part.kind == "content" else "reasoning_content": part.text}


def call_of(part: Part) -> dict[str, Any]:
    return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.text}}


def token_text(view: TokenBytes, tokenizer: Any) -> Callable[[int], tuple[str, bytes]]:
    r"""Gives a token's text and bytes. Bytes that are no whole characters are written `bytes:\xe3\x81`, as by OpenAI."""

    def text_of(token: int) -> tuple[str, bytes]:
        data = view[token]
        if data is None:
            return str(tokenizer.convert_ids_to_tokens(token)), b""
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data

    return text_of


def usage(submissions: Sequence[Submission], ended: Sequence[Generation], n: int) -> dict[str, Any]:
    """OpenAI's `usage`: tokens of the prompts, each prompt counted once, and of the texts; cached prompt tokens; and accepted
    and rejected prediction tokens.
    """
    read, written = sum(len(one.prompt.ids) for one in submissions[::n]), sum(len(one.token_ids) for one in ended)
    kept = {"cached_tokens": sum(one.stats.cached_tokens for one in ended[::n])}
    counts = {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": kept,
    }
    if not submissions[0].arguments.get("prediction"):
        return counts
    accepted, guessed = (sum(column) for column in zip((0, 0), *map(_prediction_counts, ended), strict=True))
    details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": guessed - accepted}
    return {**counts, "completion_tokens_details": details}


def _prediction_counts(one: Generation) -> tuple[int, int]:
    """How many guessed ids of the prediction, which is the last draft, were right, and how many there were."""
    last = len(one.drafts) - 1
    guessed = sum(each.drafts.count(last) for each in one.rounds)
    return sum(each.drafts[node] == last for each in one.rounds for node in each.right), guessed


def timings(read: int, ended: Sequence[Generation], until_first: float, generating: float) -> dict[str, float]:
    """Timings under the names of llama.cpp's server. `read`: how many prompt ids. `until_first`: seconds to the first text."""
    return {
        **_timing("prompt", read, until_first),
        **_timing("predicted", sum(len(one.token_ids) for one in ended), generating),
        "draft_n": sum(one.stats.proposed for one in ended),
        "draft_n_accepted": sum(one.stats.accepted for one in ended),
    }


def _timing(name: str, count: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": count,
        f"{name}_ms": seconds * 1000,
        f"{name}_per_token_ms": seconds * 1000 / count if count else 0.0,
        f"{name}_per_second": count / seconds if seconds else 0.0,
    }
