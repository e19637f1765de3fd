"""Prepares prompts: lets transformers' `generate` build processors, criteria and cache for each, and checks them."""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import MaxLengthCriteria

from xtok.decoding.arguments import (
    call_generate,
    check_prepared,
    check_seed,
    check_supported,
    generate_kwargs,
    pop_prediction,
    pop_stop_strings,
)
from xtok.decoding.sequence import StopStrings
from xtok.decoding.setup import Setup
from xtok.drafts.lookup import Prediction
from xtok.errors import InvalidInputError, PromptWarning, UnsupportedArgumentError, warn
from xtok.models.cache import CACHE
from xtok.models.load import Target
from xtok.models.prompts import is_several, read_prompt
from xtok.models.stable import StableShapes
from xtok.models.traits import Traits
from xtok.sampling.noise import Noise, noise

_COUNTED = {"attention_mask", "position_ids", "logits_to_keep"}
"""Inputs of a model that follow from the ids and their padding."""


@dataclass(frozen=True)
class Prepared:
    """A prompt with the processors, criteria and cache that transformers built for it, and the noise to sample with.

    `ids`: (1, length), int64, padding included. `inputs`: the target's other inputs. `prompt`: what the caller gave; None if
    that was ids. `template`: the arguments of the chat template. `keeps_cache`: whether the caller gave the cache, or gets it
    back. `shared`: processors and criteria that other sequences use, too. `seed`, `noise`: None if it is greedy.
    """

    ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    traits: Traits
    cache: Any = None
    inputs: dict[str, Any] = field(default_factory=dict)
    prompt: Any = None
    template: Mapping[str, Any] = field(default_factory=dict)
    keeps_cache: bool = False
    shared: tuple[Any, ...] = ()
    prediction: Prediction | None = None
    seed: int | None = None
    noise: Noise | None = None
    shapes: StableShapes | None = None

    def with_own_state(self) -> "Prepared":
        """The same with its own copies of what is `shared`, since processors and criteria may keep a state."""
        own = dict(zip(map(id, self.shared), _copied(self.shared), strict=True))
        processors = LogitsProcessorList(own.get(id(one), one) for one in self.processors)
        criteria = StoppingCriteriaList(own.get(id(one), one) for one in self.criteria)
        return replace(self, processors=processors, criteria=criteria, shared=())

    @cached_property
    def is_plain(self) -> bool:
        """Whether the model reads nothing but ids: other inputs only mark left padding, or count positions."""
        others = {name for name, value in self.inputs.items() if value is not None} - _COUNTED
        mask, positions = self.inputs.get("attention_mask"), self.inputs.get("position_ids")
        if others or any(one is not None and one.shape != self.ids.shape for one in (mask, positions)):
            return False
        if mask is not None and not bool(mask[0, -1] and (mask[0].long().diff() >= 0).all()):
            return False  # padding is read, unless it is on the left
        counted = None if positions is None else (positions if mask is None else positions[mask != 0]).flatten()
        return counted is None or torch.equal(counted, torch.arange(len(counted), dtype=torch.int64, device=counted.device))

    @cached_property
    def shares_forwards(self) -> bool:
        """Whether its forward passes can be shared with other sequences, if the target's can."""
        return self.is_plain and not self.keeps_cache

    @cached_property
    def unpadded(self) -> list[int]:
        """The prompt's ids without padding."""
        mask = self.inputs.get("attention_mask")
        kept: list[int] = (self.ids if mask is None or mask.shape != self.ids.shape else self.ids[mask != 0]).flatten().tolist()
        return kept

    @property
    def end(self) -> int | None:
        """The first id that ends a text; None if none does."""
        ends = self.config._eos_token_tensor
        return None if ends is None or not ends.numel() or int(ends.min()) < 0 else int(ends.reshape(-1)[0])

    def recorded(self, what: str) -> tuple[Tensor, ...] | None:
        """An empty record, if `output_scores` or `output_logits`, as `what` says, is set; else None."""
        return () if self.config.return_dict_in_generate and getattr(self.config, what) else None


def prepare(setup: Setup, prompts: Sequence[Any], arguments: dict[str, Any]) -> list[Prepared]:
    """The requests of a call, `num_return_sequences` for each prompt, in order.

    Raises `InvalidInputError` or `UnsupportedArgumentError` for what can't be honoured, before anything is generated.
    """
    seed = arguments.pop("seed", None)
    return add_noise_and_shapes(setup, _given(setup, prompts, arguments), seed)


