"""Commands of xtok, run in this process."""

from typer.testing import CliRunner

from xtok.cli import commands


def run(*arguments: str, code: int = 0, stdin: bytes | None = None) -> tuple[str, str]:
    """What a command prints and reports, which has to end with a code."""
    result = CliRunner().invoke(commands.app, [*arguments], input=stdin)
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr
