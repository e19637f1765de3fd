"""What comes from others: model folders, files of heads, prompts, and settings of all kinds."""

import ast
import json
import math
import os
import re
import warnings
from collections.abc import Callable
from copy import deepcopy
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import front_door
import pytest
import torch
from front_door import BYTES, OTHER, PROMPT, TARGET, TEMPLATE, TOKENS, with_template
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from worlds import TREE_3, examples, texts

import xtok
from xtok import Budget, HeadsDrafter, PromptLookup, XTokAssisted
from xtok.align.tokenbytes import token_bytes
from xtok.drafts.heads import described, save_heads
from xtok.drafts.medusa import MedusaHeads
from xtok.errors import DraftFailedWarning, InvalidInputError, UnsupportedModelError, XTokError
from xtok.models.cache import CACHE
from xtok.models.load import load
from xtok.models.prompts import prompt_ids

SOURCES = {path.name: ast.parse(path.read_text(encoding="utf-8")) for path in Path(xtok.__file__).parent.rglob("*.py")}
XT = XTokAssisted((TARGET, TOKENS), (OTHER, BYTES), budget=TREE_3)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}


def truth(prompt: str = PROMPT, **arguments: Any) -> list[int]:
    return front_door.truth(prompt, tokenizer=TOKENS, **{**GREEDY, **arguments})


EXPECTED = truth()


# code


STARTING = ("server.py", "grammars.py", "fetch.py")
"""What starts processes: servers to measure them, llguidance to end it in time, pip to download a wheel, which isn't run."""
FORBIDDEN = {"eval", "exec", "compile", "__import__", "torch.save", "os.system", "os.popen", "np.load"}
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "subprocess"}


def test_no_code_that_comes_with_a_model_is_trusted_nothing_is_unpickled_and_no_text_is_run() -> None:
    """It is said each time, for without a word transformers asks the user and waits."""
    seen = 0
    for name, node in ((name, node) for name, tree in SOURCES.items() for node in ast.walk(tree)):
        if isinstance(node, ast.Call):
            called, whole = ast.unparse(node.func), f"{name}: {ast.unparse(node)}"
            said = {word.arg: ast.unparse(word.value) for word in node.keywords}
            loads = called.endswith(".from_pretrained")
            seen += loads
            assert said.get("trust_remote_code", "" if loads else "False") == "False", whole
            assert said.get("weights_only") == "True" or (called != "torch.load" and not (loads and "Model" in called)), whole
            assert called not in FORBIDDEN, whole
        imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found = MODULES.intersection(module.split(".")[0] for module in imported)
        assert not found or (name in STARTING and found == {"subprocess"}), name
    assert seen >= 4


# models


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.file}",)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    TARGET.save_pretrained(tmp_path / "model")
    TOKENS.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


CODE: dict[str, dict[str, str]] = {
    "pytorch_model.bin": {},
    "pytorch_model-1.bin": {"index": "pytorch_model.bin.index.json"},
    "model-1.bin": {"index": "model.safetensors.index.json"},
    "own-1.bin": {"index": "own.safetensors.index.json", "named": "own.safetensors.index.json"},
    "adapter_model.bin": {"named": "adapter_model.bin"},
}
"""Files whose weights need code, the index that names them, and what the configuration names."""


