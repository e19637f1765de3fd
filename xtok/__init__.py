"""xtok: any large language model generates faster with the help of any small one, and gives exactly what it alone would."""

from xtok import errors
from xtok.assisted import Generation, XTokAssisted
from xtok.budget import Budget
from xtok.drafts import Context, Drafter
from xtok.drafts.heads import HeadsDrafter
from xtok.drafts.lookup import PromptLookup
from xtok.trace import Round, Stats
from xtok.tree import Tree, chain
from xtok.tune import TrainedHeads, Tuned, train_heads, tune_draft
from xtok.version import __version__

__all__ = [
    "Budget",
    "Context",
    "Drafter",
    "Generation",
    "HeadsDrafter",
    "PromptLookup",
    "Round",
    "Stats",
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
