import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from ragtag.cli.cluster_toml import to_toml
from ragtag.cli.launch import request, worker_environ
from ragtag.cli.main import app
from ragtag.core.cluster import Cluster, Device, DriftPoint, Emulation, Flip, Link, Stall
from ragtag.core.cluster_file import load_cluster, parse_cluster
from ragtag.core.config import recompute_from_environment
from ragtag.core.errors import SettingError
from ragtag.plan.file import PlanFile, PlannedDevice, load_plan, save_plan

HOME = """
[emulate]
sample_ms = 10
optimizer_ms = 5
[[device]]
name = "tower"
count = 2
host = "desk"
price_per_hour = 0.3
[[device]]
name = "laptop"
speed = 0.1
host = "sofa"
[[device]]
name = "card"
speed = 0.5
host = "desk"
[[link]]
between = ["desk", "sofa"]
bandwidth = "100Mbit/s"
latency = "2ms"
"""


@pytest.fixture
def home(tmp_path):
    file = tmp_path / "home.toml"
    file.write_text(HOME)
    return file


def ragtag(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def planned(home, *words):
    result = ragtag("plan", home, "--batch", 64, "--gradient", "4MB", *words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_table_shows_candidates_the_choice_and_why_and_a_verdict_on_each(home):
    shown = planned(home).output
    for part in (
        "even shares",
        "2 islands, exchange every 10 steps",
        "chosen: replicated on 3 of 4 devices",
        "without laptop",
    ):
        assert part in shown
    marked = [line.split()[1] for line in shown.splitlines() if line.strip().startswith("->")]
    assert marked == ["replicated"]
    assert "laptop: -" in shown
    assert "leave it out" in shown
    assert "a million samples" in shown


def test_json_says_the_same_to_programs(home):
    tree = json.loads(planned(home, "--json").output)
    chosen = [one for one in tree["candidates"] if one["chosen"]]
    assert [one["candidate"]["left_out"] for one in chosen] == [["laptop"]]
    assert sum(part["samples"] for part in chosen[0]["candidate"]["parts"]) == 64
    assert {one["device"]: one["keep"] for one in tree["verdicts"]} == {"tower-1": True, "card": True, "laptop": False}


def test_questions_are_answered_in_turn(home):
    tree = json.loads(planned(home, "--json", "--what-if", "+2 tower", "--what-if=-card").output)
    assert tree["edits"] == ["+2 tower", "-card"]
    best = max(one["effective_samples_per_s"] for one in tree["candidates"] if one["chosen"])
    assert best > 1.3 * tree["samples_per_s_before"]


def test_plan_starts_without_torch_and_numpy(home):
    code = (
        "import sys; sys.argv = ['ragtag', 'plan', sys.argv[1], '--batch', '64']\n"
        "from ragtag.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not {'torch', 'numpy', 'scipy'} & set(sys.modules), 'heavy imports'"
    )
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    subprocess.run([sys.executable, "-c", code, str(home)], check=True, env=environ, capture_output=True, timeout=60)


def test_a_plan_file_gives_a_launch_its_shares_and_leaves_devices_out(home, tmp_path):
    file = tmp_path / "plan.json"
    planned(home, "--output", file)
    script = tmp_path / "train.py"
    script.write_text("")
    asked = request(script=str(script), plan=file, emulate=home)
    assert asked.num_workers == 3
    assert asked.start_shares == load_plan(file).shares
    assert sum(asked.start_shares) == 64
    assert asked.shares is None
    assert asked.micro_batches is None
    pinned = request(script=str(script), plan=file, emulate=home, pin=True)
    assert (pinned.shares, pinned.start_shares) == (asked.start_shares, None)
    emulated = load_cluster(asked.emulate)
    assert [device.name for device in emulated.expanded()] == ["tower-0", "tower-1", "card"]
    assert emulated.emulation == load_cluster(home).emulation


def plan_of(*devices, **fields):
    batch = sum(samples for _, samples, _ in devices)
    return PlanFile(
        layout="replicated",
        global_batch_size=batch,
        devices=tuple(PlannedDevice(name=n, samples=s, micro_batch=m) for n, s, m in devices),
        predicted_step_s=1.0,
        predicted_samples_per_s=batch,
        reason="test",
        **fields,
    )


def test_a_layout_that_cuts_state_reaches_the_workers(tmp_path):
    devices = tuple(
        PlannedDevice(name=name, samples=samples, micro_batch=2, state_bytes=held, recompute=name == "b")
        for name, samples, held in (("a", 8, 100), ("b", 0, 300))
    )
    plan = msgspec.structs.replace(plan_of(("a", 8, 8)), layout="zero-3", devices=devices)
    save_plan(plan, tmp_path / "plan.json")
    (tmp_path / "train.py").write_text("")
    wanted = request(script=str(tmp_path / "train.py"), plan=tmp_path / "plan.json", environ={})
    environ = worker_environ(wanted, {})
    assert (environ["RAGTAG_LAYOUT"], environ["RAGTAG_SLICES"]) == ("zero3", "100,300")
    assert environ["RAGTAG_START_SHARES"] == "8,0"
    assert environ["RAGTAG_START_RECOMPUTE"] == "no,yes"
    assert [recompute_from_environment(environ, rank) for rank in range(3)] == [False, True, False]
    with pytest.raises(SettingError, match="RAGTAG_START_RECOMPUTE = 'maybe'"):
        recompute_from_environment({"RAGTAG_START_RECOMPUTE": "maybe"}, 0)


def test_each_device_keeps_to_its_micro_batch_and_to_its_memory_if_shares_grow():
    assert plan_of(("a", 8, 8), ("b", 4, 4)).micro_batches == (None, None)
    assert plan_of(("a", 8, 4), ("b", 4, 1), ("c", 0, 1)).micro_batches == (4, 1, None)
    tight = PlannedDevice(name="a", samples=8, micro_batch=8, largest_micro_batch=9)
    gone = PlannedDevice(name="b", samples=0, micro_batch=1, largest_micro_batch=3, takes_part=False)
    plan = msgspec.structs.replace(plan_of(("a", 8, 8)), devices=(tight, gone))
    assert plan.micro_batches == (9,)
    assert msgspec.structs.replace(plan, unit=2).micro_batches == (None,)


@pytest.mark.parametrize(
    ("plan", "words", "said"),
    [
        (
            plan_of(("a", 8, 8), ("b", 4, 4)),
            {"num_workers": 3},
            r"--local 3, but the plan .* is for 2 devices \(a, b\)",
        ),
        (plan_of(("a", 8, 8)), {"shares": "8"}, "both say the shares"),
        (plan_of(("a", 8, 8)), {"plan": None, "pin": True}, "--pin keeps the shares of a plan: give --plan"),
        (plan_of(("a", 8, 8), not_yet="pipelines"), {}, "needs pipelines, which this ragtag prices but cannot run yet"),
        (plan_of(("a", 8, 8)), {"environ": {"CUDA_VISIBLE_DEVICES": "0,1"}}, r"for 1 devices \(a\), and 2 are here"),
    ],
)
def test_a_plan_for_something_else_is_refused_by_name(plan, words, said, tmp_path):
    save_plan(plan, tmp_path / "plan.json")
    (tmp_path / "train.py").write_text("")
    words = {"environ": {"CUDA_VISIBLE_DEVICES": ""}, **words}
    with pytest.raises(SettingError, match=said):
        request(**{"script": str(tmp_path / "train.py"), "plan": tmp_path / "plan.json", **words})


def test_a_plan_of_another_number_of_devices_is_refused_by_name(home, tmp_path):
    save_plan(plan_of(("tower-0", 8, 8), ("tower-1", 8, 8)), tmp_path / "plan.json")
    with pytest.raises(SettingError, match=r"for 2 devices \(tower-0, tower-1\), and .* has 4"):
        request(script="train.py", plan=tmp_path / "plan.json", emulate=home)


def test_damaged_and_missing_plans_say_how_to_make_one(tmp_path):
    file = tmp_path / "plan.json"
    with pytest.raises(SettingError, match=r"cannot be read: No such file.*ragtag plan"):
        load_plan(file)
    file.write_text("{}")
    with pytest.raises(SettingError, match=r"damaged or incomplete.*ragtag plan"):
        load_plan(file)
    save_plan(plan_of(("a", 8, 8)), file)
    file.write_bytes(file.read_bytes().replace(b'"samples":8', b'"samples":9'))
    with pytest.raises(SettingError, match="damaged"):
        load_plan(file)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--batch 256"),
        (["--batch", "0"], "at least 1 sample"),
        (["--batch", "8", "--gradient", "4"], "--gradient: '4' is not a size"),
        (["--batch", "8", "--profile", "no.json"], "ragtag profile --output no.json train.py"),
        (["--batch", "8", "--output", "/nowhere/plan.json"], "cannot be written"),
    ],
)
def test_wrong_words_are_one_error_with_the_fix(home, words, said):
    error = ragtag("plan", home, *words).exception
    assert isinstance(error, SettingError)
    assert re.search(said, str(error))


def test_a_cluster_that_is_written_is_read_back_the_same():
    cluster = Cluster(
        devices=(
            Device(name='quo"ted', host="häuschen", kind="cuda", memory_bytes=24_000_000_001, cpu_percent=12.5),
            Device(
                name="b",
                count=3,
                speed=1 / 3,
                drift=(DriftPoint(step=3, speed=0.1), DriftPoint(step=9, speed=2.0)),
                drift_kind="step",
                flip=Flip(period=4, speed=0.7),
                stall=(Stall(step=2, seconds=1.5),),
                price_per_hour=0.25,
            ),
        ),
        links=(Link(between=("häuschen", "localhost"), bandwidth_bytes_per_s=1234567.0, latency_s=0.0015),),
        emulation=Emulation(sample_s=0.04, jitter=0.3, jitter_per="micro_batch", seed=7),
    )
    assert parse_cluster(to_toml(cluster)) == cluster
