"""One step of training of a model, sharded and on one device: loss, gradients, buffers, and the
parameters after a step of AdamW; and gradients by `loss.backward()` through a call.
"""

from __future__ import annotations

import collections
import time
from typing import Any, NamedTuple

import torch

import shardfn as sf
from shardfn import P, random

from .catalogue import Model
from .schemes import Params, Placed, Scheme

SEED = 3
# a first step divides a gradient by its size and eps: a small eps makes rounding large
ADAMW = {"lr": 1e-3, "eps": 1e-3}
FLOAT32 = {"rtol": 1e-3, "atol": 1e-4}
SHORT = {"all_gather": "AG", "all_reduce": "AR", "reduce_scatter": "RS", "all_to_all": "A2A"}


class Step(NamedTuple):
    """What a step gives. `grads` has what autograd has: some parameters take no part."""

    loss: torch.Tensor
    grads: Params
    buffers: Params
    params: Params


def net_of(model: Model) -> torch.nn.Module:
    """The model in training mode, with the same weights each time."""
    torch.manual_seed(0)
    return model.make().to(model.dtype).train()


def inputs_of(model: Model) -> tuple[torch.Tensor, ...]:
    """Its inputs, the same each time."""
    torch.manual_seed(1)
    return tuple(x.to(model.dtype) if x.is_floating_point() else x for x in model.inputs())


def on_one_device(model: Model) -> Step:
    """The step by autograd and torch's optimizer."""
    net, inputs = net_of(model), inputs_of(model)
    optimizer = torch.optim.AdamW(net.parameters(), **ADAMW)
    random.state.seed(SEED)
    with random.plain():
        loss = model.loss(net, *inputs)
    loss.backward()
    params = dict(net.named_parameters())
    grads = {k: p.grad for k, p in params.items() if p.grad is not None}
    optimizer.step()
    stepped = {name: params[name].detach() for name in grads}
    return Step(loss.detach(), grads, dict(net.named_buffers()), stepped)


class Training:
    """A model as pure functions, one for all meshes, so that it is captured once."""

    def __init__(self, model: Model) -> None:
        self.model, self.inputs = model, inputs_of(model)
        self.net, self.wanted = net_of(model), on_one_device(model)
        self.fn, self.params, self.buffers = sf.functionalize(self.net)
        self.optimizer = sf.optim(torch.optim.AdamW, **ADAMW)
        self.state = self.optimizer.init(self.params)

        def whole(*given: Any) -> Any:
            return self.step(*given)

        self.whole = whole  # a function is captured once for all meshes

    def loss(self, params: Params, buffers: Params, *inputs: Any) -> Any:
        """(the loss, the buffers after it)"""
        after = buffers

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal after
            out, after = self.fn(params, after, *args, **kwargs)
            return out

        return self.model.loss(call, *inputs), after

    def step(self, params: Params, buffers: Params, state: Any, *inputs: Any) -> Any:
        """The fields of a `Step`."""
        derived = sf.value_and_grad(self.loss, has_aux=True)
        (loss, buffers), grads = derived(params, buffers, *inputs)
        params, _ = self.optimizer.update(params, grads, state)
        return loss, grads, buffers, params

    def placements(self, scheme: Scheme) -> tuple[Placed, tuple[P, ...]]:
        """(of the parameters, of the inputs)"""
        return scheme.placed(self.net, self.params), scheme.rows(self.inputs)

    def stepped(self, scheme: Scheme) -> tuple[float, float, str]:
        """(seconds of the capture, of the lowering, what is sent) of a step that is right.

        Raises:
            AssertionError: it is not.
            ShardError: it is refused.
        """
        placed, rows = self.placements(scheme)
        state = self.optimizer.state_placements(placed, self.params)
        step = sf.shard(self.whole, scheme.mesh(), (placed, P(), state, *rows), backend="aten")
        arguments = self.params, self.buffers, self.state, *self.inputs
        start = time.process_time()
        traced = step.trace(*arguments)
        middle = time.process_time()
        lowered = traced.lower()
        end = time.process_time()
        random.state.seed(SEED)
        loss, grads, buffers, params = sf.full(lowered.compile()(*arguments))
        self.compare(loss, grads, buffers, params)
        kinds = collections.Counter(c.kind for c in lowered.collectives)
        sent = ", ".join(f"{n} {SHORT.get(kind, kind)}" for kind, n in sorted(kinds.items()))
        return middle - start, end - middle, sent

    def by_backward(self, scheme: Scheme) -> None:
        """Loss and gradients by `loss.backward()` through the call, compared.

        Raises:
            AssertionError: they are wrong.
            ShardError: the call or its backward is refused.
        """
        placed, rows = self.placements(scheme)
        mesh = scheme.mesh()
        call = sf.shard(self.loss, mesh, (placed, P(), *rows), backend="aten")
        params = {
            name: x.detach().requires_grad_(x.is_floating_point())
            for name, x in sf.distribute(self.params, mesh, placed).items()
        }
        random.state.seed(SEED)
        loss, buffers = call(params, self.buffers, *self.inputs)
        loss.backward()
        grads = {name: x.grad for name, x in params.items()}
        loss, grads, buffers = sf.full((loss.detach(), grads, buffers))
        self.compare(loss, grads, buffers, self.wanted.params)

    def compare(self, loss: Any, grads: Any, buffers: Any, params: Any) -> None:
        """Compare with one device. Parameters that take no part have gradients of zero or none."""
        wanted = self.wanted
        others = [x for name, x in grads.items() if name not in wanted.grads]
        assert not any(x.any() for x in others if x is not None)
        found = Step(
            loss,
            {name: grads[name] for name in wanted.grads},
            {name: buffers[name] for name in wanted.buffers},
            {name: params[name] for name in wanted.params},
        )
        near: Any = FLOAT32 if self.model.dtype == torch.float32 else {}
        for part, ours, theirs in zip(Step._fields, found, wanted, strict=True):
            torch.testing.assert_close(
                ours, theirs, **near, msg=lambda text, part=part: f"{part}: {text}"
            )
