"""What one rank holds while it trains: the model, the plan, and the parts that a step uses. State, no policy."""

import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec
import torch

from ragtag.checkpoint.directory import History
from ragtag.comm.elastic import ElasticGroup
from ragtag.comm.group import Group
from ragtag.control.absence import units_without
from ragtag.control.ballot import Ballot
from ragtag.control.controller import Controller
from ragtag.control.memory import Memory, decide, learn, why
from ragtag.control.observation import Observation, observe_ballots
from ragtag.control.pool_trial import PoolTrial
from ragtag.control.pulling import Pool, choose_pool
from ragtag.control.sharing import units_per_rank
from ragtag.core.config import Config
from ragtag.core.decision import Decision
from ragtag.core.errors import ModelError
from ragtag.core.ledger import Ledger
from ragtag.core.sampler import Sampler
from ragtag.core.values import Plan, StepReport
from ragtag.emulate.memory import MemoryLimit
from ragtag.emulate.pace import Pace
from ragtag.runtime.boundary import Boundary
from ragtag.runtime.buffers import UnitBuffers
from ragtag.runtime.contention import Contention
from ragtag.runtime.device import Stopwatch
from ragtag.runtime.gradients import GradientSums
from ragtag.runtime.islands.membership import Islands, NoIslands
from ragtag.runtime.loader import UnitLoader
from ragtag.runtime.names import named_buffers, named_parameters
from ragtag.runtime.pipe.pipe import Pipe
from ragtag.runtime.precision import LossScale
from ragtag.runtime.recomputation import Recomputation
from ragtag.runtime.recording import NoRecorder, Recorder
from ragtag.runtime.replicas import check_replicas
from ragtag.runtime.step_sums import StepSums
from ragtag.runtime.trial import Nature
from ragtag.runtime.vitals import VitalsThread, sensor_of
from ragtag.runtime.work import StepWork
from ragtag.runtime.zero.sharding import Sharding

log = logging.getLogger("ragtag")

_LEAST_COMPARED = 8
"""Steps that must have been compared with their neighbours before noise is believed."""
_REMEMBERED_DECISIONS = 200


