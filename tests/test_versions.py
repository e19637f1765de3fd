"""The versions that the project allows, and those that its two environments are made of."""

import sys
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


def project() -> dict[str, Any]:
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return settings


def versions(lines: list[str], operator: str) -> dict[str, str]:
    """What each requirement says after an operator."""
    needed = [Requirement(line) for line in lines]
    return {one.name: part.version for one in needed for part in one.specifier if part.operator == operator}


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return versions([line for line in lines if line and not line.startswith("#")], "==")


def test_the_lowest_environment_is_pinned_to_the_lower_bounds_of_all_that_the_project_names() -> None:
    needed = [*project()["dependencies"], *(line for extra in project()["optional-dependencies"].values() for line in extra)]
    bounds = versions(needed, ">=")
    assert bounds.keys() == {Requirement(line).name for line in needed} - {"xtok"}
    assert pins("constraints-lowest.txt") == {**bounds, **pins("constraints.txt")}
