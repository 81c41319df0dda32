"""Numbers as they travel: how far off int4 is, what it takes, and that the same bytes are the same bits."""

import struct

import pytest
import torch

from ragtag.outer.codec import WorthlessDelta, decode, encode, encoded_bytes

SIZES = [0, 1, 255, 256, 257, 1000, 512 * 256, 512 * 256 + 3]


@pytest.mark.parametrize("numel", SIZES)
def test_int4_is_off_by_half_a_step_of_its_block_at_most(numel):
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    data = encode("int4", flat)
    assert len(data) == encoded_bytes("int4", numel)
    back = decode("int4", data, numel)
    assert back.shape == flat.shape
    for first in range(0, numel, 256):
        block = slice(first, first + 256)
        step = float(flat[block].abs().max()) / 7
        assert float((back[block] - flat[block]).abs().max()) <= step / 2 * 1.001


@pytest.mark.parametrize("numel", SIZES)
def test_fp32_is_left_as_it_is(numel):
    flat = torch.randn(numel)
    data = encode("fp32", flat)
    assert len(data) == encoded_bytes("fp32", numel)
    assert torch.equal(decode("fp32", data, numel), flat)


def test_the_format_is_the_one_that_is_written_down():
    flat = torch.zeros(256)
    flat[0], flat[128], flat[1], flat[129] = 7.0, -7.0, 2.4, 2.6
    data = encode("int4", flat)
    # Number i in the low half, number i + 128 in the high one, two's complement; then the scale.
    assert bytes(data[:3]) == bytes([0x97, 0x32, 0x00])
    assert struct.unpack("<f", data[128:]) == (1.0,)
    back = decode("int4", data, 256)
    assert [float(back[at]) for at in (0, 128, 1, 129)] == [7.0, -7.0, 2.0, 3.0]


def test_what_was_decoded_is_encoded_to_the_same_bytes():
    flat = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    data = encode("int4", flat)
    assert encode("int4", decode("int4", data, 5000)) == data


def test_zeros_and_the_smallest_numbers_stay_finite():
    assert torch.equal(decode("int4", encode("int4", torch.zeros(300)), 300), torch.zeros(300))
    tiny = torch.full((256,), 1e-42)
    assert float((decode("int4", encode("int4", tiny), 256) - tiny).abs().max()) <= 1e-41
    huge = torch.full((256,), 3e38)
    assert torch.allclose(decode("int4", encode("int4", huge), 256), huge)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_with_a_number_that_is_not_finite_has_none(bad):
    flat = torch.ones(512)
    flat[3] = bad
    back = decode("int4", encode("int4", flat), 512)
    assert not torch.isfinite(back[:256]).any()
    assert torch.equal(back[256:], flat[256:])


@pytest.mark.parametrize("codec", ["int4", "fp32"])
def test_a_wrong_length_is_refused(codec):
    data = encode(codec, torch.ones(300))
    for wrong in (bytes(data) + b"x", data[:-1], b""):
        with pytest.raises(WorthlessDelta, match="wrong shape"):
            decode(codec, wrong, 300)


def test_memory_that_is_given_is_used_where_it_fits():
    data = encode("int4", torch.ones(512))
    out = torch.empty(512)
    assert decode("int4", data, 512, out=out).data_ptr() == out.data_ptr()
    assert torch.equal(out, torch.ones(512))
    for size in (300, 512, 600, 768):
        data = encode("int4", torch.ones(300))
        assert torch.equal(decode("int4", data, 300, out=torch.empty(size)), torch.ones(300))
