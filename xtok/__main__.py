"""`python -m xtok`."""

from xtok.cli import main

main()
