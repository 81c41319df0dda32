"""What may be an island's run: said before anything is connected or trained."""

import pytest
import torch

import ragtag
from ragtag.cli.elastic_request import elastic_request
from ragtag.core.errors import SettingError


@pytest.fixture
def island(monkeypatch):
    monkeypatch.setenv("RAGTAG_OUTER", "127.0.0.1:9")
    monkeypatch.setenv("RAGTAG_ISLAND", "home")
    monkeypatch.setenv("RAGTAG_TOKEN", "a-token-of-the-tests")


def trainer(optimizer=torch.optim.Adam, clip_norm=None, **settings):
    model = torch.nn.Linear(3, 1)
    data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
    return ragtag.Trainer(
        model,
        optimizer(model.parameters(), lr=0.1),
        lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
        data,
        global_batch_size=8,
        clip_norm=clip_norm,
        config=ragtag.Config(**settings),
    )


@pytest.mark.parametrize("mode", ["islands", "async"])
def test_islands_are_started_by_the_launcher(mode):
    with pytest.raises(SettingError, match="ragtag launch --island NAME"):
        trainer(mode=mode)
    trainer(mode="exact").close()


def test_exact_synchronisation_by_means_of_parameters_is_for_sgd(island):
    with pytest.raises(SettingError, match=r"this run has Adam\. Leave --island out"):
        trainer(mode="exact")
    with pytest.raises(SettingError, match="this run has clip_norm"):
        trainer(torch.optim.SGD, clip_norm=1.0, mode="exact")
    trainer(torch.optim.SGD, mode="exact").close()
    trainer(mode="islands").close()


def test_slices_are_refused(island):
    with pytest.raises(SettingError, match="whole on every rank"):
        trainer(layout="zero1")


@pytest.mark.parametrize("name", ["", "x" * 65, "two\nlines"])
def test_names_are_looked_at_before_anything_is_started(name):
    with pytest.raises(SettingError, match="1 to 64 printable characters"):
        elastic_request(island=name, environ={})
    assert elastic_request(island="home", environ={}).island == "home"


def test_an_island_of_another_sites_run_needs_its_token():
    with pytest.raises(SettingError, match="needs the run's token"):
        elastic_request(hub="10.0.0.1:29400", island="cloud", environ={})
    wanted = elastic_request(hub="10.0.0.1:29400", island="cloud", token="a-token-of-the-tests", environ={})
    assert (wanted.hub, wanted.outer, wanted.island) == (None, "10.0.0.1:29400", "cloud")
