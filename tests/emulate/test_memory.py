import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ragtag.emulate.memory import MemoryCap, NoMemoryLimit

WIDTH = 64
LAYER_BYTES = 4 * WIDTH * WIDTH


def make_model(num_layers=4):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(num_layers)]
    return nn.Sequential(*layers)


def batch(samples):
    return torch.ones(samples, WIDTH)


def peak(model, x, optimizer=None, forward=None):
    cap = MemoryCap(10**9, device="box")
    cap.attach(model, optimizer)
    with cap.forward_backward():
        (forward or model)(x).sum().backward()
    cap.detach()
    return cap.peak_bytes


def test_parameters_activations_and_gradients_are_counted_once_each():
    model = make_model()
    cap = MemoryCap(10**9, device="box")
    cap.attach(model)
    x = batch(8)
    with cap.forward_backward():
        loss = model(x).sum()
        # Each tanh keeps its result, which the next linear keeps as well; the first linear keeps the batch.
        assert cap.used_bytes == 4 * LAYER_BYTES + 5 * x.nbytes
        loss.backward()
        assert cap.used_bytes == 8 * LAYER_BYTES
    with cap.forward_backward():
        assert cap.used_bytes == 8 * LAYER_BYTES


def test_optimizer_state_is_counted_from_the_next_micro_batch_on():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    before = peak(model, batch(1), optimizer)
    optimizer.step()
    after = peak(model, batch(1), optimizer)
    steps = sum(state["step"].nbytes for state in optimizer.state.values())
    # Both moments; and gradients now exist before the forward, while the first time activations were gone by then.
    assert after - before >= 2 * 4 * LAYER_BYTES + steps


def test_what_does_not_fit_in_forward_is_refused_there():
    model, x = make_model(), batch(128)
    cap = MemoryCap(4 * LAYER_BYTES + 4 * x.nbytes, device="laptop")
    cap.attach(model)
    with (
        pytest.raises(torch.OutOfMemoryError, match=r"'laptop' is out of memory: 32.8 kB wanted.*forward.* of 197 kB"),
        cap.forward_backward(),
    ):
        model(x)
    gc.collect()
    assert cap.used_bytes == 4 * LAYER_BYTES  # what the forward had kept is gone with it
    with cap.forward_backward():
        model(batch(2)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_does_not_fit_in_backward_is_refused_there():
    model, x = make_model(), batch(1)
    cap = MemoryCap(5 * LAYER_BYTES + 6 * x.nbytes, device="laptop")
    cap.attach(model)
    with cap.forward_backward():
        loss = model(x).sum()
        with pytest.raises(torch.OutOfMemoryError, match="gradient in backward"):
            loss.backward()


def test_what_does_not_fit_at_all_is_refused_at_the_start():
    model = make_model()
    cap = MemoryCap(4 * LAYER_BYTES - 1, device="laptop")
    cap.attach(model)
    with pytest.raises(torch.OutOfMemoryError, match="at the start"), cap.forward_backward():
        raise AssertionError("not reached")


def test_recomputation_keeps_less():
    model, x = make_model(num_layers=6), batch(256).requires_grad_(True)

    def recomputing(x):
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    def widened(forward):
        model.zero_grad()
        return peak(model, x, forward=forward)

    assert widened(recomputing) < widened(model)


def test_capped_gradients_are_bit_equal():
    model, x = make_model(), batch(4)
    model(x).square().sum().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    cap = MemoryCap(10**9, device="box")
    cap.attach(model)
    with cap.forward_backward():
        model(x).square().sum().backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(plain, model.parameters()))


def test_no_hook_is_left_after_detach():
    model = make_model()
    cap = MemoryCap(10**9, device="box")
    cap.attach(model)
    cap.detach()
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_a_graph_that_is_dropped_gives_its_memory_back():
    model = make_model()
    cap = MemoryCap(10**9, device="box")
    cap.attach(model)
    for _ in range(3):
        with cap.forward_backward():
            loss = model(batch(16)).sum()
        del loss
        assert cap.used_bytes == 4 * LAYER_BYTES


def test_no_memory_limit_does_nothing():
    limit, model = NoMemoryLimit(), make_model()
    limit.attach(model)
    with limit.forward_backward():
        model(batch(1)).sum().backward()
    limit.detach()
    assert not any(parameter._backward_hooks for parameter in model.parameters())
