import collections
import json
import math

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.checkpoint.tree import flatten, unflatten
from ragtag.core.errors import CheckpointError

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
tensors = st.builds(
    lambda dtype, shape: torch.arange(math.prod(shape)).reshape(shape).to(dtype),
    st.sampled_from(
        [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
    ),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
keys = st.integers() | st.text(max_size=5) | st.sampled_from(["a.b", "a\\.b", "0", 0, "__metadata__", ""])
trees = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=2).map(collections.OrderedDict)
    ),
    max_leaves=12,
)


def same(a, b):
    """Equal in type and to the bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        bits_equal = a.numel() == 0 or torch.equal(
            a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
        )
        return a.dtype == b.dtype and a.shape == b.shape and bits_equal
    if isinstance(a, dict):
        return list(a) == list(b) and [*map(type, a)] == [*map(type, b)] and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return repr(a) == repr(b)
    return a == b


@settings(deadline=None)
@given(trees)
def test_any_tree_comes_back_the_same(tree):
    skeleton, flat = flatten(tree)
    assert all(isinstance(json.loads(text), object) for text in [skeleton])
    assert same(unflatten(skeleton, flat), tree)


def test_names_are_paths_with_dots_escaped():
    tree = {"model": {"fc.weight": torch.ones(1)}, "optimizer": [{0: torch.ones(2), "0": torch.ones(3)}]}
    _, flat = flatten(tree)
    assert list(flat) == ["model.fc\\.weight", "optimizer.0.0", "optimizer.0.\\0"]
    assert list(flatten(torch.ones(1))[1]) == ["tensor"]


def test_tied_tensors_are_stored_once_and_tied_again():
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    tree = {"embedding": weight, "head": weight.detach(), "transposed": weight.detach().T, "first": weight.detach()[0]}
    skeleton, flat = flatten(tree)
    assert list(flat) == ["embedding", "transposed", "first"]
    back = unflatten(skeleton, flat)
    assert back["embedding"] is back["head"]
    assert not back["embedding"].requires_grad
    assert torch.equal(back["transposed"], weight.T)


def test_negated_and_conjugate_views_are_not_taken_for_their_base():
    base = torch.tensor([1 + 2j, 3 - 4j])
    _, flat = flatten([base, base.conj(), base.conj().imag, base.imag])
    assert len(flat) == 4


def test_numpy_scalars_and_counters_keep_their_type():
    tree = {
        "lr": numpy.float64(0.1),
        "half": numpy.float16(1.5),
        "nan": numpy.float32("nan"),
        "step": numpy.int64(7),
        "flag": numpy.bool_(True),
        "milestones": collections.Counter({30: 1, 60: 2}),
    }
    back = unflatten(*flatten(tree))
    assert {key: type(value) for key, value in back.items()} == {key: type(value) for key, value in tree.items()}
    assert math.isnan(back.pop("nan"))
    tree.pop("nan")
    assert back == tree


@pytest.mark.parametrize(
    ("leaf", "named"),
    [
        (object(), "builtins.object"),
        ({1, 2}, "builtins.set"),
        (1 + 2j, "builtins.complex"),
        (torch.Size([1]), "torch.Size"),
        (torch.float32, "torch.dtype"),
        (numpy.ones(2), "numpy.ndarray"),
        (torch.ones(2, device="meta"), "device meta"),
        (torch.ones(2).to_sparse(), "torch.sparse_coo"),
        ({(1, 2): 3}, "key (1, 2) of type tuple"),
        ({True: 3}, "key True of type bool"),
    ],
)
def test_what_cannot_be_saved_is_named_with_its_path(leaf, named):
    with pytest.raises(CheckpointError) as caught:
        flatten({"state": [0, {"ema.x": leaf}]})
    assert "state.1.ema\\.x" in str(caught.value)
    assert named in str(caught.value)


def test_a_tree_that_contains_itself_is_refused():
    tree = {}
    tree["self"] = tree
    with pytest.raises(CheckpointError, match="contains itself"):
        flatten(tree)


@pytest.mark.parametrize(
    "skeleton",
    [
        "{",
        "[1]",
        "{}",
        '{"list":[],"tuple":[]}',
        '{"pickle":"gASV"}',
        '{"list":3}',
        '{"dict":[[[1],2]]}',
        '{"dict":[1]}',
        '{"int":"zz"}',
        '{"int":5}',
        '{"float":"x"}',
        '{"bytes":"*"}',
        '{"numpy":["object",1]}',
        '{"numpy":["nonsense",1]}',
        '{"tensor":"missing"}',
        '{"tensor":[1]}',
        "9" * 5000,
        '{"list":[' * 3000 + "]}" * 3000,
    ],
)
def test_a_damaged_skeleton_is_an_error(skeleton):
    with pytest.raises(CheckpointError):
        unflatten(skeleton, {})
