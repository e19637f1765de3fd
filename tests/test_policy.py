"""How much is guessed: never slower than without guesses, as fast as the best fixed budget, on a virtual clock."""

from dataclasses import replace
from itertools import cycle, product
from math import ceil
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from simulator import Clock, Engine, Guesser, World, best_fixed, simulated, speed
from worlds import deep, examples, mostly_deep

from xtok import Budget, Tree, chain
from xtok.drafts.policy.latency import ROW, Latency
from xtok.drafts.policy.policy import DraftPolicy, Outcome, Policy, Proposal
from xtok.models.timing import Cost

FREE, LINE, COSTLY = Engine(row=0.0), Engine(row=0.03), Engine(row=0.3)
ENGINES = {
    "rows are free": FREE,
    "rows cost 3%": LINE,
    "rows cost 30%": COSTLY,
    "a jump after 8 rows": Engine(row=0.002, jumps=8, jump=0.6),
    "a jump after 16 rows": Engine(row=0.002, jumps=16, jump=0.6),
    "guessing at all costs half a forward pass": Engine(row=0.01, guess=0.5),
    "nodes cost 5%": Engine(row=0.01, node=0.05),
}
CHEAP, EXPENSIVE = Guesser(forward=0.05), Guesser(forward=0.25)
USELESS = Guesser(forward=0.1, worth=lambda _: 0.0)
HALF = Guesser(forward=0.15, worth=lambda _: 0.5)
LOOKUP = Guesser(forward=0.0, rest=0.005, is_model=False, sure=0.2, worth=lambda _: 0.4, seed=1)
CHANGING = {
    "comes": Guesser(forward=0.05, worth=lambda now: 1.0 * (now >= 300)),
    "goes": Guesser(forward=0.1, worth=lambda now: 1.0 * (now < 300)),
}
DRAFTS = {
    "cheap": [CHEAP],
    "expensive": [EXPENSIVE],
    "useless": [USELESS],
    "half as good as it says": [HALF],
    "lookup and a model": [LOOKUP, Guesser(forward=0.15, seed=2)],
    "one of three pays": [USELESS, Guesser(forward=0.1, seed=2), Guesser(forward=0.3, worth=lambda _: 0.0, seed=3)],
    "none of three pays": [Guesser(forward=0.1, worth=lambda _: 0.0, seed=seed) for seed in range(3)],
    "twice the same": [CHEAP, Guesser(forward=0.3)],
}
CASES = [("rows cost 3%", "cheap"), ("rows cost 30%", "useless"), ("a jump after 8 rows", "lookup and a model")]


def played(engine: Engine, guessers: list[Guesser], *, rounds: int = 600, texts: int = 1, clock: Clock | None = None) -> float:
    """The speed after 64 rounds, as a multiple of that of the best of the fixed budgets."""
    world = World(engine, guessers, clock or Clock())
    run = simulated(world, rounds, Budget(), guessers, texts=texts)
    return speed(run[64:]) / best_fixed(engine, guessers, rounds, texts)[0]


@pytest.mark.parametrize(
    ("engine", "drafts", "texts"),
    [
        *((*one, 1) for one in CASES),
        *(("rows cost 3%", *one) for one in (("cheap", 2), ("useless", 2))),
        *deep(*((*one, 1) for one in [*product(ENGINES, DRAFTS)][::3])),
        *deep(*(("rows cost 3%", *one) for one in (("cheap", 4), ("useless", 8), ("cheap", 16), ("useless", 32)))),
    ],
)
def test_the_policy_is_as_fast_as_the_best_fixed_budget(engine: str, drafts: str, texts: int) -> None:
    found = played(ENGINES[engine], DRAFTS[drafts], texts=texts, rounds=400)
    assert found > (0.91 if texts == 1 else 0.92)  # most have 0.97; an expensive draft before a jump has 0.92


def test_one_of_two_drafts_that_cost_and_guess_the_same_is_kept() -> None:
    """Found in review: what both guessed counted for neither, so both were paused at once."""
    twins = [Guesser(forward=0.1, sure=0.0), Guesser(forward=0.1, sure=0.0)]
    run = simulated(World(LINE, twins), 192, Budget(), twins)
    assert speed(run[64:]) > 0.93 * speed(simulated(World(LINE, twins), 192, Budget(), twins[:1])[64:])


