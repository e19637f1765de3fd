"""The command line, on the pair that ships, and the figures that tell how well a pair fits."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import run
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, MambaConfig
from typer.testing import CliRunner
from worlds import CORPUS, FAMILIES, tokenizer

from xtok import XTokAssisted, __version__
from xtok.align.fit import fit
from xtok.bench.runs import Written
from xtok.cli import commands as cli
from xtok.cli import demo
from xtok.cli.generate import _print
from xtok.decoding.pick import NearTie
from xtok.errors import InvalidInputError
from xtok.models.cache import active_parameters
from xtok.models.load import from_config
from xtok.pair import DRAFT, HEADS, TARGET, prompts
from xtok.results.progress import advanced


def test_python_dash_m_prints_the_version() -> None:
    printed = subprocess.run([sys.executable, "-m", "xtok", "--version"], capture_output=True, text=True, check=True)
    assert printed.stdout == f"xtok {__version__}\n"


def test_generate_prints_the_text_whatever_guesses_and_then_one_line_of_figures() -> None:
    prompt, few = prompts()[0], ("--max-new-tokens", "16")
    expected = XTokAssisted(TARGET, DRAFT).generate(prompt, max_new_tokens=16, do_sample=False)
    for draft in ((), ("--draft", str(HEADS)), ("--draft", "lookup")):
        text, summary = run("generate", prompt, *draft, *few)
        assert text == expected.text + "\n"
        # How much is guessed follows from measured costs, so the figures differ from run to run.
        printed = re.fullmatch(
            r"16 tokens, (\d+ of them guessed, )?ended by the limit, (\d+) forward passes of the target, "
            r"(.*) tokens per forward pass, .* s\n",
            summary,
        )
        assert printed is not None, summary
        assert printed[3] == f"{16 / int(printed[2]):.2f}"
    alone, summary = run("generate", prompt, "--draft", "none", *few)
    assert alone == text
    assert "1.00 tokens per forward" in summary
    assert "guessed" not in summary


def test_generate_samples_the_same_text_for_the_same_seed_with_and_without_a_draft() -> None:
    asked = ["generate", "吾輩は", "--max-new-tokens", "16", "--temperature", "0.8", "--top-p", "0.9"]
    (text, summary), (again, _), (other, _) = (
        run(*asked, *more) for more in (("--seed", "7"), ("--seed", "7", "--draft", "none"), ("--seed", "8", "--draft", "none"))
    )
    assert text == again != other
    assert summary.endswith("\nseed 7\n")
    assert "\nseed " in run(*asked, "--draft", "none")[1]


def test_what_takes_long_to_import_is_not_imported_for_the_version_help_and_completion() -> None:
    program = "import sys\nfrom typer.testing import CliRunner\nfrom xtok.cli import commands as cli\n"
    for asked in (["--version"], ["--help"], ["generate", "--help"], ["bench", "--help"], ["bench", "chats", "--help"]):
        program += f"assert CliRunner().invoke(cli.app, {asked}).exit_code == 0\n"
    program += "print([name for name in ('torch', 'transformers') if name in sys.modules])\nimport xtok\n"
    serving = ("fastapi", "uvicorn", "prometheus_client", "sse_starlette", "xtok.serving.http")
    program += f"print([name for name in {serving} if name in sys.modules])"
    assert piped(program) == "[]\n[]\n"


def piped(program: str, **environment: str) -> str:
    """What a Python program prints if its output is a pipe."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, encoding="utf-8", env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generate_reads_stdin_files_and_lines(tmp_path: Path) -> None:
    text, lines = tmp_path / "text.txt", tmp_path / "lines.txt"
    text.write_text("吾輩は\n", encoding="utf-8-sig")
    lines.write_text("メロスは\n\n山路を\n", encoding="utf-8")
    few = ("--max-new-tokens", "4")
    expected, _ = run("generate", "吾輩は", *few)
    assert run("generate", "-", *few, stdin="吾輩は\n".encode())[0] == expected
    assert run("generate", "--file", "-", *few, stdin="吾輩は".encode())[0] == expected
    printed, summary = run("generate", "山路を", "--file", str(text), "--prompts", str(lines), "--json", *few)
    found = [json.loads(line) for line in printed.splitlines()]
    assert summary == ""
    assert [one["prompt"] for one in found] == ["山路を", "吾輩は", "メロスは", "山路を"]
    assert found[1]["text"] + "\n" == expected
    assert all(len(one["token_ids"]) == one["stats"]["new_tokens"] == 4 for one in found)
    assert {(one["finish_reason"], one["seed"]) for one in found} == {("length", None)}


