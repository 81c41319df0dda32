"""What a launch shows of its run, and that it does not where nobody wants it."""

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from ragtag.cli.views import Shown, check_sinks
from ragtag.core.errors import SettingError
from ragtag.watch.events import Ended, Step
from ragtag.watch.reader import read

SOURCE = Path(__file__).parents[2] / "src"
SCRIPT = """
import sys, time, torch, ragtag
from torch.utils.data import TensorDataset
torch.set_num_threads(1)
data = TensorDataset(torch.ones(64, 2), torch.ones(64, 1))
model = torch.nn.Linear(2, 1)
def loss_fn(model, batch):
    time.sleep(0.01)
    return ((model(batch[0]) - batch[1]) ** 2).mean()
with ragtag.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, data, global_batch_size=4) as trainer:
    for report in trainer.steps(20):
        pass
    if trainer.rank == 0:
        print("done", flush=True)
        if "wait" in sys.argv:
            sys.stdin.readline()
"""


def start(tmp_path: Path, *words: str, script_words: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, "-m", "ragtag.cli.main", "launch", "--local", "2", *words, str(script), *script_words],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("membership", ["--elastic", "--fixed"])
def test_a_quiet_launch_says_what_the_script_says(tmp_path, membership):
    out, errors = start(tmp_path, membership, "--quiet").communicate(timeout=60)
    assert (out, errors) == ("done\n", "")
    steps = [event.number for event in read(tmp_path / "runs/latest/log.jsonl") if isinstance(event, Step)]
    assert steps == list(range(1, 21)), "its log is written all the same"


def test_the_first_lines_say_how_to_join_and_where_to_watch(tmp_path):
    launch = start(tmp_path, script_words=("wait",))
    assert launch.stdout is not None
    assert launch.stderr is not None
    assert launch.stdin is not None
    try:
        lines = [launch.stderr.readline() for _ in range(4)]
        said = "".join(lines)
        assert re.search(r"^  RAGTAG_TOKEN=\w+ ragtag launch --hub 127\.0\.0\.1:\d+ .*train\.py wait$", said, re.M)
        found = re.search(r"watch it at (http://127\.0\.0\.1:\d+/\?token=\S+)", said)
        assert found is not None, said
        assert launch.stdout.readline() == "done\n"
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with browser.open(found[1], timeout=30) as answer:
            assert b"<html" in answer.read()
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(found[1].partition("?")[0], timeout=30)
    finally:
        launch.stdin.close()
        launch.stdin = None
        launch.communicate(timeout=60)
    assert launch.returncode == 0
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(found[1], timeout=10)


def test_other_tools_are_fed_to_the_end(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, errors = start(tmp_path, "--fixed", "--no-page", "--tensorboard", "board").communicate(timeout=60)
    assert "watch it at" not in errors
    board = EventAccumulator(str(tmp_path / "board"), size_guidance={"scalars": 0})
    board.Reload()
    events = list(read(tmp_path / "runs/latest/log.jsonl"))
    assert isinstance(events[-1], Ended)
    losses = {event.number: event.loss for event in events if isinstance(event, Step)}
    assert {each.step: each.value for each in board.Scalars("loss")} == pytest.approx(losses, rel=1e-5)


def test_a_package_that_is_missing_is_said_before_the_run(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingError, match=r"--wandb needs a package .* pip install 'ragtag\[wandb\]'"):
        check_sinks(Shown(wandb="project"))


def test_a_port_that_is_taken_is_one_line(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for membership in ("--fixed", "--elastic"):
            launch = start(tmp_path, membership, "--page-port", str(port))
            _, errors = launch.communicate(timeout=60)
            assert launch.returncode == 2, errors
            last = errors.splitlines()[-1]
            assert last.startswith(f"ragtag: error: The page cannot listen on 127.0.0.1, port {port}: Address"), errors
