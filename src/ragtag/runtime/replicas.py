"""Do all replicas still hold the same parameters? One 64-bit hash each, compared now and then; the first difference is
named.

Devices of one kind must agree to the last bit. Devices of different kinds round differently inside the optimizer:
there the parameters are sent again from rank 0, and how far they had drifted is reported.
"""

import logging
from collections.abc import Sequence

import torch

from ragtag.comm.group import Group
from ragtag.core.errors import DisagreementError

log = logging.getLogger("ragtag")
NamedTensors = Sequence[tuple[str, torch.Tensor]]


@torch.no_grad()
def hashes(tensors: NamedTensors) -> list[int]:
    """One 64-bit hash a tensor, of its exact values (xor of element bits, see `torch.hash_tensor`).

    An even number of equal elements has an xor of zero whatever they are; without one of them it has not.
    """
    found = [0] * len(tensors)
    filled = [(place, _hashable(tensor).reshape(-1)) for place, (_, tensor) in enumerate(tensors) if tensor.numel()]
    if filled:
        parts = [part for _, flat in filled for part in (flat, flat[: max(1, flat.numel() - 1)])]
        numbers = torch.stack([torch.hash_tensor(part).view(torch.int64) for part in parts]).tolist()
        for (place, _), whole, rest in zip(filled, numbers[::2], numbers[1::2]):
            found[place] = (3 * whole + rest) % 2**63
    return found


def _hashable(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor


def check_replicas(tensors: NamedTensors, group: Group, kinds: Sequence[str], step: int) -> None:
    """Compare all replicas.

    Raises:
        DisagreementError: replicas on devices of one kind differ; names the first tensor and the ranks.
    """
    if group.world_size == 1:
        return
    own = hashes(tensors)
    combined = 0
    for position, value in enumerate(own):
        combined = (combined * 0x9E3779B97F4A7C15 + value + position) % 2**64
    everybody = group.exchange(combined.to_bytes(8, "little"))
    if len(set(everybody)) == 1:
        return
    if len(set(kinds)) > 1:
        _send_again(tensors, group, step)
        return
    rows = group.gather(f"replica hashes of step {step}", own)
    for position, (name, _) in enumerate(tensors):
        column = [row[position] for row in rows]
        if len(set(column)) > 1:
            odd = [rank for rank, value in enumerate(column) if value != column[0]]
            error = DisagreementError(
                f"replicas differ after step {step}: '{name}' on rank(s) {', '.join(map(str, odd))} is not what rank 0 "
                f"has. Something changed parameters on one rank only; change them alike on all ranks or not at all."
            )
            error.origin_rank = 0
            raise error


@torch.no_grad()
def _send_again(tensors: NamedTensors, group: Group, step: int) -> None:
    before = [tensor.detach().clone() for _, tensor in tensors]
    sent = [tensor.detach().clone() for _, tensor in tensors]
    group.broadcast(sent, source=0)  # not into the parameters: it may break off half-way
    for (_, tensor), value in zip(tensors, sent):
        tensor.detach().copy_(value)
    drift = max(
        (
            float((now.detach().double() - old.double()).abs().max())
            for (_, now), old in zip(tensors, before)
            if now.numel() and now.is_floating_point()
        ),
        default=0.0,
    )
    drifts = group.gather(f"replica drift of step {step}", drift)
    if group.rank == 0:
        log.info("step %d: devices of different kinds had drifted by at most %.1e; sent again", step, max(drifts))