def _given(setup: Setup, prompts: Sequence[Any], arguments: dict[str, Any]) -> list[Prepared]:
    several = len(prompts) > 1
    if several:
        if CACHE in generate_kwargs(arguments):
            raise UnsupportedArgumentError(f"{CACHE} holds one sequence. Call generate once per prompt.")
        _copied(_stateful(arguments))  # raises if one can't be
    found = list[Prepared]()
    for number, prompt in enumerate(prompts, start=1):
        try:
            found += as_generate(setup.target, prompt, dict(arguments), several=several)
        except InvalidInputError as error:  # noqa: PERF203
            if not several:
                raise
            raise InvalidInputError(f"Prompt {number} of {len(prompts)}: {error}") from error
    return found


def prepare_one(setup: Setup, prompt: Any, arguments: dict[str, Any]) -> Prepared:
    """As `prepare`, for one sequence. Raises `InvalidInputError` or `UnsupportedArgumentError` for several."""
    if is_several(prompt):
        raise InvalidInputError("A list of prompts was given where one is expected. Give one, or call XTokAssisted.generate.")
    seed = arguments.pop("seed", None)
    given = _given(setup, [prompt], arguments)
    if len(given) > 1:
        raise UnsupportedArgumentError(f"num_return_sequences={len(given)} gives several sequences. Call generate instead.")
    return add_noise_and_shapes(setup, given, seed)[0]


def add_noise_and_shapes(setup: Setup, given: Sequence[Prepared], seed: int | None) -> list[Prepared]:
    """The requests with noise, and with the shapes of forward passes as they are now, checked against the instance's settings.

    Noise depends on the prompt's ids, and on its number among equal prompts, so a prompt is sampled alike alone and in any
    batch. Without a seed, one is drawn from torch's generator. Raises `InvalidInputError` for a seed if all are greedy.
    """
    if seed is not None:
        check_seed(seed)
    sampled = any(one.config.do_sample for one in given)
    if not sampled and seed is not None:
        raise InvalidInputError(f"seed={seed} has no effect on greedy generation. Leave it out, or pass do_sample=True.")
    if sampled:
        seed = int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu") if seed is None else seed)
    shapes = None if setup.shapes is None else setup.shapes_now()
    equal, found = Counter[bytes](), list[Prepared]()
    for one in given:
        if one.config.do_sample and seed is not None:
            prompt = ",".join(map(str, one.unpadded)).encode()
            found.append(replace(one, seed=seed, noise=noise(seed, equal[prompt], prompt), shapes=shapes))
            equal[prompt] += 1
        else:
            found.append(replace(one, shapes=shapes))
    shared = [one.shares_forwards for one in found]
    check_supported(stable=setup.stable, fixed=shapes is not None and all(shared))
    return found


def as_generate(target: Target, prompt: Any, arguments: dict[str, Any], *, several: bool = False) -> list[Prepared]:
    """Let transformers' `generate` build the processors, criteria and cache for a prompt, and capture them.

    `several`: whether the same arguments are used for other prompts, too.
    """
    arguments = generate_kwargs(arguments)
    prediction, stop_strings = pop_prediction(arguments), pop_stop_strings(target.model, arguments)
    read, prompt, template = read_prompt(target.vocabulary.tokenizer, prompt, arguments)
    known = target.traits
    ids = torch.tensor([read], dtype=torch.int64, device=known.device)
    if arguments.get("generation_config") is None:
        arguments.setdefault("use_cache", True)  # some models' own configurations say otherwise
    shared = _stateful(arguments) if several else ()
    found: list[Prepared] = []

    def capture(
        _: Any, input_ids: Any, /, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **model_kwargs: Any
    ) -> Tensor:
        batch = Prepared(
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            known,
            inputs=model_kwargs,
            prompt=prompt,
            template=template,
            keeps_cache=CACHE in arguments,
            shared=shared,
            prediction=prediction,
        )
        found.extend(by_row(target, batch, stop_strings))
        return torch.empty(0, dtype=torch.int64, device="cpu")

    call_generate(target.model, ids, arguments, capture)
    return found


