"""The small trained pair that xtok ships: a target and an unrelated draft, for demonstrations, tests and measurements."""

from collections.abc import Sequence
from pathlib import Path

__all__ = ["DRAFT", "HEADS", "TARGET", "TUNED", "prompts", "quoting", "technical"]

_ROOT = Path(__file__).parent
TARGET = _ROOT / "target"
"""A Llama of 5.3 M parameters with a SentencePiece Unigram tokenizer (byte fallback, dummy prefix)."""
DRAFT = _ROOT / "draft"
"""A GPT-NeoX of 1.4 M parameters with a byte-level BPE."""
TUNED = _ROOT / "tuned"
"""That draft, tuned on what the target writes after five of every six prompts."""
HEADS = _ROOT / "heads.safetensors"
"""Heads for the target, trained on what it writes after the same prompts."""


def technical() -> list[str]:
    """Beginnings of explanations in which the same terms recur."""
    return (_ROOT / "technical.txt").read_text(encoding="utf-8").splitlines()


def quoting(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Prompts that ask to copy a passage of three texts, and the copies with a character changed in the middle.

    The copies are what a target that is large enough to follow such a prompt would write.
    """
    passages = ["".join(texts[i : i + 3]) for i in range(0, len(texts) - 2, 3)]
    halves = [(text[: len(text) // 2], text[len(text) // 2 + 1 :]) for text in passages]
    return [(f"次の文を写せ。\n{text}\n\n", f"{a}何{b}") for text, (a, b) in zip(passages, halves, strict=True)]


def prompts() -> list[str]:
    """Beginnings of paragraphs from books that neither model was trained on."""
    return (_ROOT / "prompts.txt").read_text(encoding="utf-8").splitlines()
