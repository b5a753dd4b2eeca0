"""What our own sampler recorded for the tokens that a training request names by provenance spans."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from spindle.codec import ScannedRequest
from spindle.errors import InvalidRequest, NotFound
from spindle.sampling import SampleRecords

__all__ = ["recorded_logprobs"]


def recorded_logprobs(request: ScannedRequest, records: SampleRecords, session: str | None) -> np.ndarray:
    """[cells] float32: the sampler's logprob of each target token that a ``sampled_tokens`` span covers, NaN elsewhere.

    The ``loss_fn_input_spans`` of a datum tile its target_tokens [N]. Raises InvalidRequest naming datum and span.
    """
    starts = request.cell_starts.tolist()
    logprobs = np.full(starts[-1], np.nan, dtype=np.float32)
    for datum, (start, stop) in enumerate(pairwise(starts)):

        def fail(text: str, datum: int = datum) -> InvalidRequest:
            return InvalidRequest(f"datum {datum}: loss_fn_input_spans: {text}", request.model_id, request.seq_id)

        if request.target_widths[datum] != 0:
            raise fail(f"target_tokens has shape [N, {request.target_widths[datum]}]; spans go with [N]")
        _, spans = request.spans(datum)
        covered = sum(length for _, _, _, length in spans)
        if covered != stop - start:
            raise fail(f"they cover {covered} positions, but target_tokens has {stop - start}; they must tile it")
        at = start
        for kind, sequence_id, offset, length in spans:
            if kind == "sampled_tokens":
                try:
                    record = records.get(sequence_id, session)
                except NotFound as error:
                    raise fail(str(error)) from None
                if offset < 0 or offset + length > len(record.logprobs):
                    end = offset + length
                    raise fail(f"[{offset}, {end}) of sequence {sequence_id!r}, which has {len(record.logprobs)} sampled tokens")
                logprobs[at : at + length] = record.logprobs[offset : offset + length]
            at += length
    return logprobs
