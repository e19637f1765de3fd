"""`python -m xtok`."""

from xtok.cli.commands import main

main()
