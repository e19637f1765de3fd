"""Prompts: texts and chats as ids, read as transformers reads them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral
from threading import Lock
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from xtok.errors import InvalidInputError, PromptWarning, UnsupportedArgumentError, shown, warn

Message = Mapping[str, Any]
Chat = Sequence[Message]
Prompt = str | Chat | Sequence[int] | Tensor | Mapping[str, Any]
"""A text, a chat, token ids, or a tokenizer's encoding."""


@dataclass(frozen=True)
class KnownPrompt:
    """A prompt with its ids, which aren't computed again. For several sequences after one text or chat."""

    prompt: Prompt
    ids: list[int]


_ROLES = ("user", "assistant", "system", "developer", "tool", "function")
_OF_CHATS = ("tools", "enable_thinking")
"""Arguments of chat templates that are arguments of `generate`, too. All others are given in `chat_template_kwargs`."""
_DECIDED = frozenset(
    {"conversation", "tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length", "tokenizer_kwargs"}
)
_ENCODED = frozenset({"input_ids", "attention_mask", "token_type_ids", "special_tokens_mask", "offset_mapping", "length"})
"""What a tokenizer's encoding may hold. Ids and mask are read; the others follow from the text."""

_READING = Lock()


@contextmanager
def reading(tokenizer: Any) -> Iterator[None]:
    """Let one thread at a time use the tokenizer: encoding sets a fast tokenizer's truncation, padding and control tokens.
    Afterwards they are restored.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    with _READING:
        if backend is None:
            yield
            return
        splits, truncation, padding = backend.encode_special_tokens, backend.truncation, backend.padding
        try:
            yield
        finally:
            backend.encode_special_tokens = splits
            if truncation is not None:
                backend.enable_truncation(**truncation)
            if padding is not None:
                backend.enable_padding(**padding)


def special_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special ids that a tokenizer puts before and after a text."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    ids, mask = list(encoded["input_ids"]), list(encoded["special_tokens_mask"])
    if 0 not in mask:
        return ids, []
    return ids[: mask.index(0)], ids[len(mask) - mask[::-1].index(0) :]


def prompt_ids(
    tokenizer: Any, prompt: Any, split_special_tokens: bool | None = None, template: Mapping[str, Any] | None = None
) -> list[int]:
    """A target's ids for a prompt. Ids are taken as they are. A text gets the tokenizer's leading special tokens, but no
    trailing end of text. A chat goes through the chat template, and gets no second BOS.

    `split_special_tokens`: None for the tokenizer's own setting. `template`: the arguments of the chat template.
    Raises `InvalidInputError` for a prompt that is none of these or has no ids, and for arguments that don't fit it.
    """
    template = template or {}
    _check_arguments(prompt, split_special_tokens, template)
    if is_ids(prompt):
        return _given_ids(prompt)
    if is_chat(prompt):
        ids = _chat_of_target(tokenizer, prompt, template)
    elif isinstance(prompt, str):
        ids = _text_ids(tokenizer, prompt, split_special_tokens)
    else:
        if isinstance(prompt, Mapping) and "role" in prompt:
            raise InvalidInputError(f"The prompt is one message, {shown(prompt)}. Put it in a list: generate([message]).")
        raise InvalidInputError(
            f"The prompt is {shown(prompt)}. Pass a text, a list of messages (role, content), token ids, a tokenizer's "
            "encoding, or a list of those."
        )
    ids = ids or [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None][:1]
    if not ids:
        raise InvalidInputError(
            f"The prompt {prompt!r} has no ids, and the target has no token that begins texts. Pass a text."
        )
    return ids


def _check_arguments(prompt: Any, split_special_tokens: Any, template: Mapping[str, Any]) -> None:
    """Raises `InvalidInputError` for invalid settings, and for those that are for another kind of prompt."""
    if not isinstance(split_special_tokens, bool | None):
        raise InvalidInputError(f"split_special_tokens is {split_special_tokens!r}; it must be True, False or None.")
    for name in sorted(_DECIDED & set(template)):  # padding, for one, may take any amount of memory
        raise InvalidInputError(f"{name} can't be set in chat_template_kwargs: xtok sets it itself. Leave it out.")
    kind = "token ids" if is_ids(prompt) else "a chat" if is_chat(prompt) else "a text"
    if template and kind != "a chat":
        raise InvalidInputError(
            f"{', '.join(template)} is for chats, and the prompt is {kind}. Leave it out, or pass a list of messages."
        )
    if split_special_tokens is not None and kind != "a text":
        raise InvalidInputError(f"split_special_tokens is for texts, and the prompt is {kind}. Leave it out.")


def read_prompt(tokenizer: Any, prompt: Any, arguments: dict[str, Any]) -> tuple[list[int], Any, dict[str, Any]]:
    """The ids of a prompt; the prompt itself, None if it is ids; and the arguments of the chat template. Those, and
    `split_special_tokens`, are removed from the call's `arguments`. Raises `InvalidInputError` for what is no prompt.
    """
    given, splits = arguments.pop("chat_template_kwargs", None), arguments.pop("split_special_tokens", None)
    if not (given is None or (isinstance(given, Mapping) and all(isinstance(name, str) for name in given))):
        raise InvalidInputError(
            f"chat_template_kwargs is {given!r}; give names and values, such as {{'enable_thinking': False}}."
        )
    named = {name: arguments.pop(name, None) for name in _OF_CHATS}
    template = {**(given or {}), **{name: value for name, value in named.items() if value is not None}}
    if isinstance(prompt, KnownPrompt):
        return prompt.ids, prompt.prompt, template
    ids = prompt_ids(tokenizer, prompt, splits, template)
    return ids, None if is_ids(prompt) else prompt, template


def _chat_of_target(tokenizer: Any, chat: Chat, template: Mapping[str, Any]) -> list[int]:
    for number, message in enumerate(chat, start=1):
        for text in message.values():
            _check_encodable(text)
        if not isinstance(message.get("role", ""), str):
            raise InvalidInputError(f"Message {number} of the chat has the role {shown(message['role'])}; it must be a text.")
        if "role" not in message:
            raise InvalidInputError(
                f"Message {number} of the chat has no role, only {', '.join(map(repr, message)) or 'nothing'}. "
                "Give each message as {'role': 'user', 'content': '…'}."
            )
        if message["role"] not in _ROLES:
            _check_role(message["role"], f"{getattr(tokenizer, 'chat_template', '')} {template.get('chat_template', '')}")
    try:
        ids = chat_ids(tokenizer, chat, template)
    except Exception as error:  # templates are programs, and refuse a chat by any error
        known = all(isinstance(message.get("content"), str) for message in chat)
        remedy = "" if known else " (contents should be texts)"
        raise InvalidInputError(f"The target's chat template refuses the chat{remedy}: {error}") from error
    if ids is None:
        raise InvalidInputError("The target's tokenizer has no chat template. Pass the prompt as a text.")
    if template.get("tools"):
        without = None
        with suppress(Exception):  # which a template may refuse
            without = chat_ids(tokenizer, chat, {**template, "tools": None})
        if ids == without:
            raise UnsupportedArgumentError(
                "The target's chat template ignores tools, so the model wouldn't see them. Leave tools out."
            )
    _check_rendered(tokenizer, chat, template)
    return ids


def _check_rendered(tokenizer: Any, chat: Chat, template: Mapping[str, Any]) -> None:
    """Raises `InvalidInputError` for a message of a system, a tool or the like that the template ignores, now and after the
    user's last message: some render the system message only there.
    """
    left, marked = set[int](), list[Message](chat)
    for number, message in enumerate(chat):
        if message["role"] not in ("user", "assistant") and isinstance(message.get("content"), str) and message["content"]:
            left.add(number)
            mark = f"xtok{number}mark"  # at both ends, of which templates may cut one
            marked[number] = {**message, "content": f"{mark} {message['content']} {mark}"}
    last = max((number for number, message in enumerate(chat) if message["role"] == "user"), default=len(chat) - 1)
    for end in (len(chat), last + 1) if left else ():
        try:
            seen = _applied(tokenizer, marked[:end], template, tokenize=False)
        except Exception:  # it depends on what the contents are
            return
        left -= set(map(int, re.findall(r"xtok(\d+)mark", seen)))
    if left:
        number = min(left)
        raise InvalidInputError(
            f"The target's chat template ignores message {number + 1} of the chat, of role {shown(chat[number]['role'])}, so "
            "the model wouldn't see it. Give it another role, or leave it out."
        )


def _check_role(role: str, template: str) -> None:
    """Raises `InvalidInputError` for a role that is nearly one of the usual ones and isn't in the template: it is misspelt."""
    near = get_close_matches(role, _ROLES, 1, cutoff=0.7)
    if near and role not in template:
        raise InvalidInputError(f"A message has the role {shown(role)}. Did you mean {near[0]!r}?")


