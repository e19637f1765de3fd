"""The rooms of the design: a module imports only from rooms below it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import xtok

ROOT = Path(xtok.__file__).parent
FLOORS = (
    (
        "version",
        "results",
        "decoding",
        "decoding.sampling",
        "drafts",
        "drafts.policy",
        "cli",
        "serving",
        "errors",
        "drafts.policy.latency",
        "results.progress",
        "models.modes",
    ),
    ("decoding.arguments",),
    ("drafts.tree",),
    ("results.stats", "align"),
    ("align.tokenbytes.table", "align.tokenbytes.families", "align.tokenbytes"),
    ("align.keys", "align.encoding", "align.text"),
    (
        "align.vocabulary",
        "align.projection",
        "align.reencode",
        "align.continuation",
        "align.fit",
        "align.verdict",
    ),
    (
        "decoding.sampling.largest",
        "decoding.sampling.processors",
        "decoding.sampling.noise",
        "drafts.policy.settings",
        "results.trace",
        "results.page",
        "decoding.stops",
    ),
    ("decoding.sampling.draws", "drafts.policy.ledger", "results.generation"),
    ("decoding.sampling.pick",),
    (
        "models",
        "models.prompts",
        "models.rope",
        "models.forwards",
        "models.masks",
        "models.layers",
        "models.placement",
        "models.single",
    ),
    ("models.verdicts",),
    ("models.cache", "models.findings"),
    ("models.graphs",),
    ("models.recurrent", "models.slots", "models.target"),
    ("models.quantized",),
    ("models.probe", "models.stable"),
    ("models.seats",),
    ("drafts.base",),
    ("drafts.reader", "drafts.growth", "drafts.repeats", "drafts.corpus", "drafts.session"),
    ("drafts.candidates", "drafts.lessons"),
    (
        "drafts.scripted",
        "drafts.cross_tokenizer",
        "drafts.projected",
        "drafts.lookup",
        "drafts.recycling",
        "drafts.heads",
        "drafts.adapt",
    ),
    ("drafts.model", "drafts.given"),
    ("models.load", "decoding.sequence"),
    ("decoding.rounds",),
    ("decoding.prepare",),
    ("assisted",),
    ("serving", "serving.ticket"),
    ("serving.engine", "serving.drafting"),
    ("serving.vllm",),
    ("serving.http", "serving.http.compiling"),
    ("serving.http.processors",),
    ("serving.http.requests",),
    (
        "serving.http.answers",
        "serving.http.events",
        "serving.http.metrics",
        "serving.http.doors",
        "serving.http.race",
    ),
    ("serving.http.app",),
    ("serving.http.command",),
    ("tune.writing", "tune.loss"),
    ("tune.training", "tune.work"),
    ("tune.heads",),
    ("tune",),
    ("", "pair", "bench", "bench.chi_square", "bench.stretch", "bench.widen"),
    ("bench.compare",),
    (
        "bench.sampled",
        "bench.context",
        "bench.plot",
        "bench.drafters",
        "bench.batches",
        "bench.bits",
        "bench.choice",
        "bench.server",
    ),
    ("bench.vocabulary", "bench.gpu", "cli.console", "results.terminal"),
    ("bench.report", "cli.demo"),
    ("bench.commands",),
    ("cli.commands",),
    ("__main__",),
)
FLOOR = {module: floor for floor, modules in enumerate(FLOORS) for module in modules}
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
def test_a_module_has_a_room_and_imports_only_from_rooms_below(module: str) -> None:
    assert module in FLOOR
    for other in imports(MODULES[module]):
        same_package = FLOOR[other] == FLOOR[module] and other != module
        assert FLOOR[other] < FLOOR[module] or same_package, f"{module} imports {other}"


def test_no_room_is_empty() -> None:
    assert set(FLOOR) == set(MODULES)


def test_what_ids_spell_needs_no_torch() -> None:
    for module, path in MODULES.items():
        if module.startswith("align") and module not in ("align.keys", "align.projection", "align.vocabulary"):
            assert "torch" not in path.read_text(encoding="utf-8"), module


@pytest.mark.parametrize("module", sorted(name for name in MODULES if "." in name and "tokenbytes" not in name))
def test_a_room_says_what_belongs_there(module: str) -> None:
    room = MODULES[module].parent / "__init__.py"
    told = ast.get_docstring(ast.parse(room.read_text(encoding="utf-8")))
    assert told, room


def test_what_learns_is_imported_only_when_it_is_asked_for() -> None:
    told = "import sys, xtok; print([name for name in ('xtok.tune', 'peft', 'transformers.trainer') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert xtok.tune_draft.__module__ == "xtok.tune"


def test_the_public_names_are_there_and_documented() -> None:
    assert sorted(xtok.__all__) == xtok.__all__
    assert all(getattr(xtok, name).__doc__ for name in xtok.__all__ if name != "__version__")
    reference = (ROOT.parent / "docs" / "reference.md").read_text(encoding="utf-8")
    assert all(name in reference for name in xtok.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = xtok.nothing  # type: ignore[attr-defined]
