"""The typed keyword arguments of `generate`: all that it takes, and nothing that it refuses."""

from typing import Any, get_type_hints

import pytest
from front_door import BYTES, GREEDY, OTHER, PROMPT, TARGET, TOKENS
from transformers import GenerationConfig

from xtok import XTokAssisted
from xtok.decoding.arguments import GenerateArguments

REFUSED = {
    *("num_beams", "early_stopping", "length_penalty", "penalty_alpha", "dola_layers", "low_memory", "is_assistant"),
    *("num_beam_groups", "diversity_penalty", "constraints", "force_words_ids", "decoder_start_token_id"),
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
    *("target_lookbehind", "use_cache", "use_mtp", "speculation_type", "token_healing"),
    *(
        "cache_config",
        "cache_implementation",
        "max_cache_len",
        "compile_config",
        "disable_compile",
        "continuous_batching_config",
    ),
    *("output_attentions", "output_hidden_states", "transformers_version"),
}
"""Settings that are for other ways to generate, or for caches that xtok doesn't use."""


def test_each_setting_of_transformers_that_is_honoured_is_a_keyword() -> None:
    settings = {name for name in GenerationConfig().to_dict() if not name.startswith("_")}
    assert settings - REFUSED <= set(get_type_hints(GenerateArguments))


@pytest.mark.parametrize("name", sorted(get_type_hints(GenerateArguments)))
def test_every_keyword_is_taken(name: str) -> None:
    given: Any = {"batch_size": 1, "num_return_sequences": 1, "max_new_tokens": 2}.get(name)
    xt = XTokAssisted((TARGET, TOKENS), (OTHER, BYTES))
    assert xt.generate(PROMPT, **{**GREEDY, "max_new_tokens": 2, name: given})
