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

_LOSSES: dict[str, Loss] = {}
TARGETS = "target_tokens"
RANKS = ("one number", "[N]", "[N, K], K being that of target_tokens, or one for all datums where those are [N]")


def register(loss: Loss) -> None:
    """Make ``loss`` known under its name."""
    _LOSSES[loss.name] = loss


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


def _of_other_rank(rank: int, widths: np.ndarray, targets: np.ndarray, request: ScannedRequest) -> np.ndarray:
    """The datums whose input is not of the rank that a custom loss declared; widths and targets are [D]."""
    if rank == 0:  # one value of one token may have come as [1]
        return np.flatnonzero((widths != -2) & ~((widths == 0) & (np.asarray(request.lengths) == 1)))
    if rank == 1:
        return np.flatnonzero(widths != 0)
    return np.flatnonzero((widths < 1) | (widths != np.where(targets > 0, targets, widths[0])))


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

    try:
        loss = get(request.loss_fn, request.loss_fn_config)
    except InvalidRequest as error:
        raise fail(str(error)) from None
    try:
        config = _check_config(loss, dict(request.loss_fn_config))
    except ValueError as error:
        raise fail(f"loss_fn_config: {error}") from None
    targets = np.asarray(request.target_widths)
    missing = np.flatnonzero(targets < 0)
    if len(missing):
        raise fail(f"datum {missing[0]}: {TARGETS} is missing; every loss needs it")
    known = {TARGETS}.union(*((*x.required, *x.optional) for x in _LOSSES.values()))
    mine = {*loss.required, *loss.optional}
    met = list(request.input_names)
    for name in met:
        if name in loss.supplied or (name not in known and name not in mine):
            datum = int(np.flatnonzero(np.asarray(request.input_widths(name)) != -1)[0])
            raise fail(
                f"datum {datum}: loss_fn_inputs has {name!r}, which no loss knows; {loss.name} takes {', '.join(sorted(mine | {TARGETS}))}"
            )
    for name in loss.required:
        absent = np.flatnonzero(np.asarray(request.input_widths(name)) == -1) if name in met else [0]
        if len(absent):
            raise fail(f"datum {absent[0]}: {name} is missing; {loss.name} needs {', '.join((TARGETS, *loss.required))}")
    for name in met:
        if name not in mine:
            continue
        widths = np.asarray(request.input_widths(name))
        rank = loss.ranks.get(name)
        wrong = np.flatnonzero((widths != -1) & (widths != targets)) if rank is None else _of_other_rank(rank, widths, targets, request)
        if len(wrong):
            d = int(wrong[0])
            fits = "they must be the same" if rank is None else f"the loss takes {RANKS[rank]}"
            raise fail(f"datum {d}: {name} has shape {_shape(int(widths[d]))} but {TARGETS} has {_shape(int(targets[d]))}; {fits}")
        integer = np.flatnonzero(np.asarray(request.input_is_integer(name)) & (widths != -1))
        if len(integer):
            raise fail(f"datum {integer[0]}: {name} has an integer dtype; it must be float32 or bfloat16")
    if loss.needs_spans:
        bare = np.flatnonzero(~np.asarray(request.has_spans))
        if len(bare):
            raise fail(f"datum {bare[0]}: no sampled_tokens span; {loss.name} reads the sampler's own logprobs of the named sequence")
    return config
