"""Where the code of a module runs: its line, and the path of the submodule, such as
`model.layers.17.self_attn.q_proj`.
"""

from __future__ import annotations

from types import CodeType, FrameType

import torch

from ...errors import is_ours

MODULE = " of module "  # stands before the path in a stack trace


class Paths:
    """The paths of the submodules of the modules that run in a capture, each listed once."""

    def __init__(self) -> None:
        # for each module, by id: the module, and the paths of its parts by their ids
        self.known: dict[int, tuple[torch.nn.Module, dict[int, str]]] = {}

    def running_line(self, frame: FrameType | None, until: CodeType) -> str | None:
        """The innermost frame of user code inside a module, formatted as in a stack trace, with
        the path of the innermost submodule.

        Args:
            frame: the innermost frame.
            until: the code that calls the module, which is its local `module`.
        """
        line = None
        inner = None
        while frame is not None and frame.f_code is not until:
            code = frame.f_code
            if line is None and not is_ours(code.co_filename):
                line = f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}'
            if inner is None and code.co_varnames[:1] == ("self",):
                owner = frame.f_locals.get("self")
                inner = owner if isinstance(owner, torch.nn.Module) else None
            frame = frame.f_back
        if line is None:
            return None
        if frame is None:  # code of an optimizer, which no module runs
            return f"{line}\n"
        path = self.path_in(frame.f_locals["module"], inner)
        return f"{line}{MODULE}{path}\n" if path else f"{line}\n"

    def path_in(self, root: torch.nn.Module, inner: torch.nn.Module | None) -> str:
        """The path of a submodule, empty for the module itself and for others."""
        if id(root) not in self.known:
            paths = {id(part): name for name, part in root.named_modules()}
            self.known[id(root)] = root, paths
        _, paths = self.known[id(root)]
        return paths.get(id(inner), "")
