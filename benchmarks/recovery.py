"""How long training stands still when a worker is killed: ragtag beside torchrun's elastic restart, in one run.

    scripts/bench recovery [--rounds 5] [--workers 3] [--step-ms 50] [--torchft] [--json]

Both train the same small model with the same number of workers and step length. A worker is killed with SIGKILL in
mid-step; the figure is the time from there to the next step that the others commit, less a usual step, as a median over
rounds. ragtag's workers go on with the very step; torchrun restarts all of them, and the script goes on from a file it
writes after each step (the time of writing is not counted). "full" is when all workers train again. With --torchft
(`pip install 'ragtag[peers]'`) it is there too, with its own defaults, each worker a replica group that is started
again at once; its steps that a lost replica spoils are discarded, so others' work of that step is done again.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

DATA = 4096
KILL_AT = 12


def note(directory: Path, step: int, world: int) -> None:
    """One line a committed step: pid, step, ranks, time."""
    with open(directory / f"{os.getpid()}.log", "a") as file:
        file.write(f"{step} {world} {time.time()}\n")


def ragtag_worker(directory: Path, steps: int, step_s: float) -> None:
    import torch
    from torch.utils.data import TensorDataset

    import ragtag

    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 64)

    def loss_fn(model, batch):
        time.sleep(step_s)
        return model(batch[0]).square().mean()

    with ragtag.Trainer(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        loss_fn,
        TensorDataset(torch.randn(DATA, 64, generator=torch.Generator().manual_seed(0))),
        global_batch_size=12,
        config=ragtag.Config(cover_stalls=False),
    ) as trainer:
        for report in trainer.steps(steps):
            note(directory, report.number, trainer.world_size)


def torchrun_worker(directory: Path, steps: int, step_s: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    saved = directory / "saved"
    done = int(saved.read_text()) if saved.exists() else 0
    for step in range(done + 1, steps + 1):
        time.sleep(step_s)
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            saved.with_suffix(".new").write_text(str(step))
            saved.with_suffix(".new").rename(saved)
        note(directory, step, dist.get_world_size())
    dist.destroy_process_group()


def torchft_worker(directory: Path, steps: int, step_s: float) -> None:
    import torch
    import torch.distributed as dist
    import torchft  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = torch.nn.Linear(64, 64)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)

    def load(state):
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timedelta(seconds=30)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=os.environ["REPLICA"],
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=os.environ["LIGHTHOUSE"],
        hostname="127.0.0.1",
        timeout=timedelta(seconds=30),
    )
    parallel, optimizer = torchft.DistributedDataParallel(manager, model), torchft.Optimizer(manager, inner)
    while manager.current_step() < steps:
        time.sleep(step_s)
        before = manager.current_step()
        optimizer.zero_grad()
        parallel(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        if manager.current_step() > before:
            note(directory, manager.current_step(), manager.num_participants())
    manager.shutdown(wait=False)


def torchft_launch(script: list[str], workers: int, environ: dict[str, str]) -> None:
    """A lighthouse and the replicas; one that is killed is started again at once."""
    from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=2000)
    address = lighthouse.address().replace(socket.gethostname(), "127.0.0.1")

    def start(number: int) -> subprocess.Popen[bytes]:
        own = {**environ, "LIGHTHOUSE": address, "REPLICA": f"replica{number}_", "RUST_LOG": "warn"}
        return subprocess.Popen(
            [sys.executable, *script], env=own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    replicas = {number: start(number) for number in range(workers)}
    try:
        while any(process.poll() is None for process in replicas.values()):
            for number, process in replicas.items():
                if process.poll() == -signal.SIGKILL:
                    replicas[number] = start(number)
            time.sleep(0.01)
    finally:
        for process in replicas.values():
            process.kill()
            process.wait()
        lighthouse.shutdown()


def run(way: str, workers: int, steps: int, step_s: float) -> tuple[float, float]:
    """Kill one worker in mid-step; seconds until the next step of the others, and until all train again."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        script = [__file__, "--as", way, "--directory", place, "--steps", str(steps), "--step-ms", str(1e3 * step_s)]
        if way == "ragtag":
            launch = ["-m", "ragtag.cli.main", "launch", "--elastic", "--run-dir", f"{place}/run"]
            command = [sys.executable, *launch, "--local", str(workers), *script]
        elif way == "torchft":
            command = [sys.executable, *script, "--workers", str(workers), "--supervise"]
        else:
            launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(workers), "--max-restarts", "3"]
            command = [sys.executable, *launch, "--standalone", *script]
        # Sharing its store with the workers, torchrun's agent does not recover with gloo (torch 2.13).
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            victim = wait_for_step(directory, KILL_AT, workers)
            time.sleep(step_s / 2)
            killed_s = time.time()
            os.kill(victim, signal.SIGKILL)
            process.wait(120)
        finally:
            process.kill()
            process.wait()
        rows = [
            (int(step), int(world), float(at))
            for file in directory.glob("*.log")
            if int(file.stem) != victim
            for step, world, at in (line.split() for line in file.read_text().splitlines())
        ]
        after = sorted((at, world) for step, world, at in rows if at > killed_s)
        usual_s = step_s
        return after[0][0] - killed_s - usual_s, next(at for at, world in after if world == workers) - killed_s


def wait_for_step(directory: Path, step: int, workers: int) -> int:
    """The pid of a worker that is not the first, once all have committed this step."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        files = sorted(directory.glob("*.log"), key=lambda file: int(file.stem))
        if len(files) == workers and all(len(file.read_text().splitlines()) >= step for file in files):
            return int(files[-1].stem)
        time.sleep(0.005)
    raise SystemExit(f"the workers did not reach step {step} within 60 s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--as", dest="way", choices=["ragtag", "torchrun", "torchft"], help=argparse.SUPPRESS)
    parser.add_argument("--torchft", action="store_true", help="measure torchft as well")
    parser.add_argument("--supervise", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=200, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    step_s = arguments.step_ms / 1e3
    if arguments.supervise:
        torchft_launch([word for word in sys.argv if word != "--supervise"], arguments.workers, dict(os.environ))
        return
    if arguments.way:
        train = {"ragtag": ragtag_worker, "torchrun": torchrun_worker, "torchft": torchft_worker}[arguments.way]
        train(arguments.directory, arguments.steps, step_s)
        return
    rows = {}
    for _ in range(arguments.rounds):
        for way in ("ragtag", "torchrun", *(("torchft",) if arguments.torchft else ())):
            still_s, full_s = run(way, arguments.workers, arguments.steps, step_s)
            rows.setdefault(way, []).append((still_s, full_s))
            print(f"{way}: {still_s:.3f} s, full after {full_s:.2f} s", file=sys.stderr)
    result = {
        way: {
            "still_s": round(statistics.median(still for still, _ in each), 3),
            "still_s_greatest": round(max(still for still, _ in each), 3),
            "full_s": round(statistics.median(full for _, full in each), 2),
        }
        for way, each in rows.items()
    }
    if arguments.json:
        print(json.dumps({"workers": arguments.workers, "rounds": arguments.rounds, **result}, indent=1))
        return
    for way, row in result.items():
        print(
            f"{way:10} stands still for {row['still_s']:.3f} s (at most {row['still_s_greatest']:.3f}), "
            f"all workers again after {row['full_s']:.1f} s"
        )


if __name__ == "__main__":
    main()
