"""An island among others: what all its ranks do between two steps, so that they stay one.

The one idea: the leader says in a header what follows, tensors follow, and nobody changes a parameter before everybody
has them. So whoever is lost in the middle of it, the others hold the same values, and do it again or not at all.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from ragtag.control.controller import Controller
from ragtag.control.membership import Brought, memory_of, plan_for
from ragtag.control.proposal import Limits
from ragtag.core.errors import LaunchError, RagtagError
from ragtag.core.values import StepReport
from ragtag.runtime import state as run_state
from ragtag.runtime.islands.cut import Cut
from ragtag.runtime.islands.leader import Header, Leader, Place
from ragtag.runtime.islands.sampling import IslandSampler
from ragtag.runtime.names import plain_name
from ragtag.runtime.run import Run
from ragtag.runtime.script import ScriptPosition

log = logging.getLogger("ragtag")

_WARM_UP = 0.07
"""Part of all steps that one island does alone, where nothing else is configured."""
_NAP_S = 0.02
_LONGEST_PATIENCES = 10
"""For how many patiences an island waits for the others in the last round."""


class TakingPart:
    """One rank of an island.

    Args:
        run: this rank.
        place: where the outer loop is; None: this rank has joined, and is told.
    """

    active = True

    def __init__(self, run: Run, place: Place | None) -> None:
        self._run, self._place = run, place
        self._cut = Cut(run.model, run.config.fragments)
        self._leader: Leader | None = None
        self._stage = "new"
        """new: nobody was asked yet. alone: warms up, or trains until there are others. open: with the others. over:
        the last round is done."""
        self._total = 0
        """Steps of the whole run; 0: not known yet."""
        self._warm_up = 0
        self._offset = 0.0
        """Steps of all islands together, less those of this one."""
        self._schedule: float | None = None
        """Where learning rates are; None: where the steps are."""
        self._header = Header()
        self._tensors: list[torch.Tensor] = []
        self._tree: Mapping[str, Any] | None = None
        self._adopting = False
        """A new leader is to fetch the values: what was sent by the one before is not known."""

    # What the step asks

    def asks(self, number: int) -> bool:
        """As the first rank of the island: something has arrived, or all are to wait for it."""
        leader = self._leader
        if leader is None or self._stage != "open":
            return self._run.group.rank == 0 and self._stage == "open"
        tempo = leader.client.talk.tempo
        if tempo is not None and tempo.blocking and leader.due(number):
            return True
        return leader.has_news or (self._adopting and leader.client.talk.values.begun)

    def scheduler_steps(self) -> int:
        """1, or what brings learning rates to where the samples of all islands are."""
        run = self._run
        if self._schedule is None or isinstance(run.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            return 1
        steps = max(0, round(run.committed + 1 + self._offset - self._schedule))
        self._schedule += steps
        return steps

    def stepped(self, report: StepReport) -> None:
        """A step was applied."""
        if self._leader is not None:
            self._leader.stepped(report)

    def state_dict(self, run: Run) -> dict[str, Any]:
        """What those who join this island, or go on from a checkpoint, need."""
        sampler = run.sampler
        assert isinstance(sampler, IslandSampler), "islands have samplers of their own"
        return {
            "stage": self._stage,
            "total": self._total,
            "warm_up": self._warm_up,
            "offset": self._offset,
            "schedule": self._schedule,
            "place": None if self._place is None else msgspec.to_builtins(self._place),
            "sampling": [sampler.after, sampler.position, sampler.global_batch_size, sampler.seed],
        }

    def load_state_dict(self, run: Run, state: Mapping[str, Any] | None) -> None:
        """Go on as the others do, or as before."""
        if state is None:
            return
        self._total, self._warm_up = state["total"], state["warm_up"]
        self._offset, self._schedule = state["offset"], state["schedule"]
        after, position, batch, seed = state["sampling"]
        sampler = run.sampler
        assert isinstance(sampler, IslandSampler), "islands have samplers of their own"
        sampler.seed = seed
        run.sampler = sampler.at(after, position, batch)

    def join(self, run: Run, state: Mapping[str, Any]) -> None:
        """This rank has joined others of its island, who are where `state` says."""
        self._stage = state["stage"]
        if state["place"] is not None:
            self._place = msgspec.convert(state["place"], Place)

    def close(self) -> None:
        """Say goodbye to the hub."""
        if self._leader is not None:
            self._leader.client.close()
            self._leader = None

    # Between two steps

    @property
    def begins(self) -> bool:
        """Whether all ranks are to ask the hub first, before the next step."""
        return self._stage == "new"

    def ends_after(self, committed: int) -> bool:
        """Whether the last round comes after this step."""
        return self._stage in ("alone", "open") and bool(self._total) and committed >= self._total

    def plan_steps(self, last: int) -> None:
        """The script's first loop ends after step `last`: how long the warm-up is follows from that."""
        config = self._run.config
        self._total = self._total or config.total_steps or last
        if not self._warm_up:
            whole = round(_WARM_UP * self._total)
            self._warm_up = config.warm_up_steps if config.warm_up_steps is not None else whole

    def at_boundary(self, script: ScriptPosition) -> None:
        """The leader's part between two steps, in which nobody waits."""
        run, group = self._run, self._run.group
        if group.rank != 0 or self._stage in ("new", "over"):
            return
        leader = self._lead()
        if self._stage == "alone":
            talk = leader.client.talk
            if run.committed >= self._warm_up and talk.stage == "alone" and not talk.values.begun:
                tree = {**run_state.collect(run, script.state_dict()), "model": {}, "islands": None}
                leader.give(tree, run.committed)
            if talk.values.begun and talk.stage == "open":
                self._stage = "open"
                leader.begin(run.committed)
        elif not self._adopting:
            tempo = leader.client.talk.tempo
            if tempo is not None and not tempo.blocking:
                leader.send(run.committed, leader.due(run.committed))

    def _lead(self) -> Leader:
        if self._leader is None:
            run = self._run
            if self._place is None:
                raise LaunchError("this rank is to lead its island, and was not told where the outer loop is.")
            sampler = run.sampler
            assert isinstance(sampler, IslandSampler), "islands have samplers of their own"
            self._leader = Leader(
                self._place,
                self._cut,
                run.config,
                batch=sampler.whole_batch_size,
                dataset=sampler.dataset_size,
                committed=lambda: run.committed,
            )
            self._leader.batch_now = sampler.global_batch_size
            if self._stage == "open":
                self._adopting = True
                self._leader.client.fetch_all(state=False)
        return self._leader

    def exchange(self, header: Callable[[], tuple[Header, list[torch.Tensor]]]) -> str:
        """A call of the group: the leader's header, and what follows it, on every rank; nothing is changed yet."""
        group = self._run.group
        own, tensors = header() if group.rank == 0 else (Header(), [])
        told = group.gather("islands", msgspec.to_builtins(own) if group.rank == 0 else None)[0]
        self._header = msgspec.convert(told, Header)
        if self._header.error:
            error = LaunchError(self._header.error)
            error.origin_rank = 0
            raise error
        if group.rank != 0:
            tensors = [torch.empty(self._cut.numel[fragment]) for fragment in self._header.fragments]
        if tensors:
            group.broadcast(tensors, source=0)
        self._tensors = tensors
        if self._header.jump is not None:
            tree = self._given_tree() if group.rank == 0 else None
            self._tree = run_state.broadcast_tree(tree, group, "state of another island")
        if group.elastic and group.world_size > 1:
            group.barrier("islands")
        return ""

    def take(self) -> bool:
        """After `exchange`, on every rank alike: do what the header says; return whether training goes on."""
        run, header = self._run, self._header
        if header.jump is not None and self._tree is not None:
            self._jump(header.jump, self._tree)
        for fragment, tensor in zip(header.fragments, self._tensors):
            if header.values:
                self._cut.put(fragment, tensor)
            else:
                self._cut.add(fragment, tensor)
        if header.offset is not None:
            self._offset = header.offset
            if self._schedule is None:
                self._schedule = float(run.committed)
        if header.batch:
            resize(run, header.batch)
        if header.begun:
            self._stage = "open"
        elif header.done and self._stage == "new":
            self._stage = "alone"
        if self._leader is not None and run.group.rank == 0:
            self._leader.batch_now = run.sampler.global_batch_size
            if header.fragments and not header.values:
                self._leader.added(header.fragments)
            if header.values or header.jump is not None:
                self._adopting = False
                self._leader.begin(run.committed)
        self._tensors, self._tree = [], None
        return header.done

    # The leader's headers

    def first_header(self) -> tuple[Header, list[torch.Tensor]]:
        """Before the first step: what the hub says is to be done."""
        run = self._run
        try:
            leader = self._lead()
            client = leader.client
            client.wait(lambda: bool(client.talk.stage) and client.talk.stage != "wait", 0.2)
        except RagtagError as error:
            return Header(error=str(error)), []
        if client.talk.stage == "alone":
            return Header(), []
        if client.talk.stage == "wait":
            leader.say("waits for the island that warms up")
            return Header(done=False), []
        if not client.talk.stage:
            leader.say(f"waits for the hub at {client.address}:{client.port} ({client.talk.trouble})")
            return Header(done=False), []
        if not client.talk.values.begun:
            client.fetch_all()
            client.wait(lambda: client.talk.values.begun, 0.2)
            return Header(done=False), []
        step = max(run.committed, int(client.talk.step))
        batch = max(1, leader.first_batch())
        header, values = self._all_values()
        return msgspec.structs.replace(header, jump=step, batch=batch, begun=True, offset=0.0), values

    def _given_tree(self) -> Mapping[str, Any]:
        assert self._leader is not None
        return self._leader.taken_state()

    def next_header(self) -> tuple[Header, list[torch.Tensor]]:
        """Between two steps: what has arrived; where islands wait for each other, until it has."""
        run, began_s = self._run, time.monotonic()
        leader = self._lead()
        client = leader.client
        if self._adopting:
            if not client.talk.values.begun:
                return Header(), []
            return self._all_values()
        if client.talk.tempo is not None and client.talk.tempo.blocking:
            leader.send(run.committed, leader.due(run.committed))
            self._await(lambda: leader.has_news or leader.settled(), began_s)
            header, tensors = leader.news(run.committed)
            with client.lock:
                open_ = set(client.talk.values.in_flight) - set(header.fragments)
            return msgspec.structs.replace(header, done=not open_ and leader.nothing_left(header.fragments)), tensors
        return leader.news(run.committed)

    def last_header(self, deadline_s: float) -> tuple[Header, list[torch.Tensor]]:
        """After the last step: what is left goes, whole; when everybody's has, all take the same values."""
        run, began_s = self._run, time.monotonic()
        if self._stage != "open":
            return Header(), []
        leader = self._lead()
        client = leader.client
        over = client.talk.stage == "over"
        late = began_s > deadline_s or client.error is not None
        if late or self._adopting:
            log.warning("island %s: ends without the others: %s", self._name, client.talk.trouble)
            return self._all_values() if client.talk.values.begun else (Header(), [])
        if leader.settled():
            leader.send_last(run.committed)
        if over and leader.settled() and client.talk.newest:
            return self._all_values()
        leader.say("has done its last step, and waits for the others")
        self._await(lambda: leader.has_news or (client.talk.stage == "over") > over, began_s)
        header, tensors = leader.news(run.committed)
        return msgspec.structs.replace(header, done=False, batch=0), tensors

    def _all_values(self) -> tuple[Header, list[torch.Tensor]]:
        assert self._leader is not None
        client = self._leader.client
        with client.lock:
            numbers = range(self._cut.num_fragments)
            values = [client.talk.values.values[fragment].clone() for fragment in numbers]
        return Header(fragments=tuple(numbers), values=True), values

    @property
    def _name(self) -> str:
        return "" if self._place is None else self._place.island

    def _await(self, ready: Callable[[], bool], began_s: float) -> None:
        """Wait a moment; others are told in between, so that nobody takes this rank for lost."""
        leader = self._leader
        assert leader is not None
        leader.client.wait(ready, 0.2)
        leader.waited_s += time.monotonic() - began_s

    def deadline_s(self) -> float:
        """Until when the last round is waited for."""
        return time.monotonic() + _LONGEST_PATIENCES * self._run.config.patience_s

    def over(self) -> None:
        """The last round is done."""
        self._stage = "over"

    def _jump(self, step: int, tree: Mapping[str, Any]) -> None:
        """Go on after `step`, with the optimizer's state of another island."""
        run = self._run
        # Values come by fragments; what must be equal for an exact continuation, such as the data, need not be here.
        model = {plain_name(name): value for name, value in run.model.state_dict().items()}
        whole = {**tree, "identity": run_state.identity(run), "model": model}
        run_state.check(run, whole, "the first island's state")
        sampler = run.sampler
        run_state.restore(run, whole, "the first island's state")
        assert isinstance(sampler, IslandSampler), "islands have samplers of their own"
        run.sampler = sampler.at(step, sampler.position, sampler.global_batch_size)
        run.jump_to(step)
        if self._schedule is None and run.scheduler is not None:
            self._schedule = float(tree["committed"])
        log.info("island %s: goes on after step %d", self._name, step)


