"""xtok inside vLLM: a proposer for its method `custom_class`. vLLM schedules, verifies and commits. This module imports
nothing of vLLM until vLLM runs it.

    LLM(
        model="llm-jp/llm-jp-13b-v1.0",
        speculative_config={
            "method": "custom_class",
            "model": "xtok.serving.vllm.XTokProposer",
            "num_speculative_tokens": 8,
        },
        additional_config={"xtok": {"draft": "cyberagent/open-calm-small"}},
    )
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from logging import getLogger
from typing import Any

from transformers import AutoTokenizer

from xtok.drafts.policy.settings import Budget
from xtok.errors import InvalidInputError, shown
from xtok.serving.drafting import CHAINS, DraftedText, DraftEngine

_log = getLogger(__name__)


class XTokProposer:
    """A proposer: vLLM asks it for the guesses of all requests of a step at once.

    Laws: the output ids are vLLM's own, whatever this returns. After `load_model`, it raises no error, since that would end
    vLLM: an error is counted in `failures`, the first is logged, and nothing is guessed in that step. It keeps no requests but
    those of the latest step.

    vLLM passes no request ids, and moves requests between rows, so a row is recognised by its token ids.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Raises `InvalidInputError` for settings that make no sense; vLLM doesn't start then."""
        try:
            self._longest: int = vllm_config.speculative_config.num_speculative_tokens
            given = vllm_config.additional_config
        except AttributeError as error:
            message = f"vllm_config is {shown(vllm_config)}; it must be a VllmConfig, which vLLM passes."
            raise InvalidInputError(message) from error
        self._config = vllm_config
        self._draft, self._budget = _settings(given)
        self._engine: DraftEngine | None = None
        self._known = dict[bytes, list[DraftedText]]()
        self.failures = 0

    def load_model(self, *_: Any) -> None:
        """Load the draft, on the first tensor-parallel rank alone, whose guesses count. Raises what `DraftEngine` raises."""
        if import_module("vllm.distributed").get_tensor_model_parallel_rank():
            return
        model = self._config.model_config
        revision = model.tokenizer_revision
        tokenizer: Any = AutoTokenizer.from_pretrained(model.tokenizer, revision=revision, trust_remote_code=False)
        ends = model.try_get_generation_config().get("eos_token_id")
        ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        self._engine = DraftEngine(tokenizer, self._draft, size=model.get_vocab_size(), ends=ends, budget=self._budget)

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Guesses for each row, at most `num_speculative_tokens` ids.

        `sampled_token_ids`: the ids that this step committed for each row; empty until its prompt is read. `token_ids_cpu`: the
        rows' ids, (rows or more, positions), int32. `num_tokens_no_spec`: how many of them are committed, for each row.
        """
        if self._engine is None:
            return []
        try:
            rows = [token_ids_cpu[row, : num_tokens_no_spec[row]] for row in range(len(sampled_token_ids))]
            sizes = [len(new) for new in sampled_token_ids]
            texts = self._followed(self._engine, rows, sizes)
            going = [text for text, size in zip(texts, sizes, strict=True) if size]
            guesses = dict(zip(going, self._engine.propose(going, self._longest), strict=True))
            return [list(guesses[text].tokens) if size else [] for text, size in zip(texts, sizes, strict=True)]
        except Exception as error:
            self._fail(self._engine, error)
            return [[] for _ in sampled_token_ids]

    def _followed(self, engine: DraftEngine, rows: Sequence[Any], sizes: Sequence[int]) -> list[DraftedText]:
        """The text of each row, with the ids that the row has now. Texts without a row are dropped before others are added."""
        found = [self._take(row[: len(row) - size].tobytes()) for row, size in zip(rows, sizes, strict=True)]
        for text in (text for texts in self._known.values() for text in texts):
            engine.drop(text)
        self._known = {}
        followed = [self._text(engine, *one) for one in zip(found, rows, sizes, strict=True)]
        for row, text in zip(rows, followed, strict=True):
            self._known.setdefault(row.tobytes(), []).append(text)
        return followed

    def _take(self, ids: bytes) -> DraftedText | None:
        """Take the known text with these ids, so that no other row gets it; else the longest that they begin with, since vLLM
        asks for no guesses while a request is near its maximum length. None if there is none.
        """
        beginnings = (known for known, texts in self._known.items() if texts and ids.startswith(known))
        texts = self._known.get(ids) or self._known.get(max(beginnings, key=len, default=b""))
        return texts.pop() if texts else None

    @staticmethod
    def _text(engine: DraftEngine, known: DraftedText | None, row: Any, size: int) -> DraftedText:
        """A row's text, up to date with what was committed. `size`: how many of the row's ids this step committed."""
        if known is None:
            return engine.add(row.tolist())
        before = len(row) - size
        if before > len(known.ids):
            engine.observe(known, row[len(known.ids) : before].tolist())
        engine.observe(known, row[before:].tolist())
        return known

    def _fail(self, engine: DraftEngine, error: Exception) -> None:
        if not self.failures:
            _log.warning("xtok guesses nothing in this step, and reports no further failures.", exc_info=error)
        self.failures += 1
        self._known = {}
        for text in engine.texts:
            engine.drop(text)


def _settings(given: Any) -> tuple[Any, Budget]:
    """The draft, and the budget. Raises `InvalidInputError`."""
    settings = given.get("xtok") if isinstance(given, Mapping) else None
    if not isinstance(settings, Mapping) or not settings.get("draft") or not set(settings) <= {"draft", "budget"}:
        raise InvalidInputError(
            f"additional_config is {given!r}; it must name a draft: {{'xtok': {{'draft': 'cyberagent/open-calm-small'}}}}. "
            "Beside 'draft' it may have a 'budget', such as {'depth': 5}, and nothing else."
        )
    try:
        return settings["draft"], replace(CHAINS, **settings.get("budget", {}))
    except TypeError as error:
        raise InvalidInputError(f"budget is {settings['budget']!r}; give settings of xtok.Budget: {error}.") from error
