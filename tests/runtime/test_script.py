"""A plain script, started again after a load, comes to where it was: nothing is done twice and nothing is left out."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime import cases

import ragtag
from ragtag.runtime.script import ScriptPosition


class World:
    """A pretended run: what a script's calls did, and the state it saved last."""

    def __init__(self):
        self.committed = 0
        self.steps = []
        self.values = []
        self.saved: tuple[dict, int] | None = None


def play(script, breaks, world: World, position, *, save_after=None):
    """Run `script`, pairs of (n, number of evaluations after it); loops end early at the steps `breaks`."""

    def note():
        if save_after == (len(world.steps), len(world.values)):
            world.saved = (position.state_dict(), world.committed)

    note()
    for n, evaluations in script:
        call, last = position.claim(n, committed=world.committed)
        complete = True
        while world.committed < last:
            world.committed += 1
            world.steps.append(world.committed)
            if world.committed in breaks:
                complete = False
                break
            note()
        position.finish(call, committed=world.committed, complete=complete)
        note()
        for number in range(evaluations):
            value = position.recorded()
            if value is None:
                value = f"evaluation {number} after step {world.committed}"
                position.record(value)
            world.values.append(value)
            note()


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), min_size=1, max_size=6),
    st.sets(st.integers(1, 30), max_size=4),
    st.data(),
)
def test_a_script_started_again_goes_on_where_it_was_saved(script, breaks, data):
    whole = World()
    play(script, breaks, whole, ScriptPosition())
    assert whole.steps == list(range(1, whole.committed + 1)), "a gap or a step done twice"

    places = st.tuples(st.integers(0, len(whole.steps)), st.integers(0, len(whole.values)))
    first = World()
    play(script, breaks, first, ScriptPosition(), save_after=data.draw(places))
    if first.saved is None:  # no such moment
        return
    state, committed = first.saved
    again, position = World(), ScriptPosition()
    again.committed = committed
    position.load_state_dict(state, committed=committed, replay=True)
    play(script, breaks, again, position)
    assert again.steps == whole.steps[committed:]
    assert again.values == whole.values


@given(st.integers(0, 50), st.lists(st.integers(0, 5), max_size=4), st.lists(st.integers(0, 5), max_size=4))
def test_a_load_in_mid_script_goes_on_after_the_loaded_step(committed, before, after):
    world, position = World(), ScriptPosition()
    play([(n, 1) for n in before], (), world, position)
    position.load_state_dict(ScriptPosition().state_dict(), committed=committed, replay=not before)
    if not before:
        position.load_state_dict(ScriptPosition().state_dict(), committed=committed, replay=False)
    world.committed, world.steps, world.values = committed, [], []
    play([(n, 1) for n in after], (), world, position)
    assert world.steps == list(range(committed + 1, committed + sum(after) + 1))
    ends = [committed + sum(after[: index + 1]) for index in range(len(after))]
    assert world.values == [f"evaluation 0 after step {end}" for end in ends], "an older value was taken for a new one"


# ---- the same through a trainer of one rank


def make(**options):
    model = cases.mlp()
    trainer = ragtag.Trainer(
        model, cases.sgd(model), options.pop("loss_fn", cases.mean_squares), cases.regression(), global_batch_size=8,
        **options,
    )  # fmt: skip
    return model, trainer


def epochs(trainer, save=lambda number: None, evaluations=True):
    numbers, values = [], []
    for _ in range(3):
        for report in trainer.steps(4):
            numbers.append(report.number)
            save(report.number)
            if report.number % 2:
                values.append(
                    ("inside", report.number, float(trainer.evaluate(cases.regression(9), cases.mean_squares)))
                )
        if evaluations:
            values.append(("after", float(trainer.evaluate(cases.regression(9), cases.mean_squares))))
    return numbers, values


@pytest.mark.parametrize("at", [3, 4, 6, 8, 11])
def test_epochs_with_evaluations_started_again(at, tmp_path):
    _, trainer = make()
    numbers, values = epochs(trainer, lambda number: trainer.save(tmp_path / "s") if number == at else None)
    assert numbers == list(range(1, 13))
    _, again = make()
    again.load(tmp_path / "s")
    late_numbers, late_values = epochs(again)
    assert late_numbers == list(range(at + 1, 13))
    # An evaluation after step `at`, where that ends an epoch, comes after the save: made again, to the same value.
    assert [v for v in late_values if v[0] == "after"] == [v for v in values if v[0] == "after"]
    assert [v for v in late_values if v[0] == "inside"] == [v for v in values if v[0] == "inside" and v[1] > at]


def test_a_recorded_evaluation_is_not_made_again_and_keeps_what_went_into_it(tmp_path):
    calls = []

    def metric(model, batch):
        calls.append(1)
        return ragtag.Loss(cases.mean_squares(model, batch), 4, {"right": 2})

    _, trainer = make()
    list(trainer.steps(2))
    value = trainer.evaluate(cases.regression(9), metric)
    list(trainer.steps(1))
    trainer.save(tmp_path / "s")
    made = len(calls)
    _, again = make()
    again.load(tmp_path / "s")
    assert list(again.steps(2)) == []
    recorded = again.evaluate(cases.regression(9), metric)
    assert len(calls) == made
    assert (recorded, recorded.metrics, recorded.samples, recorded.weight) == (value, value.metrics, 9, value.weight)


def numbers(steps):
    return [report.number for report in steps]


