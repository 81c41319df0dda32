"""Runs that keep their own checkpoints: started again, they go on as if nothing had been."""

import logging
import os
import resource
import signal
import uuid
from itertools import chain

import pytest
import torch
from tests.ranks import run_ranks, solo
from tests.runtime import cases
from tests.runtime.keeping import train
from tests.runtime.reference import worst_difference

import ragtag
from ragtag.checkpoint.directory import Directory, mark_of
from ragtag.checkpoint.file import load_file
from ragtag.checkpoint.storage import open_storage
from ragtag.runtime.boundary import Boundary

SIZE, STEPS = 23, 12  # three steps an epoch, the last one of seven samples


def marks_in(path):
    """Generation and step of each checkpoint, oldest first."""
    return sorted(mark.age for mark in map(mark_of, os.listdir(path)) if mark is not None)


def files_in(path):
    """Paths of the checkpoints, oldest first."""
    return [path / mark.name for mark in sorted(filter(None, map(mark_of, os.listdir(path))), key=lambda m: m.age)]


@pytest.fixture(scope="module")
def whole():
    """The run that nothing happened to."""
    return solo(uninterrupted)


def uninterrupted():
    return train(None, until=STEPS)


def assert_same(result, whole):
    assert worst_difference(result["values"], whole["values"]) < 1e-10
    assert worst_difference(result["average"], whole["average"]) < 1e-10


def in_ranks(directory, until, options):
    return train(directory, until=until, **options)


