"""Sampled texts are draws from the target's distribution, shown against exact probabilities by a chi-square test that can fail.

A target and a draft small enough to compute with: their logits depend on the last id alone. Everything else (the loop, the
pick, the noise, the drafter) is the real thing.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chances import chi_square
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from worlds import fitting, scaled, tokenizer

from xtok import Budget, XTokAssisted
from xtok.align.text import SequenceText
from xtok.align.tokenbytes import TokenBytes
from xtok.align.vocabulary import Projection, bytes_key, noise_keys, projection
from xtok.decoding.pick import Picker
from xtok.decoding.rounds import run_one
from xtok.decoding.sequence import Sequence as Written
from xtok.drafts.acceptance import DrawnChains, rejection
from xtok.drafts.base import Drafter
from xtok.drafts.meter import Meter
from xtok.drafts.policy.policy import DraftPolicy, Policy
from xtok.drafts.projected import Candidates, ProjectedDrafter
from xtok.drafts.reader import Reader
from xtok.drafts.session import Session
from xtok.models.cache_set import Slots
from xtok.models.forwards import Answer, Ask, Steps
from xtok.models.timing import Cost
from xtok.sampling.noise import Noise, gumbel, noise

SEEDS, FEWER, LENGTH, GUESS_LENGTH = scaled(8_000), scaled(4_000), 5, 3
ENOUGH, SUBTLE = 2_000, 6_000
"""How many texts betray a sampler that is wrong, and one that is hardly wrong."""
PASSES, FAILS, TAIL = 1e-3, 1e-6, 1e-2
START, END = 0, 1
TARGET = TokenBytes((None, None, None, b"A", b"A", b"B", b"AB", b"C"), "test")
"""Ids 0 to 2 decode to nothing, ids 3 and 4 to the same."""
DRAFT = TokenBytes((b"B", b"AB", b"A", b"D", None, b"CA", b"C", b"A"), "test")
DRAFT_END = 4


def table(seed: int, size: int) -> torch.Tensor:
    return torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TARGET_LOGITS, DRAFT_LOGITS = table(0, len(TARGET)), table(1, len(DRAFT))
JOINED = TokenBytes((None, None, b" .", b" ,", b" !", b" -", b" ?", b" ;"), "test", joins_words=True)
"""A target that drops the space in front of a mark: a token's own bytes aren't what it adds to the text."""
MARKS = TokenBytes((None, None, b".", b",", b"!", b"-", b"?", b";"), "test")


class TableModel:
    """What the loop asks of a slot in a target, from a table: the logits after the last id."""

    vocabulary, device, chunk, shares, most = len(TARGET), torch.device("cpu"), None, False, None
    fixed, tolerance = False, 0.0

    def __init__(self) -> None:
        self.server = self
        self.length = self.branched = self.forwards = 0

    def takes(self, new: int, prompt: int) -> int:
        return new

    def guesses(self, new: int) -> int:
        return sys.maxsize

    def groups(self, asks: Sequence[Ask]) -> list[list[Ask]]:
        return [[ask] for ask in asks]

    def serve(self, asks: Sequence[Ask]) -> list[Answer]:
        (ask,) = asks
        self.branched = len(ask.parents)
        self.length += len(ask.ids) - self.branched
        self.forwards += 1
        return [Answer(TARGET_LOGITS[list(ask.ids[-ask.rows :])], None, Cost(len(ask.ids), 1e-3))]

    def keep(self, path: Sequence[int]) -> None:
        self.length, self.branched = self.length + len(path), 0


class TableReader(Reader):
    """What a drafter asks of a draft model, from a table."""

    def __init__(self, view: TokenBytes) -> None:
        self.view = view
        self._ids_of = {}
        self._draft: Any = SimpleNamespace(vocabulary=SimpleNamespace(view=view, size=len(view), ends=frozenset()))

    def longest(self, guess: int) -> int:
        return guess

    size = 1

    def read(self, context: Any, guess: int) -> bytes:
        self.seen = self.view.ids_of_bytes(context.data[-1:])[0]
        return b""

    branched = 0

    def holds(self, tokens: int) -> bool:
        return True

    def logits(self, rows: int, rest: Sequence[int] = ()) -> Steps[torch.Tensor]:
        yield from ()
        return DRAFT_LOGITS[[self.seen]]

    def branch(self, tokens: list[int], parents: list[int]) -> Steps[torch.Tensor]:
        yield from ()
        return DRAFT_LOGITS[tokens]


@cache
def candidates(view: TokenBytes, own: TokenBytes, keys: tuple[int, ...]) -> Candidates:
    ids = torch.arange(2, len(view))
    same = Projection(ids, ids, torch.ones(len(ids), dtype=torch.float64))
    seen = projection(view, DRAFT) if own is DRAFT else same
    return Candidates(seen, len(own), torch.tensor(keys), [DRAFT_END] if own is DRAFT else [], END)


def drafter(mode: str, keys: torch.Tensor, view: TokenBytes) -> ProjectedDrafter | DrawnChains | None:
    """What a drafter asks of a draft's tables is little."""
    if mode == "no draft":
        return None
    own = DRAFT if view is TARGET else MARKS
    tables: Any = SimpleNamespace(
        model=SimpleNamespace(device=torch.device("cpu")),
        vocabulary=SimpleNamespace(view=own, size=len(own), ends=frozenset([DRAFT_END] if own is DRAFT else [])),
        branches=True,
    )
    seen = candidates(view, own, tuple(keys.tolist()))
    made = ProjectedDrafter(tables, TableReader(own), seen, view, Meter(), LogitsProcessorList())
    return DrawnChains(made) if mode == "rejection" else made


