"""A clock that only work and sleep move, and layers that take a known time of it."""

import torch
from torch import nn


class FakeTime:
    """`oversleep_s` is added to every sleep; `wall_factor` is how much slower than its CPU time work is."""

    def __init__(self, oversleep_s=0.0, wall_factor=1.0):
        self.now_s = 100.0
        self.cpu_s = 5.0
        self.oversleep_s = oversleep_s
        self.wall_factor = wall_factor
        self.sleeps = []

    def __deepcopy__(self, memo):
        return self

    def clock(self):
        return self.now_s

    def cpu_clock(self):
        return self.cpu_s

    def sleep(self, duration_s):
        assert duration_s > 0
        self.sleeps.append(duration_s)
        self.now_s += duration_s + self.oversleep_s

    def work(self, duration_s):
        self.cpu_s += duration_s
        self.now_s += duration_s * self.wall_factor

    def wait(self, duration_s):
        """Somebody else's doing: wall time only."""
        self.now_s += duration_s


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, time, forward_s, backward_s):
        ctx.time, ctx.backward_s = time, backward_s
        time.work(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, *grad_outputs):
        ctx.time.work(ctx.backward_s)
        return *grad_outputs, None, None, None


class Layer(nn.Module):
    """Scales by one parameter; forward costs `forward_s`, backward `backward_s` before the gradient is there."""

    def __init__(self, time, forward_s=0.001, backward_s=0.002):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self._time = time
        self._costs = forward_s, backward_s

    def forward(self, x):
        return _Work.apply(x * self.scale, self._time, *self._costs)
