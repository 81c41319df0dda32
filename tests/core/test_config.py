import pickle
from pathlib import Path

import msgspec
import pytest

from ragtag.core.config import Config, shares_from_environment
from ragtag.core.errors import SettingError

FIELDS = {field.name: field for field in msgspec.structs.fields(Config)}


def resolve(settings=None, environ=None, directory=Path("/nonexistent")) -> Config:
    return Config.resolve(settings or {}, environ=environ or {}, directory=directory)


@pytest.fixture
def write(tmp_path):
    def write_toml(text: str, name: str = "ragtag.toml") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path

    return write_toml


def test_defaults():
    config = resolve()
    assert {name: getattr(config, name) for name in FIELDS} == {
        "patience_s": 30.0,
        "unit": None,
        "micro_batch": None,
        "recompute": None,
        "wire": "fp32",
        "layout": "auto",
        "slices": None,
        "stages": None,
        "checkpoint_in_background": False,
        "blocks": None,
        "reduce": "host",
        "bucket_bytes": 4 << 20,
        "check_loss": True,
        "seed_samples": True,
        "overlap": True,
        "pull": None,
        "cover_stalls": True,
        "check_replicas_every": 100,
        "checkpoint": None,
        "checkpoint_every_s": 600.0,
        "checkpoint_every_steps": None,
        "checkpoint_keep": 3,
        "mode": "auto",
        "data": "global",
        "fragments": 4,
        "inner_steps": None,
        "warm_up_steps": None,
        "total_steps": None,
        "resume": True,
        "log": None,
    }


def test_config_itself_looks_at_the_process(monkeypatch, write):
    monkeypatch.chdir(write("[config]\nunit = 4\noverlap = false"))
    monkeypatch.setenv("RAGTAG_PATIENCE_S", "5")
    monkeypatch.setenv("RAGTAG_UNIT", "8")
    config = Config(check_replicas_every=0)
    assert (config.patience_s, config.unit, config.overlap, config.check_replicas_every) == (5.0, 8, False, 0)
    assert pickle.loads(pickle.dumps(config)) == config


def test_precedence(write):
    directory = write("[config]\npatience_s = 4")
    environ = {"RAGTAG_PATIENCE_S": "5"}
    assert resolve({"patience_s": 6}, environ, directory).patience_s == 6
    assert resolve({}, environ, directory).patience_s == 5
    assert resolve({}, {"RAGTAG_PATIENCE_S": " "}, directory).patience_s == 4
    assert resolve({}, {}, directory.parent / "empty").patience_s == 30


def test_ragtag_config_names_the_file(write):
    directory = write("[config]\nunit = 2")
    write("[config]\nunit = 3\n[elsewhere]\nignored = 1", "other.toml")
    assert resolve({}, {"RAGTAG_CONFIG": "other.toml"}, directory).unit == 3
    assert resolve({}, {"RAGTAG_CONFIG": str(directory / "other.toml")}).unit == 3
    with pytest.raises(SettingError, match=r"RAGTAG_CONFIG names .*absent\.toml, which does not exist"):
        resolve({}, {"RAGTAG_CONFIG": "absent.toml"}, directory)


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("UNIT", "none", None),
        ("UNIT", "16", 16),
        ("MICRO_BATCH", "None", None),
        ("WIRE", "bf16", "bf16"),
        ("BUCKET_BYTES", "65536", 65536),
        ("OVERLAP", "off", False),
        ("CHECK_LOSS", "0", False),
        ("SEED_SAMPLES", "Yes", True),
        ("PATIENCE_S", "2.5", 2.5),
        ("CHECK_REPLICAS_EVERY", "0", 0),
        ("CHECKPOINT", "s3://bucket/runs", "s3://bucket/runs"),
        ("CHECKPOINT_EVERY_S", "none", None),
        ("CHECKPOINT_EVERY_S", "60", 60.0),
        ("RESUME", "0", False),
    ],
)
def test_variables_are_read_as_their_type(variable, text, value):
    config = resolve({"unit": 3} if variable != "UNIT" else {}, {f"RAGTAG_{variable}": text})
    assert getattr(config, variable.lower()) == value
    assert type(getattr(config, variable.lower())) is type(value)


def test_a_path_is_taken_for_a_directory(tmp_path):
    assert resolve({"checkpoint": tmp_path}).checkpoint == str(tmp_path)


def test_none_can_be_spelt_in_the_file(write):
    assert resolve({}, {}, write('[config]\nunit = "none"')).unit is None


