"""The command line, on the pair that ships, and the figures that tell how well a pair fits."""

import json
import re
import shutil
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import models_are_loaded_once, run
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner
from worlds import CORPUS, FAMILIES, tokenizer

from xtok import XTokAssisted, __version__
from xtok.align.fit import fit
from xtok.cli import commands as cli
from xtok.cli import demo
from xtok.cli.console import STDIN, as_json, read_text
from xtok.errors import InvalidInputError
from xtok.pair import DRAFT, HEADS, TARGET, prompts
from xtok.results.progress import advanced

loaded_once = models_are_loaded_once


def with_template(folder: Path, template: str) -> None:
    """The target that ships, with a chat template."""
    shutil.copytree(TARGET, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def test_generate_prints_the_text_whatever_guesses_and_then_one_line_of_figures() -> None:
    prompt, few = prompts()[0], ("--max-new-tokens", "16")
    expected = XTokAssisted(TARGET).generate(prompt, max_new_tokens=16, do_sample=False)
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
    _, summary = run("generate", "吾輩は", "--draft", "none", "--max-new-tokens", "1")
    assert "1 token, ended by the limit, 1 forward pass of the target, 1.00 tokens per forward" in summary


def test_generate_samples_by_the_seed_with_and_without_a_draft_until_a_stop() -> None:
    asked = ["generate", "吾輩は", "--max-new-tokens", "12", "--temperature", "0.8", "--top-p", "0.9"]
    text, summary = run(*asked, "--seed", "7")
    assert text == run(*asked, "--seed", "7", "--draft", "none")[0] != run(*asked, "--seed", "8", "--draft", "none")[0]
    assert summary.endswith("\nseed 7\n")
    short, summary = run(*asked, "--seed", "7", "--stop", "ありえない", "--stop", text[2:4])
    assert text[2:4] in short and len(short) < len(text)
    assert ", complete, " in summary
    greedy, _ = run("generate", "吾輩は", "--max-new-tokens", "4")
    assert run("generate", "吾輩は", "--max-new-tokens", "4", "--temperature", "9", "--top-k", "1")[0] == greedy


def test_what_takes_long_to_import_is_not_imported_for_the_version_help_and_completion() -> None:
    program = "import sys\nfrom typer.testing import CliRunner\nfrom xtok.cli import commands as cli\n"
    for asked in (["--version"], ["--help"], ["generate", "--help"], ["bench", "--help"], ["bench", "chats", "--help"]):
        program += f"assert CliRunner().invoke(cli.app, {asked}).exit_code == 0\n"
    program += "print([name for name in ('torch', 'transformers') if name in sys.modules])\nimport xtok\n"
    serving = ("fastapi", "uvicorn", "prometheus_client", "sse_starlette", "xtok.serving.http")
    program += f"print([name for name in {serving} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n[]\n", 0), done.stderr


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
    with_template(tmp_path, "{% for m in messages %}{{ m['role'] }}「{{ m['content'] }}」{% endfor %}")
    chat = [{"role": "system", "content": "短く"}, {"role": "user", "content": "誰か"}]
    expected = XTokAssisted(tmp_path).generate(chat, max_new_tokens=6, do_sample=False).text
    few = ("--target", str(tmp_path), "--draft", "none", "--max-new-tokens", "6")
    assert run("generate", "誰か", *few, "--chat", "--system", "短く")[0] == expected + "\n"


def test_what_can_not_be_stable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for command in (["generate", "吾輩は"], ["serve", "--port", "0"]):
        assert "set_num_threads" in run(*command, "--stable", code=1)[1]


def test_another_target_without_a_draft_says_what_guesses(tmp_path: Path) -> None:
    shutil.copytree(TARGET, tmp_path, dirs_exist_ok=True)
    few = ("--max-new-tokens", "4")
    text, printed = run("generate", "吾輩は", "--target", str(tmp_path), *few)
    assert text == run("generate", "吾輩は", *few)[0]
    assert printed.startswith("xtok: no --draft was given, so no model guesses (prompt lookup and token recycling do)")


