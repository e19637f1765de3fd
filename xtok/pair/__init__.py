"""The small trained pair that xtok ships: a target and an unrelated draft, for demonstrations, tests and measurements."""

from pathlib import Path

__all__ = ["DRAFT", "TARGET", "TUNED", "prompts"]

_ROOT = Path(__file__).parent
TARGET = _ROOT / "target"
"""A Llama of 5.3 M parameters with a SentencePiece Unigram tokenizer (byte fallback, dummy prefix)."""
DRAFT = _ROOT / "draft"
"""A GPT-NeoX of 1.4 M parameters with a byte-level BPE."""
TUNED = _ROOT / "tuned"
"""That draft, tuned on what the target writes behind five of every six prompts."""


def prompts() -> list[str]:
    """Openings of paragraphs from books that neither model was trained on."""
    return (_ROOT / "prompts.txt").read_text(encoding="utf-8").splitlines()
