"""Whether llguidance can compile a grammar. Run as a program, this file compiles the one on stdin."""

import subprocess
import sys
from functools import lru_cache

SECONDS = 5.0
"""How many seconds compiling may take. llguidance has limits of its own, but none for `multipleOf`."""


@lru_cache(maxsize=16)
def check_compiles(grammar: str) -> None:
    """Raises `ValueError` for a grammar that llguidance refuses, fails on, or takes too long to compile. It compiles in a
    process of its own, since a thread can't be stopped.
    """
    program = [sys.executable, "-I", __file__, *sys.path]
    try:
        done = subprocess.run(program, input=grammar.encode(), capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"llguidance takes more than {SECONDS:g} seconds to compile the schema. Give a simpler one.") from None
    if done.returncode or done.stdout:
        raise ValueError(done.stdout.decode() or "llguidance failed on the schema. Give a simpler one.")


def main() -> None:
    """Prints what is wrong with the grammar."""
    sys.path[:] = sys.argv[1:]
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(LLTokenizer("byte"), sys.stdin.buffer.read().decode())
    matcher.compute_bitmask()
    sys.stdout.buffer.write(matcher.get_error().encode())


if __name__ == "__main__":
    main()
