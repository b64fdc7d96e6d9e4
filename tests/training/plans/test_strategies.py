"""strategy: each sends the collectives and bytes of the textbook, and computes the same step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from message import without_line
from ranks import run_ranks

import shardfn as sf
from shardfn import P

FEATURES, HIDDEN, TIME = 64, 128, 4
FLOAT = 8  # bytes
# Of large activations ZeRO gathers parameters; of small ones tensor parallelism sends those.
LARGE, SMALL = 16, 4
ACTIVATIONS = SMALL * TIME * FEATURES * FLOAT
NORM = FEATURES * FLOAT
EMBED = FEATURES * FEATURES * FLOAT
LAYER = 2 * FEATURES * HIDDEN * FLOAT
PARAMS = EMBED + NORM + LAYER
LOSS = FLOAT
OPT = sf.optim(torch.optim.AdamW, lr=0.1, weight_decay=0.1)
TENSOR_PARALLEL = {"up": P(None, "tp"), "down": P("tp")}

# strategy -> mesh, and the bytes of each kind of collective over each axis
TEXTBOOK: dict[str, tuple[dict[str, int], dict[tuple[str, str], int]]] = {
    "ddp": ({"dp": 4}, {("all_reduce", "dp"): PARAMS + LOSS}),
    "zero1": (
        {"dp": 4},
        {
            ("all_reduce", "dp"): PARAMS + LOSS,
            ("all_gather", "dp"): PARAMS,  # the new parameters
        },
    ),
    "zero2": (
        {"dp": 4},
        {
            ("reduce_scatter", "dp"): PARAMS,
            ("all_gather", "dp"): PARAMS,
            ("all_reduce", "dp"): LOSS,
        },
    ),
    "zero3": (
        {"dp": 4},
        {
            ("reduce_scatter", "dp"): PARAMS,
            # the backward does not read the embedding
            ("all_gather", "dp"): PARAMS + PARAMS - EMBED,
            ("all_reduce", "dp"): LOSS,
        },
    ),
    "hsdp": (
        {"replica": 2, "dp": 2},
        {
            ("reduce_scatter", "dp"): PARAMS,
            ("all_gather", "dp"): PARAMS + PARAMS - EMBED,
            ("all_reduce", "replica"): PARAMS // 2 + LOSS,
            ("all_reduce", "dp"): LOSS,
        },
    ),
    # one reduction in the forward, one in the backward of each block
    "tensor": ({"tp": 4}, {("all_reduce", "tp"): 2 * ACTIVATIONS}),
    "sequence": (
        {"tp": 4},
        {
            # two of the block, and one for the gradient of the embedding, which is replicated
            ("all_gather", "tp"): 3 * ACTIVATIONS,
            ("reduce_scatter", "tp"): 2 * ACTIVATIONS,
            # the norm works on shards of the sequence
            ("all_reduce", "tp"): NORM + LOSS,
        },
    ),
}


def params() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) / 5

    return {
        "embed": weight(FEATURES, FEATURES),
        "norm": weight(FEATURES),
        "up": weight(FEATURES, HIDDEN),
        "down": weight(HIDDEN, FEATURES),
    }


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (2, size, TIME, FEATURES)
    x, y = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x, y


def step_of(plan: sf.Strategy) -> Any:
    """A training step: a block with a residual connection, its gradients and AdamW."""

    def loss_fn(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = sf.constrain(x @ p["embed"], plan.activations)
        h = torch.nn.functional.rms_norm(x, (FEATURES,), p["norm"])
        h = torch.relu(h @ p["up"]) @ p["down"]
        x = sf.constrain(x + h, plan.activations)
        return (x - y).square().mean()

    def step(p: Any, state: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss, grads = sf.bucketed_grad(loss_fn)(p, x, y)
        grads = sf.constrain(grads, plan.grads)
        p, state = OPT.update(p, grads, state)
        return p, state, loss

    return step


def base_of(name: str, p: Any) -> Any:
    is_tensor = name in ("tensor", "sequence")
    return sf.placements(p, TENSOR_PARALLEL, default=P()) if is_tensor else None


def inputs(plan: sf.Strategy, p: Any) -> Any:
    """Parameters, optimizer state and a batch."""
    return p, OPT.init(p), *batch(LARGE if plan.batch.parts else SMALL)


def placed_step(plan: sf.Strategy, mesh: Any, p: Any) -> Any:
    """The sharded step of a strategy, and its arguments."""
    state = OPT.state_placements(plan.state, p)
    ins = (plan.params, state, plan.batch, plan.batch)
    outs = (plan.params, state, P())
    step = sf.shard(step_of(plan), mesh, ins, outs, backend="aten")
    return step, sf.distribute(inputs(plan, p), mesh, ins)


def assert_close(found: Any, wanted: Any) -> None:
    sf.tree_map(
        lambda x, y: torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12), found, wanted
    )


@pytest.mark.parametrize("name", TEXTBOOK)
def test_a_step_sends_what_the_textbook_says_and_computes_the_same(name: str) -> None:
    sizes, wanted = TEXTBOOK[name]
    p = params()
    with sf.fake_world(4):
        mesh = sf.make_mesh(tuple(sizes.values()), tuple(sizes))
        plan = sf.strategy(name, p, mesh, base=base_of(name, p))
        step, args = placed_step(plan, mesh, p)
        sent = Counter[tuple[str, str]]()
        for c in step.lower(*args).collectives:
            sent[c.kind, c.axis] += c.nbytes
        assert sent == wanted
        found = sf.full(step(*args))
    assert_close(found, step_of(plan)(*inputs(plan, p)))


def _on_a_rank(name: str) -> Any:
    p = params()
    mesh = sf.make_mesh((2,), ("dp",))
    plan = sf.strategy(name, p, mesh)
    step, args = placed_step(plan, mesh, p)
    found = step(*args)
    held = found[1]["up"]["exp_avg"].to_local().numel()
    return sf.full(found), held, plan


def test_two_processes_hold_half_of_the_state_of_zero2() -> None:
    p = params()
    for found, held, plan in run_ranks(2, _on_a_rank, "zero2"):
        assert held == FEATURES * HIDDEN // 2
        assert_close(found, step_of(plan)(*inputs(plan, p)))


def peak_of(layers: int) -> tuple[Any, int]:
    """The memory of a step of zero3 with a bucket for each layer, and the bytes of a layer's
    weights and activations that a rank keeps.
    """
    shape = sf.ShapeDtype((FEATURES, FEATURES))
    p = {f"w{i}": shape for i in range(layers)}
    rows = 4 * FEATURES

    def loss_fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        for w in p.values():
            x = torch.sin(x @ w)
        return x.square().mean()

    with sf.fake_world(4):
        mesh = sf.make_mesh((4,), ("dp",))
        plan = sf.strategy("zero3", p, mesh)
        cap = FEATURES * FEATURES * 4
        grad = sf.bucketed_grad(loss_fn, cap=cap, first_cap=cap)
        step = sf.shard(grad, mesh, (plan.params, plan.batch), backend="aten")
        memory = step.lower(p, sf.ShapeDtype((rows, FEATURES))).memory
    shards = 2 * FEATURES * FEATURES // 4  # of the weight and of its gradient
    activations = 2 * rows // 4 * FEATURES  # of the product and of the sine
    return memory, (shards + activations) * 4


def test_zero3_holds_the_gathered_parameters_of_as_many_layers_however_deep() -> None:
    (small, layer), (large, _) = peak_of(3), peak_of(6)
    assert large.of("collectives") == small.of("collectives")
    assert large.peak - small.peak <= 3 * layer


def test_a_run_goes_on_with_another_strategy_on_another_mesh(tmp_path: Path) -> None:
    p = params()
    with sf.fake_world(4):
        mesh = sf.make_mesh((4,), ("dp",))
        first = sf.strategy("zero3", p, mesh)
        step, (_, _, *data) = placed_step(first, mesh, p)
        new, state, _ = step(p, OPT.init(p), *data)
        sf.save(tmp_path, {"p": new, "state": state})
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        plan = sf.strategy("zero1", p, mesh)
        step, (like, state, *data) = placed_step(plan, mesh, p)
        found = sf.load(tmp_path, {"p": like, "state": state})
        found = sf.full(step(found["p"], found["state"], *data))
    p, state, *data = inputs(first, p)
    for _ in range(2):
        p, state, loss = step_of(first)(p, state, *data)
    assert_close(found, (p, state, loss))


def test_strategies_join_by_base() -> None:
    p = params()
    with sf.fake_world(6):
        mesh = sf.make_mesh((3, 2), ("dp", "tp"))
        tensor = sf.placements(p, TENSOR_PARALLEL, default=P())
        sequence = sf.strategy("sequence", p, mesh, base=tensor)
        assert (sequence.batch, sequence.activations) == (P(), P(None, "tp"))
        plan = sf.strategy("zero1", p, mesh, base=sequence, min_bytes="1KB")
        assert plan.params == plan.grads == tensor
        assert plan.state == {
            "embed": P("dp"),
            "norm": P(),
            "up": P("dp", "tp"),
            "down": P("tp", "dp"),
        }
        assert (plan.batch, plan.activations) == (P("dp"), P("dp", "tp"))
        step, args = placed_step(plan, mesh, p)
        found = sf.full(step(*args))
    assert_close(found, step_of(plan)(*inputs(plan, p)))
    sizes = "params 96.5 KiB, grads 96.5 KiB, state 33.5 KiB, of Adam's two moments 67.0 KiB"
    assert str(plan).splitlines() == [
        "zero1: batch P('dp'), activations P('dp', 'tp')",
        f"  bytes a rank: {sizes}",
    ]


REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "another name": (
        ("zero4",),
        {},
        "strategy, name: it is 'zero4'\n"
        "  needed: 'ddp' or 'zero1' or 'zero2' or 'zero3' or 'hsdp' or 'tensor' or 'sequence' or "
        "'context' or 'expert' or 'pipeline'\n"
        "  try: 'zero3'",
    ),
    "a mesh without its axis": (
        ("hsdp",),
        {},
        "strategy('hsdp'), axis: axis names 'replica', but the mesh has (dp=2, tp=2)\n"
        "  try: 'dp' or 'tp'",
    ),
    "one axis of two": (
        ("hsdp",),
        {"axis": "dp"},
        "strategy('hsdp'), axis: it is 'dp'\n"
        "  needed: two mesh axes: the first replicates, the second shards\n"
        "  try: axis=('replica', 'dp')",
    ),
    "two axes of one": (
        ("zero1",),
        {"axis": ("dp", "tp")},
        "strategy('zero1'), axis: it is ('dp', 'tp')\n  needed: one mesh axis\n  try: axis='dp'",
    ),
    "no axis": (
        ("zero1",),
        {"axis": []},
        "strategy('zero1'), axis: it is []\n  needed: a name, or a tuple of distinct names",
    ),
    "an axis twice": (
        ("hsdp",),
        {"axis": ("dp", "dp")},
        "strategy('hsdp'), axis: it is ('dp', 'dp')\n"
        "  needed: a name, or a tuple of distinct names",
    ),
    "tensor parallelism without a plan": (
        ("tensor",),
        {},
        "strategy('tensor'), base: base shards no parameter over 'tp'\n  needed: placements "
        "such as those from a model's tp_plan\n  try: base=sf.placements(params, "
        "model.tp_plan, axis='tp')",
    ),
    "expert parallelism without a plan": (
        ("expert",),
        {"axis": "tp"},
        "strategy('expert'), base: base shards no parameter over 'tp'\n  needed: placements "
        "such as those from a model's ep_plan\n  try: base=sf.placements(params, "
        "model.ep_plan, axis='tp')",
    ),
    "rows of another strategy": (
        ("ddp",),
        {"rows": 4},
        "strategy('ddp'), rows: it is 4\n"
        '  needed: a number of rows, 1 or more, or text such as "1.5x", for kind "expert"\n'
        '  try: sf.strategy("expert", params, mesh, base=base, rows="1.5x")',
    ),
    "attention of another strategy": (
        ("ddp",),
        {"attention": {"dp": "ring"}},
        "strategy('ddp'), attention: it is {'dp': 'ring'}\n  needed: a dict with a method of "
        "attention for the \"context\" axis 'cp'\n  try: attention={'cp': 'ring'}",
    ),
    "attention over another axis": (
        ("context",),
        {"axis": "tp", "attention": {"dp": "ring"}},
        "strategy('context'), attention: it is {'dp': 'ring'}\n  needed: a dict with a method "
        "of attention for the \"context\" axis 'tp'\n  try: attention={'tp': 'ring'}",
    ),
    "an unknown way of attention": (
        ("context",),
        {"axis": "tp", "attention": {"tp": "rings"}},
        "strategy('context'), attention: attention['tp'] is 'rings'\n"
        "  needed: a dict of mesh axes, each with 'gather' or 'ring' or 'ulysses'\n"
        "  try: attention={'tp': 'ring'}",
    ),
    "a base that does not fit": (
        ("zero1",),
        {"base": {"w": P("dp", None, None)}},
        "strategy('zero1'), base: w: P('dp', None, None) names dim 2 of a tensor with 2 dims, "
        "shape (4, 4)\n  try: give placements that fit each parameter",
    ),
    "no number of bytes": (
        ("zero1",),
        {"min_bytes": "x"},
        "strategy('zero1'), min_bytes: 'x' is not a number of bytes\n  try: give a number of "
        "bytes, or text such as '100KB'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    args, options, text = REFUSED[case]
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        with pytest.raises(sf.ShardError) as error:
            sf.strategy(*args, {"w": torch.ones(4, 4)}, mesh, **options)
    assert without_line(error.value) == text


def test_a_context_shards_the_sequence_of_inputs_and_says_how_attention_is_sharded() -> None:
    params = {"w": sf.ShapeDtype((4, 4))}
    with sf.fake_world(8):
        mesh = sf.make_mesh((2, 4), ("dp", "cp"))
        plain = sf.strategy("context", params, mesh)
        ring = sf.strategy("context", params, mesh, attention={"cp": "ring"})
        both = sf.strategy("zero3", params, mesh, base=ring)
        other = sf.strategy("context", params, mesh, base=sf.strategy("ddp", params, mesh))
    assert (plain.batch, plain.activations) == (P(None, "cp"), P(None, "cp"))
    assert (plain.params["w"], plain.attention) == (P(), None)
    assert both.params["w"] == P("dp") and both.attention == ring.attention == {"cp": "ring"}
    assert both.batch == both.activations == other.batch == P("dp", "cp")


@pytest.mark.parametrize("way", [None, "ring", "gather"])
def test_a_step_of_a_decoder_on_a_sharded_context_is_that_of_one_device(way: str | None) -> None:
    generator = torch.Generator().manual_seed(3)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64) / 3
    params = {"embed": make(11, 16), "qkv": make(16, 24), "out": make(16, 11)}
    tokens = torch.randint(0, 11, (2, 9), generator=generator)

    def loss_fn(params: Any, tokens: Any, targets: Any) -> Any:
        x = params["embed"][tokens]
        q, k, v = (x @ params["qkv"]).split([16, 4, 4], -1)
        q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (q, k, v))
        attend = torch.nn.functional.scaled_dot_product_attention
        y = attend(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        logits = (x + y) @ params["out"]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    args = (params, tokens, tokens.roll(-1, 1))
    with sf.fake_world(6):
        mesh = sf.make_mesh((2, 3), ("dp", "cp"))
        ddp = sf.strategy("ddp", params, mesh)
        attention = None if way is None else {"cp": way}
        plan = sf.strategy("context", params, mesh, base=ddp, attention=attention)
        placed = (plan.params, plan.batch, plan.batch)
        run = sf.bucketed_grad(loss_fn)
        step = sf.shard(run, mesh, placed, backend="aten", attention=plan.attention)
        found = sf.full(step(*args))
        kinds = {x.kind for x in step.lower(*args).collectives}
    assert_close(found, torch.func.grad_and_value(loss_fn)(*args)[::-1])
    assert ("ppermute" in kinds) == (way == "ring")


def test_experts_have_rows_and_their_axis_shards_the_batch_too() -> None:
    params = {"up": sf.ShapeDtype((4, 2, 2)), "w": sf.ShapeDtype((4, 4))}
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "ep"))
        base = sf.strategy("zero3", {"up": params["up"], "w": params["w"]}, mesh)
        assert base.rows is None
        whole = {"up": P("ep"), "w": P()}
        experts = sf.strategy("expert", params, mesh, base=whole, rows="1.5x")
        both = sf.strategy("zero3", params, mesh, base=experts)
    assert experts.params["up"] == P("ep") and experts.batch == P("ep")
    assert both.params["up"] == P("ep", "dp") and both.batch == P(("dp", "ep"))
    assert both.rows == experts.rows == {"ep": "1.5x"}
