"""What is tried once is kept for other processes, takes little of the time, and is never in the way."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from math import inf
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from front_door import TOKENS
from inside import findings_of
from test_batches import BYTES, TEXTS, UNRELATED, ids_of, long
from test_stable import HALF, WAYS, target

from xtok import XTokAssisted
from xtok.models import findings, stable, timing
from xtok.models.findings import Findings, cache_folder, described
from xtok.models.forwards import Answer, Ask, answered
from xtok.models.keeping import KeepingCache
from xtok.models.shapes import USUAL
from xtok.models.shared_cache import SharedCache
from xtok.models.stable import StableShapes
from xtok.models.trials import TRIED, Trials

PROMPTS = [TEXTS[0], long(60), long(122)]
SOME = {(1, 4, 128, 128): True, (2, 1, 512, 256): False}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XTOK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many ids each forward pass of a target has. The clock goes by them, so a test of shares depends on no machine."""
    found = list[int]()
    lm = target("Llama", HALF)
    own = type(lm).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(kwargs["input_ids"].numel())
        return own(self, *args, **kwargs)

    monkeypatch.setattr(type(lm), "forward", forward)
    for module in ("models.timing", "models.stable"):
        monkeypatch.setattr(f"xtok.{module}.perf_counter", lambda: float(len(found)))
    yield found


def made(model: Any = None) -> XTokAssisted:
    return XTokAssisted((model or target("Llama", HALF), TOKENS), (UNRELATED, BYTES))


def test_a_second_instance_tries_nothing_that_the_first_one_did(forwards: list[int]) -> None:
    xt = made()
    wanted = [xt.generate(prompt, **WAYS["greedy"]) for prompt in PROMPTS * 3]
    assert xt.setup.shapes is not None and xt.setup.shapes._spent
    before = len(forwards)
    again = made()
    found = [again.generate(prompt, **WAYS["greedy"]) for prompt in PROMPTS[:1]]
    assert findings_of(again.setup.shapes).agreed.items() >= findings_of(xt.setup.shapes).agreed.items()
    assert ids_of(found) == ids_of(wanted[:1])
    assert len(forwards) > before


def test_making_an_instance_takes_few_forward_passes_and_the_next_one_none(forwards: list[int]) -> None:
    """A target whose weights are fetched for each of them must not pay dozens."""
    lm = deepcopy(target("Llama", HALF))
    XTokAssisted((lm, TOKENS), stable=False)  # what every target is tried by
    before = len(forwards)
    XTokAssisted((lm, TOKENS))
    assert len(forwards) - before <= 5
    before = len(forwards)
    XTokAssisted((lm, TOKENS))
    assert len(forwards) == before