@pytest.mark.parametrize("name", CODE)
def test_weights_that_need_code_are_refused_and_run_none(saved: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an index is called, transformers opens what it names."""
    index, named = CODE[name].get("index"), CODE[name].get("named")
    if index or not named:
        (saved / "model.safetensors").unlink()
    if index:
        (saved / index).write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": name}}))
    if named:
        config = json.loads((saved / "config.json").read_text()) | {"transformers_weights": named}
        (saved / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    for zipped, role, sources in ((True, "target", [saved]), (False, "draft", [(TARGET, TOKENS), saved])):
        torch.save({"lm_head.weight": Bomb(saved / "boom")}, saved / name, _use_new_zipfile_serialization=zipped)
        refused = rf"The {role} {saved} needs code to open its weights, namely \w+\.system.*pass the pair"
        with pytest.raises(UnsupportedModelError, match=refused):
            XTokAssisted(*sources)
        assert not (saved / "boom").exists()


@pytest.mark.parametrize("part", ["config.json", "tokenizer_config.json"])
def test_code_that_comes_with_a_model_is_not_run_and_nobody_is_asked(
    saved: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asks(*_: Any) -> str:
        raise AssertionError("the user was asked")

    monkeypatch.setattr("builtins.input", asks)
    known = json.loads((saved / part).read_text())
    own = {"AutoConfig": "own.A", "AutoModelForCausalLM": "own.A", "AutoTokenizer": ["own.A", "own.A"]}
    odd = {"model_type": "own", "tokenizer_class": "A"}
    (saved / part).write_text(json.dumps(known | {"auto_map": own} | {name: odd[name] for name in odd if name in known}))
    (saved / "own.py").write_text(f"open({str(saved / 'boom')!r}, 'w')\nclass A: pass")
    with pytest.raises(InvalidInputError, match=r"can't be loaded: .*custom code"):
        XTokAssisted(saved)
    assert not (saved / "boom").exists()


FLIPS = st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=4)
ABSURD = (2**62).to_bytes(8, "little") + b"{}"
"""A header that claims to have so many bytes."""
SPOILT = st.binary(max_size=200) | FLIPS
"""What becomes of a file: noise in place of it, or some bytes are others."""


def spoil(file: Path, how: bytes | list[tuple[int, int]]) -> None:
    data = bytearray(file.read_bytes() if isinstance(how, list) else how)
    for position, byte in how if isinstance(how, list) else ():
        data[position % len(data)] = byte
    file.write_bytes(bytes(data))


@examples(60)
@given(SPOILT, st.sampled_from(["model.safetensors", "pytorch_model.bin", "zipped"]))
@example(ABSURD, "model.safetensors")
@example(b"", "zipped")
@pytest.mark.filterwarnings("ignore")
def test_any_file_of_weights_is_refused_or_read_as_it_is(how: Any, name: str) -> None:
    """Whatever is in it, no error but those of xtok is raised, and no code but torch's is run."""
    with TemporaryDirectory() as folder:
        for part in (TARGET, TOKENS):
            part.save_pretrained(folder)
        file = Path(folder) / name.replace("zipped", "pytorch_model.bin")
        if name != "model.safetensors":
            (Path(folder) / "model.safetensors").unlink()
            torch.save(TARGET.state_dict(), file, _use_new_zipfile_serialization=name == "zipped")
        spoil(file, how)
        found = tried(lambda: load(folder, "target"))
        assert isinstance(found, tuple) or isinstance(found.error, XTokError), repr(found.error)
        assert isinstance(how, list) or re.search(f"{folder} .+(pass the pair|Download)", str(found.error))


def test_weights_of_another_shape_or_missing_ones_are_not_made_up(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidInputError, match=rf"The target {saved} lacks 1 of its weights, lm_head.weight among them\."):
        XTokAssisted(saved)
    save_file({"lm_head.weight": torch.zeros(2, 2)}, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidInputError, match="can't be loaded"):
        XTokAssisted(saved)


def test_a_configuration_that_makes_no_sense_is_refused(saved: Path) -> None:
    for config in ("{", "{}", "[]", "5", '{"model_type": "llama", "hidden_size": "x"}', "\ufffd", ""):
        (saved / "config.json").write_text(config)
        with pytest.raises(XTokError):
            XTokAssisted(saved)


# files of heads


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    save_heads(MedusaHeads(2, 32), described(TARGET, token_bytes(TOKENS)), tmp_path / "heads")
    return tmp_path / "heads"


def test_heads_that_are_pickled_are_refused(heads: Path) -> None:
    torch.save({"weight": Bomb(heads.parent / "boom"), "bias": torch.zeros(2, 32)}, heads)
    with pytest.raises(InvalidInputError, match=r"holds no heads.*Make one with: xtok train-heads"):
        HeadsDrafter(heads)
    assert not (heads.parent / "boom").exists()


KNOWN = {"target": "", "hidden_size": 32, "vocabulary": "", "accuracy": []}
SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    *(((2, 32, 32), (2, 31)), ((2, 32, 31), (2, 32)), ((2, 32), (2, 32)), ((0, 32, 32), (0, 32))),
    *(((2, 0, 0), (2, 0)), ((1, 10**6, 0), (0,)), ((10**5, 10**5, 0), (10**5, 0)), ((), ())),
]
SAID = (
    *("", "[]", "null", "[" * 99999, "9" * 9999, "{}", '{"accuracy": 5}', json.dumps(KNOWN)[:-1]),
    *(json.dumps(KNOWN | more) for more in ({"accuracy": [5]}, {"more": 1}, {"target": None, "accuracy": {}})),
)


