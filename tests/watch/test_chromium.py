"""The live page in a real browser, fed from a log that a test writes."""

import json
import os
import signal
import threading
from contextlib import contextmanager
from pathlib import Path

import example_log
import pytest
from test_page import TOKEN, eventually, page_process, served

from ragtag.watch.events import Member, Members, Planned, Said, Step, Verdict, Vitals

CHROMIUM = Path("/usr/bin/chromium")
if not CHROMIUM.exists():
    pytest.skip("there is no /usr/bin/chromium (apt-get install chromium)", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=QUIET)
        yield browser
        browser.close()


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.jsonl"
    example_log.append(path, example_log.events(100))
    return path


class Seen:
    """A page with what it said and asked for."""

    def __init__(self, page):
        self.page, self.complaints, self.hosts = page, [], set()
        page.on("console", lambda said: self.complaints.append(said.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2].partition(":")[0]))

    def open(self, port):
        self.page.goto(f"http://127.0.0.1:{port}/?token={TOKEN}")
        self.page.wait_for_selector("tr[data-device]")
        return self.page

    def attribute(self, selector, name):
        return self.page.locator(selector).get_attribute(name)


@contextmanager
def context(browser, **options):
    opened = browser.new_context(**{"viewport": {"width": 1240, "height": 900}, **options})
    opened.set_default_timeout(20_000)
    try:
        yield opened
    finally:
        opened.close()


@contextmanager
def looking(browser, log, **options):
    with served(log) as server, context(browser, **options) as opened:
        seen = Seen(opened.new_page())
        seen.open(server.port)
        yield seen
        assert seen.complaints == []
        assert seen.hosts == {"127.0.0.1"}


def appears(page, condition):
    eventually(lambda: page.evaluate(condition))  # where the page allows no eval, wait_for_function cannot be used


def test_everything_is_there(browser, log):
    with looking(browser, log) as seen:
        page = seen.page
        assert page.title() == "100 · blue-otter · ragtag"
        assert page.url.endswith("/"), "the token is not left in the address bar"
        assert page.locator("#status").inner_text() == "training"
        assert "4 devices on 2 hosts" in page.locator("#about").inner_text()
        headings = page.get_by_role("heading", level=2).all_inner_texts()
        expected = ["Speed", "Efficiency", "Loss", "Time left", "Devices", "The last steps", "Loss"]
        assert headings[:7] == expected
        rows = page.locator("tr[data-device]")
        assert rows.count() == 5
        first = rows.nth(0).inner_text()
        for words in (
            "desk/0",
            "desk · NVIDIA GeForce RTX 3090",
            "28",
            "busy 90",
            "142",
            "18.3",
            "61 °C",
            "1695 MHz",
            "adds 74 %",
        ):
            assert words in first.replace("\xa0", " "), words
        assert "gone after step 60: no sign of life for 10 s" in rows.nth(4).inner_text()
        assert page.locator("#legend li").all_inner_texts()[0] == "busy: forward, backward, optimizer"
        lanes = page.locator("[data-lane]")
        assert [lane.get_attribute("data-lane") for lane in lanes.all()] == ["desk/0", "desk/1", "nook/0", "nook/2"]
        kinds = {kind for kind in ("busy", "waiting", "communicating", "data") if lanes.locator(f"i.{kind}").count()}
        assert kinds == {"busy", "waiting", "communicating", "data"}
        assert page.locator("#loss-chart polyline").count() == 2
        assert len(page.locator("#loss-chart polyline.loss").get_attribute("points").split()) == 100
        decision = page.locator("[data-decision]").inner_text().replace("\xa0", " ")
        assert "nook/1 is 8.0 times slower" in decision
        assert "predicted 205 ms a step (−74 % of its time), achieved 214 ms over 10 steps" in decision
        events = page.locator("#events").inner_text()
        for words in (
            "checkpoint of step 100",
            "nook/2 has joined",
            "desk/0: nook/0 stalled in step 55",
            "accuracy 0.7356",
        ):
            assert words in events


def test_eta_shares_and_verdicts_are_those_in_the_log(browser, log):
    events = example_log.events(100)
    steps = [event for event in events if isinstance(event, Step)]
    members = [event for event in events if isinstance(event, Members)][-1]
    planned = [event for event in events if isinstance(event, Planned)][-1]
    verdict = [event for event in events if isinstance(event, Verdict)][-1]
    with looking(browser, log) as seen:
        assert float(seen.attribute("#eta", "data-value")) == steps[-1].eta
        mean = sum(step.eta for step in steps) / len(steps)
        assert float(seen.attribute("#eta-mean", "data-value")) == pytest.approx(mean, rel=1e-14)
        assert float(seen.attribute("#loss", "data-value")) == steps[-1].loss
        shown = seen.page.locator("tr[data-rank]").all()
        assert [row.get_attribute("data-device") for row in shown] == [member.name for member in members.ranks]
        assert tuple(int(row.get_attribute("data-share")) for row in shown) == steps[-1].shares
        assert tuple(int(row.get_attribute("data-planned-share")) for row in shown) == planned.shares
        assert [float(row.get_attribute("data-gain")) for row in shown] == [worth.gain for worth in verdict.devices]
        texts = [row.locator("[data-verdict]").inner_text() for row in shown]
        assert texts == [worth.text for worth in verdict.devices]
        points = seen.page.evaluate("etaChart.points")
        assert points == [[step.number, step.eta] for step in steps]


