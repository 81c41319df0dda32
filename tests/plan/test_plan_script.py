"""Planning for a script: it is measured first, or compared with the profile that is given."""

import json
import os
import re
import subprocess
import sys

import msgspec
import pytest
from typer.testing import CliRunner

from ragtag.cli.launch import request
from ragtag.cli.main import app
from ragtag.cli.plan_match import check_devices, check_made_for
from ragtag.cli.profile import what_it_trains
from ragtag.core.cluster import Cluster, Device
from ragtag.core.errors import RagtagError, SettingError
from ragtag.core.profile import DeviceProfile, Timing
from ragtag.plan.file import load_plan

SCRIPT = """
import sys, torch, ragtag
torch.set_num_threads(1)
torch.manual_seed(0)
width = int(sys.argv[1]) if sys.argv[1:] else 4
model = torch.nn.Sequential(torch.nn.Linear(width, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
data = torch.utils.data.TensorDataset(torch.randn(64, width))
def loss_fn(model, batch):
    return model(batch[0]).square().mean()
ragtag.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, data, global_batch_size=16)
print("not reached")
"""
RAGTAG = [sys.executable, "-m", "ragtag.cli.main"]


@pytest.fixture
def place(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def ragtag(place, *words):
    environ = os.environ | {"XDG_CACHE_HOME": str(place / "cache")}
    return subprocess.run([*RAGTAG, *words], cwd=place, env=environ, capture_output=True, text=True, timeout=100)


@pytest.mark.long
def test_a_script_is_measured_then_planned_for_and_not_measured_again(place):
    first = ragtag(place, "plan", "train.py", "--json", "--output", "plan.json")
    assert first.returncode == 0, first.stderr
    tree = json.loads(first.stdout)
    assert tree["global_batch_size"] == 16
    (part,) = next(one for one in tree["candidates"] if one["chosen"])["candidate"]["parts"]
    assert part["samples"] == load_plan(place / "plan.json").shares[0] == 16
    assert "micro-batches of 1 to 16" in first.stderr
    assert "not reached" not in first.stderr
    profiled = ragtag(place, "profile", "--output", "p.json", "train.py")
    assert "Reused what was measured" in profiled.stderr
    assert "micro-batches of" not in profiled.stderr
    other = ragtag(place, "plan", "train.py", "5", "--profile", "p.json")
    assert other.returncode == 2
    assert other.stdout == ""
    *_, error = other.stderr.strip().splitlines()
    assert error.startswith("ragtag: error: p.json: model.shape_hash: it was measured for Sequential (49 parameters)")
    assert error.endswith("Measure again: ragtag profile --output p.json train.py 5")


@pytest.fixture(scope="module")
def trains(tmp_path_factory):
    script = tmp_path_factory.mktemp("script") / "train.py"
    script.write_text(SCRIPT)
    found = what_it_trains(request(script=str(script), num_workers=1))
    assert found is not None
    return found


def measured(trains, **changes):
    facts = {name: changes.pop(name) for name in tuple(changes) if name != "global_batch_size"}
    device = DeviceProfile(name="fast", timings=(Timing(samples=1, seconds=0.1),))
    model = msgspec.structs.replace(trains.model, **facts)
    return msgspec.structs.replace(trains, model=model, devices=(device,), **changes)


def test_what_a_script_trains_is_found_without_measuring(trains):
    assert (trains.model.name, trains.model.parameters, trains.global_batch_size) == ("Sequential", 49, 16)
    assert trains.devices == ()
    check_made_for(measured(trains), "p.json", "train.py", trains, batch=None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shape_hash": "x", "parameters": 7, "name": "Other"}, r"shape_hash: .*Other \(7 parameters\), and train.py"),
        ({"shape_hash": "x"}, "with other names, shapes or dtypes of parameters, or another optimizer"),
        ({"run_hash": "x"}, r"model\.run_hash: .*samples of another shape or another precision"),
        ({"unit": 4, "separable": False}, r"model\.unit: .*units of 4 samples, and train.py trains with any split"),
        ({"global_batch_size": 64}, r"global_batch_size: 64, and that of train.py is 16.*--batch 16"),
    ],
)
def test_a_profile_of_something_else_is_refused_by_file_and_key(trains, changes, said):
    profile = measured(trains, **changes)
    with pytest.raises(SettingError, match=rf"^p\.json: .*{said}") as refused:
        check_made_for(profile, "p.json", "train.py", trains, batch=None)
    assert "ragtag profile --output p.json train.py" in str(refused.value)


