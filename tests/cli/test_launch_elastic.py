"""`ragtag launch` of runs whose workers come and go: what a person at the terminal reads, and the exit status."""

import contextlib
import os
import re
import secrets
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

from ragtag.cli import launch_elastic as module
from ragtag.cli.elastic_request import elastic_request
from ragtag.cli.hub_process import HubProcess
from ragtag.cli.hub_question import Health, Member
from ragtag.cli.launch import request
from ragtag.cli.launch_elastic import launch_elastic
from ragtag.core.errors import LaunchError, SettingError

SOURCE = Path(__file__).parents[2] / "src"
RAGTAG = [sys.executable, "-m", "ragtag.cli.main"]
PATIENCE_S = 3.0


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    """Short waits, and a directory of its own for journals."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAGTAG_PATIENCE_S", str(PATIENCE_S))
    monkeypatch.setenv("RAGTAG_HOSTNAME", "home")
    monkeypatch.setattr(module, "_END_BY_THEMSELVES_S", 0.5)
    monkeypatch.setattr(module, "_INTERRUPT_S", 1.0)
    monkeypatch.setattr(module, "_TERMINATE_S", 0.3)
    monkeypatch.setattr(module, "_PAUSE_S", 0.02)


def script(text):
    Path("train.py").write_text("import os, signal, sys, time\nworker = os.environ['RANK']\n" + textwrap.dedent(text))
    return "train.py"


def launched(text, *arguments, workers=1, capfd, elastic=None, **words):
    """Run a script; return the exit status and the lines on standard error, without the one to type elsewhere."""
    wanted = request(script=script(text), arguments=arguments, num_workers=workers, **words)
    status = launch_elastic(wanted, elastic or elastic_request())
    output = capfd.readouterr()
    join = re.compile(r"ragtag launch: (more workers|joining)|  RAGTAG_TOKEN=|  and from other machines")
    return status, [line for line in output.err.splitlines() if not join.match(line)], output.out


def test_the_line_to_type_elsewhere_says_how_to_let_other_machines_in(capfd):
    wanted = request(script=script(""), arguments=("--name", "two words"), num_workers=1)
    assert launch_elastic(wanted, elastic_request()) == 0
    first, second, third = capfd.readouterr().err.splitlines()[:3]
    assert first == "ragtag launch: more workers join from another terminal with"
    pattern = r"  RAGTAG_TOKEN=\w{32} ragtag launch --hub 127\.0\.0\.1:\d+ train.py --name 'two words'"
    assert re.fullmatch(pattern, second)
    assert "--address" in third
    assert launch_elastic(wanted, elastic_request(address="0.0.0.0", environ={"RAGTAG_TOKEN": "mine"})) == 0
    first, second = capfd.readouterr().err.splitlines()[:2]
    assert first == "ragtag launch: other machines join with"
    assert second.startswith(f"  RAGTAG_TOKEN=mine ragtag launch --hub {socket.gethostname()}:")


def test_workers_get_their_place_input_goes_to_the_first_and_output_where_it_should(monkeypatch):
    text = """
    names = ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RAGTAG_WORKER", "RAGTAG_CHECKPOINT"]
    print(*(os.environ.get(name) for name in names), sys.stdin.read().strip(), "WORLD_SIZE" in os.environ)
    print("to stderr", file=sys.stderr)
    """
    words = ["--elastic", "--local", "2", "--all-output", "--logs", "logs", "--checkpoint", "c"]
    answer = subprocess.run(
        [*RAGTAG, "launch", *words, script(text)],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "WORLD_SIZE": "9"},
        input="typed",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 0, answer.stderr
    assert sorted(answer.stdout.splitlines()) == ["0 0 2 home/0 c typed False", "[worker 1] 1 1 2 home/1 c  False"]
    lines = answer.stderr.splitlines()
    assert "to stderr" in lines
    assert "[worker 1] to stderr" in lines
    assert "to stderr" in Path("logs/worker-1.log").read_text()
    assert "typed" in Path("logs/worker-0.log").read_text()


def test_a_worker_that_is_killed_is_replaced_with_one_line(capfd):
    text = """
    if not os.path.exists("second") and worker == "1":
        open("second", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    print("done")
    """
    status, errors, output = launched(text, workers=2, capfd=capfd, all_output=True, logs=Path("logs"))
    assert status == 0
    assert len(errors) == 1, errors
    assert re.fullmatch(r"ragtag launch: worker 1 \(pid \d+\) was killed by SIGKILL; starting another one", errors[0])
    assert sorted(output.splitlines()) == ["[worker 1] done", "done"]
    assert Path("logs/worker-1.log").read_text() == "done\n"


def test_a_worker_that_dies_again_and_again_is_given_up(capfd):
    text = "os.kill(os.getpid(), signal.SIGSEGV) if worker == '1' else time.sleep(float(sys.argv[1]))"
    status, errors, _ = launched(text, "0", workers=2, capfd=capfd)
    assert status == 0, "the others have trained to the end"
    assert len(errors) == 5, errors
    assert "was killed by SIGSEGV, and 5 times within" in errors[-1]
    assert "it stays away" in errors[-1]
    status, errors, _ = launched("os.kill(os.getpid(), signal.SIGKILL)", capfd=capfd)
    assert status == 128 + signal.SIGKILL
    assert len(errors) == 5, errors


def test_an_evicted_worker_is_started_again_and_says_why_itself(capfd):
    text = """
    if not os.path.exists("second"):
        open("second", "w").close()
        print("ragtag: home/0 (home) was given up", file=sys.stderr)
        sys.exit(76)
    """
    status, errors, _ = launched(text, capfd=capfd)
    assert (status, errors) == (0, ["ragtag: home/0 (home) was given up"])


def test_a_worker_that_has_lost_a_hub_that_answers_is_started_again(capfd):
    text = """
    if not os.path.exists("second" + worker):
        open("second" + worker, "w").close()
        print("ragtag: the hub has not been heard", file=sys.stderr)
        sys.exit(77)
    """
    status, errors, _ = launched(text, workers=2, capfd=capfd)
    assert status == 0
    heard = [line for line in errors if line.endswith("ragtag: the hub has not been heard")]
    assert 1 <= len(heard) <= 2, errors  # what both say at a time is shown once
    assert all(" answers; starting " in line for line in errors if line not in heard), errors


FAILS = """
if worker == "1" or sys.argv[1] == "all":
    raise ValueError("no such file: data.bin")
time.sleep(60)
"""


@pytest.mark.parametrize("who", ["one", "all"])
def test_a_script_that_fails_before_it_trains_ends_all_workers_and_is_printed_once(capfd, who):
    began_s = time.monotonic()
    status, errors, _ = launched(FAILS, who, workers=3, capfd=capfd)
    assert status == 1
    assert time.monotonic() - began_s < 15
    text = "\n".join(errors)
    assert text.count("Traceback") == 1, text
    assert text.count("ValueError: no such file: data.bin") == 1, text
    if who == "one":
        assert "[worker 1] ValueError: no such file" in text
    ends = [line for line in errors if "ended with status 1" in line]
    assert len(ends) == 1, text


def test_a_replacement_that_fails_alone_leaves_the_others_alone(capfd):
    text = """
    if worker == "1":
        if os.path.exists("second"):
            sys.exit("no space left")
        open("second", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    while not os.path.exists("second"):
        time.sleep(0.02)
    time.sleep(2)
    print("trained")
    """
    status, errors, output = launched(text, workers=2, capfd=capfd)
    assert "[worker 1] no space left" in errors
    assert output == "trained\n"
    assert status == 1


SLEEPS = """
import subprocess
if sys.argv[1] == "stubborn" and worker == "1":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
loader = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
with open(f"pids-{worker}.new", "w") as file:
    print(loader.pid, os.getpid(), file=file)
os.rename(f"pids-{worker}.new", f"pids-{worker}")
time.sleep(120)
"""


@pytest.mark.parametrize(("number", "how"), [(signal.SIGINT, "stubborn"), (signal.SIGTERM, "polite")])
def test_a_signal_ends_everything_within_seconds(capfd, number, how):
    def signal_once_all_have_started():
        while len(list(Path().glob("pids-?"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=signal_once_all_have_started)
    thread.start()
    status, errors, _ = launched(SLEEPS, how, workers=2, capfd=capfd)
    thread.join()
    assert status == 128 + number
    assert errors == [f"ragtag launch: stopped by {signal.Signals(number).name}; all 2 workers have ended"]
    pids = [int(pid) for file in Path().glob("pids-?") for pid in file.read_text().split()]
    end_s = time.monotonic() + 3
    while any(_alive(pid) for pid in pids) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not [pid for pid in pids if _alive(pid)]


def _alive(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_the_hub_is_started_again_when_it_is_killed(capfd):
    text = """
    import subprocess
    time.sleep(0.5)
    parent = os.getppid()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open(f"/proc/{pid}/cmdline").read().split(chr(0))
            status = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
        except OSError:
            continue
        if "ragtag.hub" in words and int(status[1]) == parent:
            os.kill(int(pid), signal.SIGKILL)
    time.sleep(0.5)
    """
    status, errors, _ = launched(text, capfd=capfd)
    assert status == 0
    assert len(errors) == 1, errors
    assert re.fullmatch(r"ragtag launch: the hub \(pid \d+\) was killed by SIGKILL; starting it again", errors[0])


@contextlib.contextmanager
def hub(directory):
    """A hub as on another machine, and the token."""
    token = secrets.token_hex(4)
    process = HubProcess(
        address="127.0.0.1",
        port=0,
        token=token,
        run="run",
        directory=directory,
        patience_s=PATIENCE_S,
        environ={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    process.start()
    try:
        yield process, token
    finally:
        process.close()


def test_a_guest_brings_its_workers_as_emulated_devices(tmp_path, capfd):
    Path("laptop.toml").write_text(
        '[[device]]\nname = "gpu"\nspeed = 1\ncount = 2\n[[device]]\nname = "cpu"\nspeed = 0.25\n'
        "[emulate]\nsample_ms = 1\n"
    )
    with hub(tmp_path / "journal") as (there, token):
        text = "print(worker, os.environ['RAGTAG_HUB'], os.path.basename(os.environ['RAGTAG_EMULATE']))"
        elastic = elastic_request(hub=there.at, token=token)
        wanted = request(script=script(text), emulate=Path("laptop.toml"), all_output=True)
        assert launch_elastic(wanted, elastic) == 0
        lines = sorted(line.removeprefix("[worker ") for line in capfd.readouterr().out.splitlines())
        assert [line.split()[-1] for line in lines] == ["laptop.toml"] * 3
        assert all(there.at in line for line in lines)


def test_a_guest_waits_for_a_hub_that_does_not_answer_and_gives_up_one_that_is_gone(tmp_path, capfd):
    text = """
    print("ragtag: the hub has not been heard", file=sys.stderr)
    open("lost", "w").close()
    sys.exit(77)
    """
    with hub(tmp_path / "journal") as (there, token):

        def close_once_lost():
            while not Path("lost").exists():
                time.sleep(0.02)
            there.close()

        thread = threading.Thread(target=close_once_lost)
        thread.start()
        status, errors, _ = launched(text, workers=2, capfd=capfd, elastic=elastic_request(hub=there.at, token=token))
        thread.join()
    assert status == 75
    assert [line for line in errors if line.startswith("ragtag launch")][-1].startswith(
        f"ragtag launch: nothing listens at {there.at} any more: the run has ended. Start it again on the machine"
    )
    assert sum("the hub has not been heard" in line for line in errors) <= 2


def answered(*words, **environ):
    answer = subprocess.run(
        [*RAGTAG, "launch", *words, script("")],
        env={**os.environ, "PYTHONPATH": str(SOURCE), **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 2, answer.stderr
    assert answer.stderr.startswith("ragtag: error: "), answer.stderr
    assert answer.stderr.count("\n") == 1, answer.stderr
    return answer.stderr


def test_wrong_token_nobody_there_and_a_port_that_is_taken_are_one_line_each(tmp_path):
    with hub(tmp_path / "journal") as (there, _):
        assert f"The hub at {there.at} does not know this token" in answered("--hub", there.at, "--token", "wrong")
        taken = there.at.rpartition(":")[2]
        said = answered("--address", "127.0.0.1", "--port", taken)
        assert f"cannot listen on 127.0.0.1, port {taken}: Address already in use" in said
    assert f"Nothing listens at {there.at}" in answered("--hub", there.at, RAGTAG_TOKEN="any")


def test_a_tunnel_is_no_way_to_join(monkeypatch):
    there = Health(run="run", members=(Member(name="attic/0", host="attic"),))
    monkeypatch.setattr(module, "ask", lambda *_, **__: there)
    with pytest.raises(LaunchError, match=r"localhost:29400 is an address inside this machine \(home\).* are on attic"):
        launch_elastic(request(script=script("")), elastic_request(hub="localhost:29400", token="t"))


def test_contradictions_are_refused_before_anything_starts(tmp_path, capfd):
    with pytest.raises(SettingError, match="--hub needs the run's token"):
        elastic_request(hub="10.0.0.1:29400", environ={})
    with pytest.raises(SettingError, match="HOST:PORT"):
        elastic_request(hub="10.0.0.1", token="t")
    with pytest.raises(SettingError, match="are for the first"):
        elastic_request(hub="10.0.0.1:29400", token="t", port=4)
    with pytest.raises(SettingError, match="--token goes with --hub"):
        elastic_request(token="t")
    with pytest.raises(SettingError, match="here workers come and go"):
        launch_elastic(request(script=script(""), num_workers=2, shares="1,2"), elastic_request())
    with pytest.raises(LaunchError, match="Give --address one of this machine's addresses"):
        launch_elastic(request(script=script(""), num_workers=1), elastic_request(address="203.0.113.7"))
    used = elastic_request(directory=tmp_path / "journal")
    assert launch_elastic(request(script=script(""), num_workers=1), used) == 0
    with pytest.raises(SettingError, match="holds the journal of an earlier start"):
        launch_elastic(request(script=script(""), num_workers=1), used)


TRAINS = """
import torch, ragtag
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.ones(64, 1))
trainer = ragtag.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.01),
    lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]), data, global_batch_size=8,
)
for step in trainer.steps(100000):
    if trainer.world_size == 3:
        print("together", flush=True)
        if sys.argv[1] == os.environ["RAGTAG_WORKER"] and step.number > 5:
            raise ValueError("a bad sample")
    time.sleep(0.02)
