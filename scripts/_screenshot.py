"""Pictures of the live page: a real run of `ragtag launch --emulate`, looked at through the address that it prints.

    scripts/screenshot [--steps 110] [--at 84] [--out docs]

Takes about a minute, and needs /usr/bin/chromium. It is the page as anybody sees it; only the devices are pretended.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parents[1]
CHROMIUM = "/usr/bin/chromium"
CLUSTER = """
[emulate]
sample_ms = 30      # forward and backward of one sample at speed 1
optimizer_ms = 6
jitter = 0.04

[[device]]
name = "desk/0"
host = "desk"
speed = 1.0

[[device]]
name = "desk/1"
host = "desk"
speed = 0.7

[[device]]
name = "laptop/0"
host = "laptop"
speed = 0.5
drift = [{ step = 39, speed = 0.5 }, { step = 40, speed = 0.3 }]
drift_kind = "step"

[[device]]
name = "attic/0"
host = "attic"
speed = 0.2

[[link]]
between = ["desk", "attic"]
bandwidth = "300Mbit/s"
latency = "1ms"
"""
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/screenshot", description="Make pictures of the live page of a real run."
    )
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--at", type=int, default=84, help="the step after which the pictures are taken")
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ragtag-") as directory:
        cluster = Path(directory, "home.toml")
        cluster.write_text(CLUSTER)
        script = ("-m", "ragtag.examples.byte_gpt", "--steps", str(given.steps), "--batch", str(given.batch))
        run = subprocess.Popen(
            [sys.executable, "-m", "ragtag.cli.main", "launch", "--emulate", str(cluster), *script],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            take(address(run), given.at, given.out)
        finally:
            run.send_signal(signal.SIGINT)
            run.communicate(timeout=60)


def address(run: subprocess.Popen[str]) -> str:
    """Return where the launch says that its page is."""
    assert run.stderr is not None
    said = ""
    for line in run.stderr:
        said += line
        found = re.search(r"watch it at (http://\S+)", line)
        if found:
            return found[1]
    raise SystemExit(f"the launch ended without saying where its page is:\n{said}")


def take(url: str, at: int, out: Path) -> None:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        pages = {
            "watch.png": opened(browser, url, "light"),
            "watch-dark.png": opened(browser, url, "dark"),
        }
        end_s = time.monotonic() + 600
        while int(next(iter(pages.values())).evaluate("sections.now?.step ?? 0")) < at:
            if time.monotonic() > end_s:
                raise SystemExit(f"the run does not come to step {at}")
            time.sleep(0.2)
        for name, page in pages.items():
            below = page.locator(".pair").evaluate("node => node.getBoundingClientRect().bottom + scrollY")
            page.screenshot(path=out / name, full_page=True, clip={"x": 0, "y": 0, "width": 1240, "height": below + 16})
            print(out / name)
        browser.close()


def opened(browser: Browser, url: str, scheme: str) -> Page:
    context = browser.new_context(
        viewport={"width": 1240, "height": 900},
        color_scheme="dark" if scheme == "dark" else "light",
        device_scale_factor=1.5,
    )
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("tr[data-device]", timeout=60_000)
    return page


if __name__ == "__main__":
    main()
