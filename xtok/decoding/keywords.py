"""The keyword arguments of `generate`, so that editors complete them and type checkers know them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

from torch import Tensor
from transformers import Cache, GenerationConfig

Ids = int | list[int] | Tensor


class TextArguments(TypedDict, total=False):
    """The keyword arguments of `stream`, `stream_tokens`, `stream_rounds` and `Engine.submit`: those of xtok, and those of
    transformers' `generate` that it honours. None means the default.

    A type checker refuses others. Inputs that only some models read can be passed as `**inputs`, a `dict[str, Any]`.
    """

    # of xtok
    seed: int | None
    prediction: str | None
    split_special_tokens: bool | None
    tools: Sequence[Any] | None
    enable_thinking: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    # how long the text is
    max_new_tokens: int | None
    max_length: int | None
    max_time: float | None
    min_new_tokens: int | None
    min_length: int | None
    stop_strings: str | list[str] | None
    stopping_criteria: Sequence[Callable[..., Any]] | None
    # how tokens are picked
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    top_h: float | None
    min_p: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    # what changes scores
    repetition_penalty: float | None
    encoder_repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    encoder_no_repeat_ngram_size: int | None
    bad_words_ids: list[list[int]] | None
    sequence_bias: Any
    suppress_tokens: list[int] | None
    begin_suppress_tokens: list[int] | None
    forced_bos_token_id: int | None
    forced_eos_token_id: int | list[int] | None
    exponential_decay_length_penalty: tuple[int, float] | None
    guidance_scale: float | None
    negative_prompt_ids: Tensor | None
    negative_prompt_attention_mask: Tensor | None
    remove_invalid_values: bool | None
    renormalize_logits: bool | None
    watermarking_config: Any
    logits_processor: Sequence[Callable[..., Any]] | None
    prefix_allowed_tokens_fn: Callable[[int, Tensor], Iterable[int]] | None
    # special tokens
    bos_token_id: Ids | None
    eos_token_id: Ids | None
    pad_token_id: Ids | None
    # how transformers runs
    generation_config: GenerationConfig | None
    cache: Cache | None
    past_key_values: Cache | None
    position_ids: Tensor | None
    prefill_chunk_size: int | None
    # what is returned
    return_dict_in_generate: bool | None
    output_scores: bool | None
    output_logits: bool | None


class GenerateArguments(TextArguments, total=False):
    """The keyword arguments of `generate`: those of `stream`, and those for lists of prompts."""

    batch_size: int
    progress: bool | None
    streamer: Any
    num_return_sequences: int | None
