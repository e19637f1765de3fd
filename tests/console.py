"""The command line, run in the process of the tests."""

from typer.testing import CliRunner

from xtok.cli import commands as cli


def run(*arguments: str, code: int = 0, stdin: bytes | None = None) -> tuple[str, str]:
    """What a command prints on stdout and on stderr. It has to end with `code`."""
    result = CliRunner().invoke(cli.app, [*arguments], input=stdin)
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr
