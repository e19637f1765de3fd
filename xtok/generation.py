"""What a prompt was answered with, and its trace: who each token is from, and what else was guessed."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from xtok.align.text import characters
from xtok.page import Guess, Shown, page, section
from xtok.stats import Round, Stats


class Token(NamedTuple):
    """A new token. `text`: the whole characters that it completes. `draft`: who guessed it; None for the target's own pick."""

    id: int
    text: str
    draft: str | None


@dataclass(frozen=True, repr=False)
class Generation:
    """What a prompt was answered with.

    `finish_reason` is "length" where a limit of length or time ended the text, else "stop". `rounds` tells what happened.
    `seed` gives the texts of a call again, by any draft or none; it is None for greedy ones.
    `scores` and `logits`, one of shape (1, vocabulary) per new id: where `return_dict_in_generate` and `output_scores`
    or `output_logits` ask for them.
    `drafts`: their names; rounds tell of them by their places here. `pieces`: the bytes of each new id, none for a control
    token. `spelled`: those of guessed ids.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    rounds: tuple[Round, ...]
    seed: int | None = None
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    drafts: tuple[str, ...] = ()
    pieces: tuple[bytes, ...] = ()
    spelled: Mapping[int, bytes] = field(default_factory=dict)

    def __repr__(self) -> str:
        told = f"{len(self.token_ids)} tokens, {self.stats.target_forwards} target forwards, {self.finish_reason!r}"
        return f"Generation({self.text!r}, {told})"

    @property
    def tokens(self) -> list[Token]:
        """The new tokens, and who each is from.

        Law: their texts joined are `text`.
        """
        return [token for block in self._blocks() for token in block]

    def _blocks(self) -> Iterator[list[Token]]:
        """The tokens of each round."""
        return told(self._committed(), self.drafts)

    def _committed(self) -> Iterator["Committed"]:
        end = 0
        for one in self.rounds:
            start, end = end, end + one.committed
            yield Committed(one, self.token_ids[start:end], self.pieces[start:end], end == len(self.token_ids))

    def to_dict(self) -> dict[str, Any]:
        r"""All but `scores` and `logits`, in values that JSON has. Bytes that are no whole characters are written as `\xe3`.

        A round's `guessed` is a tree: a guess's `parent` is the number of an earlier one, or -1. `right`: the numbers of
        those that came true, in order.
        """
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "drafts": list(self.drafts),
            "stats": {
                **asdict(self.stats),
                "accepted_by_draft": list(self.stats.accepted_by_draft),
                "tokens_per_forward": self.stats.tokens_per_forward,
                "acceptance_rate": self.stats.acceptance_rate,
            },
            "tokens": [one._asdict() for one in self.tokens],
            "rounds": [
                {
                    "offset": one.offset,
                    "committed": one.committed,
                    "right": list(one.right),
                    "guessed": [guess._asdict() for guess in self._guesses(one)],
                }
                for one in self.rounds
            ],
        }

    def _guesses(self, one: Round) -> list[Guess]:
        masses = one.tree.masses or [None] * len(one.tree)
        return [
            Guess(token, self.spelled.get(token, b"").decode(errors="backslashreplace"), parent, mass, self.drafts[draft])
            for token, parent, mass, draft in zip(one.tree.tokens, one.tree.parents, masses, one.drafts, strict=True)
        ]

    def save_trace(self, file: str | PathLike[str]) -> None:
        """Write `to_dict` to a file, as JSON."""
        Path(file).write_text(json.dumps(self.to_dict(), ensure_ascii=False) + "\n", encoding="utf-8")

    def to_html(self) -> str:
        """A page for a browser, all in one file: the text tinted by who guessed it, each round's guesses, and the counts."""
        return page(self._shown(), self.drafts, self.stats)

    def _repr_html_(self) -> str:
        """As `to_html`, for notebooks."""
        return section(self._shown(), self.drafts, self.stats)

    def _shown(self) -> Iterator[Shown]:
        """The rounds, with the tokens that came of each."""
        for one, block in zip(self.rounds, self._blocks(), strict=True):
            yield Shown([(token.text, token.draft) for token in block], self._guesses(one), set(one.right))


class Committed(NamedTuple):
    """A round, the ids that it committed and their bytes, and whether the text ends there."""

    round: Round
    ids: Sequence[int]
    pieces: Sequence[bytes]
    is_last: bool


def told(rounds: Iterable[Committed], drafts: Sequence[str]) -> Iterator[list[Token]]:
    """The tokens of each round as soon as it is there. The last of a text has what is left of an unfinished character."""
    decoder = characters()
    for one in rounds:
        guessed = [drafts[one.round.drafts[node]] for node in one.round.right]
        sources = guessed + [None] * (len(one.ids) - len(guessed))
        texts = [decoder.decode(piece) for piece in one.pieces]
        texts[-1] += decoder.decode(b"", final=one.is_last)
        yield [Token(*each) for each in zip(one.ids, texts, sources, strict=True)]
