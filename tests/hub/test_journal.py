import errno
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.hub import journal as journal_module
from ragtag.hub.journal import FILE_NAME, Journal, JournalError


class Began(msgspec.Struct, frozen=True, kw_only=True, tag="began"):
    number: int


class Said(msgspec.Struct, frozen=True, kw_only=True, tag="said"):
    text: str


RECORDS = Began | Said
SOME = (Began(number=1), Said(text="a\nline\0 with ünusual characters"), Began(number=2))


def opened(directory: Path, run: str = "r") -> Journal:
    return Journal(directory, run=run, records=RECORDS)


def written(directory: Path, *records) -> bytes:
    with opened(directory) as journal:
        for record in records:
            journal.append(record)
    return (directory / FILE_NAME).read_bytes()


def test_what_was_appended_is_there_after_a_restart(tmp_path):
    with opened(tmp_path / "new") as journal:
        assert journal.records == ()
        journal.append(SOME[0])
        journal.append(SOME[1], SOME[2])
    with opened(tmp_path / "new") as journal:
        assert journal.records == SOME
        journal.append(Began(number=3))
    with opened(tmp_path / "new") as journal:
        assert journal.records == (*SOME, Began(number=3))


def test_append_syncs_what_it_wrote(tmp_path, monkeypatch):
    path = tmp_path / FILE_NAME
    lines_when_synced = []
    with opened(tmp_path) as journal:
        sync = os.fsync
        monkeypatch.setattr(
            journal_module.os, "fsync", lambda fd: (lines_when_synced.append(path.read_bytes().count(b"\n")), sync(fd))
        )
        journal.append(SOME[0])
        journal.append(SOME[1], SOME[2])
    assert lines_when_synced == [2, 4]


@pytest.mark.parametrize("keep", ["opening", "records"])
def test_a_torn_last_line_is_dropped_wherever_it_is_torn(tmp_path, keep):
    content = written(tmp_path, *SOME)
    ends = [place + 1 for place, byte in enumerate(content) if byte == ord("\n")]
    first, last = (0, ends[0]) if keep == "opening" else (ends[2], ends[3])
    kept = () if keep == "opening" else SOME[:2]
    for cut in {*range(first, last, 7), last - 1}:
        (tmp_path / FILE_NAME).write_bytes(content[:cut])
        with opened(tmp_path) as journal:
            assert journal.records == kept
            journal.append(Began(number=9))
        with opened(tmp_path) as journal:
            assert journal.records == (*kept, Began(number=9))


def test_any_changed_byte_before_the_last_line_is_refused_with_its_line(tmp_path):
    content = written(tmp_path, *SOME)
    path = tmp_path / FILE_NAME

    @settings(max_examples=150)
    @given(place=st.integers(0, content.rindex(b"\n", 0, -1)), change=st.integers(1, 255))
    def check(place: int, change: int) -> None:
        damaged = bytearray(content)
        damaged[place] ^= change
        path.write_bytes(damaged)
        number = content[:place].count(b"\n") + 1
        with pytest.raises(JournalError, match=rf"{FILE_NAME}, line {number}: damaged"):
            opened(tmp_path)
        assert path.read_bytes() == damaged

    check()


def test_a_damaged_last_line_with_its_end_is_refused(tmp_path):
    content = written(tmp_path, *SOME).replace(b'"number":2', b'"number":3')
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(JournalError, match="line 4: damaged"):
        opened(tmp_path)


@pytest.mark.parametrize("order", [(0, 2, 3), (0, 1, 3), (0, 2, 1, 3), (0, 1, 1, 2, 3)])
def test_missing_moved_and_repeated_lines_are_refused(tmp_path, order):
    lines = written(tmp_path, *SOME).splitlines(keepends=True)
    (tmp_path / FILE_NAME).write_bytes(b"".join(lines[place] for place in order))
    with pytest.raises(JournalError, match="damaged"):
        opened(tmp_path)


def test_another_run_and_another_version_are_refused_by_name(tmp_path, monkeypatch):
    written(tmp_path, *SOME)
    with pytest.raises(JournalError, match="belongs to the run 'r', not to 'other'"):
        opened(tmp_path, run="other")
    with pytest.raises(JournalError, match="line 2: a record that this version of ragtag does not know"):
        Journal(tmp_path, run="r", records=Said)
    monkeypatch.setattr(journal_module, "SCHEMA", 2)
    with pytest.raises(JournalError, match="written as version 1; this ragtag reads version 2"):
        opened(tmp_path)


def test_a_foreign_file_is_left_as_it_is(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(b"somebody's notes")
    with pytest.raises(JournalError, match="line 1: damaged"):
        opened(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes() == b"somebody's notes"


def test_a_second_hub_is_told_so_until_the_first_one_ends(tmp_path):
    script = (
        "import sys; from pathlib import Path; from ragtag.hub.journal import *\n"
        "try: Journal(Path(sys.argv[1]), run='r', records=dict)\n"
        "except JournalError as error: print(error)\n"
        "else: print('open')"
    )

    def other_hub() -> str:
        done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
        return done.stdout

    with opened(tmp_path):
        assert "Another hub is running this run" in other_hub()
    assert other_hub() == "open\n"


def test_a_full_disk_leaves_what_was_there_and_ends_the_journal(tmp_path, monkeypatch):
    content = written(tmp_path, *SOME)
    real = os.pwrite

    def full(fd, data, offset):
        if len(data) < 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[:30], offset)

    with opened(tmp_path) as journal:
        with monkeypatch.context() as patch:
            patch.setattr(journal_module.os, "pwrite", full)
            with pytest.raises(JournalError, match=r"cannot be written: No space left on device.*make room"):
                journal.append(Said(text="x" * 20))
        with pytest.raises(JournalError, match="could not be written before"):
            journal.append(SOME[0])
    assert (tmp_path / FILE_NAME).read_bytes() == content


def test_a_directory_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"file/hub.journal cannot be opened.*--run-dir"):
        opened(tmp_path / "file")
