import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from ragtag.cli import launch
from ragtag.cli.devices import num_accelerators
from ragtag.cli.launch import launch_local, request
from ragtag.core.errors import SettingError

SOURCE = Path(__file__).parents[2] / "src"
RAGTAG = [sys.executable, "-m", "ragtag.cli.main"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

TRAINS = """
import os, sys, torch
from ragtag.comm.rendezvous import connect
torch.set_num_threads(1)
group = connect(10.0)
flat = torch.full((10,), float(group.rank))
group.wait(group.all_reduce(flat), "summing")
if sys.argv[1] == "forever":
    os.write(1, f"{os.getpid()}\\n".encode())
elif group.rank == 0:
    print("sum", flat[0].item(), group.world_size, flush=True)
while sys.argv[1] != "end":
    group.note(group.step + 1, "training")
    if group.step == 7 and group.rank == 1 and sys.argv[1] == "raise":
        raise ValueError("bad sample")
    group.exchange(b"vote")
"""


def environment(**more):
    return {name: value for name, value in os.environ.items() if name != "RANK"} | {
        "PYTHONPATH": str(SOURCE),
        "OMP_NUM_THREADS": "1",
        **more,
    }


def run(command, **more):
    return subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=60)


def script(tmp_path, text):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_the_command_line_never_imports_torch():
    code = (
        "import sys, ragtag.cli.main, ragtag.cli.launch; "
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    assert run([sys.executable, "-c", code]).stdout.strip() == "[]"


def test_help_shows_examples_and_mistakes_end_with_status_2(tmp_path):
    assert "launch" in run(RAGTAG).stdout
    answer = run([*RAGTAG, "launch", "--help"])
    assert answer.returncode == 0
    assert "ragtag launch --local 2 --shares 7,3 train.py" in answer.stdout
    assert run([*RAGTAG, "--version"]).stdout.startswith("ragtag ")
    answer = run([*RAGTAG, "launch", "--local", "2", str(tmp_path / "missing.py")])
    assert answer.returncode == 2
    assert answer.stderr.startswith("ragtag: error: script ")
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ({"num_workers": 0}, "--local must be 1 or more"),
        ({"num_workers": 3, "shares": "1,2"}, "names 2 shares, but there are 3 workers"),
        ({"num_workers": 2, "shares": "1,x"}, "whole numbers"),
        ({"num_workers": 2, "shares": "0,0"}, "not all 0"),
        ({"num_workers": 2, "shares": "-1,2"}, "0 or more"),
        ({"script": "missing.py"}, "script 'missing.py' was not found"),
        ({"script": "no_such.module", "module": True}, "module 'no_such.module' was not found"),
    ],
)
def test_wrong_words_are_named_before_anything_starts(tmp_path, words, part):
    with pytest.raises(SettingError, match=part):
        request(**({"script": script(tmp_path, "")} | words))


def test_one_worker_per_accelerator_or_one(tmp_path):
    train = script(tmp_path, "")
    assert request(script=train, environ={"CUDA_VISIBLE_DEVICES": "0,2,GPU-1"}).num_workers == 3
    assert request(script=train, environ={"CUDA_VISIBLE_DEVICES": ""}).num_workers == 1
    assert num_accelerators({"CUDA_VISIBLE_DEVICES": "0,-1,1"}) == 1
    assert num_accelerators({"PATH": ""}, root=tmp_path) == 0
    for number in (0, 1):
        (tmp_path / f"proc/driver/nvidia/gpus/{number}").mkdir(parents=True)
    assert num_accelerators({"PATH": ""}, root=tmp_path) == 2
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA GeForce RTX 3060 (UUID: GPU-1)'\n")
    tool.chmod(0o755)
    assert num_accelerators({"PATH": str(tmp_path)}, root=tmp_path) == 1


def test_amd_accelerators_are_counted(tmp_path):
    for number, identity in enumerate(("0", "4096", "8192")):
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(identity + "\n")
    assert num_accelerators({"PATH": ""}, root=tmp_path) == 2


SHOWS = """
import os, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "RAGTAG_LAUNCHED", "RAGTAG_SHARES"]
print(*(os.environ.get(name) for name in names), "RAGTAG_STORE_FD" in os.environ, *sys.argv[1:])
print("to stderr", file=sys.stderr)
"""


def test_workers_get_their_place_and_their_arguments(tmp_path):
    train = script(tmp_path, SHOWS)
    logs = tmp_path / "runs" / "1"
    words = ["--local", "3", "--shares", "8,5,3", "--all-output", "--logs", str(logs), train]
    answer = run([*RAGTAG, "launch", "--fixed", "--no-page", *words, "--local", "9", "--", "-m"])
    assert answer.returncode == 0, answer.stderr
    lines = sorted(answer.stdout.splitlines())
    assert lines == [
        "0 0 3 3 127.0.0.1 1 8,5,3 True --local 9 -- -m",
        "[rank 1] 1 1 3 3 127.0.0.1 1 8,5,3 False --local 9 -- -m",
        "[rank 2] 2 2 3 3 127.0.0.1 1 8,5,3 False --local 9 -- -m",
    ]
    assert sorted(answer.stderr.splitlines()) == ["[ranks 1-2] to stderr", "to stderr"]
    for rank in range(3):
        log = (logs / f"rank-{rank}.log").read_text()
        assert f"{rank} {rank} 3 3" in log
        assert "to stderr" in log