def resize(run: Run, batch: int) -> None:
    """From now on this island's steps have `batch` samples, shared out by what is known of its ranks' speeds."""
    sampler = run.sampler
    assert isinstance(sampler, IslandSampler), "islands have samplers of their own"
    if batch == sampler.global_batch_size:
        return
    speeds = () if run.controller is None else run.controller.speeds
    brought = [
        Brought(
            device_kind=kind,
            level_s=speeds[rank].level_s if speeds else 0.0,
            micro_batch=run.memory_found[rank] if run.memory_found else None,
        )
        for rank, kind in enumerate(run.device_kinds)
    ]
    run.sampler = sampler.resized(run.committed, batch)
    reason = f"the island's part of the batch is {batch} of {sampler.whole_batch_size} samples"
    plan = plan_for(
        brought, global_batch_size=batch, unit=run.plan.unit, micro_batch=run.config.micro_batch, reason=reason
    )
    memory = memory_of(brought)
    controller = None
    if run.follows and run.group.world_size > 1:
        controller = Controller(plan, Limits(micro_batch=run.config.micro_batch, memory=memory or None))
    run.follow(plan, controller, run.device_kinds, memory)
    run.resuming = False
    if run.group.rank == 0:
        log.info("step %d: %s", run.committed + 1, reason)
