import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ragtag.runtime.marks import Arrivals, mark, seconds_from


def backward(model, arrivals, run=None):
    with arrivals.watched():
        (run or model)(torch.ones(3, 4)).sum().backward()
        return arrivals.marks()


def test_a_bucket_is_complete_with_its_last_gradient():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    buckets = [list(model[4].parameters()), [*model[2].parameters(), *model[0].parameters()]]
    arrivals = Arrivals(buckets)
    start = mark(torch.device("cpu"))
    for _ in range(3):
        first, second = backward(model, arrivals)
        assert start < first < second
    seconds = seconds_from(start, [first, second])
    assert seconds == [first - start, second - start]
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_shared_parameter_comes_as_often_as_it_did_before():
    layer, last = nn.Linear(4, 4), nn.Linear(4, 4)

    def run(x):
        hidden = checkpoint(layer, x.requires_grad_(), use_reentrant=True)
        return last(checkpoint(layer, hidden, use_reentrant=True))

    arrivals = Arrivals([[*last.parameters()], [*layer.parameters()]])
    for _ in range(3):
        first, second = backward(None, arrivals, run)
        assert first < second


def test_without_a_gradient_in_every_bucket_nothing_is_said():
    model, unused = nn.Linear(4, 4), nn.Linear(4, 4)
    arrivals = Arrivals([[*model.parameters()], [*unused.parameters()]])
    assert backward(model, arrivals) == []
