import msgspec
import pytest

from ragtag.core.errors import SettingError
from ragtag.core.profile import DeviceProfile, ModelFacts, Profile, Timing, load_profile

MODEL = ModelFacts(
    name="m", shape_hash="", parameters=3, parameter_bytes=12, gradient_bytes=12, optimizer_bytes=0, bucket_bytes=(8, 4)
)
DEVICE = DeviceProfile(name="a", timings=(Timing(samples=1, seconds=1.0),), bucket_ready=(0.6, 1.0))
PROFILE = Profile(model=MODEL, global_batch_size=4, devices=(DEVICE,))


def saved(tmp_path, **fields):
    changed = msgspec.structs.replace(PROFILE, devices=(msgspec.structs.replace(DEVICE, **fields),))
    changed.save(tmp_path / "p.json")
    return tmp_path / "p.json"


def test_a_profile_comes_back(tmp_path):
    assert load_profile(saved(tmp_path)) == PROFILE
    assert load_profile(saved(tmp_path, bucket_ready=())).devices[0].bucket_ready == ()


@pytest.mark.parametrize("ready", [(0.6,), (1.0, 0.6), (-0.1, 1.0), (0.6, 1.1), (0.2, 0.6, 1.0)])
def test_when_buckets_are_complete_must_fit_the_model(tmp_path, ready):
    with pytest.raises(SettingError, match=r"p\.json: devices\[0\] \('a'\): bucket_ready: .*each of the 2 buckets"):
        load_profile(saved(tmp_path, bucket_ready=ready))
