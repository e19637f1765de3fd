"""The objects of completions and chats: whole ones and chunks, messages, and log-probabilities."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from xtok.serving.http.answers import Answer
from xtok.serving.http.processors import Picked
from xtok.serving.http.protocol import Chat, RequestError
from xtok.serving.http.reading import Part


class Choices(Answer):
    """The answer to a completion or a chat."""

    ending = ("[DONE]",)

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """All chunks. If `usage` was requested, each has it, and it is None in all but the last."""
        more: dict[str, Any] = {"usage": None} if self.body.includes_usage else {}
        for index in range(len(self.submissions)) if self._chats else ():
            yield self._object([self._choice(index, {"role": "assistant", "content": ""})], more)
        async with aclosing(self.events()) as found:
            async for event in found:
                picked = event.picked
                for part in event.parts or ([Part("content", "")] if picked else []):
                    yield self._object([self._choice(event.choice, self._delta(event.choice, part), picked)], more)
                    picked = []
                if event.ended:
                    ending = self._choice(event.choice, {}, reason=self.finish_reason(event.choice))
                    yield self._object([ending], {**more, **self.figures()})
        if self.body.includes_usage:
            yield self._object([], {"usage": self.usage()})

    def whole(self) -> dict[str, Any]:
        choices = [
            self._choice(index, self._message(index), picked, self.finish_reason(index), said="message")
            for index, picked in enumerate(self.picked)
        ]
        return self._object(choices, {"usage": self.usage(), **self.figures()}, suffix="")

    def failed(self, error: RequestError) -> dict[str, Any]:
        return error.body

    @property
    def _chats(self) -> bool:
        return isinstance(self.body, Chat)

    def _object(self, choices: list[dict[str, Any]], more: dict[str, Any], suffix: str = ".chunk") -> dict[str, Any]:
        name, kind = ("chatcmpl", f"chat.completion{suffix}") if self._chats else ("cmpl", "text_completion")
        known = {"id": f"{name}-{self.context.id}", "object": kind, "created": self.created, "model": self.service.name}
        return {**known, "choices": choices, **more}

    def _choice(
        self,
        index: int,
        message: dict[str, Any],
        picked: list[Picked] | None = None,
        reason: str | None = None,
        said: str = "delta",
    ) -> dict[str, Any]:
        """A text, or a further piece of it. `picked` is None if there is nothing to report."""
        content = {said: message} if self._chats else {"text": message.get("content") or ""}
        logprobs = None if picked is None or self.body.top is None else self._logprobs(picked)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _message(self, index: int) -> dict[str, Any]:
        written = self.written[index]
        content, reasoning, calls = written.text("content"), written.text("reasoning"), list(map(call_of, written.calls))
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        return message | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})

    def _delta(self, index: int, part: Part) -> dict[str, Any]:
        if part.kind == "call":
            return {"tool_calls": [{"index": self.written[index].calls.index(part), **call_of(part)}]}
        return {"content" if part.kind == "content" else "reasoning_content": part.text}

    def _logprobs(self, picked: list[Picked]) -> dict[str, Any]:
        if self._chats:
            content = [
                {**self._entry(one.id, one.logprob), "top_logprobs": [self._entry(*pair) for pair in one.top or ()]}
                for one in picked
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [self._text(one.id)[0] for one in picked],
            "token_logprobs": [one.logprob for one in picked],
            "top_logprobs": [
                None if one.top is None else {self._text(token)[0]: logprob for token, logprob in one.top} for one in picked
            ],
            "text_offset": [one.offset for one in picked],
        }

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text, data = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": list(data)}

    def _text(self, token: int) -> tuple[str, bytes]:
        r"""A token's text and bytes. Bytes that are no whole characters are written `bytes:\xe3\x81`, as by OpenAI."""
        data = self.xt.target.vocabulary.view[token]
        if data is None:
            return str(self.xt.tokenizer.convert_ids_to_tokens(token)), b""
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data


def call_of(part: Part) -> dict[str, Any]:
    return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.text}}