def test_what_is_written_appears(browser, tmp_path):
    log, events = tmp_path / "log.jsonl", example_log.events(120)
    when = {event.number: place for place, event in enumerate(events) if isinstance(event, Step)}
    example_log.append(log, events[: when[34] + 1])
    with looking(browser, log) as seen:
        page = seen.page
        assert page.locator("[data-finding]").count() == 0
        example_log.append(log, events[when[34] + 1 : when[40]])
        page.wait_for_selector("[data-finding='desk/1'][data-cause='data']")
        assert "its loader takes 89 ms" in page.locator("#troubles").inner_text()
        example_log.append(log, events[when[40] : when[62]])
        page.wait_for_selector("tr.gone[data-device='nook/1']")
        assert page.locator("[data-finding]").count() == 0, "it is over"
        assert "over since step 49: rank 1 (desk/1 on desk)" in page.locator("[data-over='desk/1']").inner_text()
        example_log.append(log, events[when[62] : when[120] + 1])
        appears(page, "document.title.startsWith('120 ')")
        assert page.locator("tr[data-device='nook/2']").get_attribute("data-share") == "5"
        assert page.locator("#progress").get_attribute("aria-valuenow") == "120"
        example_log.append(log, example_log.events(120, ended=True)[-1:])
        appears(page, "document.getElementById('status').textContent === 'ended'")


def test_a_server_that_was_killed_is_found_again(browser, log):
    process = page_process(log)
    port = int(process.url.rpartition("/")[0].rpartition(":")[2])
    down, stop = threading.Event(), threading.Event()

    def launcher():
        while not stop.wait(0.02):
            if not down.is_set():
                process.look_after()

    thread = threading.Thread(target=launcher)
    thread.start()
    try:
        with context(browser) as opened:
            seen = Seen(opened.new_page())
            page = seen.open(port)
            down.set()
            os.kill(process.pid, signal.SIGKILL)
            appears(page, "document.getElementById('status').textContent === 'connection lost, trying again'")
            assert page.locator("tr[data-device]").count() == 5, "what was known is still shown"
            example_log.append(log, example_log.events(101)[-1:])
            down.clear()
            appears(page, "document.title.startsWith('101 ')")
            appears(page, "document.getElementById('status').textContent === 'training'")
    finally:
        stop.set()
        thread.join()
        process.close()


def test_a_page_whose_token_is_no_longer_good_says_what_to_do(browser, log):
    with served(log) as server, context(browser) as opened:
        page = Seen(opened.new_page()).open(server.port)
        cookies = opened.cookies()
        opened.clear_cookies()
        page.evaluate("again()")
        status = "document.getElementById('status').textContent"
        appears(page, f"{status}.includes('open the address that was printed newly')")
        opened.add_cookies(cookies)
        appears(page, f"{status} === 'training'")


def test_a_link_on_another_site_leads_to_the_page(browser, log):
    with served(log) as server, context(browser) as opened:
        page = opened.new_page()
        page.route(
            "http://elsewhere.example/",
            lambda route: route.fulfill(
                content_type="text/html", body=f"<a href='http://127.0.0.1:{server.port}/?token={TOKEN}'>look</a>"
            ),
        )
        page.goto("http://elsewhere.example/")
        page.click("a")
        page.wait_for_selector("tr[data-device]")


def test_on_a_phone_nothing_is_wider_than_the_screen(browser, log):
    for width in (360, 768, 950):
        with looking(browser, log, viewport={"width": width, "height": 740}, has_touch=True) as seen:
            page = seen.page
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width
            outside = page.evaluate(
                """() => [...document.querySelectorAll("main *")].filter((node) =>
                !node.closest(".scroll, svg, .lane, .bar") && node.getBoundingClientRect().right > innerWidth + 1)
                .map((node) => node.outerHTML.slice(0, 80))"""
            )
            assert outside == []
            smallest = page.evaluate(
                """() => Math.min(...[...document.querySelectorAll("main *")].filter((node) => node.innerText)
                .map((node) => parseFloat(getComputedStyle(node).fontSize)))"""
            )
            assert smallest >= 12
            devices = page.locator("#devices")
            assert devices.evaluate("node => node.scrollWidth <= node.clientWidth + 1")


