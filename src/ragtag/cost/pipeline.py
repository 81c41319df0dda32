"""Prices an uneven pipeline: unequal stages of the model on devices one after another, micro-batches flowing through.

The one idea: in steady state every stage waits for the slowest, so a step of m micro-batches on s stages lasts about
(m + s - 1) times the slowest stage (Narayanan et al., "PipeDream", 2019; 1F1B keeps at most s - i micro-batches).
"""

from collections.abc import Sequence

import msgspec

from ragtag.core.profile import AFTER_BLOCKS, BEFORE_BLOCKS, Block, DeviceProfile
from ragtag.cost.candidate import Candidate
from ragtag.cost.comm import send_s
from ragtag.cost.device import curve
from ragtag.cost.problem import Problem


class PipelineStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step; tuples are by stage."""

    step_s: float
    comm_s: float
    """What sending adds to the slowest stage, over the step."""
    compute_s: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    held_parts: tuple[float, ...]
    """Of the model's parameters."""


def folded(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Return the blocks between which a model can be cut: what runs before and after them goes with its neighbour."""
    found = list(blocks)
    if len(found) > 1 and found[0].name == BEFORE_BLOCKS:
        found[:2] = [_joined(found[0], found[1], found[1])]
    if len(found) > 1 and found[-1].name == AFTER_BLOCKS:
        found[-2:] = [_joined(found[-2], found[-1], found[-2])]
    return tuple(found)


def _joined(first: Block, second: Block, block: Block) -> Block:
    return Block(
        name=block.name,
        forward_s=first.forward_s + second.forward_s,
        backward_s=first.backward_s + second.backward_s,
        parameter_bytes=first.parameter_bytes + second.parameter_bytes,
        activation_bytes=first.activation_bytes + second.activation_bytes,
        output_bytes=second.output_bytes,
        spread=block.spread,
    )


def stage_s(problem: Problem, device: DeviceProfile, blocks: tuple[Block, ...], micro_batch: int) -> float:
    """Return the seconds of forward and backward of one micro-batch through `blocks`.

    Blocks share out what the whole model takes on the device, in proportion to their own times.
    """
    whole = sum(block.forward_s + block.backward_s for block in problem.blocks)
    part = sum(block.forward_s + block.backward_s for block in blocks) / whole
    return part * curve(device).at(micro_batch)


def state_bytes(problem: Problem, blocks: tuple[Block, ...]) -> int:
    """Return parameters, gradients and optimizer state of `blocks`."""
    model = problem.model
    factor = 1 + (model.gradient_bytes + model.optimizer_bytes) / max(model.parameter_bytes, 1)
    return round(factor * sum(block.parameter_bytes for block in blocks))


def pipeline_step(problem: Problem, candidate: Candidate) -> PipelineStep:
    """Return the step of a candidate whose parts are the stages in order."""
    parts = candidate.parts
    micro_batch = parts[0].micro_batch
    num_micro_batches = -(-parts[0].samples // micro_batch)
    compute_s, send, memory, held = [], [], [], []
    whole_bytes = max(1, sum(block.parameter_bytes for block in problem.blocks))
    for index, part in enumerate(parts):
        rank = problem.by_name[part.device]
        assert part.blocks is not None, f"stage {index} has no blocks"
        blocks = problem.blocks[slice(*part.blocks)]
        held.append(sum(block.parameter_bytes for block in blocks) / whole_bytes)
        compute_s.append(stage_s(problem, rank.device, blocks, micro_batch))
        in_flight = min(len(parts) - index, num_micro_batches)
        kept = sum(block.activation_bytes for block in blocks) * micro_batch
        memory.append(state_bytes(problem, blocks) + in_flight * kept)
        if index + 1 < len(parts):
            following = problem.by_name[parts[index + 1].device]
            output = blocks[-1].output_bytes * micro_batch
            # Activations go one way, their gradients the other: two messages a micro-batch, in separate directions.
            send.append(send_s(output, rank.host, following.host, problem.link))
    slowest_s = max(compute_s)
    # Sends overlap with computing; a link slower than every stage sets the beat instead.
    beat_s = max([slowest_s, *send])
    fill_s = sum(compute_s) + 2 * sum(send)
    step_s = fill_s + (num_micro_batches - 1) * beat_s
    alone_s = sum(compute_s) + (num_micro_batches - 1) * slowest_s
    return PipelineStep(
        step_s=step_s,
        comm_s=step_s - alone_s,
        compute_s=tuple(num_micro_batches * seconds for seconds in compute_s),
        memory_bytes=tuple(memory),
        held_parts=tuple(held),
    )
