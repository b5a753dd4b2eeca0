"""Losses by name, and the check of a request against its loss before it is queued. Works over arrays of datums; never over tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from spindle.errors import InvalidRequest
from spindle.losses.base import Config, Loss
from spindle.losses.custom import find_custom

if TYPE_CHECKING:
    from spindle.codec import ScannedRequest

__all__ = ["check", "get", "names", "register"]

TARGETS = "target_tokens"
_LOSSES: dict[str, Loss] = {}
_known = {TARGETS}  # the inputs that any of them takes
RANKS = ("one number", "[N]", "[N, K], K being that of target_tokens, or one for all datums where those are [N]")


def register(loss: Loss) -> None:
    """Make ``loss`` known under its name."""
    global _known
    _LOSSES[loss.name] = loss
    _known = {TARGETS}.union(*((*x.required, *x.optional) for x in _LOSSES.values()))


def names() -> list[str]:
    """The registered losses."""
    return sorted([*_LOSSES, "custom"])


def get(name: str, config: Config | None = None) -> Loss:
    """The loss of that name; for ``custom`` the one that config's loss_id names. Raises InvalidRequest with the names there are."""
    if name == "custom":
        return find_custom((config or {}).get("loss_id"))
    try:
        return _LOSSES[name]
    except KeyError:
        raise InvalidRequest(f"loss_fn {name!r} is not known; known are {', '.join(names())}") from None


def _shape(width: int) -> str:
    return {-1: "absent", -2: "[]", 0: "[N]"}.get(width, f"[N, {width}]")


def _first(mask: np.ndarray) -> int:
    """The first datum of a [D] mask, -1 where there is none."""
    at = int(mask.argmax())
    return at if mask[at] else -1


def _of_other_rank(rank: int, widths: np.ndarray, targets: np.ndarray, request: ScannedRequest) -> np.ndarray:
    """[D]: whether the datum's input is not of the rank that a custom loss declared; widths and targets are [D]."""
    if rank == 0:  # one value of one token may have come as [1]
        return (widths != -2) & ~((widths == 0) & (request.lengths == 1))
    if rank == 1:
        return widths != 0
    return (widths < 1) | (widths != np.where(targets > 0, targets, widths[0]))


def _check_config(loss: Loss, given: Config) -> dict[str, float | str]:
    for key, value in given.items():
        if key not in loss.defaults:
            known = f"it takes {', '.join(loss.defaults)}" if loss.defaults else "it takes none"
            raise ValueError(f"{key} is not a config key of {loss.name}; {known}")
        want_text = isinstance(loss.defaults[key], str)
        if isinstance(value, str) != want_text:
            raise ValueError(f"{key} must be a {'text' if want_text else 'number'}, got {value!r}")
        if not want_text and not math.isfinite(value):
            raise ValueError(f"{key} must be finite, got {value}")
    config = {**loss.defaults, **given}
    if loss.check_config is not None:
        loss.check_config(config)
    return config


def check(request: ScannedRequest) -> dict[str, float | str]:
    """The complete config of a request that its loss can run. Raises InvalidRequest naming the datum and key otherwise."""

    def fail(text: str) -> InvalidRequest:
        return InvalidRequest(text, request.model_id, request.seq_id)

    given = request.loss_fn_config
    try:
        loss = get(request.loss_fn, given)
    except InvalidRequest as error:
        raise fail(str(error)) from None
    try:
        config = _check_config(loss, given)
    except ValueError as error:
        raise fail(f"loss_fn_config: {error}") from None
    met = request.input_names
    faults = {name: request.input_faults(name) for name in (TARGETS, *met)}
    if (missing := faults[TARGETS][0]) >= 0:
        raise fail(f"datum {missing}: {TARGETS} is missing; every loss needs it")
    mine = {*loss.required, *loss.optional}
    for name in met:
        if name in loss.supplied or (name not in _known and name not in mine):
            datum = _first(request.input_widths(name) != -1)
            raise fail(
                f"datum {datum}: loss_fn_inputs has {name!r}, which no loss knows; {loss.name} takes {', '.join(sorted(mine | {TARGETS}))}"
            )
    for name in loss.required:
        if (absent := faults[name][0] if name in faults else 0) >= 0:
            raise fail(f"datum {absent}: {name} is missing; {loss.name} needs {', '.join((TARGETS, *loss.required))}")
    for name in met:
        if name not in mine:
            continue
        _, misshapen, integer = faults[name]
        if (rank := loss.ranks.get(name)) is not None:
            misshapen = _first(_of_other_rank(rank, request.input_widths(name), request.target_widths, request))
        if misshapen >= 0:
            width, target = (int(widths[misshapen]) for widths in (request.input_widths(name), request.target_widths))
            fits = "they must be the same" if rank is None else f"the loss takes {RANKS[rank]}"
            raise fail(f"datum {misshapen}: {name} has shape {_shape(width)} but {TARGETS} has {_shape(target)}; {fits}")
        if integer >= 0:
            raise fail(f"datum {integer}: {name} has an integer dtype; it must be float32 or bfloat16")
    if loss.needs_spans and (bare := _first(~request.has_spans)) >= 0:
        raise fail(f"datum {bare}: no sampled_tokens span; {loss.name} reads the sampler's own logprobs of the named sequence")
    return config