@dataclass(kw_only=True)
class Run:
    """Mutable state of one rank, changed only at step boundaries."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any | None
    loss_fn: Callable[[torch.nn.Module, Any], Any]
    loader: UnitLoader
    make_loader: Callable[[Any], UnitLoader]
    sampler: Sampler
    group: Group
    device: torch.device
    device_kinds: Sequence[str]
    plan: Plan
    nature: Nature
    by_unit: bool
    seed: int
    precision: str
    device_precision: str
    """What this rank computes in: fp32 where the device lacks bf16."""
    clip_norm: float | None
    config: Config
    state: Mapping[str, Any]
    loss_scale: LossScale
    buffers: UnitBuffers
    stopwatch: Stopwatch
    exposed: Stopwatch
    controller: Controller | None
    """Moves shares as speeds change; None: they are pinned, or there is one rank."""
    pace: Pace
    memory: MemoryLimit
    recomputation: Recomputation
    """Whether this rank keeps activations."""
    recorder: Recorder = field(default_factory=NoRecorder)
    """Who is told what belongs into the event log."""
    contention: Contention = field(default_factory=Contention)
    vitals: VitalsThread = field(init=False)
    boundary: Boundary = field(default_factory=Boundary)
    """What is done between two steps."""
    islands: Islands = field(default_factory=NoIslands)
    """Other sites that train the same model over slow links."""
    sharding: Sharding | None = None
    """What is cut into slices; None: every rank holds all of the model's state."""
    pipe: Pipe | None = None
    """This rank's place in a pipeline; None: it computes the whole model."""
    is_new: bool = False
    """This rank has joined, and has nothing yet of what the others have."""
    save_first: bool = False
    """A checkpoint is due before the first step."""
    history: History | None = None
    """Under which names its checkpoints are kept; None: none are."""
    committed: int = 0
    non_finite_steps: int = 0
    generation: int = 0
    apply_s: float = 0.0
    num_settled: int = 0
    """Steps that all ranks have agreed on; unlike their numbers, it never goes back."""
    absent: frozenset[int] = frozenset()
    """Ranks that were stood in for in the last step agreed on, and have no work in the next."""
    memory_found: Memory = ()
    """What ranks' memory was found to hold; empty: it has always been enough."""
    decided: list[Decision] = field(default_factory=list)
    """Changes of a plan that no controller follows, and those of earlier generations."""
    follows: bool = True
    """Whether shares follow speed; False: they are pinned."""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    """What newcomers compare themselves with."""
    in_hand: Any = None
    """The newest `Settling`."""
    num_applied: int = 0
    """Steps that this rank has applied, or would have from the run's start on; unlike their numbers, it never goes
    back. What the hub compares."""
    applied_digest: str = ""
    """Of the last of them."""
    calls: int = 0
    """Calls that all ranks make together, steps aside, that are finished."""
    answer: str = ""
    """What the last of them gave."""
    missed_answer: str | None = None
    """What the call that this rank is inside gave the others, who have finished it; None: nobody has."""
    regroup_due: bool = False
    """Newcomers wait, and all ranks know it: regroup before the next step."""
    resuming: bool = False
    """The next step is the first of a generation: what everybody's sum holds is to be told first."""
    late_report: StepReport | None = None
    """Of a step that was applied between two generations, and that the script has not seen."""
    _gradients: GradientSums | None = None
    _pool_trial: PoolTrial = field(default_factory=PoolTrial)
    _requested_through: int = 0
    _trainable: list[int] = field(default_factory=list)
    _prefetched_for: tuple[Plan, frozenset[int]] = field(init=False)

    def __post_init__(self) -> None:
        self._prefetched_for = (self.plan, self.absent)
        device, memory = self.device, self.memory
        self.vitals = VitalsThread(lambda: sensor_of(device, memory), self.contention.look_around)

    @property
    def loss_factor(self) -> float:
        """What every sum of losses is multiplied by before backward, equal on all ranks; divided out after the
        reduction.

        A power of two, about one over the batch size: it keeps sums small and rounds nothing, in any dtype.
        """
        return self.loss_scale.value / 2 ** (self.sampler.global_batch_size - 1).bit_length()

    @property
    def plan_id(self) -> str:
        """Content hash of the plan."""
        return _id_of(self.plan)

    def gradients(self) -> StepSums:
        """The gradient sums over what is trainable now."""
        if self.sharding is None:
            return self.replica_sums()
        self.sharding.check_trained()
        return self.sharding.sums

    def replica_sums(self) -> GradientSums:
        """Those of a whole replica; built again when the script froze or unfroze parameters."""
        trainable = [id(p) for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        if self._gradients is None or trainable != self._trainable:
            known = set(trainable)
            named = [(name, p) for name, p in named_parameters(self.model) if id(p) in known]
            if len(named) != len(known):
                raise ModelError("the optimizer was given parameters that are not the model's; they cannot be reduced.")
            if self._gradients is not None:
                self._gradients.begin()  # no stale gradient stays on what was frozen
                self._gradients.close()
            self._trainable = trainable
            self._gradients = GradientSums(
                named,
                self.group,
                bucket_bytes=self.config.bucket_bytes,
                wire=self.config.wire,
                overlap=self.config.overlap,
                chunk_weights=lambda: self.plan.chunk_weights,
            )
        return self._gradients

    @property
    def in_rounds(self) -> bool:
        """Whether every micro-batch is one of all ranks."""
        return self.sharding is not None and self.sharding.in_rounds

    @property
    def round_told(self) -> list[Any]:
        """The round that all ranks go by; empty where there are none."""
        rounds = None if self.sharding is None else self.sharding.rounds
        return [] if rounds is None else rounds.told

    @property
    def wants_regroup(self) -> bool:
        """Whether this rank was told that newcomers wait."""
        return isinstance(self.group, ElasticGroup) and self.group.asked_to_regroup

    @property
    def gradients_in_use(self) -> StepSums | None:
        """Those of the last step that was begun."""
        return self._gradients if self.sharding is None else self.sharding.sums

    def ledger_of(self, step: int) -> Ledger:
        """A new ledger of a step's units, shared out as the plan says."""
        samples, plan = self.sampler.batch(step).size, self.plan
        units = units_without(plan, samples, self.absent)
        return Ledger(step=step, samples=samples, unit=plan.unit, units_per_rank=units)

    def work_of(self, ledger: Ledger) -> StepWork:
        """This rank's micro-batches of a step: planned, and pulled where the plan has a pool."""
        unit_s = [] if self.controller is None else [speed.level_s * self.plan.unit for speed in self.controller.speeds]
        return StepWork(
            ledger,
            self.group,
            self.plan,
            by_unit=self.by_unit,
            pulled=self.plan.pulled,
            unit_s=unit_s,
            serial=self.num_settled,
        )

    def read(self, ledger: Ledger, units: Sequence[int]) -> Any:
        """The samples of a micro-batch, collated; units that were pulled are asked for now."""
        self._request(ledger, [unit for unit in units if (ledger.step, unit) not in self.loader])
        return self.loader.take([(ledger.step, unit) for unit in units])

    def _request(self, ledger: Ledger, units: Sequence[int]) -> None:
        step = ledger.step
        epoch = self.sampler.batch(step).epoch
        for unit in units:
            self.loader.request((step, unit), epoch, self.sampler.indices(step, *ledger.span(unit)))

    @property
    def _feeding_rank(self) -> int:
        """Whose units this rank reads: its own, or those that pass it."""
        return self.group.rank if self.pipe is None else self.pipe.feeding_rank

    def prefetch(self, number: int) -> None:
        """Ask the loader for this rank's units of step `number` and of those after it that it reads ahead."""
        for step in range(max(number, self._requested_through + 1), number + 1 + self.loader.prefetch):
            ledger = self.ledger_of(step)
            self._request(ledger, ledger.todo(self._feeding_rank))
            self._requested_through = step

    def keep_prefetched(self) -> None:
        """After a change of who has which units, at a step boundary: keep what was prefetched and is still ours."""
        plan, absent = self._prefetched_for
        if plan is self.plan and absent == self.absent:
            return
        self._prefetched_for = (self.plan, self.absent)
        wanted = set()
        for step in range(self.committed + 1, self._requested_through + 1):
            wanted |= {(step, unit) for unit in self.ledger_of(step).todo(self._feeding_rank)}
        self.loader.keep(wanted)
        self._requested_through = self.committed

    def follow_speeds(self, ballots: Sequence[Ballot]) -> None:
        """Let the controller see a step that was agreed on, and switch to the plan it decides on, the same on every
        rank."""
        if self.controller is None:
            return
        seen = observe_ballots(ballots, self.controller.plan)
        decision = self.controller.observe(seen)
        base = self.controller.plan
        pool = self._tried(self._choose_pool(base), seen) if not self.in_rounds else Pool(pulled=())
        plan = msgspec.structs.replace(base, pulled=pool.pulled)
        if self.group.rank == 0 and decision is not None:
            log.info("step %d: %s", decision.step, decision.reason)
        if self.group.rank == 0 and pool.pulled and not self.plan.pulled:
            log.info("step %d: %s", ballots[0].step, pool.reason)
        assert plan.unit == self.plan.unit, "the unit is the run's, whatever the plan"
        if plan != self.plan:
            self.plan = plan

    def keep_to_memory(self, ballots: Sequence[Ballot]) -> None:
        """Where a rank ran out of memory in a step that was agreed on, switch to a plan that it holds, the same on
        every rank."""
        if all(ballot.fits is None for ballot in ballots):
            return
        step, before = ballots[0].step, self.memory_found
        self.memory_found = learn(before, ballots, self.plan)
        reason = why(before, self.memory_found, self.plan)
        if not reason:
            return
        if self.controller is not None:
            decision = self.controller.keep_to_memory(step, self.memory_found, reason)
        else:
            decision = decide(step, self.plan, self.memory_found, reason, micro_batch=self.config.micro_batch)
            self.decided.append(decision)
        self.plan = decision.plan
        if self.group.rank == 0:
            log.warning("step %d: %s", step, decision.reason)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The newest changes of plan, oldest first."""
        return self.newest_decisions(_REMEMBERED_DECISIONS)

    def newest_decisions(self, count: int) -> tuple[Decision, ...]:
        """The last `count` of them; asked in every step."""
        followed = () if self.controller is None else self.controller.history[-count:]
        missing = count - len(followed)
        return (*self.decided[-missing:], *followed) if missing and self.decided else followed

    def _tried(self, pool: Pool, seen: Observation) -> Pool:
        """The pool, or none where it is not tried now and has not proved to pay."""
        if self.config.pull is not None:
            return pool
        before = self._pool_trial
        self._pool_trial = trial = before.observe(
            step=seen.step, wall_s=seen.wall_s, pulled=bool(self.plan.pulled), wanted=bool(pool.pulled)
        )
        if self.group.rank == 0 and trial.verdict not in ("", before.verdict):
            log.info("step %d: %s", seen.step, trial.verdict)
        return pool if trial.pulls else Pool(pulled=())

    def _choose_pool(self, plan: Plan) -> Pool:
        assert self.controller is not None
        speeds = self.controller.speeds
        units = units_per_rank(plan, sum(plan.shares))
        working = [speed for speed, count in zip(speeds, units) if count]
        # Noise is a guess until some steps were compared with their neighbours; a wanted pool only needs speeds.
        least = 1 if self.config.pull else _LEAST_COMPARED
        if not all(speed.level_s > 0 and len(speed.jumps) >= least for speed in working):
            return Pool(pulled=())
        noise = [speed.noise for speed in speeds]
        return choose_pool(plan, units, noise, pulling=self._pool_trial.under_way, wanted=self.config.pull)

    def jump_to(self, committed: int) -> None:
        """Go on after step `committed`, for instance after a checkpoint was loaded."""
        self.committed = committed
        self.loader.keep(set())
        self._requested_through = committed

    @property
    def lr(self) -> torch.Tensor | float:
        """The first group's learning rate, which may be a scalar on a device; NaN without one."""
        return self.optimizer.param_groups[0].get("lr", math.nan)

    def follow(
        self, plan: Plan, controller: Controller | None, device_kinds: Sequence[str], memory_found: Memory = ()
    ) -> None:
        """Go on under a plan for other ranks than before."""
        self.decided = list(self.decisions)
        self.plan, self.controller, self.device_kinds = plan, controller, device_kinds
        self.memory_found = memory_found
        self.absent, self.regroup_due, self.resuming = frozenset(), False, True
        self._pool_trial = PoolTrial()
        self._prefetched_for = (plan, self.absent)
        self.loader.keep(set())
        self._requested_through = self.committed

    def abandon_step(self) -> None:
        """Forget a step that raised an error: gradients, changed buffers and what its loader had given out."""
        self.in_hand = None
        if (gradients := self.gradients_in_use) is not None:
            gradients.begin()
        self.buffers.roll_back()
        self.stopwatch.forget()
        self.exposed.forget()
        self.jump_to(self.committed)

    def step_scheduler(self, loss: float) -> None:
        """One scheduler step for one committed step, or as many as the samples of other islands make it."""
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(loss)
        elif self.scheduler is not None:
            for _ in range(self.islands.scheduler_steps()):
                self.scheduler.step()

    def check_replicas(self, number: int) -> None:
        """Compare replicas by hash where the configuration says so."""
        every = self.config.check_replicas_every
        if every and number % every == 0:
            check_replicas(self.named_tensors(), self.group, self.device_kinds, number)

    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Parameters that are whole, and buffers, by name, in the same order on every rank."""
        whole = [] if self.sharding is not None and self.sharding.gathers else named_parameters(self.model)
        return [*whole, *named_buffers(self.model)]

    def warn(self, message: str) -> None:
        """Warn once a message, on rank 0."""
        if self.group.rank == 0:
            warnings.warn(message, UserWarning, stacklevel=4)

    def close(self) -> None:
        """Take hooks off the model, end loader workers and what watches this rank."""
        if self._gradients is not None:
            self._gradients.close()
        if self.sharding is not None:
            self.sharding.close()
        self.loader.close()
        self.vitals.close()
        self.contention.close()


@lru_cache(maxsize=4)
def _id_of(plan: Plan) -> str:
    return plan.id
