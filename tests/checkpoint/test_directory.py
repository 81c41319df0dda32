import uuid

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.checkpoint.directory import (
    Directory,
    Mark,
    Pointer,
    View,
    candidates,
    mark_of,
    newest_good,
    run_to_continue,
)
from ragtag.checkpoint.storage import open_storage
from ragtag.core.errors import CheckpointError

RUN, OTHER = "20260101-120000-abcdef", "20260101-130000-012345"


def mark(step, generation=0, run=RUN):
    return Mark(run=run, generation=generation, step=step)


def pointer_to(mark):
    return msgspec.json.encode(Pointer.to(mark)).decode()


def steps_in(directory, run=RUN):
    found = map(mark_of, directory.view().files)
    return [each.age for each in sorted(filter(None, found), key=lambda each: each.age) if each.run == run]


@pytest.fixture(params=["local", "memory://"])
def directory(request, tmp_path):
    directory = Directory(open_storage(tmp_path if request.param == "local" else f"memory://{uuid.uuid4()}"))
    directory.prepare()
    return directory


@given(
    st.builds(Mark, run=st.from_regex(r"[0-9a-z-]+", fullmatch=True), generation=st.integers(0), step=st.integers(0))
)
def test_a_name_says_which_checkpoint(made):
    assert mark_of(made.name) == made
    assert mark_of(f".{made.name}.0a1b.partial") is None
    assert mark_of(f"x{made.name}y") is None


def test_the_newest_are_kept_and_the_pointer_follows(directory):
    for step in (2, 4, 6, 8):
        directory.save(mark(step), {"committed": step}, keep=3)
        assert directory.pointer() == mark(step)
    assert steps_in(directory) == [(0, 4), (0, 6), (0, 8)]
    directory.save(mark(5, generation=1), {"committed": 5}, keep=2)
    assert steps_in(directory) == [(0, 8), (1, 5)], "what a later start wrote is newer"
    assert newest_good(directory)[1] == {"committed": 5}


def test_those_known_to_be_bad_do_not_count(directory):
    for step in (2, 4, 6):
        directory.save(mark(step), step, keep=9)
    directory.save(mark(5, generation=1), 5, keep=2, bad=[mark(6)])
    assert steps_in(directory) == [(0, 4), (0, 6), (1, 5)]
    directory.save(mark(7, generation=1), 7, keep=2, bad=[mark(6)])
    assert steps_in(directory) == [(1, 5), (1, 7)]


def test_other_runs_and_other_files_are_never_removed(directory, tmp_path):
    directory.save(mark(9, run=OTHER), 9, keep=1)
    directory._storage.write_text("notes.txt", "mine")
    for step in (1, 2):
        directory.save(mark(step), step, keep=1)
    assert steps_in(directory) == [(0, 2)]
    assert steps_in(directory, OTHER) == [(0, 9)]
    assert directory._storage.read_text("notes.txt") == "mine"


def test_who_is_behind_does_not_take_the_pointer_back(directory):
    directory.save(mark(5, generation=1), 5, keep=3)
    for late in (mark(9), mark(4, generation=1)):
        with pytest.raises(CheckpointError, match=r"has a newer checkpoint of this run already, .*step-00000005"):
            directory.save(late, 0, keep=3)
    assert directory.pointer() == mark(5, generation=1)
    assert steps_in(directory) == [(1, 5)]


def test_who_falls_behind_while_writing_does_not_either(directory, monkeypatch):
    directory.save(mark(5), 5, keep=3)

    def overtaken(name, tree, confirm, *, parts, save=directory._storage.save):
        save(name, tree, confirm)
        directory._storage.write_text("latest.json", pointer_to(mark(7, generation=1)))

    monkeypatch.setattr(directory._storage, "save", overtaken)
    with pytest.raises(CheckpointError, match="another process has gone on"):
        directory.save(mark(6), 6, keep=1)
    assert directory.pointer() == mark(7, generation=1)
    assert (0, 5) in steps_in(directory)


