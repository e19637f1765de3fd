"""xtok: any large language model generates faster with the help of any small one, and gives exactly what it alone would."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from xtok import errors

if TYPE_CHECKING:
    from xtok.assisted import XTokAssisted
    from xtok.decoding.sequence import Round
    from xtok.drafts.base import Context, Draft, Drafter, Request
    from xtok.drafts.heads import HeadsDrafter
    from xtok.drafts.lookup import PromptLookup
    from xtok.drafts.policy.settings import Budget
    from xtok.drafts.recycling import TokenRecycling
    from xtok.drafts.tree import Tree, chain
    from xtok.results.generation import Generation, Stats
    from xtok.results.trace import Token, WrittenRound
    from xtok.sampling.grammar import Grammar
    from xtok.serving.drafting import DraftedText, DraftEngine
    from xtok.serving.engine import Engine, EngineStats
    from xtok.serving.ticket import Ticket
    from xtok.tune import TrainedHeads, Tuned, train_heads, tune_draft

__all__ = [
    "Budget",
    "Context",
    "Draft",
    "DraftEngine",
    "DraftedText",
    "Drafter",
    "Engine",
    "EngineStats",
    "Generation",
    "Grammar",
    "HeadsDrafter",
    "PromptLookup",
    "Request",
    "Round",
    "Stats",
    "Ticket",
    "Token",
    "TokenRecycling",
    "TrainedHeads",
    "Tree",
    "Tuned",
    "WrittenRound",
    "XTokAssisted",
    "__version__",
    "chain",
    "errors",
    "train_heads",
    "tune_draft",
]


__version__ = "0.2.0"
_HOMES = {
    "xtok.assisted": ("XTokAssisted",),
    "xtok.drafts.policy.settings": ("Budget",),
    "xtok.drafts.base": ("Context", "Draft", "Drafter", "Request"),
    "xtok.drafts.heads": ("HeadsDrafter",),
    "xtok.drafts.lookup": ("PromptLookup",),
    "xtok.drafts.recycling": ("TokenRecycling",),
    "xtok.serving.drafting": ("DraftEngine", "DraftedText"),
    "xtok.serving.engine": ("Engine", "EngineStats"),
    "xtok.serving.ticket": ("Ticket",),
    "xtok.results.generation": ("Generation", "Stats"),
    "xtok.decoding.sequence": ("Round",),
    "xtok.results.trace": ("Token", "WrittenRound"),
    "xtok.sampling.grammar": ("Grammar",),
    "xtok.drafts.tree": ("Tree", "chain"),
    "xtok.tune": ("TrainedHeads", "Tuned", "train_heads", "tune_draft"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """A name is imported when it is first used: to import torch takes seconds, and `xtok --version` doesn't need it."""
    if name == "pair":
        return import_module("xtok.pair")
    if name not in _HOME:
        raise AttributeError(f"module 'xtok' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOME[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