"""


def own_address():
    """An address of this machine that two machines could use, were they two."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.7", 9))
        except OSError:
            pytest.skip("this machine has no network")
        return probe.getsockname()[0]


@contextlib.contextmanager
def two_machines(*arguments):
    """`ragtag launch` on home, and on desk with two workers."""
    address = own_address()
    environ = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:

        def start(host, *words, token=""):
            output = stack.enter_context(open(host, "wb"))
            process = subprocess.Popen(
                [*RAGTAG, "launch", *words, script(TRAINS), *arguments],
                env={**environ, "RAGTAG_HOSTNAME": host, "RAGTAG_TOKEN": token},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        home = start("home", "--address", address, "--local", "1")
        while not (found := re.search(r"RAGTAG_TOKEN=(\S+) ragtag launch --hub (\S+) ", Path("home").read_text())):
            assert home.poll() is None
            time.sleep(0.02)
        yield home, start("desk", "--hub", found[2], "--local", "2", token=found[1])


def lines_of(host):
    return [line for line in Path(host).read_text().splitlines() if "together" not in line]


def test_an_error_in_training_ends_the_run_everywhere_and_names_worker_and_host():
    with two_machines("desk/1") as (home, desk):
        assert desk.wait(60) == 1
        assert home.wait(20) == 75
    errors = "\n".join(lines_of("desk"))
    assert errors.count("Traceback") == 1, errors
    assert "[worker 1] ValueError: a bad sample" in errors
    assert re.search(r"\[ragtag\] on rank \d \(desk\), step \d+", errors), errors
    assert lines_of("desk")[-1].endswith("ended with status 1"), errors
    errors = [line for line in lines_of("home") if line.startswith("ragtag: ") and "% " not in line]
    assert len(errors) == 1, lines_of("home")
    assert re.search(r"(desk/1|Rank \d) \(desk\) failed at step", errors[0]), errors
    assert "a bad sample" in errors[0]
    assert not any("Traceback" in line for line in lines_of("home"))


def test_ctrl_c_on_the_first_machine_ends_the_run_on_all():
    with two_machines("") as (home, desk):
        while "together" not in Path("home").read_text():
            assert home.poll() is None
            time.sleep(0.05)
        home.send_signal(signal.SIGINT)
        assert home.wait(10) == 130
        assert desk.wait(20) == 75
    assert lines_of("home")[-1] == "ragtag launch: stopped by SIGINT; all 1 workers have ended"
    errors = [line for line in lines_of("desk") if "Ctrl-C" in line]
    assert len(errors) == 1, lines_of("desk")
    # From the other rank or from the hub, whichever was first.
    assert re.search(r"Rank \d \(home\) was interrupted|the run was stopped with Ctrl-C on home", errors[0])