def test_breaks_empty_calls_and_calls_that_never_start():
    _, trainer = make()
    for report in trainer.steps(10):
        if report.number == 3:
            break
    assert numbers(trainer.steps(0)) == []
    trainer.steps(5)  # never iterated: it covers nothing
    assert numbers(trainer.steps(2)) == [4, 5]
    with pytest.raises(ragtag.SettingError, match="at least 0"):
        trainer.steps(-1)


def test_a_loop_left_open_ends_when_the_next_one_starts():
    _, trainer = make()
    first = trainer.steps(5)
    assert next(first).number == 1
    second = trainer.steps(3)
    assert next(second).number == 2
    assert numbers(first) == []
    assert numbers(second) == [3, 4]
    assert numbers(trainer.steps(2)) == [5, 6]


def test_loads_in_mid_run_forwards_and_backwards(tmp_path):
    model, trainer = make()
    list(trainer.steps(3))
    trainer.save(tmp_path / "3")
    at_3 = cases.values(model)
    assert numbers(trainer.steps(3)) == [4, 5, 6]
    trainer.save(tmp_path / "6")
    first = cases.values(model)
    trainer.load(tmp_path / "3")
    assert all(torch.equal(value, at_3[name]) for name, value in cases.values(model).items())
    seen = []
    for report in trainer.steps(5):  # 4 to 8, with one way back inside the loop
        seen.append(report.number)
        if seen == [4, 5]:
            trainer.load(tmp_path / "3")
        if report.number == 6:
            assert all(torch.equal(value, first[name]) for name, value in cases.values(model).items())
    assert seen == [4, 5, 4, 5, 6, 7, 8]
    trainer.load(tmp_path / "6")
    assert numbers(trainer.steps(2)) == [7, 8]
    for _ in trainer.steps(2):
        trainer.load(tmp_path / "6")
        break
    assert numbers(trainer.steps(1)) == [7]
    trainer.load(tmp_path / "3")
    for _ in trainer.steps(2):  # forwards, past the end of the loop
        trainer.load(tmp_path / "6")
    assert numbers(trainer.steps(2)) == [7, 8]


def test_without_replay_the_next_call_goes_on_after_the_saved_step(tmp_path):
    _, trainer = make()
    list(trainer.steps(4))
    trainer.save(tmp_path / "s")
    _, again = make()
    again.load(tmp_path / "s", replay=False)
    assert numbers(again.steps(2)) == [5, 6]
    again.save(tmp_path / "t")
    _, third = make()
    third.load(tmp_path / "t")  # the history of a script that began at step 5
    assert numbers(third.steps(2)) == []
    assert numbers(third.steps(2)) == [7, 8]


def test_a_step_that_raised_can_be_done_again():
    failing = []

    def loss_fn(model, batch):
        loss = cases.mean_squares(model, batch)
        if failing and failing.pop():
            raise KeyboardInterrupt
        return loss

    results = []
    for interrupted in (False, True):
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(6), cases.mlp()).double()
        trainer = ragtag.Trainer(
            model, cases.sgd(model), loss_fn, cases.regression(), global_batch_size=8, config=ragtag.Config(unit=4)
        )
        list(trainer.steps(1))
        if interrupted:
            failing[:] = [True, False]  # in the second unit, after the first one changed the buffers
            before = cases.values(model)
            with pytest.raises(KeyboardInterrupt):
                list(trainer.steps(3))
            assert all(torch.equal(value, before[name]) for name, value in cases.values(model).items())
            assert all(p.grad is None for p in model.parameters())
        list(trainer.steps(2))
        results.append(cases.values(model))
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_the_scripts_own_backward_between_steps_keeps_its_gradients():
    model = cases.mlp(torch.bfloat16)
    trainer = ragtag.Trainer(
        model, cases.sgd(model), cases.mean_squares, cases.regression(dtype=torch.bfloat16), global_batch_size=8
    )
    plain = cases.mlp(torch.bfloat16)
    reference = ragtag.Trainer(
        plain, cases.sgd(plain), cases.mean_squares, cases.regression(dtype=torch.bfloat16), global_batch_size=8
    )
    for _ in trainer.steps(4):
        for parameter in model.parameters():
            parameter.grad = None
        model(torch.ones(1, 6, dtype=torch.bfloat16)).sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in model.parameters())
    list(reference.steps(4))
    assert all(torch.equal(value, cases.values(plain)[name]) for name, value in cases.values(model).items())


def test_random_numbers_of_the_dataset_are_not_taken_for_the_models():
    """Unseeded augmentation draws from the script's generators, which a step by unit must not wind back."""

    class Noisy(torch.utils.data.Dataset):
        drawn: list[float] = []  # noqa: RUF012

        def __len__(self):
            return 23

        def __getitem__(self, index):
            noise = torch.rand(())
            self.drawn.append(float(noise))
            return base[index][0] + noise, base[index][1]

    base = cases.regression()
    for config in (ragtag.Config(seed_samples=False), ragtag.Config(seed_samples=False, unit=4)):
        model = cases.mlp()
        Noisy.drawn.clear()
        trainer = ragtag.Trainer(
            model, cases.sgd(model), cases.mean_squares, Noisy(), global_batch_size=8, config=config
        )
        Noisy.drawn.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            list(trainer.steps(3))
        assert len(set(Noisy.drawn)) == len(Noisy.drawn) == 23
