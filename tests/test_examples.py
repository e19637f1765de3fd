"""The examples and the guide's own draft run as they stand."""

import runpy
from pathlib import Path

import pytest
from worlds import TREE, fitting, tokenizer

from xtok import Budget, Context, Tree, XTokAssisted, chain

ROOT = Path(__file__).parents[1]
EXAMPLES = [
    ("quickstart", "yes"),
    ("hugging_face", "yes"),
    ("streaming", "。"),
    ("engine", "one text was cancelled"),
    ("several_drafts", "yes"),
    ("prompt_lookup", "tokens per forward"),
    ("heads", "yes"),
    ("same_tokenizer", "yes"),
    ("schedules", "heuristic"),
    ("typical_acceptance", "stats.exact is False"),
]


QUICK = {"engine", "hugging_face", "several_drafts", "prompt_lookup"}


@pytest.mark.parametrize(
    ("example", "told"), [pytest.param(*one, marks=[] if one[0] in QUICK else pytest.mark.deep) for one in EXAMPLES]
)
def test_an_example_runs_and_tells_the_truth(example: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / f"{example}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert told in printed
    assert "the same ids: no" not in printed
    assert "NO" not in printed


def test_the_guides_own_draft_is_a_draft() -> None:
    class Repeats:
        """Guesses that the last ids come again."""

        def propose(self, context: Context, budget: Budget) -> Tree:
            return chain(context.ids[-budget.depth :])

    tokens = tokenizer("byte-level BPE")
    model = fitting(tokens, "Llama", 0)
    generation = XTokAssisted((model, tokens), Repeats(), budget=TREE).generate("吾輩は", max_new_tokens=20, do_sample=False)
    assert (
        generation.token_ids == XTokAssisted((model, tokens)).generate("吾輩は", max_new_tokens=20, do_sample=False).token_ids
    )
    assert generation.stats.proposed > 0
