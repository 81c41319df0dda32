"""From a user's arguments to a `Run`: check everything, agree with the other ranks, try the loss, make the first plan.

Every rank goes through the same steps in the same order, so an error is the same everywhere and nobody is left waiting.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch.utils.data import default_collate

from ragtag.comm.device_sum import nccl_sum, require_nccl
from ragtag.comm.elastic import ElasticGroup
from ragtag.comm.group import Group, raise_failure
from ragtag.control.controller import Controller
from ragtag.control.layout import Chosen
from ragtag.control.proposal import Limits
from ragtag.control.sharing import Start, choose_unit, initial_plan
from ragtag.core.config import Config
from ragtag.core.errors import DataError, DisagreementError, SettingError
from ragtag.core.sampler import Sampler
from ragtag.emulate.environment import Emulator
from ragtag.emulate.memory import MemoryLimit, NoMemoryLimit
from ragtag.emulate.pace import NoPace, Pace
from ragtag.runtime import checks
from ragtag.runtime import state as run_state
from ragtag.runtime.agree import compare, fingerprint
from ragtag.runtime.buffers import UnitBuffers
from ragtag.runtime.device import Stopwatch, choose_device, device_kind, make_current, move_to
from ragtag.runtime.find_nature import find_nature
from ragtag.runtime.loader import UnitLoader, check_dataset, loader_settings
from ragtag.runtime.loader_worker import read_samples
from ragtag.runtime.pipe.choosing import choose_stages, quicker_than_slices
from ragtag.runtime.pipe.pipe import Pipe
from ragtag.runtime.pipe.staging import Staging
from ragtag.runtime.precision import LossScale, check_precision, supported_precision
from ragtag.runtime.randomness import preserved_random_state
from ragtag.runtime.recomputation import Recomputation
from ragtag.runtime.run import Run
from ragtag.runtime.trial import CANDIDATES, Nature, choose_samples
from ragtag.runtime.zero.choosing import capacity_bytes, choose_layout
from ragtag.runtime.zero.elementwise import check_elementwise
from ragtag.runtime.zero.sharding import Sharding
from ragtag.runtime.zero.trying import agree_on_schedule, take_schedule

log = logging.getLogger("ragtag")


def prepare(
    group: Group,
    *,
    model: torch.nn.Module,
    optimizer: Any,
    loss_fn: Any,
    dataset: Any,
    global_batch_size: int,
    shares: Sequence[int] | None,
    start: Start,
    seed: int,
    shuffle: bool,
    precision: str,
    clip_norm: float | None,
    scheduler: Any,
    loader: Mapping[str, Any],
    state: Mapping[str, Any],
    config: Config,
    emulator: Emulator | None,
    profiled: bool = False,
    recomputes: bool = False,
) -> Run:
    """Check every argument, agree with the other ranks, find out the model's nature, and make the first plan."""
    checks.check_settings(
        loss_fn=loss_fn,
        global_batch_size=global_batch_size,
        seed=seed,
        shuffle=shuffle,
        clip_norm=clip_norm,
        state=state,
    )
    check_precision(precision)
    checks.check_model(model)
    check_dataset(dataset)
    size = len(dataset)
    settings = loader_settings(loader)
    device = _device_of(model)
    make_current(device)
    for item in state.values():
        if isinstance(item, torch.nn.Module):
            item.to(device)
    optimizer = checks.make_optimizer(optimizer, model)
    checks.check_wire(config.wire, model.parameters())
    scheduler = checks.make_scheduler(scheduler, optimizer)
    sampler = Sampler(dataset_size=size, global_batch_size=global_batch_size, seed=seed, shuffle=shuffle)
    make_loader = partial(
        UnitLoader,
        **vars(settings),
        device=device,
        seed=seed,
        seed_samples=config.seed_samples,
        patience_s=config.patience_s,
        check=lambda: raise_failure(group),
    )
    own_fingerprint = fingerprint(
        model,
        optimizer,
        lambda index: _sample(dataset, 0, index, seed, config),
        size,
        {
            "global_batch_size": global_batch_size,
            "shares": None if shares is None else list(shares),
            # Where ranks come and go, what a plan begins with is one machine's: see `_start_of_all`.
            "start": None if group.elastic else msgspec.to_builtins(start),
            "seed": seed,
            "shuffle": shuffle,
            "precision": precision,
            "clip_norm": clip_norm,
            "scheduler": type(scheduler).__name__,
            "state": sorted(state),
            **_settings(config),
        },
    )
    newcomer = isinstance(group, ElasticGroup) and group.is_newcomer
    fingerprints = group.gather("fingerprint", own_fingerprint)
    if newcomer:
        _compare_newcomer(fingerprints, group)
    else:
        compare(fingerprints, group.hosts)
        _take_rank_0_values(model, optimizer, scheduler, state, group)
    if config.reduce == "nccl":
        require_nccl(device, group.rank, group.hosts[group.rank])
        group.device_sum = nccl_sum
    own_precision, precision_reason = supported_precision(precision, device)
    if precision_reason:
        log.warning("rank %d: %s", group.rank, precision_reason)
    collate = settings.collate_fn or default_collate
    memory: MemoryLimit = emulator.memory if emulator else NoMemoryLimit()
    told: Any = group.gather("layout", None)[0] if newcomer else {}
    if newcomer:
        layout = Chosen(name=told["name"], weights=(1,) * group.world_size if told["name"] != "replicated" else ())
    elif profiled:
        layout = Chosen()
    else:
        layout = choose_layout(model, optimizer, group, config, memory, device, state)
    recomputation = Recomputation(
        model, True if recomputes and config.recompute is None else config.recompute, config.blocks
    )
    if config.recompute and not recomputation.active:
        raise SettingError(f"recompute=True, but {recomputation.why_not}. Use torch.utils.checkpoint in the model.")
    first_samples = partial(_first_samples, dataset, sampler, config)
    finding = partial(
        find_nature,
        model,
        loss_fn,
        first_samples,
        collate,
        precision=own_precision,
        objects=state,
        config=config,
        group=group,
    )
    hosts = group.hosts if emulator is None else [each.host for each in emulator.cluster.expanded()]
    # Where slices would travel between hosts, a pipeline may be quicker.
    compared = config.layout == "auto" and layout.name.startswith("zero") and len(set(hosts)) > 1
    sharding, pipe, found = None, None, None
    nature, noted = Nature(), []
    if layout.name == "pipeline" or (compared and not group.elastic):
        # The model is tried where it is: it may be whole on no device.
        nature, noted = finding(device=next(iter(model.parameters())).device, memory=NoMemoryLimit(), rounds=None)
        choosing = partial(
            choose_stages,
            model,
            optimizer,
            loss_fn,
            first_samples,
            collate,
            nature=nature,
            unit=_unit(nature, config, sampler)[0],
            global_batch_size=global_batch_size,
            capacity_bytes=capacity_bytes(group, memory, device),
            precision=own_precision,
            group=group,
            config=config,
            emulator=emulator,
            recompute=recomputation.active,
        )
        if layout.name == "pipeline":
            found = choosing()
        else:
            found, reason = quicker_than_slices(layout, choosing)
            layout = msgspec.structs.replace(layout, reason=reason)
    if found is not None:
        check_elementwise(optimizer, "pipeline")
        layout = Chosen(name="pipeline")
        pipe = Pipe(found, group)
        move_to(device, model, optimizer, whole=False)
        sharding = Staging(model, optimizer, group, found=found, device=device, config=config)
        memory.attach(model, optimizer, sharding.passing)
    else:
        move_to(device, model, optimizer, whole=layout.name != "zero3")
        if layout.name != "replicated":
            check_elementwise(optimizer, layout.name)
            sharding = Sharding(
                model, optimizer, group, layout=layout.name, weights=layout.weights, device=device, config=config
            )
        rounds = None if sharding is None else sharding.rounds
        memory.attach(model, optimizer, None if rounds is None else rounds.passing)
        if rounds is not None:
            rounds.came = memory.came
        if newcomer:
            nature = msgspec.convert(group.gather("nature", None)[0], Nature)
        else:
            nature, noted = finding(device=device, memory=memory, rounds=rounds)
        if sharding is not None and rounds is not None:
            if newcomer:
                take_schedule(rounds, told["round"], gathers=sharding.gathers)
            else:
                agree_on_schedule(rounds, noted, group, gathers=sharding.gathers)
    unit, unit_reason = _unit(nature, config, sampler)
    by_unit = config.unit is not None or not nature.separable
    start = Start() if newcomer else _start_of_all(start, group)
    plan = initial_plan(
        world_size=group.world_size,
        global_batch_size=global_batch_size,
        unit=unit,
        shares=None if newcomer else shares if pipe is None else pipe.shares(shares),
        micro_batch=config.micro_batch if pipe is None else pipe.micro_batch,
        separable_reason=unit_reason,
        start=start,
    )
    plan = msgspec.structs.replace(plan, layout=layout.name, slices=layout.weights)
    if pipe is not None:
        plan = msgspec.structs.replace(plan, stages=pipe.stages, reason=f"{pipe.reason}; {unit_reason}")
    elif layout.reason:
        plan = msgspec.structs.replace(plan, reason=f"{plan.reason}; {layout.reason}")
    if group.rank == 0:
        log.info("%d rank(s), plan %s: %s", group.world_size, plan.id, plan.reason)
    kinds = tuple(group.gather("device kind", device_kind(device))) if not newcomer else ()
    controller = None
    if shares is None and group.world_size > 1 and pipe is None:
        controller = Controller(plan, Limits(micro_batch=config.micro_batch, memory=start.micro_batch))
    pace: Pace = emulator.pace if emulator else NoPace()
    if pipe is None:  # stages are paced part by part
        pace.attach(model)
    if emulator is not None:
        log.info("%s", emulator.describe())
    return Run(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loss_fn=loss_fn,
        loader=make_loader(dataset),
        make_loader=make_loader,
        sampler=sampler,
        group=group,
        device=device,
        device_kinds=kinds,
        plan=plan,
        memory_found=start.micro_batch or (),
        follows=shares is None and pipe is None,
        fingerprint=own_fingerprint,
        generation=group.generation if isinstance(group, ElasticGroup) else 0,
        nature=nature,
        by_unit=by_unit,
        seed=seed,
        precision=precision,
        device_precision=own_precision,
        clip_norm=clip_norm,
        config=config,
        state=state,
        loss_scale=LossScale(precision),
        buffers=UnitBuffers(model, nature.changed_buffers, group),
        stopwatch=Stopwatch(device),
        exposed=Stopwatch(device),
        controller=controller,
        sharding=sharding,
        pipe=pipe,
        is_new=newcomer,
        pace=pace,
        memory=memory,
        recomputation=recomputation,
    )


