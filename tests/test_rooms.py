"""The rooms of the design: a module imports only from rooms above it."""

import ast
from pathlib import Path

import pytest

import xtok

ROOT = Path(xtok.__file__).parent
ROOMS = (
    ("version", "errors", "chi_square", "largest", "processors", "trace"),
    ("tokenbytes.table", "tokenbytes.families", "tokenbytes"),
    ("encoding", "noise", "tree"),
    ("vocabulary", "reencode", "continuation", "text", "budget", "costs", "rope", "pick"),
    ("ledger", "lm"),
    ("recurrent",),
    ("trial", "target", "prompts"),
    ("drafts",),
    ("drafts.reader", "drafts.growth", "drafts.repeats", "drafts.corpus"),
    ("drafts.projection",),
    ("drafts.scripted", "drafts.cross_tokenizer", "drafts.projected", "drafts.lookup", "drafts.heads", "drafts.session"),
    ("lessons",),
    ("adapt",),
    ("drafts.model",),
    ("sequence",),
    ("decode",),
    ("sources", "hf"),
    ("assisted",),
    ("tune.writing",),
    ("tune.loss",),
    ("tune.training", "tune.work"),
    ("tune.heads",),
    ("tune",),
    ("", "pair", "fit", "stretch"),
    ("bench",),
    ("bench_sampled", "bench_context", "bench_plot", "bench_drafters"),
    ("bench_vocabulary",),
    ("cli",),
    ("__main__",),
)
FLOOR = {module: floor for floor, modules in enumerate(ROOMS) for module in modules}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip("."): path
    for path in ROOT.rglob("*.py")
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "xtok":
            module = node.module.removeprefix("xtok").lstrip(".")
            inner = {f"{module}.{alias.name}".lstrip(".") for alias in node.names}
            found |= {name for name in inner if name in MODULES} or {module}
    return found


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_has_a_room_and_imports_only_from_rooms_above(module: str) -> None:
    assert module in FLOOR
    for other in imports(MODULES[module]):
        same_package = FLOOR[other] == FLOOR[module] and other != module
        assert FLOOR[other] < FLOOR[module] or same_package, f"{module} imports {other}"


def test_no_room_is_empty() -> None:
    assert set(FLOOR) == set(MODULES)


def test_the_bytes_of_tokens_need_no_torch() -> None:
    for module in ("tokenbytes", "tokenbytes.table", "tokenbytes.families", "encoding", "reencode", "continuation", "text"):
        assert "torch" not in MODULES[module].read_text(encoding="utf-8"), module


def test_the_public_names_are_complete() -> None:
    public = {name for name in vars(xtok) if not name.startswith("_")}
    modules = {name for name in public if type(vars(xtok)[name]).__name__ == "module"}
    assert set(xtok.__all__) == (public - modules) | {"errors", "__version__"}
    assert all(getattr(xtok, name).__doc__ for name in xtok.__all__ if name != "__version__")