def test_shapes_narrower_than_the_usual_one_are_tried_soon_and_others_within_a_tenth_of_the_time(
    forwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by benchmark: the first 400 tokens of SmolLM2 on a CPU without AMX took 1.2 times as long, since its forward passes
    had 16 ids until everything else had been tried.
    """
    xt, tried, agrees = made(), list[tuple[int, float]](), Trials.agrees
    shapes = xt.setup.shapes
    assert shapes is not None

    def noted(trials: Trials, rows: int, width: int, seen: int, least: int) -> bool:
        tried.append((width, (shapes._spent - 1) / max(1, shapes._served)))  # reading the clock takes 0 to 1 of its seconds
        return agrees(trials, rows, width, seen, least)

    monkeypatch.setattr(Trials, "agrees", noted)
    for prompt in PROMPTS[:1] * 6:
        xt.generate(prompt, **WAYS["greedy"])
    for width, spent in tried[1:]:
        assert spent <= (1.0 if width < USUAL else 0.1)
    assert any(width < USUAL and spent > 0.1 for width, spent in tried)


def test_fewer_sequences_are_forwarded_by_a_known_shape_of_more(forwards: list[int]) -> None:
    """Found by benchmark: in the first list of 16 chats of SmolLM2, 26 of 47 seconds went into 42 trials."""
    shapes = StableShapes(target("Llama", HALF))
    assert shapes.fit(4, 4, TRIED, 4) == (4, 4), "without any shape, it is tried at once"
    before = len(forwards)
    assert shapes.fit(3, 4, TRIED, 4) == shapes.fit(3, 3, TRIED, 8) == (4, 4)
    assert len(forwards) == before, "there is no time for trials yet"
    assert shapes.fit(3, 4, TRIED, 3) == (3, 4) and len(forwards) > before, "four rows have no memory"
    assert shapes.fit(8, 1, TRIED, 8) == (8, 1) and shapes.fit(2, 1, TRIED, 8) == (2, 2), "most of 8 rows would be padding"
    shapes.served(1e6)
    assert shapes.fit(7, 1, TRIED, 8) == (7, 1)


def test_shapes_with_hardly_fewer_ids_than_a_known_one_are_tried_last(forwards: list[int]) -> None:
    """Found by benchmark: trials of 15, 13 and 11 rows took a tenth of the time of lists of 16 chats."""
    shapes = StableShapes(target("Llama", HALF))
    assert shapes.fit(16, 1, TRIED, 16) == (16, 1)
    shapes.served(20 * shapes._spent)  # 5% of the time went into trials so far
    before = len(forwards)
    assert shapes.fit(15, 1, TRIED, 16) == shapes.fit(13, 1, TRIED, 16) == (16, 1) and len(forwards) == before
    assert shapes.fit(12, 1, TRIED, 16) == (12, 1) and len(forwards) > before
    shapes.served(1e6)
    assert shapes.fit(15, 1, TRIED, 16) == (15, 1)


@pytest.mark.parametrize(("kind", "rows"), [(SharedCache, 4), (KeepingCache, 4), (SharedCache, 2)])
def test_rows_of_padding_take_no_memory_and_leave_kept_prefixes_alone(kind: Any, rows: int, forwards: list[int]) -> None:
    """Found in review: they lay where the cache, which grew, had no memory any more; and what other rows kept was forgotten."""
    lm = target("Llama", HALF)
    shapes = StableShapes(lm)
    for seen in (512, 128, 256):
        assert shapes.fit(rows, 1, seen, rows) == (rows, 4 // rows)
    shapes._spent = inf  # no time for other trials
    cache = kind(lm, rows=rows, capacity=rows * 192, shapes=shapes)
    slots, alone = [cache.join() for _ in range(rows)], SharedCache(lm, shapes=StableShapes(lm)).join()
    for number, slot in enumerate([*slots, alone]):
        answered([Ask(slot, [5 + number % rows] * 20, 1)])
    slots.pop().leave(keep=True)
    kept = sorted(getattr(cache, "_kept", ()))
    for token in range(120):
        found = answered([Ask(one, [3 + token % 50], 1) for one in slots])
        (wanted,) = answered([Ask(alone, [3 + token % 50], 1)])
        assert all(isinstance(one, Answer) for one in (wanted, *found))
        assert torch.equal(found[0].logits, wanted.logits)
        if slots[0].length < 120:  # then the cache grows
            assert sorted(getattr(cache, "_kept", ())) == kept
            assert found[0].cost.rows == 4 or kept, "of padding, too"


def test_trials_are_left_out_of_the_seconds_of_rounds(forwards: list[int]) -> None:
    """Found by benchmark: rounds of 16 chats without guesses seemed to take ten times as long, since new shapes were tried in
    them, so guesses of 31 tokens for each chat looked cheap.
    """
    xt = made()
    xt.generate(PROMPTS * 2, **WAYS["greedy"])
    assert xt.setup.policy is not None and xt.setup.shapes is not None and xt.setup.shapes._spent > 10
    measured = [cell.latest for size in xt.setup.policy.shared.sizes.values() for cell in size.rounds.cells.values()]
    assert 0 < max(measured) <= 3


def test_excluded_blocks_may_lie_within_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timing, "perf_counter", lambda: now[0])
    before = timing.EXCLUDED.seconds
    with timing.excluded():
        now[0] += 1
        with timing.excluded():
            now[0] += 2
        now[0] += 4
    now[0] += 8
    assert timing.EXCLUDED.seconds - before == 7


def test_what_another_instance_tried_meanwhile_is_not_tried_again(forwards: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = made(), made()
    for prompt in PROMPTS * 3:
        first.generate(prompt, **WAYS["greedy"])
    known, tried, agrees = set(findings_of(first.setup.shapes).agreed), list[tuple[int, ...]](), Trials.agrees

    def noted(trials: Trials, *shape: int) -> bool:
        tried.append(shape)
        return agrees(trials, *shape)

    monkeypatch.setattr(Trials, "agrees", noted)
    for prompt in PROMPTS * 3:
        second.generate(prompt, **WAYS["greedy"])
    assert known and not known.intersection(tried)
    assert known & set(findings_of(second.setup.shapes).agreed)


def test_files_of_models_in_other_states_are_not_those_of_a_model() -> None:
    lm = target("Llama", HALF)
    whole = described(lm, ["state"])
    changed = deepcopy(lm)
    assert described(changed, ["state"]) == whole
    next(changed.parameters()).data[0, 0] += 1
    hooked = deepcopy(lm)
    hooked.lm_head.register_forward_hook(lambda module, args, output: output)
    others = [described(changed, ["state"]), described(deepcopy(lm).float(), ["state"]), described(lm, ["another"])]
    assert len({whole, *others}) == 4
    assert described(hooked, ["state"]) is None, "what a hook of the caller's does isn't known"


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "FBGEMM_ENABLE_INSTRUCTIONS"])
def test_variables_by_which_libraries_choose_kernels_make_a_difference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = target("Llama", HALF)
    before = described(lm, [])
    monkeypatch.setenv(name, "3")
    assert described(lm, []) != before


def kept(agreed: dict[Any, bool], tolerance: float | None = None, digest: str = "0" * 64) -> Findings:
    file = Findings(digest)
    file.agreed, file.tolerance = dict(agreed), tolerance
    file.save()
    return file


def loaded(digest: str = "0" * 64) -> Findings | None:
    file = Findings(digest)
    return file if file.load() else None


SENSELESS = [
    "",
    "{",
    "[]",
    "null",
    '{"agreed": 3}',
    '{"agreed": [[1]], "tolerance": null}',
    "\udcff",
    '{"digest": "DIGEST", "agreed": [[1, 4, 1e999, 128, true]], "tolerance": null}',
    '{"digest": "DIGEST", "agreed": [], "tolerance": 1e999}',
    '{"digest": "DIGEST", "agreed": [], "tolerance": -1.0}',
    '{"digest": "DIGEST", "agreed": [], "tolerance": 0}',
    '{"digest": "DIGEST", "agreed": [[1, 4, 128, 128, "no"]], "tolerance": null}',
    '{"digest": "DIGEST", "agreed": [[1, 4, -128, 128, true]], "tolerance": null}',
    '{"digest": "DIGEST", "agreed": [], "tolerance": ' + "[" * 100_000,
]


@pytest.mark.parametrize("text", SENSELESS, ids=range(len(SENSELESS)))
def test_a_file_that_makes_no_sense_is_as_good_as_none(text: str, folder: Path) -> None:
    file = kept(SOME, 0.5)
    assert file.path is not None
    file.path.write_text(text.replace("DIGEST", "0" * 64), encoding="utf-8", errors="surrogateescape")
    assert loaded() is None
    file.save()
    found = loaded()
    assert found is not None and (found.agreed, found.tolerance) == (SOME, 0.5)


def test_a_pipe_in_a_files_place_is_as_good_as_none() -> None:
    """Found by a hostile trial: the first call waited for ever for somebody to write to it."""
    path = kept(SOME).path
    assert path is not None
    path.unlink()
    os.mkfifo(path)
    assert loaded() is None
    kept(SOME)
    found = loaded()
    assert found is not None and found.agreed == SOME
    os.truncate(path, 2**40)  # to read that would take all memory
    assert loaded() is None


def test_a_file_of_another_digest_isnt_read() -> None:
    file = kept(SOME, digest="a" * 64)
    other = Findings("a" * 63 + "b")
    assert other.path == file.path and not other.load()


def test_a_folder_that_cant_be_written_to_is_as_good_as_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.parent.joinpath("file").write_text("")
    monkeypatch.setenv("XTOK_CACHE", str(folder.parent / "file"))
    kept(SOME)
    assert loaded() is None
    assert made().generate(TEXTS[0], **WAYS["greedy"]).stats.exact


def test_a_user_without_a_home_folder_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XTOK_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert cache_folder() is None
    assert made().generate(TEXTS[0], **WAYS["greedy"]).stats.exact


def test_a_full_disk_leaves_no_part_of_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(findings.json, "dump", full)
    kept(SOME)
    assert list((folder / "shapes").iterdir()) == []


def test_several_writers_leave_one_whole_file(folder: Path) -> None:
    def write(rows: int) -> None:
        for width in range(1, 21):
            kept({(rows, width, 128, 128): True})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(1, 5)))
    found = loaded()
    assert found is not None and all(found.agreed.values()) and len(found.agreed) >= 20
    assert [path.suffix for path in (folder / "shapes").iterdir()] == [".json"]


def test_what_another_process_found_is_kept() -> None:
    kept({(1, 4, 128, 128): True}, 0.25)
    kept({(1, 8, 128, 128): False})
    found = loaded()
    assert found is not None and (found.agreed, found.tolerance) == ({(1, 4, 128, 128): True, (1, 8, 128, 128): False}, 0.25)


def test_shapes_that_were_refused_elsewhere_are_not_used() -> None:
    lm = target("Llama", HALF)
    shapes = StableShapes(lm)
    findings_of(shapes).agreed[1, 4, 128, 128] = False
    shapes._known.learn()
    again = StableShapes(lm)
    assert again.fit(1, 3, 128, 1) != (1, 4) and again.padded(1, 3) == 8


def test_a_trial_that_fails_is_made_again_by_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may be short for a moment."""

    def fails(*_: Any) -> bool:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(stable, "_SHARE", 1e9)
    lm = target("Llama", HALF)
    with monkeypatch.context() as patched:
        patched.setattr(Trials, "agrees", fails)
        shapes = StableShapes(lm)
        assert shapes.fit(1, 3, 128, 1) == (1, 16)
    again = StableShapes(lm)
    assert not findings_of(again).agreed and again.fit(1, 3, 128, 1) == (1, 4)


def test_threads_that_want_shapes_at_once_try_each_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by a review: a second thread took a cache that wasn't filled yet, and refused the shape for good."""
    monkeypatch.setattr(stable, "_SHARE", 1e9)
    StableShapes(target("Llama", HALF))
    for _ in range(3):
        shapes = StableShapes(target("Llama", HALF))
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda new, shapes=shapes: (shapes.fit(1, new, 128, 1), shapes.tolerance), [3, 7, 15, 20, 30, 40]))
        assert not shapes._known.failed and all(findings_of(shapes).agreed.values())


def test_the_folder_is_the_users_own_unless_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.setenv("XTOK_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine" / "xtok"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "xtok"


def test_another_process_reads_what_was_found() -> None:
    def other() -> None:
        file = loaded()
        assert file is not None and file.agreed == SOME
        file.agreed[3, 4, 128, 128] = True
        file.save()

    kept(SOME, 0.5)
    process = get_context("fork").Process(target=other)  # a new one would import torch first
    process.start()
    process.join()
    found = loaded()
    assert process.exitcode == 0
    assert found is not None and found.agreed == SOME | {(3, 4, 128, 128): True}


def test_bits_of_a_shape_from_a_file_are_those_of_the_usual_one(folder: Path) -> None:
    """As when the file was written by a process that tried everything."""
    first = made()
    wanted = [first.generate(prompt, **WAYS["penalty"]).token_ids for prompt in PROMPTS]
    second = made()
    assert ids_of(second.generate(PROMPTS, batch_size=3, **WAYS["penalty"])) == wanted
    assert torch.get_num_threads() == 1
