"""What saving and loading take besides each rank's own slices: a few parts, however large the model is."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ragtag
from ragtag.checkpoint import parts
from ragtag.cli.export import run_export
from tests.ranks import run_ranks
from tests.zero.models import Tokens, tiny
from tests.zero.test_zero_checkpoint import loss_fn

PART_BYTES = 4096
WIDTH = 40


class Counting(TorchDispatchMode):
    """Adds up the memory of tensors that are made in here, for as long as each is alive."""

    def __init__(self, flats):
        super().__init__()
        self.alive, self.peak, self._flats = {}, 0, flats
        self.present = False
        """Whether a block was ever whole on the device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)}
        for each in tree_leaves(result):
            if torch.is_tensor(each) and each.nbytes:
                self._keep(each, given)
        self.present = self.present or any(flat.is_present for flat in self._flats if not flat.whole)
        return result

    def _keep(self, tensor, given):
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if pointer in given and pointer not in self.alive:
            return  # a view of what was there before
        size, count = self.alive.get(pointer, (storage.nbytes(), 0))
        self.alive[pointer] = size, count + 1
        self.peak = max(self.peak, sum(each for each, _ in self.alive.values()))
        weakref.finalize(tensor, self._drop, pointer)

    def _drop(self, pointer):
        size, count = self.alive.pop(pointer)
        if count > 1:
            self.alive[pointer] = size, count - 1


def test_the_counter_counts():
    with Counting([]) as counting:
        kept = torch.zeros(100)
        for _ in range(3):
            other = torch.ones(50)
            view = other[:10]
            del other
        assert counting.peak == 800, "the last one lives until its successor is there"
        del view
        assert [size for size, _ in counting.alive.values()] == [400]
        del kept
        assert not counting.alive


def measure(layout, slices, path):
    """Return peaks in bytes of saving, of loading over what there is and of loading at the start, what this rank has of
    the model and what the model takes, and whether a block was whole meanwhile."""
    torch.set_num_threads(1)
    parts.PART_BYTES = PART_BYTES

    def make():
        model = tiny(depth=4, width=WIDTH)
        return ragtag.Trainer(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-3),
            loss_fn,
            Tokens(),
            global_batch_size=12,
            config=ragtag.Config(layout=layout, slices=slices, bucket_bytes=1 << 15, patience_s=20.0),
        )

    trainer = make()
    list(trainer.steps(2))
    flats = trainer._run.sharding.flats
    with Counting(flats) as saving:
        trainer.save(path)
    with Counting(flats) as over:
        trainer.load(path, replay=False)
    list(trainer.steps(1))
    states = trainer._run.optimizer.state
    for each in states.values():
        each.clear()
    states.clear()
    with Counting(flats) as anew:
        trainer.load(path, replay=False)
    list(trainer.steps(1))
    model_bytes = sum(flat.num_bytes for flat in flats)
    own_bytes = sum((flat.stop - flat.start) * flat.dtype.itemsize for flat in flats)
    trainer.close()
    return (saving.peak, over.peak, anew.peak), own_bytes, model_bytes, saving.present or over.present or anew.present


@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3"])
def test_no_rank_holds_more_than_a_few_parts_besides_its_slices(layout, tmp_path, monkeypatch):
    results = run_ranks(3, measure, layout, (1, 5, 2), tmp_path / "x")
    for (saving, over, anew), own_bytes, model_bytes, present in results:
        assert model_bytes > 60 * PART_BYTES
        assert saving <= 4 * PART_BYTES
        assert over <= 4 * PART_BYTES
        assert anew <= 4 * PART_BYTES + 2 * own_bytes, "Adam's two averages are made anew"
        assert not present, "no block is gathered on the device"
    monkeypatch.setattr(parts, "PART_BYTES", PART_BYTES)
    with Counting([]) as exporting:
        run_export(str(tmp_path / "x"), tmp_path / "weights", as_json=True)
    assert exporting.peak <= 3 * PART_BYTES
