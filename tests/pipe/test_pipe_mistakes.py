"""What cannot be cut into stages is refused with the reason; what fails in one stage reaches all."""

import os
import signal
import time

import pytest
from torch import nn

import ragtag
from ragtag.core.errors import ModelError, PeerError, SettingError
from tests.pipe.staged import staged
from tests.ranks import RankDied, run_ranks
from tests.zero.models import Tokens, tiny
from tests.zero.test_zero_variety import adam, loss_fn, recomputing_reentrant


def train(make, loss, settings, shares=None, steps=3):
    model = make()
    trainer = staged(model, adam(model), loss, Tokens(), {"patience_s": 10, **settings}, shares=shares)
    if isinstance(loss, Failing):
        loss.armed = True
    list(trainer.steps(steps))
    trainer.close()


def refused(error, text, make=tiny, loss=loss_fn, settings=None, shares=None):
    answers = run_ranks(2, train, make, loss, settings or {}, shares, expect_failures=True)
    assert any(isinstance(answer, error) and text in str(answer) for answer in answers), answers
    assert all(isinstance(answer, error | PeerError) for answer in answers)


def twice(model, batch):
    return ragtag.Loss(loss_fn(model, batch).total + loss_fn(model, batch).total, batch[1].numel())


def part(model, batch):
    logits = model.head(model.embed(batch[0]))
    return ragtag.Loss(
        nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()
    )


class Between(nn.Module):
    """Something with parameters runs between two blocks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.adapter = nn.Linear(8, 8)
        self.head = nn.Linear(8, 17)

    def forward(self, tokens):
        x = self.layers[0](self.embed(tokens))
        return self.head(self.layers[2](self.layers[1](self.adapter(x))))


def layers_of(model):
    return list(model.layers)


def strangers(model):
    return [nn.Linear(3, 3), nn.Linear(3, 3)]


def between():
    return Between().double()


class Reaching(Between):
    """The last block takes what the first one gave as well."""

    def forward(self, tokens):
        first = self.layers[0](self.embed(tokens))
        return self.head(self.layers[2](self.layers[1](first) + first))


def reaching():
    return Reaching().double()


def dropping():
    model = tiny()
    model.blocks[1] = nn.Sequential(model.blocks[1], nn.Dropout(0.5))
    return model


@pytest.mark.parametrize(
    ("error", "text", "more"),
    [
        (ModelError, "calls the model 2 times", {"loss": twice}),
        (ModelError, "calls 'embed' itself", {"loss": part}),
        (ModelError, "'adapter' has parameters", {"make": between, "settings": {"blocks": layers_of}}),
        (
            ModelError,
            "is not given what the block before it returns",
            {"make": reaching, "settings": {"blocks": layers_of}},
        ),
        (ModelError, "draws random numbers", {"make": dropping}),
        (ModelError, "re-entrant checkpoint", {"make": recomputing_reentrant}),
        (ModelError, "is no module of the model", {"settings": {"blocks": strangers}}),
        (SettingError, "the model has 3 blocks", {"settings": {"stages": "0:0-1, 1:1-2"}}),
        (SettingError, "there is no rank 2", {"settings": {"stages": "0:0-1, 2:1-3"}}),
        (SettingError, "rank 0 has two stages", {"settings": {"stages": "0:0-1, 0:1-3"}}),
        (SettingError, "is not the last stage", {"settings": {"stages": "0:0-1, 1:1-3"}, "shares": (6, 6)}),
        (SettingError, "Expected rank:first-stop", {"settings": {"stages": "0-3"}}),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(error, text, more):
    refused(error, text, **more)


class Failing:
    """Fails in the third step, on the rank that has the last stage; or is killed there."""

    armed = False

    def __init__(self, how):
        self.how, self.calls = how, 0

    def __call__(self, model, batch):
        self.calls += self.armed
        loss = loss_fn(model, batch)  # other stages never come back from here
        if self.calls > 12 and self.how == "raises":
            raise ValueError("boom")
        if self.calls > 12:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss


@pytest.mark.parametrize("how", ["raises", "killed"])
def test_what_happens_to_one_stage_reaches_all(how):
    began_s = time.monotonic()
    settings = {"stages": "0:0-1, 1:1-2, 2:2-3", "micro_batch": 2}
    answers = run_ranks(3, train, tiny, Failing(how), settings, None, 100, expect_failures=True)
    assert isinstance(answers[2], ValueError if how == "raises" else RankDied)
    assert all(isinstance(answer, PeerError) and "rank 2" in str(answer) for answer in answers[:2]), answers
    assert time.monotonic() - began_s < 40


def test_memory_that_does_not_suffice_says_what_is_missing(monkeypatch, tmp_path):
    file = tmp_path / "small.toml"
    file.write_text("".join(f'[[device]]\nname = "d{n}"\nmemory = "20kB"\n' for n in range(2)))
    answers = run_ranks(2, emulated, str(file), expect_failures=True)
    texts = [str(answer) for answer in answers]
    assert any("no cut into 2 stage(s)" in text and "Add a device" in text for text in texts), texts


def emulated(file):
    os.environ["RAGTAG_EMULATE"] = file
    train(tiny, loss_fn, {})
