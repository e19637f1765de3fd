"""What is tried once is kept for other processes, takes little of the time, and is never in the way."""

import os
from copy import deepcopy
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import BYTES, TEXTS, UNRELATED, ids_of, long
from close_calls import HALF, WAYS, target
from front_door import TOKENS, forwards
from inside import findings_of
from torch.overrides import TorchFunctionMode

from xtok import XTokAssisted
from xtok.models.findings import Findings, cache_folder, described
from xtok.models.stable import StableShapes
from xtok.models.trials import TRIED

PROMPTS = [TEXTS[0], long(60), long(122)]
SOME = {(1, 4, 128, 128): True, (2, 1, 512, 256): False}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XTOK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def made(model: Any = None) -> XTokAssisted:
    return XTokAssisted((model or target("Llama", HALF), TOKENS), (UNRELATED, BYTES))


class LookUps(TorchFunctionMode):
    """Counts look-ups of embeddings, of which a forward pass has one. Not by a hook: what those do isn't known to xtok."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.nn.functional.embedding
        return func(*args, **(kwargs or {}))


def test_a_second_instance_tries_nothing_that_the_first_one_did() -> None:
    """And has the same bits, as if it had tried everything."""
    xt = made()
    assert xt.setup.shapes is not None
    xt.setup.shapes.served(1e9)  # so that all is tried that is wanted
    wanted = ids_of(xt.generate(PROMPTS, **WAYS["penalty"]))
    again, known = made(), dict(findings_of(xt.setup.shapes).agreed)
    assert again.setup.shapes is not None
    again.setup.shapes.served(1e9)
    with LookUps() as seen:
        assert findings_of(again.setup.shapes).agreed == known != {}
        found = again.generate(PROMPTS, **WAYS["penalty"])
    assert ids_of(found) == wanted
    assert findings_of(again.setup.shapes).agreed == known
    assert seen.count <= sum(one.stats.target_forwards + one.stats.draft_forwards for one in found)


def test_making_an_instance_takes_few_forward_passes_and_the_next_one_none() -> None:
    """A target whose weights are fetched for each of them must not pay dozens."""
    lm = deepcopy(target("Llama", HALF))
    XTokAssisted((lm, TOKENS), stable=False)  # what every target is tried by
    for most in (5, 0):
        with LookUps() as seen:
            XTokAssisted((lm, TOKENS))
        assert seen.count <= most


def test_fewer_sequences_are_forwarded_by_a_known_shape_of_more() -> None:
    """Found by benchmark: in the first list of 16 chats of SmolLM2, 26 of 47 seconds went into 42 trials."""
    shapes = StableShapes(target("Llama", HALF))
    assert shapes.fit(4, 4, TRIED, 4) == (4, 4), "without any shape, it is tried at once"
    with forwards(target("Llama", HALF)) as seen:
        assert shapes.fit(3, 4, TRIED, 4) == shapes.fit(3, 3, TRIED, 8) == (4, 4)
        assert not seen, "there is no time for trials yet"
        assert shapes.fit(3, 4, TRIED, 3) == (3, 4) and seen, "four rows have no memory"
    assert shapes.fit(8, 1, TRIED, 8) == (8, 1) and shapes.fit(2, 1, TRIED, 8) == (2, 2), "most of 8 rows would be padding"
    shapes.served(1e6)
    assert shapes.fit(7, 1, TRIED, 8) == (7, 1)


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
    '{"agreed": [[1]], "tolerance": null}',
    "\udcff",
    '{"digest": "DIGEST", "agreed": [[1, 4, 1e999, 128, true]], "tolerance": null}',
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


def test_a_folder_that_cant_be_written_to_is_as_good_as_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.parent.joinpath("file").write_text("")
    monkeypatch.setenv("XTOK_CACHE", str(folder.parent / "file"))
    kept(SOME)
    assert loaded() is None
    assert made().generate(TEXTS[0], **WAYS["greedy"]).stats.exact


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
