"""The `ragtag` command line: which verbs there are and what their words mean.

The one idea: a verb's work is imported when the verb runs, so `ragtag --help` is quick and never imports torch.
"""

import importlib.metadata
import sys
from pathlib import Path
from typing import Annotated

import typer

from ragtag.core.errors import RagtagError, SettingError

app = typer.Typer(
    name="ragtag",
    help="Train one PyTorch model on machines that do not match, exactly, at nearly their summed speed.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"ragtag {_version()}")
        raise typer.Exit


def _version() -> str:
    try:
        return importlib.metadata.version("ragtag")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: running from a source tree)"


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the verb; without a verb, help."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(
    context_settings={"allow_interspersed_args": False},
    help="""Run a training script on this machine's devices, one worker process each.

Options for ragtag come before SCRIPT; everything after it belongs to the script.

\b
Examples:
  ragtag launch train.py                       one worker per accelerator (one CPU worker if there is none)
  ragtag launch --local 3 train.py --lr 1e-3   three workers; --lr belongs to train.py
  ragtag launch --local 2 --shares 7,3 train.py
  ragtag launch --emulate home.toml train.py   this machine pretends to be the cluster in home.toml
  ragtag launch --plan plan.json train.py      shares and micro-batch from ragtag plan
  ragtag launch --checkpoint runs/1 train.py   keeps checkpoints; started again, it goes on from the newest
  ragtag launch --all-output --logs runs/1 -m mypackage.train
  ragtag launch --fixed --local 3 train.py     ends when one of the three fails; without --fixed it is replaced
  ragtag launch --address 192.168.1.7 train.py     prints the line to type on other machines; all may come and go
  ragtag launch --hub 192.168.1.7:29400 train.py   joins that run; its token is in RAGTAG_TOKEN
  ragtag launch --address 203.0.113.5 --island home train.py         a site of several that train over slow links
  ragtag launch --hub 203.0.113.5:29400 --island cloud train.py      another site of them
""",
)
def launch(
    script: Annotated[
        str, typer.Argument(help="Python script (or module, with -m) that every worker runs.", metavar="SCRIPT")
    ],
    arguments: Annotated[list[str] | None, typer.Argument(help="Passed on to SCRIPT.", metavar="ARGS")] = None,
    local: Annotated[int | None, typer.Option("--local", help="Number of workers on this machine.")] = None,
    shares: Annotated[
        str | None, typer.Option("--shares", help="Pin each worker's share of the global batch, like 8,5,3.")
    ] = None,
    all_output: Annotated[
        bool, typer.Option("--all-output", help="Show every worker's standard output, not only rank 0's.")
    ] = False,
    logs: Annotated[
        Path | None,
        typer.Option(
            "--logs", help="Also write each worker's output to DIR/rank-N.log (elastic: worker-N.log).", metavar="DIR"
        ),
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module.")] = False,
    emulate: Annotated[
        Path | None,
        typer.Option("--emulate", help="Pretend to be the cluster in this file, one worker a device.", metavar="FILE"),
    ] = None,
    elastic: Annotated[
        bool | None,
        typer.Option(
            "--elastic/--fixed",
            help="Whether the run outlives its workers and others may join; if not, it ends when one fails. Elastic, "
            "unless shares are pinned.",
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option("--address", help="Other machines may join at this address of this machine."),
    ] = None,
    port: Annotated[int, typer.Option("--port", help="Port where others join; 0: any.", min=0, max=65535)] = 0,
    hub: Annotated[
        str | None,
        typer.Option("--hub", help="Join the run of another machine with this one's workers.", metavar="HOST:PORT"),
    ] = None,
    island: Annotated[
        str | None,
        typer.Option(
            "--island",
            help="What this site is called among others that train the same model over slow links; with --hub, the "
            "site that has started the run.",
            metavar="NAME",
        ),
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option("--certificate", help="TLS for all who connect to this machine's hub (PEM).", metavar="FILE"),
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", help="Private key of --certificate, if not in that file.", metavar="FILE")
    ] = None,
    token: Annotated[
        str | None, typer.Option("--token", help="The run's token, with --hub; better in RAGTAG_TOKEN.")
    ] = None,
    run_directory: Annotated[
        Path | None, typer.Option("--run-dir", help="Where the run writes about itself; runs/run-TIME.", metavar="DIR")
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="Begin with the shares in this file of `ragtag plan --output`.", metavar="FILE"),
    ] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Keep the shares of --plan whatever speeds become.")] = False,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            help="Keep checkpoints here, and go on from the newest: a directory or fsspec URL.",
            metavar="DIR",
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Say nothing but what the script says and what goes wrong.")
    ] = False,
    page: Annotated[
        bool, typer.Option("--page/--no-page", help="Serve a live page of the run, for this machine.")
    ] = True,
    page_port: Annotated[int, typer.Option("--page-port", help="Its port; 0: any.", min=0, max=65535)] = 0,
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", help="Write TensorBoard's event files here.", metavar="DIR")
    ] = None,
    prometheus: Annotated[
        int | None, typer.Option("--prometheus", help="Serve metrics for Prometheus at this port.", metavar="PORT")
    ] = None,
    wandb: Annotated[
        str | None, typer.Option("--wandb", help="Log to this project of Weights & Biases.", metavar="PROJECT")
    ] = None,
) -> None:
    """Run a script on this machine's devices."""
    from ragtag.cli.launch import launch_local, request
    from ragtag.cli.views import Shown

    wanted = request(
        script=script,
        arguments=tuple(arguments or ()),
        num_workers=local,
        shares=shares,
        all_output=all_output,
        logs=logs,
        module=module,
        emulate=emulate,
        plan=plan,
        pin=pin,
        checkpoint=checkpoint,
        island=island,
    )
    island = wanted.island
    from ragtag.cli.elastic_request import elastic_request, is_elastic
    from ragtag.cli.run_directory import make_run_directory

    shown = Shown(
        quiet=quiet, page=page, page_port=page_port, tensorboard=tensorboard, prometheus=prometheus, wandb=wandb
    )
    joining = {"--hub": hub, "--address": address, "--port": port, "--token": token, "--island": island}
    if not is_elastic(
        elastic,
        pinned=wanted.shares is not None or bool(wanted.stages),
        joining=[word for word in joining if joining[word]],
    ):
        raise typer.Exit(launch_local(wanted, make_run_directory(run_directory), shown))
    from ragtag.cli.launch_elastic import launch_elastic

    raise typer.Exit(
        launch_elastic(
            wanted,
            elastic_request(
                hub=hub,
                token=token,
                address=address,
                port=port,
                directory=run_directory,
                island=island,
                certificate=certificate,
                key=key,
            ),
            shown,
        )
    )


