"""Files that are written and read part by part: the same bytes, whatever the parts."""

import json
import math
import struct
import uuid

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.checkpoint import parts
from ragtag.checkpoint.directory import Directory, Mark
from ragtag.checkpoint.file import SavedFile, load_file, save_file, write_whole
from ragtag.checkpoint.parts import Described, Part, batches, spans
from ragtag.checkpoint.storage import open_storage
from ragtag.checkpoint.tree import filled, flatten, flatten_described
from ragtag.core.errors import CheckpointError

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(parts, "PART_BYTES", 48)


def tensor(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


def parts_of(described, values, sizes):
    """All of `values`, in parts of these sizes, over and over."""
    flat, first, number = values.reshape(-1), 0, 0
    while first < flat.numel():
        last = min(flat.numel(), first + sizes[number % len(sizes)])
        yield Part(described, first, flat[first:last])
        first, number = last, number + 1


@given(st.integers(0, 50), st.integers(0, 200), st.sampled_from([1, 2, 4, 8]))
def test_spans_are_all_of_it_and_small(first, length, itemsize):
    found = list(spans(first, first + length, itemsize))
    assert [index for low, high in found for index in range(low, high)] == list(range(first, first + length))
    assert all((high - low) * itemsize <= parts.PART_BYTES for low, high in found)


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), max_size=12))
def test_batches_are_all_of_them_in_order_and_small(sizes):
    tensors = {str(number): Described((size,), dtype) for number, (size, dtype) in enumerate(sizes)}
    found = list(batches(tensors))
    elements = [(name, index) for batch in found for name, low, high in batch for index in range(low, high)]
    assert elements == [(name, index) for name, each in tensors.items() for index in range(each.numel)]
    for batch in found:
        assert sum((high - low) * tensors[name].dtype.itemsize for name, low, high in batch) <= parts.PART_BYTES
    assert all(found), "nothing is sent for nothing"


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_a_file_written_in_parts_is_that_of_whole_tensors(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("parts")
    shapes = data.draw(st.lists(st.sampled_from([(), (0,), (5,), (3, 4), (2, 0, 3), (7, 11)]), min_size=1, max_size=5))
    whole = {str(n): tensor(shape, data.draw(st.sampled_from(DTYPES)), n) for n, shape in enumerate(shapes)}
    sizes = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    later = {name: Described(each.shape, each.dtype) for name, each in whole.items() if data.draw(st.booleans())}
    tree = {"a": {**whole, **later}, "again": list(later.values()), "number": 3}
    order = data.draw(st.permutations(list(later)))
    coming = (part for name in order for part in parts_of(later[name], whole[name], sizes))
    save_file(folder / "parts", tree, parts=coming)
    save_file(folder / "whole", {"a": whole, "again": [whole[name] for name in later], "number": 3})
    assert (folder / "parts").read_bytes() == (folder / "whole").read_bytes()
    back = load_file(folder / "parts")
    assert all(torch.equal(back["a"][name], each) for name, each in whole.items())
    assert all(again is back["a"][name] or not again.numel() for again, name in zip(back["again"], later))
    others = safetensors.torch.load_file(folder / "parts")
    assert all(torch.equal(others[f"a.\\{name}"], each) for name, each in whole.items())


def test_every_tensor_begins_at_a_multiple_of_its_size(tmp_path):
    tree = {str(dtype): tensor((3,), dtype) for dtype in DTYPES}
    save_file(tmp_path / "x", tree)
    content = (tmp_path / "x").read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    assert (8 + length) % 8 == 0
    starts = [(each["data_offsets"][0], each["dtype"]) for name, each in header.items() if name != "__metadata__"]
    assert sorted(start for start, _ in starts) == [0, 24, 48, 60, 66, 69]


def test_what_is_described_stands_in_a_tree_and_is_filled():
    one, other = Described((2,), torch.float32), Described((), torch.int64)
    tree = {"x": [one, one], "y": other, "z": torch.ones(1)}
    _, found = flatten_described(tree)
    assert found == {"x.0": one, "y": other, "z": found["z"]}
    value = torch.tensor([1.0, 2.0])
    back = filled(tree, {one: value})
    assert back["x"][0] is back["x"][1]
    assert torch.equal(back["x"][0], value)
    assert back["y"] is other
    with pytest.raises(AssertionError, match="described"):
        flatten(tree)


def test_weights_may_be_tied_where_only_tensors_are_written(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    write_whole(tmp_path / "w", {"a": base, "b": base, "row": base[1], "turned": base.T}, {"format": "pt"})
    with safetensors.safe_open(tmp_path / "w", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert torch.equal(file.get_tensor("turned"), base.T)
        assert torch.equal(file.get_tensor("b"), base)


# ---- reading


def test_a_tensor_is_checked_by_the_end_of_its_last_part(tmp_path):
    save_file(tmp_path / "x", {"a": tensor((40,), torch.float64), "b": tensor((40,), torch.uint8)})
    content = bytearray((tmp_path / "x").read_bytes())
    content[-41] ^= 1  # in the last part of a
    (tmp_path / "x").write_bytes(content)
    with SavedFile(tmp_path / "x") as saved:
        seen = []
        with pytest.raises(CheckpointError, match="'a' fails its checksum"):
            for part in saved.parts():
                seen.append(part.first)
        assert seen == [0, 6, 12, 18, 24, 30]
        with pytest.raises(CheckpointError, match="'a' fails"):
            saved.check()


def test_what_becomes_shorter_while_it_is_read_is_an_error(tmp_path):
    save_file(tmp_path / "x", {"a": tensor((4000,), torch.float64)})
    with SavedFile(tmp_path / "x") as saved:
        with open(tmp_path / "x", "r+b") as file:
            file.truncate(9000)
        with pytest.raises(CheckpointError, match=r"cannot read the checkpoint .*x: it has become shorter"):
            saved.check()


def test_the_file_that_is_open_stays_when_it_is_replaced(tmp_path):
    save_file(tmp_path / "x", {"a": torch.full((50,), 1.0)})
    with SavedFile(tmp_path / "x") as saved:
        save_file(tmp_path / "x", {"a": torch.full((50,), 2.0)})
        assert all(bool((part.values == 1).all()) for part in saved.parts())


def rewritten(path, change):
    """A copy whose header was changed."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    other = path.with_name("changed")
    other.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    return other


WRONG = {
    "hole": lambda header: header["b"].update(data_offsets=[20, 32]),
    "overlap": lambda header: header["b"].update(data_offsets=[12, 24]),
    "backwards": lambda header: header["b"].update(data_offsets=[28, 16]),
    "negative": lambda header: header["b"].update(shape=[-3]),
    "too large": lambda header: header["b"].update(shape=[1 << 70]),
    "no number": lambda header: header["b"].update(shape=["3"]),
    "unknown": lambda header: header["b"].update(dtype="F13"),
    "absent": lambda header: header["b"].pop("dtype"),
    "list": lambda header: header.update(b=[]),
    "metadata": lambda header: header["__metadata__"].update(format=3),
    "missing": lambda header: header.pop("b"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_header_that_lies_is_refused(tmp_path, wrong):
    save_file(tmp_path / "x", {"a": tensor((4,), torch.float32), "b": tensor((3,), torch.float32)})
    with pytest.raises(CheckpointError, match=r"cannot read the checkpoint .*changed"):
        load_file(rewritten(tmp_path / "x", WRONG[wrong]))


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, "{", '{"x": 1e999}', '{"\ud800": 1}', "null"])
def test_a_header_that_is_none_is_refused(tmp_path, text):
    content = text.encode("utf-8", "surrogatepass")
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(content)) + content)
    with pytest.raises(CheckpointError, match="cannot read the checkpoint"):
        load_file(tmp_path / "x")


def test_a_length_that_lies_is_refused(tmp_path):
    for length in (0, 1, 1 << 63, (1 << 64) - 1):
        (tmp_path / "x").write_bytes(struct.pack("<Q", length))
        with pytest.raises(CheckpointError, match="does not begin as"):
            load_file(tmp_path / "x")


# ---- storages


@pytest.mark.parametrize("address", ["local", "memory://"])
def test_any_storage_takes_and_gives_parts(tmp_path, address):
    directory = Directory(open_storage(tmp_path if address == "local" else f"memory://{uuid.uuid4()}"))
    directory.prepare()
    values = tensor((5, 7), torch.float64)
    later, mark = Described(values.shape, values.dtype), Mark(run="r", generation=0, step=1)
    directory.save(mark, {"x": later}, keep=1, parts=parts_of(later, values, [4]))
    assert torch.equal(directory.load(mark)["x"], values)
    with directory.open(mark) as saved:
        found = torch.cat([part.values for part in saved.parts()])
    assert torch.equal(found.view(5, 7), values)
    assert math.prod(saved.tree["x"].shape) == 35


def test_nothing_stays_of_what_was_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    storage = open_storage(f"memory://{uuid.uuid4()}")
    storage.save("a", {"x": torch.ones(3)})
    storage.write_text("text", "I am no checkpoint")
    assert list(tmp_path.iterdir()) == []
    saved = storage.open("a")
    assert len(list(tmp_path.iterdir())) == 1
    saved.close()
    for name in ("text", "absent"):
        with pytest.raises(CheckpointError):
            storage.open(name)
    assert list(tmp_path.iterdir()) == []
