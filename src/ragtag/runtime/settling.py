"""From own sums to a result that all ranks hold: reduce, vote, and make good what an absent rank left undone.

The one idea: everything between own work and the parameters is in one object that does not care which thread drives
it: the training thread, or the stand-in for one that does not come back. Nothing in here touches a parameter.
"""

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from ragtag.comm.group import Work
from ragtag.control.absence import runs_of, share_out, units_of
from ragtag.control.ballot import Ballot, Outcome, pack, tally, unpack
from ragtag.core.errors import DisagreementError
from ragtag.core.ledger import Ledger, micro_batches
from ragtag.hub.worker_rules import digest
from ragtag.runtime.buffers import UnitBuffers
from ragtag.runtime.gradients import GradientSums
from ragtag.runtime.loss_sums import LossSums
from ragtag.runtime.non_finite import find_non_finite, reason_to_skip
from ragtag.runtime.out_of_memory import drop_own_sum, no_rank_can
from ragtag.runtime.run import Run
from ragtag.runtime.step_sums import StepSums
from ragtag.runtime.work import Units

log = logging.getLogger("ragtag")

Compute = Callable[[Iterable[Units]], None]
"""Adds micro-batches to the own sums."""


class Reduction(Protocol):
    """What one rank has to add, and the sum over ranks that comes of it."""

    @property
    def launched_too_early(self) -> bool:
        """Whether something was missing in what was started."""
        ...

    def launch_rest(self) -> None:
        """Start what has not been started."""
        ...

    def launch_again(self, *, overlap: bool) -> None:
        """Start all of it once more."""
        ...

    def wait(self) -> None:
        """Wait until the sum is complete (bounded by the group)."""
        ...

    def norm(self) -> torch.Tensor:
        """2-norm of the reduced sum of gradients."""
        ...

    def has_gradient(self) -> bytes:
        """One bit per parameter: did this rank see a gradient for it."""
        ...


class OwnSums:
    """What this rank has computed: gradients, and the changes of buffers."""

    def __init__(self, gradients: StepSums, buffers: UnitBuffers) -> None:
        self._gradients, self._buffers = gradients, buffers
        self.norm, self.has_gradient = gradients.norm, gradients.has_gradient

    @property
    def launched_too_early(self) -> bool:
        """Whether a gradient came after its bucket had left."""
        return self._gradients.launched_too_early

    def launch_rest(self) -> None:
        """Start what the hooks of the last backward have not started."""
        self._gradients.launch_rest()
        self._buffers.launch()

    def launch_again(self, *, overlap: bool) -> None:
        """Start all of it once more, from the own sums, which are still whole."""
        self._gradients.launch_again(overlap=overlap)
        self._buffers.launch()

    def wait(self) -> None:
        """Wait until the sum is complete."""
        self._gradients.wait()
        self._buffers.wait()


