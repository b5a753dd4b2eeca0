"""Answers, and the code base around the extension: stub, generated messages, who imports what."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as public
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from spindle import codec
from spindle.codec import _codec
from spindle.codec import wire_pb2 as wire
from spindle.types import SampledSequence, SampleOutput, TensorData

ROOT = Path(codec.__file__).parents[2]


def test_forward_backward_answer_as_the_sdk_reads_it():
    lengths, widths = np.array([2, 3, 1]), np.array([0, 2, 2])
    logprobs = -np.arange(10, dtype=np.float32)
    body = codec.encode_forward_backward(logprobs, lengths, widths, {"loss:sum": 3.5})
    output = deserialize_forward_backward_output(body)
    assert output.metrics == {"loss:sum": 3.5} and output.loss_fn_output_type == "ArrayRecord"
    got = [row["logprobs"].to_numpy() for row in output.loss_fn_outputs]
    assert [array.shape for array in got] == [(2,), (3, 2), (1, 2)]
    assert np.concatenate([array.ravel() for array in got]).tolist() == logprobs.tolist()


def test_equal_widths_share_a_record():
    body = codec.encode_forward_backward(np.zeros(12, np.float32), np.array([1, 2, 1, 3, 1]), np.array([0, 0, 2, 2, 0]), {})
    message = public.ForwardBackwardOutput.FromString(body)
    assert [record.num_datums for record in message.loss_fn_outputs] == [2, 2, 1]
    offsets = [np.frombuffer(record.fields["logprobs"].offsets, "<i8").tolist() for record in message.loss_fn_outputs]
    assert offsets == [[0, 4, 12], [0, 8, 32], [0, 4]]
    assert [list(record.fields["logprobs"].trailing_shape) for record in message.loss_fn_outputs] == [[], [2], []]
    assert {record.type_tag for record in message.loss_fn_outputs} == {"ArrayRecord"}


@pytest.mark.parametrize("k", [1, 127, 128, 300])
@pytest.mark.parametrize("n", [1, 31, 128, 5000])
def test_sizes_of_every_varint_length(n, k):
    logprobs = np.random.default_rng(0).random(n * k, np.float32)
    body = codec.encode_forward_backward(logprobs, np.array([n]), np.array([k]), {"m" * 200 + ":sum": 1.0})
    record = wire.ForwardBackwardOutput.FromString(body).loss_fn_outputs[0].fields["logprobs"]
    assert record.data == logprobs.tobytes() and list(record.trailing_shape) == [k]


def test_answer_sizes_must_agree():
    with pytest.raises(ValueError, match="logprobs has 3 cells: lengths and widths ask for 4"):
        codec.encode_forward_backward(np.zeros(3, np.float32), np.array([2]), np.array([2]), {})
    with pytest.raises(ValueError, match="one entry per datum"):
        codec.encode_forward_backward(np.zeros(2, np.float32), np.array([2]), np.array([0, 0]), {})
    with pytest.raises(ValueError, match="must not be negative"):
        codec.encode_forward_backward(np.zeros(2, np.float32), np.array([2]), np.array([-2]), {})


def test_an_answer_takes_its_parts_in_any_order():
    lengths, widths = np.array([2, 3, 1, 4]), np.array([0, 2, 2, 0])
    logprobs = -np.arange(14, dtype=np.float32)
    parts = np.split(logprobs, np.cumsum([2, 6, 2]))
    answer = codec.Answer(lengths, widths)
    answer.place(np.array([3, 1]), np.concatenate([parts[3], parts[1]]))
    with pytest.raises(RuntimeError, match="logprobs of 2 datums are missing"):
        answer.finish([])
    answer.place(np.array([0]), parts[0] + 1)
    answer.place(np.array([2, 0]), np.concatenate([parts[2], parts[0]]))  # the last word counts
    metrics = {f"metric {i}:mean": i / 3 for i in range(100)}  # more than there is room for without moving
    body = answer.finish(list(metrics.items()))
    assert body == codec.encode_forward_backward(logprobs, lengths, widths, metrics)
    assert deserialize_forward_backward_output(body).metrics == metrics
    with pytest.raises(RuntimeError, match="the answer is finished"):
        answer.place(np.array([0]), parts[0])
    with pytest.raises(RuntimeError, match="the answer is finished"):
        answer.finish([])


def test_what_does_not_fit_an_answer_is_refused():
    answer = codec.Answer(np.array([2, 3]), np.array([0, 2]))
    for indices, cells, text in (([0], 3, "logprobs has 3 cells: lengths and widths ask for 2"), ([1, 0], 7, "has 7 cells")):
        with pytest.raises(ValueError, match=text):
            answer.place(np.array(indices), np.zeros(cells, np.float32))
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"datum {index} of 2"):
            answer.place(np.array([index]), np.zeros(2, np.float32))


@pytest.mark.parametrize(
    ("lengths", "widths"), [([2**61, 2**61], [0, 0]), ([2**61 + 1], [0]), ([2**32], [2**32]), ([2**39, 2**39, 1], [0, 1, 0])]
)
def test_sizes_that_no_answer_has_are_refused(lengths, widths):
    with pytest.raises(ValueError, match="more than 2\\^40 cells"):
        codec.Answer(np.array(lengths), np.array(widths))


def test_sample_answer_as_the_sdk_reads_it():
    topk_ids, topk = np.array([[1, 2], [3, 4]]), np.array([[-0.5, -1.5], [-0.25, -2.0]], np.float32)
    output = SampleOutput(
        [
            SampledSequence("stop", np.array([5, 6]), np.array([-1.0, -2.0], np.float32), topk_ids, topk),
            SampledSequence("length", np.array([7]), np.array([-3.0], np.float32)),
        ],
        prompt_logprobs=np.array([np.nan, -1.0], np.float32),
        topk_prompt_token_ids=np.array([[0], [9]]),
        topk_prompt_logprobs=np.array([[-99999.0], [-0.5]], np.float32),
        target_prompt_logprobs=TensorData(np.array([[-0.5, 0.0]], np.float32)),
        prompt_cache_hit_tokens=2,
    )
    read = deserialize_sample_response(codec.encode_sample_response(output))
    first, second = read.sequences
    assert (first.stop_reason, list(first.tokens), list(first.logprobs)) == ("stop", [5, 6], [-1.0, -2.0])
    assert (second.stop_reason, list(second.tokens), list(second.logprobs)) == ("length", [7], [-3.0])
    raw = public.SampleResponse.FromString(codec.encode_sample_response(output))
    assert np.frombuffer(raw.sequences[0].topk_sampled_logprobs.token_ids, "<i4").tolist() == [1, 2, 3, 4]
    assert np.isnan(np.frombuffer(raw.prompt_logprobs, "<f4")[0]) and raw.prompt_cache_hit_tokens == 2
    assert (raw.topk_prompt_logprobs.k, raw.topk_prompt_logprobs.length) == (1, 2)
    assert list(raw.target_prompt_logprobs.shape) == [1, 2] and not raw.HasField("prompt_alt_tokens")
    plain = public.SampleResponse.FromString(codec.encode_sample_response(SampleOutput([output.sequences[1]])))
    assert not plain.HasField("prompt_logprobs") and not plain.HasField("topk_prompt_logprobs")


def test_messages_agree_with_the_sdks():
    for name, message in public.DESCRIPTOR.message_types_by_name.items():
        ours = {
            "EncodedTextChunk": "EncodedText",
            "ImageChunk": "Image",
            "ImageDimensions": "ImageSize",
            "DmelChunk": "Dmel",
            "PromptProvenanceSpan": "TokenSpan",
            "SampledProvenanceSpan": "TokenSpan",
        }.get(name, name)
        if ours not in wire.DESCRIPTOR.message_types_by_name:
            assert name in {"SamplingParams", "StopStrings", "StopTokens"}, f"{name} is missing in wire.proto"
            continue
        mine = wire.DESCRIPTOR.message_types_by_name[ours]
        facts = [{(f.number, f.name, f.type, f.is_repeated) for f in kind.fields} for kind in (mine, message)]
        assert facts[0] == facts[1], name


def test_stub_names_what_the_extension_has():
    stub = ast.parse((ROOT / "spindle/codec/_codec.pyi").read_text())
    functions = {node.name: [arg.arg for arg in node.args.args] for node in stub.body if isinstance(node, ast.FunctionDef)}
    public_names = {name for name in dir(_codec) if not name.startswith("_")}
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    values = {node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)}
    assert public_names == set(functions) | set(classes) | values
    for name, arguments in functions.items():
        signature = getattr(_codec, name).__doc__.splitlines()[0]
        assert re.findall(r"(\w+):", signature.split(") ->")[0]) == arguments, signature
    for name, node in classes.items():
        members = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        assert members - {"__init__"} == {member for member in dir(getattr(_codec, name)) if not member.startswith("_")}
    defaults = inspect.cleandoc(_codec.Limits.__init__.__doc__)
    for argument, default in zip(*(getattr(classes["Limits"].body[1].args, part) for part in ("kwonlyargs", "kw_defaults")), strict=True):
        assert getattr(codec.Limits(), argument.arg) == ast.literal_eval(default), defaults


def test_only_the_codec_imports_the_extension():
    for path in (ROOT / "spindle").rglob("*.py"):
        if path.parent.name != "codec":
            assert "_codec" not in path.read_text(), path
    for path in (ROOT / "csrc").iterdir():
        if path.suffix in {".cpp", ".hpp"} and path.name != "bindings.cpp":
            assert "pybind" not in path.read_text() and "Python.h" not in path.read_text(), path
