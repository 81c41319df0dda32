"""From one generation to the next: what a rank does when others are lost, or newcomers wait.

The one idea: a step is applied by everybody or by nobody. Whoever holds the step that others have applied applies it;
else its result is void, own sums stay, and the first step of the new generation begins by telling each other what they
hold. Newcomers copy everything from rank 0, which always is one that has it. docs/membership.md argues why.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ragtag.checkpoint.directory import History
from ragtag.comm.elastic import ElasticGroup
from ragtag.comm.group import Group
from ragtag.comm.passing import GenerationEnded
from ragtag.comm.standing import Evicted, Standing
from ragtag.control.controller import Controller
from ragtag.control.membership import Brought, memory_of, plan_for
from ragtag.control.proposal import Limits
from ragtag.control.sharing import units_per_rank
from ragtag.core.values import Plan
from ragtag.hub.frames import Go
from ragtag.runtime import state
from ragtag.runtime.device import device_kind
from ragtag.runtime.islands.entry import join_island
from ragtag.runtime.names import named_parameters
from ragtag.runtime.run import Run
from ragtag.runtime.settling import Settling
from ragtag.runtime.step import apply
from ragtag.runtime.zero import moving

log = logging.getLogger("ragtag")

_COUNTERS = ("num_applied", "applied_digest", "num_settled", "non_finite_steps", "calls")
"""Of a run, what newcomers take over as it is."""


def regroup(run: Run, script: Mapping[str, Any], *, in_call: str = "", agreed: bool = False) -> None:
    """Return when this rank is in a new generation, ready for the step after `run.committed`.

    Args:
        run: this rank, whose group has ended its generation or is to leave it.
        script: where the script is, for newcomers.
        in_call: the collective call that is to be done again ("evaluating"), which newcomers cannot take part in.
        agreed: all ranks leave their generation at this step boundary, for newcomers.

    Raises:
        Evicted, PeerFailed, PeerLost: this rank cannot go on.
    """
    group = run.group
    assert isinstance(group, ElasticGroup), "only elastic groups have generations"
    mine = own(run, group.rank)
    while True:
        go = group.regroup(standing(run, in_call), agreed=agreed)
        agreed = False
        try:
            enter(run, go, script, mine)
            return
        except GenerationEnded:
            continue


def standing(run: Run, in_call: str = "") -> Standing:
    """What this rank can bring: its state, and the step that it holds, if it does."""
    held = _held(run)
    if held is not None or run.late_report is not None:
        # The script has not seen this step yet. What it changes then (averages, rates), newcomers would never get.
        in_call = in_call or "applying"
    return Standing(
        has_state=True,
        applied=run.num_applied,
        applied_digest=run.applied_digest,
        held_digest="" if held is None else held.held_digest,
        in_call=in_call,
    )


def enter(run: Run, go: Go, script: Mapping[str, Any], mine: Brought) -> None:
    """A veteran's part in the generation that has formed.

    Raises:
        GenerationEnded: it is over already.
        Evicted: the others have gone on further than this rank can follow.
    """
    group = run.group
    assert isinstance(group, ElasticGroup), "only elastic groups have generations"
    held = _held(run)
    if go.action == "apply" and go.base == run.num_applied + 1 and held is not None:
        held.accept_held()
        run.late_report = apply(held, held.started_s, late=True)
    elif held is not None:
        held.void()
    if group.is_newcomer or run.num_applied != go.base:
        raise Evicted(
            f"{group.member.name} ({group.member.host}) has applied {run.num_applied} steps, and generation "
            f"{go.generation} goes on after {go.base}: a new process copies the state from the others."
        )
    run.generation = go.generation
    run.buffers.begin_unit()  # what an unfinished step has changed
    newcomers = group.world_size > go.num_veterans
    if newcomers:
        group.gather("fingerprint", run.fingerprint)
        group.gather("layout", {"name": run.plan.layout, "round": run.round_told})
        group.gather("nature", msgspec.to_builtins(run.nature))
    follow(run, go, mine)
    if newcomers:
        send_state(run, script, group)


def _held(run: Run) -> Settling | None:
    """The next step, if this rank holds it and has not settled it."""
    settling = run.in_hand
    if settling is None or settling.number != run.committed + 1 or settling.outcome is not None:
        return None
    return settling if settling.held_digest else None


def follow(run: Run, go: Go, mine: Brought) -> None:
    """Make the new generation's plan and start its controller, the same on every rank."""
    brought = bring(run.group, mine)
    plan, memory = plan_of(run, brought, _what_happened(go)), memory_of(brought)
    if run.sharding is not None:
        plan = msgspec.structs.replace(plan, layout=run.sharding.layout, slices=moving.settle(run))
    controller = None
    if run.follows and run.group.world_size > 1:
        controller = Controller(plan, Limits(micro_batch=run.config.micro_batch, memory=memory or None))
    run.follow(plan, controller, [each.device_kind for each in brought], memory)
    furthest = max(brought[: max(1, go.num_veterans)], key=lambda each: each.calls)
    if mine.calls < furthest.calls and run.group.rank < go.num_veterans:
        run.missed_answer = furthest.answer  # nobody begins another call before all have come to the end of this one
    if run.group.rank == 0:
        log.info(
            "generation %d, from step %d: %d rank(s) go on with shares %s: %s",
            go.generation,
            run.committed + 1,
            run.group.world_size,
            plan.shares,
            go.reason,
        )