def test_heads_of_absurd_shapes_or_types_are_refused_before_they_take_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xtok.drafts.heads.MedusaHeads", None)
    kinds = (((2, 32, 32), (2, 32), dtype) for dtype in (torch.int64, torch.bool, torch.complex64))
    for weight, bias, dtype in (*((*shapes, torch.float32) for shapes in SHAPES), *kinds):
        tensors = {"weight": torch.zeros(weight, dtype=dtype), "bias": torch.zeros(bias, dtype=dtype)}
        save_file(tensors, tmp_path / "heads", metadata={"xtok": json.dumps(KNOWN)})
        reason = "weight has shape" if dtype == torch.float32 else "weight is of"
        with pytest.raises(InvalidInputError, match=f"holds no heads: .*{reason}"):
            HeadsDrafter(tmp_path / "heads")


def test_heads_that_say_what_makes_no_sense_or_are_no_file_are_refused(tmp_path: Path) -> None:
    for said in SAID:
        tensors = {"weight": torch.zeros(2, 32, 32), "bias": torch.zeros(2, 32)}
        save_file(tensors, tmp_path / "heads", metadata={"xtok": said})
        with pytest.raises(InvalidInputError):
            XTokAssisted((TARGET, TOKENS), HeadsDrafter(tmp_path / "heads"))
    file: Any
    for file in (5, None, b"heads", "\0", "\ud800", "", ".", "no/such/file"):
        with pytest.raises(InvalidInputError):
            HeadsDrafter(file)


# anything at all