class Made:
    """A draft that starts one drafter."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    def start(self, request: Any) -> Drafter:
        return self.drafter


def session_of(made: Drafter, view: TokenBytes, root: Noise) -> Session:
    request: Any = SimpleNamespace(meter=Meter(), vocabulary=SimpleNamespace(size=len(view), view=view))
    return Session([Made(made)], request, Policy([DraftPolicy()]), [5], root)


LONGEST: Counter[str] = Counter()


def sampled(mode: str, seed: int, keys: torch.Tensor, view: TokenBytes = TARGET) -> tuple[int, ...]:
    model: Any = TableModel()
    prompt = torch.tensor([[5]])
    root, meter = noise(seed, 0, b"B"), Meter()
    guessing = drafter(mode, keys, view)
    text = Written(
        slot=model,
        ids=prompt,
        text=SequenceText(view, [5]),
        picker=Picker(LogitsProcessorList(), meter, root, keys, rejection if mode == "rejection" else None),
        criteria=StoppingCriteriaList([MaxLengthCriteria(1 + LENGTH), EosTokenCriteria(END)]),
        config=GenerationConfig(max_length=1 + LENGTH, do_sample=True),
        drafting=partial(session_of, guessing, view, root) if guessing else None,
        budget=Budget(GUESS_LENGTH, width=3 if mode == "tree" else 1, schedule="constant"),
        deepest=None,
        meter=meter,
        slots=Slots(),
    )
    for _ in run_one(text):
        pass
    if text.error is not None:
        raise text.error
    LONGEST[mode] = max(LONGEST[mode], *(one.accepted for one in text.rounds))
    return tuple(text.new_ids)


def texts_of(
    mode: str, keys: torch.Tensor | None = None, view: TokenBytes = TARGET, seeds: int = SEEDS
) -> list[tuple[int, ...]]:
    keys = noise_keys(view, len(view)) if keys is None else keys
    return [sampled(mode, seed, keys, view) for seed in range(seeds)]


@cache
def exact() -> dict[tuple[int, ...], float]:
    """The probability of each text of at most `LENGTH` ids, ended by `END`."""
    probabilities = TARGET_LOGITS.softmax(dim=-1).tolist()

    def grow(text: tuple[int, ...], probability: float) -> Iterator[tuple[tuple[int, ...], float]]:
        if text[-1:] == (END,) or len(text) == LENGTH:
            yield text, probability
            return
        before = text[-1] if text else 5
        for token in range(len(TARGET)):
            yield from grow((*text, token), probability * probabilities[before][token])

    return dict(grow((), 1.0))


PARTS = (slice(0, 3), slice(2, 5), slice(2, 5, 2))
"""The first three ids; the last three, which several guesses of one round may have given; the third and the fifth."""


def p_value(texts: list[tuple[int, ...]]) -> float:
    """The least p-value of the joint distributions of some of the ids, corrected for how many there are."""
    return min(1.0, len(PARTS) * min(p_value_of(texts, part) for part in PARTS))


def p_value_of(texts: list[tuple[int, ...]], part: slice) -> float:
    expected: Counter[tuple[int, ...]] = Counter()
    for text, probability in exact().items():
        expected[text[part]] += probability  # type: ignore[assignment]
    counts = Counter(text[part] for text in texts)
    assert set(counts) <= set(expected)
    return chi_square(torch.tensor([counts[cell] for cell in expected]), torch.tensor(list(expected.values())) * len(texts))


@cache
def reference() -> list[tuple[int, ...]]:
    return texts_of("no draft")


@pytest.mark.scaled
def test_without_a_draft_the_ids_have_their_exact_joint_distribution() -> None:
    assert p_value(reference()) > PASSES


@pytest.mark.deep
def test_a_draft_under_shared_noise_changes_no_text() -> None:
    assert texts_of("match", seeds=FEWER) == reference()[:FEWER]
    assert LONGEST["match"] == GUESS_LENGTH


@pytest.mark.deep
def test_a_tree_under_shared_noise_changes_no_text() -> None:
    assert texts_of("tree", seeds=FEWER) == reference()[:FEWER]
    assert LONGEST["tree"] >= GUESS_LENGTH


@pytest.mark.deep
def test_rejection_gives_the_exact_joint_distribution_by_other_texts() -> None:
    texts = texts_of("rejection")
    assert p_value(texts) > PASSES
    assert texts != reference()
    assert LONGEST["rejection"] == GUESS_LENGTH


@pytest.mark.deep
def test_rejection_is_exact_if_a_token_adds_fewer_bytes_than_its_own() -> None:
    """Found in review: guesses counted the token's bytes, the loop those added, and so two guesses shared their noise."""
    assert p_value(texts_of("rejection", view=JOINED, seeds=FEWER)) > PASSES


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::xtok.errors.DraftFailedWarning")
def test_rejection_is_exact_with_a_draft_that_fails_after_one_of_its_own_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in review: a guess that is thrown away because of what it says leaves others to be accepted too often."""
    right = TableReader.branch

    def fails(self: TableReader, tokens: list[int], parents: list[int]) -> Steps[torch.Tensor]:
        if tokens == [2]:
            raise MemoryError("simulated")
        return (yield from right(self, tokens, parents))

    monkeypatch.setattr(TableReader, "branch", fails)
    assert p_value(texts_of("rejection", seeds=FEWER)) > PASSES


# the same test fails for samplers that are wrong on purpose


def test_noise_shared_by_ids_with_the_same_bytes_is_found_out() -> None:
    keys = noise_keys(TARGET, len(TARGET))
    keys[4] = keys[3]
    assert p_value(texts_of("no draft", keys, seeds=ENOUGH // 2)) < FAILS


@pytest.mark.deep
def test_noise_repeated_across_control_tokens_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Noise.at
    monkeypatch.setattr(Noise, "at", lambda self, offset, controls, purpose=0: right(self, offset, 0, purpose))
    assert p_value(texts_of("no draft", seeds=ENOUGH)) < FAILS


@pytest.mark.deep
def test_a_residual_of_the_wrong_distribution_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xtok.drafts.acceptance.residual", lambda scores, distribution: scores)
    assert p_value(texts_of("rejection", seeds=ENOUGH)) < FAILS


@pytest.mark.deep
def test_a_guess_drawn_under_the_noise_that_judges_it_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejection needs noise of its own for guesses: with the target's, what is redrawn depends on what was rejected."""
    monkeypatch.setattr("xtok.drafts.acceptance.GUESS", 0)
    assert p_value(texts_of("rejection", seeds=SUBTLE)) < FAILS


