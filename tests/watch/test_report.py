import io
import itertools
import json
import subprocess
import sys
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from tests.watch import example_log

from ragtag.cli.report import run_report
from ragtag.core.errors import SettingError
from ragtag.core.values import DocumentError
from ragtag.watch.events import Decided, Members, Planned, Step, Verdict
from ragtag.watch.log_file import LogFile
from ragtag.watch.reader import read
from ragtag.watch.state import RunState
from ragtag.watch.trace import write_trace


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "log.jsonl"
    with LogFile(path) as file:
        file.append([msgspec.json.encode(event) for event in example_log.events(ended=True)])
    return path


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.words, self.open, self.sources, self.tags = "", [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


def test_the_page_says_what_the_log_says_and_needs_nothing_else(log, capsys):
    run_report(log.parent, output=None, trace=None, as_json=False)
    text = (log.parent / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.sources == []
    assert "script" not in page.tags
    assert "url(" not in text
    events = list(read(log))
    steps = [event for event in events if isinstance(event, Step)]
    assert f"{len({step.number for step in steps})} steps" in page.words.replace(",", "")
    for kind, field in ((Verdict, "devices"), (Members, "ranks")):
        for device in getattr([event for event in events if isinstance(event, kind)][-1], field):
            assert device.name in page.words
    for worth in [event for event in events if isinstance(event, Verdict)][-1].devices:
        assert worth.text in page.words
    for decision in (event for event in events if isinstance(event, Decided)):
        assert decision.reason in page.words
        if decision.achieved_step_s is not None:
            assert f"achieved {decision.achieved_step_s:.3g} s" in page.words
    assert capsys.readouterr().err.startswith(f"{log.parent / 'report.html'}: ")


def test_json_has_the_very_numbers_of_the_log(log, capsys):
    run_report(log, output=None, trace=None, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    events = list(read(log))
    last = [event for event in events if isinstance(event, Step)][-1]
    assert shown["now"]["eta"] == last.eta
    assert shown["now"]["loss"] == last.loss
    verdict = {worth.name: worth for worth in [e for e in events if isinstance(e, Verdict)][-1].devices}
    ranks = [event for event in events if isinstance(event, Members)][-1].ranks
    here = [device for device in shown["devices"] if device["rank"] is not None]
    assert [device["name"] for device in here] == [member.name for member in ranks]
    assert [device["share"] for device in here] == list(last.shares)
    for device in here:
        if device["name"] in verdict:
            assert device["verdict"]["gain"] == verdict[device["name"]].gain
            assert device["verdict"]["text"] == verdict[device["name"]].text


def test_names_and_reasons_cannot_write_html(tmp_path):
    evil = "<script>alert(1)</script>"
    path = tmp_path / "log.jsonl"
    events = [
        msgspec.structs.replace(event, reason=evil) if isinstance(event, Decided | Planned) else event
        for event in example_log.events()
    ]
    with LogFile(path) as file:
        file.append([msgspec.json.encode(event) for event in events])
    run_report(path, output=tmp_path / "r.html", trace=None, as_json=False)
    assert "<script" not in (tmp_path / "r.html").read_text()


def test_the_trace_has_a_track_for_each_device_and_slices_that_do_not_overlap(log, tmp_path, capsys):
    run_report(log, output=None, trace=tmp_path / "trace.json", as_json=False)
    trace = json.loads((tmp_path / "trace.json").read_text())
    tracks = {each["tid"]: each["args"]["name"] for each in trace if each["name"] == "thread_name"}
    members = [member for event in read(log) if isinstance(event, Members) for member in event.ranks]
    assert {name.partition(" (")[0] for name in tracks.values()} == {member.name for member in members}
    slices = [each for each in trace if each["ph"] == "X"]
    assert {each["name"] for each in slices} >= {"busy", "waiting", "communicating"}
    for track in tracks:
        mine = sorted((each["ts"], each["ts"] + each["dur"]) for each in slices if each["tid"] == track)
        assert all(end <= start + 1 for (_, end), (start, _) in itertools.pairwise(mine))
    steps = {event.number: event for event in read(log) if isinstance(event, Step)}
    whole_s = sum(each["dur"] for each in slices if each["args"]["step"] == 5) / 1e6
    assert whole_s == pytest.approx(len(steps[5].shares) * steps[5].wall_s, rel=0.02)
    assert f"{len(slices):,} slices" in capsys.readouterr().err


def test_no_log_and_a_place_that_cannot_be_written_are_one_error_each(tmp_path, log):
    with pytest.raises(DocumentError, match="There is no event log at"):
        run_report(tmp_path / "none.jsonl", output=None, trace=None, as_json=False)
    with pytest.raises(SettingError, match=r"The report .* cannot be written: .* --output"):
        run_report(log, output=tmp_path / "no" / "r.html", trace=None, as_json=False)
    with pytest.raises(SettingError, match=r"--trace .*: No such file"):
        run_report(log, output=None, trace=tmp_path / "no" / "t.json", as_json=False)


def test_a_damaged_log_is_reported_as_far_as_it_goes(log, tmp_path, capsys):
    content = log.read_bytes()
    path = tmp_path / "log.jsonl"
    path.write_bytes(content[: len(content) // 2] + b"\x00\xff garbage\n" + content[len(content) // 2 :])
    run_report(path, output=tmp_path / "r.html", trace=None, as_json=False)
    assert "lines of the log were damaged and are left out" in (tmp_path / "r.html").read_text()


def test_memory_does_not_grow_with_the_log():
    def peak(steps: int) -> int:
        state = RunState()
        tracemalloc.start()
        for event in example_log.events(100):
            if not isinstance(event, Step):
                state.apply(event)
        template = [event for event in example_log.events(100) if isinstance(event, Step)][-1]
        for number in range(1, steps + 1):
            state.apply(msgspec.structs.replace(template, number=number, loss=1.0 / number))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(20_000) < 1.3 * peak(10_000)


def test_a_trace_is_written_as_it_is_read():
    out = io.BytesIO()
    sizes = []

    def watched():
        for event in example_log.events(60):
            sizes.append(out.tell())
            yield event

    write_trace(watched(), out)
    assert sizes[len(sizes) // 2] > 0.2 * sizes[-1]


def test_the_command_starts_without_torch():
    code = (
        "import sys, ragtag.cli.report, ragtag.cli.main; "
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    source = Path(__file__).parents[2] / "src"
    answer = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(source)}, capture_output=True, text=True, timeout=60
    )
    assert answer.stdout.strip() == "[]", answer.stderr
