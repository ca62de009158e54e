"""The page at / in a real browser: headless Chromium, by keyboard."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import Server, serving

webdriver = pytest.importorskip("selenium.webdriver")

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")), reason="no chromium and chromedriver"
    ),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run"):
        options.add_argument(f"--{flag}")
    options.add_argument("--disable-background-networking")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    browser.get("about:blank")
    browser.get(server.url)
    until(browser, lambda: browser.find_element("id", "health").text == "ready")
    yield browser
    severe = [
        e for e in browser.get_log("browser") if e["level"] == "SEVERE" and "favicon" not in e["message"]
    ]
    assert severe == []


def until(browser: Any, condition: Any, seconds: float = 60) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, seconds).until(lambda _: condition())


def press(browser: Any, *keys: str) -> None:
    browser.switch_to.active_element.send_keys(*keys)


def tab_to(browser: Any, name: str) -> None:
    """Reach an element with the Tab key alone."""
    for _ in range(30):
        if browser.switch_to.active_element.get_attribute("id") == name:
            return
        press(browser, "\ue004")
    raise AssertionError(f"{name} cannot be reached by keyboard")


# asked from outside, a browser on a busy machine is too slow to be seen growing
WATCH_LENGTHS = """
window.lengths = new Set();
new MutationObserver(() => {
  const answer = document.querySelector("li.assistant");
  if (answer) window.lengths.add(answer.textContent.length);
}).observe(document.getElementById("messages"), { childList: true, subtree: true, characterData: true });
"""


def test_a_chat_streams(page: Any) -> None:
    tab_to(page, "chat-tokens")
    press(page, "\ue009a", "96")  # Ctrl+A
    page.execute_script(WATCH_LENGTHS)
    page.find_element("id", "chat-input").click()
    press(page, "Tell a long story of <b>colours</b>.", "\ue007")
    until(page, lambda: page.find_elements("css selector", "#messages li.assistant"))
    until(page, lambda: not page.find_element("id", "chat-stop").is_enabled())
    assert len(page.execute_script("return [...window.lengths]")) > 2  # it grew before our eyes
    assert (
        page.find_element("css selector", "li.user").text == "Tell a long story of <b>colours</b>."
    )  # text, no markup
    assert len(page.find_element("css selector", "li.assistant").text) > 10
    assert page.switch_to.active_element.get_attribute("id") == "chat-input"


def test_escape_stops(page: Any, server: Server) -> None:
    page.find_element("id", "chat-input").click()
    press(page, "Tell me a very long story.", "\ue007")
    until(page, lambda: len(page.find_elements("css selector", "li.assistant")) > 0)
    until(page, lambda: page.find_elements("css selector", "li.assistant")[-1].text)
    press(page, "\ue00c")
    until(page, lambda: not page.find_element("id", "chat-stop").is_enabled())
    server.wait_idle()


def test_suggestions_with_their_probabilities(page: Any) -> None:
    tab_to(page, "tab-chat")
    press(page, "\ue014")  # right
    assert page.find_element("id", "view-suggest").is_displayed()
    assert not page.find_element("id", "view-chat").is_displayed()
    tab_to(page, "suggest-input")
    press(page, "The best colour is")
    tab_to(page, "suggest-n")
    press(page, "\ue009a", "5")
    tab_to(page, "suggest-tokens")
    press(page, "\ue009a", "6", "\ue007")
    until(page, lambda: len(page.find_elements("css selector", "#suggestions li")) >= 2)
    meters = page.find_elements("css selector", "#suggestions meter")
    values = [float(m.get_attribute("value")) for m in meters]
    assert values == sorted(values, reverse=True)
    assert all(0 < v <= 1 for v in values)


def test_figures_are_plotted(page: Any, server: Server) -> None:
    page.find_element("id", "tab-figures").click()
    until(page, lambda: len(page.find_elements("css selector", "#plots figure")) == 6)
    until(page, lambda: page.find_element("css selector", "polyline").get_attribute("points").count(",") >= 3)
    row = page.find_element("css selector", "#models tbody tr").text
    assert "demo" in row
    assert "ready" in row


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_dark_and_light(page: Any, scheme: str) -> None:
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    style = "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
    text, back = ([int(v) for v in c[4:-1].split(",")] for c in page.execute_script(style))
    assert _contrast(text, back) > 7
    assert (sum(back) < 384) == (scheme == "dark")


def _contrast(a: list[int], b: list[int]) -> float:
    """WCAG 2's contrast ratio."""

    def luminance(colour: list[int]) -> float:
        parts = [
            (c / 255 / 12.92 if c / 255 <= 0.03928 else ((c / 255 + 0.055) / 1.055) ** 2.4) for c in colour
        ]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_nothing_comes_from_elsewhere(page: Any, server: Server) -> None:
    names = page.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert names
    assert all(name.startswith(server.url) for name in names)


def test_stages_are_shown(browser: Any, demo_model_path: Path) -> None:
    with serving("--n-ctx", "512", "--stages", "2") as server:
        browser.get(server.url)
        browser.find_element("id", "tab-figures").click()
        until(browser, lambda: len(browser.find_elements("css selector", "#stages tbody tr")) == 2)
        rows = [r.text for r in browser.find_elements("css selector", "#stages tbody tr")]
        assert rows[0].startswith("demo 0 - ")
        assert rows[1].split()[3] == "29"
        assert "127.0.0.1" in rows[0]
        browser.get("about:blank")