# tails


RARE, COUNT, DRAWS = 2e-8, 2_000_000, 400


def rare_draws(noise_of: Callable[[torch.Tensor, int], torch.Tensor]) -> float:
    """The p-value of how often one of two million ids of probability 2e-8 each is drawn instead of the one other."""
    keys = torch.arange(1, COUNT + 1) * 0x9E3779B97F4A7C15 % 2**63
    scores = torch.log(torch.tensor(RARE, dtype=torch.float64))
    common = torch.log1p(torch.tensor(-RARE * COUNT, dtype=torch.float64))
    drawn = 0
    for seed in range(DRAWS):
        state = noise(seed, 0, b"").at(0, 0)
        other = noise_of(torch.tensor([bytes_key(b"common")]), state)[0]
        drawn += bool(noise_of(keys, state).max() + scores > other + common)
    share = RARE * COUNT
    return chi_square(torch.tensor([drawn, DRAWS - drawn]), DRAWS * torch.tensor([share, 1 - share]))


def float32_tail(keys: torch.Tensor, state: int) -> torch.Tensor:
    """As a sampler in float32 has it: 24 bits, so that nothing beyond 16.6 ever comes up."""
    bits = (keys * 0x5851F42D4C957F2D ^ (state & 2**62 - 1)) * 0x2545F4914F6CDD1D
    return -torch.log(-torch.log(((bits >> 40 & 0xFFFFFF).float() * 2.0**-24).clamp(2.0**-24, 1 - 2.0**-24).double()))


