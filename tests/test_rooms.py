"""The packages of the design, and the order in which they import one another."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import xtok

ROOT = Path(xtok.__file__).parent
ORDER = ["errors", "align", "sampling", "models", "drafts", "decoding", "results", "pair", "assisted"]
ORDER += ["serving", "tune", "bench", "cli"]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip("."): path
    for path in ROOT.rglob("*.py")
}


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {"", "__main__"}))
def test_a_package_imports_only_from_packages_before_it(module: str) -> None:
    floor = ORDER.index(module.split(".")[0])
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("xtok"):
            package = (*(node.module or "").split(".")[1:], *(alias.name for alias in node.names))[0]
            assert package == "__version__" or ORDER.index(package) <= floor, f"{module} imports {package}"


LONGEST, MOST_PARAMETERS = 350, 7
MIRRORS = {"__init__", "assemble", "run", "tune_draft", "train_heads"}
"""Functions with the parameters of a public signature. Those of commands are options."""


@pytest.mark.parametrize("module", sorted(MODULES))
def test_modules_are_short_and_functions_have_few_parameters(module: str) -> None:
    source = MODULES[module].read_text(encoding="utf-8")
    assert len(source.splitlines()) <= LONGEST
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name not in MIRRORS and not module.startswith("cli."):
            given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            assert len([one for one in given if one.arg not in ("self", "cls")]) <= MOST_PARAMETERS, node.name


def test_the_bytes_of_ids_need_no_torch() -> None:
    for module, path in MODULES.items():
        if module.startswith("align") and module != "align.vocabulary":
            assert "torch" not in path.read_text(encoding="utf-8"), module


@pytest.mark.parametrize("module", sorted(name for name in MODULES if "." in name))
def test_a_room_says_what_belongs_there(module: str) -> None:
    room = MODULES[module].parent / "__init__.py"
    reported = ast.get_docstring(ast.parse(room.read_text(encoding="utf-8")))
    assert reported, room


def test_what_learns_is_imported_only_when_it_is_requested() -> None:
    program = "import sys, xtok; print([name for name in ('xtok.tune', 'peft', 'transformers.trainer') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert xtok.tune_draft.__module__ == "xtok.tune"


def test_the_public_names_are_there_and_documented() -> None:
    assert sorted(xtok.__all__) == xtok.__all__
    assert all(getattr(xtok, name).__doc__ for name in xtok.__all__ if name != "__version__")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = xtok.nothing  # type: ignore[attr-defined]
