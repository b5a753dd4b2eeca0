from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

class Limits:
    """Every bound that ``scan`` enforces. Sizes in bytes unless said otherwise."""

    def __init__(
        self,
        *,
        max_body_bytes: int = 67108864,
        max_inflated_bytes: int = 536870912,
        max_datums: int = 4096,
        max_tokens: int = 8388608,
        max_sequence_length: int = 1048576,
        max_target_width: int = 256,
        max_cells: int = 67108864,
        max_name_length: int = 256,
        max_input_names: int = 64,
        max_config_entries: int = 64,
        max_spans: int = 65536,
        vocab_size: int = 0,
        zstd_window_log_max: int = 27,
    ) -> None: ...
    @property
    def max_body_bytes(self) -> int: ...
    @property
    def max_inflated_bytes(self) -> int: ...
    @property
    def max_datums(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def max_sequence_length(self) -> int: ...
    @property
    def max_target_width(self) -> int: ...
    @property
    def max_cells(self) -> int: ...
    @property
    def max_name_length(self) -> int: ...
    @property
    def max_input_names(self) -> int: ...
    @property
    def max_config_entries(self) -> int: ...
    @property
    def max_spans(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def zstd_window_log_max(self) -> int: ...

class ScannedRequest:
    """A checked request: lengths and names at hand, tensors as spans into its body until ``release``."""

    @property
    def model_id(self) -> str: ...
    @property
    def seq_id(self) -> int: ...
    @property
    def loss_fn(self) -> str: ...
    @property
    def loss_fn_config(self) -> dict[str, float | str]: ...
    @property
    def forward_only(self) -> bool: ...
    @property
    def num_datums(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Bytes held until ``release``."""
    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[D] tokens per datum."""
    @property
    def target_widths(self) -> npt.NDArray[np.int64]:
        """[D] -1 without target_tokens, 0 for [N], K for [N, K]."""
    @property
    def cells(self) -> npt.NDArray[np.int64]:
        """[D] cells of target_tokens: n for [N], n * K for [N, K], 0 without."""
    @property
    def cell_starts(self) -> npt.NDArray[np.int64]:
        """[D + 1] their running sum from 0."""
    @property
    def written_cells(self) -> npt.NDArray[np.int64]:
        """[D] cells of target_tokens that ``fill`` writes into zeroed memory; those listed, or those between zeros at either end."""
    @property
    def has_spans(self) -> npt.NDArray[np.bool_]: ...
    @property
    def fingerprint(self) -> bytes:
        """16 bytes that two requests of the same content share, whatever order their maps were written in."""
    @property
    def input_names(self) -> list[str]: ...
    @property
    def released(self) -> bool: ...
    def input_widths(self, name: str) -> npt.NDArray[np.int64]:
        """[D] -1 where absent, 0 for [N], K for [N, K], -2 for one number without a shape."""
    def input_faults(self, name: str) -> tuple[int, int, int]:
        """The first datum that lacks it, that has it in another shape than target_tokens, in an integer type; -1 where none does."""
    def spans(self, datum: int) -> tuple[list[tuple[str, str, int, int]], list[tuple[str, str, int, int]]]:
        """(of model_input, of loss_fn_inputs), each (``prompt_tokens`` or ``sampled_tokens``, sequence_id, offset, length)."""
    def release(self) -> None:
        """Give the memory back early. Tensors, names and spans are gone; the plain properties stay."""

def scan(body: Any, content_encoding: str | None, limits: Limits) -> ScannedRequest: ...
def scan_arrays(
    model_id: str,
    seq_id: int,
    datums: list[tuple],
    loss_fn: str,
    loss_fn_config: dict[str, float | str],
    forward_only: bool,
    limits: Limits,
) -> ScannedRequest:
    """datums: (tokens, inputs, spans); a span is (of loss_fn_inputs, sampled, sequence_id, offset, length)."""

def fill(
    request: ScannedRequest,
    datum_indices: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int32],
    targets: npt.NDArray[np.int64] | None,
    inputs: dict[str, tuple[npt.NDArray[np.float32], float | None]],
    zeroed: bool,
) -> None: ...
def clear(
    request: ScannedRequest,
    datum_indices: npt.NDArray[np.int64],
    targets: npt.NDArray[np.int64] | None,
    inputs: dict[str, tuple[npt.NDArray[np.float32], float | None]],
) -> None: ...
def listed_cells(request: ScannedRequest, datum_indices: npt.NDArray[np.int64], names: Sequence[str]) -> npt.NDArray[np.int64]:
    """The cells of the datums, laid end to end, that any of the named tensors lists; all of a datum with a dense or absent one."""

def spread_input(request: ScannedRequest, datum_indices: npt.NDArray[np.int64], name: str) -> npt.NDArray[np.float32]:
    """An input laid beside the cells: one number at every cell, one per row at every cell of the row, [N, K] beside targets [N] whole."""

class Answer:
    """A forward_backward answer that is written while its parts come: its shapes say where each lies.

    lengths: [D] int64 tokens per datum; widths: [D] int64, 0 for [N] logprobs, K for [N, K].
    """

    def __init__(self, lengths: npt.NDArray[np.int64], widths: npt.NDArray[np.int64]) -> None: ...
    def place(self, datum_indices: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]) -> None:
        """Write the logprobs of datums, end to end in the order given, to their places."""
    def finish(self, metrics: Sequence[tuple[str, float]]) -> bytes:
        """The bytes, once. Raises RuntimeError while the logprobs of a datum are missing."""

def peek(body: Any, content_encoding: str | None, limits: Limits) -> tuple[str, int, int]: ...
def pool_stats() -> dict[str, int]:
    """idle, idle_bytes, max_idle, max_idle_bytes of the arena pool, and allocated_bytes: all that was ever taken from the system."""

built_with: dict[str, str | int]