def test_every_step_is_as_without_checkpoints(tmp_path, whole):
    kept = solo(in_ranks, str(tmp_path), STEPS, {"checkpoint_every_steps": 1})
    assert all(torch.equal(value, whole["values"][name]) for name, value in kept["values"].items())
    assert marks_in(tmp_path) == [(0, 10), (0, 11), (0, 12)]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Three ranks keep checkpoints every two steps, and one is told to end in the middle of the second epoch."""
    path = tmp_path_factory.mktemp("kept") / "runs"
    results = run_ranks(3, in_ranks, str(path), 99, {"checkpoint_every_steps": 2, "signals": [(1, 4, signal.SIGTERM)]})
    return path, results


def test_one_rank_that_is_told_to_end_stops_all_after_the_same_step(stopped):
    path, results = stopped
    assert [result["numbers"] for result in results] == [[1, 2, 3, 4, 5]] * 3
    assert [result["status"] for result in results] == [128 + signal.SIGTERM] * 3
    assert marks_in(path) == [(0, 2), (0, 4), (0, 5)]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_it_goes_on_on_any_number_of_ranks(stopped, whole, tmp_path, world_size):
    path, before = stopped
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    after = run_ranks(world_size, in_ranks, str(tmp_path), STEPS, {"checkpoint_every_steps": 5})
    for result in after:
        assert_same(result, whole)
        assert result["started_at"] == 5
        assert result["numbers"] == list(range(6, STEPS + 1))
    by_step = {
        step: list(chain(*(result["seen"].get(step, []) for result in (before if step <= 5 else after))))
        for step in range(1, STEPS + 1)
    }
    for epoch in range(4):
        assert sorted(chain(*(by_step[3 * epoch + step] for step in (1, 2, 3)))) == list(range(SIZE))
    assert marks_in(tmp_path) == [(0, 4), (0, 5), (1, 10)]


def on_one_disk(directory, until, folders, options):
    """Each rank has a disk of its own, under the same name."""
    os.chdir(folders[int(os.environ["RANK"])])
    return train(directory, until=until, **options)


def test_the_file_may_lie_on_any_one_machine(stopped, whole, tmp_path):
    path, _ = stopped
    folders = [tmp_path / str(rank) for rank in range(3)]
    for folder in folders:
        (folder / "runs").mkdir(parents=True)
    newest, pointer = files_in(path)[-1], path / "latest.json"
    for file in (newest, pointer):
        (folders[2] / "runs" / file.name).write_bytes(file.read_bytes())
    older = files_in(path)[0]
    (folders[0] / "runs" / older.name).write_bytes(older.read_bytes())
    for result in run_ranks(3, on_one_disk, "runs", STEPS, folders, {"checkpoint_every_steps": 4}):
        assert_same(result, whole)
        assert result["started_at"] == 5
    assert marks_in(folders[0] / "runs") == [(0, 2), (1, 8), (1, 12)], "rank 0 writes to its own disk"
    assert marks_in(folders[2] / "runs") == [(0, 5)]


def load_by_hand(folders, name):
    os.chdir(folders[int(os.environ["RANK"])])
    model = cases.mlp()
    trainer = ragtag.Trainer(model, cases.sgd(model), cases.mean_squares, cases.regression(), global_batch_size=8)
    refused = ""
    try:
        trainer.load(name)
    except ragtag.CheckpointError as error:
        refused = str(error)
    numbers = [report.number for report in trainer.steps(6)]
    trainer.close()
    return refused, numbers, cases.values(model)


def test_load_takes_the_newest_that_any_rank_has(tmp_path):
    folders = [tmp_path / str(rank) for rank in range(2)]
    for folder in folders:
        folder.mkdir()
    model = cases.mlp()
    trainer = ragtag.Trainer(model, cases.sgd(model), cases.mean_squares, cases.regression(), global_batch_size=8)
    for report in trainer.steps(6):
        if report.number in (2, 4):
            trainer.save(folders[report.number // 2 - 1] / "saved")  # the newer one at rank 1
    for refused, numbers, values in run_ranks(2, load_by_hand, folders, "saved"):
        assert (refused, numbers) == ("", [5, 6])
        assert worst_difference(values, cases.values(model)) < 1e-10
    (folders[0] / "saved").unlink()
    (folders[1] / "saved").write_bytes(b"damaged")
    (first, *_), (second, *_) = run_ranks(2, load_by_hand, folders, "saved")
    assert first == second
    assert "cannot read the checkpoint saved" in first


# ---- when


def test_a_clock_says_when_it_is_time():
    now_s = [100.0]
    boundary = Boundary(every_s=60.0, clock=lambda: now_s[0])
    assert not boundary.is_due(1)
    now_s[0] = 160.0
    assert boundary.is_due(2)
    boundary.agree(save=True, stop=0)
    boundary.agree(save=False, stop=0)
    assert boundary.save_agreed, "what was agreed on stays until it is done"
    now_s[0] = 165.0
    boundary.saved()
    now_s[0] = 224.0
    assert not boundary.save_agreed
    assert not boundary.is_due(3)
    now_s[0] = 225.0
    assert boundary.is_due(4)


def test_steps_and_time_go_together_or_alone():
    both = Boundary(every_s=60.0, every_steps=10, clock=lambda: 0.0)
    assert [step for step in range(1, 31) if both.is_due(step)] == [10, 20, 30]
    never = Boundary()
    assert not any(never.is_due(step) for step in range(1, 31))
    never.agree(save=False, stop=15)
    never.agree(save=False, stop=2)
    assert never.stop_agreed == 15


def test_rank_0s_clock_counts(tmp_path):
    results = run_ranks(2, clocks_apart, str(tmp_path))
    assert results[0]["due"] != results[1]["due"]
    assert marks_in(tmp_path) == [(0, 2), (0, 3), (0, 4)]


def clocks_apart(directory):
    rank = int(os.environ["RANK"])
    asked = []

    class Uneven(Boundary):
        def is_due(self, number):
            asked.append(rank == 0)
            return rank == 0

    from ragtag.runtime import keeping

    keeping.Boundary = Uneven
    result = train(directory, until=4)
    return {**result, "due": asked}


def test_a_loop_that_is_left_early_is_saved_when_the_next_one_begins(tmp_path):
    def run(steps):
        model = cases.mlp()
        config = ragtag.Config(checkpoint=str(tmp_path), checkpoint_every_steps=3)
        with ragtag.Trainer(
            model, cases.sgd(model), cases.mean_squares, cases.regression(), global_batch_size=8, config=config
        ) as trainer:
            seen = []
            for report in trainer.steps(5):
                seen.append(report.number)
                if report.number == 3:
                    break
            loss = trainer.evaluate(cases.regression(), cases.mean_squares)
            before = marks_in(tmp_path)
            seen += [report.number for report in trainer.steps(steps)]
            return seen, float(loss), before, cases.values(model)

    seen, loss, before, _ = solo(run, 1)
    assert (seen, before) == ([1, 2, 3, 4], [])
    assert marks_in(tmp_path) == [(0, 3)]
    seen, again, _, values = solo(run, 3)
    assert (seen, again) == ([4, 5, 6], loss), "the break and the evaluation lie in the past"
    reference = cases.mlp()
    plain = ragtag.Trainer(reference, cases.sgd(reference), cases.mean_squares, cases.regression(), global_batch_size=8)
    list(plain.steps(6))
    assert worst_difference(values, cases.values(reference)) < 1e-12


# ---- what goes wrong


def make(directory, **settings):
    model = settings.pop("model", None) or cases.mlp()
    return ragtag.Trainer(
        model, cases.sgd(model), cases.mean_squares, cases.regression(), global_batch_size=8,
        config=ragtag.Config(checkpoint=str(directory), **{"checkpoint_every_steps": 2, **settings}),
    )  # fmt: skip


@pytest.fixture
def kept(tmp_path):
    with make(tmp_path) as trainer:
        list(trainer.steps(7))
    assert marks_in(tmp_path) == [(0, 2), (0, 4), (0, 6)]
    return tmp_path


def damage(file):
    content = bytearray(file.read_bytes())
    content[-50] ^= 4
    file.write_bytes(content)


def test_a_damaged_one_is_named_and_the_one_before_it_used(kept, caplog):
    files = files_in(kept)
    damage(files[-1])
    files[-2].write_bytes(files[-2].read_bytes()[:-1])
    with caplog.at_level(logging.INFO), make(kept) as trainer:
        warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert [str(files[-1]) in warned[0], str(files[-2]) in warned[1], len(warned)] == [True, True, 2]
        assert f"going on from {files[0]}: 2 steps are done" in caplog.messages
        assert [report.number for report in trainer.steps(7)] == [3, 4, 5, 6, 7]
    assert marks_in(kept) == [(0, 2), (0, 4), (0, 6), (1, 4), (1, 6)], "the bad ones are not counted"
    with make(kept) as trainer:
        assert trainer._run.committed == 6


def damaged_on_two_ranks(directory):
    trainer = make(directory)
    numbers = [report.number for report in trainer.steps(6)]
    trainer.close()
    return numbers


def test_several_ranks_pass_over_a_damaged_one_alike(kept):
    damage(files_in(kept)[-1])
    assert run_ranks(2, damaged_on_two_ranks, str(kept)) == [[5, 6], [5, 6]]


def test_when_none_can_be_read_nothing_is_started_over_it(kept):
    for file in files_in(kept):
        damage(file)
    with pytest.raises(
        ragtag.CheckpointError, match=r"(?s)no checkpoint in .* can be read.*damaged.*Config\(resume=False\)"
    ):
        make(kept)


def test_another_models_directory_is_refused_and_stays(kept):
    before = {file.name: file.read_bytes() for file in kept.iterdir()}
    other = torch.nn.Sequential(torch.nn.Linear(6, 3)).double()
    with pytest.raises(ragtag.CheckpointError, match=r"of another model: .*Config\(checkpoint=\.\.\.\).*resume=False"):
        make(kept, model=other)
    with make(kept, model=other, resume=False, checkpoint_keep=1) as trainer:
        assert [report.number for report in trainer.steps(4)] == [1, 2, 3, 4]
    after = {file.name: file.read_bytes() for file in kept.iterdir()}
    assert before.items() - after.items() == {("latest.json", before["latest.json"])}
    assert len(after) == len(before) + 1
    with make(kept, model=torch.nn.Sequential(torch.nn.Linear(6, 3)).double()) as trainer:
        assert trainer._run.committed == 4, "the pointer is the new run's"


def test_a_state_loaded_by_hand_begins_a_history_of_its_own(kept):
    old = files_in(kept)
    with make(kept) as trainer:
        trainer.load(old[0], replay=False)
        list(trainer.steps(2))
    assert all(file.exists() for file in old)
    with make(kept) as trainer:
        assert trainer._run.committed == 4
        assert trainer._run.history.run != mark_of(old[0].name).run


def test_when_without_where_is_a_mistake():
    model = cases.mlp()
    with pytest.raises(ragtag.SettingError, match=r"checkpoint_every_steps=5 says when, .* RAGTAG_CHECKPOINT"):
        ragtag.Trainer(
            model, cases.sgd(model), cases.mean_squares, cases.regression(), global_batch_size=8,
            config=ragtag.Config(checkpoint_every_steps=5),
        )  # fmt: skip


def test_state_that_no_checkpoint_can_hold_is_refused_before_step_1(tmp_path):
    class Odd:
        def state_dict(self):
            return {"x": object()}

        def load_state_dict(self, state):
            pass

    model = cases.mlp()
    with pytest.raises(ragtag.CheckpointError, match=r"'state\.odd\.x' is a builtins\.object"):
        ragtag.Trainer(
            model, cases.sgd(model), cases.mean_squares, cases.regression(), global_batch_size=8,
            state={"odd": Odd()}, config=ragtag.Config(checkpoint=tmp_path),
        )  # fmt: skip


def full_disk(directory):
    """The disk fills up after step 3 and has room again after step 5."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("ragtag").addHandler(handler)
    trainer = make(directory)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for report in trainer.steps(8):
        if report.number in (3, 5):
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000 if report.number == 3 else soft, hard))
            left = marks_in(directory)
    trainer.close()
    return left, said, cases.values(trainer._run.model)


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(tmp_path):
    results = run_ranks(2, full_disk, str(tmp_path))
    assert results[0][0] == [(0, 2)], "the one before is intact"
    assert marks_in(tmp_path) == [(0, 2), (0, 6), (0, 8)]
    assert [name for name in os.listdir(tmp_path) if name.endswith(".partial")] == []
    [warning] = results[0][1]
    assert warning.startswith(f"step 4: cannot write the checkpoint {tmp_path}/")
    assert "File too large" in warning
    assert results[1][1] == []
    reference = cases.mlp()
    plain = ragtag.Trainer(reference, cases.sgd(reference), cases.mean_squares, cases.regression(), global_batch_size=8)
    list(plain.steps(8))
    for _, _, values in results:
        assert worst_difference(values, cases.values(reference)) < 1e-10


