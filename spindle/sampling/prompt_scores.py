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
        self._checked = checked
        k, alt = request.topk_prompt_logprobs, request.prompt_alt_tokens_k
        self.logprobs = np.full(n, np.nan, np.float32) if request.prompt_logprobs else None
        self.topk_ids = np.zeros((n, k), np.int32) if k else None
        self.topk_logprobs = np.full((n, k), MASK_LOGPROB, np.float32) if k else None
        self.alt_ids = np.zeros((n - 1, alt), np.int64) if alt else None
        self.alt_logprobs = np.zeros((n - 1, alt), np.float32) if alt else None
        self._targets = None
        self._wanted = np.zeros(n, bool)  # rows that something is asked of
        if self.logprobs is not None or k:
            self._wanted[n - 1 - checked.last_n : n - 1] = True
        if alt:
            self._wanted[: n - 1] = True
        if checked.targets is not None:
            self._targets = np.zeros(np.asarray(request.target_prompt_logprobs.data).size, np.float32)
            self._wanted[checked.targets[0]] = True

    def rows(self, start: int, stop: int) -> np.ndarray:
        """The rows of [start, stop) that must be given to ``add``: int64, ascending."""
        return start + np.flatnonzero(self._wanted[start:stop])

    def add(self, rows: np.ndarray, logits: torch.Tensor) -> None:
        """rows: [m] of ``rows``. logits: [m, V] float32."""
        checked, device = self._checked, logits.device
        logprobs = torch.log_softmax(logits, -1)
        scored = torch.from_numpy(np.flatnonzero(rows >= len(checked.prompt) - 1 - checked.last_n)).to(device)
        if self.logprobs is not None or self.topk_ids is not None:
            mine = logprobs if len(scored) == len(rows) else logprobs[scored]
            at = rows[rows >= len(checked.prompt) - 1 - checked.last_n] + 1
            if self.logprobs is not None:
                following = torch.from_numpy(checked.prompt[at]).to(device)
                self.logprobs[at] = mine.gather(1, following[:, None])[:, 0].cpu().numpy()
            if self.topk_ids is not None:
                values, ids = mine.topk(self.topk_ids.shape[1], -1)
                self.topk_ids[at], self.topk_logprobs[at] = ids.cpu().numpy(), values.cpu().numpy()
        if self._targets is not None:
            target_rows, ids, where = checked.targets
            first, last = np.searchsorted(target_rows, (rows[0], rows[-1] + 1))
            line = torch.from_numpy(np.searchsorted(rows, target_rows[first:last])).to(device)
            self._targets[where[first:last]] = logprobs[line, torch.from_numpy(ids[first:last]).to(device)].cpu().numpy()
        if self.alt_ids is not None:
            self._draw(rows, logits, logprobs)

    def _draw(self, rows: np.ndarray, logits: torch.Tensor, logprobs: torch.Tensor) -> None:
        checked, k = self._checked, self.alt_ids.shape[1]
        if checked.temperature == 0:
            ids = logits.argmax(-1, keepdim=True).expand(-1, k)
        else:
            noise = uniform(np.uint64(checked.seed), _ALT_SAMPLE + np.arange(k)[None, :], rows[:, None])
            ids = draw(torch.softmax(logits / checked.temperature, -1), torch.from_numpy(noise).to(logits.device))
        self.alt_ids[rows] = ids.cpu().numpy()
        self.alt_logprobs[rows] = logprobs.gather(1, ids).cpu().numpy()

    def fields(self) -> dict[str, Any]:
        """The finished answer as fields of SampleOutput."""
        targets = None
        if self._targets is not None:
            asked = self._checked.request.target_prompt_logprobs
            shape = tuple(np.shape(asked.data) if asked.shape is None else asked.shape)
            dense = asked.crow_indices is None
            targets = TensorData(self._targets.reshape(shape) if dense else self._targets, shape, asked.crow_indices, asked.col_indices)
        return {
            "prompt_logprobs": self.logprobs,
            "topk_prompt_token_ids": self.topk_ids,
            "topk_prompt_logprobs": self.topk_logprobs,
            "target_prompt_logprobs": targets,
            "prompt_alt_token_ids": self.alt_ids,
            "prompt_alt_logprobs": self.alt_logprobs,
        }
