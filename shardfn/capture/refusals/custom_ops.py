"""Custom ops that a capture cannot take, with what their definition needs."""

from __future__ import annotations

import re

import torch

from ... import _compat

NO_FAKE = "the custom op {op} has no fake implementation, which gives the shapes of its results"
REGISTER = (
    '@torch.library.register_fake("{op}") of a function of the same arguments, which returns '
    "torch.empty_like(x), or an empty tensor of the shape of the result"
)
WRITES = (
    "the custom op {op} writes to its arguments",
    "an op with mutates_args=(), which returns the new value: let it write to x.clone()",
)
OF_TORCH = "aten", "prims", "shardfn"
# torch's texts that name an op without a fake implementation (torch 2.13)
WITHOUT_FAKE = (
    r"no fake impl registered for <CustomOpDef\(([\w:]+)\)>|unsupported operator: (\w+\.\w+)"
)
WRITING = r"output has alias annotations: ([\w:]+)[.\w]*\([^)]*\(\w+!\)"
CALLED = r"call_function (\w+)\.(\w+)\.(\w+)\(\*"


def cause_of_custom_op(text: str) -> tuple[str, str] | None:
    """The problem and the suggestion, if the text of an error names a custom op without a fake
    implementation, or one that writes to its arguments.
    """
    if match := re.search(WITHOUT_FAKE, text):
        name = (match[1] or match[2]).replace(".", "::")
        return None if _is_of_torch(name) else (NO_FAKE.format(op=name), REGISTER.format(op=name))
    if match := re.search(WRITING, text):
        return WRITES[0].format(op=match[1]), WRITES[1]
    if match := re.search(CALLED, text):
        namespace, name, overload = match.groups()
        op = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
        if op is None or namespace in OF_TORCH or not _compat.schema(op).is_mutable:
            return None
        return WRITES[0].format(op=f"{namespace}::{name}"), WRITES[1]
    return None


def _is_of_torch(name: str) -> bool:
    """Check for an op of torch or of shardfn."""
    return name.partition("::")[0] in OF_TORCH
