"""The rounds of a sequence: the tokens that each committed, who guessed them, and what else was guessed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from xtok.align.text import utf8_decoder
from xtok.decoding.rounds import run_one
from xtok.decoding.sequence import Round
from xtok.decoding.sequence import Sequence as Generating
from xtok.models.modes import Modes, within


class Token(NamedTuple):
    """A new token. `text`: the whole characters that it completes. `draft`: who guessed it; None for the target's own pick."""

    id: int
    text: str
    draft: str | None


class Guess(NamedTuple):
    """A guessed token. `parent`: the number of the guess before it, or -1. `probability`: the draft's, of it and all before it,
    if it gives one. `draft`: who guessed it; None for a token carried over from the round before.
    """

    id: int
    text: str
    parent: int
    probability: float | None
    draft: str | None


class WrittenRound(NamedTuple):
    """One forward pass of the target: its new `tokens`, the guesses, and the numbers of those that were `right`, in order."""

    tokens: list[Token]
    guesses: list[Guess]
    right: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": [token._asdict() for token in self.tokens],
            "guessed": [guess._asdict() for guess in self.guesses],
            "right": list(self.right),
        }


Committed: TypeAlias = tuple[Round, Sequence[int], Sequence[bytes], bool]
"""A round, the ids that it committed and their bytes, and whether the sequence ends there."""


def as_committed(sequence: Generating, modes: Modes) -> Iterator[Committed]:
    """Run a sequence, and give its rounds as they are committed. Between them the caller's own modes of torch apply."""
    rounds = run_one(sequence)
    while True:
        with within(modes):
            block = next(rounds, None)
        if block is None:
            return
        if block:
            is_last = sequence.finish_reason is not None
            yield sequence.rounds[-1], block, sequence.text.pieces[-len(block) :], is_last


def written_rounds(
    rounds: Iterable[Committed], drafts: Sequence[str], bytes_of: Callable[[int], bytes]
) -> Iterator[WrittenRound]:
    r"""Each round with its tokens and all that was guessed, as soon as it is there. The last one has what is left of an
    unfinished character. Bytes of guesses that are no whole characters are written as `\xe3`.
    """
    decoder, names = utf8_decoder(), dict[int | None, str | None](enumerate(drafts))
    for one, ids, pieces, is_last in rounds:
        sources = [names.get(one.drafts[node]) for node in one.right] + [None] * (len(ids) - len(one.right))
        texts = [decoder.decode(piece) for piece in pieces]
        texts[-1] += decoder.decode(b"", final=is_last)
        tokens = [Token(*each) for each in zip(ids, texts, sources, strict=True)]
        guessed = [bytes_of(token).decode(errors="backslashreplace") for token in one.tree.tokens]
        probabilities = one.tree.probabilities or [None] * len(one.tree)
        columns = one.tree.tokens, guessed, one.tree.parents, probabilities, map(names.get, one.drafts)
        yield WrittenRound(tokens, [Guess(*each) for each in zip(*columns, strict=True)], one.right)
