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
from octavo.core.view import STATES

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")

STEP_S = 0.03
"""So that somebody can look while requests run."""
BLOCKS = 20
WIDE = {"width": 1300, "height": 900}

PIXELS = """async () => {
  const { layout, placeOf } = await import("/web/grid.js");
  const { palette } = await import("/web/colours.js");
  const canvas = document.getElementById("pool");
  const engine = JSON.parse(canvas.dataset.engine);
  const blocks = engine.free + engine.cached + engine.owned + engine.held + engine.fenced;
  const ratio = devicePixelRatio;
  const grid = layout(blocks, canvas.clientWidth, Math.max(180, Math.min(360, innerHeight * 0.42)));
  const context = canvas.getContext("2d");
  const probe = document.createElement("canvas").getContext("2d");
  const key = (x, y, from) => [...from.getImageData(x, y, 1, 1).data].join();
  const names = new Map(palette().states.map((colour, state) => {
    probe.fillStyle = colour;
    probe.fillRect(0, 0, 1, 1);
    return [key(0, 0, probe), state];
  }));
  const states = [];
  for (let cell = 0; cell < blocks; cell += 1) {
    const [x, y] = placeOf(grid, cell);
    states.push(names.get(key((x + 2) * ratio, (y + grid.size - 1) * ratio, context)) ?? -1);
  }
  return { states, engine };
}"""
"""The state of each cell by its colour on the canvas, and what the engine counted in the same
picture: the lowest pixels of a cell have its colour, however full the block is."""


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
    with oracle_server(limits=limits, blocks=BLOCKS, wrap=Slow) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=["light", "dark"])
def page(browser: Any, served: OracleServed, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, opened; nothing may go wrong in it, and it may ask nobody but its server."""
    page = browser.new_page(viewport=WIDE, color_scheme=request.param, reduced_motion="reduce")
    wrong: list[str] = []
    asked: set[str] = set()
    page.on("pageerror", lambda error: wrong.append(str(error.stack or error)))
    page.on("console", lambda said: _is_wrong(said) and wrong.append(said.text))
    page.on("request", lambda sent: asked.add(sent.url))
    page.goto(served.url)
    page.wait_for_selector("body[data-pool=seen]")
    yield page
    page.close()
    assert wrong == []
    assert all(url.startswith(served.url) for url in asked), asked


def _is_wrong(said: Any) -> bool:
    """Not a request that the API refuses: Chromium says so too."""
    return said.type == "error" and "status of 400" not in said.text


def ask(served: OracleServed, text: str, tokens: int, answers: int = 1) -> httpx.Response:
    body = {"prompt": text, "max_tokens": tokens, "ignore_eos": True, "n": answers}
    return httpx.post(f"{served.url}/v1/completions", json=body, timeout=120)


def sees(page: Any, part: str, text: str) -> None:
    """Wait until a part of the page says this."""
    api.expect(page.locator(part)).to_contain_text(text, timeout=60_000)


def counts(page: Any, name: str) -> dict[str, int]:
    """How many blocks were drawn in each state, or what the engine counted for that picture."""
    counts: dict[str, int] = json.loads(page.locator("#pool").get_attribute(f"data-{name}"))
    return counts


def test_a_chat_streams(page: Any) -> None:
    page.fill("#message", "Hello")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.answer .text")
    assert page.is_visible("#stop"), "the beginning is there before the end"
    sees(page, "#speed", "tokens/s")
    sees(page, ".facts", "tokens/s")
    sees(page, ".facts", "first after")
    assert page.inner_text(".turn.user p") == "Hello"
    assert page.is_visible("#send"), "it may be asked again"
    page.click(".facts button")
    sees(page, "#detail", "first token")
    page.keyboard.press("Escape")
    assert page.is_hidden("#detail")


def test_stop_ends_an_answer(page: Any, served: OracleServed) -> None:
    page.fill("#message", "Hello")
    page.keyboard.press("Enter")
    sees(page, "#running", "decode")
    page.click("#stop")
    page.wait_for_selector("#send:visible")
    sees(page, ".facts", "stopped")
    sees(page, "#running", "Nothing runs")
    assert served.client.status().running == 0


def test_parameters_are_those_of_the_api(page: Any) -> None:
    page.click("text=Parameters")
    page.fill("#parameter-max_tokens", "3")
    page.fill("#parameter-n", "2")
    page.fill("#message", "Hello")
    page.keyboard.press("Enter")
    sees(page, ".facts", "6 tokens")
    page.fill("#parameter-temperature", "-1")
    page.fill("#message", "Hello")
    page.keyboard.press("Enter")
    sees(page, "[role=alert]", "temperature")


def test_cells_are_what_the_engine_counts_and_a_preemption_says_why(
    page: Any, served: OracleServed
) -> None:
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(ask, served, letter * 40, 150) for letter in "abc"]
        sees(page, "#waiting", "preempted")
        sees(page, "#waiting", "blocks released")
        assert sum(counts(page, "counts").values()) == BLOCKS
        page.locator("#waiting .row").first.click()
        sees(page, "#detail .story", "preempted")
        assert all(answer.result().status_code == 200 for answer in asked)
    sees(page, "#running", "Nothing runs")
    drawn, engine = counts(page, "counts"), counts(page, "engine")
    assert drawn["owned"] + drawn["shared"] == engine["owned"] == 0
    for state in ("free", "cached", "held", "fenced"):
        assert drawn[state] == engine[state], state


def test_colours_are_the_states_that_the_engine_counts(page: Any, served: OracleServed) -> None:
    """Pixel by pixel, while two answers grow from one prompt."""
    seen = set()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask, served, "a" * 40, 60, 2)
        while not asked.done():
            looked = page.evaluate(PIXELS)
            engine, cells = looked["engine"], [STATES[state] for state in looked["states"]]
            seen |= set(cells)
            assert -1 not in looked["states"]
            owned = cells.count("owned") + cells.count("shared")
            assert owned == engine["owned"]
            for state in ("free", "cached", "held", "fenced"):
                assert cells.count(state) == engine[state], state
    assert {"free", "owned", "shared"} <= seen


def test_a_block_says_whose_it_is(page: Any, served: OracleServed) -> None:
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask, served, "a" * 40, 150)
        sees(page, "#running", "decode")
        page.hover("#pool", position={"x": 8, "y": 8})
        sees(page, "#tip", "Block 0: owned")
        sees(page, "#tip", "key")
        page.mouse.down()
        page.mouse.up()
        sees(page, "#detail", "Block table")
        sees(page, "#detail .entries", "0")
        assert asked.result().status_code == 200
    page.mouse.move(600, 20)
    assert page.is_hidden("#tip")


def test_keys_go_from_block_to_block(page: Any, served: OracleServed) -> None:
    ask(served, "a" * 40, 3)
    page.focus("#pool")
    page.keyboard.press("ArrowRight")
    sees(page, "#pool-said", "Block 0: cached")
    page.keyboard.press("End")
    sees(page, "#pool-said", f"Block {BLOCKS - 1}: free")


def test_on_a_narrow_page_there_is_one_half_at_a_time(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.is_visible("#chat")
    assert page.is_hidden("#engine")
    page.click("#tab-engine")
    assert page.is_visible("#pool")
    assert page.is_hidden("#chat")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_theme_is_a_choice(page: Any) -> None:
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    before = page.evaluate(paper)
    seen = set()
    for _ in range(3):
        page.click("#theme")
        seen.add(page.evaluate(paper))
    assert len(seen) == 2
    assert page.evaluate(paper) == before, "the third is the one of the system again"
