"""How the start of a training step grows with its layers: capture, lowering, compilation and the
first result, of a GPT and of an unchanged Llama of transformers with AdamW, and of an optimizer of
300 parameters alone; next to torch.compile of the whole step and by regions.

    python -m bench.growth [--layers 2 8] [--programs gpt llama adamw] [--rivals compile regions]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from . import fresh

SHAPES = 10  # of the parameters of the optimizer alone
Step = tuple[Callable[..., Any], tuple[Any, ...]]


def gpt_step(layers: int) -> Step:
    """The demo's GPT with AdamW, and arguments."""
    import torch

    import shardfn as sf
    from shardfn_demo import gpt

    config = gpt.Config(layers=layers)
    params = gpt.init(config)
    x, y = torch.randint(0, config.vocab, (2, 4, config.context))
    opt = sf.optim(torch.optim.AdamW, lr=1e-3)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss = lambda p: gpt.loss_fn(p, x, y, heads=config.heads)
        value, grads = sf.value_and_grad(loss)(params)
        return value, *opt.update(params, grads, state)

    return step, (params, opt.init(params), x, y)


def llama(layers: int) -> Any:
    """A small Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_hidden_layers=layers,
    )
    return LlamaForCausalLM(config)


def llama_step(layers: int) -> Step:
    """That Llama with AdamW, and arguments."""
    import torch

    import shardfn as sf

    fn, params, buffers = sf.functionalize(llama(layers))
    tokens = torch.randint(0, 256, (4, 64))
    opt = sf.optim(torch.optim.AdamW, lr=1e-3)

    def step(params: Any, state: Any, tokens: Any) -> Any:
        loss = lambda p: fn(p, buffers, input_ids=tokens, labels=tokens)[0].loss
        value, grads = sf.value_and_grad(loss)(params)
        return value, *opt.update(params, grads, state)

    return step, (params, opt.init(params), tokens)


def adamw_step(count: int) -> Step:
    """AdamW of so many parameters of ten shapes, and arguments."""
    import torch

    import shardfn as sf

    params = {str(i): torch.randn(8 + i % SHAPES, 16) for i in range(count)}
    opt = sf.optim(torch.optim.AdamW, lr=1e-3)

    def step(params: Any, state: Any, grads: Any) -> Any:
        new = opt.update(params, grads, state)
        return new[0]["0"].sum(), *new

    return step, (params, opt.init(params), params)


STEPS: dict[str, Callable[[int], Step]] = {
    "gpt": gpt_step,
    "llama": llama_step,
    "adamw": adamw_step,
}


def ours(program: str, size: int) -> dict[str, float]:
    """The stages of a program, in seconds of processor time, and the number of its ops."""
    import shardfn as sf

    step, args = STEPS[program](size)
    fn = sf.jit(step)
    traced, capture = _timed(lambda: fn.trace(*args))
    lowered, lowering = _timed(traced.lower)
    loss, rest = _timed(lambda: float(lowered.compile()(*args)[0]))
    ops = sum(node.op == "call_function" for node in traced.program.graph.graph.nodes)
    return {"ops": ops, "capture": capture, "lowering": lowering, "rest": rest, "loss": loss}


def compiled_by_torch(program: str, size: int, *, by_regions: bool) -> dict[str, float]:
    """The same step of modules under torch.compile: the model and its optimizer, the layers as
    regions that are compiled once if asked.
    """
    import torch

    torch.manual_seed(0)
    if program == "adamw":
        params = [torch.nn.Parameter(torch.randn(8 + i % SHAPES, 16)) for i in range(size)]
        for p in params:
            p.grad = p.detach().clone()
        step = torch.compile(torch.optim.AdamW(params, lr=1e-3).step)
        _, rest = _timed(step)
        return {"rest": rest}
    model = llama(size)
    if by_regions:
        for layer in model.model.layers:
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (4, 64))

    def train() -> float:
        run = model if by_regions else torch.compile(model)
        loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.compile(optimizer.step)()
        return float(loss)

    loss, rest = _timed(train)
    return {"rest": rest, "loss": loss}


RIVALS: dict[str, Callable[[str, int], dict[str, float]]] = {
    "shardfn": ours,
    "compile": lambda program, size: compiled_by_torch(program, size, by_regions=False),
    "regions": lambda program, size: compiled_by_torch(program, size, by_regions=True),
}


def _timed(fn: Callable[[], Any]) -> tuple[Any, float]:
    start = _spent()
    result = fn()
    return result, _spent() - start


def _spent() -> float:
    """Processor time of this process and of compilers that it waited for, in seconds."""
    taken = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(x.ru_utime + x.ru_stime for x in taken)


def child(rival: str, program: str, size: int) -> None:
    """Print the figures of one start, in this process."""
    wall = time.time()
    found = RIVALS[rival](program, size)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({**found, "wall": time.time() - wall, "spent": _spent(), "peak": peak}))
    sys.stdout.flush()
    os._exit(0)


def started(rival: str, program: str, size: int) -> dict[str, float]:
    """The figures of one start in a fresh process, with nothing stored."""
    with tempfile.TemporaryDirectory() as folder:
        return fresh.run("bench.growth", ["--child", rival, program, str(size)], folder)


COLUMNS = ("ops", "capture", "lowering", "rest", "spent", "wall", "peak")


def main() -> None:
    """Print a row for each start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--programs", nargs="+", default=[*STEPS])
    parser.add_argument("--rivals", nargs="+", default=["shardfn", "compile"])
    parser.add_argument("--child", nargs=3)
    asked = parser.parse_args()
    if asked.child:
        rival, program, size = asked.child
        child(rival, program, int(size))
    print(f"{'seconds of processor time':<26}" + "".join(f"{x:>10}" for x in COLUMNS))
    for program in asked.programs:
        for size in [300] if program == "adamw" else asked.layers:
            for rival in asked.rivals:
                if rival != "shardfn" and program == "gpt":
                    continue  # a step of plain functions, which torch's regions do not know
                row = started(rival, program, size)
                if program != "adamw" and not 0 < row["loss"] < 20:
                    raise RuntimeError(f"the loss of {program} under {rival} is {row['loss']}")
                cells = "".join(f"{row[x]:>10.1f}" if x in row else " " * 10 for x in COLUMNS)
                print(f"{f'{rival}, {program} {size}':<26}{cells}", flush=True)


if __name__ == "__main__":
    main()
