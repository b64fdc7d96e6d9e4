"""Transforms stack as decorators and compose as values: two spellings of one pipeline, and the
same numbers.
"""

import functools

import torch

import shardfn as sf
from shardfn import P

WEIGHTS = {"up": P(None, "tp"), "down": P("tp", None)}
sharded = functools.partial(sf.shard, in_placements=(WEIGHTS, P("dp"), P("dp")), backend="aten")


def loss_fn(w, x, y):
    h = sf.constrain(
        torch.relu(x @ w["up"]), P("dp", "tp")
    )  # says where a value lives; it never says what it is
    return ((h @ w["down"] - y) ** 2).mean()


@sharded
@sf.value_and_grad
def stacked(w, x, y):
    return loss_fn(w, x, y)


composed = sf.compose(sharded, sf.value_and_grad)(loss_fn)

torch.manual_seed(0)
w = {"up": torch.randn(16, 32) / 4, "down": torch.randn(32, 4) / 6}
x, y = torch.randn(64, 16), torch.randn(64, 4)


def tell(name, loss, grads):
    print(f"{name:<9} loss {loss.item():.6f}  gradient of down {grads['down'].norm().item():.6f}")


tell(
    "alone", *sf.value_and_grad(loss_fn)(w, x, y)
)  # one device: a constraint means nothing, and costs nothing
with sf.fake_world(8), sf.use_mesh(sf.make_mesh((2, 4), ("dp", "tp"))):
    tell("stacked", *sf.full(stacked(w, x, y)))
    tell("composed", *sf.full(composed(w, x, y)))