def test_a_failing_write_removes_nothing_and_moves_no_pointer(directory, monkeypatch):
    directory.save(mark(1), 1, keep=1)

    def fail(*arguments, **words):
        raise CheckpointError("no space")

    for broken in ("save", "write_text"):
        with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="no space"):
            patch.setattr(directory._storage, broken, fail)
            directory.save(mark(2), 2, keep=1)
        assert directory.pointer() == mark(1)
        assert directory.load(mark(1)) == 1


def test_what_cannot_be_removed_is_only_warned_of(directory, monkeypatch, caplog):
    directory.save(mark(1), 1, keep=1)

    def fail(name):
        raise CheckpointError(f"cannot remove {name}")

    monkeypatch.setattr(directory._storage, "remove", fail)
    directory.save(mark(2), 2, keep=1)
    assert directory.pointer() == mark(2)
    assert "cannot remove" in caplog.text


def test_what_a_killed_writer_left_goes_with_the_next_checkpoint(tmp_path):
    directory = Directory(open_storage(tmp_path))
    mine, others = (tmp_path / f".{mark(3, run=run).name}.1f2e3d4c.partial" for run in (RUN, OTHER))
    mine.write_bytes(b"x")
    others.write_bytes(b"x")
    directory.save(mark(5), 5, keep=1)
    assert not mine.exists()
    assert others.exists()


def test_no_flipped_bit_leads_to_another_checkpoint(tmp_path):
    directory = Directory(open_storage(tmp_path))
    content = pointer_to(mark(8)).encode()
    for position in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[position] ^= 1 << bit
            (tmp_path / "latest.json").write_bytes(flipped)
            assert directory.pointer() is None, bytes(flipped)


@pytest.mark.parametrize("text", [None, "", "{", '{"checkpoint": 3}', "[]"])
def test_without_a_readable_pointer_the_run_that_began_last_is_continued(directory, text):
    directory.save(mark(8), 8, keep=3)
    directory.save(mark(2, run=OTHER), 2, keep=3)
    directory._storage.remove("latest.json")
    if text is not None:
        directory._storage.write_text("latest.json", text)
    assert directory.pointer() is None
    assert newest_good(directory)[0] == mark(2, run=OTHER)


def test_the_pointer_says_which_run(directory):
    directory.save(mark(2, run=OTHER), 2, keep=3)
    directory.save(mark(1), 1, keep=3)
    assert newest_good(directory)[0] == mark(1)


def test_a_damaged_one_is_passed_over_with_a_warning(tmp_path, caplog):
    directory = Directory(open_storage(tmp_path))
    for step in (1, 2, 3):
        directory.save(mark(step), step, keep=3)
    for step in (2, 3):
        file = tmp_path / mark(step).name
        file.write_bytes(file.read_bytes()[:-1])
    assert newest_good(directory) == (mark(1), 1)
    assert [mark(3).name in caplog.messages[0], mark(2).name in caplog.messages[1]] == [True, True]
    (tmp_path / mark(1).name).unlink()
    with pytest.raises(CheckpointError, match=f"there is no checkpoint in {tmp_path} that can be read"):
        newest_good(directory)


def files(*marks, disk="0"):
    return {each.name: disk for each in marks}


def test_each_rank_reads_what_only_it_has():
    views = [
        View(files=files(mark(2), mark(4), disk="a"), pointer=mark(4)),
        View(files=files(mark(6), mark(4), disk="b"), pointer=mark(6)),
        View(files=files(mark(6), disk="b")),
    ]
    assert run_to_continue(views) == RUN
    assert candidates(views, RUN) == [(mark(6), 1), (mark(4), 0), (mark(4), 1), (mark(2), 0)]


def test_a_run_that_began_later_on_another_disk_is_the_one():
    views = [
        View(files=files(mark(9)), pointer=mark(9)),
        View(files=files(mark(1, run=OTHER)), pointer=mark(1, run=OTHER)),
    ]
    assert run_to_continue(views) == OTHER
    assert candidates(views, OTHER) == [(mark(1, run=OTHER), 1)]
    assert run_to_continue([View()]) is None
