"""xtok: any large language model generates faster with the help of any small one, and gives exactly what it alone would."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from xtok import errors
from xtok.assisted import XTokAssisted
from xtok.budget import Budget
from xtok.drafts import Context, Draft, Drafter, Request
from xtok.drafts.heads import HeadsDrafter
from xtok.drafts.lookup import PromptLookup
from xtok.engines.engine import Engine, EngineStats
from xtok.engines.ticket import Ticket
from xtok.generation import Generation, Token
from xtok.stats import Round, Stats
from xtok.tree import Tree, chain
from xtok.version import __version__

if TYPE_CHECKING:
    from xtok.tune import TrainedHeads, Tuned, train_heads, tune_draft

__all__ = [
    "Budget",
    "Context",
    "Draft",
    "Drafter",
    "Engine",
    "EngineStats",
    "Generation",
    "HeadsDrafter",
    "PromptLookup",
    "Request",
    "Round",
    "Stats",
    "Ticket",
    "Token",
    "TrainedHeads",
    "Tree",
    "Tuned",
    "XTokAssisted",
    "__version__",
    "chain",
    "errors",
    "train_heads",
    "tune_draft",
]


def __getattr__(name: str) -> Any:
    """What learns is imported where it is first asked for: it takes seconds."""
    if name in ("TrainedHeads", "Tuned", "train_heads", "tune_draft"):
        return getattr(import_module("xtok.tune"), name)
    raise AttributeError(f"module 'xtok' has no attribute {name!r}")