def test_the_verb_compares_before_it_plans(trains, place, monkeypatch):
    asked = []

    def train_nothing(wanted):
        asked.append(wanted)
        return trains

    monkeypatch.setattr("ragtag.cli.plan.what_it_trains", train_nothing)
    for batch in (16, 64):
        measured(trains, global_batch_size=batch).save(place / "p.json")
        words = ["plan", str(place / "train.py"), "4", "--profile", str(place / "p.json"), "--json"]
        result = CliRunner().invoke(app, words)
        if batch == 16:
            assert json.loads(result.output)["global_batch_size"] == 16
        else:
            assert "global_batch_size: 64, and that of" in str(result.exception)
    assert [(one.command, one.num_workers) for one in asked] == [((str(place / "train.py"), "4"), 1)] * 2


def test_another_batch_may_be_asked_for(trains):
    check_made_for(measured(trains, global_batch_size=64), "p.json", "train.py", trains, batch=64)


def test_a_profile_by_hand_need_not_say_what_it_was_measured_with(trains):
    check_made_for(measured(trains, run_hash=""), "p.json", "train.py", trains, batch=None)


def test_a_device_that_nobody_measured_is_named_with_both_files(trains):
    cluster = Cluster(devices=(Device(name="fast"), Device(name="fats", kind="rtx3090")))
    with pytest.raises(SettingError, match=r"^p\.json: devices: .*'fats' was not measured.*in home\.toml") as refused:
        check_devices(measured(trains), "p.json", cluster, "home.toml")
    assert "Did you mean 'fast'?" in str(refused.value)


def test_a_script_that_trains_nothing_or_fails_is_one_error(tmp_path):
    (tmp_path / "train.py").write_text("print(1)")
    with pytest.raises(RagtagError, match=r"ended without building a ragtag\.Trainer"):
        what_it_trains(request(script=str(tmp_path / "train.py"), num_workers=1))
    (tmp_path / "train.py").write_text("raise SystemExit(3)")
    assert what_it_trains(request(script=str(tmp_path / "train.py"), num_workers=1)) is None


CLUSTER = '[emulate]\nsample_ms = 10\n[[device]]\nname = "a"\nhost = "one"\n[[device]]\nname = "b"\nhost = "two"\n'
BAD_FILES = {
    "misspelt key": (
        CLUSTER.replace('host = "two"', 'hots = "two"'),
        r"bad\.toml, line 8, .*hots: no such key.*Did you mean 'host'",
    ),
    "no unit": (
        CLUSTER + 'memory = "24 gigs"\n',
        r"bad\.toml, line 9, .*memory: 'gigs' is not a unit.*Units are .*GiB",
    ),
    "unknown host": (CLUSTER + '[[link]]\nbetween = ["one", "tow"]\n', r"bad\.toml.*'tow'.*Did you mean 'two'"),
    "no memory": (CLUSTER + "memory = 0\n", r"bad\.toml, line 9, .*memory: 0 is not valid.*24GB"),
    "nothing": (CLUSTER + 'memory = "0GB"\n', r"bad\.toml, line 9, .*memory: .*"),
    "backwards": (CLUSTER + "speed = -1\n", r"bad\.toml, line 9, .*speed: -1 is not valid.*above 0"),
}


@pytest.mark.parametrize("verb", ["plan", "simulate"])
def test_every_mistake_in_a_cluster_file_is_one_line_with_file_key_and_fix(verb, tmp_path):
    for name, (text, said) in BAD_FILES.items():
        (tmp_path / "bad.toml").write_text(text)
        ended = ragtag(tmp_path, verb, "bad.toml", "--batch", "16")
        assert ended.returncode == 2, (name, ended.stderr)
        assert ended.stdout == "", name
        (line,) = ended.stderr.strip().splitlines()
        assert re.search(said, line), (name, line)
        assert "Traceback" not in line
