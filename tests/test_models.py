"""Every causal architecture that transformers knows, as target and as draft: what the target alone gives, or a refusal."""

from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import transformers
from architectures import tiny
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES
from worlds import TREE_3, alone, fitting, quick, tokenizer

from xtok import XTokAssisted
from xtok.errors import UnsupportedModelError

TABLE = Path(__file__).parents[1] / "docs" / "compatibility.md"
TEXT = "吾輩は猫である。名前はまだ"
PLAIN: dict[str, Any] = {"max_new_tokens": 6 if quick() else 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
TOKENS, OTHERS = tokenizer("byte-level BPE"), tokenizer("SentencePiece BPE")
ROWS = len(TOKENS) + 5
NOT_TRIED = "not tried: no tiny model of it could be built"


UNLIKE: dict[str, str] = {
    "plain attention, of positions that are rotary in part": "phi",
    "rotary positions by the length of the text": "phi3",
    "heads that share keys": "falcon",
    "heads whose queries and keys are normalised": "qwen3",
    "sliding windows in every other layer": "gemma3_text",
    "capped scores": "gemma2",
    "layers that share a cache": "gemma3n_text",
    "mixtures of experts, with attention sinks": "gpt_oss",
    "keys and values made of a latent": "deepseek_v3",
    "keys chosen by an index": "deepseek_v32",
    "attention in chunks of the text": "llama4_text",
    "keys counted by their order: chains only": "bloom",
    "recurrent layers beside attention: linear attention, a state space, convolutions": "qwen3_next lfm2_moe",
    "an encoder, and the decoder of an encoder-decoder model": "bert bart",
    "text of a model of pictures, which is given more than ids": "gemma3",
    "refused: a state alone, or a cache that can't be rolled back": "mamba deepseek_v4",
    "refused: no cache after which several ids can be forwarded": "jamba openai-gpt",
    "refused: not causal": "xlm",
    "not tried": "xlstm",
}
"""Architectures of unlike mechanisms, each for the others of its kind, beside those of `worlds`. The deep tests try all."""
QUICK = {name for names in UNLIKE.values() for name in names.split()}


@cache
def other() -> PreTrainedModel:
    return fitting(OTHERS, "Llama", 1)


def truth(model: PreTrainedModel, tokens: Any, text: str = TEXT) -> list[int]:
    """What a model alone writes."""
    return alone(model, tokens(text).input_ids, use_cache=True, **PLAIN)


def built(name: str, attention: str) -> PreTrainedModel | str:
    """A model in the highest precision in which it generates; why not, if there is none."""
    try:
        made = tiny(name, ROWS, attention)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for precise in (made.double, made.float):
        try:
            truth(precise(), TOKENS)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            continue
        return made
    return reason


def helped(target: tuple[Any, Any], draft: tuple[Any, Any]) -> str:
    """By what the target's own ids of two texts came; else why the pair is refused."""
    try:
        xt = XTokAssisted(target, [draft], budget=TREE_3)
        generations = xt.generate([TEXT, TEXT[:6]], **PLAIN)
    except UnsupportedModelError as error:
        return str(error)
    for text, generation in zip((TEXT, TEXT[:6]), generations, strict=True):
        assert generation.token_ids == truth(*target, text)
        assert generation.stats.draft_error is None
        assert generation.stats.proposed > 0
    kind = "chain" if generations[0].stats.chains_only else "tree"
    return f"{kind}, shared forwards" if generations[0].stats.shared_forwards else kind


def stable(model: PreTrainedModel) -> str:
    """Whether two texts in a batch, with guesses, are those of the target alone with `stable=True` in bfloat16, or why not."""
    half = deepcopy(model).bfloat16()
    try:
        alone = XTokAssisted((half, TOKENS), stable=True)
        xt = XTokAssisted((half, TOKENS), [(other(), OTHERS)], budget=TREE_3, stable=True)
    except UnsupportedModelError as error:
        return str(error)
    except (RuntimeError, NotImplementedError):  # of a model that has no bfloat16
        return "no bfloat16"
    found = xt.generate([TEXT, TEXT[:6]], **PLAIN)
    assert [one.token_ids for one in found] == [alone.generate(text, **PLAIN).token_ids for text in (TEXT, TEXT[:6])]
    assert all(one.stats.proposed > 0 for one in found)
    return "yes"


def tried_models(name: str) -> Iterator[tuple[str, PreTrainedModel]]:
    """A model of an architecture with either kind of attention, as far as there is one; in the regular tests, with one kind."""
    for attention in ("eager", "sdpa") if quick() and len(name) % 2 else ("sdpa", "eager"):
        if not isinstance(model := built(name, attention), str):
            yield attention, model
            if quick():
                break


@cache
def verdict(name: str) -> tuple[str, str]:
    """What becomes of an architecture as target, with either kind of attention, and as draft."""
    if not (tried := dict(tried_models(name))):
        return NOT_TRIED, NOT_TRIED
    reported = {attention: helped((model, TOKENS), (other(), OTHERS)) for attention, model in tried.items()}
    ways = dict.fromkeys(reported.values())
    as_draft = helped((other(), OTHERS), (next(iter(tried.values())), TOKENS))
    as_target = next(iter(ways)) if len(ways) == 1 else ", ".join(f"{way} ({attention})" for attention, way in reported.items())
    return as_target, "yes" if as_draft.startswith(("tree", "chain")) else as_draft


@cache
def with_fixed_shapes(name: str) -> str:
    """What becomes of an architecture as target with `stable=True`."""
    as_target = verdict(name)[0]
    if as_target == NOT_TRIED:
        return NOT_TRIED
    return stable(next(tried_models(name))[1]) if "shared forwards" in as_target else "no"


def reported(name: str) -> tuple[str, str, str]:
    """What the documented table says of an architecture: as target, with fixed shapes, as draft."""
    kind = NAMES[name] if isinstance(NAMES[name], str) else NAMES[name][0]
    as_target, fixed, as_draft = (
        way.split(". ")[0].replace(f"The cache of {kind}", "its cache").replace(kind, "it")
        for way in (verdict(name)[0], with_fixed_shapes(name), verdict(name)[1])
    )
    return as_target, fixed, "no" if as_draft == as_target else as_draft


def table() -> list[str]:
    """One row for all architectures with the same verdicts."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name in sorted(NAMES):
        groups.setdefault(reported(name), []).append(name)
    rows = sorted(groups.items(), key=lambda group: (not group[0][0].startswith(("tree", "chain")), -len(group[1])))
    return [HEAD, "|---|---|---|---|"] + [f"| {' | '.join(verdicts)} | {', '.join(names)} |" for verdicts, names in rows]


HEAD = f"| as target (transformers {transformers.__version__}) | `stable=True` | as draft | architectures |"


@cache
def documented() -> dict[str, tuple[str, ...]]:
    """The verdicts in the documentation: none if that is about another release of transformers."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    start = lines.index(HEAD) + 2 if HEAD in lines else len(lines)
    rows = [line[2:-2].split(" | ") for line in takewhile(lambda line: line.startswith("| "), lines[start:])]
    return {name: (*verdicts,) for *verdicts, names in rows for name in names.split(", ")}


@pytest.mark.parametrize("name", sorted(QUICK))
def test_an_architecture_gives_its_own_ids_or_is_refused(name: str) -> None:
    assert verdict(name)


@pytest.mark.deep
@pytest.mark.parametrize("name", sorted(NAMES))
def test_an_architecture_gives_its_own_ids_and_the_same_bits_in_a_batch_as_is_documented(name: str) -> None:
    found = reported(name)
    assert documented().get(name, found) == found


if __name__ == "__main__":  # prints the table for the documentation
    print("\n".join(table()))
