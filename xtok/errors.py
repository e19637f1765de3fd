"""Everything that xtok raises or warns of.

Each error is also the built-in one that a caller would expect (`ValueError`), and each message names the value and the remedy.
Errors come before any forward pass of a model, except the few that try out what it can do.
"""

import warnings
from inspect import currentframe
from itertools import takewhile
from traceback import walk_stack

_BETWEEN = ("xtok", "contextlib", "torch", "transformers")
"""What may lie between a caller's line and a warning of xtok: its own code, and what calls that."""


def warn(message: str, kind: type[Warning]) -> None:
    """Warn at the line that called xtok, be it through transformers' `generate`."""
    names = (str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in walk_stack(currentframe()))
    warnings.warn(message, kind, stacklevel=1 + sum(1 for _ in takewhile(_BETWEEN.__contains__, names)))


def reason(error: BaseException) -> str:
    """The message of an exception in one line: of an error of the system without its number, of others the first line."""
    system = error.strerror if isinstance(error, OSError) and error.filename is not None else None
    text = f"{error.filename}: {system}" if system and isinstance(error, OSError) else str(error).strip().partition("\n")[0]
    return text.rstrip(".: ") or type(error).__name__


def install(extra: str) -> str:
    """How to install what one of the extras of `pyproject.toml` holds."""
    return f"pip install '.[{extra}]' (in a checkout of xtok; elsewhere 'xtok[{extra}]')"


def shown(value: object) -> str:
    """A value as messages show it: shortened if it is long."""
    written = repr(value)
    return written if len(written) <= _LONGEST else f"{written[:_LONGEST]}…"


_LONGEST = 80


def check_whole(name: str, value: object, least: int) -> None:
    """Raises `InvalidInputError` unless the value of `name` is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidInputError(f"{name} is {shown(value)}; it must be a whole number, {least} or more.")


class XTokError(Exception):
    """Base of all errors of xtok."""


class UnsupportedModelError(XTokError, ValueError):
    """A model that can't be used in the role it was given."""


class UnsupportedTokenizerError(XTokError, ValueError):
    """A tokenizer whose ids can't be read as bytes."""


class UnsupportedArgumentError(XTokError, ValueError):
    """A `generate` argument that xtok can't honour exactly, so it refuses it."""


class InvalidInputError(XTokError, ValueError):
    """A prompt, an id or a setting that makes no sense."""


class EngineFullError(XTokError, RuntimeError):
    """The queue of an engine is full."""


class EngineClosedError(XTokError, RuntimeError):
    """A request was submitted to an engine that was closed."""


class DraftFailedWarning(UserWarning):
    """A draft raised an exception. The rest of the text comes from the target alone."""


class PromptWarning(UserWarning):
    """A prompt is longer than the target's context window; or a tokenizer puts an end of text after prompts, and xtok leaves it
    out: nothing could be generated after it.
    """


class UnstableWarning(UserWarning):
    """A target in half precision whose forward passes can't have fixed shapes: near-ties may be decided differently."""


class LossyWarning(UserWarning):
    """An instance whose sampled texts are no draws from the target's distribution."""
