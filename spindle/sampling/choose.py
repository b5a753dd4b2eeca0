"""From logits to tokens, for all rows of a batch at once; no row's token depends on another row."""

from __future__ import annotations

import torch

from spindle.sampling.noise import gumbel

_FIRST_TRY = 1024  # candidates sorted for top-p before the whole vocabulary is


def choose(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pick one token per row.

    logits: [n, V] float32 (overwritten). temperature: [n] float32, 0 = greedy. top_k: [n] int64, <= 0 = off. top_p: [n] float64, 1 = off.
    key: [n] int64, the row's noise. top_p counts what top_k left.
    Returns (tokens [n] int64, logprobs [n] float32, log-softmax [n, V] float32). The last two are at the row's temperature (greedy: 1),
    before top_k and top_p.

    A token is the argmax of logprob + Gumbel noise, which follows the softmax exactly. Unlike the inverse of a cumulative sum, where
    rounding of any logit may move every border, it changes only when two tokens tie to the last bits.
    """
    greedy = temperature == 0
    tokens = logits.argmax(-1) if bool(greedy.any()) else torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    logits /= torch.where(greedy, 1.0, temperature)[:, None]
    logprobs = torch.log_softmax(logits, -1)
    cut = ~greedy & ((top_k > 0) | (top_p < 1))
    if len(rows := (~greedy & ~cut).nonzero()[:, 0]):
        some = logprobs if len(rows) == len(logprobs) else logprobs[rows]
        noise = gumbel(key[rows], torch.arange(logits.shape[1], device=logits.device))
        tokens[rows] = noise.add_(some).argmax(-1)
    if len(rows := cut.nonzero()[:, 0]):
        values, ids = _candidates(logprobs[rows], top_k[rows], top_p[rows])
        best = gumbel(key[rows], ids).add_(values).argmax(-1, keepdim=True)
        tokens[rows] = ids.gather(1, best)[:, 0]
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0], logprobs


def _candidates(logprobs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logprobs [n, V] -> (values [n, w], -inf for what the row may not draw; their token ids [n, w])."""
    vocab = logprobs.shape[1]
    by_k = top_k > 0
    width = min(vocab, max(_FIRST_TRY if bool((~by_k).any()) else 1, int(top_k.max())))
    values, ids = logprobs.topk(width, -1)  # sorted, largest first
    probs = values.exp().double()
    if width < vocab and bool((~by_k & (probs.sum(-1) < top_p)).any()):
        values, ids = logprobs.sort(-1, descending=True)
        probs = values.exp().double()
    rank = torch.arange(probs.shape[1], device=probs.device)
    kept = ~by_k[:, None] | (rank < top_k[:, None])
    probs = probs * kept
    total = torch.where(by_k, probs.sum(-1), 1.0)
    before = probs.cumsum(-1) - probs
    kept &= (before < (top_p * total)[:, None]) | (top_p == 1)[:, None]  # the smallest set that reaches top_p; never empty
    return values.masked_fill(~kept, float("-inf")), ids


def draw(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Many draws per row by the inverse of the cumulative sum: probs [n, V], uniform [n, k] float64 in [0, 1) -> [n, k] int64.

    Cheaper than noise for every token and draw; a draw that falls on a border may change with the rounding of the logits.
    """
    cdf = probs.cumsum(-1, dtype=torch.float64)
    # A token of probability 0 never is the first whose cdf exceeds the draw; the draw stays under the total after rounding, too.
    wanted = torch.minimum(uniform * cdf[:, -1:], torch.nextafter(cdf[:, -1:], torch.zeros_like(cdf[:, -1:])))
    return torch.searchsorted(cdf, wanted.contiguous(), right=True)