def test_python_dash_m_runs_it_and_a_closed_pipe_ends_in_silence() -> None:
    command = [sys.executable, "-m", "xtok", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        printed = running.stderr.read()
    assert not re.search("xtok:|Traceback|BrokenPipe|No module", printed)
    assert run("--version")[0] == f"xtok {__version__}\n"


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "\\U0001f363\\u306f"), ("utf-8", "🍣は")])
def test_a_terminal_of_another_encoding_shows_what_it_can(monkeypatch: pytest.MonkeyPatch, encoding: str, shown: str) -> None:
    out = TextIOWrapper(BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(cli, "app", lambda **_: print("🍣は", as_json({"text": "🍣は"}, None), sep="\n", flush=True))
    cli.main()
    text, data = out.buffer.getvalue().decode(encoding).splitlines()  # type: ignore[attr-defined]
    assert (text, json.loads(data)) == (shown, {"text": "🍣は"})


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
    (("inspect", "--target", "."), "There is no draft model for .. Give a hub id or path as --draft."),
    (("tune-draft", *PROMPTS, "--out", "o", "--draft", "lookup"), '--draft is "lookup", and this command needs a draft model'),
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


def test_a_stdin_that_is_closed_or_no_text_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "stdin isn't text in UTF-8" in run("generate", "-", stdin="吾輩は".encode("cp932"), code=1)[1]
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InvalidInputError, match="stdin can't be read: it is closed"):
        read_text(STDIN)


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


def test_a_fault_of_xtok_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(name: str) -> Any:
        raise ZeroDivisionError(name)

    monkeypatch.setattr("xtok.cli.console.pair", faulty)
    result = CliRunner().invoke(cli.app, ["inspect"])
    assert isinstance(result.exception, ZeroDivisionError)


