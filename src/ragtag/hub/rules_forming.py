"""How one generation follows another: who is asked, when all have answered, and the GO that is written down first.

The one idea: `go_on` is called after every event and looks only at what the hub knows now, so it does not matter in
which order failures, newcomers and answers came.
"""

from typing import Literal

from msgspec.structs import replace

from ragtag.hub.frames import Go, Prep
from ragtag.hub.rules_decision import Drifted, decide
from ragtag.hub.rules_state import GENERATIONS_PER_EPOCH, GoRecord, Preparing, Worker
from ragtag.hub.rules_turn import Turn

_CHANCE = 0.5
"""Multiples of the patience for which a last chance lasts once the first member with the state has come."""
_PATIENT = 10
"""Multiples of the patience that a first generation waits for workers that their machine has announced."""
FRUITLESS_LIMIT = 10
"""So many generations in a row that fail before a step is applied, and the run ends."""


def go_on(turn: Turn) -> None:
    """Do what follows from what is known: end, announce a generation, or begin it."""
    # Each round changes what the next one looks at; more rounds than these would be a bug.
    for _ in range(2 * len(turn.state.workers) + 8):
        if turn.state.end is not None or not (_announce(turn) or _complete(turn)):
            return
    raise AssertionError(f"the rules go round in circles: {turn.state}")


def announce(turn: Turn, reason: str, *, soft: bool = False, after_failure: bool = False) -> None:
    """Announce the next generation to its members, and to those of the last that are not asked."""
    state = turn.state
    old = state.preparing
    last_chance = old is not None and old.last_chance
    asked = [inc for inc in state.members if trusted(turn, inc)]
    if not asked and state.started:
        if last_chance:
            _no_veteran(turn)
            return
        asked = _take_back(turn)
        last_chance = True
        if not asked:
            _no_veteran(turn)
            return
    if state.counter + 1 >= GENERATIONS_PER_EPOCH:
        turn.end(f"{state.counter} generations since the hub was started: more than it can number")
        return
    newcomers = [worker.inc for worker in _newcomers(turn)]
    keeps_time = old is not None and old.last_chance and last_chance
    preparing = Preparing(
        generation=state.generation + 1,
        members=(*asked, *newcomers),
        soft=soft,
        told=not soft,
        reason=reason,
        since_s=old.since_s if keeps_time and old is not None else turn.now_s,
        last_chance=last_chance,
        came_s=old.came_s if keeps_time and old is not None else None,
        after_failure=after_failure or (old is not None and old.after_failure),
    )
    turn.set(preparing=preparing, counter=state.counter + 1)
    turn.log(f"generation {preparing.generation} is prepared{' at the next step' if soft else ''}: {reason}", "debug")
    for inc in newcomers if soft else (*newcomers, *state.members):
        turn.send(inc, prep(preparing))


def prep(preparing: Preparing) -> Prep:
    """The frame that announces this generation."""
    return Prep(
        generation=preparing.generation, members=preparing.members, soft=preparing.soft, reason=preparing.reason
    )


def trusted(turn: Turn, inc: str) -> bool:
    """Whether this worker is counted on."""
    worker = turn.state.worker(inc)
    return worker is not None and not worker.left and not worker.suspicion


def _newcomers(turn: Turn) -> list[Worker]:
    """Connected workers outside the last generation that are not on their way out."""
    state = turn.state
    inside = set(state.members)
    return [
        worker
        for worker in state.workers
        if worker.inc not in inside and worker.connected and not (worker.left or worker.suspicion or worker.left_out)
    ]


def _announce(turn: Turn) -> bool:
    """Announce a generation if one is needed; return whether anything was done."""
    state = turn.state
    preparing = state.preparing
    members = [worker for worker in map(state.worker, state.members) if worker is not None]
    if members and all(worker.left for worker in members):
        turn.end("every worker's script has ended", failed=False)
        return True
    asked = state.members if preparing is None else [inc for inc in preparing.members if inc in state.members]
    missed = [turn.worker(inc) for inc in asked if not trusted(turn, inc)]
    if not state.started and not any(trusted(turn, inc) for inc in state.members):
        return _form_first(turn, stale=bool(missed))
    if missed and all(worker.left for worker in missed):
        if preparing is None:
            missed = []  # the others end as well, or find out that they need a new generation
        elif preparing.soft:
            left = {worker.inc for worker in missed}
            turn.set(preparing=replace(preparing, members=tuple(x for x in preparing.members if x not in left)))
            return True
    if missed:
        announce(turn, _why_gone(missed))
        return True
    if preparing is not None:
        return _drop_newcomers(turn, preparing) or _tell(turn, preparing)
    newcomers = _newcomers(turn)
    if newcomers:
        announce(turn, f"{_titles(newcomers)} {'joins' if len(newcomers) == 1 else 'join'}", soft=True)
        return True
    return False


def _form_first(turn: Turn, *, stale: bool) -> bool:
    """Nobody has state, and nobody is left of an earlier attempt, if there was one."""
    preparing = turn.state.preparing
    if preparing is not None and not stale:
        return _drop_newcomers(turn, preparing)
    if _all_have_come(turn):
        announce(turn, "the first generation")
        return True
    turn.set(preparing=None)
    return preparing is not None


def _drop_newcomers(turn: Turn, preparing: Preparing) -> bool:
    """Newcomers that have gone are not waited for, and nobody need be told."""
    kept = tuple(inc for inc in preparing.members if inc in turn.state.members or _here(turn, inc))
    needless = preparing.soft and not preparing.told and all(inc in turn.state.members for inc in kept)
    if kept == preparing.members and not needless:
        return False
    joins = tuple(join for join in preparing.joins if join.inc in kept)
    turn.set(preparing=replace(preparing, members=kept, joins=joins) if kept and not needless else None)
    return True


def _here(turn: Turn, inc: str) -> bool:
    worker = turn.state.worker(inc)
    return worker is not None and worker.connected and not worker.left and not worker.suspicion


def _tell(turn: Turn, preparing: Preparing) -> bool:
    """Interrupt the members for a soft generation only once its newcomers have shown that they answer."""
    if preparing.told or not _answered(preparing, [inc for inc in preparing.members if inc not in turn.state.members]):
        return False
    turn.set(preparing=replace(preparing, told=True, since_s=turn.now_s))
    for inc in turn.state.members:
        turn.send(inc, prep(preparing))
    return True


def _answered(preparing: Preparing, incs: list[str]) -> bool:
    return {join.inc for join in preparing.joins}.issuperset(incs)


def _all_have_come(turn: Turn) -> bool:
    """Whether every machine that has announced itself has all its workers here, or has been waited for long enough."""
    here = _newcomers(turn)
    if not here:
        return False
    expected: dict[tuple[str, str], int] = {}
    for worker in here:
        machine = (worker.member.host, worker.member.boot_id)
        expected[machine] = max(expected.get(machine, 0), worker.expected)
    missing = sum(expected.values()) - len(here)
    if missing <= 0:
        return True
    if turn.now_s - turn.state.arrived_s < _PATIENT * turn.state.settings.patience_s:
        return False
    turn.log(f"the first generation begins without {missing} of the workers that their machines announced", "warning")
    return True


def _complete(turn: Turn) -> bool:
    """Begin the generation if all that it needs have answered; return whether anything was done."""
    state = turn.state
    preparing = state.preparing
    if preparing is None:
        return False
    old = [inc for inc in preparing.members if inc in state.members]
    if preparing.last_chance and preparing.came_s is not None and not _answered(preparing, old):
        over = turn.now_s - preparing.came_s >= _CHANCE * state.settings.patience_s
        here = any(join.has_state and join.inc in old for join in preparing.joins)
        return over and here and _chance_is_over(turn, preparing, old)
    waited_for = old if state.started else list(preparing.members)
    if not preparing.told or not _answered(preparing, waited_for):
        return False
    joins = {join.inc: join for join in preparing.joins}
    decision = decide(state.members, joins)
    if decision is None:
        if state.started:
            _without_veteran(turn, preparing)
        else:
            _begin(turn, preparing, (), list(joins), 0, "start")
        return True
    if isinstance(decision, Drifted):
        turn.end(
            f"{turn.worker(decision.first).title} and {turn.worker(decision.second).title} applied different gradients "
            f"for step {decision.step}: replicas have drifted apart. Start again from the last checkpoint"
            f"{f', {state.checkpoint}' if state.checkpoint else ''}."
        )
        return True
    new = [inc for inc in joins if inc not in decision.veterans] if decision.newcomers_fit else []
    _begin(turn, preparing, decision.veterans, new, decision.base, decision.action)
    return True


def _chance_is_over(turn: Turn, preparing: Preparing, old: list[str]) -> bool:
    """Somebody with the state has come, and time has passed: those that are still not here are given up again."""
    turn.set(preparing=replace(preparing, last_chance=False))
    for inc in old:
        if not turn.worker(inc).connected:
            turn.suspect(inc, f"{turn.worker(inc).title} has not come back to the hub")
    return True