@pytest.mark.parametrize(
    ("changes", "engine"), mostly_deep(zip(cycle(CHANGING), ["rows are free", *ENGINES]), [("comes", "rows are free")])
)
def test_a_draft_that_becomes_worth_it_or_ceases_to_be_is_found_out(changes: str, engine: str) -> None:
    guesser = CHANGING[changes]
    run = simulated(World(ENGINES[engine], [guesser]), 800, Budget(), [guesser])
    for begin, end in ((64, 300), (364, 800)):
        assert speed(run[begin:end]) > 0.92 * best_fixed(ENGINES[engine], [guesser], begin, 1)[0]


def test_a_machine_that_changes_its_speed_and_has_hiccups_misleads_nobody() -> None:
    clock = Clock(slowness=lambda time: 1.5 if int(time / 200) % 2 else 1.0, hiccups=0.005)
    assert played(LINE, [CHEAP], clock=clock) > 0.93
    busy = Clock(slowness=lambda time: 3.0 if time < 6 else 1.0)
    assert played(LINE, [CHEAP], clock=busy) > 0.93


def test_what_was_learnt_is_kept_for_the_next_sequence_and_batch_size() -> None:
    policy = Policy([DraftPolicy()])
    for texts in (8, 7, 5):
        run = simulated(World(COSTLY, [USELESS]), 100, Budget(), [USELESS], policy, texts=texts)
        assert speed(run[50:]) > 0.95 * texts / COSTLY.seconds(texts, 1)
    assert speed(simulated(World(COSTLY, [USELESS]), 100, Budget(), [USELESS], policy)) > 0.95