@pytest.mark.parametrize("large", [False, True])
def test_the_demo_shows_each_text_twice_with_a_chat_model_and_with_another_pair(
    large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target that ships stands in for both real ones."""
    prompt = next(iter(demo.SAMPLES))
    with_template(tmp_path, "{% for m in messages %}「{{ m['content'] }}」{% endfor %}")
    heads = tmp_path / "heads.safetensors"
    with safe_open(HEADS, framework="pt") as kept:
        known = json.loads(kept.metadata()["xtok"]) | {"target": tmp_path.name}
    save_file(load_file(HEADS), heads, metadata={"xtok": json.dumps(known)})
    found = SimpleNamespace(target=tmp_path, heads=heads, draft=DRAFT, is_here=large)
    monkeypatch.setattr(demo, "pair", lambda _: found)
    monkeypatch.setattr(demo, "QUESTIONS", ("誰か",))
    monkeypatch.setattr(demo, "IN_TWO_LANGUAGES", ("何か",))
    monkeypatch.setattr(demo, "SAMPLES", {prompt: demo.SAMPLES[prompt]})
    for asked in (demo.ANSWERED, demo.SHORTER, demo.CONTINUED):
        monkeypatch.setitem(asked, "max_new_tokens", 4)
    printed, _ = run("demo")
    first, _, second = printed.partition("\n2. ")
    xt = XTokAssisted(tmp_path)
    assert first.count(xt.generate([{"role": "user", "content": "誰か"}], **demo.ANSWERED).text) == 2
    if large:
        assert second.count(xt.generate([{"role": "user", "content": "何か"}], **demo.SHORTER).text) == 2
    else:
        assert second.count(prompt) == 1 and demo.SAMPLES[prompt] in second and "--pair qwen" in second
        assert second.count(XTokAssisted(TARGET).generate(prompt, **demo.CONTINUED).text) == 2
    assert "xtok generate" in second and "\x1b" not in printed and "\r" not in printed
    assert printed.count("identical to the target alone, and to model.generate: yes\n") == 2
    assert len(re.findall(r"│ yes +│", printed)) == 2


def test_the_demo_leaves_out_what_cannot_be_fetched_and_fails_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: Any) -> Any:
        raise InvalidInputError("SmolLM2 can't be fetched: there is no network.")

    monkeypatch.setattr("xtok.pair.Pair.target", property(unavailable))
    monkeypatch.setattr("xtok.pair.Pair.is_here", False)
    monkeypatch.setattr(demo, "SAMPLES", {})
    assert "It is left out: SmolLM2 can't be fetched: there is no network." in run("demo")[0]
    monkeypatch.setattr(demo, "demonstrate", lambda: False)
    run("demo", code=1)


def test_the_demo_names_the_near_tie_after_which_transformers_goes_on_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    xt = XTokAssisted(TARGET)
    half = xt.model.__class__.from_pretrained(TARGET, dtype=torch.bfloat16)
    models = demo.Models("", (half, xt.tokenizer), xt, xt)
    own = xt.generate(prompts()[0], max_new_tokens=4, do_sample=False).token_ids
    for gap, same in ((0.01, True), (9.0, False), (None, False)):
        monkeypatch.setattr(demo, "logit_gap", lambda *_, gap=gap: gap)
        found, said = demo.verdict(models, prompts()[0], own, own, [*own[:3], own[3] + 1])
        assert found == same
        assert ("from token 4 on: the two best were 0.01 logits apart there" in said) == same
    assert demo.verdict(models, prompts()[0], own, own, own) == (
        True,
        "identical to the target alone, and to model.generate: yes",
    )
    assert demo.verdict(models, prompts()[0], own, own[:3], own) == (False, "identical to the target alone: NO")


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


def test_what_a_tokenizer_cannot_write_rewrites_or_cuts_in_a_character_is_counted_and_named() -> None:
    whole, byte_level = tokenizer("Unigram with byte fallback"), tokenizer("byte-level BPE")
    assert fit(whole, tokenizer("SentencePiece BPE"), ["吾輩は猫である。"]).losses == ()
    found = fit(whole, tokenizer("Unigram without fallback"), ["吾輩は🦊である。", "🦊"])
    assert (found.target.unwritable, found.draft.unwritable) == ((), ("🦊",))
    assert (found.target.altered_texts, found.draft.altered_texts) == (0, 2)
    assert (found.target.missing_bytes, found.draft.missing_bytes > 100) == (0, True)
    assert any("can't write 1 character of the sample (🦊)" in loss for loss in found.losses)
    found = fit(byte_level, tokenizer("Unigram with NFKC"), ["１２ Ａ 猫"])
    assert (found.draft.unwritable, found.draft.rewritten) == ((), ("１", "２", "Ａ"))
    assert any("rewrites 3 different characters of the sample (１ ２ Ａ)" in loss for loss in found.losses)
    found = fit(byte_level, tokenizer("WordPiece"), ["a a", "a\na"])  # spaces come back between words
    assert (found.draft.unwritable, found.draft.altered_texts) == (("\n",), 1)
    ids = byte_level("🦊は𠮷").input_ids
    broken = sum(byte_level.decode(ids[: i + 1]).endswith("\ufffd") for i in range(len(ids)))
    found = fit(tokenizer("characters"), byte_level, ["🦊は𠮷"])
    assert found.draft.mid_character == broken / len(ids) > 0 == found.target.mid_character


def test_a_window_is_named_only_if_the_draft_sees_less_than_the_target() -> None:
    tokens = tokenizer("byte-level BPE")
    for target_window, draft_window, named in [(64, 32, True), (32, 64, False), (None, 32, False), (64, None, False)]:
        found = fit(tokens, tokens, CORPUS, target_window=target_window, draft_window=draft_window)
        assert any("window" in loss for loss in found.losses) == named
    with pytest.raises(InvalidInputError, match="no text"):
        fit(tokens, tokens, [""])


def test_progress_in_a_pipe_says_what_begins_and_then_what_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    """Found by a review: a count of nothing was shown as progress, again and again."""
    with advanced("texts", 20) as advance:
        for count in (0, 0, 1, 0, 1):
            advance(count)
    lines = r"texts …\ntexts: 1 of 20, about 0:00:\d\d left\ntexts: 2 of 20, about 0:00:\d\d left\n"
    assert re.fullmatch(lines, capsys.readouterr().err)


def test_warnings_are_lines_like_errors() -> None:
    """Found by a trial as a new user: they named a line of the library that reads the command line."""
    printed = run("generate", "吾輩は" * 300, "--draft", "none", "--max-new-tokens", "1")[1]
    assert "xtok: The prompt has " in printed and "PromptWarning" not in printed
