"""Noise: sampling as a greedy pick.

A draw from softmax(z) is `argmax(z + g)` with independent Gumbel noise g (Gumbel-max; Maddison, Tarlow, Minka 2014,
arXiv 1411.0030). Here g comes from a counter-based hash in place of a generator with a state, so that a sampled text is a
function of its seed, and a draft that looks at the same noise guesses what the target is about to draw (Daliri, Musco,
Suresh 2024, arXiv 2408.07978).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xtok.align.vocabulary import digest

PICK, GUESS, ACCEPT = range(3)
"""The purposes of noise: the target's picks, a draft's own draws, and tests of acceptance. Each has noise of its own."""

_NARROW = 2.0**-64 - 2.0**-88
_HALF, _SCALE = torch.tensor(0.5, dtype=torch.float64, device="cpu"), 2.0**-64 - 2.0**-114
_MASK = (1 << 64) - 1
_MULTIPLIERS = tuple(m - (1 << 64) for m in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))  # splitmix64's, as signed numbers


@dataclass(frozen=True)
class Noise:
    """The noise of one sampled text, a pure function of its seed, its prompt, and which of the samples of that prompt it is."""

    root: int

    def at(self, offset: int, controls: int, purpose: int = PICK) -> int:
        """The state of the noise at one position, 0 to 2**64 - 1.

        `offset`, `controls`: how many bytes, and how many ids without bytes, the new text has before it.
        """
        return _splitmix(self.root ^ _splitmix(offset << 24 ^ controls << 2 ^ purpose))

    def uniform(self, offset: int, controls: int, purpose: int) -> float:
        """A random number strictly between 0 and 1. Arguments are as for `at`."""
        return float(uniform(torch.zeros((), dtype=torch.int64, device="cpu"), self.at(offset, controls, purpose)))


def noise(seed: int, sample: int, prompt: bytes) -> Noise:
    """The noise of one sampled text.

    `seed`: 0 to 2**64 - 1. `sample`: 0 for the first text of a prompt, 1 for the second, and so on. `prompt`: its bytes.
    """
    state = 0
    for value in (seed, sample, digest(prompt, b"prompt")):
        state = _splitmix(state ^ (value & _MASK))
    return Noise(state)


def gumbel(keys: Tensor, state: int | Tensor) -> Tensor:
    """Standard Gumbel noise, float64: -log of exponential noise. Arguments and shape are those of `mixed`."""
    return gumbel_of(mixed(keys, state))


def gumbel_of(bits: Tensor) -> Tensor:
    """Standard Gumbel noise, float64, of random bits, int64, of any shape. It rises with the bits."""
    return _scaled(bits).log_().neg_().log_().neg_()


def near_exponential(keys: Tensor, state: int | Tensor) -> Tensor:
    """Exponential noise of rate 1, -log(u), float32: precise enough for guesses. Arguments and shape are those of `mixed`."""
    return mixed(keys, state).float().mul_(_NARROW).sub_(0.5).log1p_().neg_()


def uniform(keys: Tensor, state: int | Tensor) -> Tensor:
    """Numbers strictly between 0 and 1, float64, the same bits on every device. Arguments and shape are those of `mixed`."""
    return _scaled(mixed(keys, state))


def mixed(keys: Tensor, state: int | Tensor) -> Tensor:
    """64 random bits per key, int64, in the shape that `keys`, int64, and `state` broadcast to.

    `state`: one number, or several, (states, 1), as `states_of` gives them: then keys are (ids,) or (states, ids), and the
    result is (states, ids).
    Two multiplications with an xor-shift between them, in the manner of splitmix64: a bijection of the key.
    """
    bits = keys ^ (_signed(state) if isinstance(state, int) else state)
    bits *= _MULTIPLIERS[0]
    bits ^= (bits >> 32).bitwise_and_(0xFFFFFFFF)
    bits *= _MULTIPLIERS[1]
    return bits


def states_of(states: Sequence[int], device: torch.device) -> Tensor:
    """Several states as a tensor, (states, 1), int64: one for each row of keys."""
    return torch.tensor([[_signed(state)] for state in states], dtype=torch.int64, device=device)


def _scaled(bits: Tensor) -> Tensor:
    """Signed numbers of 64 bits, of any shape, scaled to 2**-51 … 1 - 2**-51 in float64."""
    return torch.add(_HALF.to(bits.device), bits, alpha=_SCALE)


def _splitmix(state: int) -> int:
    """A step of splitmix64 (Steele, Lea, Flood 2014)."""
    bits = (state + 0x9E3779B97F4A7C15) & _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
