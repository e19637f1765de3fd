"""Whether a pair promises anything, by what is known before weights are loaded."""

from dataclasses import dataclass

from xtok.align.fit import Fit

GUESS = 5
"""Of how many draft tokens a guess is where a best case is told."""
_GOOD, _USABLE = 0.05, 0.15
"""Break-even shares up to which a pair is called so. On the shipped pair, about a sixth of what an unrelated draft guesses in
chains of five is right; a draft that pays at a third of that may well be worse and still pay.
"""
_SPELLS_ENOUGH, _SPELLS_LITTLE = 0.9, 0.5


@dataclass(frozen=True)
class Verdict:
    """What follows from the sizes of two models and the fit of their tokenizers. How often the draft is right doesn't.

    `word`: good, usable or poor. `cost`: the parameters that a forward of the draft reads ÷ those of the target, which is what
    it costs where reading weights takes the time. `break_even`: the share of guessed tokens that must be right to pay for
    guessing them. `ceiling`: how many times as fast as alone the target is where every guess of five draft tokens is right.
    `told`: all of that in a sentence.
    """

    word: str
    cost: float
    break_even: float
    ceiling: float
    told: str


def verdict(found: Fit, target_parameters: int, draft_parameters: int) -> Verdict:
    """Judge a pair. A draft token costs a forward of the draft, and saves as many of the target's as it spells tokens of it."""
    cost, length = draft_parameters / target_parameters, found.target_tokens_per_draft_token
    break_even, ceiling = cost / length, (1 + GUESS * length) / (1 + GUESS * cost)
    poor = break_even > _USABLE or found.spelled < _SPELLS_LITTLE
    word = "poor" if poor else "good" if break_even <= _GOOD and found.spelled >= _SPELLS_ENOUGH else "usable"
    return Verdict(word, cost, break_even, ceiling, _told(word, found.spelled, cost, break_even, ceiling))


def _told(word: str, spelled: float, cost: float, break_even: float, ceiling: float) -> str:
    price = f"a forward of the draft reads {_share(cost)} of the weights that one of the target reads"
    words = f"its tokens can spell {_share(spelled)} of the target's tokens"
    start = f"{word.capitalize()}: {price}, and {words}, so that, as far as weights decide the time,"
    if break_even >= spelled:
        return f"{start} guessing costs more than it can ever save."
    return (
        f"{start} guesses pay where more than {_share(break_even)} of what is guessed is right, and make the target at most "
        f"{ceiling:.1f} times as fast where every guess of {GUESS} tokens is."
    )


def _share(part: float) -> str:
    return f"{part:.1%}" if part < 0.1 else f"{part:.0%}"
