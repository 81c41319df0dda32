import collections
import dataclasses

import numpy
import pytest
import torch

from ragtag.runtime.batches import leaves, map_leaves, size_of, to_device

META = torch.device("meta")  # a device that every machine has and that is not the CPU
Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass(frozen=True)
class Graph:
    nodes: torch.Tensor
    name: str
    count: int = dataclasses.field(default=0, init=False)


class Movable:
    def __init__(self, where="cpu"):
        self.where = where

    def to(self, device):
        return Movable(str(device))


class Tags(list):
    pass


def nested():
    defaulting = collections.defaultdict(list, a=torch.ones(2))
    return {
        "pair": Pair(torch.ones(1), [torch.zeros(2), "text"]),
        "graph": Graph(torch.ones(3), "g"),
        "defaulting": defaulting,
        "own": Movable(),
        "size": torch.Size([2, 3]),
        "array": numpy.ones(2),
        "rest": (None, 3, 2.5, b"bytes", {1, 2}),
    }


def test_tensors_and_movable_objects_move_and_containers_keep_their_type():
    before = nested()
    moved = to_device(before, META, non_blocking=True)
    assert type(moved["pair"]) is Pair
    assert moved["pair"].x.device == META
    assert moved["pair"].y[0].device == META
    assert moved["pair"].y[1] == "text"
    assert type(moved["graph"]) is Graph
    assert (moved["graph"].nodes.device, moved["graph"].name, moved["graph"].count) == (META, "g", 0)
    assert moved["defaulting"]["a"].device == META
    assert moved["defaulting"]["new"] == []
    assert moved["own"].where == "meta"
    assert type(moved["size"]) is torch.Size
    assert moved["array"] is before["array"]
    assert moved["rest"] == (None, 3, 2.5, b"bytes", {1, 2})


def test_moving_leaves_the_original_alone():
    before = nested()
    to_device(before, META)
    assert all(leaf.device.type == "cpu" for leaf in leaves(before) if isinstance(leaf, torch.Tensor))
    assert before["own"].where == "cpu"
    assert list(before["defaulting"]) == ["a"]


def test_a_packed_sequence_moves_whole():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    moved = to_device([packed], torch.device("cpu"))[0]
    assert isinstance(moved, torch.nn.utils.rnn.PackedSequence)
    assert torch.equal(moved.data, packed.data)


def test_leaves_come_in_order():
    batch = {"a": (1, [torch.tensor(2)]), "b": Graph(torch.tensor(3), "four")}
    assert [int(x) if isinstance(x, torch.Tensor) else x for x in leaves(batch)] == [1, 2, 3, "four", 0]
    assert list(leaves(7)) == [7]


def test_map_leaves_visits_exactly_the_leaves():
    assert map_leaves({"a": [1, (2, 3)], "b": "cd"}, lambda leaf: leaf * 2) == {"a": [2, (4, 6)], "b": "cdcd"}


@pytest.mark.parametrize(
    ("sample", "size"),
    [
        (torch.ones(3, 4), 12),
        (torch.tensor([5, -100, 7, -100]), 2),
        (torch.tensor([5.0, -100.0]), 2),
        (numpy.array([[1, -100], [2, 3]]), 3),
        ({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, 5),
        (("text", None, True, 2.5), 6),
        (Graph(torch.ones(2), "ab"), 5),
        (torch.tensor([True, False]), 2),
    ],
)
def test_size_counts_what_a_loss_would_count(sample, size):
    assert size_of(sample) == size
