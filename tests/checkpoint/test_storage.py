import contextlib
import resource
import uuid

import fsspec
import pytest
import torch

from ragtag.checkpoint.storage import LocalStorage, RemoteStorage, is_remote, open_storage, split
from ragtag.core.errors import CheckpointError


@pytest.fixture(params=["local", "file://", "memory://"])
def storage(request, tmp_path):
    where = tmp_path / "runs" / "1"
    return open_storage(
        {"local": where, "file://": f"file://{where}", "memory://": f"memory://{uuid.uuid4()}/1"}[request.param]
    )


def test_what_is_saved_is_there(storage):
    assert storage.names() == {}
    assert storage.read_text("latest.json") is None
    storage.prepare()
    storage.prepare()
    storage.save("a", {"x": torch.arange(5), "step": 1})
    storage.save("a", {"x": torch.arange(5), "step": 2})
    storage.write_text("latest.json", "first")
    storage.write_text("latest.json", "second")
    assert set(storage.names()) == {"a", "latest.json"}
    assert storage.load("a")["step"] == 2
    assert torch.equal(storage.load("a")["x"], torch.arange(5))
    assert storage.read_text("latest.json") == "second"
    storage.remove("a")
    storage.remove("a")
    assert set(storage.names()) == {"latest.json"}


def test_errors_name_the_file_as_a_person_wrote_it(storage):
    storage.prepare()
    name = f"{storage.address}/absent"
    with pytest.raises(CheckpointError, match=f"there is no checkpoint file {name}"):
        storage.load("absent")
    storage.write_text("text", "I am no checkpoint")
    with pytest.raises(CheckpointError, match=f"cannot read the checkpoint {storage.address}/text"):
        storage.load("text")
    with pytest.raises(CheckpointError, match=r"'x' is a builtins\.object"):
        storage.save("bad", {"x": object()})


def test_one_flipped_byte_is_noticed_behind_a_url():
    storage = open_storage(f"memory://{uuid.uuid4()}")
    storage.save("a", torch.ones(100))
    system, root = fsspec.core.url_to_fs(storage.address)
    content = bytearray(system.cat_file(f"{root}/a"))
    content[-7] ^= 1
    system.pipe_file(f"{root}/a", bytes(content))
    with pytest.raises(CheckpointError, match=f"the checkpoint {storage.address}/a is damaged"):
        storage.load("a")
    system.pipe_file(f"{root}/a", bytes(content[:-20]))
    with pytest.raises(CheckpointError, match=f"cannot read the checkpoint {storage.address}/a"):
        storage.load("a")


@pytest.mark.parametrize("operation", ["put_file", "pipe_file", "rm_file", "get_file", "ls", "makedirs"])
def test_whatever_a_file_system_raises_is_a_checkpoint_error(monkeypatch, operation):
    storage = open_storage(f"memory://{uuid.uuid4()}")
    storage.save("a", 1)

    class Strange(Exception):
        pass

    def fail(*arguments, **words):
        raise Strange("quota of the bucket\nis used up")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), operation, fail)
    act = {
        "put_file": lambda: storage.save("a", 2),
        "pipe_file": lambda: storage.write_text("t", ""),
        "rm_file": lambda: storage.remove("a"),
        "get_file": lambda: storage.load("a"),
        "ls": storage.names,
        "makedirs": storage.prepare,
    }[operation]
    with pytest.raises(CheckpointError, match=rf"cannot .*{storage.address}.*: quota of the bucket is used up"):
        act()


def test_addresses(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_storage("~/runs").address == str(tmp_path / "runs")
    assert not is_remote("/a/b")
    assert not is_remote("file:///a/b")
    assert is_remote("s3://bucket/a")
    for address, parent, name in [
        ("/a/b/c", "/a/b", "c"), ("c", ".", "c"), ("file:///a/c", "/a", "c"), ("memory://a/b/c", "memory://a/b", "c"),
        ("memory://c", "memory://", "c"),
    ]:  # fmt: skip
        storage, found = split(address)
        assert (storage.address, found) == (parent, name)
        assert isinstance(storage, RemoteStorage if address.startswith("memory") else LocalStorage)


def test_the_root_of_a_file_system_works_too():
    storage, name = split(f"memory://{uuid.uuid4()}")
    storage.save(name, 5)
    assert storage.load(name) == 5
    assert name in storage.names()
    storage.remove(name)


def test_an_unknown_kind_of_url_says_what_to_do():
    with pytest.raises(CheckpointError, match=r"cannot be kept at nonsense://x: .*nonsense.*pip install s3fs"):
        open_storage("nonsense://x")


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointError, match=f"cannot make the directory {tmp_path}/file/runs for checkpoints: Not a dir"
    ):
        open_storage(tmp_path / "file" / "runs").prepare()
    with pytest.raises(CheckpointError, match="for checkpoints"):
        open_storage("/proc/self/runs").prepare()


@contextlib.contextmanager
def largest_file(num_bytes):
    """What a full disk looks like to a writer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_for_a_small_file_leaves_the_one_before(tmp_path):
    storage = open_storage(tmp_path)
    storage.write_text("latest.json", "first")
    with largest_file(2), pytest.raises(CheckpointError, match=r"cannot write .*latest\.json: File too large"):
        storage.write_text("latest.json", "second")
    assert storage.read_text("latest.json") == "first"
