"""What torch.func switches is as before where a trace fails."""

from __future__ import annotations

import pytest
import torch

from shardfn import _compat

functorch, autograd = torch._C._functorch, torch._C._autograd


def test_levels_and_switches_are_left_on_an_error() -> None:
    with pytest.raises(ValueError, match="here"), _compat.levels_left_on_error():
        functorch._grad_increment_nesting()
        functorch.set_inplace_requires_grad_allowed(True)
        autograd._saved_tensors_hooks_disable("not inside")
        raise ValueError("here")
    assert functorch.get_dynamic_layer_stack_depth() == 0
    assert not functorch.get_inplace_requires_grad_allowed()
    assert autograd._saved_tensors_hooks_is_enabled()
