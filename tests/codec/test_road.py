"""Body in, tensors out, answer back: the whole of the codec on small requests."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spindle import codec
from spindle.types import Datum
from tests.codec.bodies import body, csr, dense, fill_all, text_datum, zstd


def wide(n: int, k: int = 5) -> np.ndarray:
    out = np.zeros((n, k), np.int64)
    out[n // 2] = np.arange(1, k + 1)
    return out


LENGTHS = (7, 2, 5, 3)


@pytest.mark.parametrize("form", [dense, csr], ids=["dense", "csr"])
@pytest.mark.parametrize("encoding", [None, "identity", "zstd"])
def test_wide_targets_in_any_order(form, encoding):
    data = [text_datum(range(n), target_tokens=form(wide(n)), weights=form(wide(n) / 2)) for n in LENGTHS]
    raw = body(*data)
    scanned = codec.scan(zstd(raw) if encoding == "zstd" else raw, encoding)
    assert (scanned.model_id, scanned.seq_id, scanned.loss_fn, scanned.forward_only) == ("run:train:0", 3, "cross_entropy", False)
    assert scanned.lengths.tolist() == list(LENGTHS) and scanned.target_widths.tolist() == [5] * 4
    assert (scanned.num_datums, scanned.num_tokens, scanned.nbytes) == (4, 17, len(raw))
    got = fill_all(scanned, ["weights"], [2, 0, 3])
    chosen = [5, 7, 3]
    assert got["tokens"].tolist() == [i for n in chosen for i in range(n)]
    assert got["targets"].tolist() == [cell for n in chosen for cell in wide(n).ravel()]
    assert got["weights"].tolist() == [cell / 2 for n in chosen for cell in wide(n).ravel()]


def test_narrow_and_wide_targets_in_one_request():
    data = [text_datum(range(3), target_tokens=dense([4, 5, 6])), text_datum(range(2), target_tokens=csr([[0, 7], [8, 0]]))]
    scanned = codec.scan(body(*data))
    assert scanned.target_widths.tolist() == [0, 2]
    assert fill_all(scanned)["targets"].tolist() == [4, 5, 6, 0, 7, 8, 0]


def test_torch_tensors_are_filled_in_place():
    scanned = codec.scan(body(text_datum([9, 8], target_tokens=dense([8, 7]), weights=dense([0.5, -2.0]))))
    tokens, targets, weights = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    codec.fill(scanned, [0], tokens, targets, {"weights": (weights, None)})
    assert (tokens.tolist(), targets.tolist(), weights.tolist()) == ([9, 8], [8, 7], [0.5, -2.0])


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_in_process_request_equals_its_wire_twin():
    targets, weights = torch.tensor(wide(4)), torch.tensor(wide(4) / 2)
    data = [
        Datum(np.arange(4, dtype=np.int32), {"target_tokens": targets.to_sparse_csr(), "weights": weights.float().to_sparse_csr()}),
        Datum([1, 2], {"target_tokens": [3, 4], "weights": [0.25, 1]}),
        Datum(torch.tensor([5]), {"target_tokens": torch.tensor([6]), "weights": torch.tensor([1.5], dtype=torch.bfloat16)}),
    ]
    config = {"clip_low_threshold": 0.5, "loss_id": "x"}
    here = codec.scan_arrays("run:train:0", 9, data, "ppo", config, forward_only=True)
    there = codec.scan(codec.encode_request("run:train:0", 9, data, "ppo", config, forward_only=True))
    for name in ("model_id", "seq_id", "loss_fn", "loss_fn_config", "forward_only", "num_tokens"):
        assert getattr(here, name) == getattr(there, name)
    a, b = fill_all(here, ["weights"]), fill_all(there, ["weights"])
    assert all((a[name] == b[name]).all() for name in a)
    assert a["weights"].tolist() == [*(wide(4) / 2).ravel(), 0.25, 1, 1.5]


def test_answer_round_trip_keeps_input_order_and_shapes():
    lengths, widths = np.array([2, 1, 3, 2]), np.array([0, 0, 2, 0])
    logprobs = np.arange(11, dtype=np.float32)
    output = codec.decode_forward_backward(codec.encode_forward_backward(logprobs, lengths, widths, {"loss:sum": -1.5, "n:max": 2.0}))
    assert output.metrics == {"loss:sum": -1.5, "n:max": 2.0} and output.loss == -1.5
    got = [row["logprobs"].tolist() for row in output.loss_fn_outputs]
    assert got == [[0, 1], [2], [[3, 4], [5, 6], [7, 8]], [9, 10]]