def _settings(config: Config) -> dict[str, Any]:
    """What must be equal on all ranks; of a function, whether there is one."""
    own = msgspec.structs.replace(config, blocks=None)
    settings = {f"config.{name}": value for name, value in msgspec.to_builtins(own).items() if name != "log"}
    return {**settings, "config.blocks": config.blocks is not None}


def _compare_newcomer(fingerprints: Sequence[Mapping[str, Any]], group: Group) -> None:
    """The others go on whatever this rank was started with, so a difference is this rank's own error."""
    first, own = fingerprints[0], fingerprints[group.rank]
    try:
        compare((first, *([first] * (group.rank - 1)), own), group.hosts)
    except DisagreementError as error:
        error.origin_rank = None
        raise


def _device_of(model: torch.nn.Module) -> torch.device:
    """The accelerator the user has put the model on, else this process's own device."""
    own = next(iter(model.parameters())).device
    return own if own.type != "cpu" else choose_device()


def _take_rank_0_values(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, objects: Mapping[str, Any], group: Group
) -> None:
    if group.world_size == 1:
        return
    own = [tensor.detach() for tensor in [*model.parameters(), *model.buffers()]]
    # Not into the model where ranks come and go: what breaks off half-way is begun again.
    taken = [tensor.clone() for tensor in own] if group.elastic else own
    group.broadcast(taken, source=0)
    if group.elastic:
        for tensor, value in zip(own, taken):
            tensor.copy_(value)
    tree = {
        "optimizer": optimizer.state_dict() if optimizer.state else None,
        "scheduler": None if scheduler is None else run_state.plain_scheduler(scheduler.state_dict()),
        "state": {name: item.state_dict() for name, item in objects.items()},
    }
    tree = run_state.broadcast_tree(tree, group, "values of rank 0")
    if group.rank != 0:
        optimizer.state.clear()
        if tree["optimizer"] is not None:
            optimizer.load_state_dict(tree["optimizer"])
        if scheduler is not None:
            scheduler.load_state_dict(tree["scheduler"])
        for name, item in objects.items():
            item.load_state_dict(run_state.placed_like(item.state_dict(), tree["state"][name]))