@pytest.mark.deep
def test_tokens_of_very_small_probability_are_drawn_as_often_as_they_should_be() -> None:
    assert rare_draws(gumbel) > TAIL


@pytest.mark.deep
def test_a_tail_of_float32_is_found_out() -> None:
    assert rare_draws(float32_tail) < TAIL


# the same against transformers


@cache
def vocabulary() -> Any:
    return tokenizer("byte-level BPE")


@pytest.mark.deep
def test_a_real_models_first_two_ids_have_the_distribution_that_transformers_draws_from() -> None:
    """With temperature, top-k and top-p, against exact probabilities; transformers' own draws pass the same test."""
    tokens = vocabulary()
    model = fitting(tokens, "Llama", 0)
    settings = {"do_sample": True, "temperature": 1.3, "top_k": 6, "top_p": 0.9, "max_new_tokens": 4, "eos_token_id": None}
    prompt = torch.tensor([tokens("吾輩は").input_ids])
    asked = {**settings, "num_return_sequences": scaled(1500), "pad_token_id": 0}
    torch.manual_seed(1)
    theirs = model.generate(prompt, **asked)[:, prompt.shape[1] :].tolist()
    expected = joint_distribution(model, prompt, settings)
    texts = {"transformers": theirs}
    for acceptance in ("match", "rejection"):
        made = XTokAssisted(
            (model, tokens), (deepcopy(model), tokens), budget=Budget(2, width=2, schedule="constant"), acceptance=acceptance
        ).generate("吾輩は", seed=1, **asked)
        assert sum(one.stats.accepted for one in made) > 0
        texts[acceptance] = [one.token_ids for one in made]
    for one in texts.values():
        counts = Counter(tuple(text[:2]) for text in one)
        seen = torch.tensor([counts[cell] for cell in expected])
        assert chi_square(seen, torch.tensor(list(expected.values())) * len(one)) > PASSES


def joint_distribution(model: Any, prompt: torch.Tensor, settings: dict[str, Any]) -> dict[tuple[int, int], float]:
    """The exact distribution of the first two ids, from the scores that transformers processes."""
    scored = {**settings, "max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True}

    def probabilities(ids: torch.Tensor) -> torch.Tensor:
        return model.generate(ids, pad_token_id=0, **scored).scores[0][0].double().softmax(dim=-1)

    first = probabilities(prompt)
    cells = {}
    for token in first.nonzero()[:, 0].tolist():
        second = probabilities(torch.cat([prompt, torch.tensor([[token]])], dim=1))
        cells.update({(token, other): float(first[token] * second[other]) for other in second.nonzero()[:, 0].tolist()})
    return cells


def test_every_text_of_the_small_target_is_a_cell() -> None:
    assert sum(exact().values()) == pytest.approx(1)
    assert all(text in exact() for text in product(range(2, len(TARGET)), repeat=LENGTH))


def test_the_chi_square_test_knows_small_counts() -> None:
    assert chi_square(torch.tensor([399, 1]), torch.tensor([399.99, 0.01])) == 1
    assert chi_square(torch.tensor([400]), torch.tensor([400.0])) == 1
    assert chi_square(torch.tensor([9, 1]), torch.tensor([10.0, 0.0])) == 0
    assert chi_square(torch.tensor([60, 40]), torch.tensor([50.0, 50.0])) == pytest.approx(0.0455, abs=1e-3)
