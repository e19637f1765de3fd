"""`XTokAssisted`: what users call."""

import sys
from collections import abc
from collections.abc import Callable, Generator, Iterable
from contextlib import nullcontext
from itertools import islice
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar, overload

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from xtok.decoding.arguments import GenerateArguments, TextArguments, check_adapters, check_arguments, check_rows
from xtok.decoding.assemble import assemble, fitted, name_of, refitted
from xtok.decoding.prepare import Prepared, add_noise_and_shapes, by_row, passed_to_generate, prepare, prepare_one
from xtok.decoding.rounds import run
from xtok.decoding.sequence import Sequence
from xtok.decoding.setup import Acceptance, Setup
from xtok.decoding.start import start
from xtok.drafts.base import Draft, Drafter
from xtok.drafts.policy.settings import Budget
from xtok.errors import InvalidInputError, UnsupportedArgumentError, check_whole
from xtok.models.cache import CACHE
from xtok.models.load import Device, DeviceMap, Dtype, OneOrEach, Quantization, Source, Target
from xtok.models.modes import current, within
from xtok.models.prompts import KnownPrompt, Prompt, is_several
from xtok.models.runner import have_changed, runner_of
from xtok.results.generation import LAST, Generation, as_transformers, columns, finished
from xtok.results.progress import advanced
from xtok.results.trace import Token, WrittenRound, as_committed, written_rounds

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")
BATCH = 8
"""How many sequences of a list are generated at a time."""
_REFRESHING = RLock()


def _made_again(kind: "type[XTokAssisted]", arguments: dict[str, Any]) -> "XTokAssisted":
    return kind(**arguments)


