"""Prompts: texts and chats as ids, read as transformers reads them."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any
from weakref import WeakSet

from xtok.errors import InvalidInputError, PromptWarning

Message = Mapping[str, str]
Chat = Sequence[Message]

_READING = Lock()


@contextmanager
def reading(tokenizer: Any) -> Iterator[None]:
    """One thread at a time, for reading sets truncation, padding and control tokens of a fast tokenizer. They are put back."""
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


def leading(tokenizer: Any) -> list[int]:
    """The special ids that a tokenizer puts in front of a text."""
    return _around(tokenizer)[0]


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special ids that a tokenizer puts in front of a text and behind it."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    ids, mask = list(encoded["input_ids"]), list(encoded["special_tokens_mask"])
    if 0 not in mask:
        return ids, []
    return ids[: mask.index(0)], ids[len(mask) - mask[::-1].index(0) :]


def prompt_ids(tokenizer: Any, prompt: Any, split_special_tokens: bool | None = None) -> list[int]:
    """A target's ids for a text or a chat: its tokenizer's leading special tokens, never a trailing end of text.

    `split_special_tokens` is None where the tokenizer's own setting counts. Raises `InvalidInputError` for
    another value of it, and for a prompt that can't be read as a text or a chat or has no ids.
    """
    if not isinstance(split_special_tokens, bool | None):
        raise InvalidInputError(f"split_special_tokens is {split_special_tokens!r}; it must be True, False or None.")
    for text in [value for message in prompt for value in message.values()] if is_chat(prompt) else [prompt]:
        _check_encodable(text)
    if is_chat(prompt):
        ids = chat_ids(tokenizer, prompt)
        if ids is None:
            raise InvalidInputError("The target's tokenizer has no chat template. Pass the prompt as a text.")
    elif isinstance(prompt, str):
        ids = _text_ids(tokenizer, prompt, split_special_tokens)
    else:
        raise InvalidInputError(
            f"A prompt is {type(prompt).__name__}. Pass a text, a list of messages (role, content), or a list of those."
        )
    ids = ids or [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None][:1]
    if not ids:
        raise InvalidInputError(f"The prompt {prompt!r} has no ids, and the target has no token to begin with. Pass a text.")
    return ids


def _check_encodable(text: Any) -> None:
    """Refuse half a surrogate pair, of which tokenizers only say that its type is wrong."""
    try:
        str.encode(text) if isinstance(text, str) else None
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"The prompt has {text[error.start]!r} at {error.start}, half a character that UTF-8 can't hold. "
            "Leave it out, or put together what it was cut from."
        ) from error


def _text_ids(tokenizer: Any, text: str, split_special_tokens: bool | None) -> list[int]:
    splits = {} if split_special_tokens is None else {"split_special_tokens": split_special_tokens}
    with reading(tokenizer):
        front, behind = _around(tokenizer)
        ids = [*front, *tokenizer(text, add_special_tokens=False, **splits)["input_ids"]]
    if behind and tokenizer not in _TOLD:
        _TOLD.add(tokenizer)
        told = "".join(tokenizer.convert_ids_to_tokens(behind))
        same = "" if front else " tokenizer(prompt, add_special_tokens=False) leaves it out, too."
        warnings.warn(
            f"The target's tokenizer puts {told} behind a prompt. xtok leaves it out, so that the text goes on. "
            f"To keep it, write it out: generate(prompt + {told!r}).{same}",
            PromptWarning,
            stacklevel=2,
        )
    return ids


_TOLD: WeakSet[Any] = WeakSet()
"""The tokenizers of which was told that they end prompts."""


def is_chat(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and all(isinstance(message, Mapping) for message in prompt)


def is_many(prompt: Any) -> bool:
    """Whether it is several texts or chats."""
    several = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes)
    return several and all(isinstance(one, str) or is_chat(one) for one in prompt)


def chat_ids(tokenizer: Any, chat: Chat) -> list[int] | None:
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    with reading(tokenizer):
        ids = tokenizer.apply_chat_template(list(chat), add_generation_prompt=True, return_dict=True)["input_ids"]
    return list(ids)
