"""Whatever the scanner accepts means what protobuf and numpy say; what protobuf refuses, it refuses.

Messages are built byte by byte, so that fields come in any order, twice, in pieces, with unknown neighbours and in both packings.
One thing is left out: unknown fields inside a map entry. The specification skips them, and so do we; upb takes the whole entry for
unknown.
"""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given, settings
from hypothesis import strategies as st

from spindle import codec
from spindle.codec import wire_pb2 as wire
from spindle.errors import InvalidRequest, MalformedBody
from tests.codec.bodies import csr, dense, fill_all, read_tensor, read_tokens, zstd

VARINT, FIXED64, BYTES = 0, 1, 2
NAMES = ["target_tokens", "weights", "logprobs", "advantages"]
PROFILE = settings(max_examples=150, deadline=None)


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: bytes | int | float) -> bytes:
    if isinstance(value, bytes):
        return varint(number << 3 | BYTES) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | FIXED64) + np.float64(value).tobytes()
    return varint(number << 3 | VARINT) + varint(value)


unknown = st.sampled_from(
    [
        b"",
        b"",
        field(1000, b"junk"),
        field(99, 7),
        field(98, 0.5),
        varint(97 << 3 | 5) + b"1234",
        varint(96 << 3 | 3) + field(1, 2) + varint(96 << 3 | 4),
    ]
)


@st.composite
def shuffled(draw, pieces: list[bytes]) -> bytes:
    """The fields in some order, with unknown ones between them."""
    return b"".join(piece + draw(unknown) for piece in draw(st.permutations(pieces)))


@st.composite
def tensor_bytes(draw, tensor: wire.Tensor) -> bytes:
    """One of the many ways to write a Tensor; pieces of its CSR half may come apart."""
    pieces = [field(3, tensor.dtype)]
    if tensor.WhichOneof("encoding") == "dense":
        pieces.append(draw(st.sampled_from([b"", field(1, b"earlier"), field(2, field(1, b"other arm"))])) + field(1, tensor.dense))
    else:
        sparse = tensor.sparse_csr
        halves = [field(1, sparse.values), field(2, sparse.crow_indices), field(3, sparse.col_indices)]
        cut = draw(st.integers(0, 3))
        pieces.append(
            draw(st.sampled_from([b"", field(1, b"other arm")])) + field(2, b"".join(halves[:cut])) + field(2, b"".join(halves[cut:]))
        )
    sizes = list(tensor.shape)
    if sizes and draw(st.booleans()):
        pieces.append(field(4, b"".join(varint(size) for size in sizes)))
    else:
        pieces.append(b"".join(field(4, size) for size in sizes))
    return draw(shuffled(pieces))


