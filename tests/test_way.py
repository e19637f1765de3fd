"""The way of a prompt: how many modules are entered from `generate` to the target's first forward pass."""

import re
import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import xtok
from xtok import XTokAssisted, pair
from xtok.models.runner import running

ROOT = Path(xtok.__file__).parent
MOST_MODULES, MOST_CHANGES = 19, 67


def calls_until_first_forward(xt: XTokAssisted, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The module of each call of a function of xtok."""
    modules, forwarded = list[str](), list[bool]()
    handle = running(xt.model).register_forward_pre_hook(lambda *_: forwarded.append(True))

    def entered(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and not forwarded and path.is_relative_to(ROOT):
            modules.append(".".join(path.relative_to(ROOT).with_suffix("").parts))

    try:
        sys.setprofile(entered)
        xt.generate("吾輩は猫である。", max_new_tokens=4)
    finally:
        sys.setprofile(None)
        handle.remove()
    return modules


@pytest.fixture(scope="module")
def modules() -> list[str]:
    xt = XTokAssisted(str(pair.TARGET), str(pair.DRAFT))
    xt.generate("吾輩は猫である。", max_new_tokens=4)
    with pytest.MonkeyPatch.context() as monkeypatch:
        return calls_until_first_forward(xt, monkeypatch)


def test_few_modules_are_entered_before_the_first_forward_pass(modules: list[str]) -> None:
    assert len(set(modules)) <= MOST_MODULES, sorted(set(modules))


def test_the_way_changes_modules_seldom(modules: list[str]) -> None:
    changes = sum(before != after for before, after in pairwise(modules))
    assert changes <= MOST_CHANGES, modules


def test_the_documented_route_is_the_one_that_is_taken(modules: list[str]) -> None:
    page = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\d+\. `xtok/([\w/]+)\.py`", page, re.MULTILINE)
    first = list(dict.fromkeys(modules))
    assert [name.replace("/", ".") for name in documented] == [name for name in first if name.replace(".", "/") in documented]
    assert len(documented) > 8
