"""Train each model for one step in a fake world of 4, and write docs/models.md."""

from __future__ import annotations

import collections
import sys
import time
import warnings
from typing import Any

import torch

import shardfn as sf
from shardfn import P, random

from . import hugging_face, torchs, vision
from .catalogue import Model

RANKS = 4
MODELS = (*hugging_face.MODELS, *vision.MODELS, *torchs.MODELS)
SCHEMES = {"data parallel": P(), "fully sharded": P("dp")}  # of the parameters
HEAD = """# Models

Each model is made small, with random weights, in training mode and with its dropout, and called
as its documentation calls it. Its loss and the gradient of every parameter in a fake world of
{ranks} are compared with torch's autograd on one device, in float64 (some in float32, since parts
of them compute in no other). `make models` writes this page (torch {torch}, transformers {hub}).

Collectives are those of one step of `value_and_grad`, before bucketing. Fully sharded: every
parameter is sharded on its first dim.

| model | capture | lowering | data parallel | fully sharded |
|---|---|---|---|---|
"""


def made(model: Model) -> torch.nn.Module:
    """The model in training mode, with the same weights each time."""
    torch.manual_seed(0)
    return model.make().to(model.dtype).train()


def inputs_of(model: Model) -> tuple[torch.Tensor, ...]:
    """Its inputs, the same each time."""
    torch.manual_seed(1)
    return tuple(
        x.to(model.dtype) if x.is_floating_point() else x for x in model.inputs()
    )


def on_one_device(model: Model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients by autograd."""
    net, inputs = made(model), inputs_of(model)
    random.state.seed(3)
    with random.plain():
        loss = model.loss(net, *inputs)
    loss.backward()
    grads = {k: p.grad for k, p in net.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def tried(model: Model, placed: P) -> tuple[float, float, str]:
    """(seconds of the capture, of the lowering, what is sent) of a step that is right.

    Raises:
        AssertionError: it is not.
        ShardError: it is refused.
    """
    fn, params, buffers = sf.functionalize(made(model))

    def loss(params: Any, *inputs: Any) -> torch.Tensor:
        call = lambda *args, **kwargs: fn(params, buffers, *args, **kwargs)[0]
        return model.loss(call, *inputs)

    inputs = inputs_of(model)
    placements = {name: placed if x.dim() else P() for name, x in params.items()}
    rows = tuple(P("dp") if len(x) == len(inputs[0]) else P() for x in inputs)
    with sf.fake_world(RANKS):
        mesh = sf.make_mesh((RANKS,), ("dp",))
        step = sf.shard(
            sf.value_and_grad(loss), mesh, (placements, *rows), backend="aten"
        )
        start = time.perf_counter()
        traced = step.trace(params, *inputs)
        middle = time.perf_counter()
        lowered = traced.lower()
        end = time.perf_counter()
        random.state.seed(3)
        found, grads = sf.full(step(params, *inputs))
    wanted = on_one_device(model)
    grads = {name: grads[name] for name in wanted[1]}
    near = {"rtol": 1e-3, "atol": 1e-4} if model.dtype == torch.float32 else {}
    torch.testing.assert_close((found, grads), wanted, **near)
    kinds = collections.Counter(c.kind for c in lowered.collectives)
    sent = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    return middle - start, end - middle, sent


def row(model: Model) -> str:
    """A line of the table."""
    times, cells = ("", ""), []
    for placed in SCHEMES.values():
        try:
            capture, lowering, sent = tried(model, placed)
        except Exception as error:  # the page says which
            cells.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        else:
            times = f"{capture:.1f} s", f"{lowering:.1f} s"
            cells.append(sent)
    return " | ".join(["", model.name, *times, *cells, ""]).strip()


def main(names: list[str]) -> None:
    """Try the models of these names, or all, and write the page if all are tried."""
    import transformers

    warnings.filterwarnings("ignore")
    lines = []
    for model in MODELS:
        if not names or model.name in names:
            lines.append(row(model))
            print(lines[-1], flush=True)
    if not names:
        head = HEAD.format(
            ranks=RANKS, torch=torch.__version__, hub=transformers.__version__
        )
        with open("docs/models.md", "w") as page:
            page.write(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
