"""The other side of `ragtag demo`: the same training with stock DistributedDataParallel and equal batches.

    ragtag launch --emulate cluster.toml -m ragtag.cli.demo_ddp --steps 40 --batch 44 --meeting FILE

The one idea: it has everything that ragtag has (model, samples and their order, clipping, emulated devices) except
ragtag. First each device runs alone, all at once and without communication: the speeds that both are measured against.
Once a step, besides DDP's own all-reduce, the ranks tell each other loss and timings in 32 bytes, as ragtag does.
"""

import argparse
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import default_collate

from ragtag.checkpoint.file import save_file
from ragtag.core.sampler import Sampler
from ragtag.emulate.environment import Emulator, from_environment
from ragtag.emulate.pace import Pace
from ragtag.emulate.solo import plain_step, solo_speed
from ragtag.examples.byte_gpt import ByteGPT, StandardLibrary, loss_fn

_WARM_UP_STEPS = 2


def main() -> None:
    """Measure each device alone, then train."""
    # Python would act on Ctrl-C only after the all-reduce that it waits in.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="global batch size, a multiple of the ranks' number")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--solo-steps", type=int, default=5)
    parser.add_argument("--meeting", required=True, metavar="FILE", help="where the ranks find each other; not there")
    parser.add_argument("--save", metavar="FILE", help="write the model at the end")
    arguments = parser.parse_args()

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if arguments.batch % world_size:
        parser.error(f"--batch {arguments.batch} is no multiple of {world_size}: means of equal batches would be wrong")
    emulators = [from_environment(os.environ, rank) for _ in range(2)]
    alone, together = emulators
    if alone is None or together is None:
        parser.error("start it on a pretended cluster: ragtag launch --emulate FILE -m ragtag.cli.demo_ddp ...")
    dist.init_process_group("gloo", init_method=f"file://{arguments.meeting}", rank=rank, world_size=world_size)
    dataset = StandardLibrary()
    say(rank, doing="measuring each device alone")
    solo = measure_alone(alone, rank, dataset, arguments)
    say(rank, solo_samples_per_s=[speed for (speed,) in _all_gather([solo])])
    train(together, rank, dataset, arguments)
    honest = _all_gather([alone.pace.honest and together.pace.honest])
    say(rank, honest=all(bool(value) for (value,) in honest))
    dist.barrier()
    # A process group that DDP still refers to may abort the process while Python tears itself down.
    sys.stdout.flush()
    os._exit(0)


def say(rank: int, **values: object) -> None:
    """Print one line of JSON on rank 0."""
    if rank == 0:
        print(json.dumps(values), flush=True)


def measure_alone(emulator: Emulator, rank: int, dataset: StandardLibrary, arguments: argparse.Namespace) -> float:
    """Return this device's samples/s by itself, at the batch that its speed deserves."""
    speeds = [device.speed for device in emulator.cluster.expanded()]
    share = max(1, round(arguments.batch * speeds[rank] / sum(speeds)))
    model, optimizer = _model(emulator.pace, arguments.lr)
    batch = default_collate([dataset[index] for index in range(share)])
    step = plain_step(emulator.pace, model, optimizer, loss_fn, lambda number: [(batch, share)])
    solo_speed(emulator.pace, step, _WARM_UP_STEPS)
    dist.barrier()
    measured = solo_speed(emulator.pace, step, arguments.solo_steps, first_step=_WARM_UP_STEPS + 1).samples_per_s
    dist.barrier()
    return measured


def train(emulator: Emulator, rank: int, dataset: StandardLibrary, arguments: argparse.Namespace) -> None:
    """Train with DDP, and print each step as `byte_gpt --json` does."""
    pace, world_size = emulator.pace, dist.get_world_size()
    bare, optimizer = _model(pace, arguments.lr)
    last_gradient_s = 0.0

    def note_time(gradient: torch.Tensor) -> None:
        nonlocal last_gradient_s
        last_gradient_s = time.perf_counter()

    for parameter in bare.parameters():
        parameter.register_hook(note_time)  # after the pace's own hook, before DDP sees the gradient
    model = DistributedDataParallel(bare)
    sampler = Sampler(dataset_size=len(dataset), global_batch_size=arguments.batch, seed=0, shuffle=True)
    for number in range(1, arguments.steps + 1):
        started_s = time.perf_counter()
        pace.step(number)
        size = sampler.batch(number).size
        indices = sampler.indices(number, rank * size // world_size, (rank + 1) * size // world_size)
        batch = default_collate([dataset[index] for index in indices])
        read_s = time.perf_counter()
        with pace.forward_backward(len(indices)):
            loss = loss_fn(model, batch)
            loss.backward()
        reduced_s = time.perf_counter()
        mine = [loss.item() / world_size, last_gradient_s - read_s, reduced_s - last_gradient_s, read_s - started_s]
        everybody = _all_gather(mine)
        clip_grad_norm_(bare.parameters(), 1.0)
        with pace.optimizer():
            optimizer.step()
        with pace.fixed():
            optimizer.zero_grad()
        losses, compute_s, exposed_s, data_s = zip(*everybody)
        # As StepReport has it: what even the last rank had to wait is communication, the rest is waiting for others.
        comm_s = min(exposed_s)
        say(
            rank,
            step=number,
            loss=sum(losses),
            wall_s=time.perf_counter() - started_s,
            shares=[(other + 1) * size // world_size - other * size // world_size for other in range(world_size)],
            compute_s=compute_s,
            wait_s=[exposed - comm_s + data for exposed, data in zip(exposed_s, data_s)],
            comm_s=comm_s,
        )
    if arguments.save and rank == 0:
        save_file(arguments.save, {"model": dict(bare.state_dict())})


def _model(pace: Pace, lr: float) -> tuple[ByteGPT, torch.optim.Optimizer]:
    """The example's model and optimizer, with the example's seed."""
    torch.manual_seed(0)
    model = ByteGPT()
    pace.attach(model)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def _all_gather(values: list[float]) -> list[list[float]]:
    """Return every rank's numbers, in rank order."""
    gathered = [torch.zeros(len(values), dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.tensor(values, dtype=torch.float64))
    return [numbers.tolist() for numbers in gathered]


if __name__ == "__main__":
    main()
