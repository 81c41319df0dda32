"""Check what the user says about loading data, before anything is started.

The one idea: words that `DataLoader` has but that would contradict the plan are answered with the reason, not with
silence.
"""

import dataclasses
import multiprocessing
from collections.abc import Callable, Mapping
from multiprocessing.context import BaseContext
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ragtag.core.errors import DataError, SettingError, did_you_mean

_REFUSED_WORDS = {
    "batch_size": "Trainer's `global_batch_size` and the plan decide how many samples a rank gets",
    "shuffle": "it is an argument of Trainer, which orders the samples of all ranks",
    "sampler": "Trainer's `seed` and `shuffle` order the samples of all ranks",
    "batch_sampler": "the plan decides which samples a rank gets",
    "drop_last": "every sample of an epoch is used once; the last batch may be smaller",
    "prefetch_factor": "say `prefetch`: the number of steps read ahead",
    "persistent_workers": "workers always live as long as the trainer",
    "timeout": "`patience_s` bounds every wait; samples get ten times as long",
    "generator": "Trainer's `seed` seeds everything",
    "dataset": "it is an argument of Trainer",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """What `Trainer(loader={...})` may say.

    `prefetch` is the number of steps after the present one whose samples workers read ahead.
    """

    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    pin_memory: bool = False
    prefetch: int = 2
    worker_init_fn: Callable[[int], Any] | None = None
    multiprocessing_context: str | BaseContext | None = None


def loader_settings(loader: Mapping[str, Any]) -> LoaderSettings:
    """Check the user's `loader={...}`.

    Raises:
        SettingError: a misspelt word, a wrong type or value, or a word of DataLoader's that would contradict Trainer.
    """
    if isinstance(loader, DataLoader) or not isinstance(loader, Mapping):
        raise SettingError(
            f"loader is a {type(loader).__name__}, not a dict of settings. Give the dataset to Trainer and, for "
            f"example, loader={{'num_workers': 4}}."
        )
    known = [field.name for field in dataclasses.fields(LoaderSettings)]
    for word in loader:
        if word in _REFUSED_WORDS:
            raise SettingError(f"loader['{word}'] has no place here: {_REFUSED_WORDS[word]}. Remove it.")
        if word not in known:
            hint = did_you_mean(str(word), known)
            raise SettingError(f"loader has no setting '{word}'.{hint} It has {', '.join(known)}.")
    settings = LoaderSettings(**loader)
    for word in ("num_workers", "prefetch"):
        value = getattr(settings, word)
        if type(value) is not int or value < 0:
            raise SettingError(f"loader['{word}'] is {value!r}; it must be a whole number, 0 or more.")
    for word in ("collate_fn", "worker_init_fn"):
        value = getattr(settings, word)
        if value is not None and not callable(value):
            raise SettingError(f"loader['{word}'] is a {type(value).__name__}; it must be a function.")
    if type(settings.pin_memory) is not bool:
        raise SettingError(f"loader['pin_memory'] is {settings.pin_memory!r}; it must be True or False.")
    worker_context(settings.multiprocessing_context)
    return settings


def check_dataset(dataset: Any) -> None:
    """Check that `dataset` can be read by index.

    Raises:
        DataError: it is a DataLoader, iterable only, a class, a dict, empty, or without `__len__` or `__getitem__`.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise DataError(
            "the dataset is a DataLoader, which fixes batches and their order ahead. Give Trainer the dataset inside "
            "it (`loader.dataset`), and its num_workers and collate_fn as Trainer(loader={...})."
        )
    if isinstance(dataset, type):
        raise DataError(
            f"the dataset is the class {dataset.__name__}, not an object of it. Write {dataset.__name__}(...)."
        )
    if isinstance(dataset, IterableDataset):
        raise DataError(
            f"the dataset {kind} is an IterableDataset, whose samples have no index, so they cannot be shared out "
            f"exactly once. Give a dataset with __len__ and __getitem__; write a stream to disk, or keep it in a "
            "list first."
        )
    if isinstance(dataset, Mapping):
        raise DataError(
            f"the dataset is a {kind} with keys {list(dataset)[:5]}. Give one of its values, or list(d.values())."
        )
    if not (callable(getattr(dataset, "__getitem__", None)) and callable(getattr(dataset, "__len__", None))):
        raise DataError(f"the dataset {kind} needs __len__() and __getitem__(index): samples are read by index.")
    try:
        length = len(dataset)
    except Exception as error:
        raise DataError(f"len() of the dataset {kind} failed: {error}") from error
    if length == 0:
        raise DataError(f"the dataset {kind} is empty (its length is 0). Check the path it reads from.")


def worker_context(wanted: str | BaseContext | None) -> BaseContext:
    """The multiprocessing context asked for, or the platform's usual one (fork on Linux until Python 3.14)."""
    if isinstance(wanted, BaseContext):
        return wanted
    try:
        return multiprocessing.get_context(wanted)
    except (ValueError, TypeError):
        methods = multiprocessing.get_all_start_methods()
        hint = did_you_mean(str(wanted), methods)
        raise SettingError(
            f"loader['multiprocessing_context'] is {wanted!r}.{hint} This platform has {', '.join(methods)}."
        ) from None