class XTokAssisted:
    """A target model that generates with the help of any draft, and gives exactly what it alone would give.

    Law: in float32 and float64 greedy ids equal those of `target.generate(...)` with the same arguments; sampled ids are draws
    from the target's own distribution, and equal those of `XTokAssisted(target)`, which has no draft and is the reference
    sampler, for the same seed. In half precision with fixed shapes (`stable`) both equal those of `XTokAssisted(target)`, and
    greedy ids are very likely those of `target.generate(...)` up to the first of `stats.near_ties`. A draft decides only how
    fast they come.

    One instance may serve several threads. It never changes models or tokenizers; if you change one, call `refresh`.
    """

    @within()
    def __init__(
        self,
        target: Source,
        draft: Source | Draft | Drafter | list[Any] | None = None,
        *,
        budget: Budget | None = None,
        acceptance: Acceptance = "match",
        posterior_threshold: float = 0.09,
        posterior_alpha: float = 0.3,
        stable: bool | None = None,
        compile: bool | None = None,  # noqa: A002
        device: OneOrEach[Device] = None,
        dtype: OneOrEach[Dtype] = None,
        device_map: OneOrEach[DeviceMap] = None,
        quantization_config: OneOrEach[Quantization] = None,
        attn_implementation: OneOrEach[str] = None,
    ) -> None:
        """Load the models, and find out what they can do.

        Args:
            target: The model whose text is wanted: a hub id, a path, or a pair of a model and its tokenizer.
            draft: A draft model or `HeadsDrafter(file)`, either of which guesses together with `PromptLookup()` and
                `TokenRecycling()`; one of these two alone; an object with `propose(context, budget)`; or a list of any of them,
                whose guesses are merged and to which nothing is added. Drafts with the target's own ids skip the text.
            budget: How much to guess in each round. None: as much as pays, by the measured time of forward passes and recent
                acceptance. `Budget(depth=5, width=1, schedule="constant")` guesses chains of five draft tokens.
            acceptance: How guesses are verified when sampling. "match": a guess is accepted if the target draws the same token;
                both draw with the same Gumbel noise. "rejection": speculative sampling (Leviathan et al. 2023, Chen et al.
                2023) by the draft's distribution, projected onto the target's ids by bytes, in chains of the budget's depth.
                Its texts are draws from the target's own distribution, too, but depend on the draft and that depth. "typical",
                **lossy**: guesses are accepted if their probability is above min(`posterior_threshold`, `posterior_alpha` *
                exp(-entropy)) (Medusa, Cai et al. 2024). With "rejection" and "typical", `stats.exact` is False.
            posterior_threshold: Of typical acceptance, above 0 and at most 1.
            posterior_alpha: Likewise.
            stable: Give the target's forward passes fixed shapes, in which a token's logits have the same bits whatever else is
                in the forward pass, so that ids are the same in any precision, with or without a draft, alone or in a batch.
                None: in half precision, for targets that allow it; an `UnstableWarning` says if one doesn't, and near-ties
                (`stats.near_ties`) may then be decided differently. True: in any precision; other targets are refused. False:
                never. A few extra forward passes find the shapes. Mixtures of experts, models that can't share forward passes,
                threads that aren't a power of two, and `acceptance` other than "match" don't allow them.
            compile: Capture forward passes as CUDA graphs, one for each shape, and replay them. None: for each model that is on
                one GPU, without hooks or offloading. True: the same, but a target that can't be captured is refused. With
                graphs, KV caches stay allocated between calls. A graph is used only if its first replay gave the same bits as
                the normal forward pass; `stats.target_replays` counts replays of the target.
            device: Of models given as hub ids or paths: one for both, or a pair, the target's and the drafts', such as
                `("cuda:0", "cpu")`. None: the best there is for the target, and the target's for drafts.
            dtype: Their precision, for both or as a pair. None: what their configurations say, but float32, with weights that
                stay exact in float16, on a CPU without instructions for half precision, where that is faster.
            device_map: For both or as a pair, as `from_pretrained` takes it. "auto" spreads a model over several devices.
            quantization_config: Likewise.
            attn_implementation: Likewise.

        The last five must agree with models that are loaded already. Raises `UnsupportedModelError`,
        `UnsupportedTokenizerError` or `InvalidInputError` (all of `xtok.errors`).
        """
        self._arguments = {name: value for name, value in locals().items() if name != "self"}
        if isinstance(draft, list):
            self._arguments["draft"] = list(draft)
        self._setup = assemble(**self._arguments)
        self._whole: XTokAssisted | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or an unpickled instance is made anew: it loads hub ids and paths again, and knows no timings yet."""
        if self._whole is not None:
            return type(self).with_drafts, (self._whole, self.names)
        return _made_again, (type(self), self._arguments)

    def __repr__(self) -> str:
        given = {"budget": self.setup.budget, **{name: self._arguments[name] for name in ("acceptance", "stable", "compile")}}
        shown = "".join(f", {name}={value!r}" for name, value in given.items() if value not in (Budget(), "match", None))
        kernels = runner_of(self.model).kernels(self.model)
        return f"XTokAssisted({name_of(self.model)}, drafts={list(self.names)}{shown}, kernels={kernels!r})"

    @property
    def setup(self) -> Setup:
        """What all sequences share. It is made anew if a model was changed in a way that is cheap to see."""
        with _REFRESHING:
            if have_changed(self._setup.runners):
                self._setup = within()(fitted)(self._setup)
            return self._setup

    @property
    def target(self) -> Target:
        """The target model and its vocabulary."""
        return self.setup.target

    @property
    def model(self) -> PreTrainedModel:
        """The target model."""
        return self.setup.target.model

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer."""
        return self.setup.target.vocabulary.tokenizer

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its drafts, as traces show them."""
        return self.setup.names

    @within()
    def refresh(self) -> None:
        """Call this after you have changed a model. It drops all that follows from the model's old state: fixed shapes, packed
        weights, CUDA graphs, timings, engines' prefixes. Raises an error of `xtok.errors` if the settings don't fit any more.
        """
        with _REFRESHING:
            self._setup = refitted(self._setup)

    def with_drafts(self, names: abc.Collection[str]) -> "XTokAssisted":
        """An instance with only the drafts of these `names`; with none, the target alone. Models are shared, timings aren't.

        Raises `InvalidInputError` for a name that no draft has.
        """
        made = object.__new__(type(self))
        vars(made).update(vars(self), _setup=self.setup.with_drafts(names), _whole=self)
        return made

    @overload
    def generate(self, prompt: Prompt, **arguments: "Unpack[GenerateArguments]") -> Generation: ...  # type: ignore[overload-overlap]
    @overload
    def generate(self, prompt: abc.Sequence[Prompt], **arguments: "Unpack[GenerateArguments]") -> list[Generation]: ...
    @within()
    def generate(self, prompt: Any = None, **arguments: Any) -> Generation | list[Generation]:
        """Generate from a prompt. From a list of prompts, generate a list.

        Args:
            prompt: A text; a chat (a list of messages); token ids (a list of whole numbers, or a tensor of shape (n,) or (1,
                n)); or a tokenizer's encoding of one text, of which ids and attention mask are read. A list of whole numbers is
                one prompt, a list of lists of them is several.
            seed: For `do_sample=True` alone: the ids depend on target, prompt, settings and seed, not on the draft or on the
                rest of a list. The same prompt again, in a list or by `num_return_sequences`, gives further, independent texts.
            prediction: Text that the answer is likely to contain, such as a document to edit. xtok guesses from it, as OpenAI's
                Predicted Outputs do; it changes no id.
            tools, enable_thinking, chat_template_kwargs: Passed to a chat's template.
            split_special_tokens: Whether control tokens written out in a text are read as plain text.
            batch_size: How many prompts of a list share forward passes; ids don't depend on it.
            progress: Whether to show a bar on stderr. None: if stderr is a terminal and there are several prompts.
            arguments: Those of transformers' `generate`.

        Raises `InvalidInputError` for a prompt and `UnsupportedArgumentError` for an argument that can't be honoured.
        """
        if prompt is None and "input_ids" in arguments:
            raise InvalidInputError(
                "A tokenizer's encoding is one argument here: generate(encoding), not generate(**encoding)."
            )
        setup, many = self.setup, is_several(prompt)
        streamer = arguments.pop("streamer", None)
        batch_size, progress = arguments.pop("batch_size", BATCH), arguments.pop("progress", None)
        check_whole("batch_size", batch_size, 1)
        requests = prepare(setup, list(prompt) if many else [prompt], arguments)
        if streamer is not None and len(requests) > 1:
            raise UnsupportedArgumentError("A streamer takes one text. Call generate once per prompt, for one text each.")
        batch_size = min(batch_size, len(requests))
        shown = progress or (progress is None and len(requests) > 1 and sys.stderr.isatty())
        if streamer is not None:
            streamer.put(requests[0].ids.cpu())
        self._run(setup, requests, batch_size, streamer, progress=shown)
        return self.last if many or len(requests) > 1 else self.last[0]

    def stream(self, prompt: Prompt, **arguments: "Unpack[TextArguments]") -> Generator[str, None, Generation]:
        """Yield the new text in pieces as it is committed, never half a character. Joined, they are `generate(...).text`.

        The generator's return value (`StopIteration.value`) is what `generate` returns.
        """

        def pieces(one: WrittenRound) -> list[str]:
            return [text] if (text := "".join(token.text for token in one.tokens)) else []

        return self._streamed(prompt, dict(arguments), pieces)

    def stream_tokens(self, prompt: Prompt, **arguments: "Unpack[TextArguments]") -> Generator[Token, None, Generation]:
        """As `stream`, but yield the new tokens, `generate(...).tokens`, each with the draft that guessed it."""
        return self._streamed(prompt, dict(arguments), lambda one: one.tokens)

    def stream_rounds(
        self, prompt: Prompt | KnownPrompt, **arguments: "Unpack[TextArguments]"
    ) -> Generator[WrittenRound, None, Generation]:
        """As `stream`, but yield each round, `generate(...).written`, with all of its guesses."""
        return self._streamed(prompt, dict(arguments), lambda one: [one])

    def _streamed(
        self, prompt: Prompt | KnownPrompt, arguments: dict[str, Any], show: Callable[[WrittenRound], Iterable[T]]
    ) -> Generator[T, None, Generation]:
        """Yield what `show` makes of each round. Arguments are checked at once. A round runs when the caller asks for it, under
        torch's modes at this call.
        """
        modes, view = current(), self._setup.target.vocabulary.view
        with within(modes):
            request = prepare_one(setup := self.setup, prompt, arguments)

        def generator() -> Generator[T, None, Generation]:
            with setup.caches.lent(1, modes) as caches:
                with within(modes):
                    sequence = start(setup, request, caches)
                for one in written_rounds(as_committed(sequence, modes), sequence.drafts, lambda token: view[token] or b""):
                    yield from show(one)
                with within(modes):
                    LAST.of_thread[self] = [finished(sequence)]
                return self.last[0]

        return generator()

    @within()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        stop_strings: str | list[str] | None = None,
        seed: int | None = None,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | Tensor:
        """Serve as transformers' decoding method: `model.generate(**inputs, custom_generate=xt)`.

        Each row of a batch is generated by itself: logits processors are copied per row and called with a batch of one. `seed`
        is as in `generate`. `stop_strings` is a parameter so that transformers passes it on: it drops `tokenizer`, which stop
        strings would need there, and refuses stop strings in a generation config.
        """
        setup = self.setup
        if model is not setup.target.model:
            raise InvalidInputError("custom_generate was called by another model than the target. Call target.generate.")
        check_arguments({name: passed_to_generate(name) for name in ("assistant_model", "synced_gpus")})
        check_rows(stopping_criteria, stop_strings, rows=len(input_ids))
        check_adapters(model, len(input_ids))
        wanted = len(input_ids) == 1 and generation_config.return_dict_in_generate and setup.shapes is None
        keeps_cache = bool(wanted or (passed_to_generate("kwargs") or {}).get(CACHE) is not None)
        given = input_ids, logits_processor, stopping_criteria, generation_config, setup.target.traits
        batch = Prepared(*given, inputs=model_kwargs, keeps_cache=keeps_cache)
        requests = add_noise_and_shapes(setup, by_row(setup.target, batch, stop_strings), seed)
        sequences = self._run(setup, requests, len(requests), passed_to_generate("streamer"), keep=True)
        return as_transformers(sequences, generation_config)

    @property
    def last(self) -> list[Generation]:
        """The results of this thread's last call of `generate`, `stream` or `custom_generate`, a `Generation` for each text.
        Empty before the first. With `custom_generate`, this is the only way to get stats.
        """
        return list(LAST.of_thread.get(self, []))

    def _run(
        self,
        setup: Setup,
        requests: list[Prepared],
        batch_size: int,
        streamer: Any = None,
        *,
        progress: bool = False,
        keep: bool = False,
    ) -> list[Sequence]:
        """Generate for all requests, `batch_size` of them at a time. Returns the sequences if `keep`."""
        waiting, numbers, kept = enumerate(requests), dict[Sequence, int](), list[Sequence]()
        results, sent, keep = dict[int, Generation](), 0, keep or streamer is not None
        shown = advanced("texts", len(requests)) if progress else nullcontext(lambda count: None)
        with setup.caches.lent(batch_size, current()) as caches, shown as advance:

            def admit(running: list[Sequence]) -> list[Sequence]:
                new = {start(setup, one, caches): number for number, one in islice(waiting, batch_size - len(running))}
                numbers.update(new)
                kept.extend(new if keep else ())
                return list(new)

            for committed in run(admit):
                for column in columns(kept, sent) if streamer is not None else ():
                    streamer.put(column)
                    sent += 1
                ended = {numbers.pop(one): finished(one) for one in committed if one.finish_reason is not None}
                results |= ended
                advance(len(ended))
                committed.clear()  # lets go of what has ended before others start
        if streamer is not None:
            streamer.end()
        LAST.of_thread[self] = [results[number] for number in sorted(results)]
        return kept
