"""The examples and the guide's own draft run as they stand."""

import runpy
from pathlib import Path

import pytest
from worlds import TREE, fitting, mostly_deep, tokenizer

from xtok import Budget, Context, Tree, XTokAssisted, chain

ROOT = Path(__file__).parents[1]
QUICK = [("hugging_face", "yes"), ("engine", "one text was cancelled"), ("prompt_lookup", "tokens per forward")]
EXAMPLES = [
    *QUICK,
    ("quickstart", "yes"),
    ("json_schema", "yes"),
    ("streaming", "。"),
    ("several_drafts", "yes"),
    ("heads", "yes"),
    ("same_tokenizer", "yes"),
    ("schedules", "heuristic"),
    ("typical_acceptance", "stats.exact is False"),
]


@pytest.mark.parametrize(("example", "words"), mostly_deep(EXAMPLES, QUICK))
def test_an_example_runs_and_prints_the_truth(example: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / f"{example}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert words in printed
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
