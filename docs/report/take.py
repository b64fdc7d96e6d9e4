"""Take the screenshots of docs/report.md: `python docs/report/take.py`, where Chromium is installed
and `pip install -e '.[pages]'` was run.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shardfn as sf
from shardfn import P

FOLDER = Path(__file__).parent
WIDTH, HEADS, INNER, WORDS, LAYERS, BATCH, TOKENS = 4096, 32, 14336, 32000, 2, 16, 4096
CHROMIUM = "/usr/bin/chromium"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = lambda y: y.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.mlp = Attention(), Perceptron()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def lowered() -> Any:
    """A training step, fully sharded over dp and tensor parallel over tp."""
    with torch.device("meta"):
        model, params, _ = sf.functionalize(Model().bfloat16())
    shapes = sf.tree_map(lambda w: sf.ShapeDtype(tuple(w.shape), w.dtype), params)
    plan = {
        "layers.*.attention.[qkv].weight": P("tp", "dp"),
        "layers.*.attention.o.weight": P("dp", "tp"),
        "layers.*.mlp.up.weight": P("tp", "dp"),
        "layers.*.mlp.down.weight": P("dp", "tp"),
        "head.weight": P("tp", "dp"),
    }

    def loss_of(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = model(params, {}, x)[0]
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())

    def step(params: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss, grads = sf.bucketed_grad(loss_of)(params, x, y)
        return sf.tree_map(lambda w, g: w - 1e-3 * g, params, grads), loss

    tokens = sf.ShapeDtype((BATCH, TOKENS), torch.int64)
    with sf.fake_world(32, numerics=False):
        mesh = sf.make_mesh((8, 4), ("dp", "tp"))
        where = sf.placements(shapes, plan, default=P())
        train = sf.shard(step, mesh, (where, P("dp"), P("dp")))
        return train.lower(shapes, tokens, tokens)


def mistaken() -> Any:
    """A forward whose first weight is sharded on the dim that is summed over."""
    forward = lambda p, x: torch.relu(x @ p["up"]) @ p["down"]
    params = {"up": sf.ShapeDtype((1024, 4096)), "down": sf.ShapeDtype((4096, 1024))}
    wrong = {"up": P("tp", None), "down": P("tp", None)}
    with sf.fake_world(4, numerics=False):
        mesh = sf.make_mesh((4,), ("tp",))
        step = sf.shard(forward, mesh, (wrong, P()))
        return step.lower(params, sf.ShapeDtype((512, 1024)))


# the name of each picture, its step, the colours of its page, and what stands at its top
SHOTS = (("step", lowered, "light", "header"), ("collectives", mistaken, "dark", "#collectives"))


def main() -> int:
    """Write the pages, and a picture of each."""
    from playwright.sync_api import sync_playwright

    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name, step, scheme, first in SHOTS:
            path = folder / f"{name}.html"
            print(step().report(path=path))
            page = browser.new_page(viewport={"width": 1000, "height": 1100}, color_scheme=scheme)
            page.goto(path.resolve().as_uri())
            page.evaluate(f"document.querySelector('{first}').scrollIntoView()")
            page.wait_for_timeout(1500)
            page.screenshot(path=FOLDER / f"{name}.png")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
