"""Writes fuzz/corpus: small bodies that between them reach every branch of the scanner. Run again when the wire grows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from spindle.codec import wire_pb2 as wire
from tests.codec.bodies import body, csr, dense, raw_csr, request, simple, text_datum, zstd

CORPUS = Path(__file__).parent / "corpus"
PLAIN, ZSTD = b"\0", b"\1"


def bodies() -> dict[str, bytes]:
    wide = np.array([[0, 3, 0], [0, 0, 0], [7, 0, 9]])
    few = np.zeros((40, 3), int)
    few[[7, 39]] = [[0, 5, 0], [4, 0, 6]]
    zeros = np.zeros((120, 3), int)  # whole blocks of them around what is not
    zeros[[60, 61]] = [[0, 5, 0], [4, 0, 6]]
    split = simple(2)
    split.model_input.add().encoded_text.tokens = np.array([4, 5], "<i4").tobytes()
    spans = text_datum([1, 2], target_tokens=dense([2, 3]))
    spans.model_input_spans.add().prompt_tokens.CopyFrom(wire.TokenSpan(sequence_id="a", offset=1, length=1))
    spans.loss_fn_input_spans.add().sampled_tokens.CopyFrom(wire.TokenSpan(sequence_id="b", length=2))
    image = simple(3)
    image.model_input.add().image.format = "png"
    bfloat16 = wire.Tensor(dense=np.array([0x3F80, 0x4000], "<u2").tobytes(), dtype=wire.DTYPE_BFLOAT16, shape=[2])
    config = request(simple(2), loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.5})
    config.loss_fn_config_v2["clip_low_threshold"].number = 0.5
    config.loss_fn_config_v2["loss_id"].text = "x"
    return {
        "dense": body(simple(4), simple(1)),
        "csr": body(text_datum([1, 2, 3], target_tokens=csr(wide), weights=csr(wide / 2))),
        "csr_few": body(text_datum(range(40), target_tokens=csr(few), weights=csr(few / 2))),
        "csr_flat": body(text_datum(range(120), target_tokens=csr(zeros), weights=dense(-zeros / 2))),
        "dense_zeros": body(text_datum(range(120), target_tokens=dense(zeros), weights=dense(zeros / 2))),
        "dense_wide": body(text_datum([1, 2, 3], target_tokens=dense(wide), weights=dense(wide / 2))),
        "unsorted": body(text_datum([1, 2], target_tokens=raw_csr([5, 6, 7], [0, 2, 3], [1, 0, 1], [2, 2]))),
        "chunks": body(split),
        "spans": body(spans, forward_only=True),
        "image": body(image),
        "bfloat16": body(text_datum([1, 2], target_tokens=dense([1, 2], "<i4"), weights=bfloat16)),
        "config": config.SerializeToString(),
        "group": body(simple(2)) + b"\x83\x01\x88\x01\x05\x84\x01",
        "no_target": body(text_datum([1], weights=dense([1.0]))),
    }


if __name__ == "__main__":
    CORPUS.mkdir(exist_ok=True)
    for name, raw in bodies().items():
        (CORPUS / name).write_bytes(PLAIN + raw)
    raw = bodies()["csr"]
    skippable = (0x184D2A50).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"abc"
    (CORPUS / "zstd").write_bytes(ZSTD + zstd(raw))
    (CORPUS / "zstd_undeclared").write_bytes(ZSTD + zstd(raw, declared=False, write_checksum=True))
    (CORPUS / "zstd_frames").write_bytes(ZSTD + zstd(raw[:50]) + skippable + zstd(raw[50:], declared=False))
