"""From the committed ids to a guess in the target's ids, by a draft that knows how the text goes on."""

from collections.abc import Sequence
from copy import deepcopy
from itertools import permutations

import pytest
import torch
from tokenizers import normalizers, pre_tokenizers
from worlds import FAMILIES, fitting, mostly_deep, tokenizer

from xtok import Budget, Context, Tree
from xtok.align.continuation import Continuation
from xtok.align.encoding import encoder
from xtok.align.tokenbytes import token_bytes
from xtok.drafts.cross_tokenizer import CrossTokenizerDrafter
from xtok.drafts.meter import Meter
from xtok.drafts.reader import Reader
from xtok.models.forwards import Answer, ForwardRequest
from xtok.models.load import draft_model
from xtok.models.timing import Cost

TEXT = "吾輩は猫である。名前はまだ無い。どこで生れたか"
END = 2


class Speaker:
    """A slot in a draft whose every logit says how `truth`, its own ids of the whole text, goes on, and then the end."""

    device, vocabulary, chunk, shares, limit = torch.device("cpu"), 700, 5, False, None

    def __init__(self, truth: Sequence[int]) -> None:
        self.truth = tuple(truth)
        self.server = self
        self.forwards = 0
        self.start_anew()

    @property
    def length(self) -> int:
        return len(self.trunk)

    @property
    def branched(self) -> int:
        return len(self.paths)

    def adopt(self, ids: Sequence[int]) -> int:
        return 0

    def start_anew(self) -> None:
        self.trunk, self.paths = tuple[int, ...](), tuple[tuple[int, ...], ...]()

    def roll_back(self, length: int) -> bool:
        assert length <= self.length
        self.trunk, self.paths = self.trunk[:length], ()
        return True

    def groups(self, asks: Sequence[ForwardRequest]) -> list[list[ForwardRequest]]:
        return [[ask] for ask in asks]

    def serve(self, asks: Sequence[ForwardRequest]) -> list[Answer]:
        (ask,) = asks
        assert ask.rows <= len(ask.ids)
        kept = len(ask.ids) - len(ask.parents)
        self.trunk += tuple(ask.ids[:kept])
        for token, parent in zip(ask.ids[kept:], ask.parents, strict=True):
            before = self.paths[parent] if parent >= 0 else self.trunk[: len(self.trunk) + parent + 1]
            self.paths = (*self.paths, (*before, token))
        prefixes = [self.trunk[: len(self.trunk) - row] for row in reversed(range(kept))]
        said = self._said([*prefixes, *self.paths[self.branched - len(ask.parents) :]][-ask.rows :])
        return [Answer(said, None, Cost(len(ask.ids), 1e-3))]

    def _said(self, paths: Sequence[tuple[int, ...]]) -> torch.Tensor:
        logits = torch.zeros(len(paths), self.vocabulary)
        for row, path in zip(logits, paths, strict=True):
            known = len(path) < len(self.truth) and path == self.truth[: len(path)]
            row[self.truth[len(path)] if known else END] = 9
        return logits


def speaker(target: str, draft: str, text: str = TEXT) -> CrossTokenizerDrafter:
    tokens, draft_tokens = tokenizer(target), tokenizer(draft)
    made = draft_model((fitting(draft_tokens, "Llama", 0), draft_tokens))
    reader = Reader(made, Meter(), slot=Speaker([*made.lead, *made.vocabulary.encoder.ids(text)]))
    return CrossTokenizerDrafter(made, reader, Continuation(encoder(tokens, token_bytes(tokens))), END, Meter())


def proposed(
    drafter: CrossTokenizerDrafter, target: str, before: str, draft_tokens: int = 4, target_tokens: int = 20, width: int = 1
) -> Tree:
    ids = tokenizer(target)(before, add_special_tokens=False).input_ids
    return drafter.propose(
        Context(ids, before.encode(), 0), Budget(draft_tokens, width, longest=target_tokens, schedule="constant")
    )


NORMAL = sorted(set(FAMILIES) - {"WordPiece", "byte-level BPE with a prefix space"})
NEIGHBOURS = set(zip(NORMAL, [*NORMAL[3:], *NORMAL[:3]], strict=True))
"""Each of them with two others, as a target and as a draft."""


@pytest.mark.parametrize(("target", "draft"), mostly_deep(permutations(NORMAL, 2), NEIGHBOURS))
def test_a_guess_decodes_to_how_the_text_goes_on(target: str, draft: str) -> None:
    view = token_bytes(tokenizer(target))
    guessed = 0
    for size in range(2, len(TEXT) - 4):
        tree = proposed(speaker(target, draft), target, TEXT[:size])
        decoded = view.to_bytes(tree.tokens, before=b"x")
        assert TEXT[size:].encode().startswith(decoded)
        guessed += bool(decoded)
    assert guessed > 5


@pytest.mark.parametrize("target", NORMAL)
def test_the_drafts_end_of_text_becomes_the_targets(target: str) -> None:
    tree = proposed(speaker(target, "byte-level BPE", "吾輩は猫"), target, "吾輩は猫")
    assert tree.tokens == (END,)


def test_a_guess_is_no_deeper_than_the_budget_allows() -> None:
    assert len(proposed(speaker("characters", "byte-level BPE"), "characters", "吾輩は", 8, 3)) == 3


def test_the_last_draft_token_of_the_context_is_healed_into_a_longer_one() -> None:
    """Cut inside one of its tokens, the draft starts its guess with the rest of that token."""
    pieces = [piece.replace("▁", "") for piece in tokenizer("SentencePiece BPE").tokenize(TEXT)]
    at = next(i for i, piece in enumerate(pieces) if i and len(piece) > 1)
    before = "".join(pieces[:at]) + pieces[at][0]
    tree = proposed(speaker("characters", "SentencePiece BPE"), "characters", before, draft_tokens=1)
    assert token_bytes(tokenizer("characters")).to_bytes(tree.tokens).decode() == pieces[at][1:]


def test_a_guess_is_cut_as_the_target_lately_cut_the_same_bytes() -> None:
    tokens = tokenizer("byte-level BPE")
    view = token_bytes(tokens)
    single = [view.ids_of_bytes(bytes([byte]))[0] for byte in "は猫".encode()]
    start = view.ids_of_bytes(b"-")[0]
    continuation = Continuation(encoder(tokens, view))
    committed = [start, *single, start]
    assert continuation.ids(committed, "は猫".encode()) == single
    assert Continuation(encoder(tokens, view)).ids([start], "は猫".encode()) != single


def test_a_guess_is_cut_in_place_by_a_tokenizer_that_strips_spaces() -> None:
    """As SentencePiece does by itself. Where the looked-at ids began with a space, the cut was sought one byte too late."""
    tokens = deepcopy(tokenizer("Unigram without fallback"))
    tokens.backend_tokenizer.normalizer = normalizers.Strip()
    tokens.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    reading = encoder(tokens, token_bytes(tokens))
    truth = reading.ids("a b c d e f")
    for done in range(1, len(truth)):
        rest = b"a b c d e f"[len(reading.view.to_bytes(truth[:done])) :]
        assert Continuation(reading).ids(truth[:done], rest) == truth[done:]
