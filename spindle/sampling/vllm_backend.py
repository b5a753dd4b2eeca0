"""vLLM in the sampler's place, for hosts where it is installed: the same interface, adapters handed over as PEFT directories.

vLLM keeps its own copy of the base model. It has no way to say some of what the Tinker API asks: those requests are refused, not
approximated (``target_prompt_logprobs``, ``prompt_alt_tokens_k``; and logprobs from before top-k and top-p, so both must be off).
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spindle.errors import EngineClosed, ServerError, SpindleError, UserError
from spindle.sampling.jobs import settle
from spindle.sampling.prompt_scores import MASK_LOGPROB
from spindle.sampling.record import SampleRecords
from spindle.sampling.request import Checked, SampleRequest, validate
from spindle.store.checkpoint import save_adapter
from spindle.types import SampledSequence, SampleOutput

logger = logging.getLogger("spindle")


def import_vllm() -> Any:
    """The vllm package. Raises UserError that says how to get it, or how to do without."""
    try:
        import vllm
        import vllm.lora.request
    except ImportError as error:
        raise UserError(
            f"the vllm sampler needs the package vllm, which could not be imported ({error}); install it with `pip install vllm` on a "
            "host with a GPU, or leave the option out to sample with Spindle's own sampler"
        ) from error
    return vllm


@dataclass(slots=True, eq=False)
class _Live:
    checked: Checked
    future: Future


class VllmSampler:
    """model: the BaseModel that requests are checked against. source: what vLLM loads, a transformers directory or hub name.

    max_rank: the largest adapter rank that will come. engine_args: further arguments of ``vllm.EngineArgs``.
    Raises UserError when vllm is not installed.
    """

    def __init__(
        self, model: Any, tokenizer: Any, source: str, *, records: SampleRecords | None = None, max_rank: int = 128, **engine_args: Any
    ) -> None:
        self._vllm = import_vllm()
        self.model, self.tokenizer = model, tokenizer
        self.records = SampleRecords() if records is None else records
        settings = {"enable_lora": True, "max_lora_rank": max_rank, "enable_prefix_caching": True, "max_logprobs": -1}
        settings |= {"logprobs_mode": "processed_logprobs"} | engine_args  # processed: after the temperature
        self._engine = self._vllm.LLMEngine.from_engine_args(self._vllm.EngineArgs(model=source, **settings))
        self._directory = Path(tempfile.mkdtemp(prefix="spindle-vllm-"))
        self._adapters: dict[int, tuple[Any, Any]] = {}  # id of the snapshot -> (snapshot, LoRARequest)
        self._inbox: deque[_Live] = deque()
        self._live: dict[str, _Live] = {}
        self._count = self._adapter_count = 0
        self._closed = False
        self._counts = dict.fromkeys(("steps", "sampled_tokens", "prefix_hit_tokens", "prompt_tokens"), 0)

    def submit(self, request: SampleRequest, future: Future | None = None) -> Future:
        """As ``Sampler.submit``; also raises UserError for what vLLM cannot answer."""
        if self._closed:
            raise EngineClosed("the sampler is closed")
        checked = validate(request, self.model, self.tokenizer is not None)
        refused = {"target_prompt_logprobs": request.target_prompt_logprobs, "prompt_alt_tokens_k": request.prompt_alt_tokens_k}
        for name, value in refused.items():
            if value is not None and not (isinstance(value, int) and value == 0):
                raise UserError(f"{name} is not supported by the vllm sampler; leave it out, or serve with Spindle's own sampler")
        if checked.temperature > 0 and (checked.top_k > 0 or checked.top_p < 1):
            raise UserError(
                f"sampling_params.top_k is {checked.top_k} and top_p is {checked.top_p}: the vllm sampler cannot return logprobs from "
                "before them; allowed: -1 and 1 (off), or temperature 0"
            )
        live = _Live(checked, Future() if future is None else future)
        self._inbox.append(live)
        return live.future

    def has_work(self) -> bool:
        return self.load() > 0

    def load(self) -> int:
        """Requests that are not answered yet."""
        return len(self._inbox) + len(self._live)

    def stats(self) -> dict[str, int]:
        return self._counts | {"waiting": len(self._inbox), "running": len(self._live), "recorded_bytes": self.records.nbytes}

    def step(self) -> int:
        """One step of vLLM's engine; returns how many requests are in it."""
        try:
            self._receive()
            if not self._live:
                return 0
            outputs = self._engine.step()
            self._counts["steps"] += 1
            for output in outputs:
                if output.finished and (live := self._live.pop(output.request_id, None)) is not None:
                    settle(live.future.set_result, self._answer(live.checked, output))
            return len(self._live)
        except Exception as error:  # whatever it was, those who wait must hear of it
            if not isinstance(error, SpindleError):
                logger.exception("a sampling step failed")
                error = ServerError(f"sampling failed in vllm: {type(error).__name__}: {error}")
            self._fail(error)
            return 0

    def forget(self, snapshot: Any) -> None:
        """Take an adapter out of vLLM and off the disk."""
        entry = self._adapters.pop(id(snapshot), None)
        if entry is not None:
            self._engine.remove_lora(entry[1].lora_int_id)
            shutil.rmtree(entry[1].lora_path, ignore_errors=True)

    def close(self) -> None:
        """Fail everything queued and running."""
        self._closed = True
        self._fail(EngineClosed("the engine was closed before the sample was finished"))
        shutil.rmtree(self._directory, ignore_errors=True)

    def _fail(self, error: SpindleError) -> None:
        if self._live:
            self._engine.abort_request(list(self._live))
        for live in [*self._inbox, *self._live.values()]:
            settle(live.future.set_exception, error)
        self._inbox.clear()
        self._live.clear()

    def _receive(self) -> None:
        cancelled = [key for key, live in self._live.items() if live.future.cancelled()]
        if cancelled:
            self._engine.abort_request(cancelled)
            for key in cancelled:
                del self._live[key]
        while self._inbox:
            live = self._inbox.popleft()
            if live.future.cancelled():
                continue
            self._count += 1
            key, checked = f"spindle-{self._count}", live.checked
            self._live[key] = live
            prompt = self._vllm.TokensPrompt(prompt_token_ids=checked.prompt.tolist())
            self._engine.add_request(key, prompt, self._params(checked), lora_request=self._adapter(checked.request.snapshot))

    def _params(self, checked: Checked) -> Any:
        request = checked.request
        asked = request.prompt_logprobs or request.topk_prompt_logprobs
        return self._vllm.SamplingParams(
            n=request.num_samples,
            temperature=checked.temperature,
            seed=checked.seed & 0x7FFFFFFFFFFFFFFF,
            max_tokens=max(1, checked.max_tokens),
            ignore_eos=True,  # the end tokens are among stop_token_ids when they are to stop
            stop_token_ids=checked.stop_ids.tolist(),
            stop=list(checked.stop_strings),
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            detokenize=bool(checked.stop_strings),
            logprobs=request.topk_sample_logprobs,
            prompt_logprobs=request.topk_prompt_logprobs if asked else None,
        )

    def _adapter(self, snapshot: Any) -> Any:
        if snapshot is None:
            return None
        if id(snapshot) not in self._adapters:
            self._adapter_count += 1
            path = self._directory / str(self._adapter_count)
            save_adapter(path, snapshot.layout, snapshot.params.float().cpu(), self.model.name)
            lora = self._vllm.lora.request.LoRARequest(lora_name=path.name, lora_int_id=self._adapter_count, lora_path=str(path))
            self._adapters[id(snapshot)] = (snapshot, lora)
        return self._adapters[id(snapshot)][1]

    def _answer(self, checked: Checked, output: Any) -> SampleOutput:
        request = checked.request
        sequences = []
        for completion in sorted(output.outputs, key=lambda one: one.index):
            keep = None if checked.max_tokens else 0
            tokens = np.array(completion.token_ids, np.int32)[:keep]
            rows = completion.logprobs[:keep]
            logprobs = np.array([row[int(token)].logprob for row, token in zip(rows, tokens, strict=True)], np.float32)
            topk = _top(rows, request.topk_sample_logprobs) if request.topk_sample_logprobs else (None, None)
            reason = "stop" if completion.finish_reason == "stop" and checked.max_tokens else "length"
            if request.record_stability_info and request.sequence_ids is not None:
                self.records.add(request.sequence_ids[completion.index], tokens, logprobs, request.session)
            sequences.append(SampledSequence(reason, tokens, logprobs, *topk))
            self._counts["sampled_tokens"] += len(tokens)
        hits = int(getattr(output, "num_cached_tokens", None) or 0)
        self._counts["prefix_hit_tokens"] += hits
        self._counts["prompt_tokens"] += len(checked.prompt)
        return SampleOutput(sequences, prompt_cache_hit_tokens=hits, **_prompt_scores(checked, output.prompt_logprobs))


