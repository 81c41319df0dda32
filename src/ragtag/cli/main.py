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
  ragtag launch --all-output --logs runs/1 -m mypackage.train
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
        Path | None, typer.Option("--logs", help="Also write each worker's output to DIR/rank-N.log.", metavar="DIR")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module.")] = False,
    emulate: Annotated[
        Path | None,
        typer.Option("--emulate", help="Pretend to be the cluster in this file, one worker a device.", metavar="FILE"),
    ] = None,
) -> None:
    """Run a script on this machine's devices."""
    from ragtag.cli.launch import launch_local, request

    raise typer.Exit(
        launch_local(
            request(
                script=script,
                arguments=tuple(arguments or ()),
                num_workers=local,
                shares=shares,
                all_output=all_output,
                logs=logs,
                module=module,
                emulate=emulate,
            )
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


def main() -> None:
    """Run the command line; a mistake is one line on standard error and status 2."""
    try:
        app()
    except RagtagError as error:
        print(f"ragtag: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
