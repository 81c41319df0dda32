"""Numbers as they travel between islands: fp32 as it is, or int4 with one scale for each 256 of them.

The one idea: whoever packs two numbers into a byte pairs number i of a block with number i + 128, not with i + 1. Then
eight bytes are packed or unpacked by one operation on a 64-bit word, and everything else is plain arithmetic over
chunks that stay in a core's cache.

int4, version 1, little endian: 128 bytes for each block of 256 numbers, then an fp32 scale for each block. A byte holds
round(x / scale) of number i in its low half and of number i + 128 in its high one, in two's complement, -7 to 7. The
scale is the block's largest magnitude over 7, so a number is off by half a scale at most (absmax quantisation by
blocks: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021, arXiv 2110.02861, section 2.1). Missing
numbers of the last block are zeros.
"""

import numpy as np
import torch

from ragtag.core.errors import RagtagError
from ragtag.outer.protocol import Codec

BLOCK = 256
_HALF = BLOCK // 2
_LEVELS = 7
_CHUNK = 512
"""Blocks at a time: 512 KiB of fp32."""
_TINY = torch.finfo(torch.float32).tiny
_BOTH_SIGNS = np.frombuffer(b"\x88" * 8, np.int64)
_HIGH = np.frombuffer(b"\xf0" * 8, np.int64)


class WorthlessDelta(RagtagError, ValueError):
    """A contribution that is not merged, and why."""


def encoded_bytes(codec: Codec, numel: int) -> int:
    """Bytes of `numel` numbers as they travel."""
    return 4 * numel if codec != "int4" else -(-numel // BLOCK) * (_HALF + 4)


def encode(codec: Codec, flat: torch.Tensor) -> memoryview:
    """`flat` (1-d fp32, in host memory) as it travels; none of a block is finite any more where one of it was not."""
    if codec != "int4":
        return memoryview(flat.clone().numpy()).cast("B")  # pyright: ignore[reportArgumentType]
    numel = flat.numel()
    num_whole, num_blocks = numel // BLOCK, -(-numel // BLOCK)
    out = np.empty(num_blocks * (_HALF + 4), np.uint8)
    packed = out[: num_blocks * _HALF].reshape(num_blocks, _HALF)
    scales = out[num_blocks * _HALF :].view(np.float32)
    flat = flat.contiguous()
    _pack(flat[: num_whole * BLOCK].view(-1, BLOCK), packed, scales)
    if num_whole < num_blocks:
        last = torch.zeros(1, BLOCK)
        last[0, : numel - num_whole * BLOCK] = flat[num_whole * BLOCK :]
        _pack(last, packed[num_whole:], scales[num_whole:])
    return memoryview(out)  # pyright: ignore[reportArgumentType]


def decode(codec: Codec, data: bytes | memoryview, numel: int, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """What `encode` made, as `numel` numbers in fp32; the same bits on every machine.

    Args:
        out: 1-d fp32 of whole blocks, whose beginning is overwritten and returned if it is large enough; int4 only.

    Raises:
        WorthlessDelta: the length does not fit.
    """
    expected = encoded_bytes(codec, numel)
    if len(data) != expected:
        raise WorthlessDelta(f"{len(data)} bytes of {codec} where {numel} numbers take {expected}: a wrong shape")
    if not numel:
        return torch.empty(0)
    if codec != "int4":
        return torch.frombuffer(bytearray(data), dtype=torch.float32)
    num_blocks = -(-numel // BLOCK)
    packed = np.frombuffer(data, np.uint8, num_blocks * _HALF).reshape(num_blocks, _HALF)
    scales = torch.from_numpy(np.frombuffer(data, np.float32, offset=num_blocks * _HALF) / np.float32(16))
    if out is None or out.numel() < num_blocks * BLOCK:
        out = torch.empty(num_blocks * BLOCK)
    _unpack(packed, scales, out[: num_blocks * BLOCK].view(num_blocks, BLOCK))
    return out[:numel]


def _pack(blocks: torch.Tensor, packed: np.ndarray, scales: np.ndarray) -> None:
    spare = torch.empty(_CHUNK, BLOCK)
    codes = np.empty((_CHUNK, BLOCK), np.uint8)
    words = codes.view(np.int64)
    shifted = np.empty((_CHUNK, _HALF // 8), np.int64)
    for first in range(0, len(blocks), _CHUNK):
        chunk = blocks[first : first + _CHUNK]
        n = len(chunk)
        scale = torch.abs(chunk, out=spare[:n]).amax(1).div_(_LEVELS)
        scales[first : first + n] = scale.numpy()
        # 8.5: codes of 1 to 15, rounded to the nearest by cutting off. Where the scale is not finite, any code will do.
        torch.mul(chunk, scale.clamp_min_(_TINY).reciprocal_()[:, None], out=spare[:n]).add_(8.5)
        with np.errstate(invalid="ignore"):
            np.copyto(codes[:n], spare[:n].numpy(), casting="unsafe")
        # No code is above 15, so no bit passes from one byte of a word into the next one.
        high = np.left_shift(words[:n, _HALF // 8 :], 4, out=shifted[:n])
        high |= words[:n, : _HALF // 8]
        np.bitwise_xor(high, _BOTH_SIGNS, out=packed[first : first + n].view(np.int64))  # 8 + x becomes x


def _unpack(packed: np.ndarray, sixteenths: torch.Tensor, out: torch.Tensor) -> None:
    numbers = np.empty((_CHUNK, _HALF // 8), np.int64)
    for first in range(0, len(packed), _CHUNK):
        words = packed[first : first + _CHUNK].view(np.int64)
        n = len(words)
        chunk = out[first : first + n]
        written = chunk.numpy()
        # A number in the high half of a byte is 16 times itself.
        np.bitwise_and(np.left_shift(words, 4, out=numbers[:n]), _HIGH, out=numbers[:n])
        np.copyto(written[:, :_HALF], numbers[:n].view(np.int8))
        np.bitwise_and(words, _HIGH, out=numbers[:n])
        np.copyto(written[:, _HALF:], numbers[:n].view(np.int8))
        chunk.mul_(sixteenths[first : first + n, None])
