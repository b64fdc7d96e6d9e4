"""Constants, arguments of nodes, and the metadata of tensors, as JSON and back.

| JSON | value |
|---|---|
| `null`, `true`, `3`, `"dp"` | itself |
| `[1, 2]` | a list |
| `{"node": 4}` | the value of node 4 |
| `{"tuple": [1, 2]}` | a tuple |
| `{"float": "0x1.8p+0"}` | a float, to the last bit |
| `{"complex": ["0x0p+0", "0x1p+0"]}` | a complex number |
| `{"dtype": "float32"}`, `{"format": ...}`, `{"layout": ...}` | torch's |
| `{"device": "cpu"}` | a device; that of this process is without its number |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..._compat.cuda import numbered, unnumbered
from ..._compat.memory import empty_strided

TORCH = {"dtype": torch.dtype, "format": torch.memory_format, "layout": torch.layout}

# of a view: whether a tensor has the bit, and the view that has
BITS: dict[str, tuple[Callable[..., bool], Callable[..., torch.Tensor]]] = {
    "conj": (torch.is_conj, torch.conj),
    "neg": (torch.is_neg, torch.ops.aten._neg_view.default),
}


class Unwritable(Exception):
    """A value, or an op, that the text of a graph cannot hold."""


def value_text(x: Any, number: Callable[[torch.fx.Node], int]) -> Any:
    """Write an argument of a node as JSON.

    Args:
        x: the argument.
        number: of a node.

    Raises:
        Unwritable: it has no text.
    """
    if isinstance(x, torch.fx.Node):
        return {"node": number(x)}
    if x is None or type(x) in (bool, int, str):
        return x
    if type(x) is float:
        return {"float": x.hex()}
    if type(x) is complex:
        return {"complex": [x.real.hex(), x.imag.hex()]}
    if isinstance(x, list):
        return [value_text(child, number) for child in x]
    if isinstance(x, tuple):
        return {"tuple": [value_text(child, number) for child in x]}
    if isinstance(x, torch.device):
        return {"device": str(unnumbered(x))}
    for name, kind in TORCH.items():
        if isinstance(x, kind):
            return {name: str(x).removeprefix("torch.")}
    raise Unwritable(f"a constant of type {type(x).__name__}")


def value_of(x: Any, nodes: Sequence[torch.fx.Node]) -> Any:
    """Read an argument from JSON, with the nodes that it names.

    Raises:
        ValueError: it stands for none.
    """
    if x is None or type(x) in (bool, int, str):
        return x
    if isinstance(x, list):
        return [value_of(child, nodes) for child in x]
    if not isinstance(x, dict) or len(x) != 1:
        raise ValueError(f"{x!r} must be an argument")
    ((kind, payload),) = x.items()
    if kind in TORCH:
        return torch_value(kind, payload)
    readers: dict[str, Callable[[Any], Any]] = {
        "node": lambda n: nodes[index(n, len(nodes))],
        "tuple": lambda row: tuple(value_of(child, nodes) for child in row),
        "float": float.fromhex,
        "complex": lambda row: complex(*map(float.fromhex, row)),
        "device": numbered,
    }
    if kind not in readers:
        raise ValueError(f"{x!r} must be an argument")
    return readers[kind](payload)


def torch_value(kind: str, name: Any) -> Any:
    """Return a dtype, memory format or layout by its name.

    Raises:
        ValueError: there is none.
    """
    value = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(value, TORCH[kind]):
        raise ValueError(f"{name!r} is not a {kind} of torch")
    return value


def index(n: Any, count: int) -> int:
    """Check that a number is an int from 0 to below a count, and return it.

    Raises:
        ValueError: it is none.
    """
    if type(n) is not int or not 0 <= n < count:
        raise ValueError(f"{n!r} is not one of {count}")
    return n


def tensor_text(x: torch.Tensor) -> list[Any]:
    """Write the metadata of a tensor: shape, strides, offset, dtype, device, and its conj and neg
    bits, if it has some.

    Raises:
        Unwritable: a size is a symbol.
    """
    sizes = [list(x.shape), list(x.stride()), x.storage_offset()]
    flat = [*sizes[0], *sizes[1], sizes[2]]
    if any(type(n) is not int for n in flat):
        raise Unwritable("a tensor with symbolic sizes")
    bits = [name for name, (has, _) in BITS.items() if has(x)]
    dtype, device = (str(x.dtype).removeprefix("torch."), str(unnumbered(x.device)))
    return [*sizes, dtype, device, *bits]


def devices_of(nodes: Iterable[torch.fx.Node]) -> list[str]:
    """List the devices of the values of nodes, with their numbers: compiled code has them too."""
    values = [node.meta.get("val") for node in nodes]
    tensors = [x for x in values if isinstance(x, torch.Tensor)]
    return sorted({str(x.device) for x in tensors})


def tensor_of(metadata: Any) -> torch.Tensor:
    """Build a tensor from its metadata; a fake one in a fake mode.

    Raises:
        ValueError: no tensor has it.
    """
    shape, stride, offset, dtype, place, *bits = metadata
    device = str(numbered(place))
    sizes = [*shape, *stride, offset]
    if len(shape) != len(stride) or any(type(n) is not int or n < 0 for n in sizes):
        raise ValueError(f"{metadata!r} must be a layout")
    kind = torch_value("dtype", dtype)
    x = empty_strided(shape, stride, kind, device)
    if offset:
        reach = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
        memory = torch.empty(offset + max(reach, 0), dtype=kind, device=device)
        x = memory.as_strided(shape, stride, offset)
    for bit in bits:
        x = BITS[bit][1](x)
    return x


def record_text(x: Mapping[str, Any]) -> dict[str, Any]:
    """Check that the fields of a record are JSON values, and return them.

    Raises:
        Unwritable: one is not.
    """
    for name, value in x.items():
        if value is not None and type(value) not in (bool, int, str, float):
            raise Unwritable(f"{name} of type {type(value).__name__}")
    return dict(x)
