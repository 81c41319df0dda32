import numpy
import pytest
import torch
from tests.runtime.loading import Numbers
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from ragtag.core.errors import DataError, SettingError
from ragtag.runtime.loader import check_dataset, loader_settings


def test_settings_are_taken_as_given():
    chosen = loader_settings({"num_workers": 3, "collate_fn": list, "pin_memory": True})
    assert (chosen.num_workers, chosen.collate_fn, chosen.pin_memory, chosen.prefetch) == (3, list, True, 2)


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        ({"num_worker": 2}, "no setting 'num_worker'. Did you mean 'num_workers'"),
        ({"batch_size": 2}, "'batch_size'.*global_batch_size"),
        ({"shuffle": True}, "'shuffle'.*argument of Trainer"),
        ({"sampler": None}, "'sampler'.*seed"),
        ({"batch_sampler": None}, "'batch_sampler'.*plan"),
        ({"drop_last": True}, "'drop_last'.*once"),
        ({"prefetch_factor": 2}, "'prefetch_factor'.*prefetch"),
        ({"num_workers": -1}, "'num_workers'.*-1"),
        ({"num_workers": True}, "'num_workers'.*True"),
        ({"prefetch": 1.5}, "'prefetch'.*1.5"),
        ({"pin_memory": "yes"}, "'pin_memory'.*'yes'"),
        ({"collate_fn": 3}, "'collate_fn'.*int"),
        ({"multiprocessing_context": "frok"}, "'multiprocessing_context'.*Did you mean 'fork'"),
        (DataLoader(Numbers()), "loader is a DataLoader"),
        ([], "loader is a list"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(loader, text):
    with pytest.raises(SettingError, match=text):
        loader_settings(loader)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(int, 1)


class NoLength(Dataset):
    def __getitem__(self, index):
        return index


class BrokenLength(NoLength):
    def __len__(self):
        raise OSError("gone")


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (Endless(), "IterableDataset.*__getitem__"),
        (NoLength(), "NoLength needs __len__"),
        (BrokenLength(), "BrokenLength failed: gone"),
        (iter([1]), "needs __len__"),
        ([], "empty"),
        (DataLoader(Numbers()), r"DataLoader.*loader.dataset"),
        ({"train": [1]}, "keys .'train'."),
        (Numbers, "class Numbers"),
    ],
)
def test_datasets_that_cannot_be_read_by_index_are_refused(dataset, text):
    with pytest.raises(DataError, match=text):
        check_dataset(dataset)


@pytest.mark.parametrize("dataset", [[1, 2], Numbers(), TensorDataset(torch.ones(2)), torch.ones(3), numpy.ones(2)])
def test_anything_with_length_and_index_is_a_dataset(dataset):
    check_dataset(dataset)
