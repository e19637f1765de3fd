"""What each real tokenizer loses of a text, by measurement. `python tests/tokenizer_losses.py` writes the table in docs."""

from collections import Counter
from functools import cache
from pathlib import Path

from real_tokenizers import TEXTS, TOKENIZERS, kind, reading, real, sample, view

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- tokenizers: begin -->\n", "<!-- tokenizers: end -->\n"

PROBES = {
    "full-width letters": "x１２３ＡＢＣ！x",
    "half-width kana": "xﾊﾝｶｸx",
    "compatibility characters": "x㌔①ﬁx",
    "decomposed kana": "xか\u3099x",
    "decomposed accents": "xe\u0301x",
    "old kanji": "x慶應x",
    "dashes": "x—x−x",
    "case": "The Cat",
    "accents": "cafés",
    "emoji": "x😃🙏🐱x",
    "leading spaces": " x",
    "runs of spaces": "x  x",
    "spaces between kana": "あ い",
    "spaces around signs": "(x),x",
    "full-width spaces": "あ　い",
    "tabs": "x\tx",
    "line breaks": "x\nx",
    "CRLF": "x\r\nx",
    "`▁`": "x▁x",
    "control characters": "x\x07x\x7fx",
    "zero-width joiners": "x\u200dx",
}
"""Texts that some tokenizers write otherwise."""

EMOJI = "😀😂😭🥺🙏👍❤✨🔥🎉🍣🐱🗾⚽🚀💯🤖🫠"
BYTE_LIKE = "ÀÁõö÷øùúûüýþÿ"
"""The letters by which byte-level vocabularies write the bytes that UTF-8 never has."""
NAMES_OF_BYTES = {"<0x41>": "A", "<BR>": "a line break", "<SP>": "a space", "##a": "a"}
NEVER = {0xC0, 0xC1, *range(0xF5, 0x100)}
"""Bytes that UTF-8 never has."""


@cache
def _ids(name: str, text: str) -> list[int]:
    return reading(name).ids(text)


def _written(name: str, text: str) -> str:
    """What is left of a text after a tokenizer's ids for it."""
    return view(name).to_bytes(_ids(name, text)).decode(errors="replace")


def _has_controls(name: str, ids: list[int]) -> bool:
    return any(view(name)[token] is None for token in ids)


def is_lost(name: str, character: str) -> bool:
    """Whether a character can't be spelled: it is unknown or left out, or some of its bytes are."""
    return not _ids(name, character) or _has_controls(name, _ids(name, character)) or "\ufffd" in _written(name, character)


def lost_share(name: str, text: str) -> float:
    """The share of the characters of a text that can't be spelled. White space doesn't count."""
    counts = Counter("".join(text.split()))
    return sum(count for character, count in counts.items() if is_lost(name, character)) / sum(counts.values())


def rewritten(name: str) -> list[str]:
    """The probes that come back as another text, beyond what can't be spelled."""
    return [label for label, text in PROBES.items() if _is_rewritten(name, text)]


def _is_rewritten(name: str, text: str) -> bool:
    if _has_controls(name, _ids(name, text)):
        text = "".join(character for character in text if not is_lost(name, character))
    return _written(name, text) != text


def controls(name: str) -> list[str]:
    """The names of a tokenizer's control tokens."""
    return [real(name).convert_ids_to_tokens(token) for token, piece in enumerate(view(name).table) if piece is None]


def read_in_prompts(name: str) -> list[str]:
    """The control tokens that are read as such if a text has their names."""
    read = {control: real(name)(f"a{control}b", add_special_tokens=False).input_ids for control in controls(name)}
    return [control for control, ids in read.items() if real(name).convert_tokens_to_ids(control) in ids]


def read_in_plain_text(name: str) -> list[str]:
    """Those of them that are read so even by `split_special_tokens=True`: no text can have their names."""
    spelled = (control for control in controls(name) if not any(is_lost(name, character) for character in control))
    names = [control for control in spelled if real(name).convert_tokens_to_ids(control) in _ids(name, f"a{control}b")]
    return names + [f"{mark}` (as {what})" for mark, what in NAMES_OF_BYTES.items() if _is_swallowed(name, mark)]


def _is_swallowed(name: str, mark: str) -> bool:
    """Spaces, case and unknown signs apart, whether a text's mark is gone."""
    written, known = _written(name, f"x{mark}x"), (character for character in f"x{mark}x" if not is_lost(name, character))
    return not _has_controls(name, _ids(name, f"x{mark}x")) and "".join(written.split()).lower() != "".join(known).lower()


def missing_bytes(name: str) -> int:
    """How many of the 243 bytes of UTF-8 no id spells by itself."""
    return sum(not view(name).ids_of_bytes(bytes([byte])) for byte in range(256) if byte not in NEVER)


def sharing(name: str) -> int:
    """How many ids spell what another one spells."""
    spelled = [piece for piece in view(name).table if piece]
    return len(spelled) - len(set(spelled))


def _unspelled(name: str) -> str:
    shares = {language: lost_share(name, sample(folder, 20_000)) for language, folder in TEXTS.items()}
    found = [f"{100 * share:.1f}% of {language}" for language, share in shares.items() if share >= 0.0005]
    found += [f"{sum(is_lost(name, one) for one in EMOJI)} of {len(EMOJI)} emoji"] * any(is_lost(name, one) for one in EMOJI)
    silent = sum(is_lost(name, chr(code)) for code in range(32)) if missing_bytes(name) < 32 else 0
    found += [f"{silent} control characters"] * bool(silent)
    letters = "".join(one for one in BYTE_LIKE if is_lost(name, one)) if missing_bytes(name) == 0 else ""
    return ", ".join(found + [f"the letters {letters}"] * bool(letters)) or "–"


def _bytes(name: str) -> str:
    missing = missing_bytes(name)
    return "all" if not missing else f"all but {missing}" if missing < 32 else "no"


def _marks(name: str) -> str:
    plain, prompt = read_in_plain_text(name), read_in_prompts(name)
    parts = [f"{_named(names)} {where}" for names, where in ((prompt, "in a prompt"), (plain, "in any text")) if names]
    return "; ".join(parts) or "–"


def _named(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`".replace(")`", ")").replace("|", "\\|") for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def row(name: str) -> str:
    cells = [
        f"**{name}**",
        kind(name),
        f"{len(view(name)):,}",
        _bytes(name),
        str(sharing(name) or "–"),
        ", ".join(rewritten(name)) or "–",
        _unspelled(name),
        _marks(name),
    ]
    return f"| {' | '.join(cells)} |"


HEAD = """| tokenizer | kind | ids | bytes | shared | rewrites | can't spell | reads as a control token |
|---|---|---|---|---|---|---|---|
"""


@cache
def table() -> str:
    return HEAD + "".join(f"{row(name)}\n" for name in TOKENIZERS)


def files() -> list[Path]:
    """The pages that have the marks."""
    return [path for path in sorted(DOCS.glob("*.md")) if BEGIN in path.read_text(encoding="utf-8")]


def table_of(path: Path) -> str:
    return path.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]


def write(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    path.write_text(page.replace(BEGIN + table_of(path), BEGIN + table()), encoding="utf-8")


if __name__ == "__main__":
    for page in files():
        write(page)
