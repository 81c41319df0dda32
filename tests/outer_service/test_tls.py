"""One port with TLS: islands come through it; whoever trusts another certificate, or speaks in the clear, does not."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from ragtag.core.errors import SettingError
from ragtag.hub.connection import client_tls, server_tls
from tests.outer_service.running import Island, eventually, outer_loop

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


def certificate(directory: Path, name: str) -> Path:
    """A self-signed one, and its key, in one file."""
    key, cert, both = (directory / f"{name}.{ending}" for ending in ("key", "crt", "pem"))
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", f"/CN={name}"),
        ],
        check=True,
        capture_output=True,
    )
    both.write_bytes(cert.read_bytes() + key.read_bytes())
    return both


def test_islands_come_through_tls(tmp_path, monkeypatch):
    own = certificate(tmp_path, "hub")
    monkeypatch.setenv("RAGTAG_OUTER_TLS", str(tmp_path / "hub.crt"))
    with outer_loop(tmp_path, tls=server_tls(own, None)) as running, Island(running.port, "home") as home:
        home.give([torch.ones(300), torch.zeros(7)], state=b"s" * 300_000)
        with Island(running.port, "cloud") as cloud:
            assert cloud.take() == b"s" * 300_000
            for island in (home, cloud):
                island.own[0] -= 1.0
                island.send(0)
            for island in (home, cloud):
                island.await_version(0, 2)
            assert torch.equal(home.client.talk.values.values[0], cloud.client.talk.values.values[0])


@pytest.mark.parametrize("trusted", ["other.crt", ""])
def test_nobody_comes_in_the_clear_or_to_another_certificate(tmp_path, monkeypatch, trusted):
    own = certificate(tmp_path, "hub")
    certificate(tmp_path, "other")
    monkeypatch.setenv("RAGTAG_OUTER_TLS", str(tmp_path / trusted) if trusted else "")
    with outer_loop(tmp_path, tls=server_tls(own, None)) as running:
        stranger = Island(running.port, "home")
        said = eventually(
            lambda: None if "no connection" in stranger.client.talk.trouble else stranger.client.talk.trouble
        )
        assert not trusted or "certificate" in said.lower()
        assert not stranger.client.talk.stage
        stranger.close()


def test_files_that_are_no_certificates_are_named(tmp_path):
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("nothing")
    for call in (lambda: server_tls(wrong, None), lambda: client_tls(str(wrong)), lambda: client_tls("missing.pem")):
        with pytest.raises(SettingError):
            call()
    with pytest.raises(SettingError, match="needs its certificate"):
        server_tls(None, wrong)
    assert client_tls("") is None
