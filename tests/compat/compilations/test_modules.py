"""A generated module is run again from its text, with its constants."""

from __future__ import annotations

from typing import Any

import torch

from shardfn import _compat
from shardfn._compat.compilations import modules

CODE = """
from torch._inductor.select_algorithm import extern_kernels
import torch

def call(args):
    x, = args
    args.clear()
    out = torch.empty(2, 2)
    extern_kernels.mm(x, table, out=out)
    return (out,)
"""


def test_the_text_runs_with_its_constants_and_empties_its_inputs() -> None:
    made = _compat.Generated(CODE, constants={"table": torch.eye(2)})
    run = _compat.Rerun(made, "example")
    inputs = [torch.arange(4.0).view(2, 2)]
    (out,) = run(inputs)
    assert out.tolist() == [[0.0, 1.0], [2.0, 3.0]] and not inputs
    assert run.source_code == CODE


def test_the_library_functions_are_those_of_inductor() -> None:
    from torch._inductor import compile_fx  # noqa: F401
    from torch._inductor.select_algorithm import extern_kernels

    ours: Any = modules.Kernels()
    for name in (*modules.OF_TORCH, "bias_addmm"):
        assert getattr(ours, name) is getattr(extern_kernels, name)


class Runner:
    def __init__(self, **fields: Any) -> None:
        self.source_code = "def call(args): ..."
        self.constants: dict[str, Any] = {}
        self.mutated_input_idxs: set[int] = {1, 0}
        self.inputs_to_check = [2]
        self.__dict__.update(fields)


def test_a_compilation_that_text_cannot_hold_is_not_stored() -> None:
    made = _compat.generated(Runner())
    assert made is not None and (made.to_align, made.written) == ((2,), (0, 1))
    assert _compat.generated(lambda inputs: inputs) is None
    for fields in (
        {"guards_expr": "s0 > 2"},
        {"torchbind_constants": {"a": 1}},
        {"constants": {"a": torch.nn.Parameter(torch.ones(2))}},
    ):
        assert _compat.generated(Runner(**fields)) is None
