"""The page in a headless Chromium: a chat streams, cells are what the engine counts, and who was
preempted is told why. Skipped where there is no Chromium, or no Playwright to drive it."""

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.serve.oracle import OracleServed, oracle_server

from octavo.core.budget import Limits
from octavo.core.plan import Runner, StepPlan, StepResult

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")

STEP_S = 0.03
"""So that somebody can look while requests run."""


class Slow:
    """A runner that takes its time."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(STEP_S)
        return self._runner.execute(plan)


@pytest.fixture
def served() -> Iterator[OracleServed]:
    """A pool that is too small for what two requests become."""
    limits = Limits(sequences=4, tokens=64, admission="chunked", preemption="recompute")
    with oracle_server(limits=limits, blocks=20, wrap=Slow) as served:
        yield served


@pytest.fixture(params=["light", "dark"])
def page(served: OracleServed, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, opened; nothing may go wrong in it, and it may ask nobody but its server."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1300, "height": 900}, color_scheme=request.param)
        wrong: list[str] = []
        asked: set[str] = set()
        page.on("pageerror", lambda error: wrong.append(str(error.stack or error)))
        page.on("console", lambda said: said.type == "error" and wrong.append(said.text))
        page.on("request", lambda sent: asked.add(sent.url))
        page.goto(served.url)
        yield page
        browser.close()
    assert wrong == []
    assert all(url.startswith(served.url) for url in asked), asked


def ask(served: OracleServed, text: str, tokens: int) -> httpx.Response:
    body = {"prompt": text, "max_tokens": tokens, "ignore_eos": True}
    return httpx.post(f"{served.url}/v1/completions", json=body, timeout=120)


def sees(page: Any, part: str, text: str) -> None:
    """Wait until a part of the page says this."""
    api = pytest.importorskip("playwright.sync_api")
    api.expect(page.locator(part)).to_contain_text(text, timeout=20_000)


def test_a_chat_streams(page: Any) -> None:
    page.fill("#message", "Hello")
    page.keyboard.press("Enter")
    sees(page, "#messages", "tokens/s")
    assert "Hello" in page.inner_text("#messages")
    assert page.is_visible("#send"), "it may be asked again"


def test_stop_ends_an_answer(page: Any, served: OracleServed) -> None:
    page.fill("#message", "Hello")
    page.keyboard.press("Enter")
    sees(page, "#running", "decode")
    page.click("#stop")
    page.wait_for_selector("#send:visible")
    sees(page, "#running", "Nothing runs")
    assert served.client.status().running == 0


def test_cells_are_what_the_engine_counts_and_a_preemption_says_why(
    page: Any, served: OracleServed
) -> None:
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(ask, served, letter * 40, 150) for letter in "abc"]
        sees(page, "#waiting", "preempted")
        sees(page, "#waiting", "blocks released")
        drawn, engine = (
            json.loads(page.locator("#pool").get_attribute(f"data-{name}"))
            for name in ("counts", "engine")
        )
        assert sum(drawn.values()) == sum(engine[state] for state in SUMMED) == 20
        page.locator("#waiting > li button, #waiting > li").first.click()
        sees(page, "#detail", "preempted")
        assert all(answer.result().status_code == 200 for answer in asked)
    sees(page, "#running", "Nothing runs")
    drawn, engine = (
        json.loads(page.locator("#pool").get_attribute(f"data-{name}"))
        for name in ("counts", "engine")
    )
    assert drawn["owned"] + drawn["shared"] == engine["owned"] == 0
    for state in ("free", "cached", "held", "fenced"):
        assert drawn[state] == engine[state], state


SUMMED = ("free", "cached", "owned", "held", "fenced")


def test_keys_go_from_block_to_block(page: Any, served: OracleServed) -> None:
    ask(served, "a" * 40, 3)
    page.focus("#pool")
    page.keyboard.press("ArrowRight")
    sees(page, "#pool-said", "lock")
