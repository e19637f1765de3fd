"""The keyword arguments of `generate`: their types, and a refusal of those that change ids silently or can't be honoured."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import MaxLengthCriteria, MaxTimeCriteria

from xtok.drafts.lookup import Prediction
from xtok.errors import InvalidInputError, UnsupportedArgumentError, XTokError, reason, shown
from xtok.models.cache import CACHE, CACHE_NAMES
from xtok.models.traits import Traits

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


_REFUSED = {
    "assistant_model": "Pass it as the draft: XTokAssisted(target, draft).",
    "attention_mask": "Prompts have no padding here. Use target.generate(input_ids, custom_generate=xt) for padded ids.",
    "streamer": "Iterate over stream(prompt), or use generate(prompt, streamer=streamer).",
    "synced_gpus": "The number of rounds differs between ranks. Leave it out.",
}


def generate_kwargs(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as transformers' `generate` takes them, with a cache under its release's name for it.

    Raises `InvalidInputError` or `UnsupportedArgumentError`.
    """
    check_arguments(arguments)
    given = [arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None]
    if len(given) > 1:
        raise InvalidInputError("cache and past_key_values are two names for one argument. Give one of them.")
    kept = {name: value for name, value in arguments.items() if name not in (*CACHE_NAMES, *_REFUSED)}
    return {**kept, CACHE: given[0]} if given else kept


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises `UnsupportedArgumentError` for arguments that can't be honoured, and `InvalidInputError` for a processor or a
    criterion that is in no list.
    """
    for name, remedy in _REFUSED.items():
        if arguments.get(name) is not None and arguments[name] is not False:
            raise UnsupportedArgumentError(f"{name} can't be used here. {remedy}")
    for name in ("logits_processor", "stopping_criteria"):
        given = arguments.get(name)
        if given is not None and not (isinstance(given, list | tuple) and all(map(callable, given))):
            raise InvalidInputError(f"{name} is {given!r}; give a list of callables: {name}=[…].")


def pop_prediction(arguments: dict[str, Any]) -> Prediction | None:
    """The text that the caller expects, removed from the arguments; None without one. Raises `InvalidInputError`."""
    given = arguments.pop("prediction", None)
    if not isinstance(given, str | Prediction | None):
        raise InvalidInputError(f"prediction is {given!r}; it must be a text that the answer is likely to contain.")
    return Prediction(given) if given and isinstance(given, str) else given or None


def pop_stop_strings(model: PreTrainedModel, arguments: dict[str, Any]) -> str | list[str] | None:
    """Stop strings, removed from wherever they were set. transformers must not see them: it would ask for a tokenizer."""
    given = arguments.pop("stop_strings", None)
    configs = (arguments.get("generation_config"), model.generation_config)
    configured = next((strings for one in configs if (strings := getattr(one, "stop_strings", None))), None)
    if configured is not None:
        arguments["stop_strings"] = None
    return configured if given is None else given


def call_generate(model: Any, ids: Tensor, arguments: Mapping[str, Any], custom_generate: Callable[..., Any]) -> None:
    """Call transformers' `generate`. Its errors become `InvalidInputError`, with its words."""
    try:
        model.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=custom_generate, **arguments)
    except (XTokError, torch.OutOfMemoryError):
        raise
    except ValueError as error:
        raise InvalidInputError(str(error)) from error
    except (AttributeError, TypeError, LookupError, ArithmeticError, RuntimeError) as error:
        raise InvalidInputError(
            f"transformers can't use one of {', '.join(sorted(arguments)) or 'the settings of the generation config'} "
            f"({type(error).__name__}: {reason(error)}). Give each what its documentation for generate asks for."
        ) from error


def listed_texts(name: str, given: Any) -> list[str]:
    """`given`, a list or other sequence of texts, as a list. Raises `InvalidInputError` for anything else."""
    is_list = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
    texts: list[str] = list(given) if is_list else []
    if not is_list or not all(isinstance(text, str) for text in texts):
        raise InvalidInputError(f"{name} is {shown(given)}; give a list of texts.")
    return texts


def check_prepared(config: GenerationConfig, ids: Tensor, inputs: Mapping[str, Any], known: Traits) -> None:
    """Raises `InvalidInputError` or `UnsupportedArgumentError` for what xtok can't honour. `ids`: (rows, length)."""
    mode = config.get_generation_mode()
    faults = {
        f"Generation mode {mode.value!r} (num_beams={config.num_beams}) is not supported. Use greedy search or sampling; for "
        "prompt_lookup_num_tokens and assistant_early_exit, pass a draft to XTokAssisted": (
            mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        ),
        "inputs_embeds are not supported: drafts need ids or text. Pass input_ids": inputs.get("inputs_embeds") is not None,
        "use_cache=False is not supported: guesses are checked against a cache. Pass use_cache=True": not config.use_cache,
        f"cache_implementation={config.cache_implementation!r} can't be rolled back. Leave it out": (
            config.cache_implementation not in (None, "dynamic")
        ),
        "output_attentions and output_hidden_states are not supported. Leave them out": (
            bool(config.output_attentions or config.output_hidden_states)
        ),
        "guidance_scale with several rows is not supported. Call generate once per row": (
            len(ids) > 1 and config.guidance_scale not in (None, 1)
        ),
    }
    for fault in (fault for fault, applies in faults.items() if applies):
        raise UnsupportedArgumentError(f"{fault}.")
    check_ids(ids, known.ids_read)
    check_boundary(known, ids, inputs, config.max_length)


