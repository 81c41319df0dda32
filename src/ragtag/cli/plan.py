"""`ragtag plan`: which way to train on this cluster is fastest, why, and what each device is worth.

The one idea: everything is decided by pure functions in `plan`; this file reads files, asks, and hands what it got to a
table, to JSON or to a plan file.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from ragtag.cli.launch import request as launch_request
from ragtag.cli.plan_match import check_devices, check_made_for
from ragtag.cli.plan_table import show
from ragtag.cli.profile import what_it_trains
from ragtag.cli.run_directory import LOG_NAME
from ragtag.core.cluster import Cluster, Device
from ragtag.core.cluster_file import load_cluster
from ragtag.core.errors import SettingError
from ragtag.core.profile import Profile, load_profile
from ragtag.core.quantities import parse_bytes
from ragtag.core.values import DocumentError
from ragtag.cost.problem import Mode, Problem, assemble, profile_from_speeds
from ragtag.plan.file import plan_file, save_plan
from ragtag.plan.loss_fall import loss_fall
from ragtag.plan.search import Choice, search
from ragtag.plan.verdict import Verdict, verdicts
from ragtag.plan.what_if import apply_edit
from ragtag.watch.events import Step
from ragtag.watch.reader import Decoder, read_lines


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The words of the command line."""

    target: Path
    arguments: tuple[str, ...] = ()
    profile: Path | None = None
    batch: int | None = None
    gradient: str | None = None
    what_if: tuple[str, ...] = ()
    emulate: Path | None = None
    mode: str = "auto"
    from_run: Path | None = None
    """Directory or event log of a run of this training, from which is read how its loss falls."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked and what came out."""

    problem: Problem
    choice: Choice
    verdicts: tuple[Verdict, ...]
    edits: tuple[str, ...] = ()
    before_samples_per_s: float | None = None
    """The best plan's rate without the edits; None: there are none."""


def run_plan(request: Request, *, output: Path | None, as_json: bool) -> None:
    """Answer `request` on standard output; write the plan to `output`.

    Raises:
        SettingError: a file, a word or an edit is wrong, or nothing fits.
    """
    cluster, profile = _read(request)
    check_devices(profile, request.profile, cluster, _cluster_file(request))
    found = answer(cluster, profile, request.what_if, mode=_mode(request.mode), fall=_loss_fall(request.from_run))
    if output is not None:
        save_plan(plan_file(found.problem, found.choice), output)
    if as_json:
        print(msgspec.json.encode(as_tree(found)).decode())
    else:
        show(found.problem, found.choice, found.verdicts, found.edits, found.before_samples_per_s, Console())
        if output is not None:
            at_each = ", at each site" if found.choice.best.has_outer_loop else ""
            print(f"\nplan written to {output}: ragtag launch --plan {output} train.py{at_each}")


def answer(
    cluster: Cluster, profile: Profile, edits: Sequence[str] = (), *, mode: Mode = "auto", fall: float | None = None
) -> Answer:
    """Return the choice for the cluster after `edits`, with verdicts on its devices."""

    def posed() -> Problem:
        problem = assemble(profile, cluster)
        return msgspec.structs.replace(problem, mode=mode, loss_fall=problem.loss_fall if fall is None else fall)

    before = None
    if edits:
        before = search(posed()).best.rate
        for edit in edits:
            cluster, profile = apply_edit(edit, cluster, profile)
    problem = posed()
    choice = search(problem)
    return Answer(
        problem=problem,
        choice=choice,
        verdicts=verdicts(problem, choice),
        edits=tuple(edits),
        before_samples_per_s=before,
    )


def as_tree(found: Answer) -> dict[str, Any]:
    """Return what `--json` prints: plain dictionaries, lists, numbers and texts. Infinite gains become null."""
    return {
        "schema": 1,
        "global_batch_size": found.problem.global_batch_size,
        "reason": found.choice.reason,
        "chosen": found.choice.best.name,
        "edits": list(found.edits),
        "samples_per_s_before": found.before_samples_per_s,
        "candidates": [
            {
                **msgspec.to_builtins(priced),
                "runnable": priced.runnable,
                "chosen": index == found.choice.chosen,
                "effective_samples_per_s": priced.rate,
                "time_to_quality": found.choice.best.rate / priced.rate if priced.rate else None,
            }
            for index, priced in enumerate(found.choice.candidates)
        ],
        "verdicts": [
            {**msgspec.to_builtins(verdict), "gain": verdict.gain if verdict.gain < float("inf") else None}
            for verdict in found.verdicts
        ],
    }


def _mode(text: str) -> Mode:
    try:
        return msgspec.convert(text, Mode)
    except msgspec.ValidationError:
        raise SettingError(f"--mode {text} is not valid. Expected auto, exact, islands or async.") from None


