"""Commands of xtok, run in this process."""

from collections.abc import Iterator
from functools import cache

import pytest
from typer.testing import CliRunner

from xtok.cli import commands
from xtok.models.load import load

LOAD = cache(load)


@pytest.fixture(autouse=True, scope="module")
def models_are_loaded_once() -> Iterator[None]:
    """A file that imports this under another name loads each model of a path once for all commands and instances."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("xtok.models.load", "xtok.cli.demo"):
            patch.setattr(f"{module}.load", LOAD)
        yield


def run(*arguments: str, code: int = 0, stdin: bytes | None = None) -> tuple[str, str]:
    """What a command prints and reports, which has to end with a code."""
    result = CliRunner().invoke(commands.app, [*arguments], input=stdin)
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr
