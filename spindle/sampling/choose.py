"""From logits to tokens, for all rows of a batch at once; no row's token depends on another row."""

from __future__ import annotations

import torch

_FIRST_TRY = 1024  # candidates sorted for top-p before the whole vocabulary is


def choose(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pick one token per row.

    logits: [n, V] float32 (overwritten). temperature: [n] float32, 0 = greedy. top_k: [n] int64, <= 0 = off. top_p: [n] float64, 1 = off.
    noise: [n] float64 in [0, 1). top_p counts what top_k left.
    Returns (tokens [n] int64, logprobs [n] float32, log-softmax [n, V] float32). The last two are at the row's temperature (greedy: 1),
    before top_k and top_p.
    """
    greedy = temperature == 0
    tokens = logits.argmax(-1) if bool(greedy.any()) else torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    logits /= torch.where(greedy, 1.0, temperature)[:, None]
    logprobs = torch.log_softmax(logits, -1)
    cut = ~greedy & ((top_k > 0) | (top_p < 1))
    for rows, pick in ((~greedy & ~cut, None), (cut, (top_k, top_p))):
        index = rows.nonzero()[:, 0]
        if len(index) == 0:
            continue
        some = logprobs if len(index) == len(logprobs) else logprobs[index]
        if pick is None:
            tokens[index] = draw(some.exp(), noise[index])
        else:
            tokens[index] = _draw_cut(some, top_k[index], top_p[index], noise[index])
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0], logprobs


def draw(probs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF draw: probs [n, V] of any positive total, noise [n] or [n, k] float64 in [0, 1) -> int64 of noise's shape."""
    cdf = probs.cumsum(-1, dtype=torch.float64)
    wanted = noise if noise.dim() == 2 else noise[:, None]
    # A token of probability 0 never is the first whose cdf exceeds the draw; the draw stays under the total after rounding, too.
    wanted = torch.minimum(wanted * cdf[:, -1:], torch.nextafter(cdf[:, -1:], torch.zeros_like(cdf[:, -1:])))
    return torch.searchsorted(cdf, wanted.contiguous(), right=True).reshape(noise.shape)


def _draw_cut(logprobs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    vocab = logprobs.shape[1]
    by_k = top_k > 0
    width = min(vocab, max(_FIRST_TRY if bool((~by_k).any()) else 1, int(top_k.max())))
    values, ids = logprobs.topk(width, -1)  # sorted, largest first
    probs = values.exp().double()
    if width < vocab and bool((~by_k & (probs.sum(-1) < top_p)).any()):
        values, ids = logprobs.sort(-1, descending=True)
        probs = values.exp().double()
    rank = torch.arange(probs.shape[1], device=probs.device)
    probs = probs * (~by_k[:, None] | (rank < top_k[:, None]))
    total = torch.where(by_k, probs.sum(-1), 1.0)
    before = probs.cumsum(-1) - probs
    probs = probs * (before < (top_p * total)[:, None])  # the smallest set that reaches top_p; the first is always in it
    return ids.gather(1, draw(probs, noise)[:, None])[:, 0]