def _loss_fall(run: Path | None) -> float | None:
    if run is None:
        return None
    file = run / LOG_NAME if run.is_dir() else run
    samples: list[float] = []
    losses: list[float] = []
    total = 0
    decoder = Decoder()
    try:
        for line in read_lines(file):
            event = decoder.decode(line)
            if isinstance(event, Step):
                total += event.samples
                if event.loss is not None:
                    samples.append(float(total))
                    losses.append(event.loss)
        return loss_fall(samples, losses)
    except (DocumentError, SettingError) as error:
        raise SettingError(f"--from-run {run}: {error}") from None


def _read(request: Request) -> tuple[Cluster, Profile]:
    target = request.target
    if target.suffix not in (".toml", ".json"):
        cluster = None if request.emulate is None else load_cluster(request.emulate)
        profile = _profile_of(request)
    else:
        if request.arguments or request.emulate is not None:
            raise SettingError(
                f"Arguments and --emulate belong to a script, and {target} is a file of its own: ragtag plan {target}."
            )
        cluster = load_cluster(target) if target.suffix == ".toml" else None
        if cluster is None and request.profile is not None:
            raise SettingError(f"{target} is a profile already; leave --profile {request.profile} out.")
        named = target if cluster is None else request.profile
        if named is None:
            assert cluster is not None
            if request.batch is None:
                raise SettingError(
                    f"Without a profile the global batch is not known. Say it: ragtag plan {target} --batch 256; or "
                    f"measure: ragtag profile train.py, then ragtag plan {target} --profile profile.json."
                )
            gradient = _gradient(request)
            return cluster, profile_from_speeds(
                cluster, global_batch_size=request.batch, gradient_bytes=gradient or 0, source=str(target)
            )
        profile = load_profile(named)
    if request.gradient is not None:
        raise SettingError(
            f"--gradient {request.gradient} is for planning without a profile, which has it. Leave it out."
        )
    if request.batch is not None:
        if request.batch < 1:
            raise SettingError(f"--batch {request.batch} is not valid. Expected at least 1 sample: --batch 256.")
        profile = msgspec.structs.replace(profile, global_batch_size=request.batch)
    return cluster or _cluster_of(profile), profile


def _gradient(request: Request) -> int | None:
    if request.gradient is None:
        return None
    try:
        return parse_bytes(request.gradient)
    except SettingError as error:
        raise SettingError(f"--gradient: {error}") from None


def _cluster_of(profile: Profile) -> Cluster:
    """The profile's own devices; where links were measured between hosts, the profile does not say whose they are."""
    hosts = sorted({host for link in profile.links for host in link.between})
    host = hosts[0] if len(hosts) == 1 else "localhost"
    if len(hosts) > 1:
        raise SettingError(
            f"The profile has links between {', '.join(hosts)}, but does not say which device is on which host. Give "
            f"the cluster file as well: ragtag plan cluster.toml --profile p.json."
        )
    return Cluster(
        devices=tuple(Device(name=device.name, kind=device.kind, host=host) for device in profile.devices),
        links=(),
    )


def _cluster_file(request: Request) -> Path | None:
    return request.target if request.target.suffix == ".toml" else request.emulate


def _profile_of(request: Request) -> Profile:
    """Measure the script's own model, or read what was measured before."""
    if not request.target.is_file():
        raise SettingError(
            f"{request.target} was not found in {Path.cwd()}. Expected a cluster file (.toml), a profile (.json) or a "
            f"training script."
        )
    if request.profile is not None:
        profile = load_profile(request.profile)
        script = " ".join((str(request.target), *request.arguments))
        # One process says what the script trains; nothing is measured.
        trains = what_it_trains(launch_request(script=str(request.target), arguments=request.arguments, num_workers=1))
        if trains is None:
            raise SettingError(
                f"{script} could not be run to see whether {request.profile} was measured for it (see above). A "
                f"profile can be planned for without the script: ragtag plan {request.profile}"
            )
        check_made_for(profile, request.profile, script, trains, batch=request.batch)
        return profile
    with tempfile.TemporaryDirectory(prefix="ragtag-plan-") as directory:
        output = Path(directory) / "profile.json"
        emulate = () if request.emulate is None else ("--emulate", str(request.emulate))
        command = [sys.executable, "-m", "ragtag.cli.main", "profile", "--output", str(output), *emulate]
        # Its table goes to standard error: standard output is the plan's.
        status = subprocess.run([*command, str(request.target), *request.arguments], stdout=sys.stderr).returncode
        if status != 0:
            raise SettingError(
                f"{request.target} could not be measured (ragtag profile ended with status {status}, see above). A "
                f"cluster file can be planned without measuring: ragtag plan cluster.toml --batch 256."
            )
        return load_profile(output)