@examples(30)
@given(
    row=st.sampled_from([0.0, 0.01, 0.05, 0.3]),
    jumps=st.sampled_from([8, 16, 10**9]),
    jump=st.floats(0.1, 1),
    guess=st.sampled_from([0.0, 0.3]),
    drafts=st.lists(
        st.tuples(st.sampled_from([0.0, 0.02, 0.1, 0.4]), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=3
    ),
    texts=st.sampled_from([1, 1, 2, 8]),
)
@example(0.3, 8, 1.0, 0.0, [(0.0, 0.0), (0.0, 0.0), (0.0, 0.5)], 2)  # the worst that were found
@example(0.3, 8, 1.0, 0.0, [(0.02, 0.0)], 2)
@example(0.3, 10**9, 0.1, 0.3, [(0.0, 0.5), (0.02, 0.5), (0.0, 0.5)], 8)  # each of a draft's gates lost as much as one may
@example(0.05, 8, 0.13671875, 0.0, [(0.4, 1.0), (0.4, 1.0), (0.0, 0.0)], 8)  # two drafts filled the same rows, and neither paid
def test_guessing_is_never_much_slower_than_not_guessing(
    row: float, jumps: int, jump: float, guess: float, drafts: list[tuple[float, float]], texts: int
) -> None:
    engine = Engine(row, jumps, jump, guess)
    guessers = [
        Guesser(forward, 0.0, 0.01, lambda _, worth=worth: worth, is_model=forward > 0, seed=seed)  # type: ignore[misc]
        for seed, (forward, worth) in enumerate(drafts)
    ]
    run = simulated(World(engine, guessers), 500, Budget(), guessers, texts=texts)
    assert speed(run[64:]) > 0.89 * texts / engine.seconds(texts, 1)  # of 436 rounds; of more, the loss is 1.6% for each draft


def heads(seed: int) -> list[Guesser]:
    return [Guesser(0.1, rest=0.015, sure=0.4, seed=seed)]


def half_as_good(seed: int) -> list[Guesser]:
    return [Guesser(0.08, 0.001, worth=lambda _: 0.5, sure=0.3, seed=seed), replace(LOOKUP, seed=seed + 10)]


def three(seed: int) -> list[Guesser]:
    one = Guesser(0.01, rest=0.04, worth=lambda _: 0.35, is_model=False, seed=seed + 100)
    return [Guesser(0.28, 0.002, worth=lambda _: 0.75, seed=seed), one, replace(one, sure=0.3, seed=seed + 200)]


RUNS: dict[str, tuple[Engine, Any, int, int, int, float, float]] = {
    # found by benchmark: a gate let each sequence of a batch lose as much as one alone, for as many rounds
    "what does not pay is found out within a text": (Engine(0.04, guess=0.1, node=0.005), half_as_good, 16, 0, 64, 1.0, 0.94),
    # found by benchmark: what guessing costs at all was taken for the cost of a row, so heads guessed at most one id each
    "what pays is found and kept": (Engine(0.003, guess=0.4), heads, 8, 0, 160, 1.0, 1.15),
    # found by benchmark: the first round without guesses, which took long, counted with those after it, of which there were few
    "a slow first round": (Engine(0.03), three, 8, 64, 192, 4.0, 0.95),
    # found by benchmark: a few unlucky rounds in a row paused a good draft, so that it was lost for much of a text
    "bad luck": (LINE, lambda seed: [Guesser(0.2, seed=seed)], 1, 64, 300, 1.0, 1.15),
    "a useless draft": (LINE, lambda seed: [Guesser(0.1, worth=lambda _: 0.0, seed=seed)], 1, 0, 600, 1.0, 0.97),
    "a useless draft that is as expensive as the target": (
        *(LINE, lambda seed: [Guesser(1.0, worth=lambda _: 0.0, seed=seed)], 1, 0),
        *(1000, 1.0, 0.97),
    ),
}
"""An engine; drafts, by a seed; how many sequences; the first and last round that count; how many times as long the first one
takes; and the least speed, as a multiple of that without drafts, on average.
"""


@pytest.mark.parametrize("name", RUNS)
def test_what_pays_is_found_and_what_does_not_costs_little(name: str) -> None:
    engine, drafts, texts, begin, end, first, least = RUNS[name]
    found = list[float]()
    for seed in range(2):
        world = World(engine, drafts(seed), Clock(slowness=lambda time: first if time < 1 else 1.0))
        run = simulated(world, end, Budget(), drafts(seed), texts=texts)
        found.append(speed(run[begin:]) * engine.seconds(texts, 1) / texts)
    assert sum(found) / 2 > least


@pytest.mark.deep
def test_hiccups_do_not_mislead_a_batch_that_guesses_with_heads() -> None:
    """Found by benchmark: after a hiccup all later rounds looked cheap, and after another, in the second round with so many
    rows, such rounds looked so expensive that none was tried again. So 16 chats had 0.92 of the best fixed budget in place of
    0.97.
    """
    engine, found = Engine(row=0.006, guess=0.08), list[float]()
    for seed in range(2):
        guessers = [
            Guesser(0.08, 0.0008, 0.012, sure=0.6, seed=seed),
            Guesser(rest=0.0015, sure=0.1, worth=lambda _: 0.4, is_model=False, seed=seed + 1000),
            Guesser(rest=0.006, sure=0.1, worth=lambda _: 0.3, is_model=False, seed=seed + 2000),
        ]
        best = Budget(depth=2, width=2, nodes=2, schedule="constant")
        fixed = speed(simulated(World(engine, guessers), 60, best, guessers[:1], texts=16))
        clock = Clock(random=Random(seed), hiccups=0.02)
        found.append(speed(simulated(World(engine, guessers, clock), 192, Budget(), guessers, texts=16)) / fixed)
    assert min(found) > 0.94 and sum(found) / 2 > 0.96


def test_reading_a_long_prompt_is_no_reason_to_leave_a_draft_alone() -> None:
    """Found in review: lookup in a long prompt was banned for thousands of rounds for the time that reading it took."""
    policy, tree = Policy([DraftPolicy()]), Tree((1,), (-1,), probabilities=(0.9,))
    policy.observe([Outcome()], 1.0)
    for generation in range(3):
        for turn in range(20):
            took = 30.0 if turn == 0 else 1e-4
            asked = Proposal(tree, (), took, turn == 0, 1, 1, 0.9, 1)
            policy.observe([Outcome(2, policy.drafts, [asked])], 1.0 + took)
            assert not policy.drafts[0].wait, (generation, turn)


def test_a_draft_that_begins_to_hang_is_left_alone() -> None:
    """Found in review: what asking took beside forward passes was believed so slowly that it took a hundred rounds."""
    policy, asked = Policy([DraftPolicy()]), 0
    for turn in range(100):
        if asking := policy.batch(1).guesses and not policy.drafts[0].wait:
            asked += turn >= 50
        took = 10.0 if turn >= 50 else 1e-3
        proposals = [Proposal(chain([1], probabilities=[0.9]), (), took, accepted=1, nodes=1, expected=0.9, right=1)]
        policy.observe([Outcome(1 + asking, policy.drafts, proposals * asking)], 1.0 + took * asking)
    assert asked <= 8


def test_what_drafts_take_is_not_taken_for_time_of_the_round_if_their_guess_does_not_count() -> None:
    """Found in review: it was, if a carried token before the guess wasn't confirmed."""
    policy = Policy([DraftPolicy()])
    for _ in range(20):
        policy.observe([Outcome(2, policy.drafts, [Proposal(None, [Cost(4, 0.5)], 0.5)])], 2.0)
    assert policy.seconds(1, 2) == pytest.approx(1.0)
    assert policy.drafts == [DraftPolicy()], "nothing is learnt of it"


@given(
    rounds=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 20), st.integers(1, 8), st.booleans()), max_size=12),
    seed=st.integers(0, 99),
)
def test_no_second_and_no_other_sequence_reaches_what_a_policy_without_a_clock_decides(
    rounds: list[tuple[int, int, int, bool]], seed: int
) -> None:
    """How many sequences share a draft's forward pass is chance, too."""
    random = Random(seed)
    policies = [Policy([DraftPolicy(Latency(share)) for share in (0.1, 0.01)], max, Latency(1.0)) for _ in range(2)]
    tree = chain(range(6), probabilities=[0.9**depth for depth in range(1, 7)])
    for right, rows, texts, asked in rounds:
        for number, policy in enumerate(policies):
            took, sharing = [random.expovariate(1.0) for _ in range(4)], texts if number else 1
            judged: Any = {"accepted": right, "nodes": 6, "expected": 3.0, "right": right}
            cost = Cost(rows * sharing, took[0], sharing)
            proposals = [
                Proposal(tree, [cost] * 2, took[1], **judged) if asked else Proposal(),
                Proposal(tree, [], took[2], **judged),
            ]
            policy.observe([Outcome(rows + 7, policy.drafts, proposals)], took[3])
    assert policies[0] == policies[1]
    assert len({policy.batch(1) for policy in policies}) == 1


