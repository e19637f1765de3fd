"""xtok: any large language model generates faster with the help of any small one, and gives exactly what it alone would."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from xtok import errors as errors

# isort: off
if TYPE_CHECKING:
    from xtok.assisted import XTokAssisted as XTokAssisted
    from xtok.decoding.sequence import Round as Round
    from xtok.drafts.base import Context as Context, Draft as Draft, Drafter as Drafter, Request as Request
    from xtok.drafts.heads import HeadsDrafter as HeadsDrafter
    from xtok.drafts.lookup import PromptLookup as PromptLookup
    from xtok.drafts.policy.settings import Budget as Budget
    from xtok.drafts.recycling import TokenRecycling as TokenRecycling
    from xtok.drafts.tree import Tree as Tree, chain as chain
    from xtok.results.generation import Generation as Generation, Stats as Stats
    from xtok.results.trace import Token as Token, WrittenRound as WrittenRound
    from xtok.sampling.grammar import Grammar as Grammar
    from xtok.serving.drafting import DraftedText as DraftedText, DraftEngine as DraftEngine
    from xtok.serving.engine import Engine as Engine, EngineStats as EngineStats
    from xtok.serving.ticket import Ticket as Ticket
    from xtok.tune import TrainedHeads as TrainedHeads, Tuned as Tuned, train_heads as train_heads, tune_draft as tune_draft

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
__all__ = sorted([*_HOME, "__version__", "errors"])


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
