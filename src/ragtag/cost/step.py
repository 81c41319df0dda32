"""Predicts one step of a candidate: seconds, communication that nothing hides, waiting and memory of each device.

The one idea: ranks start together after a vote, so a step lasts as long as the device whose own work ends last, and
what of the reduction its backward does not hide. Each layout is a few lines about what moves when.
"""

from collections.abc import Sequence
from math import ceil, exp, sqrt
from statistics import NormalDist

import msgspec

from ragtag.core.cluster import Cluster
from ragtag.core.profile import DeviceProfile, Profile
from ragtag.cost.candidate import Candidate, DevicePrediction, Part, Prediction
from ragtag.cost.comm import vote_s, zero_s
from ragtag.cost.device import backward_s, constant_s, curve, even_s, memory_bytes, time_s
from ragtag.cost.outer import INT4_PART, exchange_s, exposed_s, progress
from ragtag.cost.pipeline import folded, pipeline_step
from ragtag.cost.problem import Problem, Rank, assemble
from ragtag.cost.reduction import Line, bucket_rings_s, lines

_PULLED_OVERHEAD = 1.03
"""What pulling loses beside noise itself: four real ranks at 30 % noise ran at 0.93 of their speed without noise."""


def predict(profile: Profile, cluster: Cluster | None, candidate: Candidate) -> Prediction:
    """Return what `candidate` does on `cluster` with the measurements of `profile`."""
    return predict_on(assemble(profile, cluster), candidate)


def predict_on(problem: Problem, candidate: Candidate) -> Prediction:
    """Return what `candidate` does, for a problem that was assembled before."""
    ranks = [problem.by_name[part.device] for part in candidate.parts]
    if candidate.layout == "pipeline":
        if (blocks := folded(problem.blocks)) != problem.blocks:
            problem = msgspec.structs.replace(problem, blocks=blocks)
        priced = pipeline_step(problem, candidate)
        constants_s = [
            rank.device.fixed_s + rank.device.optimizer_s * held for rank, held in zip(ranks, priced.held_parts)
        ]
        work_s, memory, comm_s = list(priced.compute_s), list(priced.memory_bytes), priced.comm_s
        step_s = priced.step_s + max(constants_s)
        wait_of = [step_s - comm_s - constant - work for constant, work in zip(constants_s, work_s)]
    else:
        constants_s = [
            _constant_s(rank.device, part, sharded_bytes(problem, candidate.layout))
            for rank, part in zip(ranks, candidate.parts)
        ]
        pieces = num_micro_batches(candidate) if candidate.layout.startswith("zero") and candidate.unit == 1 else 0
        work_s = [_compute_s(rank.device, part, candidate.unit, pieces) for rank, part in zip(ranks, candidate.parts)]
        ends_s = [
            constant + part.samples * rank.device.data_s + work
            for constant, work, part, rank in zip(constants_s, work_s, candidate.parts, ranks)
        ]
        slowest_s = max(ends_s)
        wait_of = [slowest_s - end for end in ends_s]
        comm_s = _exposed_s(problem, candidate, ranks, ends_s)
        step_s = slowest_s + comm_s
        memory = [part_memory_bytes(problem, candidate, rank, part) for rank, part in zip(ranks, candidate.parts)]
    noise_s = max(work_s) * (noise([rank.device.jitter for rank in ranks]) - 1)
    step_s += noise_s
    rate = problem.global_batch_size / step_s
    price = sum(rank.price_per_hour for rank in ranks)
    return Prediction(
        step_s=step_s,
        samples_per_s=rate,
        eta=rate / problem.summed_solo_samples_per_s,
        comm_s=comm_s,
        noise_s=noise_s,
        sample_efficiency=_sample_efficiency(problem, candidate),
        devices=tuple(
            DevicePrediction(
                device=rank.name,
                samples=part.samples,
                compute_s=work,
                constant_s=constant,
                wait_s=wait + noise_s,
                memory_bytes=kept,
                capacity_bytes=rank.device.capacity_bytes,
            )
            for rank, part, work, constant, wait, kept in zip(
                ranks, candidate.parts, work_s, constants_s, wait_of, memory
            )
        ),
        usd_per_million_samples=price / 3600 / rate * 1e6 if price else None,
    )


def noise(jitters: Sequence[float]) -> float:
    """Return by what factor the slowest of several devices is slower than the median one, on average.

    The expected largest of n normal numbers is close to the quantile (n - 0.375) / (n + 0.25) (Blom, 1958). Where it
    is cheaper, ranks that had luck pull work from the others.
    """
    spread = sqrt(sum(jitter * jitter for jitter in jitters) / len(jitters))
    if spread == 0:
        return 1.0
    largest = NormalDist().inv_cdf((len(jitters) - 0.375) / (len(jitters) + 0.25))
    mean = exp(spread * spread / 2)
    return max(mean, min(exp(spread * largest), mean * _PULLED_OVERHEAD))


def sharded_bytes(problem: Problem, layout: str) -> int:
    """Return the bytes of model state that `layout` cuts into slices; 0: every device holds all."""
    model = problem.model
    return {
        "zero-1": model.optimizer_bytes,
        "zero-2": model.optimizer_bytes + model.gradient_bytes,
        "zero-3": model.optimizer_bytes + model.gradient_bytes + model.parameter_bytes,
    }.get(layout, 0)


