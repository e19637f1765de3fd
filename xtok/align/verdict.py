"""Whether a pair of models is promising, judged by what is known before weights are loaded."""

from dataclasses import dataclass

from xtok.align.fit import Fit

GUESS = 5
"""How many draft tokens the guesses of the best case have."""
_GOOD, _USABLE = 0.05, 0.15
"""The break-even shares up to which a pair is called good, and usable. Of the shipped unrelated draft's guesses in chains of
five about a sixth is right; one that breaks even at a third of that may be worse and still pay.
"""
_WRITES_ENOUGH, _WRITES_LITTLE = 0.9, 0.5


@dataclass(frozen=True)
class Verdict:
    """What follows from the sizes of two models and the fit of their tokenizers. How often the draft is right doesn't.

    `word`: good, usable or poor. `cost`: the parameters that a forward pass of the draft reads ÷ those of the target, the ratio
    of their times if reading weights takes the time. `break_even`: the share of guessed tokens that must be right to pay for
    guessing. `ceiling`: the speedup if every guess of five draft tokens is right. `sentence`: all of that in words.
    """

    word: str
    cost: float
    break_even: float
    ceiling: float
    sentence: str


def verdict(found: Fit, target_parameters: int, draft_parameters: int) -> Verdict:
    """Judge a pair by the fit of its tokenizers and the number of parameters that a forward pass of each model reads.

    A draft token costs one forward pass of the draft, and saves as many of the target's as its text has tokens of the target.
    """
    cost, length = draft_parameters / target_parameters, found.target_tokens_per_draft_token
    break_even, ceiling = cost / length, (1 + GUESS * length) / (1 + GUESS * cost)
    poor = break_even > _USABLE or found.writable < _WRITES_LITTLE
    word = "poor" if poor else "good" if break_even <= _GOOD and found.writable >= _WRITES_ENOUGH else "usable"
    return Verdict(word, cost, break_even, ceiling, _sentence(word, found.writable, cost, break_even, ceiling))


def _sentence(word: str, writable: float, cost: float, break_even: float, ceiling: float) -> str:
    price = f"a forward of the draft reads {_share(cost)} of the weights that one of the target reads"
    words = f"its tokens can write {_share(writable)} of the target's tokens"
    start = f"{word.capitalize()}: {price}, and {words}, so that, as far as weights decide the time,"
    if break_even >= writable:
        return f"{start} guessing costs more than it can ever save."
    return (
        f"{start} guesses pay if more than {_share(break_even)} of what is guessed is right, and make the target at most "
        f"{ceiling:.1f} times as fast if every guess of {GUESS} tokens is."
    )


def _share(part: float) -> str:
    return f"{part:.1%}" if part < 0.1 else f"{part:.0%}"