@app.command(
    help="""Pretend to be four unequal devices and train a small GPT on them, with stock DDP and with ragtag.

Prints both side by side and writes a page and a picture of who waits for whom. Takes about 2 minutes on 2 cores.

\b
Examples:
  ragtag demo                       page, picture and cluster file go to runs/demo-TIME
  ragtag demo --out DIR --json      result as one JSON object
  ragtag demo --exact               three workers with pinned shares 8, 5, 3 against one process
  ragtag demo --exact --shares 12,3,1 --double
""",
)
def demo(
    steps: Annotated[int | None, typer.Option("--steps", min=2, help="Optimizer steps of each training.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few and small steps: a look at it in half a minute.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Where the files go.", metavar="DIR")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Compare pinned shares with one process instead, at full speed.")
    ] = False,
    shares: Annotated[
        str | None, typer.Option("--shares", help="With --exact: samples of every step for each worker.")
    ] = None,
    double: Annotated[bool, typer.Option("--double", help="With --exact: train in fp64.")] = False,
) -> None:
    """Compare ragtag with stock DDP, or with one process."""
    if exact:
        if quick or out is not None:
            raise SettingError("--exact has no --quick and writes no files; leave --quick and --out away, use --steps.")
        from ragtag.cli.demo_exact import run_exact_demo
        from ragtag.cli.launch import parse_shares

        run_exact_demo(shares=parse_shares(shares or "8,5,3"), steps=steps or 100, double=double, as_json=as_json)
        return
    if shares is not None or double:
        given = "--shares" if shares is not None else "--double"
        raise SettingError(f"{given} belongs to the comparison with one process: ragtag demo --exact {given} ...")
    from ragtag.cli.demo import run_demo

    run_demo(steps=steps, quick=quick, out=out, as_json=as_json)


