"""What is installed: all of the package, as a path that type checkers follow, and types that hold in a user's own script."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]

SCRIPT = """
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import xtok
from xtok import Budget, Context, Drafter, Engine, HeadsDrafter, PromptLookup, Request, Tree, XTokAssisted, chain

model = AutoModelForCausalLM.from_pretrained("model")
tokenizer = AutoTokenizer.from_pretrained("model")
xt = XTokAssisted((model, tokenizer), [PromptLookup(corpus=["text"]), HeadsDrafter("file"), "draft"])
xt = XTokAssisted("target", "draft", budget=Budget(5, width=4), device=("cuda", None), dtype=torch.float16)
chat = [{"role": "user", "content": "text"}]
texts = ["text", "text"]
reveal_type(xt.generate("text", max_new_tokens=3))
reveal_type(xt.generate(["text", "text"]))
reveal_type(xt.generate(texts))
reveal_type(xt.generate(("text", "text")))
reveal_type(xt.generate([{"role": "user", "content": "text"}]))
reveal_type(xt.generate(chat, do_sample=True, temperature=0.8, seed=7, stop_strings=["."], batch_size=1))
reveal_type(xt.generate([chat, chat]))
reveal_type(xt.generate("text").stats.tokens_per_forward)
reveal_type(xt.generate("text").token_ids)
for piece in xt.stream("text"):
    reveal_type(piece)
with Engine(xt, batch_size=4) as engine:
    reveal_type(engine.submit("text").result())
reveal_type(xtok.train_heads("target", "file").accuracy)


class Repeats:
    def propose(self, context: Context, budget: Budget) -> Tree:
        return chain(context.ids[-budget.depth :])


class Counts:
    def start(self, request: Request) -> Drafter:
        return Repeats()


def assisted(drafter: Drafter, **arguments: Any) -> XTokAssisted:
    return XTokAssisted((model, tokenizer), drafter, **arguments)


assisted(Repeats())
XTokAssisted((model, tokenizer), Counts())
XTokAssisted(5)
xt.generate(5)
xt.generate(prompt="text", temperature="hot")  # a fault
xt.stream(prompt="text", max_tokens=3)  # a fault
"""
GENERATION, LIST = "xtok.results.generation.Generation", "list[xtok.results.generation.Generation]"
REVEALED = [
    *(GENERATION, LIST, LIST, LIST, GENERATION, GENERATION, LIST, "float", "list[int]", "str", GENERATION),
    "tuple[tuple[float, ...], ...]",
]


WITHOUT_SOURCES = """
[mypy]
follow_imports = skip
[mypy-torch]
follow_imports = normal
[mypy-xtok,xtok.*]
follow_imports = silent
"""
TORCH = """
from typing import Any

class Tensor: ...

def __getattr__(name: str) -> Any: ...
"""


def test_a_users_own_script_passes_a_strict_type_checker(tmp_path: Path) -> None:
    """Without the sources of torch and transformers, whose reading takes most of a minute: of torch, the package names tensors
    to a script.
    """
    pytest.importorskip("mypy")
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "mypy.ini").write_text(WITHOUT_SOURCES, encoding="utf-8")
    (tmp_path / "known" / "torch").mkdir(parents=True)
    (tmp_path / "known" / "torch" / "__init__.pyi").write_text(TORCH, encoding="utf-8")
    reported = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache" / "alone"), "script.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": os.pathsep.join([str(tmp_path / "known"), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    assert re.findall(r'Revealed type is "(.*)"', reported) == REVEALED, reported
    faults = [line for line in reported.splitlines() if ": error:" in line]
    assert [fault.split(": ")[0] for fault in faults] == [f"script.py:{line}" for line in wrong()], reported


def wrong() -> list[int]:
    """The lines of the script that have an argument of a wrong name or type."""
    return [number for number, line in enumerate(SCRIPT.splitlines(), start=1) if line.endswith(("(5)", "a fault"))]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("setuptools") is None:  # imported, it refuses a distutils that another test imported
        pytest.skip("setuptools, which builds the package, is not installed")
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "xtok", folder / "xtok", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def built(source: Path, kind: str) -> ZipFile:
    """A wheel of that kind, as pip has it built."""
    (source / kind).mkdir()
    program = f"from setuptools import build_meta; build_meta.build_{kind}({kind!r})"
    subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, check=True)
    return ZipFile(next((source / kind).glob("*.whl")))


def test_a_wheel_holds_all_of_the_package(source: Path) -> None:
    """Found here: it lacked a room that was listed nowhere, and couldn't be imported."""
    held = {name for name in built(source, "wheel").namelist() if ".dist-info/" not in name}
    assert held == {str(path.relative_to(source)) for path in (source / "xtok").rglob("*") if path.is_file()}
    assert "xtok/py.typed" in held


def test_an_editable_install_is_a_path_and_no_import_hook(source: Path) -> None:
    """Type checkers don't run import hooks, and would find no package."""
    wheel = built(source, "editable")
    (name,) = (name for name in wheel.namelist() if ".dist-info/" not in name)
    assert name.endswith(".pth")
    assert wheel.read(name).decode().strip() == str(source)
