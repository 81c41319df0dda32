"""Where a replica does not fit and hosts are far apart, slices and stages are compared before the first step."""

import os

import pytest
import torch
from torch import nn

import ragtag
from tests.ranks import run_ranks
from tests.zero.test_zero_exact import adam

DEVICE = '[[device]]\nname = "d{number}"\nhost = "{host}"\nmemory = "3MB"\n'
LINK = '[[link]]\nbetween = ["a", "b"]\nbandwidth = "{}"\nlatency = "1ms"\n'


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(128, generator=generator), torch.randn(128, generator=generator)


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(12)))


def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def train(file):
    os.environ["RAGTAG_EMULATE"] = file
    torch.set_num_threads(1)
    model = model_of()
    trainer = ragtag.Trainer(model, adam(model.parameters()), loss_fn, Rows(), global_batch_size=8)
    losses = [report.loss for report in trainer.steps(2)]
    plan = trainer.plan
    trainer.close()
    return losses, plan


def cluster(tmp_path, hosts, bandwidth):
    devices = [DEVICE.format(number=number, host=host) for number, host in enumerate(hosts)]
    links = [LINK.format(bandwidth)] if len(set(hosts)) > 1 else []
    file = tmp_path / "cluster.toml"
    file.write_text("\n".join([*devices, *links]))
    return str(file)


@pytest.mark.parametrize(
    ("hosts", "bandwidth", "wanted", "said"),
    [
        (("a", "b"), "100Mbit/s", "pipeline", "ms with layout zero"),
        (("a", "b"), "400Gbit/s", "zero", "a pipeline is predicted to take"),
        (("a", "a"), "", "zero", "a whole replica takes"),
    ],
    ids=["slow-link", "quick-link", "one-host"],
)
def test_the_quicker_of_slices_and_stages_is_taken(hosts, bandwidth, wanted, said, tmp_path):
    results = run_ranks(2, train, cluster(tmp_path, hosts, bandwidth))
    for losses, plan in results:
        assert plan.layout.startswith(wanted), plan.reason
        assert said in plan.reason
        assert losses == results[0][0]