def _first_samples(dataset: Any, sampler: Sampler, config: Config) -> list[Any]:
    """Some of step 1, to try the loss on."""
    first = sampler.batch(1)
    indices = sampler.indices(1, 0, min(CANDIDATES, first.size))
    return choose_samples([_sample(dataset, first.epoch, index, sampler.seed, config) for index in indices])


def _sample(dataset: Any, epoch: int, index: int, seed: int, config: Config) -> Any:
    """`dataset[index]` as a step would read it."""
    with preserved_random_state():
        try:
            return read_samples(dataset, epoch, (index,), seed if config.seed_samples else None)[0]
        except Exception as error:
            raise DataError(f"dataset[{index}] failed: {type(error).__name__}: {error}") from error


def _start_of_all(start: Start, group: Group) -> Start:
    """What all ranks begin with. Where ranks come and go, the machine that has a plan says it, if it begins alone and
    as planned; with others than planned, shares begin equal and follow speed all the same."""
    if not group.elastic:
        return start
    said = [msgspec.convert(each, Start) for each in group.gather("start", msgspec.to_builtins(start))]
    planned = next((each for each in said if each != Start()), None)
    if planned is None:
        return start
    lengths = {len(each) for each in (planned.shares, planned.micro_batch) if each is not None}
    if lengths == {group.world_size} and len(set(group.hosts)) == 1:
        return planned
    if group.rank == 0:
        log.warning(
            "the plan is for %s workers of one machine, and %d of %d machine(s) begin: shares begin equal and follow "
            "measured speed",
            " or ".join(map(str, sorted(lengths))),
            group.world_size,
            len(set(group.hosts)),
        )
    return Start()


def _unit(nature: Nature, config: Config, sampler: Sampler) -> tuple[int, str]:
    if config.unit is not None:
        return config.unit, f"unit {config.unit}: as configured; {nature.reason}"
    unit, reason = choose_unit(
        global_batch_size=sampler.global_batch_size, separable=nature.separable, batch_norm=nature.batch_norm
    )
    if not nature.separable:
        unit = min(unit, config.micro_batch or unit)
        if nature.batch_norm:
            unit = checks.unit_without_single_samples(
                unit, dataset_size=sampler.dataset_size, global_batch_size=sampler.global_batch_size
            )
        reason = f"unit {unit}: {nature.reason}"
    return unit, reason
