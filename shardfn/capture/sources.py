"""Which line of the user's code each node of a Program comes from."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable
from typing import Any

import torch

_TORCH = os.path.dirname(torch.__file__)
_OURS = os.path.dirname(os.path.dirname(__file__))
_MODELS = os.path.join(_OURS, "demo")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def is_ours(file: str) -> bool:
    """Whether a file belongs to torch, to shardfn's stages or to a library, and not to the user."""
    library = any(part in file for part in ("/optree/", "<string>", "<frozen", "<eval_with_key>", "importlib/", "contextlib.py"))
    return library or file.startswith(_TORCH) or (file.startswith(_OURS) and not file.startswith(_MODELS))


def follow_backward(roots: Iterable[Any]) -> None:
    """Have every node that a backward makes note the autograd sequence number of the forward op it belongs to."""
    seen, queue = set(), [fn for fn in roots if fn is not None]
    while queue:
        fn = queue.pop()
        if fn in seen:
            continue
        seen.add(fn)
        fn.register_prehook(functools.partial(_note, fn._sequence_nr()))
        queue += [after for after, _ in fn.next_functions if after is not None]


def _note(number: int, gradients: Any) -> None:
    torch.fx.traceback.get_current_meta()["custom"] = {"phase": "backward", "belongs_to": number}


def attach(graph: torch.fx.GraphModule) -> None:
    """Give every node its `source` ("file:line" or None) and its `phase` ("forward" or "backward").

    torch gives the nodes of a backward the line of the grad call; here they get the line of the forward op that they
    belong to.
    """
    forward: dict[int, str] = {}
    for node in graph.graph.nodes:
        noted = node.meta.get("custom") or {}
        node.meta["phase"] = noted.get("phase", "forward")
        node.meta["source"] = forward.get(noted.get("belongs_to", -1)) or line_of(node.meta.get("stack_trace"))
        if node.meta["phase"] == "forward" and node.meta["source"] and "seq_nr" in node.meta:
            forward.setdefault(node.meta["seq_nr"], node.meta["source"])


def line_of(stack: str | None) -> str | None:
    """The innermost line of user code in a stack trace."""
    frames = [(file, line) for file, line in _FRAME.findall(stack or "") if not is_ours(file)]
    return ":".join(frames[-1]) if frames else None
