import logging
import sys
import types
import urllib.request

import pytest
from tests.watch.example_log import events as example_events

from ragtag.core.errors import SettingError
from ragtag.watch.events import Members, Step, Verdict
from ragtag.watch.sinks import Sinks, sinks_of


@pytest.fixture(scope="module")
def events():
    return list(example_events())


def newest(kind, events):
    return [event for event in events if isinstance(event, kind)][-1]


def test_tensorboard_reads_what_was_written(tmp_path, events):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks = sinks_of(tensorboard=tmp_path)
    for event in events:
        sinks.take(event)
    sinks.close()
    board = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    board.Reload()
    steps = {event.number: event for event in events if isinstance(event, Step)}
    for tag, wanted in (("loss", "loss"), ("eta", "eta"), ("comm_s", "comm_s")):
        found = {each.step: each.value for each in board.Scalars(tag)}
        expected = {number: getattr(step, wanted) for number, step in steps.items() if getattr(step, wanted)}
        assert found == pytest.approx(expected, rel=1e-5)
    name = newest(Members, events).ranks[0].name
    assert board.Scalars(f"device/{name}/share")[-1].value == newest(Step, events).shares[0]
    assert board.Scalars(f"device/{name}/adds")[-1].value == pytest.approx(newest(Verdict, events).devices[0].gain)


def test_prometheus_is_served_the_newest_numbers_and_forgets_who_has_left(events):
    from ragtag.watch.sinks.prometheus import Prometheus

    sink = Prometheus(0)
    try:
        for event in events:
            sink.take(event)
        with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    finally:
        sink.close()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    step, members = newest(Step, events), newest(Members, events)
    assert float(values["ragtag_step"]) == step.number
    assert float(values["ragtag_eta"]) == step.eta
    assert float(values["ragtag_members"]) == len(members.ranks)
    shares = {line: value for line, value in values.items() if line.startswith("ragtag_device_share")}
    assert shares == {
        f'ragtag_device_share{{device="{member.name}",host="{member.host}"}}': str(float(share))
        for member, share in zip(members.ranks, step.shares)
    }


def test_weights_and_biases_gets_the_same(monkeypatch, events):
    logged, config, finished = [], {}, []
    fake = types.SimpleNamespace(
        config=types.SimpleNamespace(update=config.update),
        log=lambda row, step: logged.append((step, row)),
        finish=lambda: finished.append(True),
    )
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda project: fake))
    monkeypatch.delitem(sys.modules, "ragtag.watch.sinks.wandb", raising=False)
    sinks = sinks_of(wandb="odd machines")
    for event in events:
        sinks.take(event)
    sinks.close()
    monkeypatch.delitem(sys.modules, "ragtag.watch.sinks.wandb", raising=False)
    assert finished
    assert config["global_batch_size"] > 0
    numbers = {event.number: event.loss for event in events if isinstance(event, Step)}
    assert {step: row["loss"] for step, row in logged if "loss" in row} == numbers


def test_one_that_fails_is_said_once_and_the_others_go_on(caplog, events):
    class Good:
        name = "good"

        def __init__(self):
            self.taken = 0

        def take(self, event):
            self.taken += 1

        def close(self):
            pass

    class Bad(Good):
        name = "Bad One"

        def take(self, event):
            raise OSError("no space")

    good = Good()
    sinks = Sinks([Bad(), good])
    with caplog.at_level(logging.WARNING, logger="ragtag"):
        for event in events:
            sinks.take(event)
        sinks.close()
    assert good.taken == len(events)
    assert [record.message for record in caplog.records] == ["Bad One is left out from now on: OSError: no space"]


def test_a_package_that_is_missing_and_a_port_that_is_taken_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "ragtag.watch.sinks.wandb", raising=False)
    with pytest.raises(SettingError, match=r"Weights & Biases needs a package .* pip install 'ragtag\[wandb\]'"):
        sinks_of(wandb="x")
    from ragtag.watch.sinks.prometheus import Prometheus

    sink = Prometheus(0)
    try:
        with pytest.raises(SettingError, match=rf"--prometheus {sink.port}: Address already in use"):
            sinks_of(prometheus=sink.port)
    finally:
        sink.close()
