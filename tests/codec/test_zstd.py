"""zstd bodies: every way to write one, and every lie that can be told in a header."""

from __future__ import annotations

import resource

import numpy as np
import pytest
import zstandard

from spindle import codec
from spindle.errors import MalformedBody
from tests.codec.bodies import body, dense, fill_all, simple, text_datum, zstd

N = 60_000
RAW = body(simple(3), text_datum(np.random.default_rng(0).integers(0, 1000, N), target_tokens=dense(np.arange(N))))
MAGIC = bytes.fromhex("28b52ffd")


def skippable(payload: bytes, kind: int = 0) -> bytes:
    return (0x184D2A50 + kind).to_bytes(4, "little") + len(payload).to_bytes(4, "little") + payload


def block(kind: int, size: int, payload: bytes, last: bool = True) -> bytes:
    """kind 0 raw, 1 run-length, 2 compressed, 3 reserved."""
    return (size << 3 | kind << 1 | last).to_bytes(3, "little") + payload


def frame(blocks: bytes, declared: int | None = None, window: int = 0x50, descriptor: int = 0) -> bytes:
    if declared is None:
        return MAGIC + bytes([descriptor, window]) + blocks
    return MAGIC + bytes([0xE0 | descriptor]) + declared.to_bytes(8, "little") + blocks


def streamed(raw: bytes, flush_every: int) -> bytes:
    out = zstandard.ZstdCompressor().compressobj()
    pieces = [
        out.compress(raw[i : i + flush_every]) + out.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) for i in range(0, len(raw), flush_every)
    ]
    return b"".join(pieces) + out.flush()


GOOD = {
    "declared": zstd(RAW),
    "undeclared": zstd(RAW, declared=False),
    "checksum": zstd(RAW, write_checksum=True),
    "level 19": zstd(RAW, level=19),
    "level -5": zstd(RAW, level=-5),
    "small window": zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=10)).compress(RAW),
    "two frames": zstd(RAW[:1000]) + zstd(RAW[1000:]),
    "many frames, some undeclared": b"".join(zstd(RAW[i : i + 7001], declared=i % 2 == 0) for i in range(0, len(RAW), 7001)),
    "skippable frames": skippable(b"before") + zstd(RAW[:99]) + skippable(b"", 15) + zstd(RAW[99:]) + skippable(b"after"),
    "an empty frame": zstd(b"") + zstd(RAW),
    "flushed blocks": streamed(RAW, 5000),
    "stored": frame(
        b"".join(block(0, len(RAW[i : i + 65536]), RAW[i : i + 65536], i + 65536 >= len(RAW)) for i in range(0, len(RAW), 65536))
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_accepted(name):
    plain, packed = codec.scan(RAW), codec.scan(GOOD[name], "zstd")
    assert packed.fingerprint == plain.fingerprint and packed.nbytes == len(RAW)
    a, b = fill_all(plain, indices=[1]), fill_all(packed, indices=[1])
    assert all((a[key] == b[key]).all() for key in a)


PACKED = zstd(RAW)
DICTIONARY = zstandard.train_dictionary(4096, [b"run:train:%d cross_entropy" % i * 3 for i in range(2000)])
BAD = {
    "the body is empty": b"",
    "the body is not zstd: it does not begin with a zstd frame": RAW,
    "the body holds no zstd frame": skippable(b"only this"),
    "the body has trailing bytes after its last zstd frame": PACKED + b"garbage",
    "it ends inside a frame, or bytes trail the last one": PACKED + b"\0",
    "it ends inside a frame": PACKED[:-1],
    "the body has trailing bytes": PACKED + b"\0\0\0\0\0",
    "the zstd frame needs a dictionary: compress without one": zstandard.ZstdCompressor(dict_data=DICTIONARY).compress(RAW),
    "the zstd frame asks for a window of 268435456 bytes: at most 2^27 are allowed": frame(block(0, 1, b"x"), window=(28 - 10) << 3),
    "a reserved bit of the frame header is set": frame(block(0, 1, b"x"), descriptor=8),
    "a block has the reserved kind": frame(block(3, 1, b"x")),
    "a block is larger than its frame allows": frame(block(0, 200_000, bytes(200_000))),
    "declares 5 bytes, but its blocks hold 10 to 10": frame(block(1, 5, b"a", last=False) + block(0, 5, b"abcde"), declared=5),
    "declares 500000000 bytes, but its blocks hold 0 to 131072": frame(block(2, 6, b"abcdef"), declared=500_000_000),
    "the body inflates to 1099511627776 bytes or more: at most 536870912 are allowed": frame(block(1, 100, b"a"), declared=1 << 40),
    "the body is not readable zstd": frame(block(2, 20, b"\xff" * 20)),
}


@pytest.mark.parametrize("text", BAD)
def test_refused(text):
    with pytest.raises(MalformedBody) as error:
        codec.scan(BAD[text], "zstd")
    assert text in str(error.value)


def test_checksum_is_checked():
    packed = bytearray(zstd(RAW, write_checksum=True))
    packed[-1] ^= 1
    with pytest.raises(MalformedBody, match="checksum"):
        codec.scan(packed, "zstd")


def test_declared_size_that_blocks_could_have_but_have_not():
    lie = bytearray(zstandard.ZstdCompressor().compress(RAW[:300]))
    assert zstandard.frame_content_size(bytes(lie)) == 300
    at = lie.index((300 - 256).to_bytes(2, "little"), 4)
    lie[at : at + 2] = (310 - 256).to_bytes(2, "little")
    with pytest.raises(MalformedBody, match="not readable zstd"):
        codec.scan(lie, "zstd")


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


@pytest.mark.parametrize("declared", [True, False])
def test_bomb_is_refused_before_memory_is_taken(declared):
    zeros = zstd(bytes(8 << 20), declared)
    bombs = {"a zstd bomb": zeros * 100, "one long run": frame(b"".join(block(1, 131_072, b"\0", i == 8191) for i in range(8192)))}
    for name, bomb in bombs.items():
        assert len(bomb) < 100_000, name
        before = resident_mb()
        with pytest.raises(MalformedBody, match=r"inflates to \d+ bytes or more|out of range"):
            codec.scan(bomb, "zstd")
        assert resident_mb() - before < 20


def test_bomb_inside_a_field_stops_at_the_limit():
    # A valid protobuf field (unknown, number 15) of 1 GB of zeros, undeclared: refused when its length is read.
    head = b"\x7a" + b"\x80\x80\x80\x80\x04"
    before = resident_mb()
    with pytest.raises(MalformedBody, match=r"inflates to|ends inside a field"):
        codec.scan(zstd(head, declared=False) + zstd(bytes(8 << 20), declared=False) * 128, "zstd")
    assert resident_mb() - before < 20
