"""`Trainer`: the whole public surface of training. It checks, connects and prepares; the step itself is in
`step.py`."""

import inspect
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch

from ragtag import __version__
from ragtag.checkpoint.directory import History
from ragtag.checkpoint.parts import Part
from ragtag.checkpoint.storage import split
from ragtag.comm import process_exit
from ragtag.comm.elastic import ElasticGroup
from ragtag.comm.generation import connect_elastic
from ragtag.comm.group import Group
from ragtag.comm.judge import described
from ragtag.comm.passing import GenerationEnded
from ragtag.comm.rendezvous import connect
from ragtag.comm.standing import Standing
from ragtag.control.membership import Brought
from ragtag.control.sharing import Start
from ragtag.core.config import (
    Config,
    micro_batches_from_environment,
    recompute_from_environment,
    shares_from_environment,
)
from ragtag.core.decision import Decision
from ragtag.core.errors import CheckpointError, PeerError, RagtagError, SettingError, did_you_mean
from ragtag.core.values import Plan, StepReport
from ragtag.emulate.environment import from_environment
from ragtag.runtime import checks, keeping, state
from ragtag.runtime import regroup as regrouping
from ragtag.runtime.evaluation import Evaluation, evaluate
from ragtag.runtime.evaluation_pieces import EvaluationPieces
from ragtag.runtime.islands import boundary as island_boundary
from ragtag.runtime.islands.entry import with_islands
from ragtag.runtime.loader import UnitLoader, check_dataset
from ragtag.runtime.measure import measure, wanted_profile
from ragtag.runtime.out_of_memory import memory_explained
from ragtag.runtime.prepare import prepare
from ragtag.runtime.recorder import recorder
from ragtag.runtime.resuming import read_file
from ragtag.runtime.run import Run
from ragtag.runtime.script import ScriptPosition
from ragtag.runtime.stand_in import Cover, NoCover, StandIn
from ragtag.runtime.step import run_step
from ragtag.runtime.stop_signals import Stopped
from ragtag.runtime.zero.moving import hand_over

log = logging.getLogger("ragtag")
T = TypeVar("T")

_LESS_MEMORY = "Make the model or its samples smaller, end what else uses this device, or start without it."
_KEPT_LOADERS = 4  # a script that makes a new dataset for each evaluation must not gather worker processes