class NoSums:
    """What a rank adds that has computed nothing, in memory of its own: its buckets still hold an earlier step."""

    launched_too_early = False

    def __init__(self, run: Run, after: "Settling") -> None:
        gradients, buffers = after.replica_sums, run.buffers
        self._gradients, self._buffers, self._group = gradients, buffers, run.group
        self._flats = gradients.zeros()
        self._change = buffers.zeros()
        self._works: list[Work] = []

    def launch_rest(self) -> None:
        """Start it."""
        works = self._gradients.launch_flats(self._flats)
        self._works = [*works, *(self._group.all_reduce(change) for change in self._change)]

    def launch_again(self, *, overlap: bool) -> None:
        """Start it once more, from zeros."""
        for flat in (*self._flats, *self._change):
            flat.zero_()
        self.launch_rest()

    def wait(self) -> None:
        """Wait until the sum is complete."""
        for work in self._works:
            self._group.wait(work, "reducing gradients")

    def norm(self) -> torch.Tensor:
        """2-norm of the reduced sum of gradients."""
        if not self._flats:
            return torch.zeros(())
        return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(flat).double() for flat in self._flats]))

    def has_gradient(self) -> bytes:
        """No bit."""
        return bytes(len(self._gradients.has_gradient()))

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds."""
        return sum(flat.numel() * flat.element_size() for flat in (*self._flats, *self._change))

    def hand_over(self, gradients: StepSums) -> None:
        """Put the sum into `gradients`, where the training thread expects it; see `check`."""
        self.check(gradients)
        self._gradients.accept(self._flats)
        self._buffers.accept(self._change)

    def check(self, gradients: StepSums) -> None:
        """Make sure that the training thread's `gradients` are those that this was made for.

        Raises:
            DisagreementError: they are of other parameters; so this script froze others than those of the other ranks.
        """
        if gradients is not self._gradients:
            raise DisagreementError(
                f"rank {self._group.rank} ({self._group.hosts[self._group.rank]}) trains other parameters than the "
                f"ranks that went on while it was stalled. Freeze parameters after the same step on every rank."
            )


class Settling:
    """One step from own sums to what all ranks agree on.

    Args:
        run: this rank.
        number: the step.
        after: the step before, if this rank computes nothing in this one and has not even applied that one.
    """

    def __init__(self, run: Run, number: int, *, after: "Settling | None" = None) -> None:
        self.started_s = time.perf_counter()
        self.run, self.number, self.away = run, number, after is not None
        self.plan_id, self.loss_factor = run.plan_id, run.loss_factor
        self.ledger: Ledger = run.ledger_of(number)
        self.num_rounds = _num_rounds(self.ledger, run)
        """Micro-batches of the rank that has most of them: where gradients are everybody's, all take part in each."""
        self.losses = LossSums(run.nature.metric_names, run.device)
        self.data_s = self.redo_s = self._compute_s = self._exposed_s = 0.0
        self._host_s = self._link_host_s = self._link_s = 0.0
        self._faults = self._sent_bytes = 0
        self.lr = math.nan
        self.predicted_s = 0.0
        """See `StepReport`."""
        self.outcome: Outcome | None = None
        """What all ranks do with the step; None: not agreed yet."""
        self.adding = False
        """A micro-batch is on its way into the own sums: they are not whole."""
        self.fits: int | None = None
        """See `Ballot`."""
        self.failure = ""
        """What did not fit into this rank's memory."""
        self.spoilt = False
        """What was launched is not what the own sums hold now."""
        self.ballots: list[Ballot] = []
        self.skipped = ""
        self._gradients = run.gradients() if after is None else after._gradients
        self.sums: Reduction = self._own_sums() if after is None else NoSums(run, after)
        self._attempt = 0
        self._launched = False
        self._lost: tuple[Units, ...] = ()
        """By rank, the units that it is to compute because others have not; empty: none are lost."""
        self._in_person = True
        self._rank = run.group.rank
        self._non_finite = ("", 0)
        """Why the step is skipped, if it is, and the rank to blame."""
        self._held: Outcome | None = None
        """What all ranks will do with the step once everybody has voted."""
        self.held_digest = ""
        run.in_hand = self

    @property
    def replica_sums(self) -> GradientSums:
        """Its sums of gradients, which are whole."""
        assert isinstance(self._gradients, GradientSums), "only whole replicas have a stand-in"
        return self._gradients

    @property
    def regroups(self) -> bool:
        """Whether all ranks leave their generation once they have applied this step."""
        return any(ballot.regroup for ballot in self.ballots)

    def come_back(self) -> None:
        """The training thread goes on here, all earlier steps applied; what it will compute needs sums of its own."""
        if isinstance(self.sums, NoSums):
            self.sums.check(self.run.gradients())
            self.away, self.sums = False, self._own_sums()

    def _own_sums(self) -> OwnSums:
        self._gradients.begin()
        self.run.buffers.begin()
        return OwnSums(self._gradients, self.run.buffers)

    def settle(self, compute: Compute | None) -> bool:
        """Reduce and vote until every unit is in one sum, and return True.

        Args:
            compute: does work that absent ranks left; None: a stand-in calls, who cannot. If it should have to, because
                every rank was stood in for, it returns False, and the training thread goes on here.

        Raises:
            RagtagError: what votes show: disagreement, ten non-finite steps in a row; PeerFailed, PeerLost.
        """
        group, self._in_person = self.run.group, compute is not None
        while self.outcome is None:
            if self._lost:
                mine = self._lost[group.rank]
                if mine and compute is None:
                    return False
                if mine and compute is not None:
                    compute(micro_batches(self.ledger, mine, self.run.plan.micro_batch[group.rank]))
                self._lost = ()
                self._launch(overlap=True)
            if not self._launched:
                self._launch(overlap=True)
            outcome = self._reduce_and_vote(in_person=compute is not None)
            if self.run.in_rounds and (outcome.incomplete or outcome.spoilt or outcome.reduce_again):
                assert compute is not None, "nobody stands in where gradients are everybody's"
                self._do_all_again(outcome, compute)
            elif outcome.incomplete:
                self._lost = self._share_out_lost(outcome)
            elif outcome.reduce_again:
                log.info(
                    "step %d: a gradient came after its bucket had left; reducing again, from now on after backward",
                    self.number,
                )
                self._launch(overlap=False)
            elif outcome.spoilt:
                self._launch(overlap=True)
            else:
                self._look_for_non_finite(outcome)
                self._vote(outcome)
                self.accept_held()
            self._attempt += 1
        return True

    def _do_all_again(self, outcome: Outcome, compute: Compute) -> None:
        """Where sums are everybody's, what one rank could not add spoils all of them."""
        run = self.run
        if outcome.unable == frozenset(range(run.group.world_size)):
            raise no_rank_can(self)
        if outcome.reduce_again:
            log.info("step %d: a gradient came after its block's had left; from now on they leave later", self.number)
        run.keep_to_memory(self.ballots)
        self.fits, self.spoilt, self.adding = None, False, False
        self.ledger, self.plan_id = run.ledger_of(self.number), run.plan_id
        self.num_rounds = _num_rounds(self.ledger, run)
        self.losses = LossSums(run.nature.metric_names, run.device)
        run.buffers.drop()
        self._gradients.launch_again(overlap=not outcome.reduce_again)
        self._launched = False
        compute(run.work_of(self.ledger))

    def _look_for_non_finite(self, outcome: Outcome) -> None:
        """Before the vote: who holds the step can do all that follows without asking anybody."""
        if outcome.finite or self.run.loss_scale.backs_off:
            return
        gradients = None if self.away else self._gradients
        self._non_finite = find_non_finite(self.run, self.number, self.ledger, self.losses, gradients)

    def _vote(self, outcome: Outcome) -> None:
        """Hold the step; where ranks come and go, return only when everybody holds it."""
        group, number = self.run.group, self.number
        self._held = outcome
        if not group.elastic:
            return  # whoever is lost now ends the run
        self.held_digest = digest(
            self.run.generation, number, self.ledger.expected_hash, outcome.weight, not outcome.finite
        )
        votes = group.exchange(self.held_digest.encode(), "voting")
        if len(set(votes)) > 1:
            raise DisagreementError(f"the ranks hold different results of step {number}; it was not applied.")

    def accept_held(self) -> None:
        """Everybody holds the step, or somebody has applied it: so does this rank."""
        assert self._held is not None, "only what is held can be applied"
        self._conclude(self._held)
        self.outcome = self._held

    def void(self) -> None:
        """What was held is void: nobody has applied it, and the step is done again."""
        self._held, self.held_digest = None, ""

    def resume(self) -> None:
        """Go on in a new generation: what was held is void, own sums stay, and what is in nobody's is shared out."""
        run, group, number = self.run, self.run.group, self.number
        if self.adding:  # the end of the last generation broke a backward off
            drop_own_sum(self, self._rank)
        mine = () if self.away else self.ledger.contents(self._rank)
        self.come_back()
        self._gradients.renew()
        run.buffers.renew()
        self.void()
        self._attempt, self._launched, self.spoilt = 0, False, False
        # This generation may end here too: until all have answered, the old ledger says what the own sum holds.
        held = group.gather(f"sums of step {number}", runs_of(mine))
        self.ledger, self._rank, self.plan_id = run.ledger_of(number), group.rank, run.plan_id
        if group.rank in self.ledger.settle([units_of(runs) for runs in held]):
            self._gradients.begin()
            run.buffers.begin()
            self.losses = LossSums(run.nature.metric_names, run.device)
        self._lost = self._deal_out(frozenset())

    def _launch(self, *, overlap: bool) -> None:
        if self._in_person:  # a stand-in leaves what the training thread was last heard doing
            self.run.group.note(self.number, "reducing gradients")
        if self._launched:
            self.sums.launch_again(overlap=overlap)
            self.spoilt = False
        else:
            self.sums.launch_rest()
        self._launched = True

    def _reduce_and_vote(self, *, in_person: bool) -> Outcome:
        run, sums, ledger, rank = self.run, self.sums, self.ledger, self.run.group.rank
        began_s = time.perf_counter()
        if in_person:
            run.contention.end_work()
            run.exposed.start()
        sums.wait()
        if in_person:
            run.exposed.stop()
        # The step's one synchronisation.
        (total, weight, *metrics), (norm, lr) = self.losses.numbers(sums.norm(), run.lr)
        self.lr = lr
        if in_person:
            self._compute_s += run.stopwatch.take()
            self._exposed_s += run.exposed.take()
        else:
            self._exposed_s += time.perf_counter() - began_s
        self._measure_surroundings(in_person=in_person)
        vitals = run.vitals.latest
        ballot = Ballot(
            step=self.number,
            plan_hash=int(self.plan_id, 16),
            attempt=self._attempt,
            launched_too_early=sums.launched_too_early,
            absent=not in_person,
            spoilt=self.spoilt,
            fits=self.fits,
            regroup=run.wants_regroup,
            save=run.boundary.is_due(self.number),
            outer=run.islands.asks(self.number),
            stop=run.boundary.stop,
            contents_hash=ledger.contents_hash(rank),
            samples=ledger.summed_samples(rank),
            weight=weight,
            loss_total=total,
            norm=norm,
            compute_s=self._compute_s if in_person else 0.0,
            exposed_s=self._exposed_s,
            data_s=self.data_s,
            apply_s=run.apply_s,
            add_s=self._gradients.ring_cost.add_s if in_person else 0.0,
            send_s=self._gradients.ring_cost.send_s if in_person else 0.0,
            redo_s=self.redo_s,
            host_s=self._host_s,
            link_host_s=self._link_host_s,
            link_s=self._link_s,
            faults=self._faults,
            sent_bytes=self._sent_bytes,
            memory_bytes=vitals.memory_bytes,
            peak_memory_bytes=vitals.peak_memory_bytes,
            temperature_c=vitals.temperature_c,
            clock_mhz=vitals.clock_mhz,
            busy=vitals.busy,
            metrics=tuple(metrics),
            has_gradient=sums.has_gradient(),
        )
        self.ballots = [unpack(data, num_metrics=len(metrics)) for data in run.group.exchange(pack(ballot))]
        return tally(
            self.ballots, expected_hash=ledger.expected_hash, sliced=run.sharding is not None, in_rounds=run.in_rounds
        )

    def _measure_surroundings(self, *, in_person: bool) -> None:
        run = self.run
        if in_person:
            host_s, link_host_s = run.contention.take()
            self._host_s += host_s
            self._link_host_s += link_host_s
        self._link_s += run.group.take_link_s()
        self._sent_bytes += run.group.take_sent_bytes()
        self._faults += run.contention.take_faults()

    def _share_out_lost(self, outcome: Outcome) -> tuple[Units, ...]:
        """Ask every rank what its sum holds, and give the rest to those who are here, by the same rule on all ranks."""
        run, ledger, everybody = self.run, self.ledger, frozenset(range(self.run.group.world_size))
        if outcome.unable == everybody:
            raise no_rank_can(self)
        held = run.group.gather(f"sums of step {self.number}", runs_of(ledger.contents(run.group.rank)))
        if ledger.settle([units_of(runs) for runs in held]):
            raise DisagreementError(f"two ranks have computed the same samples of step {self.number}.")
        left_out = outcome.absent | outcome.unable
        lost = self._deal_out(left_out if left_out != everybody else outcome.unable)
        present = sorted(everybody - outcome.absent)
        if outcome.absent and run.group.rank == min(present, default=0):
            names = ", ".join(f"rank {rank} ({run.group.hosts[rank]})" for rank in sorted(outcome.absent))
            samples = sum(stop - start for start, stop in map(ledger.span, itertools.chain(*lost)))
            log.warning(
                "step %d: %s has not come back from reading data or from the model's forward; the others compute its "
                "%d samples",
                self.number,
                names,
                samples,
            )
        return lost

    def _deal_out(self, left_out: frozenset[int]) -> tuple[Units, ...]:
        """Give the units that are in no sum to ranks that are not left out, by the same rule on all; return whose."""
        lost = share_out(self.ledger.missing(), self.run.plan, left_out)
        for rank, units in enumerate(lost):
            for unit in units:
                self.ledger.assign(unit, rank)
        return lost

    def _conclude(self, outcome: Outcome) -> None:
        """What follows from the votes alone, on every rank alike."""
        run = self.run
        self.skipped = reason_to_skip(run, self.number, outcome, self._non_finite)
        run.absent = outcome.absent
        run.num_settled += 1
        self.predicted_s = 0.0 if run.controller is None else run.controller.predicted_step_s
        run.follow_speeds(self.ballots)
        run.keep_to_memory(self.ballots)


def _num_rounds(ledger: Ledger, run: Run) -> int:
    sizes = [1 if run.by_unit else size for size in run.plan.micro_batch]
    return max(len(micro_batches(ledger, ledger.todo(rank), size)) for rank, size in enumerate(sizes))