def is_ids(prompt: Any) -> bool:
    """Whether a prompt is token ids, whatever holds them: a list of whole numbers, a tensor, an array, or an encoding."""
    return _is_encoding(prompt) or hasattr(prompt, "tolist") or (_is_list(prompt) and bool(prompt) and all(map(_is_id, prompt)))


def is_several(prompt: Any) -> bool:
    """Whether it is a list of prompts. A list of whole numbers is one prompt, and so is a list of messages."""
    return _is_list(prompt) and not is_chat(prompt) and not is_ids(prompt)


def _is_list(given: Any) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, (str, bytes))


def _is_id(given: Any) -> bool:
    return isinstance(given, Integral) and not isinstance(given, bool)


def _is_encoding(prompt: Any) -> bool:
    return isinstance(prompt, Mapping) and "input_ids" in prompt


def _given_ids(prompt: Any) -> list[int]:
    """The ids of one text, without padding. Raises `InvalidInputError` for anything else."""
    if not _is_encoding(prompt):
        return _row(prompt)
    if others := sorted(set(prompt) - _ENCODED):
        raise InvalidInputError(
            f"The encoding has {', '.join(others)}, which a prompt can't have. Use target.generate(…, custom_generate=xt)."
        )
    ids, mask = _row(prompt["input_ids"]), prompt.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        mask = mask.long()
    seen = [1] * len(ids) if mask is None else _row(mask)
    if len(seen) != len(ids):
        raise InvalidInputError(f"The attention_mask has {len(seen)} values for {len(ids)} input_ids. Give one for each.")
    return [token for token, one in zip(ids, seen, strict=True) if one]


