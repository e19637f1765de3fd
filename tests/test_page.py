"""The page of `xtok serve`, in a real browser: what is seen, by pointer and keyboard, in light and dark, wide and narrow.

Debian's Chromium, driven by Selenium; `make test-page` installs it. With XTOK_SCREENSHOTS set to a folder, the picture of the
documents is written there.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

pytest.importorskip("selenium", reason="Selenium isn't installed: pip install selenium")

from selenium import webdriver
from selenium.webdriver.chrome.service import Service as DriverService
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from test_serve import CHAT_TOKENS, Server, serving
from worlds import deep, fitting

from xtok import Budget, Generation, XTokAssisted
from xtok.bench.chats import questions
from xtok.decoding.pick import NearTie
from xtok.drafts.heads import HeadsDrafter
from xtok.pair import DRAFT, TARGET, pair, prompts
from xtok.results.page import tints
from xtok.serving.http.service import Service

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
if not (CHROMIUM and DRIVER):
    pytest.skip("Chromium and its driver aren't installed; `make test-page` does that", allow_module_level=True)

T = TypeVar("T")
PATIENCE = 120
WIDE, NARROW = 1100, 400
LENGTH, LONG = 48, 400
SCREENSHOTS = os.environ.get("XTOK_SCREENSHOTS")
UNKNOWN = "Whether the texts are identical is unknown, because one of them is incomplete."
YES = {"en": "Identical: the same tokens as from the target alone.", "ja": "完全一致: "}


class Browser:
    """A window, and what a test does in it. The language is that of the browser."""

    def __init__(self, language: str = "en") -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", f"lang={language}"):
            options.add_argument(f"--{argument}")
        options.add_experimental_option("prefs", {"intl.accept_languages": language})
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=DriverService(DRIVER))
        self.look()

    def look(self, width: int = WIDE, *, height: int = 900, dark: bool = False) -> None:
        """How wide the window is, and whether its user prefers dark colours."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def open(self, url: str) -> None:
        """The page, once it knows what is served."""
        self.driver.get(f"{url}/")
        self.until(lambda: self.text("#served"))

    def until(self, true: Callable[[], T]) -> T:
        return WebDriverWait(self.driver, PATIENCE, poll_frequency=0.05).until(lambda _: true())

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return str(self.one(selector).text)

    def content(self, selector: str) -> str:
        """The text as it is, spaces and all."""
        return str(self.one(selector).get_property("textContent"))

    def fill(self, name: str, value: Any) -> None:
        field = self.option(f"[name={name}]")
        field.clear()
        field.send_keys(str(value))

    def option(self, selector: str) -> Any:
        """What may be folded under "Advanced", which is unfolded for it."""
        self.driver.execute_script("document.getElementById('advanced').open = true")
        return self.one(selector)

    def point_at(self, element: Any) -> None:
        ActionChains(self.driver).move_to_element(element).perform()

    def press(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()

    def focused(self) -> Any:
        return self.driver.switch_to.active_element

    def write(self, **fields: Any) -> None:
        """Ask for a text and the target's own, and wait until they are there."""
        for name, value in {"tokens": LENGTH, **fields}.items():
            self.fill(name, value)
        self.one("#compare").click()
        self.until(lambda: self.text("#verdict") and self.one("#compare").is_enabled())

    def errors(self) -> list[str]:
        """What the console complained of."""
        return [one["message"] for one in self.driver.get_log("browser") if one["level"] == "SEVERE"]

    def picture(self, name: str) -> None:
        """A picture of the whole page, if pictures are wanted."""
        if SCREENSHOTS:
            size = self.driver.execute_script("return [innerWidth, document.documentElement.scrollHeight]")
            dark = self.driver.execute_script("return matchMedia('(prefers-color-scheme: dark)').matches")
            self.look(size[0], height=size[1], dark=dark)
            self.driver.save_screenshot(str(Path(SCREENSHOTS) / name))


@contextmanager
def browsing(language: str = "en") -> Iterator[Browser]:
    browser = Browser(language)
    try:
        yield browser
    finally:
        browser.driver.quit()


@pytest.fixture(scope="module")
def shipped() -> Iterator[Server]:
    guesses = Budget(5, width=4, nodes=12, schedule="constant")  # whether guessing pays on this machine is no matter here
    with serving(XTokAssisted(TARGET, DRAFT, budget=guesses), batch_size=2) as server:
        server.service.prompts = prompts()[1:4]
        yield server


@pytest.fixture(scope="module")
def english() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture
def page(english: Browser, shipped: Server) -> Iterator[Browser]:
    english.look()
    english.errors()
    english.open(shipped.url)
    yield english
    assert english.errors() == []


def truth(**more: Any) -> Generation:
    arguments: dict[str, Any] = {"max_new_tokens": LENGTH, "do_sample": False, "repetition_penalty": 1.2, **more}
    return XTokAssisted(TARGET).generate(prompts()[1], **arguments)


# what is written


def test_the_text_streams_in_beside_the_targets_own_and_the_two_are_said_to_be_identical(page: Browser) -> None:
    page.write()
    expected = truth()
    assert page.content(".run.drafted .text") == page.content(".run.alone .text") == expected.text
    assert page.text("#verdict") == f"{YES['en']} No near-ties: model.generate very likely gives this text, too."
    assert "right" in page.one("#verdict").get_attribute("class")
    drafted, alone = (len(page.all(f".run.{kind} .one")) for kind in ("drafted", "alone"))
    assert alone == expected.stats.target_forwards > 1.5 * drafted
    assert f"{LENGTH} tokens · {drafted} forward passes" in page.text(".run.drafted .clock")
    assert not page.one("#stop").is_displayed()


def test_tokens_have_the_tint_of_who_guessed_them_and_the_legend_says_whose(page: Browser) -> None:
    page.write()
    legend = {one.text: one.value_of_css_property("background-color") for one in page.all("#legend .tint")}
    assert legend == {name: rgba(tint) for name, tint in tints(["draft", "prompt lookup", "token recycling"]).items()}
    tinted = page.all(".run.drafted .token.tint")
    assert {one.get_attribute("data-draft") for one in tinted} <= set(legend)
    assert tinted and all(
        one.value_of_css_property("background-color") == legend[one.get_attribute("data-draft")] for one in tinted
    )
    assert not page.all(".run.alone .token.tint")


def rgba(colour: str) -> str:
    return "rgba({}, {}, {}, 1)".format(*bytes.fromhex(colour[1:]))


@pytest.mark.deep
def test_a_kind_of_draft_has_its_colour_whatever_else_guesses(page: Browser) -> None:
    assert tints(["heads", "prompt lookup (2)"])["prompt lookup (2)"] == tints(["prompt lookup"])["prompt lookup"]
    page.option("#drafts")
    page.all("[name=draft]")[0].click()
    page.write()
    names = ["prompt lookup", "token recycling"]
    shown = {one.text: one.value_of_css_property("background-color") for one in page.all("#legend .tint, #figures .tint")}
    assert shown == {name: rgba(tints(names)[name]) for name in names}
    used = {one.value_of_css_property("fill") for one in page.all(".bar rect")} - {"rgb(180, 188, 198)"}
    assert used <= {rgba(tint).replace("rgba", "rgb").replace(", 1)", ")") for tint in tints(names).values()}


@pytest.mark.deep
def test_sampled_texts_are_identical_too_and_the_seed_decides(page: Browser) -> None:
    page.option("[value=sampled]").click()
    page.write(seed=7, temperature=1.0)
    first = page.content(".run.drafted .text")
    assert page.text("#verdict").startswith(YES["en"])
    assert first == truth(do_sample=True, temperature=1.0, seed=7).text
    page.write(seed=8)
    assert page.text("#verdict").startswith(YES["en"])
    assert page.content(".run.drafted .text") != first


@pytest.mark.deep
def test_drafts_take_part_as_they_are_chosen(page: Browser) -> None:
    boxes = page.all("[name=draft]")
    assert [box.get_attribute("value") for box in boxes] == ["draft", "prompt lookup", "token recycling"]
    page.option("#drafts")
    boxes[0].click()
    page.write()
    assert page.text("#verdict").startswith(YES["en"])
    assert {one.get_attribute("data-draft") for one in page.all(".token.tint")} <= {"prompt lookup", "token recycling"}
    boxes[1].click()
    boxes[2].click()
    page.fill("tokens", 8)
    page.one("#generate").click()
    page.until(lambda: page.text("#status") == "Done.")
    assert len(page.all(".run")) == 1
    assert len(page.all(".run .one")) == 8
    assert not page.all(".token.tint")


def test_an_example_is_put_where_the_prompt_is(page: Browser) -> None:
    page.all("#examples button")[2].click()
    assert page.one("#prompt").get_property("value") == prompts()[3]


MARKUP = "<img src=x onerror='document.title = 1'><b>太字</b>"


def test_a_text_is_no_markup(page: Browser, tmp_path: Path) -> None:
    """Nor is a guess, or the name of a draft."""
    generation = XTokAssisted(TARGET, DRAFT, budget=Budget(2, 2, schedule="constant")).generate(prompts()[0], max_new_tokens=8)
    trace = generation.to_dict()
    trace["drafts"] = [MARKUP for _ in trace["drafts"]]
    for one in [*trace["tokens"], *(guess for each in trace["rounds"] for guess in each["guessed"])]:
        one.update(text=MARKUP, draft=MARKUP)
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    page.one("#file").send_keys(str(tmp_path / "trace.json"))
    page.until(lambda: page.all("#tree .guess") or page.one("#next").click())
    assert MARKUP in page.content(".text")
    assert MARKUP.replace(" ", "␣") in page.content("#tree")
    assert MARKUP in page.content("#legend")
    assert MARKUP in page.content("#figures")
    assert not page.all("main img, main b")
    assert page.driver.title == "xtok"


def test_a_stopped_text_stays_as_far_as_it_came(page: Browser, shipped: Server) -> None:
    page.fill("tokens", LONG)
    page.one("#compare").click()
    page.until(lambda: len(page.all(".run.drafted .one")) > 3)
    assert page.text("#stop") == "Stop"
    page.one("#stop").click()
    page.until(lambda: page.text("#status") == "Stopped.")
    assert page.text("#verdict") == UNKNOWN
    page.until(lambda: shipped.service.race_queue.entered == 0)
    page.write()
    assert page.text("#verdict").startswith(YES["en"])


# what happened in a round


def test_pointing_at_a_token_shows_its_round_with_what_was_guessed_and_what_died(page: Browser) -> None:
    page.write()
    rounds = page.all(".run.drafted .one")
    right = next(one for one in rounds[2:] if one.find_elements(By.CSS_SELECTOR, ".tint"))
    page.point_at(right)
    assert page.text("#round h2") == f"Round {rounds.index(right) + 1} of {len(rounds)} · With drafts"
    tree = page.one("#tree")
    tinted = "".join(one.text for one in right.find_elements(By.CSS_SELECTOR, ".tint"))
    shown = "".join(one.text.rstrip("0123456789%") for one in tree.find_elements(By.CSS_SELECTOR, ".guess.tint"))
    assert shown.replace("␣", " ").replace("↵", "\n").strip() == tinted.strip()
    counts = [int(word) for word in page.text("#counts").replace(",", "").split() if word.isdigit()]
    assert counts[0] == len(tree.find_elements(By.CSS_SELECTOR, ".guess"))
    assert counts[1] == len(tree.find_elements(By.CSS_SELECTOR, ".guess.tint"))
    for one in tree.find_elements(By.CSS_SELECTOR, ".guess.wrong"):
        assert one.value_of_css_property("outline-style") == "dashed"


def test_all_of_it_works_by_the_keyboard(page: Browser) -> None:
    page.one("#prompt").click()
    page.fill("tokens", 24)
    page.press(Keys.ENTER)  # within a field, that is to generate
    page.until(lambda: page.text("#status") == "Done.")
    assert len(page.all(".run")) == 1
    page.one("#prompt").click()
    while page.focused().get_attribute("id") != "compare":
        page.press(Keys.TAB)
    page.press(Keys.SPACE)
    page.until(lambda: page.text("#verdict").startswith(YES["en"]))
    for _ in range(40):
        if page.focused().get_attribute("class").startswith("one"):
            break
        page.press(Keys.TAB)
    assert page.text("#round h2").startswith("Round 1 of")
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.text("#round h2").startswith("Round 3 of")
    page.press(Keys.ARROW_LEFT)
    assert page.text("#round h2").startswith("Round 2 of")
    page.press(Keys.TAB)
    assert page.focused().find_element(By.XPATH, "./ancestor::article").text.startswith("Target alone")


def test_the_headline_says_what_was_saved_and_whether_it_pays(page: Browser) -> None:
    page.write()
    cards = [card.text.replace("\n", " ") for card in page.all("#headline .card")]
    forwards, whole = (len(page.all(f".run.{kind} .one")) for kind in ("drafted", "alone"))
    speed = float(page.all("#figures tbody tr:first-child td")[4].text.split()[0])
    assert cards[0] == f"{whole / forwards:.2f} × fewer forward passes"
    assert cards[1] == f"{speed:.2f} × {FAST[speed < 1]}"
    assert cards[2] == "✓ identical"
    assert page.text("#why")


FAST = {False: "faster", True: "as fast: it doesn't pay here"}
REASONS = {
    "Nothing was guessed": {"proposed": 0},
    "The drafts were rarely right: 1 of 60": {"proposed": 60, "accepted": 1, "target_forwards": 47},
    "Guessing is too expensive": {"seconds_draft": 3.0},
    "Checking guesses is expensive": {"seconds_target": 5.0},
}


@pytest.mark.parametrize("reason", REASONS)
def test_why_it_does_not_pay_is_said(page: Browser, reason: str) -> None:
    """By figures that are made up, so that no clock decides."""
    alone = {"target_forwards": 48, "new_tokens": 48, "seconds_target": 4.0, "tokens_per_forward": 1}
    drafted = {**alone, "target_forwards": 24, "proposed": 60, "accepted": 24, "seconds_target": 2.0, "seconds_draft": 0.1}
    drafted |= {"seconds_align": 0.0, **REASONS[reason]}
    text = page.driver.execute_async_script(HEADLINE, drafted, alone)
    assert text.startswith("2.00" if drafted["target_forwards"] == 24 else "1.02")
    assert "0.80 × as fast: it doesn't pay here" in text
    assert reason in text


HEADLINE = """
const [drafted, alone, done] = arguments;
const ended = (stats, seconds) => ({ end: { stats: { ...stats, tokens_per_forward: 48 / stats.target_forwards } }, seconds });
import("/view/headline.js").then(({ headlineOf }) => {
  done(headlineOf(ended(drafted, 5), ended(alone, 4), true).map((one) => one.textContent).join(" "));
});
"""


def test_figures_are_those_of_the_text(page: Browser) -> None:
    page.write()
    rows = page.all("#figures figure:first-child tbody tr")
    drafted, alone = ([cell.text for cell in row.find_elements(By.CSS_SELECTOR, "th, td")] for row in rows)
    forwards, whole = (len(page.all(f".run.{kind} .one")) for kind in ("drafted", "alone"))
    assert drafted[:4] == ["With drafts", str(forwards), str(LENGTH - forwards), f"{LENGTH / forwards:.2f}"]
    assert alone[:4] == ["Target alone", str(whole), "0", "1.00"]
    assert drafted[5].endswith(" ×")
    assert len(page.all("#figures svg")) == 2
    assert len(page.all("#figures figure:nth-child(2) .bar")) == forwards
    guessed = {row.find_element(By.CSS_SELECTOR, "th").text: row for row in page.all("#figures figure:last-child tbody tr")}
    assert set(guessed) == {"draft", "prompt lookup", "token recycling"}


# traces


def test_a_saved_trace_is_opened_and_stepped_through(page: Browser, tmp_path: Path) -> None:
    generation = XTokAssisted(TARGET, DRAFT).generate(prompts()[1], max_new_tokens=32, do_sample=False)
    generation.save_trace(tmp_path / "some.json")
    page.one("#file").send_keys(str(tmp_path / "some.json"))
    page.until(lambda: page.all(".run.trace .one"))
    assert page.content(".run.trace .text") == generation.text
    rounds = page.all(".run.trace .one")
    assert len(rounds) == len(generation.rounds)
    assert not page.all(".later")
    page.one("#next").click()
    assert page.text("#round h2") == f"Round 2 of {len(rounds)} · Trace"
    assert sum("later" in one.get_attribute("class") for one in rounds) == len(rounds) - 2
    page.one("#previous").click()
    page.one("#position").send_keys(Keys.END)
    assert page.text("#round h2") == f"Round {len(rounds)} of {len(rounds)} · Trace"
    assert page.text("#verdict") == ""


@pytest.mark.parametrize("notebook", [False, *deep(True)], ids=["file", "notebook"])
def test_the_file_of_a_trace_shows_what_the_page_shows(page: Browser, tmp_path: Path, notebook: bool) -> None:
    made = XTokAssisted(TARGET, DRAFT).generate(prompts()[1], max_new_tokens=32, do_sample=False)
    generation = replace(made, stats=replace(made.stats, near_ties=(NearTie(4, 0.0123), NearTie(9, 0.5))))
    generation.save_trace(tmp_path / "some.json")
    page.one("#file").send_keys(str(tmp_path / "some.json"))
    page.until(lambda: page.all(".run.trace .one"))
    shown = page.one("#view").get_property("innerHTML")
    assert page.text("#verdict").startswith("Near-ties: 2, the first at token 5 (margin 0.012)")
    (tmp_path / "some.html").write_text(generation._repr_html_() if notebook else generation.to_html(), encoding="utf-8")
    page.driver.get((tmp_path / "some.html").as_uri())
    if notebook:
        page.driver.switch_to.frame(page.one("iframe"))
    assert page.one("#view").get_property("innerHTML") == shown
    assert page.content(".run.trace .text") == generation.text
    page.one("#next").click()
    assert page.text("#round h2") == f"Round 2 of {len(generation.rounds)} · Trace"
    page.point_at(page.all(".one")[3])
    assert page.text("#round h2") == f"Round 4 of {len(generation.rounds)} · Trace"
    if not notebook:
        page.picture("trace.png")


HALF = '{"rounds": [{"committed": 1}], "tokens": [], "stats": {}, "drafts": []}'


@pytest.mark.parametrize("broken", ["{}", "no json", '{"rounds": [], "tokens": []}', HALF])
def test_what_is_no_trace_is_said_to_be_none(page: Browser, tmp_path: Path, broken: str) -> None:
    (tmp_path / "broken.json").write_text(broken)
    page.one("#file").send_keys(str(tmp_path / "broken.json"))
    page.until(lambda: page.text("#status") == "This is not an xtok trace.")
    assert not page.all(".run")


def test_a_trace_is_opened_while_nothing_is_served(english: Browser, tmp_path: Path) -> None:
    """Nor are models needed for that."""
    generation = truth()
    generation.save_trace(tmp_path / "some.json")
    with Server(Service("none")) as empty:
        english.driver.get(f"{empty.url}/")
        english.until(lambda: english.text("#status") == "The models are being loaded.")
        english.one("#file").send_keys(str(tmp_path / "some.json"))
        english.until(lambda: english.all(".run.trace .one"))
        assert english.content(".run.trace .text") == generation.text
    english.errors()


def test_the_sample_is_opened_without_models(english: Browser) -> None:
    with Server(Service("none")) as empty:
        english.look()
        english.driver.get(f"{empty.url}/")
        english.one("#sample").click()
        english.until(lambda: english.all(".run.trace .one"))
        assert english.text("#headline .card").endswith("×\nfewer forward passes")
        assert english.all("#figures .tint")
    english.errors()


def test_an_option_that_is_wrong_is_unfolded(page: Browser) -> None:
    page.fill("tokens", 0)
    page.driver.execute_script("document.getElementById('advanced').open = false")
    page.one("#generate").click()
    assert page.one("[name=tokens]").is_displayed()
    assert not page.all(".run")


@pytest.mark.deep
def test_a_trace_that_is_opened_while_a_text_is_written_stays(page: Browser, tmp_path: Path) -> None:
    generation = truth()
    generation.save_trace(tmp_path / "some.json")
    page.fill("tokens", LONG)
    page.one("#compare").click()
    page.until(lambda: len(page.all(".run.drafted .one")) > 2)
    for _ in range(2):  # the same one again, too
        page.one("#file").send_keys(str(tmp_path / "some.json"))
        page.until(lambda: page.all(".run.trace .one"))
        page.until(lambda: page.one("#compare").is_enabled())
        assert page.text("#status") == "some.json"
        assert page.content(".run.trace .text") == generation.text


def test_a_server_that_is_broken_or_gone_is_said_to_be(english: Browser) -> None:
    with Server(Service("none", error=ValueError("no models"))) as one:
        english.driver.get(f"{one.url}/")
        english.until(lambda: english.text("#status") == "The engine has ended. Start the server again.")
    english.until(lambda: english.text("#status") == "The server doesn't respond.")
    english.errors()


def test_what_was_written_is_saved_as_a_trace(page: Browser, tmp_path: Path) -> None:
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.write()
    page.one("#save").click()
    page.until(lambda: list(tmp_path.glob("trace*.json")))
    page.until(lambda: (tmp_path / "trace.json").exists() and (tmp_path / "trace.json").stat().st_size)
    saved = json.loads((tmp_path / "trace.json").read_text())
    assert saved["token_ids"] == truth().token_ids
    assert saved["drafts"] == ["draft", "prompt lookup", "token recycling"]


# how it looks, and what goes wrong


@pytest.mark.parametrize(("width", "dark"), [(NARROW, True), *deep((NARROW, False), (WIDE, True), (WIDE, False))])
def test_nothing_lies_beside_the_page_and_all_is_read(page: Browser, width: int, dark: bool) -> None:
    page.look(width, dark=dark)
    page.write()
    page.point_at(page.all(".run.drafted .one")[4])
    assert page.driver.execute_script("return document.documentElement.scrollWidth") <= width
    controls, texts = ("#generate", "#compare"), ("body", ".card span", "#why", "#counts", "#verdict", "#figures th", ".key")
    for selector in (*controls, *texts, ".guess", ".guess small", ".tint"):
        assert page.driver.execute_script(CONTRAST, page.one(selector)) >= 4.5, selector


CONTRAST = """
const parts = (colour) => colour.match(/[\\d.]+/g).map((part) => part * (colour.startsWith("color(srgb") ? 255 : 1));
const light = (colour) => parts(colour).slice(0, 3)
  .map((part) => part / 255).map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
  .reduce((sum, part, place) => sum + part * [0.2126, 0.7152, 0.0722][place], 0);
let ground = arguments[0];
while (ground && parts(getComputedStyle(ground).backgroundColor)[3] === 0) ground = ground.parentElement;
const colours = [getComputedStyle(arguments[0]).color, getComputedStyle(ground ?? document.body).backgroundColor];
const [one, other] = colours.map(light);
for (let shown = arguments[0]; shown; shown = shown.parentElement) if (getComputedStyle(shown).opacity < 1) return 0;
return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
"""
"""Of a text with its background, as WCAG 2 counts; 4.5 is its level AA."""


@pytest.mark.skipif(not SCREENSHOTS, reason="XTOK_SCREENSHOTS names no folder for the picture")
def test_the_picture_of_the_documents_shows_what_they_say(english: Browser) -> None:
    """Of a real pair, answering a question whose words the answer repeats."""
    real = pair("smollm2")
    question = next(one.text for one in questions() if one.text.startswith("Turn this text into a table"))
    with serving(XTokAssisted(str(real.target), HeadsDrafter(real.heads))) as one:
        one.service.name = "SmolLM2-135M-Instruct"
        one.service.prompts = [question, *(each.text for each in questions() if each.kind in ("code", "science"))][:3]
        english.look()
        english.open(one.url)
        english.write(tokens=128)
        english.driver.execute_script("document.getElementById('advanced').open = false")
        assert english.text("#verdict").startswith(YES["en"])
        assert english.text("#headline .card:nth-child(2)").endswith("faster")
        tinted = "return [...document.querySelectorAll('.drafted .one')].map((one) => one.querySelectorAll('.tint').length)"
        counts = english.driver.execute_script(tinted)
        richest = english.all(".run.drafted .one")[counts.index(max(counts))]
        english.driver.execute_script("arguments[0].focus({preventScroll: true})", richest)
        english.picture("page.png")


@pytest.mark.deep
def test_it_speaks_japanese_to_a_japanese_browser(shipped: Server) -> None:
    with browsing("ja") as browser:
        browser.open(shipped.url)
        assert browser.text("#generate") == "生成"
        browser.write()
        assert browser.text("#verdict").startswith(YES["ja"])
        assert browser.one("html").get_attribute("lang") == "ja"
        browser.point_at(browser.all(".run.drafted .one")[3])
        assert "ラウンド" in browser.text("#round h2")
        assert browser.errors() == []


@pytest.mark.deep
def test_a_server_that_dies_in_mid_text_leaves_what_had_come(english: Browser) -> None:
    with serving(XTokAssisted(TARGET, DRAFT)) as one:
        english.look()
        english.open(one.url)
        english.fill("prompt", prompts()[0])
        english.fill("tokens", LONG)
        english.one("#compare").click()
        english.until(lambda: len(english.all(".run.drafted .one")) > 3)
        one.die()
    english.until(lambda: english.text("#status") == "The connection was lost. This is what had arrived.")
    assert len(english.content(".run.drafted .text")) > 3
    assert english.text("#verdict") == UNKNOWN
    assert english.one("#compare").is_enabled()
    english.errors()


def test_a_server_with_a_key_asks_for_it(english: Browser) -> None:
    with serving(key="secret") as one:
        english.driver.get(f"{one.url}/")
        english.until(lambda: english.text("#status") == "This server requires its API key.")
        english.fill("key", "wrong")
        english.press(Keys.TAB)
        english.until(lambda: english.text("#status") == "This server has another API key.")
        assert not english.one("#compare").is_enabled()
        english.fill("key", "secret")
        english.press(Keys.TAB)
        english.until(lambda: english.text("#served"))
        english.fill("prompt", "吾輩は")
        english.write(tokens=8)
        assert english.text("#verdict").startswith(YES["en"])
    english.errors()


def test_what_is_refused_is_said(page: Browser) -> None:
    page.driver.execute_script("document.getElementsByName('prompt')[0].value = '吾輩は'.repeat(4000)")
    page.one("#compare").click()
    page.until(lambda: page.text("#status").startswith("The request failed: The prompt has"))
    assert "400 (Bad Request)" in page.errors()[0]
    assert not page.one("#figures").is_displayed() and not page.one("#headline").is_displayed()
    assert page.text("#verdict") == ""


def test_a_chat_is_written_by_the_models_template(english: Browser) -> None:
    chat = fitting(CHAT_TOKENS, "Llama", 0), CHAT_TOKENS
    with serving(XTokAssisted(chat)) as one:
        english.open(one.url)
        english.fill("prompt", "吾輩は")
        assert english.one("[name=penalty]").get_property("value") == "1", "chat models do without"
        english.write(tokens=8)
        expected = XTokAssisted(chat).generate([{"role": "user", "content": "吾輩は"}], max_new_tokens=8, do_sample=False)
        assert english.content(".run.drafted .text") == expected.text
        assert english.text("#verdict").startswith(YES["en"])
