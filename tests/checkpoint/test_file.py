import contextlib
import json
import os
import resource
import struct

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.checkpoint.file import load_file, save_file
from ragtag.core.errors import CheckpointError

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def small_tree():
    return {"model": {"fc.weight": torch.arange(6.0).reshape(2, 3)}, "step": 3, "best": float("inf"), "none": None}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "run.safetensors"
    save_file(path, small_tree())
    return path


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3)], ids=str)
def test_every_dtype_and_shape_comes_back_to_the_bit(tmp_path, dtype, shape):
    torch.manual_seed(0)
    tensor = torch.randint(0, 2, shape).to(dtype)
    if dtype.is_floating_point and dtype.itemsize > 1 and tensor.dim() and tensor.numel():
        tensor[0] = float("nan")
    save_file(tmp_path / "x", [tensor])
    [back] = load_file(tmp_path / "x")
    assert (back.dtype, back.shape, bits(back)) == (dtype, tensor.shape, bits(tensor))


def test_views_strides_and_ties_come_back(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    tree = {
        "tied": [base, base],
        "transposed": base.T,
        "rows": base[1:3],
        "overlapping": base[2:4],
        "expanded": base[0, 0].expand(3),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    save_file(tmp_path / "x", tree)
    back = load_file(tmp_path / "x")
    assert back["tied"][0] is back["tied"][1]
    for name in list(tree)[1:]:
        assert torch.equal(back[name], tree[name].resolve_conj()), name
    back["rows"].fill_(-1)
    assert torch.equal(back["overlapping"], base[2:4])


def test_a_training_state_resumes_bit_for_bit(tmp_path):
    def build():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])

    def train(model, optimizer, scheduler, steps):
        for _ in range(steps):
            model(torch.linspace(0, 1, 32).reshape(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    whole, first, second = build(), build(), build()
    train(*whole, 6)
    train(*first, 2)
    save_file(tmp_path / "x", [part.state_dict() for part in first])
    for part, state in zip(second, load_file(tmp_path / "x")):
        part.load_state_dict(state)
    train(*second, 4)
    assert all(torch.equal(a, b) for a, b in zip(whole[0].state_dict().values(), second[0].state_dict().values()))
    assert whole[2].get_last_lr() == second[2].get_last_lr()


def test_other_tools_can_read_the_tensors(saved):
    tensors = safetensors.torch.load_file(saved)
    assert list(tensors) == ["model.fc\\.weight"]
    assert torch.equal(tensors["model.fc\\.weight"], torch.arange(6.0).reshape(2, 3))


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path):
    path = tmp_path / "x"
    save_file(path, torch.ones(10_000))
    tensor = load_file(path)
    with open(path, "r+b") as file:
        file.seek(-20_000, os.SEEK_END)
        file.write(b"\xff" * 20_000)
    assert torch.equal(tensor, torch.ones(10_000))


def test_a_link_is_followed_and_usual_permissions_apply(tmp_path):
    (tmp_path / "real").touch()
    (tmp_path / "latest").symlink_to(tmp_path / "real")
    save_file(tmp_path / "latest", 5)
    assert (tmp_path / "latest").is_symlink()
    assert load_file(tmp_path / "real") == 5
    (tmp_path / "plain").touch()
    assert (tmp_path / "real").stat().st_mode == (tmp_path / "plain").stat().st_mode


# ---- damage


def equal_trees(a, b):
    return (
        torch.equal(a["model"]["fc.weight"], b["model"]["fc.weight"])
        and a["model"]["fc.weight"].dtype == b["model"]["fc.weight"].dtype
        and {**a, "model": 0} == {**b, "model": 0}
    )


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_no_flipped_bit_goes_unnoticed(saved, tmp_path_factory, data):
    content = bytearray(saved.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    damaged = saved.with_name("damaged")
    damaged.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"damaged|schema|no ragtag checkpoint"):
        load_file(damaged)


def test_every_truncation_is_noticed(saved):
    content = saved.read_bytes()
    shorter = saved.with_name("shorter")
    for length in {*range(0, len(content), 7), len(content) - 1}:
        shorter.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="shorter"):
            load_file(shorter)


def with_metadata(path, change):
    """Rewrite the header's metadata by `change`."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    change(header["__metadata__"])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    other = path.with_name("changed")
    other.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    return other


def test_a_newer_schema_says_upgrade(saved):
    with pytest.raises(CheckpointError, match=r"schema 2.*Upgrade"):
        load_file(with_metadata(saved, lambda metadata: metadata.update(schema="2")))


@pytest.mark.parametrize("word", ["format", "schema", "skeleton", "checksums", "header_checksum"])
def test_missing_metadata_is_noticed(saved, word):
    with pytest.raises(CheckpointError, match="changed"):
        load_file(with_metadata(saved, lambda metadata: metadata.pop(word)))


def test_other_files_are_refused_by_name(tmp_path):
    safetensors.torch.save_file({"x": torch.ones(1)}, tmp_path / "foreign")
    torch.save({"x": torch.ones(1)}, tmp_path / "pickled")
    (tmp_path / "text").write_text("hello, I am no checkpoint at all")
    for name, reason in [("foreign", "no ragtag checkpoint"), ("pickled", "no checkpoint"), ("text", "no checkpoint")]:
        with pytest.raises(CheckpointError, match=f"{name}.*{reason}"):
            load_file(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint file .*absent"):
        load_file(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="there is no checkpoint file"):
        load_file(tmp_path)


# ---- failures while writing


@contextlib.contextmanager
def largest_file(num_bytes):
    """What a full disk looks like to a writer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def assert_intact(path):
    assert equal_trees(load_file(path), small_tree())
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_full_disk_leaves_the_previous_file(tmp_path):
    path = tmp_path / "run"
    save_file(path, small_tree())
    with largest_file(100_000), pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*run.*untouched"):
        save_file(path, torch.ones(100_000))
    assert_intact(path)


@pytest.mark.parametrize("name", ["replace", "fsync"])
def test_a_failure_at_the_last_moment_leaves_the_previous_file(tmp_path, monkeypatch, name):
    path = tmp_path / "run"
    save_file(path, small_tree())

    def fail(*arguments):
        raise PermissionError(f"no {name} today")

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=f"no {name} today"):
        patch.setattr(os, name, fail)
        save_file(path, 5)
    assert_intact(path)


def test_an_interrupted_save_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "run"
    save_file(path, small_tree())

    def interrupt(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", interrupt)
        save_file(path, 5)
    assert_intact(path)


def test_a_bad_leaf_is_refused_before_anything_is_written(tmp_path):
    path = tmp_path / "run"
    save_file(path, small_tree())
    for leaf, named in [(object(), "object"), (torch.ones(1, dtype=torch.complex128), "complex128")]:
        with pytest.raises(CheckpointError, match=f"'ema'.*{named}"):
            save_file(path, {"ema": leaf})
    assert_intact(path)


@pytest.mark.parametrize("place", ["absent/run", "/proc/run"])
def test_a_directory_that_cannot_be_written_is_named(tmp_path, place):
    with pytest.raises(CheckpointError, match=f"cannot write the checkpoint .*{place}"):
        save_file(tmp_path / place, 5)


def test_a_flipped_bit_in_the_schema_is_noticed(saved):
    content = saved.read_bytes()
    assert content.count(b'"schema":"1"') == 1
    damaged = saved.with_name("damaged")
    damaged.write_bytes(content.replace(b'"schema":"1"', b'"schema":"0"'))
    with pytest.raises(CheckpointError, match="header fails its checksum"):
        load_file(damaged)
