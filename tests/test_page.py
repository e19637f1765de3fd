"""The page of `xtok serve`, in a real browser: what is seen, by pointer and keyboard, wide and narrow.

Debian's Chromium, driven by Selenium; `make test-page` installs it. `make test` starts no browser.
"""

import json
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
from servers import CHAT_TOKENS, Server, serving
from worlds import fitting

from xtok import Budget, XTokAssisted
from xtok.decoding.pick import NearTie
from xtok.pair import DRAFT, TARGET, prompts
from xtok.results.page import tints
from xtok.serving.http.service import Service

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
if not (CHROMIUM and DRIVER):
    pytest.skip("Chromium and its driver aren't installed; `make test-page` does that", allow_module_level=True)

pytestmark = pytest.mark.deep
T = TypeVar("T")
PATIENCE = 60
WIDE, NARROW = 1100, 400
LENGTH, LONG = 48, 400
DRAFTS = ["draft", "prompt lookup", "token recycling"]


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

    def look(self, width: int = WIDE) -> None:
        """How wide the window is."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def open(self, url: str) -> None:
        """The page, once it knows what is served."""
        self.driver.get(f"{url}/")
        self.until(lambda: self.text("#served"))

    def until(self, true: Callable[[], T]) -> T:
        return WebDriverWait(self.driver, PATIENCE, poll_frequency=0.05).until(lambda _: true())

    def until_status(self, status: str) -> None:
        self.until(lambda: self.text("#status").startswith(status))

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return str(self.one(selector).text)

    def texts(self, selector: str) -> list[str]:
        """Those of all that it selects, asked for at once."""
        found: list[str] = self.run("return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)", selector)
        return found

    def content(self, selector: str) -> str:
        """The text as it is, spaces and all."""
        return str(self.one(selector).get_property("textContent"))

    def run(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def fill(self, name: str, value: Any) -> None:
        """A field, which may be folded under "Advanced"."""
        self.run("document.getElementById('advanced').open = true")
        field = self.one(f"[name={name}]")
        field.clear()
        field.send_keys(str(value))

    def point_at(self, element: Any) -> None:
        ActionChains(self.driver).move_to_element(element).perform()

    def press(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()

    def focused(self) -> Any:
        return self.driver.switch_to.active_element

    def write(self, **fields: Any) -> None:
        """Ask for a text, and wait until it is there."""
        for name, value in fields.items():
            self.fill(name, value)
        self.one("#generate").click()
        self.until(lambda: self.one("#generate").is_enabled() and self.all(".one"))

    def opens(self, file: Path) -> None:
        """Open a trace, and wait until its text is there."""
        self.one("#file").send_keys(str(file))
        self.until(lambda: self.text("#status") == file.name and self.all(".one"))

    def errors(self) -> list[str]:
        """What the console complained of."""
        return [one["message"] for one in self.driver.get_log("browser") if one["level"] == "SEVERE"]


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


def rgb(colour: str) -> str:
    return "rgb({}, {}, {})".format(*bytes.fromhex(colour[1:]))


def test_a_text_streams_in_and_its_headline_colours_figures_and_rounds_follow(page: Browser, tmp_path: Path) -> None:
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.run("window.seen = []; new MutationObserver(() => seen.push(document.querySelectorAll('.one').length))"
             ".observe(document.getElementById('view'), {childList: true, subtree: true})")  # fmt: skip
    page.fill("tokens", LENGTH)
    page.press(Keys.ENTER)  # within a field, that is to generate
    page.until_status("Done.")
    asked: dict[str, Any] = {"max_new_tokens": LENGTH, "do_sample": False, "repetition_penalty": 1.2}
    expected = XTokAssisted(TARGET).generate(prompts()[1], **asked)
    assert page.content(".text") == expected.text
    assert page.run("return seen.filter((rounds) => !rounds).length") > 3, "pieces, before the whole"
    rounds = page.all(".one")
    speedup = f"{LENGTH / len(rounds):.2f}"
    cards = [card.replace("\n", " ") for card in page.texts("#headline .card")]
    assert cards[0] == f"{speedup} × fewer forward passes"
    assert float(cards[1].removesuffix(" tokens per second")) > 0
    assert f"{LENGTH} tokens · {len(rounds)} forward passes" in page.text(".clock")
    legend = dict(zip(page.texts("#legend .tint"), page.run(GROUNDS, "#legend .tint"), strict=True))
    assert {name: ground for name, (ground, _) in legend.items()} == {name: rgb(tint) for name, tint in tints(DRAFTS).items()}
    assert all(ground == legend[draft][0] for ground, draft in page.run(GROUNDS, ".token.tint"))
    row = page.texts("#figures figure:first-child tbody th, #figures figure:first-child tbody td")
    assert row[:3] == [str(len(rounds)), str(LENGTH - len(rounds)), speedup]
    assert len(page.all("#figures figure:nth-child(2) .bar")) == len(rounds)
    assert page.texts("#figures figure:last-child tbody th") == DRAFTS
    page.one("#save").click()
    page.until(lambda: (tmp_path / "trace.json").exists() and (tmp_path / "trace.json").stat().st_size)
    saved = json.loads((tmp_path / "trace.json").read_text())
    assert (saved["token_ids"], saved["drafts"]) == (expected.token_ids, DRAFTS)
    check_rounds(page, rounds)
    for width in (WIDE, NARROW):
        page.look(width)
        assert page.run("return document.documentElement.scrollWidth") <= width


GROUNDS = """return [...document.querySelectorAll(arguments[0])].map(
  (one) => [getComputedStyle(one).backgroundColor, one.dataset.draft])"""


def check_rounds(page: Browser, rounds: list[Any]) -> None:
    """They are shown by pointer and keyboard."""
    right = next(one for one in rounds[2:] if one.find_elements(By.CSS_SELECTOR, ".tint"))
    page.point_at(right)
    assert page.text("#round h2") == f"Round {rounds.index(right) + 1} of {len(rounds)}"
    tinted = "".join(one.text for one in right.find_elements(By.CSS_SELECTOR, ".tint"))
    shown = "".join(one.rstrip("0123456789%") for one in page.texts("#tree .guess.tint"))
    assert shown.replace("␣", " ").replace("↵", "\n").strip() == tinted.strip()
    counts = [int(word) for word in page.text("#counts").replace(",", "").split() if word.isdigit()]
    assert counts[:2] == [len(page.all("#tree .guess")), len(page.all("#tree .guess.tint"))]
    assert {one.value_of_css_property("outline-style") for one in page.all("#tree .guess.wrong")} <= {"dashed"}
    page.one("#prompt").click()
    for _ in range(40):
        if page.focused().get_attribute("class").startswith("one"):
            break
        page.press(Keys.TAB)
    page.press(Keys.HOME, Keys.ARROW_RIGHT)
    first = int(page.text("#round h2").split()[1])
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert page.text("#round h2").startswith(f"Round {first + 1} of")


def test_what_is_refused_is_said_and_a_text_that_is_stopped_or_left_for_a_trace_stays_as_far_as_it_came(
    page: Browser, shipped: Server, tmp_path: Path
) -> None:
    page.fill("tokens", 0)
    page.run("document.getElementById('advanced').open = false")
    page.one("#generate").click()
    assert page.one("[name=tokens]").is_displayed(), "an option that is wrong is unfolded"
    page.fill("tokens", LONG)
    page.run("document.getElementsByName('prompt')[0].value = '吾輩は'.repeat(4000)")
    page.one("#generate").click()
    page.until_status("The request failed: The prompt has")
    assert "400 (Bad Request)" in page.errors()[0]
    assert not page.one("#figures").is_displayed() and not page.one("#headline").is_displayed()
    page.all("#examples button")[2].click()
    assert page.one("#prompt").get_property("value") == prompts()[3]
    page.one("#generate").click()
    page.until(lambda: len(page.content(".text")) > 3)
    page.one("#stop").click()
    page.until_status("Stopped.")
    assert len(page.content(".text")) > 3
    assert not page.one("#headline").is_displayed()
    shipped.until_idle()
    assert shipped.engine.stats.tokens < LONG + LENGTH
    made = XTokAssisted(TARGET).generate(prompts()[1], max_new_tokens=4)
    made.save_trace(tmp_path / "some.json")
    page.one("#generate").click()
    page.until(lambda: len(page.content(".text")) > 2)
    for _ in range(2):  # the same one again, too
        page.opens(tmp_path / "some.json")
        page.until(lambda: page.one("#generate").is_enabled())
        assert (page.text("#status"), page.content(".text")) == ("some.json", made.text)


MARKUP = "<img src=x onerror='document.title = 1'><b>太字</b>"
BROKEN = (
    "{}",
    "no json",
    '{"rounds": [], "tokens": []}',
    '{"rounds": [{"committed": 1}], "tokens": [], "stats": {}, "drafts": []}',
)


def test_a_trace_is_stepped_through_its_file_shows_the_same_and_no_text_is_markup(page: Browser, tmp_path: Path) -> None:
    """Nor is a guess, or the name of a draft."""
    for number, broken in enumerate(BROKEN):
        (tmp_path / f"{number}.json").write_text(broken)
        page.run("document.getElementById('status').textContent = ''")
        page.one("#file").send_keys(str(tmp_path / f"{number}.json"))
        page.until_status("This is not an xtok trace.")
        assert not page.all(".one")
    made = XTokAssisted(TARGET, DRAFT, budget=Budget(2, 2, schedule="constant"))
    generation = made.generate(prompts()[1], max_new_tokens=16, do_sample=False)
    trace = generation.to_dict()
    trace["drafts"] = [MARKUP for _ in trace["drafts"]]
    for one in [*trace["tokens"], *(guess for each in trace["rounds"] for guess in each["guessed"])]:
        one.update(text=MARKUP, draft=MARKUP)
    (tmp_path / "markup.json").write_text(json.dumps(trace))
    page.opens(tmp_path / "markup.json")
    page.until(lambda: page.all("#tree .guess") or page.one("#next").click())
    assert MARKUP.replace(" ", "␣") in page.content("#tree")
    assert all(MARKUP in page.content(selector) for selector in (".text", "#legend", "#figures"))
    assert not page.all("main img, main b")
    assert page.driver.title == "xtok"
    generation = replace(generation, stats=replace(generation.stats, near_ties=(NearTie(4, 0.0123), NearTie(9, 0.5))))
    generation.save_trace(tmp_path / "some.json")
    page.opens(tmp_path / "some.json")
    shown = page.one("#view").get_property("innerHTML")
    assert page.text("#ties").startswith("Near-ties: 2, the first at token 5 (margin 0.012)")
    for written in (generation._repr_html_(), generation.to_html()):
        (tmp_path / "some.html").write_text(written, encoding="utf-8")
        page.driver.get((tmp_path / "some.html").as_uri())
        if page.all("iframe"):  # as in a notebook
            page.driver.switch_to.frame(page.one("iframe"))
        assert page.one("#view").get_property("innerHTML") == shown
    assert page.content(".text") == generation.text
    rounds = page.all(".one")
    assert (len(rounds), page.all(".later")) == (len(generation.rounds), [])
    page.one("#next").click()
    assert page.text("#round h2") == f"Round 2 of {len(rounds)}"
    assert len(page.all(".one.later")) == len(rounds) - 2
    page.one("#previous").click()
    page.one("#position").send_keys(Keys.END)
    assert page.text("#round h2") == f"Round {len(rounds)} of {len(rounds)}"


def test_without_models_a_trace_is_opened_and_what_is_wrong_is_said(english: Browser) -> None:
    english.look()
    with Server(Service("none")) as empty:
        english.driver.get(f"{empty.url}/")
        english.until_status("The models are being loaded.")
        english.one("#sample").click()
        english.until(lambda: english.all(".one"))
        assert english.text("#headline .card").endswith("×\nfewer forward passes")
    with Server(Service("none", error=ValueError("no models"))) as one:
        english.driver.get(f"{one.url}/")
        english.until_status("The engine has ended. Start the server again.")
    english.until_status("The server doesn't respond.")
    english.errors()


def test_a_server_with_a_key_asks_for_it_chats_by_the_template_and_samples_by_the_seed(english: Browser) -> None:
    chat = fitting(CHAT_TOKENS, "Llama", 0), CHAT_TOKENS
    with serving(XTokAssisted(chat), key="secret") as one:
        english.driver.get(f"{one.url}/")
        english.until_status("This server requires its API key.")
        for key, status in (("wrong", "This server has another API key."), ("secret", "")):
            assert not english.one("#generate").is_enabled()
            english.fill("key", key)
            english.press(Keys.TAB)
            english.until(lambda status=status: english.text("#status") == status)  # type: ignore[misc]
        english.fill("prompt", "吾輩は")
        assert english.one("[name=penalty]").get_property("value") == "1", "chat models do without"
        english.one("[value=sampled]").click()
        for name, value in (("tokens", 8), ("seed", 7), ("temperature", 1.0)):
            english.fill(name, value)
        english.one("#generate").click()
        english.until_status("Done.")
    asked: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "temperature": 1.0, "seed": 7}
    expected = XTokAssisted(chat).generate([{"role": "user", "content": "吾輩は"}], **asked)
    assert english.content(".text") == expected.text
    english.errors()


def test_it_speaks_japanese_to_a_japanese_browser(shipped: Server) -> None:
    with browsing("ja") as browser:
        browser.open(shipped.url)
        assert browser.text("#generate") == "生成"
        browser.write(tokens=LENGTH)
        assert browser.one("html").get_attribute("lang") == "ja"
        browser.point_at(browser.all(".one")[3])
        assert "ラウンド" in browser.text("#round h2")
        assert browser.errors() == []
