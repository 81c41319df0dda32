import json
import logging
import threading
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.values import DocumentError
from ragtag.watch.events import AnyEvent, Began, Member, Members, Planned, Said, Step
from ragtag.watch.log_file import LogFile, part
from ragtag.watch.reader import Decoder, Follower, parts_of, read
from ragtag.watch.writer import LogWriter

MEMBERS = Members(step=0, ranks=(Member(name="desk/0", host="desk"), Member(name="home/0", host="home")))
PLANNED = Planned(step=0, id="abc", shares=(3, 5), micro_batch=(3, 5))


def append(path, *events):
    with LogFile(path) as file:
        file.append(encoded(*events))


class Refusing:
    """Writes once it is `open`."""

    def __init__(self, wait_s: float = 0.0):
        self.open, self.written, self._wait_s = threading.Event(), [], wait_s

    def append(self, lines):
        if not self.open.wait(self._wait_s):
            raise OSError("No space left on device")
        self.written.extend(lines)

    def close(self):
        pass


def encoded(*events):
    return [msgspec.json.encode(event) for event in events]


def steps_of(events):
    return [event.number for event in events if isinstance(event, Step)]


def test_what_is_written_is_read(tmp_path: Path):
    events = [Began(run="r", global_batch_size=8), MEMBERS, PLANNED, Step(number=1, loss=2.5, shares=(3, 5))]
    writer = LogWriter(LogFile(tmp_path / "run" / "log.jsonl"), "the log")
    for event in events:
        writer.write(event)
    writer.close()
    found = list(read(tmp_path / "run" / "log.jsonl"))
    assert [msgspec.structs.replace(event, t=0.0) for event in found] == events
    assert all(abs(event.t - time.time()) < 60 for event in found)


def test_what_is_no_number_is_null(tmp_path: Path):
    append(tmp_path / "log.jsonl", Step(number=1, loss=float("nan"), grad_norm=float("inf")))
    [step] = read(tmp_path / "log.jsonl")
    assert isinstance(step, Step)
    assert step.loss is None
    assert step.grad_norm is None


def test_a_large_log_goes_on_in_new_parts_that_each_can_be_read_alone(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    with LogFile(path, part_bytes=1000) as file:
        file.append(encoded(Began(run="r", step=7), MEMBERS, PLANNED))
        for number in range(1, 101):
            file.append(encoded(Step(number=number, loss=1.0)))
    assert len(parts_of(path)) > 3
    assert steps_of(read(path)) == list(range(1, 101))
    assert sum(isinstance(event, Began) for event in read(path)) == 1, "the run began once"
    second = [json.loads(line) for line in part(path, 2).read_text().splitlines()]
    assert [event["kind"] for event in second[:3]] == ["began", "members", "plan"]
    assert second[0] == {"kind": "began", "run": "r", "step": 7, "continued": True}


def test_a_run_that_goes_on_appends_and_ends_a_torn_line(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    append(path, Step(number=1, loss=1.0))
    with open(path, "ab") as file:
        file.write(b'{"kind":"step","number":2,"lo')  # killed here
    append(path, Step(number=2, loss=1.0))
    decoder = Decoder()
    assert steps_of(read(path, decoder)) == [1, 2]
    assert decoder.skipped == 1


def test_lines_that_are_none_are_skipped_and_counted(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'\n{"kind":"step","number":1,"loss":1}\n\xff\xfe\n{"kind":"later"}\n{"kind":"step"}\n[]\nnull\n')
    decoder = Decoder()
    assert steps_of(read(path, decoder)) == [1]
    assert (decoder.skipped, decoder.unknown) == (1, 4)


def test_fields_of_a_newer_version_are_passed_over(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"kind":"step","number":1,"loss":1,"mood":"good"}\n')
    assert steps_of(read(path)) == [1]


def test_no_log_is_one_error(tmp_path: Path):
    with pytest.raises(DocumentError, match=r"There is no event log at .*log\.jsonl"):
        list(read(tmp_path / "log.jsonl"))


@given(st.lists(st.integers(0, 400), max_size=12), st.integers(300, 3000), st.integers(200, 900))
def test_a_follower_sees_every_line_once_however_the_log_grows(tmp_path_factory, looks, part_bytes, most_bytes):
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    follower, found = Follower(path), []
    assert follower.new() == []
    with LogFile(path, part_bytes=part_bytes) as file:
        file.append(encoded(Began(run="r"), MEMBERS))
        for number in range(1, 60):
            file.append(encoded(Step(number=number, loss=1.0)))
            if number * 7 % 400 in looks:
                found += follower.new(most_bytes)
    while new := follower.new(most_bytes):
        found += new
    assert steps_of(found) == list(range(1, 60))
    assert follower.decoder.skipped == 0


def test_a_follower_waits_for_the_end_of_a_line(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    follower = Follower(path)
    line = encoded(Step(number=1, loss=1.0))[0]
    path.write_bytes(line[:20])
    assert follower.new() == []
    path.write_bytes(line + b"\n")
    assert steps_of(follower.new()) == [1]


def test_a_disk_that_refuses_is_complained_of_once_and_what_was_lost_is_counted(caplog):
    disk = Refusing()
    with caplog.at_level(logging.WARNING, logger="ragtag"):
        writer = LogWriter(disk, "runs/1/log.jsonl", every_s=0.01)
        writer.write(Step(number=1, loss=1.0))
        end_s = time.monotonic() + 10
        while not caplog.records and time.monotonic() < end_s:
            time.sleep(0.01)
        writer.write(Step(number=2, loss=1.0))
        disk.open.set()
        writer.close()
    assert [record.message for record in caplog.records] == [
        "the run's log runs/1/log.jsonl cannot be written: No space left on device. Training goes on without it."
    ]
    events = [msgspec.json.decode(line, type=AnyEvent) for line in disk.written]
    assert steps_of(events) == [2]
    assert any(isinstance(event, Said) and event.text.startswith("1 events were too many") for event in events)


def test_a_queue_that_is_full_holds_nobody_up():
    disk = Refusing(wait_s=20.0)
    writer = LogWriter(disk, "a slow disk", capacity=10, every_s=0.001)
    began_s = time.monotonic()
    for number in range(5000):
        writer.write(Step(number=number, loss=1.0))
    assert time.monotonic() - began_s < 5, "nothing waited for the disk"
    disk.open.set()
    writer.close(10)
    said = [event for line in disk.written if isinstance(event := msgspec.json.decode(line, type=AnyEvent), Said)]
    lost = sum(int(event.text.split()[0]) for event in said)
    assert lost + len(disk.written) - len(said) == 5000
