"""The `ragtag` command line: which verbs there are and what their words mean.

The one idea: a verb's work is imported when the verb runs, so `ragtag --help` is quick and never imports torch.
"""

import importlib.metadata
import sys
from pathlib import Path
from typing import Annotated

import typer

from ragtag.core.errors import RagtagError

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
    help="""Train a small GPT on this machine with unequal workers, then in one process, and compare the two.

\b
Examples:
  ragtag demo                      three workers with 8, 5 and 3 of every 16 samples
  ragtag demo --shares 12,3,1      other shares
  ragtag demo --double --json      in fp64, result as JSON
""",
)
def demo(
    shares: Annotated[str, typer.Option("--shares", help="Samples of every step for each worker.")] = "8,5,3",
    steps: Annotated[int, typer.Option("--steps", min=2, help="Optimizer steps of each training.")] = 100,
    double: Annotated[bool, typer.Option("--double", help="Train in fp64.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Compare unequal workers with one process."""
    from ragtag.cli.demo import run_demo
    from ragtag.cli.launch import parse_shares

    run_demo(shares=parse_shares(shares), steps=steps, double=double, as_json=as_json)


def main() -> None:
    """Run the command line; a mistake is one line on standard error and status 2."""
    try:
        app()
    except RagtagError as error:
        print(f"ragtag: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
