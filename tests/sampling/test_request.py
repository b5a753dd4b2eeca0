"""Every way to ask wrongly, and what the error says."""

from __future__ import annotations

import numpy as np
import pytest

from spindle.errors import UserError
from spindle.sampling import validate
from spindle.types import TensorData
from tests.sampling.helpers import request


class Model:
    vocab_size, max_context, eos_token_ids = 100, 64, (1, 2)


PROMPT = [5, 6, 7, 8]


def csr(values=(5,), crow=(0, 1, 1, 1), col=(0,), shape=(3, 2)):
    return TensorData(np.array(values), shape, np.array(crow), np.array(col))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (dict(prompt=[]), "prompt is empty"),
        (dict(prompt=[5, 100]), r"prompt holds token id 100 at position 1; allowed: 0 to 99"),
        (dict(prompt=[-3]), "prompt holds token id -3 at position 0"),
        (dict(prompt=[0.5]), r"prompt has shape \[1\] and dtype float64"),
        (dict(prompt=[[1, 2]]), r"prompt has shape \[1, 2\]"),
        (dict(max_tokens=61), r"prompt of 4 tokens \+ sampling_params.max_tokens 61 is 65; allowed: up to 64"),
        (dict(max_tokens=-1), "sampling_params.max_tokens is -1"),
        (dict(max_tokens=2.5), "sampling_params.max_tokens is 2.5"),
        (dict(prompt=[5] * 64, max_tokens=None), "prompt has 64 tokens, which leaves no room to sample: the context of the model is 64"),
        (dict(num_samples=0), "num_samples is 0; allowed: a whole number from 1 to 4096"),
        (dict(num_samples=True), "num_samples is True"),
        (dict(num_samples=5000), "num_samples is 5000"),
        (dict(temperature=-0.1), r"sampling_params.temperature is -0.1; allowed: 0 \(greedy\) or more"),
        (dict(temperature=float("nan")), "sampling_params.temperature is nan"),
        (dict(temperature="hot"), "sampling_params.temperature is 'hot'; allowed: a finite number"),
        (dict(top_p=0.0), "sampling_params.top_p is 0.0; allowed: above 0, up to 1"),
        (dict(top_p=1.01), "sampling_params.top_p is 1.01"),
        (dict(top_k=0), r"sampling_params.top_k is 0; allowed: -1 \(off\) or 1 and more"),
        (dict(top_k=-2), "sampling_params.top_k is -2"),
        (dict(seed="x"), "sampling_params.seed is 'x'"),
        (dict(seed=1 << 64), "sampling_params.seed is 18446744073709551616"),
        (dict(stop=[""]), "sampling_params.stop holds a string of 0 characters; allowed: 1 to 1024"),
        (dict(stop=["x" * 1025]), "sampling_params.stop holds a string of 1025 characters"),
        (dict(stop=["a", 3]), r"sampling_params.stop is \['a', 3\]; allowed: a string, a list of strings, or a list of token ids"),
        (dict(stop=3), "sampling_params.stop is 3"),
        (dict(stop=[100]), "sampling_params.stop holds token id 100 at position 0; allowed: 0 to 99"),
        (dict(stop=[3] * 65), "sampling_params.stop has 65 entries; allowed: up to 64"),
        (dict(prompt_logprobs_last_n=2), "prompt_logprobs_last_n is 2 but prompt_logprobs is false"),
        (
            dict(prompt_logprobs=True, prompt_logprobs_last_n=4),
            r"prompt_logprobs_last_n \(prompt of 4 tokens\) is 4; allowed: .* from 1 to 3",
        ),
        (dict(prompt_logprobs=True, prompt_logprobs_last_n=0), "prompt_logprobs_last_n .* is 0"),
        (dict(topk_prompt_logprobs=-1), "topk_prompt_logprobs is -1; allowed: a whole number from 0 to 100"),
        (dict(topk_prompt_logprobs=101), "topk_prompt_logprobs is 101"),
        (dict(topk_sample_logprobs=101), "topk_sample_logprobs is 101"),
        (dict(prompt_alt_tokens_k=-1), "prompt_alt_tokens_k is -1"),
        (dict(prompt_alt_tokens_k=1 << 22), "prompt_alt_tokens_k 4194304 x 4 tokens is 16777216 cells; allowed: up to 8388608"),
        (dict(sequence_ids=["a"], num_samples=2), "sequence_ids has 1 entries for num_samples 2"),
        (dict(target_prompt_logprobs=TensorData(np.zeros((3, 2)))), "target_prompt_logprobs has dtype float64; allowed: int64 token ids"),
        (dict(target_prompt_logprobs=TensorData(np.zeros((4, 2), int))), r"target_prompt_logprobs has shape \[4, 2\]; allowed: \[3, K\]"),
        (dict(target_prompt_logprobs=TensorData(np.zeros(3, int))), r"target_prompt_logprobs has shape \[3\]"),
        (dict(target_prompt_logprobs=TensorData(np.zeros((3, 0), int))), r"target_prompt_logprobs has shape \[3, 0\]"),
        (
            dict(target_prompt_logprobs=TensorData(np.full((3, 1), 100))),
            "target_prompt_logprobs holds token id 100; allowed: 0 to 99, or -1",
        ),
        (dict(target_prompt_logprobs=TensorData(np.full((3, 1), -2))), "target_prompt_logprobs holds token id -2"),
        (dict(target_prompt_logprobs=TensorData(np.zeros(5, int), (3, 2))), r"target_prompt_logprobs has 5 values for shape \[3, 2\]"),
        (dict(target_prompt_logprobs=csr(crow=(0, 1, 1))), "target_prompt_logprobs: 1 values, 3 crow_indices, 1 col_indices do not fit"),
        (dict(target_prompt_logprobs=csr(crow=(0, 2, 1, 1))), "target_prompt_logprobs.crow_indices must go up from 0"),
        (dict(target_prompt_logprobs=csr(col=(2,))), "target_prompt_logprobs.col_indices holds a column outside 0 to 1"),
        (
            dict(target_prompt_logprobs=TensorData(np.zeros(1, int), (3, 2), np.zeros(4, int))),
            "target_prompt_logprobs has one of crow_indices and col_indices",
        ),
    ],
)
def test_errors_name_the_field_the_value_and_what_is_allowed(fields, text):
    with pytest.raises(UserError, match=text) as error:
        validate(request(**(dict(prompt=PROMPT) | fields)), Model())
    assert error.value.category == "user"


def test_stop_strings_without_a_tokenizer():
    with pytest.raises(UserError, match=r"sampling_params.stop is \['x'\], but this engine has no tokenizer .* give token ids"):
        validate(request(PROMPT, stop=["x"]), Model(), has_tokenizer=False)


def test_what_is_right_passes():
    checked = validate(request(PROMPT, 60, stop=None), Model())
    assert checked.stop_ids.tolist() == [1, 2] and checked.max_tokens == 60 and checked.first_scored == 4
    assert validate(request(PROMPT, stop="ab"), Model()).stop_strings == ("ab",)
    assert validate(request(PROMPT, stop=[]), Model()).stop_ids.size == 0
    assert validate(request(PROMPT, top_k=1000), Model()).top_k == 100
    assert validate(request(PROMPT, prompt_logprobs=True, prompt_logprobs_last_n=1), Model()).first_scored == 2
    assert validate(request(PROMPT, target_prompt_logprobs=csr(values=(7,), crow=(0, 0, 1, 1))), Model()).first_scored == 1
    assert validate(request(np.array(PROMPT, np.int32), None), Model()).max_tokens == 60
