"""What xtok makes of vLLM on this machine: tokens per second alone, with vLLM's own ngram lookup, and with xtok, in turns.

`make bench-vllm`. Target: that of the pair that ships, in the shape of one of 420 M parameters, so that a forward of it takes
about 30 times as long as one of the draft. Requests come as others end, so that as many run all the time; all ways have
the same prompts. Tokens per step that was guessed for are by vLLM's own counters.
"""

from collections.abc import Iterator, Sequence
from itertools import islice, product
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams

from xtok.bench.widen import SERVED, shaped
from xtok.pair import DRAFT, TARGET, prompts

SHAPE = SERVED._replace(blocks=32)
LONGEST, NEW_TOKENS, TURNS = 8, 64, 3
REQUESTS = {1: 4, 8: 24, 32: 80}
"""How many run at a time, and how many come in all in a turn."""
SETTINGS = {"greedy": 1.0, "greedy, penalty 1.2": 1.2}
WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "xtok": {
        "speculative_config": {
            "method": "custom_class",
            "model": "xtok.serving.vllm.XTokProposer",
            "num_speculative_tokens": LONGEST,
        },
        "additional_config": {"xtok": {"draft": str(DRAFT)}},
    },
    # it imports what vLLM can't start another engine beside, so it comes last
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": LONGEST, "prompt_lookup_min": 2}},
}


class Turn(NamedTuple):
    """What came of a turn: tokens per second, tokens per step of a request, and per step that was guessed for."""

    rate: float
    per_step: float
    accepted_length: float


def engine(folder: str, way: str) -> LLM:
    return LLM(
        folder,
        dtype="bfloat16",
        enforce_eager=True,
        disable_log_stats=False,
        max_model_len=512,
        max_num_seqs=32,
        kv_cache_memory_bytes=1 << 29,
        **WAYS[way],
    )


def turn(llm: LLM, texts: Sequence[str], running: int, penalty: float) -> Turn:
    """Write texts, so many of them at a time, until fewer are left; those end outside of what is timed."""
    asked = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, repetition_penalty=penalty)
    waiting, live, sizes, steps = iter(enumerate(texts)), set[str](), dict[str, int](), 0
    before, start = counted(llm), perf_counter()

    def join() -> None:
        for number, text in islice(waiting, running - len(live)):
            llm.llm_engine.add_request(f"{start}-{number}", text, asked)
            live.add(f"{start}-{number}")

    join()
    while len(live) == running:
        found = llm.llm_engine.step()
        steps += len(found)
        sizes |= {one.request_id: len(one.outputs[0].token_ids) for one in found}
        live -= {one.request_id for one in found if one.finished}
        join()
    seconds, (drafts, accepted) = perf_counter() - start, (new - old for new, old in zip(counted(llm), before, strict=True))
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    return Turn(sum(sizes.values()) / seconds, sum(sizes.values()) / steps, 1 + accepted / drafts if drafts else 1.0)


def counted(llm: LLM) -> tuple[float, float]:
    """How often vLLM had something guessed, and how many of those ids it accepted, by the counters of this engine."""
    found: Any = llm.llm_engine.logger_manager.stat_loggers[-1].spec_decoding_prom
    if not found.spec_decoding_enabled:
        return 0.0, 0.0
    counters = found.counter_spec_decode_num_drafts, found.counter_spec_decode_num_accepted_tokens
    drafts, accepted = (next(iter(one.values()))._value.get() for one in counters)
    return drafts, accepted


def measured(llms: dict[str, LLM], running: int, penalty: float) -> dict[str, list[Turn]]:
    """The ways in turns, on the same texts."""
    texts, found = prompts(), {way: list[Turn]() for way in llms}
    for number, (way, llm) in product(range(TURNS), llms.items()):
        first = number * REQUESTS[running]
        mine = [texts[(first + i) % len(texts)] for i in range(REQUESTS[running])]
        found[way].append(turn(llm, mine, running, penalty))
    return found


def lines(found: dict[str, list[Turn]], setting: str, running: int) -> Iterator[str]:
    """A row of the table for each way: medians; a ratio is the median of turns, each against alone on the same texts."""
    for way, turns in found.items():
        ratio = median(one.rate / alone.rate for one, alone in zip(turns, found["alone"], strict=True))
        rate, per_step, length = (median(column) for column in zip(*turns, strict=True))
        yield f"| {setting} | {running} | {way} | {rate:.1f} | {ratio:.2f} | {per_step:.2f} | {length:.2f} |"


def main() -> None:
    with TemporaryDirectory() as folder:
        pair = AutoModelForCausalLM.from_pretrained(TARGET), AutoTokenizer.from_pretrained(TARGET)
        for part in shaped(pair, SHAPE):
            part.save_pretrained(folder)
        llms = {way: engine(folder, way) for way in WAYS}
    for llm in llms.values():
        turn(llm, prompts()[-2:], 1, 1.0)
    print("| setting | requests at a time | | tokens/s | × alone | tokens per step | accepted length |")
    print("|---|---|---|---|---|---|---|")
    for (setting, penalty), running in product(SETTINGS.items(), REQUESTS):
        for line in lines(measured(llms, running, penalty), setting, running):
            print(line, flush=True)


if __name__ == "__main__":
    main()