# the parts


OFFERS = st.tuples(
    st.integers(1, 5), st.lists(st.floats(0, 1), max_size=12).map(lambda probabilities: sorted(probabilities, reverse=True))
)


@given(offers=st.lists(OFFERS, min_size=1, max_size=8), row=st.floats(0, 0.5), step=st.integers(1, 8))
@example([(1, [0.01, 0.01, 0.01, 0.01])], 0.2, 4)
@example([(1, [0.9, 0.1, 0.1, 0.1]), (3, [0.9, 0.1])], 0.4, 4)
def test_forward_passes_are_as_wide_as_gains_most_beyond_their_rows(
    offers: list[tuple[int, list[float]]], row: float, step: int
) -> None:
    """What stands in place of padding is free."""
    policy = Policy([], lambda texts, rows: step * ceil(rows / step))
    for rows in (1, 2, 3, 5, 9, 17, 33):
        policy.rounds.add(rows, 1 + row * rows, len(offers))
    rate = policy.rate(len(offers))

    def gain(width: int) -> float:
        picks = sum(sum(probabilities[: width - unread]) for unread, probabilities in offers)
        return picks / len(offers) - rate * policy.seconds(len(offers), width)

    least = max(unread for unread, _ in offers)
    assert (found := policy.width(offers)) >= least
    assert gain(found) == pytest.approx(max(map(gain, range(least, 20))))


@given(st.lists(st.tuples(st.integers(1, 60), st.floats(1e-4, 10.0)), max_size=30), st.integers(1, 60))
def test_a_forward_pass_never_takes_less_than_nothing_nor_less_for_more_rows(
    measured: list[tuple[int, float]], rows: int
) -> None:
    latency = Latency()
    for some, seconds in measured:
        latency.add(some, seconds)
    assert 0 <= latency.at(rows) <= latency.at(rows + 1) + 1e-12


JUMP = [(rows, 0.04 + 0.02 * (rows > 8)) for rows in (1, 5, 8, 9, 12, 17, 33)] * 10
MEASURED: dict[str, tuple[list[tuple[int, float]], int, float, float]] = {
    "before a jump": (JUMP, 6, 0.04, 0.042),
    "after a jump": (JUMP, 12, 0.055, 0.06),
    "guessing at all costs more than a row": ([(1, 1.0), (2, 1.5)], 4, 1.5 + 2 * ROW, 1.5 + 2 * ROW),
    # found by review: a first forward of so many rows that took long kept guesses from being made ever after
    "a hiccup at first": ([(1, 1.0), (28, 12.0), *[(1, 1.0), (28, 1.05)] * 8], 28, 1.0, 1.3),
    "two hiccups at first": ([(1, 12.0), (28, 12.0), *[(1, 1.0), (28, 1.05)] * 8], 28, 1.0, 1.3),
    "a hiccup in a second measurement": ([(5, 1.5), (5, 15.0), (5, 1.5)], 5, 1.5, 1.8),
    "rows that are expensive, and others in between": ([(1, 1.0), (8, 3.5)] * 3, 8, 3.5, 3.5),
    # found in review: measurements count as at most a multiple of the mean so far, which was 0 for ever
    "no time at first": ([(1, 0.0), *[(1, 5.0)] * 20], 1, 5.0, 5.0),
    # found by benchmark: 16 chats had forward passes of 40 rows each, since 8 had seemed to take no longer than 4
    "rows beyond two measurements that were alike": ([(1, 1.0), (2, 1.2), (4, 2.0), (8, 2.0)], 40, 2 + 25.6 / 6, 2 + 25.6 / 6),
}
"""What was measured of some rows, and between what the seconds of others are."""


