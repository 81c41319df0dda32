import msgspec
import pytest

from ragtag.cli.launch import request
from ragtag.cli.profile import run_profile
from ragtag.core.errors import RagtagError, SettingError
from ragtag.core.profile import Profile, load_profile

SCRIPT = """
import torch, ragtag
print("from the script")
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(16, 4))
def loss_fn(model, batch):
    return model(batch[0]).square().mean()
ragtag.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, data, global_batch_size=4)
print("not reached")
"""


def script(tmp_path, text):
    file = tmp_path / "train.py"
    file.write_text(text)
    return request(script=str(file), num_workers=1)


def test_a_script_is_profiled_and_json_is_all_that_standard_output_has(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    output = tmp_path / "p.json"
    assert run_profile(script(tmp_path, SCRIPT), output=output, fresh=False, as_json=True) == 0
    printed = capfd.readouterr()
    assert msgspec.json.decode(printed.out, type=Profile) == load_profile(output)
    assert "from the script" in printed.err
    assert "Linear profiled on 1 device(s)" in printed.err
    assert "not reached" not in printed.err
    (device,) = load_profile(output).devices
    assert [timing.samples for timing in device.timings] == [1, 2, 4]


def test_a_script_without_a_trainer_is_one_error_even_beside_an_older_profile(tmp_path):
    output = tmp_path / "p.json"
    output.write_text("older")
    with pytest.raises(RagtagError, match=r"train\.py' ended without building a ragtag\.Trainer"):
        run_profile(script(tmp_path, "print(1)"), output=output, fresh=False, as_json=False)
    assert output.read_text() == "older"


def test_a_script_that_fails_gives_its_status(tmp_path):
    assert run_profile(script(tmp_path, "raise SystemExit(7)"), output=tmp_path / "p", fresh=False, as_json=False) == 7


def test_an_output_that_cannot_be_written_is_told_before_anything_runs(tmp_path):
    asked = script(tmp_path, "open('ran', 'w')")
    with pytest.raises(SettingError, match=r"--output .* is a directory"):
        run_profile(asked, output=tmp_path, fresh=False, as_json=False)
    with pytest.raises(SettingError, match=r"no directory that can be written to"):
        run_profile(asked, output=tmp_path / "none" / "p.json", fresh=False, as_json=False)
