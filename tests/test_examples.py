"""The published examples and the demo, started as a user would start them."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from ragtag.cli.demo_result import DemoResult
from ragtag.cli.demo_table import show
from ragtag.cli.demo_timeline import KINDS, timeline
from ragtag.cli.demo_training import Row

BIN = Path(sys.executable).parent
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}


def run(*command: str) -> str:
    done = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


@pytest.mark.long
def test_digits_validate_alike_under_every_launcher():
    arguments = ["-m", "ragtag.examples.digits", "--epochs", "1"]
    alone = run("python", *arguments).split()
    assert float(alone[-1]) > 0.7
    for launcher in (["ragtag", "launch", "--local", "3"], ["torchrun", "--nproc-per-node=2"]):
        words = run(*launcher, *arguments).split()
        assert words[-1] == alone[-1], "the validation accuracy is exact"
        assert float(words[3]) == pytest.approx(float(alone[3]), rel=1e-3)


def test_the_exact_demo_shows_equal_losses_and_parameters():
    result = json.loads(run("ragtag", "demo", "--exact", "--steps", "4", "--shares", "8,5,3", "--double", "--json"))
    assert result["shares"] == [8, 5, 3]
    assert result["largest_loss_difference"] < 1e-12
    assert result["largest_parameter_difference"] < 1e-10
    assert result["loss_by_workers"] < 6


@pytest.mark.long
def test_the_exact_demo_prints_a_table():
    table = run("ragtag", "demo", "--exact", "--steps", "3", "--shares", "3,1")
    assert "loss at step 3" in table


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--exact", "--shares", "a"], "--shares must be whole numbers"),
        (["--shares", "3,1"], "ragtag demo --exact --shares"),
        (["--double"], "ragtag demo --exact --double"),
        (["--exact", "--quick"], "--exact has no --quick"),
        (["--quick", "--out", os.devnull], f"--out {os.devnull}"),
    ],
)
def test_the_demo_refuses_nonsense(options, message):
    done = subprocess.run(["ragtag", "demo", *options], env=ENVIRON, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_quick_demo_compares_ddp_and_ragtag_and_draws_them(tmp_path):
    directory = tmp_path / "shown"
    result = json.loads(run("ragtag", "demo", "--quick", "--out", str(directory), "--json"))
    assert [device["speed"] for device in result["devices"]] == [1, 1, 0.5, 0.25]
    assert result["ddp"]["shares"] == [3, 3, 3, 3]
    assert sum(result["ragtag"]["shares"]) == pytest.approx(12)
    for name in ("ddp", "ragtag"):
        training = result[name]
        assert training["largest_loss_difference"] < 1e-4, "all three train the same model on the same samples"
        assert training["largest_parameter_difference"] < 1e-3
        assert training["samples_per_s"] > 0
        assert len(training["busy_s"]) == len(training["comm_s"]) == len(training["wait_s"]) == 4
        accounted_s = [sum(times) for times in zip(training["busy_s"], training["comm_s"], training["wait_s"])]
        assert accounted_s == pytest.approx([accounted_s[0]] * 4, rel=0.05), "every device's time is accounted for"
    ddp = result["ddp"]
    assert ddp["busy_s"][0] < ddp["busy_s"][3], "under DDP the slowest device works the longest"
    assert ddp["wait_s"][0] > ddp["wait_s"][3]
    assert all(decision["reason"] for decision in result["decisions"])

    page = Path(result["files"]["html"]).read_text()
    assert "http" not in page
    assert "<script" not in page
    assert not re.search(r"(src|href)=|url\(|@import", page), "self-contained"
    assert page.count('class="lane"') == 8
    assert page.count('class="waiting"') > 2
    picture = Image.open(result["files"]["png"])
    picture.load()
    assert picture.size[0] == 1600
    assert len(picture.getcolors(1 << 24) or ()) > 10
    assert json.loads(Path(result["files"]["json"]).read_text()) == result
    assert "speed = 0.25" in Path(result["files"]["cluster"]).read_text()

    # The table, from the same result: one more demo would show nothing else.
    console = Console(file=io.StringIO(), width=80, record=True)
    show(msgspec.convert(result, DemoResult), console)
    table = console.export_text()
    for words in ("samples/s, second half", "eta", "speed-up", "loss at step 8", "desktop-1", "mini", "demo.png"):
        assert words in table
    assert "…" not in table, "everything fits into 80 columns"


def test_ctrl_c_ends_the_demo_and_everything_it_started(tmp_path):
    demo = subprocess.Popen(
        ["ragtag", "demo", "--out", str(tmp_path)], env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        process, deadline_s = psutil.Process(demo.pid), time.monotonic() + 60
        while len(started := process.children(recursive=True)) < 5 and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert len(started) >= 5, "the launcher and four workers"
        demo.send_signal(signal.SIGINT)
        output, _ = demo.communicate(timeout=30)
        assert demo.returncode != 0
        assert b"Traceback" not in output
        _, alive = psutil.wait_procs(started, timeout=0)
        assert not alive
    finally:
        demo.kill()
        demo.wait()


SECONDS = st.floats(0, 10)


@given(st.data())
def test_a_timeline_accounts_for_every_device_at_every_moment(data):
    num_devices = data.draw(st.integers(1, 4))
    rows = []
    for number in range(1, data.draw(st.integers(1, 5)) + 1):
        compute_s = data.draw(st.lists(SECONDS, min_size=num_devices, max_size=num_devices))
        comm_s = data.draw(SECONDS)
        wait_s = [max(compute_s) - each for each in compute_s]
        wall_s = max(compute_s) + comm_s + data.draw(SECONDS)
        rows.append(
            Row(
                step=number,
                loss=1.0,
                wall_s=wall_s,
                shares=(1,) * num_devices,
                compute_s=tuple(compute_s),
                wait_s=tuple(wait_s),
                comm_s=comm_s,
            )
        )
    whole = timeline(rows)
    expected_s = sum(row.wall_s for row in rows[:-1]) + max(rows[-1].compute_s) + rows[-1].comm_s
    assert whole.duration_s == pytest.approx(expected_s)
    part = whole.last(data.draw(st.floats(0.1, 30)))
    for shown in (whole, part):
        for device in range(num_devices):
            spans = [span for span in shown.spans if span.device == device]
            for span, following in pairwise(spans):
                assert span.stop_s == pytest.approx(following.start_s), "no gap, no overlap"
            assert sum(shown.total_s(device, kind) for kind in KINDS) == pytest.approx(shown.duration_s, abs=1e-6)
    for device in range(num_devices):
        waited_s = sum(row.wait_s[device] for row in rows)
        assert whole.total_s(device, "waiting") == pytest.approx(waited_s, abs=1e-6)
    assert part.duration_s <= whole.duration_s