class Trainer:
    """Trains one model over unequal ranks, with the gradient one big device would give.

    Args:
        model: a bare `torch.nn.Module`; it is moved to this rank's device, and takes rank 0's values.
        optimizer: a `torch.optim.Optimizer` over the model's parameters, or a callable from parameters to one.
        loss_fn: called with (model, batch); returns the mean over the batch's samples (a scalar tensor), or
            `ragtag.Loss(total, count)` for any other weighting, such as by tokens.
        dataset: map-style (`__len__` and `__getitem__`), whole on every rank.
        global_batch_size: samples of one optimizer step, over all ranks, whatever the cluster does.
        shares: samples of a full batch for each rank, to pin the split; default: chosen (or RAGTAG_SHARES).
        seed: of the sample order, of `dataset[i]`'s and of the units' random numbers.
        shuffle: a new permutation of the dataset every epoch; else its own order.
        precision: "fp32" (as the model is), "bf16" or "fp16" (autocast; fp16 with one dynamic loss scale for all
        ranks). clip_norm: largest 2-norm of the whole gradient, applied after the reduction. scheduler: a
        learning-rate scheduler, or a callable from the optimizer to one; stepped once a committed step. loader:
        DataLoader words: num_workers, collate_fn, pin_memory, worker_init_fn, multiprocessing_context, prefetch.
        state: further objects with `state_dict` and `load_state_dict` (an EMA) that are saved and sent along. config:
        everything else; see `ragtag.Config`.

    Raises:
        RagtagError: a subclass that says what is wrong, where, and what to type next. The same on every rank.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer],
        loss_fn: Callable[[torch.nn.Module, Any], Any],
        dataset: Any,
        *,
        global_batch_size: int,
        shares: Sequence[int] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        precision: str = "fp32",
        clip_norm: float | None = None,
        scheduler: Any | None = None,
        loader: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
        config: Config | None = None,
        **misspelt: Any,
    ) -> None:
        self._script = ScriptPosition()
        self._eval_loaders: dict[int, tuple[Any, UnitLoader]] = {}
        self._eval_pieces = EvaluationPieces()
        config = Config() if config is None else config
        patience_s = config.patience_s if isinstance(config, Config) else Config().patience_s
        emulator = from_environment(os.environ, int(os.environ.get("RANK", "0")))
        if os.environ.get("RAGTAG_HUB"):
            self._group: Group = connect_elastic(patience_s, __version__, links=emulator)
        elif emulator:
            self._group = connect(patience_s, wrap=emulator.limit_transport, delay_s=emulator.message_delay_s)
        else:
            self._group = connect(patience_s)
        with self._failure_reaches_all("setting up the trainer"):
            if misspelt:
                raise SettingError(_unknown_argument(next(iter(misspelt))))
            if not isinstance(config, Config):
                raise SettingError(f"config is a {type(config).__name__}; expected ragtag.Config(...).")
            prepared = partial(
                with_islands,
                prepare,
                self._group,
                model=model,
                optimizer=optimizer,
                loss_fn=loss_fn,
                dataset=dataset,
                global_batch_size=global_batch_size,
                shares=shares_from_environment(os.environ) if shares is None else shares,
                start=Start(
                    shares=shares_from_environment(os.environ, "RAGTAG_START_SHARES"),
                    micro_batch=micro_batches_from_environment(os.environ),
                ),
                seed=seed,
                shuffle=shuffle,
                precision=precision,
                clip_norm=clip_norm,
                scheduler=scheduler,
                loader={} if loader is None else loader,
                state={} if state is None else state,
                config=config,
                emulator=emulator,
                profiled=wanted_profile(os.environ) is not None,
                recomputes=recompute_from_environment(os.environ, int(os.environ.get("RANK", "0"))),
            )
            self._run = self._joined(self._group, prepared) if isinstance(self._group, ElasticGroup) else prepared()
            wanted = wanted_profile(os.environ)
            if wanted is not None:
                measure(self._run, wanted, emulator=emulator)
        if wanted is not None:
            self._run.close()
            self._group.close()
            raise SystemExit(0)

        if not isinstance(self._group, ElasticGroup):
            with self._failure_reaches_all("looking for checkpoints"):
                keeping.begin(self._run, self._script)
        self._keeper = keeping.keeper(self._run, self._script)
        self._run.boundary.save_agreed = self._run.save_first
        self._cover = self._make_cover()
        self._run.recorder = recorder(config, self._group, () if emulator is None else emulator.devices)
        self._run.recorder.began(self._run, sys.argv[0])

    def _joined(self, group: ElasticGroup, prepared: Callable[[], Run]) -> Run:
        """Take part in a generation, as one of the first, or with what the others have done so far."""
        run: Run | None = None
        mine: Brought | None = None
        go = group.regroup(Standing())
        while True:
            began: Run | None = None
            try:
                if run is None or mine is None:
                    began = prepared()
                    if group.is_newcomer:
                        tree = regrouping.join(began, group)
                        self._script.join(tree["script"], committed=tree["committed"])
                    else:
                        keeping.begin(began, self._script)
                        began.num_applied = began.committed
                        # What goes with a rank that is lost, must be somewhere from the beginning.
                        began.save_first = began.sharding is not None and began.history is not None
                    run = began
                else:
                    regrouping.enter(run, go, self._script.state_dict(), mine)
                mine = regrouping.own(run, group.rank)
                group.applied(run.num_applied, run.applied_digest)  # those that others have done
                group.ready()
                return run
            except GenerationEnded:
                if began is not None and run is None:
                    began.close()  # what it has started, such as workers that read data
                go = group.regroup(Standing() if run is None else regrouping.standing(run))

    def _across_generations(self, call: Callable[[], T], in_call: str = "") -> T:
        """What `call` returns, begun again whenever ranks were lost meanwhile."""
        while True:
            try:
                return call()
            except GenerationEnded:
                self._regroup(in_call)

    def _with_all(self, call: Callable[[], str], in_call: str) -> str:
        """What `call`, which all ranks make together, returns on each; where ranks were lost after some had finished
        it, the others take over what it gave them."""
        run = self._run
        while True:
            try:
                answer = call()
                break
            except GenerationEnded:
                self._regroup(in_call)
                if run.missed_answer is not None:
                    answer, run.missed_answer = run.missed_answer, None
                    break
        run.calls, run.answer = run.calls + 1, answer
        return answer

    def _regroup(self, in_call: str = "", *, agreed: bool = False) -> None:
        self._cover.withdraw()
        self._cover.close()
        regrouping.regroup(self._run, self._script.state_dict(), in_call=in_call, agreed=agreed)
        self._cover = self._make_cover()

    def _make_cover(self) -> Cover:
        run = self._run
        covered = run.controller is not None and run.config.cover_stalls and not run.in_rounds
        return StandIn(self._run) if covered else NoCover()

    @property
    def plan(self) -> Plan:
        """How work is shared out now, and why."""
        return self._run.plan

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The newest 200 changes of plan, oldest first, each with its reason, what it promised and what it achieved."""
        return self._run.decisions

    @property
    def rank(self) -> int:
        """This process's rank, 0 for a single process."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """How many ranks train together."""
        return self._group.world_size

    @property
    def device(self) -> torch.device:
        """This rank's device, where model and batches are."""
        return self._run.device

    def steps(self, n: int) -> Iterator[StepReport]:
        """Train, yielding the next `n` committed steps, with parameters already updated at each yield.

        Epochs roll over. Skipped steps are counted and yielded with `skipped` set. The k-th call covers a fixed range
        of step numbers: after `load`, ranges already committed yield nothing. A loop that is still open when the next
        one starts has ended.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise SettingError(f"steps({n!r}): expected a whole number of steps, at least 0.")
        return self._steps(n)

    def _steps(self, n: int) -> Iterator[StepReport]:
        run, complete = self._run, False
        call, last = self._script.claim(n, committed=run.committed)
        try:
            with self._failure_reaches_all("joining the other islands"):
                island_boundary.begin(run, self._script, self._with_all, last)
            if run.committed < last:
                run.recorder.looped(run, last)
            # Asked anew each time: the loop's body may have loaded an older or a newer state.
            while self._script.is_open(call) and run.committed < last:
                self._between_steps()
                number = run.committed + 1
                try:
                    with self._failure_reaches_all(f"step {number}"):
                        if run.regroup_due:
                            self._regroup(agreed=True)
                        report = self._across_generations(lambda: run_step(run, run.committed + 1, self._cover))
                except BaseException:
                    # In this order: until the others know, a stand-in may be giving in the sums that are dropped here.
                    self._cover.withdraw()
                    run.abandon_step()
                    raise
                self._group.note(number, "the script's own code after this step")
                yield report
            if self._script.is_open(call):
                self._between_steps()
                with self._failure_reaches_all("the last round of all islands"):
                    island_boundary.end(run, self._script, self._with_all)
            complete = True
        finally:
            self._script.finish(call, committed=run.committed, complete=complete)

    def _between_steps(self) -> None:
        run = self._run
        with self._failure_reaches_all("exchanging with other islands"):
            island_boundary.between_steps(run, self._script, self._with_all)
        with self._failure_reaches_all("keeping a checkpoint"):
            if run.boundary.leavers:
                self._across_generations(self._hand_over, in_call="handing over")
            if run.sharding is None or run.history is None or not run.boundary.save_agreed:
                self._across_generations(self._keeper.at_boundary, in_call="saving")
                return
            self._with_all(self._save_together, "saving")
            if run.boundary.save_agreed:  # some had finished when others were lost, and have gone on
                run.boundary.saved()
                run.save_first = False

    def _save_together(self) -> str:
        self._keeper.at_boundary()
        return ""

    def _hand_over(self) -> None:
        leavers, self._run.boundary.leavers = self._run.boundary.leavers, ()
        if leavers:  # else a generation has ended meanwhile, and the next one has seen to it
            hand_over(self._run, leavers)

    def evaluate(self, dataset: Any, metric_fn: Callable[[torch.nn.Module, Any], Any]) -> Evaluation:
        """Mean of `metric_fn` over a whole dataset, in evaluation mode, equal on every rank and for any number of
        ranks.

        Args:
            dataset: map-style, whole on every rank.
            metric_fn: called with (model, batch), returns like `loss_fn`.

        Returns:
            A float with `metrics`, `samples` and `weight`. After a `load`, an evaluation that lies in the script's past
            returns what it returned then.
        """
        if (recorded := self._script.recorded()) is not None:
            return Evaluation.from_state(recorded)
        if self._script.catching_up:
            raise RagtagError(
                f"rank {self._group.rank} joined after step {self._run.committed} and is to evaluate what the others "
                f"have behind them, and the run has no record of it. Evaluate at the same places on every rank."
            )
        run = self._run
        with self._failure_reaches_all("evaluating"):
            checks.check_metric_fn(metric_fn)
            check_dataset(dataset)
            size = len(dataset)
            limits = (run.sampler.global_batch_size, run.config.micro_batch or 64, 64, size)

            def call() -> str:
                held = [most for most in run.memory_found if most]
                evaluation = evaluate(
                    run.model,
                    metric_fn,
                    self._eval_loader(dataset),
                    dataset_size=size,
                    run_size=min(*limits, *held),
                    plan=run.plan,
                    group=run.group,
                    device=run.device,
                    pace=run.pace,
                    precision=run.device_precision,
                    seed=run.seed,
                    name=f"evaluation after step {run.committed}",
                    memory=run.memory,
                    pieces=self._eval_pieces,
                    rounds=None if run.sharding is None or not run.sharding.gathers else run.sharding.rounds,
                    pipe=run.pipe,
                )
                return json.dumps(evaluation.to_state())

            value = json.loads(self._with_all(call, "evaluating"))
            done = Evaluation.from_state(value)
            run.recorder.evaluated(run.committed, float(done), done.metrics)
        self._script.record(value)
        return done

    def _eval_loader(self, dataset: Any) -> UnitLoader:
        """One loader a dataset, kept while it is among the last few, so that its worker processes start once."""
        kept = self._eval_loaders.pop(id(dataset), None) or (dataset, self._run.make_loader(dataset))
        self._eval_loaders[id(dataset)] = kept
        while len(self._eval_loaders) > _KEPT_LOADERS:
            _, loader = self._eval_loaders.pop(next(iter(self._eval_loaders)))
            loader.close()
        return kept[1]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything needed to continue to one safetensors file, atomically: a path, or a URL that fsspec knows.
        Call it on every rank; rank 0 writes.

        Raises:
            CheckpointError: on every rank, when rank 0 could not write; an older file is left intact, and training can
                go on.
        """
        if self._script.catching_up:
            return

        def write(tree: Any, parts: Iterable[Part]) -> None:
            storage, name = split(path)
            storage.save(name, tree, self._group.confirm, parts=parts)

        def call() -> None:
            state.save(self._run, self._script.state_dict(), write, waits="save")

        began_s = time.monotonic()
        with self._failure_reaches_all(f"saving {path}"):
            self._or_refused(call, "saving")
        self._run.recorder.saved(self._run.committed, str(path), time.monotonic() - began_s)

    def load(self, path: str | os.PathLike[str], *, replay: bool = True) -> None:
        """Continue from a file that `save` wrote, on any number of ranks; any one of them needs the file.

        Where several have one, the newest counts.

        Args:
            path: the file, or a URL that fsspec knows.
            replay: before the first `steps` call, take this script to be the one that saved, started again: ranges and
                evaluations that lie in its past are not done again. With False, the next `steps` goes on after the
                saved step.

        Raises:
            CheckpointError: on every rank, when the file is missing, damaged, or of another model or run; nothing was
                changed, and training can go on.
        """
        if self._script.catching_up:
            return
        tree: Any = None
        history: History | None = None

        def call() -> None:
            nonlocal tree, history
            (tree, parts), history = read_file(self._run, path), self._keeper.next_history()
            if self._run.sharding is not None:  # what is cut comes part by part, to all at once
                state.restore(self._run, tree, str(path), parts)
            if self._group.elastic:
                self._group.barrier("loading")  # from here on everybody has it, whoever is lost

        with self._failure_reaches_all(f"loading {path}"):
            self._or_refused(call, "loading")
            if self._run.sharding is None:
                state.restore(self._run, tree, str(path))
            self._script.load_state_dict(tree["script"], committed=tree["committed"], replay=replay)
            self._keeper.loaded(history)
        if self._group.rank == 0:
            log.info("loaded %s: %d steps are done", path, self._run.committed)

    def _or_refused(self, call: Callable[[], None], in_call: str) -> None:
        """Make `call` with all ranks; a CheckpointError that it raises on every rank is raised on every rank."""
        refusals: list[CheckpointError] = []

        def answered() -> str:
            try:
                call()
            except CheckpointError as error:
                if error.origin_rank is None:
                    raise
                refusals.append(error)
                return str(error)
            return ""

        if answer := self._with_all(answered, in_call):
            error = refusals[-1] if refusals else CheckpointError(answer)
            error.origin_rank = 0 if error.origin_rank is None else error.origin_rank
            raise error

    def close(self) -> None:
        """Leave the group and end loader workers; the process's end does it too."""
        self._keeper.close()
        self._cover.close()
        self._run.recorder.ended(self._run.committed, "")
        self._run.recorder.close()
        self._run.islands.close()
        self._run.close()
        for _, loader in self._eval_loaders.values():
            loader.close()
        if not self._group.close():
            process_exit.expect_stuck_thread()

    def __enter__(self) -> "Trainer":
        """Use as a context manager to close at its end."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Close; an error on its way out is told to the other ranks first."""
        if error is not None:
            self._run.recorder.ended(self._run.committed, described(error))
        if error is not None and not isinstance(error, Stopped):
            self._group.announce_failure(error, "the script's own code")
            process_exit.closing_with_error(self._group)
        self.close()

    @contextmanager
    def _failure_reaches_all(self, doing: str) -> Iterator[None]:
        try:
            device = self._run.device if hasattr(self, "_run") else None
            with memory_explained(self._group, device, f"what {doing} needs", _LESS_MEMORY):
                yield
        except BaseException as error:
            if isinstance(error, Stopped):
                pass  # all ranks end by themselves
            elif getattr(error, "origin_rank", None) is None:
                self._group.announce_failure(error, doing)
            elif not isinstance(error, PeerError) and not self._group.elastic:
                # All ranks raise this one by themselves. The first one to end its script must not do so, and tell,
                # while another is still waiting for what makes it raise the same.
                with suppress(RagtagError):
                    self._group.barrier("ending together")
            raise


def _unknown_argument(name: str) -> str:
    known = list(inspect.signature(Trainer).parameters)
    fields = [field.name for field in msgspec.structs.fields(Config)]
    if name in fields:
        return (
            f"Trainer has no argument '{name}'; it is a setting of Config: Trainer(..., "
            f"config=ragtag.Config({name}=...))."
        )
    return f"Trainer has no argument '{name}'.{did_you_mean(name, [*known, *fields])}"
