"""Progress on stderr: bars on a terminal, lines in a pipe or a file."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from time import monotonic
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

Item = TypeVar("Item")


def bar(items: Sequence[Item], what: str) -> Iterable[Item]:
    """The items, and a bar that shows how many are left."""
    with advanced(what, len(items)) as advance:
        for item in items:
            yield item
            advance(1)


@contextmanager
def advanced(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar with the time left, and a function that advances it by a count; in a pipe or a file, lines: at the start, after the
    first count, and after each tenth.
    """
    if not sys.stderr.isatty():
        print(f"{what} …", file=sys.stderr, flush=True)
        yield _by_tenths(what, total)
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def _by_tenths(what: str, total: int) -> Callable[[int], None]:
    start, done = monotonic(), 0

    def advance(count: int) -> None:
        nonlocal done
        before, done = done, done + count
        if done and (not before or done * 10 // total > before * 10 // total):
            left = timedelta(seconds=round((monotonic() - start) / done * max(0, total - done)))  # the last batch may be whole
            print(f"{what}: {done} of {total}, about {left} left", file=sys.stderr, flush=True)

    return advance


def busy(what: str) -> AbstractContextManager[object]:
    """A sign that something goes on, on a terminal alone."""
    return Console(stderr=True, quiet=not sys.stderr.isatty()).status(what)


@contextmanager
def stage(what: str) -> Iterator[None]:
    """What goes on for minutes: as `busy`, and a line in a pipe or a file."""
    if not sys.stderr.isatty():
        print(f"{what} …", file=sys.stderr, flush=True)
    with busy(what):
        yield
