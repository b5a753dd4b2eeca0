import torch

from spindle.compute.adapter import Adapter
from spindle.compute.layout import LoraTarget, build_layout
from spindle.types import LoraConfig


def make():
    return Adapter(build_layout(LoraConfig(rank=2), [LoraTarget("layers.0.q_proj", 8, 8, "attn")])).init(3)


def test_a_copy_in_another_dtype_is_made_once_per_version():
    adapter = make()
    first = adapter.weights(torch.bfloat16)
    assert adapter.weights(torch.bfloat16) is first
    assert torch.equal(first.params, adapter.params.bfloat16())
    adapter.params.add_(1.0)
    second = adapter.weights(torch.bfloat16)
    assert second is not first
    assert torch.equal(second.params, adapter.params.bfloat16())
    assert adapter.weights() is adapter.weights()
    assert adapter.weights().params is adapter.params


def test_a_snapshot_stays_as_it_was():
    adapter = make()
    snapshot, before = adapter.snapshot(), adapter.params.clone()
    adapter.params.zero_()
    assert torch.equal(snapshot.params, before)
