"""A traced loss as data, run node by node from an allow-list. Nothing in a graph is ever evaluated as code.

Nodes are torch.fx's: placeholder, call_function, call_method, output. A function or method that is not named here cannot be called; none
here does input or output, and the graph runs first on shapes alone: that says what it costs, and that no result larger than MAX_ELEMENTS
is ever made.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spindle.errors import InvalidRequest

__all__ = ["Graph"]

MAX_NODES = 512
MAX_ELEMENTS = 1 << 24  # of one result; all results of a graph together may have 16 times as many
MAX_DEPTH = 8  # of nested arguments
MAX_DIFFERENCES = 16  # of torch.diff, which makes them one after the other
NODE_WORK = 1 << 12  # element-operations that calling a node costs beside its elements,
ARGUMENT_WORK = 1 << 6  # and each argument of it


def _words(text: str) -> list[str]:
    return text.split()


_SHARED = _words(
    """
    abs add all amax amin any argmax argmin argsort atan2 ceil clamp clamp_max clamp_min clone contiguous cos cosh cummax cumprod cumsum
    detach diff div divide dot eq erf erfc exp exp2 expand_as expm1 fill flatten flip floor floor_divide fmod frac gather ge greater
    greater_equal gt heaviside hypot index_add index_select isfinite isinf isnan isclose le lerp less less_equal lgamma log log10 log1p
    log2 log_softmax logaddexp logcumsumexp logical_and logical_not logical_or logical_xor logit logsumexp lt masked_fill matmul max
    maximum mean median min minimum mul multiply nan_to_num narrow ne neg negative nansum nanmean norm not_equal ones_like zeros_like
    full_like permute pow prod quantile reciprocal relu remainder reshape roll round rsqrt rsub scatter scatter_add select sigmoid sign
    sin sinh softmax sort sqrt square squeeze std sub subtract sum swapaxes t take tan tanh tile topk transpose tril triu true_divide
    trunc unsqueeze var where xlogy movedim
    """
)
_ONLY_METHODS = _words(
    """
    bool dim double expand float half int long ndimension new_ones new_zeros new_full numel repeat size to type_as view view_as __and__
    __or__ __invert__
    """
)
_ONLY_FUNCTIONS = _words(
    """
    arange cat concat full ones stack tensor zeros where broadcast_to
    """
)
_NN = _words(
    """
    relu sigmoid silu gelu softplus logsigmoid softmax log_softmax elu leaky_relu tanh smooth_l1_loss mse_loss huber_loss normalize pad
    """
)
_OPERATORS = _words(
    """
    add sub mul truediv floordiv mod pow neg pos abs eq ne lt le gt ge and_ or_ xor invert inv getitem matmul
    """
)
_MATH = _words(
    """
    exp log log2 log10 log1p expm1 sqrt sin cos tan tanh sinh cosh floor ceil fabs erf erfc isfinite isinf isnan pow atan2
    """
)
_SORTING = {"argsort", "median", "quantile", "sort", "topk"}
_FORBIDDEN = {"out", "generator", "pin_memory", "requires_grad", "names"}
_ATTRIBUTES = {"shape", "ndim", "dtype", "device", "T", "mT"}
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, torch.bool, torch.int32, torch.int64, torch.bfloat16)}
_DTYPES |= {"float": torch.float32, "double": torch.float64, "int": torch.int32, "long": torch.int64}


def _attribute(value: Any, name: Any) -> Any:
    if not isinstance(value, torch.Tensor) or name not in _ATTRIBUTES:
        raise ValueError(f"attribute {name!r} is not allowed; allowed are {', '.join(sorted(_ATTRIBUTES))} of a tensor")
    return getattr(value, name)


_FUNCTIONS: dict[str, Any] = {f"torch.{n}": getattr(torch, n) for n in (*_SHARED, *_ONLY_FUNCTIONS) if hasattr(torch, n)}
_FUNCTIONS |= {f"torch.nn.functional.{n}": getattr(torch.nn.functional, n) for n in _NN}
_FUNCTIONS |= {f"{f.__module__}.{f.__name__}": f for f in (getattr(torch.nn.functional, n) for n in _NN)}  # torch.fx names some by these
_FUNCTIONS |= {
    f"torch.special.{n}": getattr(torch.special, n) for n in ("expit", "expm1", "log1p", "logsumexp", "xlogy", "xlog1py", "entr")
}
_FUNCTIONS |= {f"operator.{n}": getattr(operator, n) for n in _OPERATORS}
_FUNCTIONS |= {f"math.{n}": getattr(math, n) for n in _MATH}
_FUNCTIONS["getattr"] = _attribute  # as torch.fx calls it
_METHODS = {n: getattr(torch.Tensor, n) for n in (*_SHARED, *_ONLY_METHODS) if hasattr(torch.Tensor, n)}


class Graph:
    """nodes: the JSON of a custom loss's graph. inputs: the names its placeholders must have, in order.

    Raises InvalidRequest naming the node for whatever is not allowed.
    """

    def __init__(self, nodes: Sequence[Mapping[str, Any]], inputs: Sequence[str]) -> None:
        if not 1 <= len(nodes) <= MAX_NODES:
            raise InvalidRequest(f"graph: has {len(nodes)} nodes; 1 to {MAX_NODES} are allowed")
        names: set[str] = set()
        placeholders = []
        for at, node in enumerate(nodes):
            op, name, target = (str(node.get(k)) for k in ("op", "name", "target"))
            if node.get("name") is None or name in names:
                raise InvalidRequest(f"graph: node {at} has the name {name!r}; every node needs a name of its own")
            allowed = {"call_function": _FUNCTIONS, "call_method": _METHODS}.get(op)
            if op == "placeholder":
                placeholders.append(target)
            elif allowed is not None and target not in allowed:
                raise InvalidRequest(f"graph: node {name!r} calls {target!r}, which is not among the allowed operations")
            elif allowed is None and op != "output":
                raise InvalidRequest(f"graph: node {name!r} is a {op!r}; placeholder, call_function, call_method and output are allowed")
            if (op == "output") != (at == len(nodes) - 1):
                raise InvalidRequest(f"graph: node {name!r}: the last node, and only that, must be the output")
            for key in _FORBIDDEN & set(node.get("kwargs", {})):
                raise InvalidRequest(f"graph: node {name!r}: the argument {key!r} is not allowed")
            _check_argument(name, [node.get("args", []), list(node.get("kwargs", {}).values())], names, 0)
            names.add(name)
        if placeholders != list(inputs):
            raise InvalidRequest(f"graph: its placeholders are {placeholders}, its inputs {list(inputs)}; they must be the same, in order")
        self.nodes = nodes
        self.inputs = list(inputs)
        arguments = sum(_leaves([node.get("args", []), node.get("kwargs", {})]) for node in nodes)
        self.overhead = (len(nodes) - 1) * NODE_WORK + arguments * ARGUMENT_WORK  # element-operations of a run, whatever the shapes
        self._work: dict[tuple, int] = {}

    def work(self, shapes: Sequence[tuple[int, ...]]) -> int:
        """Element-operations of one forward run on inputs of these shapes (one per input, in order), from shapes alone: a result costs its
        own elements and those it is made from, a product of matrices its multiplications, sorting the logarithm more.

        Raises InvalidRequest naming the node that cannot run on them or makes too much.
        """
        key = tuple(shapes)
        work = self._work.get(key)
        if work is None:
            with torch.device("meta"), torch.no_grad():
                inputs = {name: torch.empty(shape) for name, shape in zip(self.inputs, shapes, strict=True)}
                work = self._execute(inputs, torch.device("meta"))[2]
            if len(self._work) >= 4096:
                self._work.clear()
            self._work[key] = work
        return work

    def run(self, values: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """values: a tensor per input. Returns (loss scalar, metrics). Raises InvalidRequest naming the node that failed."""
        self.work([tuple(values[name].shape) for name in self.inputs])
        return self._execute(values, values[self.inputs[0]].device)[:2]

    def _execute(self, values: Mapping[str, torch.Tensor], device: torch.device) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
        results: dict[str, Any] = {}
        elements, work = 0, self.overhead
        for node in self.nodes:
            op, name, target = node["op"], node["name"], node["target"]
            try:
                args = [_decode(a, results, device) for a in node.get("args", [])]
                kwargs = {k: _decode(a, results, device) for k, a in node.get("kwargs", {}).items()}
                if "device" in kwargs:
                    kwargs["device"] = device
                if target == "to" and any(isinstance(a, str) for a in args):
                    args = [device if isinstance(a, str) else a for a in args]
                if op == "placeholder":
                    out = values[target]
                elif op == "output":
                    return *_output(args[0]), work
                else:
                    tensors = op == "call_method" or target.startswith("torch.")
                    if not tensors:
                        _bound_scalars(target, args)
                    _bound_call(target.rpartition(".")[2], args, kwargs)
                    out = (_METHODS if op == "call_method" else _FUNCTIONS)[target](*args, **kwargs)
            except InvalidRequest:
                raise
            except Exception as error:
                raise InvalidRequest(
                    f"custom loss: node {name!r} ({target}): {str(error).splitlines()[0] if str(error) else error!r}"
                ) from None
            size = _size(out)
            elements += size
            if size > MAX_ELEMENTS or elements > 16 * MAX_ELEMENTS:
                raise InvalidRequest(f"custom loss: node {name!r} ({target}) makes {size} elements; at most {MAX_ELEMENTS} are allowed")
            work += _work_of(target.rpartition(".")[2], args, kwargs, out, size)
            results[name] = out
        raise InvalidRequest("graph: no output")


def _size(out: Any) -> int:
    if isinstance(out, torch.Tensor):
        return out.numel()
    if isinstance(out, Mapping):
        return _size(list(out.values()))
    return sum(map(_size, out)) if isinstance(out, tuple | list) else 1


def _leaves(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_leaves, value.values()))
    return sum(map(_leaves, value)) if isinstance(value, list) else 1


def _work_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, size: int) -> int:
    """Element-operations of one call whose result has ``size`` elements."""
    if name in ("matmul", "dot"):
        return size * args[0].shape[-1]
    used = _size([args, kwargs])
    return size + used * (max(used, 2).bit_length() if name in _SORTING else 1)


def _bound_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """What the size of a result does not say, refused before the call."""
    if any(isinstance(a, str) and a == "nuc" for a in (*args, *kwargs.values())):
        raise ValueError("the nuclear norm is not allowed")
    if name == "diff":
        times = kwargs.get("n", args[1] if len(args) > 1 else 1)
        if not isinstance(times, int) or times > MAX_DIFFERENCES:
            raise ValueError(f"n is {times!r}; at most {MAX_DIFFERENCES} is allowed")
    if name == "matmul":
        if kwargs or len(args) != 2:
            raise ValueError("takes its two tensors by position")
        a, b = args
        if a.dim() > 2 or b.dim() > 2:  # torch writes both out to the common batch
            batch = math.prod(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
            largest = batch * max(math.prod(a.shape[-2:]), math.prod(b.shape[-2:]))
            if largest > MAX_ELEMENTS:
                raise ValueError(f"broadcasts an operand to {largest} elements; at most {MAX_ELEMENTS} are allowed")


def _bound_scalars(target: str, args: Sequence[Any]) -> None:
    """Python arithmetic stays small: numbers only, and powers in floating point, so that no integer or list can grow without bound."""
    if any(isinstance(a, torch.Tensor) for a in args) or target in ("getattr", "operator.getitem"):
        return
    for a in args:
        if not isinstance(a, bool | int | float | torch.dtype | torch.device | torch.Size):
            raise ValueError(f"{type(a).__name__} is not allowed here; numbers and tensors are")
        if isinstance(a, int) and abs(a) >= 1 << 53:
            raise ValueError(f"{a} is too large")
    if target.endswith(".pow") and any(abs(a) > 64 for a in args[1:]):
        raise ValueError(f"exponent {args[1]} is too large")
    if any(isinstance(a, torch.Size) for a in args) and target not in ("operator.eq", "operator.ne"):
        raise ValueError("a shape can only be compared or indexed")


def _check_argument(node: str, value: Any, names: set[str], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"graph: node {node!r}: arguments are nested deeper than {MAX_DEPTH}")
    if isinstance(value, list):
        for v in value:
            _check_argument(node, v, names, depth + 1)
    elif isinstance(value, Mapping):
        if len(value) != 1:
            raise InvalidRequest(f"graph: node {node!r}: an argument object must have one key, got {sorted(value)}")
        ((kind, inner),) = value.items()
        if kind == "ref":
            if inner not in names:
                raise InvalidRequest(f"graph: node {node!r} refers to {inner!r}, which is no earlier node")
        elif kind == "dict":
            _check_argument(node, list(inner.values()), names, depth + 1)
        elif kind in ("tuple", "slice"):
            _check_argument(node, inner, names, depth + 1)
        elif kind not in ("ellipsis", "float", "dtype", "device", "layout", "memory_format"):
            raise InvalidRequest(f"graph: node {node!r}: an argument of kind {kind!r} is not allowed")
        elif kind == "dtype" and inner not in _DTYPES:
            raise InvalidRequest(f"graph: node {node!r}: dtype {inner!r} is not allowed; allowed are {', '.join(_DTYPES)}")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise InvalidRequest(f"graph: node {node!r}: an argument of type {type(value).__name__} is not allowed")


def _decode(value: Any, results: Mapping[str, Any], device: torch.device) -> Any:
    if isinstance(value, list):
        return [_decode(v, results, device) for v in value]
    if not isinstance(value, Mapping):
        return value
    ((kind, inner),) = value.items()
    if kind == "ref":
        return results[inner]
    if kind == "tuple":
        return tuple(_decode(v, results, device) for v in inner)
    if kind == "dict":
        return {k: _decode(v, results, device) for k, v in inner.items()}
    if kind == "slice":
        return slice(*(_decode(v, results, device) for v in inner))
    return {
        "ellipsis": lambda: ...,
        "float": lambda: float(inner),
        "dtype": lambda: _DTYPES[inner],
        "device": lambda: device,  # wherever the loss runs, never where a client says
        "layout": lambda: torch.strided,
        "memory_format": lambda: torch.contiguous_format,
    }[kind]()


def _output(value: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    if not (isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[0], torch.Tensor) and isinstance(value[1], dict)):
        raise InvalidRequest("custom loss: the output must be (loss, metrics)")
    if value[0].dim() != 0:
        raise InvalidRequest(f"custom loss: the loss must be a scalar, got shape {list(value[0].shape)}")
    return value[0], value[1]
