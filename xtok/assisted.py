"""`XTokAssisted`: what users call."""

import sys
from collections import abc
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from itertools import islice
from threading import local
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from xtok.decoding.arguments import check_arguments, check_batch, check_rows, check_streamer
from xtok.decoding.assemble import assemble, name_of
from xtok.decoding.keywords import GenerateArguments, TextArguments
from xtok.decoding.prepare import Prepared, by_row, completed, passed_to_generate, prepare, prepare_one
from xtok.decoding.rounds import run
from xtok.decoding.sequence import Round, Sequence
from xtok.decoding.setup import Acceptance
from xtok.decoding.start import start
from xtok.drafts.base import Draft, Drafter
from xtok.drafts.policy.settings import Budget
from xtok.errors import InvalidInputError
from xtok.models.cache import CACHE
from xtok.models.cache_set import CacheSet
from xtok.models.load import Source
from xtok.models.modes import current, within
from xtok.models.placement import Device, DeviceMap, Dtype, OneOrEach, Quantization
from xtok.models.probe import traits
from xtok.models.prompts import KnownPrompt, Prompt, is_several
from xtok.models.roles import Target
from xtok.results.generation import Generation, finished
from xtok.results.outputs import as_transformers, columns
from xtok.results.progress import advanced
from xtok.results.trace import Token, WrittenRound, as_committed, round_tokens, written_round

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")
Show: TypeAlias = Callable[[Round, list[Token], abc.Sequence[str]], Iterator[T]]
BATCH = 8
"""How many sequences of a list are generated at a time."""