def by_row(target: Target, batch: Prepared, stop_strings: Any) -> list[Prepared]:
    """Split a batch as transformers prepared it, with `ids` and `inputs` of (rows, …), into rows, each with its own processors,
    criteria and cache.
    """
    ids, inputs, known = batch.ids, batch.inputs, batch.traits
    check_prepared(batch.config, ids, inputs, known)
    cache = inputs.pop(CACHE, None)
    known.check_cache(cache)
    inputs.pop("use_cache", None)
    criteria = batch.criteria
    if stop_strings is not None:
        criteria = StoppingCriteriaList([*criteria, StopStrings(target.vocabulary, stop_strings)])
    batch = replace(batch, criteria=criteria, cache=cache)
    if len(ids) == 1:
        return [_within_window(batch)]
    rows = (
        replace(
            batch,
            ids=ids[row : row + 1],
            processors=_processors_of_row(batch.processors, row),
            criteria=_copied(criteria),
            cache=_cache_of_row(cache, row),
            inputs={name: value[row : row + 1] if isinstance(value, Tensor) else value for name, value in inputs.items()},
        )
        for row in range(len(ids))
    )
    return [_within_window(row) for row in rows]


def _within_window(request: Prepared) -> Prepared:
    """The request, limited to the target's positions if they end. Warns of a text that may get longer than the context window.
    Raises `InvalidInputError` for a prompt that has more tokens than there are positions.
    """
    window, ends = request.traits.window, request.traits.ends
    if window is None or request.config.max_length <= window + 1:  # the last token needs no position
        return request
    size = len(request.unpadded)
    padding = request.ids.shape[1] - size
    longest = request.config.max_length - padding
    if longest <= window + 1:
        return request
    if ends and size > window:
        raise InvalidInputError(
            f"The prompt has {size:,} tokens, and the target has only {window:,} positions. Shorten the prompt."
        )
    beyond = "the text ends there" if ends else "what it writes beyond that is rarely of use"
    what, remedy = f"The prompt has {size:,} tokens", "Shorten the prompt"
    if size <= window:
        what, remedy = f"The text may get {longest:,} tokens long", "Request fewer new tokens"
    warn(f"{what}, and the target's context window is {window:,}: {beyond}. {remedy}.", PromptWarning)
    if not ends:
        return request
    limit = MaxLengthCriteria(max_length=window + 1 + padding)
    return replace(request, criteria=StoppingCriteriaList([*request.criteria, limit]))


def _stateful(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*(arguments.get("logits_processor") or ()), *(arguments.get("stopping_criteria") or ()))


def _copied(kept: Any, name: str | None = None) -> Any:
    """A deep copy of `kept`, which errors call `name` or by its classes. Raises `UnsupportedArgumentError` if copying fails."""
    try:
        return deepcopy(kept)
    except Exception as error:
        names = name or ", ".join(type(one).__name__ for one in kept)
        raise UnsupportedArgumentError(
            f"Each sequence needs its own copy of {names}, and copying failed ({error}). Call generate once per prompt."
        ) from error


def _cache_of_row(cache: Cache, row: int) -> Cache:
    own: Cache = _copied(cache, CACHE)
    if own.get_seq_length():
        own.batch_select_indices(torch.tensor([row], dtype=torch.int64, device="cpu"))
    return own


def _processors_of_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """Copies of processors. Those of transformers that depend on the batch's rows depend on this one alone."""
    own: LogitsProcessorList = _copied(processors)
    for processor in own:
        if isinstance(processor, logits_process.RepetitionPenaltyLogitsProcessor):
            if isinstance(processor.prompt_ignore_length, Tensor):
                processor.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
        elif isinstance(processor, logits_process.EncoderRepetitionPenaltyLogitsProcessor):
            own_ids: Any = processor.encoder_input_ids[row : row + 1]
            processor.encoder_input_ids = own_ids
        elif isinstance(processor, logits_process.EncoderNoRepeatNGramLogitsProcessor):
            processor.generated_ngrams, processor.batch_size = processor.generated_ngrams[row : row + 1], 1
        elif isinstance(processor, logits_process.PrefixConstrainedLogitsProcessor):
            number = row // processor._num_beams  # from transformers 5.24 on, samples of one prompt have one number
            processor._prefix_allowed_tokens_fn = _as_row(processor._prefix_allowed_tokens_fn, number)
            processor._num_beams = 1
    return own


def _as_row(allowed: Callable[[int, Tensor], list[int]], number: int) -> Callable[[int, Tensor], list[int]]:
    """The function `allowed` as for row `number`: a row that is generated by itself would always be row 0."""
    return lambda _, ids: allowed(number, ids)


def passed_to_generate(name: str) -> Any:
    """An argument of the `generate` call in progress: transformers passes a callable neither its streamer nor its assistant."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "generate":
        frame = frame.f_back
    return frame.f_locals.get(name) if frame is not None else None