def own(run: Run, rank: int) -> Brought:
    """What this rank, `rank` until now, brings."""
    controller, plan = run.controller, run.plan
    return Brought(
        device_kind=device_kind(run.device),
        level_s=0.0 if controller is None else controller.speeds[rank].level_s,
        micro_batch=run.memory_found[rank] if run.memory_found else None,
        has_work=plan.shares[rank] > 0,
        pinned=None if run.follows else units_per_rank(plan, sum(plan.shares))[rank],
        calls=run.calls,
        answer=run.answer,
        batch_size=run.sampler.global_batch_size,
    )


def bring(group: Group, mine: Brought) -> tuple[Brought, ...]:
    """What all ranks bring, by rank."""
    return tuple(msgspec.convert(each, Brought) for each in group.gather("brought", msgspec.to_builtins(mine)))


def plan_of(run: Run, brought: Sequence[Brought], reason: str) -> Plan:
    """The plan for these ranks."""
    return plan_for(
        brought,
        global_batch_size=max(each.batch_size for each in brought) or run.sampler.global_batch_size,
        unit=run.plan.unit,
        micro_batch=run.config.micro_batch,
        reason=reason,
    )


def join(run: Run, group: ElasticGroup) -> Mapping[str, Any]:
    """A newcomer's part, after it has found itself alike: take the plan and rank 0's state; return the tree."""
    assert group.go is not None
    run.generation = group.go.generation
    follow(run, group.go, Brought(device_kind=device_kind(run.device)))
    return receive_state(run, group)


def send_state(run: Run, script: Mapping[str, Any], group: Group) -> None:
    """Rank 0 sends all that has to survive; the other veterans listen."""
    tree = None
    if group.rank == 0:
        tree = {
            **(state.collect(run, script) if run.sharding is None else moving.rest_of(run, script)),
            **{name: getattr(run, name) for name in _COUNTERS},
            "trained": [name for name, parameter in named_parameters(run.model) if parameter.requires_grad],
            "training": [name for name, module in run.model.named_modules() if module.training],
        }
    state.broadcast_tree(tree, group, "state for newcomers")


def receive_state(run: Run, group: ElasticGroup) -> Mapping[str, Any]:
    """A newcomer's part: take rank 0's state; return where the script is."""
    tree = state.broadcast_tree(None, group, "state for newcomers")
    source = f"rank 0 ({group.hosts[0]})"
    join_island(run, tree.get("islands"))
    if run.sharding is None:
        state.check(run, tree, source)
        state.restore(run, tree, source)
    else:
        moving.take_rest(run, tree)
    for name in _COUNTERS:
        setattr(run, name, tree[name])
    run.history = msgspec.convert(tree["history"], History | None)
    # The script may have frozen parameters, or put modules into evaluation mode, in steps that this rank never sees.
    trained, training = set(tree["trained"]), set(tree["training"])
    for name, parameter in named_parameters(run.model):
        parameter.requires_grad_(name in trained)
    for name, module in run.model.named_modules():
        module.training = name in training
    run.resuming = True
    return tree


def _what_happened(go: Go) -> str:
    return f"generation {go.generation} of {len(go.members)} rank(s): {go.reason}"