@st.composite
def datum_bytes(draw) -> bytes:
    n = draw(st.integers(1, 6))
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n))
    width = draw(st.integers(0, 3))
    shape = (n, width) if width else (n,)
    chunks, at = [], 0
    while at < n:
        size = draw(st.integers(0, n - at)) or 1
        chunks.append(field(1, field(1, field(1, np.array(tokens[at : at + size], "<i4").tobytes()))))
        at += size
    if draw(st.booleans()):
        chunks.append(field(1, field(1, b"")))
    if draw(st.booleans()):  # the image arm, then text: the last arm of a oneof counts
        chunks[0] = field(1, field(2, field(1, b"png bytes")) + chunks[0][2 + (len(chunks[0]) > 129) :])
    entries = []
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True)):
        cells = draw(st.lists(st.sampled_from([0, 0, 1, 5, 2**20]), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
        array = np.array(cells, np.int64).reshape(shape)
        array = array if name == "target_tokens" else array.astype(np.float32) / 4
        tensor = csr(array) if width and draw(st.booleans()) else dense(array)
        if array.dtype == np.int64 and tensor.WhichOneof("encoding") == "dense" and draw(st.booleans()):
            tensor = dense(array, "<i4")
        if not width and draw(st.booleans()):
            tensor.ClearField("shape")
        key, value = field(1, name.encode()), field(2, draw(tensor_bytes(tensor)))
        entry = draw(st.sampled_from([key + value, value + key]))
        if draw(st.booleans()):  # an earlier entry of the same key, which this one replaces
            entries.append(field(2, key + field(2, field(3, 1))))
        entries.append(field(2, entry))
    spans = [
        field(
            draw(st.sampled_from([3, 4])),
            field(draw(st.sampled_from([1, 2])), field(1, b"seq") + field(2, draw(st.integers(0, 9))) + field(3, 2)),
        )
        for _ in range(draw(st.integers(0, 2)))
    ]
    # Chunks keep their order, and so do entries of one key and spans of one field; the kinds may be in any order.
    return draw(shuffled([b"".join(chunks), b"".join(entries), b"".join(spans)]))


@st.composite
def request_bytes(draw) -> bytes:
    data = b"".join(field(3, draw(datum_bytes())) for _ in range(draw(st.integers(1, 4))))
    pieces = [field(1, b"run:train:0"), field(2, draw(st.integers(1, 2**31 - 1))), field(4, b"ppo"), data]
    if draw(st.booleans()):
        pieces[1] = field(2, -3) + pieces[1]  # a repeated scalar keeps the last
    if draw(st.booleans()):
        pieces.append(field(6, draw(st.integers(0, 2))))
    for key in draw(st.lists(st.sampled_from([b"clip_low_threshold", b"beta", b""]), unique=True)):
        value = draw(st.sampled_from([b"", field(2, 0.25), field(2, 1.5)]))
        pieces.append(draw(st.sampled_from([b"", field(5, field(1, key))])) + field(5, field(1, key) + value))
    for key in draw(st.lists(st.sampled_from([b"clip_low_threshold", b"loss_id"]), unique=True)):
        value = draw(
            st.sampled_from([field(1, 0.5), field(2, b"text"), field(1, 0.5) + field(2, b"text"), field(2, b"text") + field(1, 2.5)])
        )
        pieces.append(field(7, field(2, value) + field(1, key)))
    return draw(shuffled(pieces))


def same(a, b) -> bool:
    return np.array_equal(np.asarray(a), np.asarray(b))


def assert_agrees(raw: bytes, scanned: codec.ScannedRequest) -> None:
    message = wire.ForwardBackwardRequest.FromString(raw)
    assert (scanned.model_id, scanned.seq_id, scanned.loss_fn) == (message.model_id, message.seq_id, message.loss_fn)
    assert scanned.forward_only == message.forward_only
    v2 = {key: value.text if value.WhichOneof("value") == "text" else value.number for key, value in message.loss_fn_config_v2.items()}
    assert scanned.loss_fn_config == (v2 or dict(message.loss_fn_config))
    assert scanned.num_datums == len(message.data)
    lengths = [len(read_tokens(datum)) for datum in message.data]
    assert scanned.lengths.tolist() == lengths and scanned.num_tokens == sum(lengths)
    assert set(scanned.input_names) == {name for datum in message.data for name in datum.loss_fn_inputs}
    for name in NAMES:
        tensors = [read_tensor(datum.loss_fn_inputs[name]) if name in datum.loss_fn_inputs else None for datum in message.data]
        widths = [-1 if t is None else t.shape[1] if t.ndim == 2 else 0 for t in tensors]
        assert scanned.input_widths(name).tolist() == widths
        present = [(d, t) for d, t in enumerate(tensors) if t is not None]
        misshapen = [d for d, t in present if widths[d] != scanned.target_widths[d]]
        integers = [d for d, t in present if t.dtype.kind == "i"]
        assert scanned.input_faults(name) == tuple(
            (found or [-1])[0] for found in ([d for d, w in enumerate(widths) if w == -1], misshapen, integers)
        )
        if name == "target_tokens":
            assert scanned.target_widths.tolist() == widths
    cells = [n * max(int(k), 1) if k >= 0 else 0 for n, k in zip(lengths, scanned.target_widths, strict=True)]
    assert scanned.cells.tolist() == cells and scanned.cell_starts.tolist() == [sum(cells[:d]) for d in range(len(cells) + 1)]
    for index, datum in enumerate(message.data):
        spans = [
            [
                (s.WhichOneof("span"), *(getattr(getattr(s, s.WhichOneof("span")), part) for part in ("sequence_id", "offset", "length")))
                for s in given
            ]
            for given in (datum.model_input_spans, datum.loss_fn_input_spans)
        ]
        assert scanned.spans(index) == tuple(spans) and scanned.has_spans[index] == any(spans)
        labelled = [name for name in NAMES[1:] if name in datum.loss_fn_inputs and "target_tokens" in datum.loss_fn_inputs]
        names = [name for name in labelled if scanned.input_widths(name)[index] == scanned.target_widths[index]]
        for name in set(labelled) - set(names):  # the loss refuses these before anything is filled
            with pytest.raises(ValueError, match=f"{name} does not have the shape of target_tokens"):
                fill_all(scanned, [name], [index])
        got = fill_all(scanned, names, [index])
        assert same(got["tokens"], read_tokens(datum))
        if "target_tokens" in datum.loss_fn_inputs:
            assert same(got["targets"], read_tensor(datum.loss_fn_inputs["target_tokens"]).ravel())
        for name in names:
            assert same(got[name], read_tensor(datum.loss_fn_inputs[name]).ravel())


@PROFILE
@given(request_bytes(), st.booleans(), st.integers(0, 3))
def test_accepted_bodies_mean_what_protobuf_says(raw, declared, cut):
    plain = codec.scan(raw)
    assert_agrees(raw, plain)
    at = len(raw) * cut // 3
    packed = codec.scan(zstd(raw[:at], declared) + zstd(raw[at:]), "zstd")
    assert packed.fingerprint == plain.fingerprint
    assert_agrees(raw, packed)


@PROFILE
@given(request_bytes(), st.data())
def test_what_protobuf_refuses_is_refused(raw, data):
    broken = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(broken) - 1))
        broken[at] = data.draw(st.integers(0, 255))
    try:
        wire.ForwardBackwardRequest.FromString(bytes(broken))
        readable = True
    except DecodeError:
        readable = False
    try:
        scanned = codec.scan(broken)
    except (MalformedBody, InvalidRequest):
        return
    assert readable
    assert scanned.num_datums > 0