def passing_bytes(problem: Problem, layout: str) -> int:
    """Return the bytes of what comes and goes on every device while a layout that cuts state computes.

    Gradients of one block and of two on their way; where parameters are cut, a block in use and the next one as well,
    and what is in no block, with its gradients, for a whole micro-batch. Without measured blocks, the model is one.
    """
    whole = problem.model.parameter_bytes
    inside = [block.parameter_bytes for block in problem.blocks]
    largest = max(inside, default=whole)
    rest = max(whole - sum(inside), 0) if inside else 0
    return {"zero-2": 3 * largest + rest, "zero-3": 5 * largest + 2 * rest}.get(layout, 0)


def part_memory_bytes(problem: Problem, candidate: Candidate, rank: Rank, part: Part) -> int | None:
    """Return the bytes that `rank` needs for its part, in any layout but a pipeline; None: not measured."""
    device = rank.device
    micro_batch = min(part.micro_batch, part.samples) if candidate.unit == 1 else min(candidate.unit, part.samples)
    if part.state_bytes is None or device.memory is None:
        return memory_bytes(device, micro_batch, part.recompute)
    resident = max(device.memory.fixed_bytes - sharded_bytes(problem, candidate.layout), 0)
    resident += passing_bytes(problem, candidate.layout)
    return memory_bytes(device, micro_batch, part.recompute, fixed_bytes=resident + part.state_bytes)


def num_micro_batches(candidate: Candidate) -> int:
    """Return the most micro-batches that any rank computes; sharded layouts gather in each, so all ranks take part."""
    unit = candidate.unit
    return max(ceil(part.samples / (unit if unit > 1 else part.micro_batch)) for part in candidate.parts)


def _compute_s(device: DeviceProfile, part: Part, unit: int, pieces: int) -> float:
    if pieces:
        return even_s(curve(device, recompute=part.recompute), part.samples, pieces)
    return time_s(device, part.samples, unit if unit > 1 else part.micro_batch, part.recompute)


def _constant_s(device: DeviceProfile, part: Part, sharded: int) -> float:
    if part.state_bytes is None or not sharded:
        return constant_s(device)
    return device.fixed_s + device.optimizer_s * part.state_bytes / sharded


def last_micro_batch(part: Part, unit: int) -> int:
    """Return the samples of the micro-batch that a rank computes last: behind it, reduction can hide."""
    size = unit if unit > 1 else part.micro_batch
    return (part.samples - 1) % size + 1 if part.samples else 0


def _exposed_s(problem: Problem, candidate: Candidate, ranks: Sequence[Rank], ends_s: Sequence[float]) -> float:
    """Communication after the last rank's own work."""
    slowest_s = max(ends_s)
    if candidate.layout in ("zero-2", "zero-3"):
        hosts = [rank.host for rank in ranks]
        model = problem.model
        return zero_s(
            int(candidate.layout[-1]),
            model.parameter_bytes,
            model.gradient_bytes,
            hosts,
            problem.link,
            micro_batches=num_micro_batches(candidate),
        ) + vote_s(hosts, problem.link)
    latest_s = slowest_s
    for island in sorted({part.island for part in candidate.parts}):
        hosts = [rank.host for rank, part in zip(ranks, candidate.parts) if part.island == island]
        if len(hosts) < 2:
            continue
        rings_s = bucket_rings_s(problem, hosts)
        after_s = vote_s(hosts, problem.link)
        if candidate.layout == "zero-1":
            # Half of an all-reduce behind the backward, the other half once the optimizer has new parameters.
            rings_s = tuple(ring_s / 2 for ring_s in rings_s)
            after_s += sum(rings_s)
        known: dict[tuple[float, ...], tuple[Line, ...]] = {}
        for rank, part, end_s in zip(ranks, candidate.parts, ends_s):
            if part.island == island:
                device = rank.device
                if device.bucket_ready not in known:
                    known[device.bucket_ready] = lines(problem, device, rings_s)
                last_s = backward_s(device, last_micro_batch(part, candidate.unit), part.recompute)
                reduced_s = max([line.after_s(last_s) for line in known[device.bucket_ready]])
                latest_s = max(latest_s, end_s + reduced_s + after_s)
    return latest_s - slowest_s + _outer_s(problem, candidate, ranks, latest_s)


def _outer_s(problem: Problem, candidate: Candidate, ranks: Sequence[Rank], inner_s: float) -> float:
    """What a streamed outer exchange adds to each inner step."""
    if candidate.layout != "islands":
        return 0.0
    num_bytes = problem.model.parameter_bytes * INT4_PART
    exchange = exchange_s(num_bytes, island_hosts(candidate, ranks), problem.link)
    return exposed_s(exchange, candidate.inner_steps, inner_s)


def island_hosts(candidate: Candidate, ranks: Sequence[Rank]) -> list[str]:
    """Return the host of the first rank of each island."""
    hosts: dict[int, str] = {}
    for rank, part in zip(ranks, candidate.parts):
        hosts.setdefault(part.island, rank.host)
    return list(hosts.values())


def _sample_efficiency(problem: Problem, candidate: Candidate) -> float:
    if candidate.layout != "islands":
        return 1.0
    return progress(
        problem.model.parameter_bytes / 4,
        len({part.island for part in candidate.parts}),
        candidate.inner_steps,
        problem.loss_fall,
        asynchronous=candidate.asynchronous,
    )
