"""A trace as a page for a browser, all in one file. It is drawn by the scripts in `view`, as is the page of `xtok serve`."""

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

MODEL = "draft model"
TINTS = {
    MODEL: "#9bd0f5",
    "heads": "#e3b7e0",
    "prompt lookup": "#f9cf8b",
    "token recycling": "#a8dfb5",
    "prediction": "#f2e57e",
    "format": "#f4b0a0",
}
"""Background of each kind of draft. Any kind of colour vision tells them apart, and dark text can be read on all of them."""
VIEW = Path(__file__).parent / "view"
"""The folder of the scripts, the style sheet, and the page around them."""


def tints(drafts: Sequence[str]) -> dict[str, str]:
    """The colour of each draft, as #rrggbb: that of its kind, by its name. A name of no known kind is a model's."""
    return {name: TINTS.get(re.sub(r" \(\d+\)$", "", name), TINTS[MODEL]) for name in drafts}


def page(trace: Mapping[str, Any]) -> str:
    """A file that loads nothing else. `trace`: as `Generation.to_dict` gives it."""
    data = json.dumps({"trace": trace, "tints": TINTS}, ensure_ascii=False).replace("<", "\\u003c")  # also </script>
    whole, style = ((VIEW / name).read_text(encoding="utf-8") for name in ("page.html", "view.css"))
    return whole.format(style=style, text=escape(trace["text"]), data=data, script=_script())


def frame(trace: Mapping[str, Any]) -> str:
    """The page within a frame, so that neither its style nor its script touches the notebook around it."""
    style = "width: 100%; height: 42rem; border: 0; resize: vertical"
    return f'<iframe title="xtok" sandbox="allow-scripts" style="{style}" srcdoc="{escape(page(trace))}"></iframe>'


def _script() -> str:
    """The modules of the view as one, for an inline script can't import others. No two define the same name."""
    modules = (file.read_text(encoding="utf-8") for file in sorted(VIEW.glob("*.js")))
    return "\n".join(re.sub(r"^import .*\n|^export ", "", module, flags=re.MULTILINE) for module in modules)