@PROFILE
@given(request_bytes(), st.data())
def test_bodies_broken_into_something_legal_still_agree(raw, data):
    """One byte of the arrays or numbers changed: when it is accepted, it must mean the changed thing."""
    at = data.draw(st.integers(0, len(raw) - 1))
    broken = raw[:at] + bytes([raw[at] ^ (1 << data.draw(st.integers(0, 7)))]) + raw[at + 1 :]
    try:
        scanned = codec.scan(broken)
    except (MalformedBody, InvalidRequest):
        return
    message = wire.ForwardBackwardRequest.FromString(broken)
    names = {name for datum in message.data for name in datum.loss_fn_inputs}
    dropped = [unknown.field_number for part in (message, *message.data) for unknown in UnknownFieldSet(part)]
    if names <= set(NAMES) and not {2, 5, 7} & set(dropped):
        assert_agrees(broken, scanned)


@pytest.mark.parametrize("arms", [(1, 2), (2, 1)])
def test_last_arm_of_a_chunk_counts(arms):
    arm = {1: field(1, field(1, np.array([7, 8], "<i4").tobytes())), 2: field(2, field(1, b"png"))}
    raw = field(1, b"m") + field(2, 1) + field(4, b"ppo") + field(3, field(1, arm[arms[0]] + arm[arms[1]]))
    if arms[-1] == 1:
        assert fill_all(codec.scan(raw))["tokens"].tolist() == [7, 8]
    else:
        with pytest.raises(InvalidRequest, match="chunk 0 is an image"):
            codec.scan(raw)
