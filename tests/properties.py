"""What the properties of greedy and sampled ids have in common: arguments of `generate`, spoilt guesses, and close calls."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial, wraps
from itertools import chain, islice, repeat
from math import sqrt
from typing import Any

import torch
from front_door import CountsItsCalls
from hypothesis import strategies as st
from scripted import ScriptedDrafter
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList, StopStringCriteria
from worlds import Pair

from xtok import Context, Tree
from xtok.drafts.tree import Trie

Drawn = dict[str, Any]
Noise = list[tuple[int, int]]

# close calls

CLOSE_CALL = {torch.float32: 1e-5, torch.float64: 1e-6}
"""How near the two best scores of a pick may be to each other before rounding decides between them."""
SEEN: Counter[bool] = Counter()
"""How many examples of the property that runs were close calls, and how many were not."""


def excused(close: bool) -> bool:
    """Whether this example of a property is a close call, which proves nothing. They are counted."""
    SEEN[close] += 1
    return close


def few_close_calls(most: float) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a property fail that excuses more than this share of its examples, and more than chance explains."""

    def decorate(holds: Callable[..., None]) -> Callable[..., None]:
        @wraps(holds)
        def counted(*given: Any, **named: Any) -> None:
            SEEN.clear()
            holds(*given, **named)
            expected = most * SEEN.total()
            assert SEEN.total() > 0 and SEEN[True] <= expected + 3 * sqrt(expected), SEEN

        return counted

    return decorate


# arguments of `generate`


class StopsOnMultiples(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % 41 == 0


def only_even_after_even(batch: int, ids: torch.Tensor) -> list[int]:
    return list(range(int(ids[-1]) % 2, 40, 2))


def arguments() -> st.SearchStrategy[dict[str, Any]]:
    """Arguments of `generate`, each switched on at random. Objects with a state are made anew for each run."""
    ids = st.integers(3, 60)
    return st.fixed_dictionaries(
        {},
        optional={
            "repetition_penalty": st.sampled_from([0.8, 1.3]),
            "no_repeat_ngram_size": st.integers(2, 3),
            "bad_words_ids": st.lists(st.lists(ids, min_size=1, max_size=2), min_size=1, max_size=3),
            "min_new_tokens": st.integers(1, 6),
            "suppress_tokens": st.lists(ids, min_size=1, max_size=3),
            "sequence_bias": st.dictionaries(st.tuples(ids), st.sampled_from([-5.0, 5.0]), min_size=1, max_size=2),
            "prefix_allowed_tokens_fn": st.just(only_even_after_even),
            "eos_token_id": st.lists(st.integers(0, 60), min_size=1, max_size=12, unique=True),
            "stop_strings": st.lists(st.sampled_from(["。", "the", "あ", "a", "\n", " "]), min_size=1, max_size=2, unique=True),
            "logits_processor": st.just(partial(CountsItsCalls, 1.0)),
            "stopping_criteria": st.just(StopsOnMultiples),
        },
    )


def samplings() -> st.SearchStrategy[dict[str, Any]]:
    """What shapes the distribution that is drawn from."""
    return st.fixed_dictionaries(
        {"do_sample": st.just(True), "seed": st.integers(0, 2**64 - 1)},
        optional={
            "temperature": st.sampled_from([0.01, 0.3, 0.8, 1.3, 100.0]),
            "top_k": st.sampled_from([0, 1, 3, 50]),
            "top_p": st.sampled_from([0.3, 0.95]),
            "min_p": st.sampled_from([0.02, 0.2]),
            "typical_p": st.just(0.9),
            "epsilon_cutoff": st.just(0.002),
            "eta_cutoff": st.just(0.002),
            "repetition_penalty": st.sampled_from([0.8, 1.3]),
            "num_return_sequences": st.just(2),
        },
    )


def fresh(drawn: dict[str, Any]) -> dict[str, Any]:
    """What was drawn, greedy unless it says otherwise, with new objects if they have a state."""
    made = {"do_sample": False, **drawn}
    for name, kind in (("logits_processor", LogitsProcessorList), ("stopping_criteria", StoppingCriteriaList)):
        made |= {name: kind([made[name]()])} if name in made else {}
    return made


def honoured(tokens: Any, drawn: dict[str, Any]) -> dict[str, Any]:
    """What was drawn, without stop strings if transformers can't read the tokenizer's vocabulary for them."""
    try:
        StopStringCriteria(tokenizer=tokens, stop_strings=drawn.get("stop_strings", []))
    except ValueError:
        return {name: value for name, value in drawn.items() if name != "stop_strings"}
    return drawn


# ids and guesses


def with_gap(pair: Pair, ids: Sequence[int], drawn: dict[str, Any]) -> tuple[list[int], float]:
    """What transformers gives without any draft, and the smallest gap between the two best scores of a pick."""
    (written,), gap = batch_with_gap(pair, [ids], drawn)
    return written, gap


def batch_with_gap(pair: Pair, prompts: Sequence[Sequence[int]], drawn: dict[str, Any]) -> tuple[list[list[int]], float]:
    """The same of a batch that is padded on the left."""
    inputs = padded(prompts)
    asked = {"return_dict_in_generate": True, "output_scores": True, "pad_token_id": 0, **fresh(drawn)}
    output = pair[0].generate(**inputs, tokenizer=pair[1], **asked)
    gaps = [float(gap) for scores in output.scores for gap in -torch.diff(scores.topk(2).values)]
    return output.sequences[:, inputs["input_ids"].shape[1] :].tolist(), min(gaps)


def padded(prompts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """A batch for transformers, padded on the left."""
    size = max(map(len, prompts))
    ids = torch.tensor([[0] * (size - len(one)) + [*one] for one in prompts])
    return {"input_ids": ids, "attention_mask": torch.tensor([[0] * (size - len(one)) + [1] * len(one) for one in prompts])}


def spoilt(truth: Sequence[int], start: int, noise: Noise, branches: int = 1) -> ScriptedDrafter:
    """Guesses the truth, which follows a prompt of `start` ids, spoilt: see `misleading`."""
    return misleading(lambda ids: truth[len(ids) - start :], noise, branches)


def misleading(coming: Callable[[Sequence[int]], Sequence[int]], noise: Noise, branches: int = 1) -> ScriptedDrafter:
    """Guesses what comes after the ids of a text, spoilt: of branch i, `noise[i]` says how many ids are right, and which id
    follows them.
    """
    faults = iter(noise)

    def script(context: Context) -> Tree:
        rest, trie = coming(context.ids), Trie()
        for right, wrong in islice(chain(faults, repeat((3, 7))), branches):
            trie.add([*rest[:right], wrong, *rest[right + 1 : right + 3]], 1 / (1 + right))
        return trie.best(len)

    return ScriptedDrafter(script)


def right(truth: Sequence[int], start: int, ids: int = 4) -> ScriptedDrafter:
    """Guesses so many ids of the truth, which follows a prompt of `start` ids."""
    return ScriptedDrafter(lambda context: truth[len(context.ids) - start :][:ids])