class XTokAssisted:
    """A target model that generates with the help of any draft, and gives exactly what it alone would give.

    Law: in float32 and float64 greedy ids equal those of `target.generate(...)` with the same arguments; sampled ids are draws
    from the target's own distribution, and equal those of `XTokAssisted(target)`, which has no draft and is the reference
    sampler, for the same seed. In half precision with fixed shapes (`stable`) both equal those of `XTokAssisted(target)`, and
    greedy ids are very likely those of `target.generate(...)` up to the first of `stats.near_ties`. A draft decides only how
    fast they come.

    One instance may serve several threads. Models and tokenizers are never changed. `setup`: what all sequences share.
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
        """`draft`: a model or `HeadsDrafter(file)`, which guesses together with `PromptLookup()` and `TokenRecycling()`; one of
        those; anything with `propose(context, budget)`; or a list of such, whose guesses are merged. A list is taken as it is.
        Drafts with the target's own token ids skip the text.

        `budget`: how much is guessed in each round. None: as much as pays, by what forward passes cost and guesses gain lately.
        `Budget(depth=5, width=1, schedule="constant")`, for example, guesses chains of five draft tokens.

        `acceptance`, of sampled texts. "match": a guess is accepted if it is what the target draws; draft and target see the
        same noise. "rejection": speculative sampling (Leviathan et al. 2023, Chen et al. 2023) by the draft's distribution,
        projected onto the target's ids by bytes, in chains of the budget's depth. Its texts are draws from the target's own
        distribution, too, but depend on the draft and that depth. "typical", **lossy**: guesses are accepted if their
        probability is above min(`posterior_threshold`, `posterior_alpha` * exp(-entropy)) (Medusa, Cai et al. 2024). With both
        of the latter, `stats.exact` is False.

        `stable`: forward passes of the target are batch-invariant: they have fixed shapes, in which a token has the same logits
        in every bit, whatever is forwarded with it. So the ids are the same in any precision, with or without a draft, alone or
        in a batch. (A pick after a side branch of a tree, where the last bits may differ, is accepted at once only if its
        margin is at least 8 times the largest rounding difference seen in trials; else the next forward pass decides.)
        None: in half precision if the target allows it. True: in any precision; a target that doesn't is refused. False: never.

        Fixed shapes are found by a few extra forward passes when they are first needed, in at most a tenth of the time spent
        generating, and kept in a cache folder (`XTOK_CACHE`, else xtok in the user's). Mixtures of experts, models whose
        forward passes can't be shared, numbers of threads that are no power of two, and other `acceptance` than "match" don't
        allow them. In half precision, an `UnstableWarning` then says what isn't promised: the same call still gives the same
        text, but near-ties (`stats.near_ties`) may be decided otherwise than without a draft or in another batch.

        `compile`: forward passes are captured as CUDA graphs by their shapes, and replayed. None: those of each model that is
        on one GPU, without hooks or offloading. True: the same, and a target that can't be captured is refused. Caches then
        stay allocated between calls. A graph is used only if it gave the bits of the forward pass that it was captured from;
        `stats.target_replays` counts.

        `device`, `dtype` and `device_map`, of models given as hub ids or paths: one for both, or a pair, the target's and the
        drafts', such as `device=("cuda:0", "cpu")`. By default, models have the precision of their configurations
        (`dtype="auto"`), the target is on the best device there is, and drafts are beside it. `device_map="auto"` spreads a
        model over several devices, by accelerate. `quantization_config` and `attn_implementation`, likewise for both or as a
        pair, are passed on to transformers' `from_pretrained`. A model that is loaded already must be as these say.

        Raises `UnsupportedModelError`, `UnsupportedTokenizerError` or `InvalidInputError` (all of `xtok.errors`).
        """
        self._arguments = {name: value for name, value in locals().items() if name != "self"}
        if isinstance(draft, list):
            self._arguments["draft"] = list(draft)
        self.setup = assemble(**self._arguments)
        self._whole: XTokAssisted | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, be it by a pickle, is made as this one was: ids and paths are loaded again, and nothing is learnt yet."""
        if self._whole is not None:
            return type(self).with_drafts, (self._whole, self.names)
        return _made_again, (type(self), self._arguments)

    def __repr__(self) -> str:
        given = {"budget": self.setup.budget, **{name: self._arguments[name] for name in ("acceptance", "stable", "compile")}}
        shown = "".join(f", {name}={value!r}" for name, value in given.items() if value not in (Budget(), "match", None))
        return f"XTokAssisted({name_of(self.model)}, drafts={list(self.names)}{shown})"

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
        """What its drafts are called in a trace."""
        return self.setup.names

    def with_drafts(self, names: abc.Collection[str]) -> "XTokAssisted":
        """The same with some of its drafts alone, by their `names`: with none of them, the target alone. Models are shared, and
        what pays is learnt anew.

        Raises `InvalidInputError` for a draft that there isn't.
        """
        made = object.__new__(type(self))
        vars(made).update(vars(self), setup=self.setup.with_drafts(names), _whole=self)
        return made

    @overload
    def generate(self, prompt: Prompt, **arguments: "Unpack[GenerateArguments]") -> Generation: ...  # type: ignore[overload-overlap]
    @overload
    def generate(self, prompt: abc.Sequence[Prompt], **arguments: "Unpack[GenerateArguments]") -> list[Generation]: ...
    @within()
    def generate(self, prompt: Any = None, **arguments: Any) -> Generation | list[Generation]:
        """Answer a prompt: a text; a chat (a list of messages); token ids (a list of whole numbers, a tensor of shape (n,) or
        (1, n)); or a tokenizer's encoding of one text. A list of such prompts is answered by a list: a list of whole numbers
        is one prompt, a list of lists of them is several.

        `tools`, `enable_thinking`, and whatever `chat_template_kwargs` holds, are passed to the templates of chats. Of an
        encoding, ids and attention mask are read.

        `arguments`, beside these, are those of transformers' `generate`. `split_special_tokens=True` reads control tokens
        written out in a text as plain text. `seed`, with `do_sample=True` (it is refused for greedy texts): the ids depend on
        target, prompt, settings and seed alone, not on the draft or on what else is in the list. The same prompt again, in a
        list or by `num_return_sequences`, gives further, independent texts.

        `prediction`: text that the answer is likely to contain, such as a document that is to be edited. It is guessed from, as
        by OpenAI's Predicted Outputs, and changes no id. `batch_size`: how many prompts of a list share forward passes; ids
        don't depend on it. `progress`: a bar on stderr; None: if that is a terminal.

        Raises `InvalidInputError` for a prompt and `UnsupportedArgumentError` for an argument that can't be honoured.
        """
        if prompt is None and "input_ids" in arguments:
            raise InvalidInputError(
                "A tokenizer's encoding is one argument here: generate(encoding), not generate(**encoding)."
            )
        many = is_several(prompt)
        streamer = arguments.pop("streamer", None)
        batch_size, progress = arguments.pop("batch_size", BATCH), arguments.pop("progress", None)
        check_batch(batch_size, progress)
        check_streamer(streamer, several=many)
        requests = prepare(self.setup, list(prompt) if many else [prompt], arguments)
        check_streamer(streamer, several=len(requests) > 1)
        batch_size = min(batch_size, len(requests))
        shown = progress or (progress is None and len(requests) > 1 and sys.stderr.isatty())
        with self.setup.caches.lent(batch_size, current()) as caches:
            if streamer is not None:
                streamer.put(requests[0].ids.cpu())
            self._run(requests, caches, batch_size, streamer, progress=shown)
        return self.last if many or len(requests) > 1 else self.last[0]

    def stream(self, prompt: Prompt, **arguments: "Unpack[TextArguments]") -> Generator[str, None, Generation]:
        """Yield the new text in pieces as they are committed, never half a character. Joined, they are `generate(...).text`.

        The generator returns (`StopIteration.value`) what `generate` returns.
        """

        def pieces(_: Round, tokens: list[Token], drafts: abc.Sequence[str]) -> Iterator[str]:
            if piece := "".join(token.text for token in tokens):
                yield piece

        return self._streamed(prompt, dict(arguments), pieces)

    def stream_tokens(self, prompt: Prompt, **arguments: "Unpack[TextArguments]") -> Generator[Token, None, Generation]:
        """Yield the new tokens as they are committed, each with who guessed it: `generate(...).tokens`, returned likewise."""
        return self._streamed(prompt, dict(arguments), lambda _, tokens, drafts: iter(tokens))

    def stream_rounds(
        self, prompt: Prompt | KnownPrompt, **arguments: "Unpack[TextArguments]"
    ) -> Generator[WrittenRound, None, Generation]:
        """Yield each round as it is committed, with all that was guessed: `generate(...).written`, returned likewise."""
        view = self.target.vocabulary.view

        def rounds(one: Round, tokens: list[Token], drafts: abc.Sequence[str]) -> Iterator[WrittenRound]:
            yield written_round(one, tokens, drafts, lambda token: view[token] or b"")

        return self._streamed(prompt, dict(arguments), rounds)

    def _streamed(
        self, prompt: Prompt | KnownPrompt, arguments: dict[str, Any], show: "Show[T]"
    ) -> Generator[T, None, Generation]:
        """What is to be shown of each round. Arguments are checked at once; a round runs when the caller asks for it, under the
        modes of this call.
        """
        modes = current()
        with within(modes):
            request = prepare_one(self.setup, prompt, arguments)

        def generator() -> Generator[T, None, Generation]:
            with self.setup.caches.lent(1, modes) as caches:
                with within(modes):
                    sequence = start(self.setup, request, caches)
                for one, tokens in round_tokens(as_committed(sequence, modes), sequence.drafts):
                    yield from show(one, tokens, sequence.drafts)
                with within(modes):
                    _LAST.given[self] = [finished(sequence)]
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
        """The Hugging Face way in: `model.generate(**inputs, custom_generate=xt)`.

        `stop_strings` is named here so that transformers hands it over: it drops `tokenizer`, without which it would refuse
        them, and it does refuse those of a generation config. Each row of a batch is a generation of its own: processors are
        copied per row, and called with a batch of one. `seed` is as in `generate`; transformers hands it over.
        """
        if model is not self.model:
            raise InvalidInputError("custom_generate was called by another model than the target. Call target.generate.")
        check_arguments({name: passed_to_generate(name) for name in ("assistant_model", "synced_gpus")})
        check_rows(stopping_criteria, stop_strings, rows=len(input_ids))
        wanted = len(input_ids) == 1 and generation_config.return_dict_in_generate and self.setup.shapes is None
        keeps_cache = bool(wanted or (passed_to_generate("kwargs") or {}).get(CACHE) is not None)
        given = input_ids, logits_processor, stopping_criteria, generation_config, traits(self.model)
        batch = Prepared(*given, inputs=model_kwargs, keeps_cache=keeps_cache)
        requests = completed(self.setup, by_row(self.target, batch, stop_strings), seed)
        with self.setup.caches.lent(len(requests), current()) as caches:
            sequences = self._run(requests, caches, len(requests), passed_to_generate("streamer"), keep=True)
        return as_transformers(sequences, generation_config)

    @property
    def last(self) -> list[Generation]:
        """What this thread's last call gave, a `Generation` for each of its texts: of `generate`, of `stream`, or of
        transformers' `generate` with `custom_generate`, which has no other way to hand out stats. Empty before the first.
        """
        return list(_LAST.given.get(self, []))

    def _run(
        self,
        requests: list[Prepared],
        caches: CacheSet,
        batch_size: int,
        streamer: Any = None,
        *,
        progress: bool = False,
        keep: bool = False,
    ) -> list[Sequence]:
        """Run requests to their ends, `batch_size` of them at a time. Returns the sequences, if they are to be kept."""
        waiting, numbers, kept = enumerate(requests), dict[Sequence, int](), list[Sequence]()
        results, sent, keep = dict[int, Generation](), 0, keep or streamer is not None

        def admit(running: list[Sequence]) -> list[Sequence]:
            new = {start(self.setup, one, caches): number for number, one in islice(waiting, batch_size - len(running))}
            numbers.update(new)
            kept.extend(new if keep else ())
            return list(new)

        with advanced("texts", len(requests)) if progress else nullcontext(lambda count: None) as advance:
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
        _LAST.given[self] = [results[number] for number in sorted(results)]
        return kept


def _made_again(kind: type[XTokAssisted], arguments: dict[str, Any]) -> XTokAssisted:
    return kind(**arguments)


class _Last(local):
    """What the last call of each instance gave, in each thread."""

    def __init__(self) -> None:
        self.given = WeakKeyDictionary[XTokAssisted, list[Generation]]()


_LAST = _Last()
