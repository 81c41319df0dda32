"""Runs scripts as ranks that end as real scripts do: exception hooks, exit handlers, interpreter teardown.

The one idea: this process imports torch once and forks each rank, which then runs its script to the very end.
`python fork_scripts.py SCRIPT 3:WORD...` runs SCRIPT once per word, here as 3 ranks, and prints the outcomes as JSON.
"""

import gc
import json
import os
import runpy
import shutil
import socket
import sys
import tempfile
import time

import torch

import ragtag.comm.rendezvous
import ragtag.runtime.trainer


def become_rank(rank: int, world_size: int, listener: socket.socket, script: str, word: str, folder: str) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{rank}.{name}", os.O_CREAT | os.O_WRONLY), number)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(listener.getsockname()[1])
    if rank == 0:
        os.environ["RAGTAG_STORE_FD"] = str(listener.fileno())
    else:
        listener.close()
    sys.argv = [script, word]


def outcomes(pids: list[int], folder: str) -> list[dict]:
    began_s, ended = time.monotonic(), {}
    while len(ended) < len(pids):
        pid, status = os.wait()
        ended[pid] = os.waitstatus_to_exitcode(status), time.monotonic() - began_s
    results = []
    for rank, pid in enumerate(pids):
        status, wall_s = ended[pid]
        texts = {}
        for name in ("out", "err"):
            with open(f"{folder}/{rank}.{name}") as file:
                texts[name] = file.read()
        results.append({"status": status, "wall_s": wall_s, **texts})
    return results


torch.set_num_threads(1)
script = sys.argv[1]
# Ranks would otherwise copy all of torch's objects when they collect garbage at their end.
gc.freeze()
answers = {}
for run in sys.argv[2:]:
    world_size, word = int(run.split(":")[0]), run.split(":")[1]
    listener = socket.create_server(("127.0.0.1", 0))
    # Not a context manager: the ranks would leave it too.
    folder = tempfile.mkdtemp()
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            become_rank(rank, world_size, listener, script, word, folder)
            runpy.run_path(script, run_name="__main__")
            sys.exit()
        pids.append(pid)
    listener.close()
    answers[word] = outcomes(pids, folder)
    shutil.rmtree(folder)
assert ragtag.comm.rendezvous
assert ragtag.runtime.trainer
print(json.dumps(answers))