def test_a_module_runs_and_only_rank_0_is_shown(tmp_path, monkeypatch, capfd):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("import sys; print('from a module', sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    assert launch_local(request(script="package.train", arguments=("-x",), num_workers=2, module=True)) == 0
    assert capfd.readouterr().out == "from a module ['-x']\n"


def test_the_first_failing_worker_gives_the_status_and_the_others_are_stopped(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(launch, "_END_BY_THEMSELVES_S", 0.5)
    monkeypatch.setattr(launch, "_TERMINATE_S", 0.3)
    text = """
    import os, signal, subprocess, sys, time
    rank = int(os.environ["RANK"])
    if rank == 2:
        sys.exit(75)       # as a rank that ends because another one failed
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "kill" else sys.exit(7)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    loader = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    print(loader.pid, flush=True)
    time.sleep(120)
    """
    train = script(tmp_path, text)
    for how, status, said in (("exit", 7, "ended with status 7"), ("kill", 137, "was killed by SIGKILL")):
        began_s = time.monotonic()
        assert launch_local(request(script=train, arguments=(how,), num_workers=3)) == status
        output = capfd.readouterr()
        assert f"rank 1 (pid {output.err.split('(pid ')[1].split(')')[0]}) {said}" in output.err
        assert "rank 0 did not end by itself and was killed" in output.err
        assert output.err.count("\n") == 1
        assert not alive(int(output.out)), "loader workers end with their worker"
        assert time.monotonic() - began_s < 10


def alive(*pids):
    """Return those processes that have not ended within 3 s; killing takes effect a little later."""
    end_s = time.monotonic() + 3
    while living := [pid for pid in pids if psutil.pid_exists(pid) and not is_zombie(pid)]:
        if time.monotonic() > end_s:
            break
        time.sleep(0.02)
    return living


def is_zombie(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def running(command):
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment(), stdout=pipe, stderr=pipe) as process:
        try:
            yield process
        finally:
            process.kill()


def started(process, number):
    """Wait for the pids of `number` processes, one a line."""
    return [int(process.stdout.readline().split()[-1]) for _ in range(number)]


SLEEPS = """
import os, signal, subprocess, sys, time
if os.environ["RANK"] == "1" and sys.argv[1] == "stubborn":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
loader = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
print(f"{loader.pid}\\n{os.getpid()}", flush=True)
try:
    time.sleep(120)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(
    ("number", "status", "how"), [(signal.SIGINT, 130, "stubborn"), (signal.SIGTERM, 143, "polite")]
)
def test_a_signal_to_the_launcher_ends_everything(tmp_path, monkeypatch, capfd, number, status, how):
    assert launch._INTERRUPT_S + launch._TERMINATE_S < 5.0
    monkeypatch.setattr(launch, "_INTERRUPT_S", 0.8)
    monkeypatch.setattr(launch, "_TERMINATE_S", 0.3)
    logs = tmp_path / "logs"
    pids = []

    def signal_once_all_have_started():
        while len(pids) < 4:
            pids[:] = [int(pid) for log in logs.glob("*.log") for pid in log.read_text().split()]
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=signal_once_all_have_started)
    thread.start()
    wanted = request(script=script(tmp_path, SLEEPS), arguments=(how,), num_workers=2, logs=logs)
    assert launch_local(wanted) == status
    thread.join()
    errors = capfd.readouterr().err
    assert errors.count("\n") == 1
    assert signal.Signals(number).name in errors
    assert not alive(*pids)


def test_no_worker_outlives_a_killed_launcher(tmp_path):
    text = "import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(120)"
    command = [*RAGTAG, "launch", "--fixed", "--no-page", "--local", "2", "--all-output", script(tmp_path, text)]
    with running(command) as process:
        pids = started(process, 2)
        process.kill()
        process.wait()
        assert not alive(*pids)


def test_ranks_meet_and_an_exception_is_printed_once(tmp_path):
    answer = run([*RAGTAG, "launch", "--fixed", "--no-page", "--local", "3", script(tmp_path, TRAINS), "raise"])
    assert answer.returncode == 1
    assert answer.stdout == "sum 3.0 3\n"
    assert answer.stderr.count("ValueError: bad sample") == 1
    assert answer.stderr.count("Traceback (most recent call last)") == 1
    assert "[rank 1] [ragtag] on rank 1 (" in answer.stderr
    assert "PeerFailed" not in answer.stderr
    last = answer.stderr.splitlines()[-1]
    assert last.startswith("ragtag launch: rank 1 (pid ")
    assert last.endswith("ended with status 1")


def test_ranks_meet_in_torchruns_store_and_end_in_silence(tmp_path):
    answer = run([*TORCHRUN, "--standalone", "--nproc-per-node=3", script(tmp_path, TRAINS), "end"])
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == "sum 3.0 3\n"
    assert answer.stderr == ""


def test_ranks_meet_at_rank_0_when_torchrun_shares_no_store(tmp_path):
    command = [*TORCHRUN, "--nproc-per-node=3", "--master-port", free_port(), script(tmp_path, TRAINS), "raise"]
    answer = run(command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert answer.returncode == 1
    assert answer.stdout == "sum 3.0 3\n"
    assert answer.stderr.count("ValueError: bad sample") == 1
    assert "PeerFailed" not in answer.stderr


def test_ctrl_c_during_training_is_quiet_and_leaves_nothing(tmp_path):
    command = [
        *RAGTAG,
        "launch",
        "--fixed",
        "--no-page",
        "--local",
        "2",
        "--all-output",
        script(tmp_path, TRAINS),
        "forever",
    ]
    with running(command) as process:
        pids = started(process, 2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors.decode().splitlines() == ["ragtag launch: stopped by SIGINT; all 2 workers have ended"]
    assert not alive(*pids)
