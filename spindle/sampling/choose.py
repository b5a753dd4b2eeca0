"""From logits to tokens, for all rows of a batch at once; no row's token depends on another row."""

from __future__ import annotations

import torch

from spindle.sampling.noise import gumbel

_FIRST_TRY = 1024  # candidates sorted for top-p before the whole vocabulary is
_CACHE_FLOATS = 1 << 18  # on a CPU, rows are handled in blocks that stay in its cache


def choose(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, key: torch.Tensor, topk: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pick one token per row.

    logits: [n, V] float32 (overwritten). temperature: [n] float32, 0 = greedy. top_k: [n] int64, <= 0 = off. top_p: [n] float64, 1 = off.
    key: [n] int64, the row's noise. top_p counts what top_k left. topk: how many of the likeliest tokens to return, too.
    Returns (tokens [n] int64, logprobs [n] float32, ids [n, topk] int64, their logprobs [n, topk] float32). Logprobs are at the row's
    temperature (greedy: 1), before top_k and top_p.

    A token is the argmax of logprob + Gumbel noise, which follows the softmax exactly. Unlike the inverse of a cumulative sum, where
    rounding of any logit may move every border, it changes only when two tokens tie to the last bits.
    """
    rows = len(logits) if logits.is_cuda else max(1, _CACHE_FLOATS // logits.shape[1])
    columns = (logits, temperature, top_k, top_p, key)
    parts = [_choose([x[first : first + rows] for x in columns], topk) for first in range(0, len(logits), rows)]
    tokens, logprobs, ids, values = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs), torch.cat(ids), torch.cat(values)


def _choose(columns: list[torch.Tensor], topk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    logits, temperature, top_k, top_p, key = columns
    greedy = temperature == 0
    drawn = not bool(greedy.all())
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    if drawn:
        logits /= torch.where(greedy, 1.0, temperature)[:, None]
    logprobs = torch.log_softmax(logits, -1)
    cut = ~greedy & ((top_k > 0) | (top_p < 1))
    for rows, noise in ((greedy, None), (~greedy & ~cut, key)):
        index = rows.nonzero()[:, 0]
        if len(index) == 0:
            continue
        source = logits if noise is None else logprobs
        some = source if len(index) == len(source) else source[index]
        if noise is not None:
            some = gumbel(noise[index], torch.arange(logits.shape[1], device=logits.device)).add_(some)
        tokens[index] = some.argmax(-1)
    if len(index := cut.nonzero()[:, 0]):
        values, ids = _candidates(logprobs[index], top_k[index], top_p[index])
        best = gumbel(key[index], ids).add_(values).argmax(-1, keepdim=True)
        tokens[index] = ids.gather(1, best)[:, 0]
    top_values, top_ids = logprobs.topk(topk, -1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0], top_ids, top_values


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