@pytest.mark.parametrize("case", MEASURED)
def test_a_latency_model_predicts_what_was_measured_and_soon_forgets_hiccups(case: str) -> None:
    measured, rows, least, most = MEASURED[case]
    latency = Latency()
    for some, seconds in measured:
        latency.add(some, seconds)
    assert least * (1 - 1e-9) <= latency.at(rows) <= most * (1 + 1e-9)


def test_drafts_that_do_not_pay_cost_little_in_all_however_many_there_are() -> None:
    useless = [Guesser(0.2, worth=lambda _: 0.0, seed=seed) for seed in range(6)]
    alone = speed(simulated(World(FREE, []), 20, Budget(), []))
    for guessers in (useless[:1], useless):
        run = simulated(World(FREE, guessers), 2500, Budget(), guessers)
        assert speed(run[1000:]) > 0.985 * alone, f"trials of {len(guessers)} drafts"


def test_a_paused_draft_is_tried_again_and_what_gains_stays() -> None:
    def rounds_paused() -> int:
        count = 0
        while draft.wait:
            draft.count()
            count += 1
        return count

    draft, pauses = DraftPolicy(), list[int]()
    for _ in range(4):
        while not draft.wait:
            draft.judge(-0.5)
        pauses.append(rounds_paused())
        assert draft.trial
    assert 8 < pauses[0] < 64 and pauses[1:] == sorted(pauses[1:]) and pauses[-1] <= 65
    for _ in range(50):
        draft.judge(0.5)
        assert not draft.wait
    for _ in range(9):
        draft.judge(-0.5)
        assert not draft.wait, "what gained for long may lose for a while"


def test_each_sequences_own_draft_is_judged_alone() -> None:
    """Found in review: sequences whose own drafts have the same index shared the decision of the first that asked."""
    policy = Policy([])
    one, other = policy.of_sequence(1), policy.of_sequence(1)
    other[0].wait = 50
    policy.observe([Outcome(drafts=one), Outcome(drafts=other)], 1.0)
    assert not one[0].wait and other[0].wait == 49


def test_a_round_that_also_reads_a_prompt_is_no_measure() -> None:
    """Found in review: the first round of a batch is often one in which a text joins, and it was believed whatever it took."""
    policy = Policy([])
    for _ in range(20):
        policy.observe([Outcome()] * 4, 1.0)
    policy.observe([Outcome()] * 5, 30.0, is_pure=False)
    assert policy.seconds(5, 1) < 1.3


def test_rounds_that_take_now_long_and_now_short_do_not_mislead_for_ever() -> None:
    """Found by a server on a busy machine: predictions fell to 0, and dividing by them ended all texts."""
    policy = Policy([])
    policy.rounds.add(14, 0.012)
    for _ in range(2000):
        for seconds in (0.010, 0.002, 0.011):
            policy.observe([Outcome()], seconds)
    assert 0.001 < policy.seconds(1, 1) < 0.012


@pytest.mark.parametrize(("row", "on_cpu", "guesses"), [(0.0, True, True), (0.05, True, False), (0.05, False, True)])
def test_large_batches_on_a_cpu_guess_only_if_rows_are_free(row: float, on_cpu: bool, guesses: bool) -> None:
    """In every measurement, guesses in batches of 8 and more on CPUs were 3% to 10% slower than none."""
    policy = Policy([DraftPolicy()], on_cpu=on_cpu)
    for rows in (1, 8, 16):
        policy.rounds.add(rows, 1 + row * rows)
    policy.spacing = 10**9
    assert policy.batch(7).guesses
    assert policy.batch(8).guesses == guesses