def test_the_keyboard_reaches_everything(browser, log):
    with looking(browser, log) as seen:
        page, reached = seen.page, []
        for _ in range(8):
            page.keyboard.press("Tab")
            where = page.evaluate(
                "document.activeElement.getAttribute('aria-label') ?? document.activeElement.id ?? ''"
            )
            if page.evaluate("document.activeElement === document.body"):
                break
            reached.append(where or page.evaluate("document.activeElement.textContent"))
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
        assert reached == [
            *("To the devices", "devices"),
            *("Loss at a step; arrow keys move", "Efficiency at a step; arrow keys move"),
        ]
        plot = page.locator("#eta-chart [role=slider]")
        plot.focus()
        assert plot.get_attribute("aria-valuenow") == "100"
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        first = [event for event in example_log.events(2) if isinstance(event, Step)][1]
        assert plot.get_attribute("aria-valuenow") == "2"
        text = f"step 2: {100 * first.eta:.0f} %"
        assert plot.get_attribute("aria-valuetext").replace("\xa0", " ") == text
        assert page.locator("#eta-chart p").inner_text().replace("\xa0", " ") == text
        page.locator("a.skip").focus()
        page.keyboard.press("Enter")
        assert page.url.endswith("#devices")
        names = page.evaluate(
            """() => [...document.querySelectorAll(
              "[role=img], [role=slider], [role=progressbar], [role=region], table")]
            .filter((node) => !node.getAttribute("aria-label") && !node.getAttribute("aria-labelledby")).length"""
        )
        assert names == 0, "everything that is no text has a name"


CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (colour) => {
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((c) => c / 255)
      .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (colour !== "rgba(0, 0, 0, 0)") return colour;
    }
    return "Canvas";
  };
  return [...document.querySelectorAll("body *")]
    .filter((node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim()))
    .filter((node) => node.checkVisibility() && !node.closest("noscript, .skip, tr.gone .bar"))
    .map((node) => {
      const [one, other] = [light(getComputedStyle(node).color), light(behind(node))].sort((a, b) => b - a);
      return [Number(((one + 0.05) / (other + 0.05)).toFixed(2)), node.outerHTML.slice(0, 90)];
    }).filter(([contrast]) => contrast < 4.5);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_can_be_read(browser, tmp_path, scheme):
    log = tmp_path / "log.jsonl"
    example_log.append(log, example_log.events(40))  # with a finding, and a verdict that costs
    with looking(browser, log, color_scheme=scheme, reduced_motion="reduce") as seen:
        red, _, _ = seen.page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (red > 200) == (scheme == "light")
        assert seen.page.evaluate(CONTRAST) == []
        moves = "getComputedStyle(document.querySelector('#progress i')).transitionDuration"
        assert seen.page.evaluate(moves) == "0s"


def test_words_from_other_machines_are_words(browser, tmp_path):
    log, evil = tmp_path / "log.jsonl", "<img src=x onerror=document.title='taken'>"
    member = Member(name=evil, host=evil, model=evil)
    step = Step(number=1, loss=None, shares=(1,), samples=1, wall_s=0.1, compute_s=(0.1,))
    example_log.append(log, [Members(step=0, ranks=(member,)), step, Said(text=evil, source=evil)])
    with looking(browser, log) as seen:
        assert seen.page.locator("tr[data-device]").get_attribute("data-device") == evil
        assert seen.page.locator("img").count() == 0
        assert evil in seen.page.locator("#events").inner_text()


def test_a_run_without_a_step_and_one_with_many(browser, tmp_path):
    log = tmp_path / "log.jsonl"
    events = example_log.events(3000)
    example_log.append(log, events[:5])
    with served(log) as server, context(browser) as opened:
        seen = Seen(opened.new_page())
        page = seen.open(server.port)
        assert page.locator("#status").inner_text() == "waiting for the first step"
        assert page.locator("#eta").inner_text() == "–"
        example_log.append(log, events[5:])
        appears(page, "document.title.startsWith('3000 ')")
        appears(page, "lossChart.last === 3000")
        assert 1000 <= len(page.evaluate("lossChart.points")) <= 2001
        assert seen.complaints == []


def test_a_reader_that_comes_late_gets_everything_again(browser, log):
    """After a break the stream begins anew, and what was shown before is replaced, not added to."""
    with served(log) as server, context(browser) as opened:
        page = Seen(opened.new_page()).open(server.port)
        before = json.dumps(page.evaluate("lossChart.points"))
        page.evaluate("connect()")
        eventually(lambda: page.evaluate("Object.keys(sections).length") > 10)
        appears(page, "changed.length >= 0 && stream.readyState === 1")
        assert json.dumps(page.evaluate("lossChart.points")) == before
        assert page.locator("tr[data-device]").count() == 5


def test_a_column_that_nobody_can_fill_is_not_shown(browser, tmp_path):
    log = tmp_path / "log.jsonl"
    example_log.append(log, [event for event in example_log.events(15) if not isinstance(event, Vitals)])
    with looking(browser, log) as seen:
        shown = [each.inner_text() for each in seen.page.locator("th").all() if each.is_visible()]
        assert shown == ["Device", "Share", "Its time, lately", "Samples/s", "Verdict"]
