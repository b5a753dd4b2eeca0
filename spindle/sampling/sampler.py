"""Continuous batching: one forward pass per step for the next token of every running sample and for runs of new prompts beside them.

The sampler has no thread: ``submit`` may be called from anywhere, ``step`` from one thread. Samples of many adapters and of the base model
share a pass. What a sample gets never depends on the others: noise is a function of its own seed and position.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch

from spindle.compute.attention import Packing
from spindle.errors import EngineClosed, ServerError, SpindleError
from spindle.sampling.choose import choose
from spindle.sampling.jobs import Batch, Job, Live, Waiting
from spindle.sampling.kv import Bank, DecodeRows, PromptKV, StepCache, capacity_for
from spindle.sampling.noise import keys as noise_keys
from spindle.sampling.prefix import BLOCK, PrefixStore, common_prefix
from spindle.sampling.prompt_scores import PromptScores
from spindle.sampling.record import SampleRecords
from spindle.sampling.request import SampleRequest, validate
from spindle.sampling.slots import Slots
from spindle.sampling.stops import StopMatcher, Tokenizer
from spindle.types import SampledSequence

logger = logging.getLogger("spindle")

_SAMPLES_PER_JOB = 64
_LOOK_AHEAD = 64  # jobs put off in one step, because a prompt they share is on its way, before the rest is left for later
_MIN_KEPT_COMPLETION = 16  # sampled tokens from which a finished sample is worth keeping as a prefix


class Sampler:
    """model: compute.model.BaseModel. tokenizer: only for stop strings.

    prefill_tokens: new prompt tokens per step. max_running: samples decoded at once. kv_bytes: bound of keys and values of what runs (one
    request runs whatever its size). prefix_bytes: of prompts kept for reuse, 0 = none. records: where sampled logprobs are kept on request.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer | None = None,
        *,
        prefill_tokens: int = 2048,
        max_running: int = 256,
        kv_bytes: int = 4 << 30,
        prefix_bytes: int = 1 << 30,
        records: SampleRecords | None = None,
        logits_floats: int = 1 << 25,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.records = SampleRecords() if records is None else records
        self._prefill_tokens, self._max_running, self._kv_bytes = prefill_tokens, max_running, kv_bytes
        self._head_rows = max(1, logits_floats // model.vocab_size)  # rows of logits that exist at once
        self._prefixes = PrefixStore(prefix_bytes)
        self._inbox: deque[Live] = deque()
        self._cancelled: deque[int] = deque()
        self._numbers = itertools.count()
        self._waiting = Waiting()
        self._prefilling: list[Job] = []
        self._live: dict[int, Live] = {}
        self._slots = Slots()
        self._banks: dict[int, Bank] = {}
        self._order: list[tuple[Any, np.ndarray]] | None = None  # (snapshot, its running slots); None = stale
        self._closed = False
        self._counts = dict.fromkeys(("steps", "sampled_tokens", "prefilled_tokens", "prefix_hit_tokens", "prompt_tokens", "preempted"), 0)

    # From any thread.

    def submit(self, request: SampleRequest, future: Future | None = None) -> Future:
        """Queue a request. The future (``future`` if given) gets a SampleOutput. Raises UserError at once for what can never run.

        Cancelling the future stops the request at the next step.
        """
        if self._closed:
            raise EngineClosed("the sampler is closed")
        checked = validate(request, self.model, self.tokenizer is not None)
        future, number = Future() if future is None else future, next(self._numbers)
        cancelled = self._cancelled
        future.add_done_callback(lambda done: cancelled.append(number) if done.cancelled() else None)
        live = Live(number, checked, future, [None] * request.num_samples, request.num_samples)
        self._inbox.append(live)
        if self._closed:  # meanwhile: nobody may look into the inbox any more
            live.fail(EngineClosed("the sampler is closed"))
        return future

    def has_work(self) -> bool:
        return bool(self._inbox or self._live)

    def load(self) -> int:
        """Requests that are not answered yet."""
        return len(self._inbox) + len(self._live)

    def stats(self) -> dict[str, int]:
        """Counts since the start, and what is held now."""
        return self._counts | {
            "waiting": len(self._inbox) + len(self._waiting),
            "running": len(self._slots),
            "kv_bytes": self._kv_nbytes(),
            "prefix_bytes": self._prefixes.nbytes,
            "recorded_bytes": self.records.nbytes,
        }

    # From the thread that steps.

    @torch.no_grad()
    def step(self) -> int:
        """One forward pass; returns how many rows it had, 0 when there was nothing to do. A failure fails the requests it held."""
        try:
            self._receive()
            self._admit()
            self._make_room()
            return self._run(self._batch())
        except Exception as error:  # whatever it was, those who wait must hear of it
            if not isinstance(error, SpindleError):
                logger.exception("a sampling step failed")
                error = ServerError(f"sampling failed: {type(error).__name__}: {error}")
            self._fail_started(error)
            self._prefixes.shrink(0)  # it may have been for want of memory
            return 0

    def forget(self, snapshot: Any) -> None:
        """Drop kept prompts of a snapshot that will not be asked for again."""
        self._prefixes.forget(snapshot)

    def close(self) -> None:
        """Fail everything queued and running."""
        self._closed = True
        self._receive()
        error = EngineClosed("the engine was closed before the sample was finished")
        self._fail_started(error)
        for live in self._live.values():
            live.fail(error)
        self._live, self._waiting = {}, Waiting()
        self._prefixes.shrink(0)

    def _fail_started(self, error: SpindleError) -> None:
        started = {owner.number for owner in self._slots.owner if owner is not None} | {job.live.number for job in self._prefilling}
        started |= self._live.keys() - self._waiting.numbers()  # on their way from one place to the other
        self._waiting.drop(started)
        self._prefilling, self._slots, self._banks, self._order = [], Slots(), {}, None
        for number in started & self._live.keys():
            self._live.pop(number).fail(error)

    # Queue.

    def _receive(self) -> None:
        while self._inbox:
            live = self._inbox.popleft()
            self._live[live.number] = live
            samples = np.arange(live.remaining)
            for first in range(0, live.remaining, _SAMPLES_PER_JOB):
                scored = first == 0 and live.checked.asks_of_prompt
                self._waiting.add(Job(live, live.checked.prompt, samples[first : first + _SAMPLES_PER_JOB], scored=scored))
        cancelled = set()
        while self._cancelled:
            cancelled.add(self._cancelled.popleft())
        if cancelled := cancelled & self._live.keys():
            self._waiting.drop(cancelled)
            self._prefilling = [job for job in self._prefilling if job.live.number not in cancelled]
            for slot, owner in enumerate(self._slots.owner):
                if owner is not None and owner.number in cancelled:
                    self._release(slot)
            for number in cancelled:
                del self._live[number]

    def _admit(self) -> None:
        budget = self._prefill_tokens - sum(len(job.tokens) - job.kv.filled for job in self._prefilling)
        held = self._kv_nbytes() + sum(self._cost(job) for job in self._prefilling)
        busy = np.count_nonzero(self._slots.capacity) + sum(len(job.samples) for job in self._prefilling)
        later: list[Job] = []
        while len(self._waiting) and budget > 0 and len(later) < _LOOK_AHEAD:
            job = self._waiting.take()
            cost = self._cost(job)
            if busy and (busy + len(job.samples) > self._max_running or held + cost > self._kv_bytes):
                later.append(job)
                break
            limit = len(job.tokens) - 1
            if job.scored:
                limit = min(limit, job.live.checked.first_scored)
            kv, shared = self._prefixes.find(job.live.snapshot, job.tokens, limit)
            if self._will_share(job, limit, shared + BLOCK):
                later.append(job)  # another prompt with the same beginning is on its way: take that over instead
                continue
            self._prefilling.append(job)
            job.kv = PromptKV(len(job.tokens), kv, shared)
            if job.scored:
                job.live.scores = PromptScores(job.live.checked)
            if job.slots is None and 0 in job.samples:
                job.live.hit_tokens = shared
                self._counts["prefix_hit_tokens"] += shared
                self._counts["prompt_tokens"] += len(job.tokens)
            budget -= len(job.tokens) - shared
            held += cost
            busy += len(job.samples)
        self._waiting.put_back(later)

    def _will_share(self, job: Job, limit: int, least: int) -> bool:
        if limit < least:
            return False
        kept = self._prefixes.max_bytes // self._token_nbytes()  # a longer prompt will not be there to take over
        others = (other for other in self._prefilling if other.live.snapshot is job.live.snapshot and len(other.tokens) <= kept)
        return any(min(common_prefix(other.tokens, job.tokens), limit) >= least for other in others)

    def _cost(self, job: Job) -> int:
        """Bytes of keys and values until its samples run."""
        return self._token_nbytes() * (len(job.tokens) + len(job.samples) * capacity_for(len(job.tokens) + 1))

    def _token_nbytes(self) -> int:
        """Keys and values of one token."""
        c = self.model.config
        heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
        width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        return 2 * c.num_hidden_layers * heads * width * self.model.dtype.itemsize

    def _kv_nbytes(self) -> int:
        """Of the running samples. Rows that a bank holds ahead are not counted."""
        return sum(bank.used_nbytes for bank in list(self._banks.values()))

    def _make_room(self) -> None:
        """Move samples that outgrew their bank; past the bound, put the youngest back in the queue (they go on where they were)."""
        slots = self._slots
        running = np.flatnonzero(slots.capacity)
        for slot in running[slots.position[running] >= slots.capacity[running]]:
            self._leave_bank(slot, partial(self._enter_bank, slots=np.array([slot]), tokens=int(slots.position[slot])))
        while self._kv_nbytes() > self._kv_bytes and len(running := np.flatnonzero(slots.capacity)) > 1:
            slot = running[np.argmax(slots.age[running])]
            self._leave_bank(slot)
            live, n = slots.owner[slot], slots.count[slot]
            tokens = np.concatenate([live.checked.prompt, slots.tokens[slot, :n].astype(np.int64)])
            slots.position[slot] = len(tokens) - 1
            self._waiting.put_back([Job(live, tokens, slots.sample[slot : slot + 1], np.array([slot]))])
            self._counts["preempted"] += 1

    # Banks.

    def _enter_bank(self, keys: list[torch.Tensor], values: list[torch.Tensor], slots: np.ndarray, tokens: int) -> None:
        capacity = capacity_for(tokens + 1)
        bank = self._banks.setdefault(capacity, Bank(capacity))
        self._slots.row[slots] = bank.add(slots, keys, values, tokens)
        self._slots.capacity[slots] = capacity
        self._order = None

    def _leave_bank(self, slot: int, keep: Callable[[list[torch.Tensor], list[torch.Tensor]], None] | None = None) -> None:
        """keep: gets the row's keys and values, as views, before they go."""
        slots = self._slots
        bank, row = self._banks[slots.capacity[slot]], int(slots.row[slot])
        slots.capacity[slot] = 0
        if keep is not None:
            keep(*bank.row(row))
        moved = bank.remove(row)
        if moved >= 0:
            slots.row[moved] = row
        if bank.count == 0:
            del self._banks[bank.capacity]
        self._order = None

    def _release(self, slot: int) -> None:
        if self._slots.capacity[slot]:
            self._leave_bank(slot)
        self._slots.give(slot)

    # One pass.

    def _running(self) -> list[tuple[Any, np.ndarray]]:
        if self._order is None:
            groups: dict[int, tuple[Any, list[int]]] = {}
            for slot in np.flatnonzero(self._slots.capacity):
                snapshot = self._slots.owner[slot].snapshot
                groups.setdefault(id(snapshot), (snapshot, []))[1].append(int(slot))
            self._order = [(snapshot, np.array(members, np.int64)) for snapshot, members in groups.values()]
        return self._order

    def _batch(self) -> Batch:
        slots, budget = self._slots, self._prefill_tokens
        jobs: dict[int, list[tuple[Job, int]]] = {}
        for job in self._prefilling:
            take = min(budget, len(job.tokens) - job.kv.filled)
            if take:
                jobs.setdefault(id(job.live.snapshot), []).append((job, take))
                budget -= take
        parts = [(snapshot, members, jobs.pop(id(snapshot), [])) for snapshot, members in self._running()]
        parts += [(some[0][0].live.snapshot, np.zeros(0, np.int64), some) for some in jobs.values()]
        batch, row = Batch(), 0
        for snapshot, members, runs in parts:
            start = row
            if len(members):
                batch.tokens.append(slots.token[members])
                batch.positions.append(slots.position[members])
                batch.lengths += [1] * len(members)
                batch.decode.append(members)
                batch.decode_rows.append(np.arange(row, row + len(members)))
                row += len(members)
            for job, take in runs:
                filled = job.kv.filled
                batch.tokens.append(job.tokens[filled : filled + take])
                batch.positions.append(np.arange(filled, filled + take))
                batch.lengths.append(take)
                batch.jobs.append((job, row, row + take))
                row += take
            batch.groups.append((start, row, snapshot))
        return batch

    def _run(self, batch: Batch) -> int:
        if not batch.lengths:
            return 0
        device, slots = self.model.device, self._slots
        total = sum(batch.lengths)
        decode = np.concatenate(batch.decode) if batch.decode else np.zeros(0, np.int64)
        decode_rows = np.concatenate(batch.decode_rows) if batch.decode else np.zeros(0, np.int64)
        row_of = np.zeros(len(slots.owner), np.int64)
        row_of[decode] = decode_rows
        banks = [
            DecodeRows.of(bank, row_of[at := bank.slots[: bank.count]], slots.position[at], total)
            for bank in self._banks.values()
            if bank.count
        ]
        tokens = torch.from_numpy(np.concatenate(batch.tokens)).to(device)
        positions = torch.from_numpy(np.concatenate(batch.positions)).to(device)
        cache = StepCache(banks, [(job.kv, start, stop) for job, start, stop in batch.jobs])
        hidden = self.model.hidden(tokens, positions, Packing(batch.lengths, cache), batch.groups)
        self._counts["steps"] += 1
        self._counts["prefilled_tokens"] += total - len(decode)

        started: list[tuple[Job, np.ndarray]] = []
        pick_slots, pick_rows = [decode], [decode_rows]
        for job, start, stop in batch.jobs:
            if job.scored and job.live.scores is not None:
                self._score(job.live.scores, job.kv.filled, start, stop, hidden, batch.groups)
            job.kv.filled += stop - start
            if job.kv.filled == len(job.tokens):
                new = self._start(job)
                started.append((job, new))
                pick_slots.append(new)
                pick_rows.append(np.full(len(new), stop - 1))
        slots_of, rows_of = np.concatenate(pick_slots), np.concatenate(pick_rows)
        order = np.argsort(rows_of, kind="stable")
        alive = self._pick(slots_of[order], rows_of[order], hidden, batch.groups)
        for job, new in started:
            new = new[alive[new]]
            if len(new):
                self._enter_bank(job.kv.keys, job.kv.values, new, len(job.tokens))
            self._prefixes.put(job.live.snapshot, job.tokens, job.kv)
        return total

    def _start(self, job: Job) -> np.ndarray:
        """The slots of a job whose prompt is whole."""
        self._prefilling.remove(job)
        if job.slots is not None:
            return job.slots
        checked = job.live.checked
        if checked.max_tokens == 0:
            k = checked.request.topk_sample_logprobs
            rows = (np.zeros((0, k), np.int32), np.zeros((0, k), np.float32)) if k else (None, None)
            for sample in job.samples:
                self._answer(job.live, int(sample), SampledSequence("length", np.zeros(0, np.int32), np.zeros(0, np.float32), *rows))
            return np.zeros(0, np.int64)
        slots = self._slots.take(job.live, checked, job.samples)
        if checked.stop_strings and self.tokenizer is not None:
            for slot in slots:
                self._slots.matcher[slot] = StopMatcher(self.tokenizer, checked.stop_strings, checked.prompt)
        return slots

    def _logits(self, rows: np.ndarray, hidden: torch.Tensor, groups: list[tuple[int, int, Any]]) -> torch.Tensor:
        """rows: ascending -> [rows, V] float32."""
        borders = [np.searchsorted(rows, (start, stop)) for start, stop, _ in groups]
        mine = [(int(a), int(b), weights) for (a, b), (_, _, weights) in zip(borders, groups, strict=True) if b > a]
        if len(rows) != len(hidden):
            hidden = hidden[torch.from_numpy(rows).to(hidden.device)]
        return self.model.logits(hidden, mine)

    def _score(
        self, scores: PromptScores, filled: int, start: int, stop: int, hidden: torch.Tensor, groups: list[tuple[int, int, Any]]
    ) -> None:
        """Rows [start, stop) of the pass follow the first ``filled`` tokens of a prompt."""
        rows = scores.rows(filled, filled + stop - start)
        for first in range(0, len(rows), self._head_rows):
            some = rows[first : first + self._head_rows]
            scores.add(some, self._logits(some - filled + start, hidden, groups))

    def _pick(self, slots_of: np.ndarray, rows_of: np.ndarray, hidden: torch.Tensor, groups: list[tuple[int, int, Any]]) -> np.ndarray:
        """Choose the next token of every slot, from rows of the pass in ascending order. Returns [slots] bool: goes on."""
        slots, alive = self._slots, np.zeros(len(self._slots.owner), bool)
        for first in range(0, len(slots_of), self._head_rows):
            s, rows = slots_of[first : first + self._head_rows], rows_of[first : first + self._head_rows]
            alone, repeat = np.unique(rows, return_inverse=True)
            logits = self._logits(alone, hidden, groups)
            device = logits.device
            if len(alone) != len(rows):
                logits = logits[torch.from_numpy(repeat).to(device)]
            noise = noise_keys(slots.seed[s], slots.sample[s], slots.count[s]).view(np.int64)
            columns = (slots.temperature[s], slots.top_k[s], slots.top_p[s], noise)
            temperature, top_k, top_p, key = (torch.from_numpy(x).to(device) for x in columns)
            width = int(slots.topk[s].max())
            tokens, logprobs, top_ids, top_logprobs = choose(logits, temperature, top_k, top_p, key, width)
            if width:
                ids, values = top_ids.to(torch.int32).cpu().numpy(), top_logprobs.cpu().numpy()
                for line in np.flatnonzero(slots.topk[s]):
                    own = slots.topk[s[line]]
                    slots.topk_rows[s[line]].append((ids[line, :own], values[line, :own]))
            self._take(s, tokens.cpu().numpy(), logprobs.cpu().numpy(), alive)
        self._counts["sampled_tokens"] += len(slots_of)
        return alive

    def _take(self, s: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, alive: np.ndarray) -> None:
        slots = self._slots
        stopped = slots.push(s, tokens, logprobs)
        for i in np.flatnonzero(~slots.plain[s] & ~stopped):
            matcher = slots.matcher[s[i]]
            stopped[i] = matcher is not None and matcher.push(int(tokens[i]))
        done = stopped | (slots.count[s] >= slots.limit[s])
        alive[s] = ~done
        for i in np.flatnonzero(done):
            self._finish(int(s[i]), "stop" if stopped[i] else "length")

    # Answers.

    def _finish(self, slot: int, reason: str) -> None:
        slots = self._slots
        live, n, sample = slots.owner[slot], int(slots.count[slot]), int(slots.sample[slot])
        tokens, logprobs = slots.tokens[slot, :n].copy(), slots.logprobs[slot, :n].copy()
        topk = tuple(np.stack(rows) for rows in zip(*slots.topk_rows[slot], strict=True)) or (None, None)
        if slots.capacity[slot] and n > _MIN_KEPT_COMPLETION and len(live.results) == 1:  # of many samples, few have a next turn
            fed = np.concatenate([live.checked.prompt, tokens[:-1].astype(np.int64)])
            self._leave_bank(slot, partial(self._keep, live.snapshot, fed))
        self._release(slot)
        request = live.checked.request
        if request.record_stability_info and request.sequence_ids is not None:
            self.records.add(request.sequence_ids[sample], tokens, logprobs, request.session)
        self._answer(live, sample, SampledSequence(reason, tokens, logprobs, *topk))

    def _keep(self, snapshot: Any, tokens: np.ndarray, keys: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        """Keep a finished sample as a prefix: the next turn of a conversation begins with it."""
        kv = PromptKV(len(tokens))
        kv.keys, kv.values = ([t[:, : len(tokens)].clone() for t in some] for some in (keys, values))
        kv.filled = len(tokens)
        self._prefixes.put(snapshot, tokens, kv)

    def _answer(self, live: Live, sample: int, sequence: SampledSequence) -> None:
        live.results[sample] = sequence
        live.remaining -= 1
        if live.remaining:
            return
        del self._live[live.number]
        live.answer()
