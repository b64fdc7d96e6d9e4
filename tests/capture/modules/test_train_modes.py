"""A functionalized module follows train() and eval(), and holds no values."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stagings import counts
from torch import Tensor, nn

import shardfn as sf

F64 = torch.float64
X = torch.linspace(-1, 2, 15, dtype=F64).reshape(5, 3)


def normed() -> nn.Module:
    torch.manual_seed(0)
    parts = nn.Linear(3, 7), nn.BatchNorm1d(7), nn.Dropout(0.5), nn.Linear(7, 2)
    return nn.Sequential(*parts).double()


def captures(call: Callable[[], Any]) -> int:
    """How many captures a call makes."""
    before = counts["captures"]
    call()
    return counts["captures"] - before


def of_eval(module: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """The result and the gradients of a module in eval mode, by plain autograd."""
    own = copy.deepcopy(module).eval()
    value = own(X).square().sum()
    value.backward()
    return value.detach(), {k: p.grad for k, p in own.named_parameters()}


def test_after_eval_it_computes_as_eval_and_retraces_once() -> None:
    module = normed()
    fn, params, buffers = sf.functionalize(module)
    call = lambda: fn(params, buffers, X)
    assert captures(call) == 1
    module.eval()
    assert captures(call) == 1
    out, after = call()
    torch.testing.assert_close(out, module(X).detach())
    torch.testing.assert_close(after, buffers)
    module.train()
    assert captures(call) == 0
    assert call()[1]["1.num_batches_tracked"] == 1
    module.eval()
    assert captures(call) == 0
    assert torch.equal(call()[0], out)


def test_a_submodule_alone_is_followed_inside_a_gradient() -> None:
    module = normed()
    fn, params, buffers = sf.functionalize(module)
    step = sf.value_and_grad(lambda p: fn(p, buffers, X)[0].square().sum())
    step(params)
    module[1].eval()
    module[2].eval()
    torch.testing.assert_close(step(params), of_eval(module))
    assert captures(lambda: step(params)) == 0
    module[2].train()
    assert captures(lambda: step(params)) == 1
    assert captures(lambda: module.eval() and step(params)) == 1
    torch.testing.assert_close(step(params), of_eval(module))


def test_the_modes_are_those_of_the_call_on_simulated_ranks() -> None:
    module = normed()
    fn, params, buffers = sf.functionalize(module)
    loss = lambda p, x: fn(p, buffers, x)[0].square().sum()
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        step = sf.shard(sf.value_and_grad(loss), mesh, (None, sf.P("dp")), backend="aten")
        step(params, X)
        module.eval()
        torch.testing.assert_close(sf.full(step(params, X)), of_eval(module))


def test_a_retrace_names_the_submodules_that_train() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Dropout()).double()
    fn, params, buffers = sf.functionalize(module)
    fn(params, buffers, X)
    module[1].eval()
    assert fn.explain_retrace(params, buffers, X).splitlines()[-1] == (
        "  closed-over submodules of functionalize(Sequential) that train: "
        "('', '0'), was ('', '0', '1')"
    )


AGAIN = {"copy.deepcopy": copy.deepcopy, "pickle": lambda fn: pickle.loads(pickle.dumps(fn))}


@pytest.mark.parametrize("way", AGAIN)
def test_a_copy_keeps_its_modes_and_follows_no_module(way: str) -> None:
    module = normed()
    fn, params, buffers = sf.functionalize(module)
    module.eval()
    other = AGAIN[way](fn)
    wanted = module(X).detach()
    module.train()
    torch.testing.assert_close(other(params, buffers, X)[0], wanted)
    assert fn(params, buffers, X)[1]["1.num_batches_tracked"] == 1


def test_a_compiled_module_is_followed_too() -> None:
    module = normed()
    fn, params, buffers = sf.functionalize(torch.compile(module))
    fn(params, buffers, X)
    module.eval()
    torch.testing.assert_close(fn(params, buffers, X)[0], module(X).detach())


def test_the_function_does_not_keep_the_module_alive() -> None:
    module = normed().eval()
    fn, params, buffers = sf.functionalize(module)
    wanted, weight = module(X).detach(), weakref.ref(module[0].weight)
    fn(params, buffers, X)
    del module
    gc.collect()
    assert weight() is None
    torch.testing.assert_close(fn(params, buffers, X)[0], wanted)


def storages(*trees: Any) -> dict[int, int]:
    """The bytes of each storage under tensors, by its address."""
    leaves = torch.utils._pytree.tree_leaves(trees)
    every = [x.untyped_storage() for x in leaves if isinstance(x, Tensor)]
    return {s.data_ptr(): s.nbytes() for s in every if s.nbytes()}


def alive() -> dict[int, int]:
    """The storages of all tensors of 7,000 elements, which those of other tests are not."""
    gc.collect()
    kinds = Tensor, nn.Parameter
    found = [x for x in gc.get_objects() if type(x) in kinds and x.numel() == 7000]
    return storages([x for x in found if x.device.type == "cpu"])


def test_shared_values_are_the_modules_own_memory_in_every_mode() -> None:
    module = nn.Sequential(nn.Linear(70, 100), nn.Dropout(), nn.Linear(100, 70))
    before, x = alive(), torch.ones(2, 70)
    fn, params, buffers = sf.functionalize(module, share=True)
    own = storages(list(module.parameters()))
    assert storages(params, buffers) == own
    step = sf.grad(lambda p: fn(p, buffers, x)[0].sum())
    for trains in (True, False, True):
        module.train(trains)
        step(params)
        fn(params, buffers, x)
    assert alive() == before


def test_values_are_copied_once_whatever_the_mode() -> None:
    module = nn.Sequential(nn.Linear(70, 100), nn.Dropout(), nn.Linear(100, 70))
    before, x = alive(), torch.ones(2, 70)
    fn, params, buffers = sf.functionalize(module)
    for trains in (True, False):
        module.train(trains)
        fn(params, buffers, x)
    assert sum(alive().values()) == 2 * sum(before.values())
    del module
    assert sum(alive().values()) == sum(before.values())


def test_hooks_and_attributes_are_those_of_when_it_was_made() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.0)).double()
    fn, params, buffers = sf.functionalize(module)
    wanted = module(X).detach()
    module.register_forward_hook(lambda m, args, out: out * 2)
    module[1].p = 1.0
    torch.testing.assert_close(fn(params, buffers, X)[0], wanted)


class Named(nn.Module):
    """A tied weight, a frozen one, and one inside of a container."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.parts = nn.ParameterList([torch.ones(2), torch.ones(3)])
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, i: Tensor) -> Tensor:
        return self.head(self.embed(i)) * self.parts[1].sum() * self.frozen[0]


def test_names_are_those_of_named_parameters() -> None:
    module = Named()
    _, params, buffers = sf.functionalize(module)
    named = dict(module.named_parameters())
    assert list(params) == [k for k, p in named.items() if p.requires_grad]
    assert list(params) == ["embed.weight", "parts.0", "parts.1"]
    assert list(buffers) == ["frozen"]