def check_supported(*, stable: bool | None, fixed: bool) -> None:
    """Raises `UnsupportedArgumentError` if `stable` is requested, and forward passes can't have fixed shapes (`fixed`)."""
    if stable and not fixed:
        raise UnsupportedArgumentError(
            f"stable=True works with ids alone, without a given cache or further inputs of the model. Leave {CACHE} and "
            "those inputs out, or leave out stable=True."
        )


def check_adapters(model: PreTrainedModel, rows: int) -> None:
    """Raises `UnsupportedArgumentError` for what PEFT adds to the inputs in its own `generate`, by which it calls the model: a
    learnt prompt (prompt tuning, p-tuning, prefix tuning), and different adapters for the rows of a batch.
    """
    owner = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    if getattr(getattr(owner, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedArgumentError(
            f"{type(owner).__name__} puts a learnt prompt before the text, which xtok would leave out. Generate without xtok."
        )
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    if rows > 1 and any("adapter_names" in getattr(hook, "keywords", ()) for hook in hooks):
        raise UnsupportedArgumentError(
            "adapter_names differ by row, and xtok forwards rows separately. Set one adapter, and generate once for each."
        )


def check_rows(criteria: StoppingCriteriaList, stop_strings: Any, rows: int) -> None:
    """Raises `UnsupportedArgumentError` for stopping criteria of several rows without an eos token: in transformers, a row that
    has stopped then goes on until all have.
    """
    ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    limits = all(isinstance(criterion, (MaxLengthCriteria, MaxTimeCriteria)) for criterion in criteria)
    if rows > 1 and not (ends or (limits and stop_strings is None)):
        raise UnsupportedArgumentError(
            "Stopping criteria for several rows need an eos_token_id: without one, transformers goes on with rows that have "
            "stopped. Call generate once per row, or set eos_token_id."
        )


def check_ids(ids: Tensor, size: int) -> None:
    """Raises `InvalidInputError` unless there are ids, all of them from 0 to `size` - 1."""
    if not ids.numel():
        raise InvalidInputError("The prompt has no ids. Pass at least one, such as the token that begins texts.")
    least, most = (int(end) for end in ids.aminmax())
    if least < 0 or most >= size:
        raise InvalidInputError(
            f"The prompt has the id {least if least < 0 else most}, and the target's ids are from 0 to {size - 1}. "
            "Encode it with the target's own tokenizer."
        )


def check_boundary(known: Traits, ids: Tensor, inputs: Mapping[str, Any], longest: int) -> None:
    """Raises `UnsupportedArgumentError` for sequences that go beyond a rotary boundary in a way that makes logits depend on how
    ids are split into forward passes.

    If a sequence crosses the boundary of `longrope`, the cached keys depend on which ids were forwarded together. In a batch,
    transformers uses the factors of the longest row for all rows; a row that runs alone has its own.
    """
    long, dynamic = known.longrope_boundary, known.dynamic_boundary
    if long is None and dynamic is None:
        return
    mask, cache, name = inputs.get("attention_mask"), inputs.get(CACHE), known.name
    rows = [ids.shape[1]] * len(ids)
    if isinstance(mask, Tensor) and mask.dim() == 2:  # without padding, and with the positions in a cache
        rows = (mask != 0).sum(dim=1).tolist()
    held = 0 if cache is None else int(cache.get_seq_length())
    if long is not None and 0 < held <= long < min(rows) and not hasattr(cache, "is_croppable"):
        raise UnsupportedArgumentError(
            f"{CACHE} holds {held} positions, and the prompt goes beyond position {long}, where {name} replaces the cache "
            f"by its own in this release of transformers. Leave {CACHE} out, or use transformers 5.23 or later."
        )
    ends = [row + longest - ids.shape[1] for row in rows]
    crossing = [end for row, end in zip(rows, ends, strict=True) if long is not None and row <= long < end]
    if crossing:
        raise UnsupportedArgumentError(
            f"max_length={crossing[0]} crosses position {long}, where {name} changes its rotary factors. "
            f"Keep prompt and new tokens within {long} positions, or begin with a longer prompt."
        )
    apart = long is not None and min(rows) <= long < max(rows)
    if apart or (dynamic is not None and min(rows) < max(rows) and max(ends) > dynamic):
        raise UnsupportedArgumentError(
            f"Rows of {min(rows)} to {max(rows)} ids would all get the rotary factors of the longest, which is beyond position "
            f"{long if apart else dynamic} of {name}. Call generate once per row, or xt.generate with a list of texts."
        )


def check_seed(seed: Any) -> None:
    if not (isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 1 << 64):
        raise InvalidInputError(f"seed is {seed!r}; it must be a whole number from 0 to 2**64 - 1, or None to draw one.")
