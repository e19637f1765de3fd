"""Progress bars on stderr, if that is a terminal."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, track

Item = TypeVar("Item")


def console() -> Console:
    """A console on stderr for progress. It shows nothing if stderr is a pipe or a file."""
    return Console(stderr=True, quiet=not sys.stderr.isatty())


def bar(items: Iterable[Item], what: str) -> Iterable[Item]:
    """The items, and a bar that shows how many are left, if stderr is a terminal."""
    return track(items, what, console=Console(stderr=True), transient=True) if sys.stderr.isatty() else items


@contextmanager
def advanced(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar, and a function that advances it by a count."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def busy(what: str) -> AbstractContextManager[object]:
    return console().status(what)
