import json
import subprocess
import sys

import msgspec
import pytest
from typer.testing import CliRunner

from ragtag.cli.main import app
from ragtag.cli.simulate import Report, Request, make_report, run_simulate
from ragtag.core.errors import SettingError
from ragtag.core.profile import DeviceProfile, ModelFacts, Profile, Timing

HOME = """
[emulate]
sample_ms = 40
optimizer_ms = 8
[[device]]
name = "desktop"
count = 2
price_per_hour = 0.1
[[device]]
name = "laptop"
speed = 0.25
"""


@pytest.fixture
def home(tmp_path):
    path = tmp_path / "home.toml"
    path.write_text(HOME)
    return path


def test_the_report_says_what_following_speeds_is_worth(home, tmp_path, capsys):
    page = tmp_path / "report.html"
    asked = Request(cluster=home, batch=36, hours=0.05, leave=("laptop@1",), join=("laptop@2",))
    run_simulate(asked, html=page, as_json=True)
    report = msgspec.json.decode(capsys.readouterr().out, type=Report)
    ours, even, _ = report.ways
    assert (ours.name, even.name) == ("ragtag", "even DDP")
    assert ours.samples_per_s > 1.5 * even.samples_per_s
    assert [(each.device, each.what) for each in ours.incidents] == [("laptop", "leaves"), ("laptop", "joins")]
    text = page.read_text()
    assert text.count('class="panel"') == 3
    assert "laptop leaves" in text
    assert ours.decisions[0].reason.replace(">", "&gt;") in text
    assert "NaN" not in text


def test_the_tables_name_devices_decisions_and_prices(home, capsys):
    run_simulate(Request(cluster=home, batch=36, steps=60), html=None, as_json=False)
    out = capsys.readouterr().out
    for word in ("desktop-1", "eta", "wasted", "$ per", "step 2: shares 12, 12, 12 -> ", "achieved"):
        assert word in out


def test_a_profile_says_what_work_costs_and_how_large_a_step_is(home, tmp_path):
    def device(name, sample_s):
        timings = tuple(Timing(samples=n, seconds=0.01 + n * sample_s) for n in (1, 2, 8))
        return DeviceProfile(name=name, timings=timings)

    model = ModelFacts(name="m", shape_hash="x", parameters=1, parameter_bytes=4, gradient_bytes=4, optimizer_bytes=8)
    measured = Profile(model=model, global_batch_size=30, devices=(device("desktop", 0.02), device("laptop", 0.1)))
    measured.save(tmp_path / "p.json")
    report = make_report(Request(cluster=home, profile=tmp_path / "p.json", steps=40))
    assert report.global_batch_size == 30
    even = report.ways[1]
    # Ten samples each; the laptop sets the pace.
    assert even.wall_s == pytest.approx(40 * (0.01 + 10 * 0.1), rel=0.01)
    assert report.ways[0].eta > 2 * even.eta


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hours": 0.0}, "--hours 0 is not valid. Expected a number above 0"),
        ({"batch": -4}, "--batch -4 is not valid"),
        ({"failures_per_hour": float("nan")}, "--failures-per-hour nan is not valid. Expected 0 or more"),
        ({"leave": ("laptp@3",)}, "no device 'laptp'. Did you mean 'laptop'"),
        ({"join": ("laptop",)}, "Write a device and a minute: --join laptop@20"),
        ({"gradient": "4"}, "has no unit"),
    ],
)
def test_mistakes_name_the_option_and_the_fix(home, wrong, message):
    with pytest.raises(SettingError) as error:
        make_report(Request(cluster=home, **wrong))
    assert message in str(error.value)


def test_the_verb_is_there_and_shows_an_example():
    result = CliRunner().invoke(app, ["simulate", "--help"])
    assert result.exit_code == 0
    assert "ragtag simulate cluster.toml --profile p.json" in result.output


def test_simulating_never_imports_torch(home):
    program = (
        "import sys; from ragtag.cli.main import app\n"
        f"app(['simulate', {str(home)!r}, '--steps', '3', '--json'], standalone_mode=False)\n"
        "print(json.dumps('torch' in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import json\n{program}"], capture_output=True, text=True, timeout=100, check=True
    )
    assert json.loads(done.stderr.strip().splitlines()[-1]) is False
    assert json.loads(done.stdout)["ways"][0]["steps"] == 3
