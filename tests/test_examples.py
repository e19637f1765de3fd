"""The examples run as they stand, and what deploys the server fits it."""

import json
import re
import runpy
import shlex
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from typer.main import get_command
from worlds import mostly_deep

from xtok.cli.commands import app
from xtok.serving.http.service import Metrics

ROOT = Path(__file__).parents[1]
QUICK = [("hugging_face", "yes"), ("engine", "one text was cancelled"), ("prompt_lookup", "tokens per forward")]
EXAMPLES = [
    *QUICK,
    ("quickstart", "yes"),
    ("json_schema", "yes"),
    ("agent_loop", "yes"),
    ("streaming", "。"),
    ("several_drafts", "yes"),
    ("heads", "yes"),
    ("same_tokenizer", "yes"),
    ("schedules", "heuristic"),
    ("typical_acceptance", "stats.exact is False"),
]


@pytest.mark.parametrize(("example", "words"), mostly_deep(EXAMPLES, QUICK))
def test_an_example_runs_and_prints_the_truth(
    example: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [example])
    runpy.run_path(str(ROOT / "examples" / f"{example}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert words in printed
    assert "the same ids: no" not in printed
    assert "NO" not in printed


SERVING = ROOT / "examples" / "serving"


def read_yaml(name: str) -> Any:
    return yaml.safe_load((SERVING / name).read_text(encoding="utf-8"))


def test_what_deployments_name_is_there() -> None:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(SERVING / "xtok.service")
    known = {name for one in get_command(app).commands["serve"].params for name in one.opts}  # type: ignore[attr-defined]
    program, command, *options = shlex.split(unit["Service"]["ExecStart"])
    assert (Path(program).name, command) == ("xtok", "serve")
    recipe, services = (SERVING / "Dockerfile").read_text(encoding="utf-8"), read_yaml("compose.yaml")["services"]
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", recipe, re.MULTILINE)
    options += [*json.loads(entry)[2:], *services["xtok"]["command"]]
    assert {option for option in options if option.startswith("-")} <= known
    mounted = [volume.split(":")[0] for one in services.values() for volume in one.get("volumes", ())]
    assert all((SERVING / path).exists() for path in mounted if path.startswith("."))
    assert (SERVING / services["xtok"]["build"]["context"] / services["xtok"]["build"]["dockerfile"]).is_file()
    (job,) = read_yaml("prometheus.yaml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["xtok:8000"]}]
    copied = re.findall(r"^COPY (.*) \S+$", recipe, re.MULTILINE)
    assert copied and all((ROOT / name).exists() for line in copied for name in line.split())


def test_the_dashboard_shows_metrics_that_the_server_has() -> None:
    board = json.loads((SERVING / "grafana" / "dashboards" / "xtok.json").read_text(encoding="utf-8"))
    shown = {name for panel in board["panels"] for one in panel["targets"] for name in re.findall(r"xtok_\w+", one["expr"])}
    served = generate_latest(Metrics(lambda: None).registry).decode()
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", served, re.MULTILINE))
    names = {f"{name}_bucket" if kind == "histogram" else name for name, kind in kinds.items()}
    assert len(shown) >= 8
    assert shown <= names
