"""Hello, shardfn: one training step on eight simulated ranks, and the loss of one device."""

import torch

import shardfn as sf
from shardfn import P


def loss_fn(w, x, y):
    return ((torch.tanh(x @ w["up"]) @ w["down"] - y) ** 2).mean()


def step(w, x, y):
    loss, grads = sf.value_and_grad(loss_fn)(w, x, y)
    return sf.tree_map(lambda p, g: p - 0.1 * g, w, grads), loss


torch.manual_seed(0)
w = {"up": torch.randn(16, 32) / 4, "down": torch.randn(32, 4) / 6}
x, y = torch.randn(64, 16), torch.randn(64, 4)
print(f"one device   loss {step(w, x, y)[1].item():.6f}")

with sf.fake_world(8):
    mesh = sf.make_mesh((2, 4), ("dp", "tp"))
    placements = {"up": P(None, "tp"), "down": P("tp", None)}
    train = sf.shard(step, mesh, in_placements=(placements, P("dp"), P("dp")), backend="aten")
    w, loss = train(w, x, y)
    print(f"eight ranks  loss {sf.full(loss).item():.6f}")