class Gone:
    """What raised instead of an answer."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def tried(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:
        return Gone(error)


def agree(found: Any, expected: Any, *, drawn: bool = False) -> bool:
    """An error of xtok, the error that transformers raises, or what the target alone gives (unless that is a draw)."""
    if isinstance(found, Gone):
        return isinstance(found.error, XTokError) or (isinstance(expected, Gone) and type(found.error) is type(expected.error))
    return drawn or found == expected


ODD = st.one_of(
    st.sampled_from(
        [None, True, False, 0, -1, 1, 2, 3, 10**9, -(10**9), 2**70, "", "x", "の", b"x", [], [""], [5], {}, (), object()]
    ),
    st.sampled_from([0.0, -1.0, 0.5, 1.0, 2.0, 1e-300, 1e300, math.nan, math.inf, -math.inf]),
    st.sampled_from([[[5]], [[]], [[10**9]], [-1], [2, 10**9], {"a": 1}, {(5,): math.nan}, "\ud800", ["\ud800"], [None]]),
)
NAMES = (
    *("do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h", "seed"),
    *("repetition_penalty", "no_repeat_ngram_size", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size"),
    *("eos_token_id", "pad_token_id", "bos_token_id", "forced_bos_token_id", "forced_eos_token_id", "num_return_sequences"),
    *("num_beams", "stop_strings", "max_time", "bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens"),
    *("min_length", "min_new_tokens", "exponential_decay_length_penalty", "guidance_scale", "generation_config", "use_cache"),
    *("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", CACHE, "cache_implementation"),
    *("watermarking_config", "penalty_alpha", "dola_layers", "prompt_lookup_num_tokens", "nonsense"),
    *("split_special_tokens", "synced_gpus", "model", "streamer", "token_healing", "remove_invalid_values", "position_ids"),
)
"""Without lengths, which are drawn apart: an absurd one is a wish that would be granted for hours."""
LENGTHS = st.sampled_from([0, 1, 3, 6, -1, -(10**9), "6", 2.5, None, [], True])


@examples(80)
@given(
    st.dictionaries(st.sampled_from(NAMES), ODD, min_size=1, max_size=2),
    st.sampled_from([6, 6, 6, 6]) | LENGTHS,
    st.sampled_from(["generate", "stream", "custom_generate"]),
)
@example({"eos_token_id": []}, 6, "generate")
@example({"do_sample": True, "temperature": 1e-300}, 6, "generate")
@example({"stop_strings": ""}, 6, "generate")
@example({"stop_strings": 5}, 6, "stream")
@example({"stop_strings": ["\ud800"]}, 6, "custom_generate")
@example({"split_special_tokens": "x"}, 6, "generate")
@example({"model": 5}, 6, "generate")
@example({"model": None}, 6, "generate")
@example({"eos_token_id": [[5]]}, 6, "generate")
@example({"repetition_penalty": False, "streamer": True}, 6, "generate")
@example({"do_sample": None, "split_special_tokens": True}, 6, "custom_generate")
@example({"synced_gpus": True}, 6, "generate")
@example({"synced_gpus": 0.5}, 6, "custom_generate")
@pytest.mark.filterwarnings("ignore")
def test_any_argument_is_honoured_or_refused_as_transformers_does(given: dict[str, Any], length: Any, way: str) -> None:
    if way == "custom_generate":
        for name in ("model", "token_healing"):  # one is transformers' own then; the other lacks its tokenizer
            given.pop(name, None)
    asked = {**GREEDY, "max_new_tokens": length, "max_length": None if length is not None else 9, **given}
    own = {"seed"} if way == "custom_generate" else {"seed", "split_special_tokens"}  # which transformers doesn't know
    plain = {name: value for name, value in asked.items() if name not in own}
    expected = tried(lambda: truth(**deepcopy(plain)))
    rest = deepcopy(asked)

    def ask() -> Any:
        if way == "generate":
            found = XT.generate(PROMPT, **rest)
            return found.token_ids if not isinstance(found, list) else found[0].token_ids
        if way == "stream":
            list(XT.stream(PROMPT, **rest))
            return XT.last[0].token_ids
        ids = torch.tensor([prompt_ids(TOKENS, PROMPT)])
        output = TARGET.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=XT, tokenizer=TOKENS, **rest)
        return output[0, ids.shape[1] :].tolist()

    found = tried(ask)
    drawn = asked["do_sample"] not in (False, None)
    singly = [tried(lambda name=name: truth(**{name: plain[name]})) for name in given if name in plain and len(given) > 1]
    useless = isinstance(found, Gone) and re.match("seed=.* has no effect on greedy generation", str(found.error))
    faults = [one for one in singly if isinstance(one, Gone)]  # of two that make no sense, either may be named first
    assert useless or any(agree(found, one, drawn=drawn) for one in (expected, *faults)), repr(getattr(found, "error", found))
    assert XT.generate(PROMPT, **GREEDY).token_ids == EXPECTED


WILD = st.one_of(
    texts(),
    st.text(st.characters(), max_size=20),
    st.text("\0\ud800\udfff\ufffe\ufeff\u202e<s>/|▁", max_size=20),
    st.builds(lambda text, count: text * count, st.text(max_size=3), st.sampled_from([1, 99, 300])),
    st.binary(max_size=20).map(lambda data: data.decode(errors="surrogateescape")),
)


@examples(25)
@given(WILD)
@example("\ud800")
def test_any_text_is_read_as_the_target_reads_it_or_refused(prompt: str) -> None:
    expected = tried(lambda: truth(prompt))
    found = tried(lambda: XT.generate(prompt, **GREEDY).token_ids)
    assert agree(found, expected)
    assert isinstance(found, Gone) == any("\ud800" <= letter <= "\udfff" for letter in prompt)
    if not isinstance(found, Gone):
        assert XT.generate([prompt, PROMPT], **GREEDY)[1].token_ids == EXPECTED


CHATTING = XTokAssisted((TARGET, with_template(TOKENS, TEMPLATE)), (OTHER, BYTES), budget=TREE_3)
CONTENT = st.one_of(WILD, ODD, st.lists(st.dictionaries(st.sampled_from(["type", "text"]), WILD, max_size=2), max_size=2))
CHATS = st.lists(st.dictionaries(st.sampled_from(["role", "content", "name"]) | WILD, CONTENT, max_size=3) | ODD, max_size=3)


@examples(25)
@given(CHATS | ODD)
@example([{"role": "user", "content": "\ud800"}])
def test_any_chat_is_read_as_the_target_reads_it_or_refused(chat: Any) -> None:
    apply = CHATTING.tokenizer.apply_chat_template
    expected = tried(lambda: list(apply(chat, add_generation_prompt=True, return_dict=True)["input_ids"]))
    found = tried(lambda: CHATTING.generate(chat, **GREEDY))
    assert agree(found, expected, drawn=True), found.error
    assert CHATTING.generate(PROMPT, **GREEDY).token_ids == EXPECTED


SENSELESS = (5, "x y", {}, math.nan, object(), [None], b"x", "\0", "\ud800", "", "/", 1e300)
SETTINGS = ("budget", "acceptance", "posterior_threshold", "posterior_alpha", "draft")
LOADING = ("device", "dtype", "device_map", "quantization_config", "attn_implementation")


def test_settings_that_make_no_sense_are_refused_in_words() -> None:
    for name, value in product((*SETTINGS, *LOADING), SENSELESS):
        found = tried(lambda name=name, value=value: XTokAssisted((TARGET, TOKENS), **{name: value}))
        assert isinstance(found, Gone) and isinstance(found.error, XTokError), (name, value, found)


@examples(40)
@given(
    st.dictionaries(st.sampled_from(["depth", "width", "nodes", "longest", "schedule", "confidence"]), ODD, max_size=3),
    st.lists(WILD | ODD, max_size=4) | WILD | ODD,
)
@example({"longest": "x"}, None)
@example({"confidence": "x"}, None)
def test_any_budget_is_kept_to_and_any_corpus_looked_up_or_they_are_refused(settings: dict[str, Any], corpus: Any) -> None:
    budget, lookup = tried(lambda: Budget(**settings)), tried(lambda: PromptLookup(corpus=corpus))
    assert agree(budget, None, drawn=True), budget.error
    assert agree(lookup, None, drawn=True), lookup.error
    drafts = [(OTHER, BYTES), *([] if isinstance(lookup, Gone) else [lookup])]
    xt = XTokAssisted((TARGET, TOKENS), drafts, budget=TREE_3 if isinstance(budget, Gone) else budget)
    generation = xt.generate(PROMPT, **GREEDY)
    assert (generation.token_ids, generation.stats.draft_error) == (EXPECTED, None)


@examples(30)
@given(SPOILT)
def test_any_file_of_heads_is_refused_or_changes_no_text(how: Any) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "heads"
        save_heads(MedusaHeads(2, 32), described(TARGET, token_bytes(TOKENS)), file)
        spoil(file, how)
        xt = tried(lambda: XTokAssisted((TARGET, TOKENS), HeadsDrafter(file), budget=Budget(2, width=4, schedule="constant")))
        assert agree(xt, None, drawn=True), repr(xt.error)
        if not isinstance(xt, Gone):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DraftFailedWarning)
                assert xt.generate(PROMPT, **GREEDY).token_ids == EXPECTED