def _top(rows: list[Any], k: int) -> tuple[np.ndarray, np.ndarray]:
    """vLLM's rows (token id -> .logprob, .rank; None: not scored) -> ids [n, k] int32, logprobs [n, k] float32."""
    ids, logprobs = np.zeros((len(rows), k), np.int32), np.full((len(rows), k), MASK_LOGPROB, np.float32)
    for i, row in enumerate(rows):
        best = sorted((entry.rank, token, entry.logprob) for token, entry in (row or {}).items() if entry.rank <= k)
        for j, (_, token, logprob) in enumerate(best[:k]):
            ids[i, j], logprobs[i, j] = token, logprob
    return ids, logprobs


def _prompt_scores(checked: Checked, rows: list[Any] | None) -> dict[str, Any]:
    request, n = checked.request, len(checked.prompt)
    fields: dict[str, Any] = {}
    if rows is None:
        return fields
    rows = [row if i >= max(1, n - checked.last_n) else None for i, row in enumerate(rows)]
    if request.prompt_logprobs:
        scored = (np.nan if row is None else row[int(token)].logprob for row, token in zip(rows, checked.prompt, strict=True))
        fields["prompt_logprobs"] = np.fromiter(scored, np.float32, n)
    if request.topk_prompt_logprobs:
        fields["topk_prompt_token_ids"], fields["topk_prompt_logprobs"] = _top(rows, request.topk_prompt_logprobs)
    return fields
