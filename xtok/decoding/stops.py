"""`StopStrings`: stop strings, matched on the bytes of ids."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from xtok.align.vocabulary import Vocabulary
from xtok.errors import InvalidInputError


class StopStrings(StoppingCriteria):
    """Stops a sequence at the first token that completes a stop string, as transformers' `StopStringCriteria` does: a string
    may begin in the prompt, and a control token counts as its name (`</s>`).

    Unlike transformers', it needs no table of the vocabulary for each set of strings, and with every tokenizer it finds
    characters that are spread over tokens. A check takes time linear in the length of the strings.

    Raises `InvalidInputError` unless `strings` is a text, or a list of one or more.
    """

    def __init__(self, vocabulary: Vocabulary, strings: str | Iterable[str]) -> None:
        try:
            found = [strings] if isinstance(strings, str) else list(strings)
            self._stops = [stop.encode() for stop in found]
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidInputError(f"stop_strings is {strings!r}; give a text or a list of texts ({error}).") from error
        if isinstance(strings, Iterator):
            raise InvalidInputError(
                f"stop_strings is {strings!r}, an iterator, which can be read only once. Give a text or a list."
            )
        if not found:
            raise InvalidInputError(f"stop_strings is {strings!r}, which is empty. Give at least one text, or leave it out.")
        self._vocabulary = vocabulary
        self._longest = max(map(len, self._stops))

    def __deepcopy__(self, memo: dict[int, Any]) -> "StopStrings":
        """The same object, since it keeps no state."""
        return self

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Whether each row, (rows, length), ends with a token that completes a string; (rows,), bool."""
        rows: Tensor = input_ids
        return torch.tensor([self.completed(row) for row in rows.tolist()], dtype=torch.bool, device=rows.device)

    def completed(self, ids: Sequence[int]) -> bool:
        """Whether the last of `ids` completes a stop string."""
        last = self._bytes_of(ids[-1])
        before, size, index = list[bytes](), 0, len(ids) - 1
        while index and size + 1 < self._longest:
            index -= 1
            before.append(self._bytes_of(ids[index]))
            size += len(before[-1])
        text = b"".join(reversed(before)) + last
        return any(text.find(stop, max(size + 1 - len(stop), 0)) >= 0 for stop in self._stops)

    def _bytes_of(self, token: int) -> bytes:
        piece = self._vocabulary.view[token]
        if piece is not None:
            return piece
        tokenizer = self._vocabulary.tokenizer
        name = tokenizer.convert_ids_to_tokens(token) if token < len(self._vocabulary.view) else None
        if name is None:
            return b"\xff"  # no text has this byte: an id without a token ends all matches
        text: str = tokenizer.convert_tokens_to_string(["a", name])  # with the space that some decoders put in front of it
        return text.removeprefix("a").encode()