def _begin(
    turn: Turn,
    preparing: Preparing,
    veterans: tuple[str, ...],
    new: list[str],
    base: int,
    action: Literal["start", "apply", "redo"],
) -> None:
    state = turn.state
    last = state.go
    order = [worker.inc for worker in state.workers]
    machines: list[tuple[str, str]] = []
    for worker in state.workers:
        if (worker.member.host, worker.member.boot_id) not in machines:
            machines.append((worker.member.host, worker.member.boot_id))
    members = [turn.worker(inc).member for inc in (*veterans, *new)]
    newcomers = sorted(
        members[len(veterans) :],
        key=lambda each: (machines.index((each.host, each.boot_id)), each.local_rank, order.index(each.inc)),
    )
    go = Go(
        generation=preparing.generation,
        members=(*members[: len(veterans)], *newcomers),
        num_veterans=len(veterans),
        base=base,
        action=action,
        reason=preparing.reason,
    )
    inside = {member.inc for member in go.members}
    in_vain = last is not None and last.base == base and inside.issuperset(state.members)
    # Newcomers with which generations fail are dropped (`quarrel`), and never end a run.
    counted = last is not None and last.num_veterans in (0, len(last.members))
    fruitless = state.fruitless + counted if preparing.after_failure and in_vain else 0
    if fruitless >= FRUITLESS_LIMIT:
        turn.end(f"{fruitless} generations in a row failed before step {base + 1} was applied. The last: {go.reason}")
        return
    turn.journal(GoRecord(go=go))
    left_out = [inc for inc in state.members if inc not in inside]
    turn.log(_news(turn, go, preparing))
    turn.set(
        go=go,
        started=state.started or bool(veterans),
        ready=(),
        preparing=None,
        fruitless=fruitless,
        quarrels=tuple(each for each in state.quarrels if inside.issuperset(filter(None, each.pair))),
        workers=tuple(
            replace(worker, left_out=worker.left_out or worker.inc in left_out)
            for worker in state.workers
            if worker.inc in inside or worker.connected
        ),
    )
    who = ", ".join(f"{member.name} ({member.host})" for member in go.members)
    turn.log(f"generation {go.generation} begins with {who}: {go.action}, base {go.base}; {go.reason}", "debug")
    for inc in (*(member.inc for member in go.members), *left_out):
        turn.send(inc, go)


def _news(turn: Turn, go: Go, preparing: Preparing) -> str:
    """One line for people: who trains now, and what is not said already in the suspicions that went before."""
    state = turn.state
    hosts = [member.host for member in go.members]
    per_host = ", ".join(f"{host} {hosts.count(host)}" for host in dict.fromkeys(hosts))
    inside = {member.inc for member in go.members}
    gone = [worker for worker in map(state.worker, state.members) if worker is not None and worker.inc not in inside]
    left = [worker for worker in gone if worker.left]
    joined = [turn.worker(each.inc) for each in go.members if each.inc not in state.members and state.go is not None]
    news = [
        f"{_titles(workers)} {'has' if len(workers) == 1 else 'have'} {what}"
        for workers, what in ((left, "left"), (joined, "joined"))
        if workers
    ]
    if preparing.after_failure and not gone:
        news.append(go.reason)
    number = f"{go.generation // GENERATIONS_PER_EPOCH}.{go.generation % GENERATIONS_PER_EPOCH}"
    workers = f"{len(hosts)} worker{'s'[: len(hosts) > 1]} ({per_host})"
    return "; ".join([f"generation {number}, from step {go.base + 1}: {workers}", *news])


def _without_veteran(turn: Turn, preparing: Preparing) -> None:
    """All have answered and none of them holds the state: suspected members are the last chance."""
    if not preparing.last_chance and _take_back(turn):
        turn.set(preparing=replace(preparing, last_chance=True, since_s=turn.now_s))
        announce(turn, "nobody who has answered holds the run's state; suspected members are waited for")
        return
    _no_veteran(turn)


def _take_back(turn: Turn) -> list[str]:
    """Trust all members of the last generation again that have not left; return those there are."""
    back = [inc for inc in turn.state.members if _left(turn, inc) is False]
    for inc in back:
        if turn.worker(inc).suspicion:
            turn.set_worker(inc, suspicion="")
    return back


def _left(turn: Turn, inc: str) -> bool | None:
    worker = turn.state.worker(inc)
    return None if worker is None else worker.left


def _no_veteran(turn: Turn) -> None:
    state = turn.state
    lost = [worker for worker in map(state.worker, state.members) if worker is not None and not worker.left]
    said = "; ".join(worker.suspicion for worker in lost if worker.suspicion)
    turn.end(
        f"no worker that holds the run's state is left, and none came back within {state.settings.patience_s:g} s"
        f"{f': {said}' if said else ''}. Start the run again; it continues from its last checkpoint"
        f"{f', {state.checkpoint} (step {state.checkpoint_step})' if state.checkpoint else ', if it has one'}.",
        origin=lost[0].member.name if lost else "",
    )


def _why_gone(missed: list[Worker]) -> str:
    said = [worker.suspicion or f"{worker.title} has ended its script" for worker in missed]
    return "; ".join(said) or "a member is gone"


def _titles(workers: list[Worker]) -> str:
    titles = [worker.title for worker in workers]
    return ", ".join(titles[:4]) + (f" and {len(titles) - 4} more" if len(titles) > 4 else "")
