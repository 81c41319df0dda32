"""Buckets of which each rank gets its own slice of the sum: whole replicas whose optimizer state is cut.

The one idea: own sums stay whole until the step is applied, as with whole replicas, so work is pulled, redone and stood
in for as there; only what the ring brings back, and what the optimizer is given, is this rank's slice.
"""

from collections.abc import Callable, Sequence

import torch

from ragtag.comm.group import Group
from ragtag.comm.ring import Wire
from ragtag.comm.work import Work
from ragtag.runtime.gradients import Bucket, GradientSums
from ragtag.runtime.zero.flats import Flat


class SlicedBuckets(GradientSums):
    """`GradientSums` with one bucket for each flat of trained parameters, cut alike."""

    def __init__(self, flats: Sequence[Flat], group: Group, *, wire: Wire = "fp32", overlap: bool = True) -> None:
        self._flats = [flat for flat in flats if flat.trained]
        members = [member for flat in self._flats for member in flat.members]
        # In the model's order, which is that of the bits of `has_gradient`.
        members.sort(key=lambda member: member.number)
        self._place = {member.number: place for place, member in enumerate(members)}
        super().__init__(
            [(member.name, member.parameter) for member in members],
            group,
            bucket_bytes=1 << 40,
            wire=wire,
            overlap=overlap,
        )

    def _make_buckets(self) -> None:
        travels = self._group.elastic or self._group.world_size > 1
        self.buckets = []
        self._flat_of: dict[int, Flat] = {}
        for flat in self._flats:
            half = flat.dtype in (torch.float16, torch.bfloat16)
            members = [(self._place[member.number], member.parameter) for member in flat.members]
            bucket = Bucket(members, torch.float32 if half else flat.dtype, travels=travels)
            self._flat_of[id(bucket)] = flat
            self.buckets.append(bucket)
        self._bucket_of = {slot.index: bucket for bucket in self.buckets for slot in bucket.slots}

    def _start(self, bucket: Bucket, flat: torch.Tensor, ready: Callable[[], None] | None) -> Work:
        sizes = self._flat_of[id(bucket)].sizes
        return self._group.reduce_scatter(flat, sizes, wire=self._wire_of(bucket), ready=ready)

    def _held(self, bucket: Bucket) -> torch.Tensor:
        flat = self._flat_of[id(bucket)]
        return bucket.flat[flat.start : flat.stop]

    def install(self, factor: float, has_gradient: bytes) -> None:
        """Give every piece of a parameter used anywhere `factor` x the sum as its `grad`; None to the others."""
        bits = int.from_bytes(has_gradient, "little")
        for bucket in self.buckets:
            flat = self._flat_of[id(bucket)]
            self._held(bucket).mul_(factor)
            for slot in bucket.slots:
                self._own[slot.index] = None
                slot.parameter.grad = None
            for piece in flat.pieces:
                if not bits >> self._place[piece.member.number] & 1:
                    piece.parameter.grad = None
                    continue
                first = piece.member.start + piece.first
                piece.parameter.grad = bucket.flat[first : first + piece.last - piece.first].to(piece.parameter.dtype)