def test_generate_asks_in_the_targets_chat_template(tmp_path: Path) -> None:
    shutil.copytree(TARGET, tmp_path, dirs_exist_ok=True)
    template = "{% for m in messages %}{{ m['role'] }}「{{ m['content'] }}」{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    chat = [{"role": "system", "content": "短く"}, {"role": "user", "content": "誰か"}]
    expected = XTokAssisted(tmp_path).generate(chat, max_new_tokens=6, do_sample=False).text
    few = ("--target", str(tmp_path), "--draft", "none", "--max-new-tokens", "6")
    assert run("generate", "誰か", *few, "--chat", "--system", "短く")[0] == expected + "\n"


@pytest.mark.parametrize("command", [["generate", "吾輩は"], ["serve", "--port", "0"]])
def test_what_can_not_be_stable_is_refused(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert "set_num_threads" in run(*command, "--stable", code=1)[1]


def test_generate_takes_a_limit_stops_and_the_likeliest_tokens_alone() -> None:
    whole, _ = run("generate", "吾輩は", "--max-new-tokens", "12")
    stop = whole[2:4]
    more = ("--stop", "ありえない", "--stop", stop, "--temperature", "9", "--top-k", "1")
    short, summary = run("generate", "吾輩は", "--max-new-tokens", "12", *more)
    assert stop in short
    assert len(short) < len(whole)
    assert ", complete, " in summary
    _, summary = run("generate", "吾輩は", "--draft", "none", "--max-new-tokens", "1")
    assert "1 token, ended by the limit, 1 forward pass of the target" in summary


def test_another_target_without_a_draft_says_what_guesses(tmp_path: Path) -> None:
    shutil.copytree(TARGET, tmp_path, dirs_exist_ok=True)
    few = ("--max-new-tokens", "4")
    text, printed = run("generate", "吾輩は", "--target", str(tmp_path), *few)
    assert text == run("generate", "吾輩は", *few)[0]
    assert printed.startswith("xtok: no --draft was given, so no model guesses (prompt lookup and token recycling do)")


NEEDED = '--draft is "lookup", and this command needs a draft model. Give a hub id or path.'


@pytest.mark.parametrize(
    ("command", "draft", "reported"),
    [
        ("inspect", (), "There is no draft model for {}. Give a hub id or path as --draft."),
        ("tune-draft", ("--draft", "lookup"), NEEDED),
    ],
)
def test_what_needs_a_draft_model_takes_none_of_its_own_for_another_target(
    command: str, draft: tuple[str, ...], reported: str, tmp_path: Path
) -> None:
    """Found here: the small Japanese draft that ships was measured, and tuned, beside any target."""
    target, out = tmp_path / "target", str(tmp_path / "draft")
    shutil.copytree(TARGET, target)
    more = ("--prompts", str(TARGET.parent / "prompts.txt"), "--out", out) if command == "tune-draft" else ()
    _, printed = run(command, "--target", str(target), *draft, *more, code=1)
    assert reported.format(target) in printed


def test_a_closed_pipe_ends_in_silence() -> None:
    command = [sys.executable, "-m", "xtok", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        printed = running.stderr.read()
    assert not re.search("xtok:|Traceback|BrokenPipe", printed)


def test_a_terminal_of_another_encoding_shows_what_it_can() -> None:
    program = "from xtok.cli import commands as cli, console\ncli.app = lambda **_: None\ncli.main()\n"
    program += "print('🍣は')\nprint(console.as_json({'text': '🍣は'}, None))"
    shown, found = piped(program, PYTHONIOENCODING="ascii").splitlines()
    assert shown == "\\U0001f363\\u306f"
    assert json.loads(found) == {"text": "🍣は"}
    assert piped(program, PYTHONIOENCODING="utf-8").splitlines() == ["🍣は", '{"text": "🍣は"}']


@pytest.mark.parametrize("command", ["tune-draft", "train-heads"])
def test_a_training_that_is_stopped_says_what_is_kept(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of an earlier one is."""

    def stopped(*_: object, **__: object) -> None:
        if keeps:
            file = Path("out", "config.json") if command == "tune-draft" else Path("out")
            file.parent.mkdir(exist_ok=True)
            file.touch()
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("xtok.tune.tune_draft", stopped)
    monkeypatch.setattr("xtok.tune.train_heads", stopped)
    Path("prompts.txt").write_text("吾輩は\n", encoding="utf-8")
    for printed in ("Nothing was trained yet.", "The best so far is in out."):
        keeps = printed.startswith("The best")
        said = run(command, "--prompts", "prompts.txt", "--out", "out", code=130)[1]
        assert said == f"xtok: stopped. {printed}\n"
    keeps = False
    assert "Nothing was trained yet" in run("train-heads", "--out", str(HEADS), code=130)[1]


PROMPTS = ("--prompts", str(TARGET.parent / "prompts.txt"))
REFUSED = [
    (("generate",), "There is no prompt"),
    (("generate", "a", "b"), "There are 2 prompts. Give --json"),
    (("generate", "a", "--seed", "3"), "--seed has no effect on a greedy text"),
    (("generate", "a", "--top-k", "3", "--top-p", "0.5"), "--top-p, --top-k has no effect"),
    (("generate", "a", "--temperature", "0", "--seed", "3"), "--seed has no effect"),
    (("generate", "a", "--system", "b"), "--system has no effect without --chat"),
    (("generate", "a", "--chat"), "no chat template. Leave --chat out"),
    (("generate", "a", "--stop", ""), "--stop is empty"),
    (("generate", "a", "--show", "--json"), "Give one of them"),
    (("generate", "--file", "no-such-file.txt"), "no-such-file.txt can't be read: No such file"),
    (("generate", "a", "--draft", "no-such-file.safetensors"), "does not exist. Make heads"),
    (("generate", "a", "--target", "\0"), ""),
    (("generate", "a", "--draft", "/etc/passwd"), "/etc/passwd"),
    (("inspect", "--draft", "./no/such/folder"), "./no/such/folder"),
    (("inspect", "--draft", str(HEADS), "--no-weights"), "holds heads, which have no tokenizer to compare"),
    (("inspect", "--text", str(TARGET / "model.safetensors")), "model.safetensors"),
    (("inspect", "--text", "no-file.txt"), "xtok: no-file.txt can't be read: No such file or directory.\n"),
    (("inspect", "--text", "/"), "xtok: / can't be read: Is a directory.\n"),
    (("bench", "--prompts", "no-file.txt"), "xtok: no-file.txt can't be read: No such file or directory.\n"),
    (("bench", "--draft", str(HEADS)), "holds heads, and this command needs a draft model"),
    (("train-heads", *PROMPTS, "--out", "/"), "xtok: / is a folder. Give the path of a file for the heads.\n"),
    *(
        (("serve", "--port", "0", "--memory", memory), f"xtok: --memory is {float(memory)}; give a finite number of GiB")
        for memory in ("inf", "1e300")
    ),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED)
def test_what_has_no_effect_or_makes_no_sense_is_refused_in_one_line(arguments: tuple[str, ...], words: str) -> None:
    text, error = run(*arguments, code=1)
    assert text == ""
    assert error.startswith("xtok: ")
    assert words in error
    assert error.count("\n") == 1


def test_a_stdin_that_is_closed_or_no_text_is_reported() -> None:
    shown = shlex.join([sys.executable, "-m", "xtok", "generate", "-"])
    done = subprocess.run(["sh", "-c", f"exec {shown} <&-"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    lines = done.stderr.splitlines()  # other libraries may warn first: transformers imports torchao if it is installed
    assert lines[-1] == "xtok: stdin can't be read: it is closed. Give a text or a file, or pipe one in."
    assert not any(line.startswith("Traceback") for line in lines)
    assert "stdin isn't text in UTF-8" in run("generate", "-", stdin="吾輩は".encode("cp932"), code=1)[1]


def test_generate_prints_each_piece_as_soon_as_it_is_there(capfd: pytest.CaptureFixture[str]) -> None:
    printed = []

    def pieces():
        for piece in ("は", "𠮷野", "家"):
            yield piece
            printed.append(capfd.readouterr().out)

    _print(pieces())
    assert printed == ["は", "𠮷野", "家"]
    assert capfd.readouterr().out == "\n"


def test_inspect_prints_a_table_of_the_figures_that_its_json_has(tmp_path: Path) -> None:
    printed, _ = run("inspect", "--no-weights")
    for words in ("SentencePiece", "byte-level BPE", "256 of 256", "What will be lost", "reads only the most recent part"):
        assert words in printed
    assert "The tokenizers are the same" not in printed
    assert "The tokenizers are the same" in run("inspect", "--no-weights", "--draft", str(TARGET))[0]
    sample = tmp_path / "sample.txt"
    sample.write_text("吾輩は猫である。\n名前はまだ無い。\n", encoding="utf-8")
    found = json.loads(run("inspect", "--no-weights", "--json", "--text", str(sample))[0])
    assert (found["texts"], found["characters"]) == (2, 18)
    assert (found["target"]["window"], found["draft"]["window"]) == (512, 256)
    assert found["shared"] == round(found["target"]["shared"] * found["target"]["byte_strings"])


def test_inspect_refuses_drafts_whose_guesses_cannot_be_taken_back(tmp_path: Path) -> None:
    shutil.copytree(DRAFT, tmp_path, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    MambaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    assert "MambaForCausalLM can't be rolled back" in run("inspect", "--draft", str(tmp_path), code=1)[1]


def test_a_fault_of_xtok_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(name: str) -> Any:
        raise ZeroDivisionError(name)

    monkeypatch.setattr("xtok.cli.console.pair", faulty)
    result = CliRunner().invoke(cli.app, ["inspect"])
    assert isinstance(result.exception, ZeroDivisionError)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The demonstration in little, without the real pair: its texts."""

    class Unavailable:
        @property
        def target(self) -> Path:
            raise InvalidInputError("SmolLM2 can't be fetched: there is no network.")

    monkeypatch.setattr(demo, "pair", lambda _: Unavailable())
    monkeypatch.setattr(demo, "SAMPLES", dict(list(demo.SAMPLES.items())[:2]))
    monkeypatch.setitem(demo.ARGUMENTS, "max_new_tokens", 4)
    monkeypatch.setattr(demo, "PRECISION", torch.float32)  # without near-ties
    return list(demo.SAMPLES)


def test_the_demo_fails_aloud_if_a_token_differs(short: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xtok.cli.demo.by_transformers", lambda *_, **__: Written([[5, 5, 5, 5]], 1.0, 4))
    printed, _ = run("demo", code=1)
    assert "It is left out: SmolLM2 can't be fetched: there is no network." in printed
    assert printed.count("identical to transformers' own generate: NO\n") == 2
    assert len(re.findall(r"│ NO +│", printed)) == 1


def test_the_demo_asks_the_real_pair_and_shows_each_text_twice(
    short: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stand-in has no fixed shapes to differ from those of transformers, being in float32."""
    shutil.copytree(TARGET, tmp_path, dirs_exist_ok=True)
    template = "{% for m in messages %}「{{ m['content'] }}」{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    heads = tmp_path / "heads.safetensors"
    with safe_open(HEADS, framework="pt") as kept:
        known = json.loads(kept.metadata()["xtok"]) | {"target": tmp_path.name}
    save_file(load_file(HEADS), heads, metadata={"xtok": json.dumps(known)})
    monkeypatch.setattr(demo, "pair", lambda _: SimpleNamespace(target=tmp_path, heads=heads))
    monkeypatch.setattr(demo, "QUESTIONS", ("誰か",))
    monkeypatch.setitem(demo.ANSWERED, "max_new_tokens", 6)
    printed, _ = run("demo")
    answer = XTokAssisted(tmp_path).generate([{"role": "user", "content": "誰か"}], max_new_tokens=6, do_sample=False).text
    first, _, second = printed.partition("2. Japanese")
    assert first.count(answer) == 2
    for prompt in short:
        assert second.count(prompt) == 1 and demo.SAMPLES[prompt] in second
        assert second.count(XTokAssisted(TARGET).generate(prompt, **demo.ARGUMENTS).text) == 2
    assert "xtok generate" in second and "\x1b" not in printed and "\r" not in printed
    assert printed.count("identical to the target alone: yes\n") == 3
    assert len(re.findall(r"│ yes +│", printed)) == 2


def test_the_demo_names_the_near_tie_after_which_transformers_goes_on_otherwise() -> None:
    ties = SimpleNamespace(near_ties=(NearTie(1, 0.5), NearTie(2, 0.06), NearTie(5, 0.1)))
    alone: Any = SimpleNamespace(token_ids=[1, 2, 3, 4], stats=ties)
    same, said = demo.verdict(alone, [1, 2, 3, 4], [1, 2, 3, 9])
    assert same and said.startswith("identical to the target alone: yes. transformers' own generate differs from token 3 on")
    assert "at token 2 the two best were 0.06 logits apart" in said
    assert demo.verdict(alone, [1, 2, 3, 4], [9, 2, 3, 4]) == (False, "identical to transformers' own generate: NO")
    assert demo.verdict(alone, [1, 2, 3, 5], [1, 2, 3, 4]) == (False, "identical to the target alone: NO")


def test_generate_shows_who_guessed_what_and_json_holds_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("generate", prompts()[0], "--max-new-tokens", "16")
    printed, summary = run(*asked, "--json")
    found = json.loads(printed)
    assert (found["prompt"], found["drafts"], summary) == (prompts()[0], ["draft", "prompt lookup", "token recycling"], "")
    assert "".join(one["text"] for one in found["tokens"]) == found["text"]
    assert {one["draft"] for one in found["tokens"]} <= {None, *found["drafts"]}
    assert sum(one["committed"] for one in found["rounds"]) == found["stats"]["new_tokens"] == 16
    text, printed = run(*asked, "--show")
    assert text == found["text"] + "\n"
    assert re.match(r" draft \d+    prompt lookup \d+    token recycling \d+    the target \d+ \n16 tokens", printed)
    monkeypatch.setenv("FORCE_COLOR", "1")
    tinted, _ = run(*asked, "--show")
    assert tinted != text
    assert re.sub(r"\x1b\[[0-9;]*m", "", tinted) == text


def test_vocabularies_are_compared_by_bytes_and_not_by_their_strings() -> None:
    byte_level, unigram = tokenizer("byte-level BPE"), tokenizer("Unigram with byte fallback")
    strings = byte_level.get_vocab().keys() & unigram.get_vocab().keys()
    decoded = {byte_level.decode([token]) for token in byte_level.get_vocab().values()}
    common = {text for text in decoded & unigram.get_vocab().keys() - {""} if min(text) >= "あ"}
    assert common
    assert not common & strings
    found = fit(unigram, byte_level, CORPUS)
    assert found.shared >= 256 + sum(len(text.encode()) > 1 for text in common)
    assert found.target.shared == found.shared / found.target.byte_strings
    assert found.shared == fit(byte_level, unigram, CORPUS).shared


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_tokenizer_fits_itself(family: str) -> None:
    found = fit(tokenizer(family), tokenizer(family), CORPUS, target_window=64, draft_window=64)
    assert (found.target, found.target.shared, found.target_tokens_per_draft_token) == (found.draft, 1.0, 1.0)
    assert found.same
    assert not found.losses


def test_characters_that_a_tokenizer_cannot_write_or_rewrites_are_named() -> None:
    whole = tokenizer("Unigram with byte fallback")
    assert fit(whole, tokenizer("SentencePiece BPE"), ["吾輩は猫である。"]).losses == ()
    found = fit(whole, tokenizer("Unigram without fallback"), ["吾輩は🦊である。", "🦊"])
    assert (found.target.unwritable, found.draft.unwritable) == ((), ("🦊",))
    assert (found.target.altered_texts, found.draft.altered_texts) == (0, 2)
    assert (found.target.single_bytes, found.target.missing_bytes) == (256, 0)
    assert found.draft.missing_bytes > 100
    assert any("can't write 1 character of the sample (🦊)" in loss for loss in found.losses)
    found = fit(tokenizer("byte-level BPE"), tokenizer("Unigram with NFKC"), ["１２ Ａ 猫"])
    assert (found.draft.unwritable, found.draft.rewritten) == ((), ("１", "２", "Ａ"))
    assert found.draft.normalizer == "NFKC, Prepend, Replace"
    assert any("rewrites 3 different characters of the sample (１ ２ Ａ)" in loss for loss in found.losses)
    found = fit(tokenizer("byte-level BPE"), tokenizer("WordPiece"), ["a a", "a\na"])  # spaces come back between words
    assert (found.draft.unwritable, found.draft.altered_texts) == (("\n",), 1)


def test_tokens_that_end_inside_a_character_are_counted() -> None:
    tokens = tokenizer("byte-level BPE")
    ids = tokens("🦊は𠮷").input_ids
    broken = sum(tokens.decode(ids[: i + 1]).endswith("\ufffd") for i in range(len(ids)))
    found = fit(tokenizer("characters"), tokens, ["🦊は𠮷"])
    assert broken > 0
    assert found.draft.mid_character == broken / len(ids)
    assert found.draft.tokens_per_character == len(ids) / 3
    assert found.target.mid_character == 0


def test_a_window_is_named_only_if_the_draft_sees_less_than_the_target() -> None:
    tokens = tokenizer("byte-level BPE")
    for target_window, draft_window, named in [(64, 32, True), (32, 64, False), (None, 32, False), (64, None, False)]:
        found = fit(tokens, tokens, CORPUS, target_window=target_window, draft_window=draft_window)
        assert any("window" in loss for loss in found.losses) == named
    with pytest.raises(InvalidInputError, match="no text"):
        fit(tokens, tokens, [""])


def test_the_share_that_a_draft_can_write_is_counted_in_tokens_of_the_target() -> None:
    found = fit(tokenizer("byte-level BPE"), tokenizer("WordPiece"), ["龘龘龘龘龘龘龘龘龘 the fox"])
    assert found.draft.unwritable == ("龘",)
    ids = tokenizer("byte-level BPE")("龘龘龘龘龘龘龘龘龘 the fox", add_special_tokens=False).input_ids
    assert len(ids) > 9
    assert found.writable == pytest.approx((len(ids) - 9 * 3) / len(ids))  # each of its three bytes is a token
    assert fit(tokenizer("byte-level BPE"), tokenizer("byte-level BPE"), CORPUS).writable == 1


@pytest.mark.parametrize("tied", [False, True])
def test_rows_that_are_only_looked_up_are_not_read_by_a_forward(tied: bool) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = from_config(LlamaConfig(vocab_size=100, tie_word_embeddings=tied, **sizes))
    block = 4 * 8 * 8 + 3 * 8 * 8 + 2 * 8
    assert active_parameters(model) == block + 8 + 100 * 8


def test_progress_in_a_pipe_begins_when_there_is_some(capsys: pytest.CaptureFixture[str]) -> None:
    """Found by a review: a count of nothing was shown as progress, again and again."""
    with advanced("texts", 20) as advance:
        for count in (0, 0, 1, 0, 1):
            advance(count)
    assert re.fullmatch(
        r"texts: 1 of 20, about 0:00:\d\d left\ntexts: 2 of 20, about 0:00:\d\d left\n", capsys.readouterr().err
    )


def test_warnings_are_lines_like_errors() -> None:
    """Found by a trial as a new user: they named a line of the library that reads the command line."""
    printed = run("generate", "吾輩は" * 300, "--draft", "none", "--max-new-tokens", "1")[1]
    assert "xtok: The prompt has " in printed and "PromptWarning" not in printed