WRONG = [
    ("pull", 1),
    ("pull", "yes"),
    ("patience_s", 0),
    ("patience_s", -1.0),
    ("patience_s", float("nan")),
    ("patience_s", float("inf")),
    ("patience_s", "30"),
    ("patience_s", None),
    ("unit", 0),
    ("unit", True),
    ("unit", 2.0),
    ("unit", "none"),
    ("micro_batch", -3),
    ("micro_batch", [4]),
    ("wire", "fp16"),
    ("wire", 16),
    ("recompute", "often"),
    ("layout", "zero4"),
    ("slices", 3),
    ("stages", ("0:0-3",)),
    ("checkpoint_in_background", "later"),
    ("blocks", "layers"),
    ("slices", (1, "2")),
    ("bucket_bytes", 100),
    ("bucket_bytes", 1 << 31),
    ("check_loss", 1),
    ("seed_samples", "yes"),
    ("overlap", None),
    ("cover_stalls", "sometimes"),
    ("check_replicas_every", -1),
    ("checkpoint", ""),
    ("checkpoint", 3),
    ("log", ""),
    ("reduce", "gloo"),
    ("checkpoint_every_s", 0),
    ("checkpoint_every_s", "10 minutes"),
    ("checkpoint_every_steps", 0),
    ("checkpoint_keep", 0),
    ("checkpoint_keep", None),
    ("resume", "no"),
    ("mode", "sometimes"),
    ("data", "mine"),
    ("fragments", 0),
    ("inner_steps", 0),
    ("warm_up_steps", -1),
    ("total_steps", 0),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_values_are_refused(name, value):
    with pytest.raises(SettingError) as caught:
        resolve({name: value})
    assert str(caught.value).startswith(f"{name} = {value!r} is not valid. Expected ")


def test_every_setting_has_a_wrong_value_above():
    assert {name for name, _ in WRONG} == set(FIELDS)


@pytest.mark.parametrize(
    ("variable", "text"), [("PATIENCE_S", "soon"), ("UNIT", "1.5"), ("OVERLAP", "maybe"), ("WIRE", "none")]
)
def test_a_wrong_variable_is_named(variable, text):
    with pytest.raises(SettingError, match=f"'{text}', from the environment variable RAGTAG_{variable}, is not valid"):
        resolve({}, {f"RAGTAG_{variable}": text})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[config]\nunit = 0", r"unit = 0, from \[config\] in .*ragtag.toml, is not valid. Expected a whole number"),
        ("[config]\nunits = 4", r"ragtag.toml: \[config\] has no setting 'units'. Did you mean 'unit'\?"),
        ("[config]\nunit = ", "ragtag.toml is not valid TOML"),
        ("config = 3", "config = 3 is not valid. Expected a table"),
    ],
)
def test_a_wrong_file_is_named(write, text, message):
    with pytest.raises(SettingError, match=message):
        resolve({}, {}, write(text))


def test_an_unreadable_file_is_named(tmp_path):
    (tmp_path / "ragtag.toml").mkdir()
    with pytest.raises(SettingError, match=r"ragtag\.toml cannot be read: Is a directory"):
        resolve({}, {}, tmp_path)


def test_a_misspelt_argument_is_answered_with_the_closest():
    with pytest.raises(SettingError, match=r"no setting 'pacience_s'\. Did you mean 'patience_s'\?"):
        Config(pacience_s=3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(SettingError, match=r"no setting 'zebra'\. Settings are blocks, bucket_bytes, check_loss"):
        Config(zebra=3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(SettingError, match="by name"):
        Config(3)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("RAGTAG_PATIENCE", "RAGTAG_PATIENCE_S"),
        ("RAGTAG_UNITS", "RAGTAG_UNIT"),
        ("RAGTAG_BUCKET", "RAGTAG_BUCKET_BYTES"),
        ("ragtag_unit", "RAGTAG_UNIT"),
    ],
)
def test_a_misspelt_variable_is_answered_with_the_closest(variable, meant):
    with pytest.raises(SettingError, match=f"{variable} = '3' names no setting. Did you mean '{meant}'?"):
        resolve({}, {variable: "3"})


def test_other_variables_are_left_alone():
    names = ["STORE_FD", "LAUNCHED", "LAUNCHER_PIPE", "SHARES", "CONFIG", "DEVICE", "HOSTNAME", "TOKEN"]
    environ = {f"RAGTAG_{name}": "" for name in names} | {"UNIT": "x", "RAGTAGUNIT": "x"}
    assert resolve({}, environ) == resolve()


def test_settings_are_documented():
    source = Path(__import__("ragtag.core.config", fromlist=["x"]).__file__).read_text()
    for name in FIELDS:
        after = source.split(f"    {name}: ")[1]
        assert '"""' in after.split("\n\n")[0], f"{name} has no docstring"


def test_shares_from_environment():
    assert shares_from_environment({}) is None
    assert shares_from_environment({"RAGTAG_SHARES": ""}) is None
    assert shares_from_environment({"RAGTAG_SHARES": "8, 5,3"}) == (8, 5, 3)
    assert shares_from_environment({"RAGTAG_SHARES": "0"}) == (0,)


@pytest.mark.parametrize("text", ["8,,3", "8;5", "-1,2", "a", "1.5", "8,5,", "²"])
def test_malformed_shares_are_refused(text):
    with pytest.raises(SettingError, match=f"RAGTAG_SHARES = '{text}' is not valid"):
        shares_from_environment({"RAGTAG_SHARES": text})