def killed_while_saving(directory):
    """Rank 0 is killed in the middle of its second checkpoint."""
    trainer = make(directory)
    run, replace, count = trainer._run, os.replace, [0]

    def deadly(source, target):
        if str(target).endswith(".safetensors"):
            count[0] += 1
            if count[0] == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    if run.group.rank == 0:
        os.replace = deadly
    list(trainer.steps(9))


def test_killed_while_saving(tmp_path):
    died, _ = run_ranks(2, killed_while_saving, str(tmp_path), expect_failures=True)
    assert died.exit_status == -signal.SIGKILL
    assert marks_in(tmp_path) == [(0, 2)]
    assert any(name.endswith(".partial") for name in os.listdir(tmp_path))
    with make(tmp_path) as trainer:
        assert [report.number for report in trainer.steps(4)] == [3, 4]
    assert marks_in(tmp_path) == [(0, 2), (1, 4)]
    assert not any(name.endswith(".partial") for name in os.listdir(tmp_path))


def test_a_url_works_as_a_directory_does(tmp_path):
    address = f"memory://{uuid.uuid4()}/runs"
    with make(address) as trainer:
        list(trainer.steps(5))
        trainer.save(f"{address}/by-hand")
    assert [mark.age for mark in map(mark_of, open_storage(address).names()) if mark] == [(0, 2), (0, 4)]
    with make(address) as trainer:
        assert [report.number for report in trainer.steps(6)] == [5, 6]
        trainer.load(f"{address}/by-hand", replay=False)
        assert trainer._run.committed == 5
    pointer = Directory(open_storage(address)).pointer()
    assert pointer is not None
    assert pointer.age == (1, 6)


def test_the_file_says_which_run_it_is_of(kept):
    tree = load_file(files_in(kept)[-1])
    assert tree["history"]["run"] == mark_of(files_in(kept)[-1].name).run
