"""What is asked of the prompt's own tokens: logprobs, top-k rows, chosen ids, drawn alternatives.

Row r of a prompt of n tokens is the model's output after tokens 0..r; it scores prompt token r + 1. Rows come in any number of runs,
in order, and only those that something was asked of go through the head.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from spindle.sampling.choose import draw
from spindle.sampling.noise import uniform
from spindle.sampling.request import Checked
from spindle.types import TensorData

MASK_LOGPROB = -99999.0
_ALT_SAMPLE = 1 << 32  # noise of prompt alternatives never meets that of samples


class PromptScores:
    def __init__(self, checked: Checked) -> None:
        request, n = checked.request, len(checked.prompt)
        k, alt = request.topk_prompt_logprobs, request.prompt_alt_tokens_k
        self._checked, self._k, self._alt = checked, k, alt
        self.logprobs = np.full(n, np.nan, np.float32)
        self.topk_ids, self.topk_logprobs = np.zeros((n, k), np.int32), np.full((n, k), MASK_LOGPROB, np.float32)
        self.alt_ids, self.alt_logprobs = np.zeros((n - 1, alt), np.int64), np.zeros((n - 1, alt), np.float32)
        asked = request.target_prompt_logprobs
        self.targets = np.zeros(0 if asked is None else np.asarray(asked.data).size, np.float32)  # flat
        self._first = n - 1 - checked.last_n if request.prompt_logprobs or k else n - 1  # first row that scores the prompt's own tokens
        self._wanted = np.zeros(n, bool)  # rows that something is asked of
        self._wanted[0 if alt else self._first : n - 1] = True
        if checked.targets is not None:
            self._wanted[checked.targets[0]] = True

    def rows(self, start: int, stop: int) -> np.ndarray:
        """The rows of [start, stop) that must be given to ``add``: int64, ascending."""
        return start + np.flatnonzero(self._wanted[start:stop])

    def add(self, rows: np.ndarray, logits: torch.Tensor) -> None:
        """rows: [m] of ``rows``. logits: [m, V] float32."""
        checked, device = self._checked, logits.device
        logprobs = torch.log_softmax(logits, -1)
        if rows[-1] >= self._first:
            skip = int(np.searchsorted(rows, self._first))
            mine, at = logprobs[skip:], rows[skip:] + 1
            following = torch.from_numpy(checked.prompt[at]).to(device)
            self.logprobs[at] = mine.gather(1, following[:, None])[:, 0].cpu().numpy()
            if self._k:
                values, ids = mine.topk(self._k, -1)
                self.topk_ids[at], self.topk_logprobs[at] = ids.cpu().numpy(), values.cpu().numpy()
        if checked.targets is not None:
            target_rows, asked, where = checked.targets
            first, last = np.searchsorted(target_rows, (rows[0], rows[-1] + 1))
            line = torch.from_numpy(np.searchsorted(rows, target_rows[first:last])).to(device)
            self.targets[where[first:last]] = logprobs[line, torch.from_numpy(asked[first:last]).to(device)].cpu().numpy()
        if self._alt:
            self._draw(rows, logits, logprobs)

    def _draw(self, rows: np.ndarray, logits: torch.Tensor, logprobs: torch.Tensor) -> None:
        checked, k = self._checked, self._alt
        if checked.temperature == 0:
            ids = logits.argmax(-1, keepdim=True).expand(-1, k)
        else:
            noise = uniform(np.uint64(checked.seed), _ALT_SAMPLE + np.arange(k)[None, :], rows[:, None])
            ids = draw(torch.softmax(logits / checked.temperature, -1), torch.from_numpy(noise).to(logits.device))
        self.alt_ids[rows] = ids.cpu().numpy()
        self.alt_logprobs[rows] = logprobs.gather(1, ids).cpu().numpy()

    def fields(self) -> dict[str, Any]:
        """The finished answer as fields of SampleOutput, those that were asked for."""
        request = self._checked.request
        fields: dict[str, Any] = {}
        if request.prompt_logprobs:
            fields["prompt_logprobs"] = self.logprobs
        if self._k:
            fields |= {"topk_prompt_token_ids": self.topk_ids, "topk_prompt_logprobs": self.topk_logprobs}
        if self._alt:
            fields |= {"prompt_alt_token_ids": self.alt_ids, "prompt_alt_logprobs": self.alt_logprobs}
        if (asked := request.target_prompt_logprobs) is not None:
            shape = tuple(np.shape(asked.data) if asked.shape is None else asked.shape)
            values = self.targets.reshape(shape) if asked.crow_indices is None else self.targets
            fields["target_prompt_logprobs"] = TensorData(values, shape, asked.crow_indices, asked.col_indices)
        return fields