@app.command(
    help="""Look at this machine and, given others, whether each pair can talk; say what to type where it cannot.

Exit status: 0 nothing stops training, 1 something does, 2 the command is wrong.

\b
Examples:
  ragtag doctor                                  this machine: devices, versions, limits
  ragtag doctor --listen                         on one machine: it prints what to type on the other
  ragtag doctor desktop:29470 --token TOKEN      on the other
  ragtag doctor 10.0.0.5 10.0.0.6 --token TOKEN  several, which run `ragtag doctor --listen --token TOKEN`
  ragtag doctor --json
""",
)
def doctor(
    hosts: Annotated[
        list[str] | None, typer.Argument(help="Where `ragtag doctor --listen` runs.", metavar="HOST[:PORT]...")
    ] = None,
    listen: Annotated[bool, typer.Option("--listen", help="Answer the doctors of other machines.")] = False,
    bind: Annotated[
        str | None, typer.Option("--bind", help="With --listen: only on this address.", metavar="ADDRESS")
    ] = None,
    port: Annotated[int | None, typer.Option("--port", help="With --listen: where; 29470 if left out.")] = None,
    token: Annotated[
        str | None,
        typer.Option("--token", help="What callers must know; --listen makes one up.", envvar="RAGTAG_TOKEN"),
    ] = None,
    wait_s: Annotated[
        float | None, typer.Option("--wait-s", help="With --listen: seconds without a caller until it ends; 600.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Look at this machine and at the ways to others."""
    from ragtag.cli.doctor import run_doctor

    raise typer.Exit(
        run_doctor(
            hosts=tuple(hosts or ()),
            listen=listen,
            bind_address=bind,
            port=port,
            token=token,
            wait_s=wait_s,
            as_json=as_json,
        )
    )


@app.command(
    context_settings={"allow_interspersed_args": False},
    help="""Measure this machine's devices and links with a training script's own model and data.

SCRIPT is any script that builds a ragtag.Trainer; it ends there, without training. For each device: time per
micro-batch against its size, memory up to its limit, with and without recomputing activations, the parts of a step, and
blocks of the model; for each link latency and bandwidth. What was measured in the last 30 days is used again.

\b
Examples:
  ragtag profile train.py                          writes profile.json, for ragtag plan and ragtag simulate
  ragtag profile --local 2 --output p.json train.py --lr 1e-3
  ragtag profile --emulate home.toml -m ragtag.examples.byte_gpt
  ragtag profile --fresh --json train.py           measure anew; the profile on standard output as well
""",
)
def profile(
    script: Annotated[
        str, typer.Argument(help="Python script (or module, with -m) that builds a Trainer.", metavar="SCRIPT")
    ],
    arguments: Annotated[list[str] | None, typer.Argument(help="Passed on to SCRIPT.", metavar="ARGS")] = None,
    local: Annotated[int | None, typer.Option("--local", help="Number of workers on this machine.")] = None,
    emulate: Annotated[
        Path | None,
        typer.Option("--emulate", help="Pretend to be the cluster in this file, one worker a device.", metavar="FILE"),
    ] = None,
    output: Annotated[Path, typer.Option("--output", help="Where the profile goes.", metavar="FILE")] = Path(
        "profile.json"
    ),
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure anew what was measured before.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as one JSON object.")] = False,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module.")] = False,
) -> None:
    """Measure devices and links with a script's own model."""
    from ragtag.cli.launch import request
    from ragtag.cli.profile import run_profile

    asked = request(script=script, arguments=tuple(arguments or ()), num_workers=local, module=module, emulate=emulate)
    raise typer.Exit(run_profile(asked, output=output, fresh=fresh, as_json=as_json))


@app.command(
    help="""Train on a virtual cluster with a virtual clock: hours of training in seconds, with ragtag's own controller.

Costs come from a profile, or from the file's speeds and [emulate] sample_ms; jitter, drift, flips and stalls from the
file. Says what ragtag would decide and why, and compares it with even batches and with dropping stragglers.

\b
Examples:
  ragtag simulate cluster.toml                               one hour
  ragtag simulate cluster.toml --profile p.json --hours 12 --failures-per-hour 0.01
  ragtag simulate cluster.toml --leave laptop@20 --join laptop@35 --steps 2000
  ragtag simulate cluster.toml --batch 256 --gradient 400MB --html report.html
  ragtag simulate cluster.toml --json
""",
)
def simulate(
    cluster: Annotated[Path, typer.Argument(help="The cluster file.", metavar="CLUSTER.toml")],
    profile: Annotated[
        Path | None, typer.Option("--profile", help="What `ragtag profile` measured.", metavar="FILE")
    ] = None,
    hours: Annotated[float | None, typer.Option("--hours", help="Virtual hours; 1 if left out.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="End after so many steps instead.")] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", help="Samples of a step; the profile's, or 32 a device, if left out.")
    ] = None,
    gradient: Annotated[
        str | None, typer.Option("--gradient", help="Without a profile: bytes reduced in a step, like 400MB.")
    ] = None,
    failures_per_hour: Annotated[
        float, typer.Option("--failures-per-hour", help="How often each device fails, like 0.01.")
    ] = 0.0,
    repair_min: Annotated[float, typer.Option("--repair-min", help="Minutes until it is back.")] = 10.0,
    leave: Annotated[
        list[str] | None, typer.Option("--leave", help="A device that leaves at a minute.", metavar="NAME@MIN")
    ] = None,
    join: Annotated[
        list[str] | None, typer.Option("--join", help="A device that joins at a minute.", metavar="NAME@MIN")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the failures.")] = 0,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with pictures.", metavar="FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Train on a virtual cluster."""
    from ragtag.cli.simulate import Request, run_simulate

    run_simulate(
        Request(
            cluster=cluster,
            profile=profile,
            hours=hours,
            steps=steps,
            batch=batch,
            gradient=gradient,
            failures_per_hour=failures_per_hour,
            repair_min=repair_min,
            leave=tuple(leave or ()),
            join=tuple(join or ()),
            seed=seed,
        ),
        html=html,
        as_json=as_json,
    )


@app.command(
    help="""Write a checkpoint's weights as plain safetensors, with the model's own names.

`model.load_state_dict(safetensors.torch.load_file("weights.safetensors"))` takes them; tied weights stand under each of
their names.

\b
Examples:
  ragtag export runs/1 weights.safetensors                     the newest checkpoint that `--checkpoint runs/1` kept
  ragtag export run.safetensors weights.safetensors            one that `trainer.save` wrote
  ragtag export s3://bucket/runs/1 weights.safetensors --json
""",
)
def export(
    checkpoint: Annotated[
        str, typer.Argument(help="Checkpoint file, or a directory of them; a path or fsspec URL.", metavar="CHECKPOINT")
    ],
    weights: Annotated[Path, typer.Argument(help="The file to write.", metavar="WEIGHTS")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as one JSON object.")] = False,
) -> None:
    """Write the weights of a checkpoint."""
    from ragtag.cli.export import run_export

    run_export(checkpoint, weights, as_json=as_json)


@app.command(
    context_settings={"allow_interspersed_args": True},
    help="""Say which way to train on a cluster is fastest, why, and what each device adds or costs.

TARGET is a cluster file (with what `ragtag profile` measured, or with speeds only), a profile, or a training script,
which is measured first.

\b
Examples:
  ragtag plan cluster.toml --profile profile.json
  ragtag plan cluster.toml --batch 256 --gradient 400MB        no profile: speeds and [emulate] sample_ms
  ragtag plan train.py                                         measure here, then plan
  ragtag plan cluster.toml --profile p.json --what-if "+1 rtx3090" --what-if "link home=1Gbit/s"
  ragtag plan cluster.toml --profile p.json --what-if="-laptop"
  ragtag plan cluster.toml --profile p.json --mode islands --from-run runs/latest
  ragtag plan cluster.toml --profile p.json --output plan.json
  ragtag launch --plan plan.json train.py
""",
)
def plan(
    target: Annotated[Path, typer.Argument(help="Cluster file, profile or script.", metavar="TARGET")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Passed on to a script.", metavar="ARGS")] = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="What `ragtag profile` measured.", metavar="FILE")
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="Global batch size, in samples.")] = None,
    gradient: Annotated[
        str | None, typer.Option("--gradient", help="Without a profile: bytes reduced in a step, like 400MB.")
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", help='"+1 rtx3090", "-laptop" or "link home=1Gbit/s"; several are done in turn.'),
    ] = None,
    emulate: Annotated[
        Path | None, typer.Option("--emulate", help="Measure a script as the cluster in this file.", metavar="FILE")
    ] = None,
    mode: Annotated[
        str, typer.Option("--mode", help="auto, or only exact synchronisation, islands or async.")
    ] = "auto",
    from_run: Annotated[
        Path | None,
        typer.Option(
            "--from-run",
            help="A run of this training: how its loss falls says what islands cost.",
            metavar="DIR",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="Write the plan, for `ragtag launch --plan`.", metavar="FILE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Search for the fastest way to train on a cluster."""
    from ragtag.cli.plan import Request, run_plan

    run_plan(
        Request(
            target=target,
            arguments=tuple(arguments or ()),
            profile=profile,
            batch=batch,
            gradient=gradient,
            what_if=tuple(what_if or ()),
            emulate=emulate,
            mode=mode,
            from_run=from_run,
        ),
        output=output,
        as_json=as_json,
    )


@app.command(
    help="""Make a page of a run's event log: losses, eta, devices and what each adds, decisions and what came of them.

\b
Examples:
  ragtag report                                   the newest run, into runs/latest/report.html
  ragtag report runs/run-20260101-120000-4711 --output report.html
  ragtag report run.jsonl --trace trace.json      for https://ui.perfetto.dev or chrome://tracing
  ragtag report run.jsonl --json                  everything as one JSON object
""",
)
def report(
    log: Annotated[
        Path | None, typer.Argument(help="A log, or a run's directory; default: runs/latest.", metavar="LOG")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Where the page goes.", metavar="FILE")] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write a trace for Perfetto or Chrome.", metavar="FILE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Make a page of a run's event log."""
    from ragtag.cli.report import run_report
    from ragtag.cli.run_directory import LATEST

    run_report(log or LATEST, output=output, trace=trace, as_json=as_json)


@app.command(
    help="""Look at a run while it goes on, or at what it has left: speed, losses, who waits for whom, who is worth it.

TARGET is a log, a run's directory, or the address of a run's page; the newest run on this machine if left out.

\b
Examples:
  ragtag watch                                in this terminal, until Ctrl-C
  ragtag watch -1                             one look
  ragtag watch runs/run-20260101-120000-4711
  ragtag watch 'http://127.0.0.1:41234/?token=TOKEN'
  ragtag watch --web                          as a page; prints its address
  ragtag watch --json                         everything as one JSON object
  ragtag watch --tensorboard runs/tensorboard --prometheus 9464
""",
)
def watch(
    target: Annotated[
        str | None, typer.Argument(help="Log, run's directory or page's address.", metavar="TARGET")
    ] = None,
    once: Annotated[bool, typer.Option("-1", "--once", help="Print it once and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object and end.")] = False,
    web: Annotated[bool, typer.Option("--web", help="Serve the page of it, and print its address.")] = False,
    port: Annotated[
        int | None, typer.Option("--port", help="With --web: where; any free one if left out.", min=0, max=65535)
    ] = None,
    bind: Annotated[
        str | None,
        typer.Option("--bind", help="With --web: this address of this machine, not loopback.", metavar="ADDRESS"),
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", help="Also write TensorBoard's files here.", metavar="DIR")
    ] = None,
    prometheus: Annotated[
        int | None,
        typer.Option("--prometheus", help="Also serve /metrics at this port of loopback.", min=0, max=65535),
    ] = None,
    wandb: Annotated[
        str | None, typer.Option("--wandb", help="Also log to this project of Weights & Biases.", metavar="PROJECT")
    ] = None,
) -> None:
    """Look at a run."""
    from ragtag.cli.watch import Request, run_watch

    raise typer.Exit(
        run_watch(
            Request(
                target=target,
                once=once,
                as_json=as_json,
                web=web,
                port=port,
                bind=bind,
                tensorboard=tensorboard,
                prometheus=prometheus,
                wandb=wandb,
            )
        )
    )


def main() -> None:
    """Run the command line; a mistake is one line on standard error and status 2."""
    try:
        app()
    except RagtagError as error:
        print(f"ragtag: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