def _row(given: Any) -> list[int]:
    """The whole numbers of a list, or of a tensor of shape (n,) or (1, n)."""
    try:
        row = given.tolist() if hasattr(given, "tolist") else list(given)
    except TypeError as error:
        raise InvalidInputError(f"The prompt's ids are {given!r}. Give a list of whole numbers, or a tensor.") from error
    if isinstance(row, list) and row and _is_list(row[0]):
        if len(row) > 1:
            raise InvalidInputError(
                f"The prompt holds the ids of {len(row)} texts. Pass a list of prompts, each with ids of its own."
            )
        row = row[0]
    wrong = [row] if not isinstance(row, list) else [one for one in row if not (_is_id(one) and -(1 << 63) <= one < 1 << 63)]
    if wrong:
        raise InvalidInputError(f"The prompt's ids hold {wrong[0]!r}. Give whole numbers, as a list or a tensor of shape (n,).")
    if not row:
        raise InvalidInputError("The prompt has no ids. Pass at least one, such as the token that begins texts.")
    return [int(one) for one in row]


def _check_encodable(text: Any) -> None:
    """Raises `InvalidInputError` for half of a surrogate pair, for which tokenizers only report a wrong type."""
    try:
        str.encode(text) if isinstance(text, str) else None
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"The prompt has {text[error.start]!r} at index {error.start}, half of a surrogate pair, which UTF-8 can't encode. "
            "Leave it out, or pass the whole character."
        ) from error


def _text_ids(tokenizer: Any, text: str, split_special_tokens: bool | None) -> list[int]:
    _check_encodable(text)
    splits = {} if split_special_tokens is None else {"split_special_tokens": split_special_tokens}
    with reading(tokenizer):
        before, after = special_ids(tokenizer)
        ids = list(tokenizer(text, add_special_tokens=False, **splits)["input_ids"])
    has_own = getattr(tokenizer, "chat_template", None) is not None and ids[: len(before)] == before
    ids = ids if has_own else [*before, *ids]
    if after and tokenizer not in _WARNED:
        _WARNED.add(tokenizer)
        ends = "".join(tokenizer.convert_ids_to_tokens(after))
        same = "" if before else " tokenizer(prompt, add_special_tokens=False) leaves it out, too."
        warn(
            f"The target's tokenizer puts {ends} after a prompt. xtok leaves it out, so that the text can go on. "
            f"To keep it, write it out: generate(prompt + {ends!r}).{same}",
            PromptWarning,
        )
    return ids


_WARNED: WeakSet[Any] = WeakSet()
"""The tokenizers for which a warning was given already that they end prompts."""


def is_chat(prompt: Any) -> bool:
    """Whether it is a list of messages. Encodings are none."""
    messages = _is_list(prompt) and len(prompt) > 0 and all(isinstance(message, Mapping) for message in prompt)
    return messages and not any(map(_is_encoding, prompt))


def chat_ids(tokenizer: Any, chat: Chat, template: Mapping[str, Any]) -> list[int] | None:
    """A chat's ids, by the tokenizer's own chat template; None if it has none. Raises whatever the template raises."""
    if getattr(tokenizer, "chat_template", None) is None and "chat_template" not in template:
        return None
    return list(_applied(tokenizer, chat, template, return_dict=True)["input_ids"])


def _applied(tokenizer: Any, chat: Chat, template: Mapping[str, Any], **more: Any) -> Any:
    begins = {"add_generation_prompt": not template.get("continue_final_message", False)}
    with reading(tokenizer):
        return tokenizer.apply_chat_template(list(chat), **{**begins, **template, **more})
