"""checkpoint: the same values under every transform, on every mesh; less kept, computed again;
each policy's effect counted.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable
from typing import Any

import models
import pytest
import schemes
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from message import without_line
from ranks import run_ranks
from stagings import counts
from torch import Tensor, nn
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P, checkpoint_policies

G = torch.Generator().manual_seed(7)
W = [torch.randn(3, 3, generator=G, dtype=torch.float64) for _ in range(3)]
X, V = (torch.randn(5, 3, generator=G, dtype=torch.float64) for _ in range(2))

POLICIES = {
    "none given": None,
    "nothing": checkpoint_policies.nothing_saveable,
    "everything": checkpoint_policies.everything_saveable,
    "dots": checkpoint_policies.dots_saveable,
    "dots without batch": checkpoint_policies.dots_with_no_batch_dims_saveable,
    "only h": checkpoint_policies.save_only_these_names("h"),
    "all but h": checkpoint_policies.save_anything_except_these_names("h"),
    "names but h": checkpoint_policies.save_any_names_but_these("h"),
    "dots or a": checkpoint_policies.save_from_both_policies(
        "dots_saveable", checkpoint_policies.save_only_these_names("a")
    ),
}


def layer(w: Tensor, x: Tensor) -> Tensor:
    h = sf.checkpoint_name(x @ w, "h")
    return sf.checkpoint_name(torch.tanh(h), "a") * x.sin()


def tower(w: Any, x: Tensor, through: Callable[..., Tensor] = layer) -> Tensor:
    for one in w:
        x = through(one, x)
    return x


def loss(w: Any, x: Tensor, through: Callable[..., Tensor] = layer) -> Tensor:
    return tower(w, x, through).square().mean()


def plain(w: Any, x: Tensor) -> Tensor:
    """`loss` in torch alone."""
    for one in w:
        x = torch.tanh(x @ one) * x.sin()
    return x.square().mean()


def remat(policy: str | None = None, fn: Callable[..., Any] = loss) -> Any:
    """A function of (w, x) whose layers are checkpointed."""
    return functools.partial(fn, through=sf.checkpoint(layer, policy=policy))


def close(got: Any, wanted: Any) -> None:
    sf.tree_map(lambda a, b: assert_close(a, b, rtol=1e-12, atol=1e-12), got, wanted)


def targets(program: Any) -> collections.Counter[str]:
    """How often each op stands in a global or local program."""
    graph = getattr(program.graph, "graph", program.graph)
    return collections.Counter(
        getattr(n.target, "_opname", "") for n in graph.nodes if n.op == "call_function"
    )


def squared(fn: Callable[..., Any]) -> Callable[..., Tensor]:
    """The squares of a gradient, summed."""
    return lambda w, x: sum((g * g).sum() for g in fn(w, x))


W_, X_ = tuple(W), X
# each of a function, by `sf` or by `torch.func`
TRANSFORMS: dict[str, Callable[[Any, Any], Any]] = {
    "grad": lambda m, f: m.grad(f)(W_, X),
    "value_and_grad": lambda m, f: values_first(m, f)(W_, X),
    "bucketed_grad": lambda m, f: (
        sf.bucketed_grad(f)(W_, X) if m is sf else values_first(m, f)(W_, X)
    ),
    "both arguments": lambda m, f: m.grad(f, argnums=(0, 1))(W_, X),
    "jvp": lambda m, f: m.jvp(f, (W_, X), (W_[::-1], V)),
    "jvp of grad": lambda m, f: m.jvp(m.grad(f), (W_, X), (W_[::-1], V)),
    "vmap": lambda m, f: m.vmap(f, (None, 0))(W_, X[:, None]),
    "vmap of grad": lambda m, f: m.vmap(m.grad(f), (None, 0))(W_, X[:, None]),
    "grad of vmap": lambda m, f: m.grad(lambda w, x: m.vmap(f, (None, 0))(w, x).sum())(
        W_, X[:, None]
    ),
    "grad of grad": lambda m, f: m.grad(squared(m.grad(f)))(W_, X),
    "jacrev": lambda m, f: m.jacrev(f, argnums=1)(W_, X),
    "jacfwd": lambda m, f: m.jacfwd(f, argnums=1)(W_, X),
    "hessian": lambda m, f: m.hessian(f, argnums=1)(W_, X),
    "vjp": lambda m, f: m.vjp(f, W_, X)[1](torch.tensor(2.0, dtype=torch.float64)),
}


def values_first(m: Any, f: Callable[..., Any]) -> Callable[..., Any]:
    if m is sf:
        return sf.value_and_grad(f)
    return lambda *args: torch.func.grad_and_value(f)(*args)[::-1]


@pytest.mark.parametrize("policy", ["none given", "dots", "all but h"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_no_transform_sees_a_difference(transform: str, policy: str) -> None:
    run = TRANSFORMS[transform]
    close(run(sf, remat(POLICIES[policy])), run(torch.func, plain))


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_changes_a_value(policy: str) -> None:
    close(
        sf.value_and_grad(remat(POLICIES[policy]))(W_, X),
        torch.func.grad_and_value(plain)(W_, X)[::-1],
    )


@pytest.mark.parametrize("transform", ["value_and_grad", "grad of grad", "vmap of grad", "hessian"])
def test_a_checkpoint_around_the_whole_function_changes_nothing(transform: str) -> None:
    run = TRANSFORMS[transform]
    close(run(sf, sf.checkpoint(loss)), run(torch.func, plain))
    close(run(sf, sf.checkpoint(remat())), run(torch.func, plain))


def test_called_alone_it_just_computes() -> None:
    close(sf.checkpoint(layer)(W[0], X), torch.tanh(X @ W[0]) * X.sin())
    assert targets(sf.checkpoint(layer).trace(W[0], X).program) == {
        "mm": 1,
        "tanh": 1,
        "sin": 1,
        "mul": 1,
    }


def test_it_is_a_decorator_with_and_without_a_policy() -> None:
    @sf.checkpoint
    def one(x: Tensor) -> Tensor:
        return x.sin()

    @sf.checkpoint(policy=checkpoint_policies.everything_saveable)
    def two(x: Tensor) -> Tensor:
        return x.sin()

    close(sf.grad(lambda x: one(two(x)).sum())(X), X.sin().cos() * X.cos())
    assert repr(one) == "checkpoint(one)" and two.policy == "everything_saveable"


def test_trees_keywords_and_results_that_are_no_tensors_pass_through() -> None:
    fn = lambda tree, *, k: {"y": (tree["a"] * tree["b"][0]).sin() * k, "k": k}
    got = sf.grad(
        lambda a, b: sf.checkpoint(fn)({"a": a, "b": [b]}, k=3)["y"].sum(), argnums=(0, 1)
    )(X, V)
    close(got, (3 * (X * V).cos() * V, 3 * (X * V).cos() * X))


# What a layer asks for, three times: one product in the forward; two in the backward, but one
# in that of the first layer.
FORWARD, BACKWARD, AGAIN = 3, 5, 3
COUNTS = {  # policy -> (products, tanhs, sines) in the program of the gradient
    "none given": (FORWARD + BACKWARD + AGAIN, 6, 6),
    "nothing": (FORWARD + BACKWARD + AGAIN, 6, 6),
    "everything": (FORWARD + BACKWARD, 3, 3),
    "dots": (FORWARD + BACKWARD, 6, 6),
    "dots without batch": (FORWARD + BACKWARD, 6, 6),
    "only h": (FORWARD + BACKWARD, 6, 6),
    "all but h": (FORWARD + BACKWARD, 3, 3),  # h is not kept, and nobody needs it: its tanh is
    "names but h": (FORWARD + BACKWARD, 3, 6),
    "dots or a": (FORWARD + BACKWARD, 3, 6),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_computes_again_what_it_does_not_keep_and_no_more(policy: str) -> None:
    found = targets(sf.grad(remat(POLICIES[policy])).trace(W_, X).program)
    assert (found["mm"], found["tanh"], found["sin"]) == COUNTS[policy]


def test_a_value_that_a_policy_excludes_is_computed_again() -> None:
    def fn(x: Tensor) -> Tensor:
        return sf.checkpoint_name(x.exp(), "e").sin().sum()

    found = {
        p: targets(sf.grad(sf.checkpoint(fn, policy=p)).trace(X).program)["exp"]
        for p in (
            checkpoint_policies.save_anything_except_these_names("e"),
            checkpoint_policies.save_anything_except_these_names("other"),
            checkpoint_policies.save_only_these_names("e", "other"),
            checkpoint_policies.save_only_these_names(),
            checkpoint_policies.save_any_names_but_these("e"),
            checkpoint_policies.save_any_names_but_these(),
        )
    }
    assert list(found.values()) == [2, 1, 1, 2, 2, 1]


def test_a_name_counts_for_what_a_view_looks_at() -> None:
    fn = lambda x, w: sf.checkpoint_name((x @ w).reshape(3, 5).t(), "h").sin().sum()
    kept, lost = (
        sf.checkpoint(fn, policy=p)
        for p in (
            checkpoint_policies.save_only_these_names("h"),
            checkpoint_policies.save_anything_except_these_names("h"),
        )
    )
    assert [targets(sf.grad(f).trace(X, W[0]).program)["mm"] for f in (kept, lost)] == [2, 3]


def test_products_of_batches_are_told_from_those_of_matrices() -> None:
    fn = lambda x, w: (
        torch.einsum("bij,bjk->bik", torch.einsum("bij,jk->bik", x, w).sin(), x).sin().sum()
    )
    x = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = {}
    for policy in ("everything", "nothing", "dots", "dots without batch"):
        c = targets(
            sf.grad(sf.checkpoint(fn, policy=POLICIES[policy]), argnums=(0, 1))
            .trace(x, W[0])
            .program
        )
        found[policy] = c["mm"] + c["bmm"]
    least = found["everything"]
    assert found == {
        "everything": least,
        "nothing": least + 2,
        "dots": least,
        "dots without batch": least + 1,
    }


def test_checkpoint_name_leaves_nothing_in_the_program() -> None:
    with simulated(dp=2) as mesh:
        step = sf.shard(sf.grad(loss), mesh, (P(), P("dp")), backend="aten")
        found = targets(step.lower(W_, X).program)
    assert not {"prim_name", "clone", "alias", "after"} & set(found)
    tree = {"a": X, "b": (1, V)}
    assert sf.checkpoint_name(tree, "t") is tree
    close(
        sf.grad(lambda x: sf.checkpoint_name({"a": x, "k": 2}, "t")["a"].sum())(X),
        torch.ones_like(X),
    )


def test_every_call_is_a_call_of_its_own_and_keeps_its_own_input() -> None:
    kept = sf.saved_residuals(functools.partial(tower, through=sf.checkpoint(layer)), W_, X)
    assert [r.why for r in kept if not r.why.startswith("argument")] == ["output of aten.mul"] * 2


def test_an_inner_call_is_computed_again_for_the_outer_one_and_for_itself() -> None:
    inner = sf.checkpoint(layer)
    pair = lambda u, v, x: inner(v, inner(u, x))
    grads = {}
    for name, fn in {
        "inner": pair,
        "outer": sf.checkpoint(lambda u, v, x: layer(v, layer(u, x))),
        "both": sf.checkpoint(pair),
    }.items():
        made = sf.grad(lambda w, x, fn=fn: fn(w[0], w[1], x).square().mean())
        close(made(W_[:2], X), torch.func.grad(plain)(W_[:2], X))
        grads[name] = targets(made.trace(W_[:2], X).program)["tanh"]
    # both: two in the forward; the outer call's backward needs the first layer's result; then
    # each layer's own
    assert grads == {"inner": 4, "outer": 4, "both": 5}


def test_the_outer_policy_says_what_is_kept_and_the_inner_one_what_is_computed_once() -> None:
    inner = sf.checkpoint(layer, policy=checkpoint_policies.everything_saveable)
    outer = sf.checkpoint(lambda u, v, x: inner(v, inner(u, x)))
    made = sf.grad(lambda w, x: outer(w[0], w[1], x).square().mean())
    close(made(W_[:2], X), torch.func.grad(plain)(W_[:2], X))
    assert targets(made.trace(W_[:2], X).program)["tanh"] == 4


def test_a_gradient_inside_a_checkpoint_is_computed_again_with_its_backward() -> None:
    g = sf.checkpoint(sf.grad(lambda x: x.sin().exp().sum()))
    outer = lambda x: (g(x) * x).sum()
    close(
        sf.grad(outer)(X),
        torch.func.grad(lambda x: (torch.func.grad(lambda x: x.sin().exp().sum())(x) * x).sum())(X),
    )
    kept = sf.saved_residuals(lambda x: g(x) * x, X)
    assert [r.why for r in kept if r.is_activation] == [
        "output of aten.mul"
    ]  # g(x), which the product needs


def test_random_numbers_are_kept_and_not_drawn_again() -> None:
    fn = sf.checkpoint(lambda x: F.dropout(x.exp(), 0.5))
    made = sf.value_and_grad(lambda x: (fn(x) * x).sum(), has_aux=False)
    ones = torch.ones(64, dtype=torch.float64)
    value, grad = made(ones)
    close(grad.sum(), value * 2)  # (m e^x x)' = m e^x (1 + x), with one mask m
    assert 0 < (grad != 0).sum() < 64


# On meshes

WORLDS: dict[str, tuple[dict[str, int], str, Any]] = {
    "data parallel 2": ({"dp": 2}, "replicated", P("dp")),
    "data parallel 3": ({"dp": 3}, "replicated", P("dp")),
    "fully sharded 2": ({"dp": 2}, "fully_sharded", P("dp")),
    "fully sharded 3": ({"dp": 3}, "fully_sharded", P("dp")),
    "tensor parallel 3": ({"tp": 3}, "tensor_parallel", P()),
    "2 x 4": ({"dp": 2, "tp": 4}, "tensor_parallel", P("dp")),
    "some ranks without rows": ({"dp": 5}, "fully_sharded", P("dp")),
    "2 x 4 mixed": ({"dp": 2, "tp": 4}, "mixed", P("dp")),
}


def gpt_block(layer: Any, h: Tensor) -> Tensor:
    n = models._norm(h, layer["ln1"])
    q, k, v = (models._heads(n @ layer[name]) for name in "qkv")
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    h = h + a.transpose(1, 2).reshape(h.shape) @ layer["o"]
    return h + F.gelu(models._norm(h, layer["ln2"]) @ layer["up"]) @ layer["down"]


def gpt_loss(params: Any, x: Tensor, y: Tensor, *, through: Callable[..., Tensor]) -> Tensor:
    h = F.embedding(x, params["tok"]) + params["pos"]
    for one in params["layers"]:
        h = through(one, h)
    return F.cross_entropy(
        (models._norm(h, params["ln"]) @ params["head"]).flatten(0, 1), y.flatten()
    )


@functools.cache  # one function for all worlds, which share its capture
def gpt_step(policy: str | None) -> Any:
    return models.sgd_step(
        functools.partial(gpt_loss, through=sf.checkpoint(gpt_block, policy=policy))
    )


def place(
    axes: dict[str, int], scheme: str, batch: Any, fn: Any, params: Any, backend: str = "aten"
) -> Any:
    mesh = sf.make_mesh(tuple(axes.values()), tuple(axes))
    return sf.shard(fn, mesh, (getattr(schemes, scheme)(params), batch, batch), backend=backend)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("policy", ["nothing", "dots"])
def test_sharded_steps_of_checkpointed_blocks_equal_one_device(world: str, policy: str) -> None:
    axes, scheme, batch = WORLDS[world]
    params, (x, y) = models.gpt_params(), models.tokens()
    n = functools.reduce(lambda a, b: a * b, axes.values())
    with sf.fake_world(n):
        got = sf.full(place(axes, scheme, batch, gpt_step(POLICIES[policy]), params)(params, x, y))
    close(got, models.oracle(models.gpt_loss, params, x, y))


@pytest.mark.parametrize("outside", [True, False])
def test_a_checkpoint_of_a_sharded_function_and_a_sharded_checkpoint_are_one(outside: bool) -> None:
    with simulated(dp=3) as mesh:
        place_it = lambda f: sf.shard(f, mesh, (P(None, "dp"), P("dp")), backend="aten")
        through = sf.checkpoint(place_it(layer)) if outside else place_it(sf.checkpoint(layer))
        close(
            sf.grad(functools.partial(loss, through=through))(W_, X), torch.func.grad(plain)(W_, X)
        )


W2, X2 = (
    torch.randn(6, 12, generator=G, dtype=torch.float64),
    torch.randn(6, 6, generator=G, dtype=torch.float64),
)
GATHERING: dict[
    str, tuple[Any, Callable[[Tensor, Tensor], Tensor]]
] = {  # placements, and a call that gathers once
    "fully sharded": ((P("a"), P("a")), lambda w, x: (x @ w).tanh().sum(1)),
    "gathered activations": (
        (P(None, "a"), P("a")),
        lambda w, x: (sf.constrain(x.sin(), P()) @ w).tanh().sum(1),
    ),
}


@pytest.mark.parametrize("kind", GATHERING)
@pytest.mark.parametrize("n", [2, 3])
def test_a_gather_is_done_twice_and_kept_never(kind: str, n: int) -> None:
    placed, fn = GATHERING[kind]
    step = lambda w, x, through=fn: through(w, x).sin().square().sum()
    with simulated(a=n) as mesh:
        made = sf.shard(
            sf.grad(functools.partial(step, through=sf.checkpoint(fn)), argnums=(0, 1)),
            mesh,
            placed,
            backend="aten",
        )
        close(sf.full(made(W2, X2)), torch.func.grad(step, argnums=(0, 1))(W2, X2))
        graph = made.lower(W2, X2).program.graph
    gathers = [
        node for node in graph.nodes if is_gather(node) and node.meta["collective"].nbytes > 6 * 8
    ]
    assert [node.meta["phase"] for node in gathers] == ["forward", "backward"]
    assert kept_gathers(graph) == []


def is_gather(node: torch.fx.Node) -> bool:
    return "collective" in node.meta and node.meta["collective"].kind == "all_gather"


def kept_gathers(graph: torch.fx.Graph) -> list[str]:
    """The backward nodes that read what a forward gather made, or a view of it."""
    made = {node for node in graph.nodes if is_gather(node) and node.meta["phase"] == "forward"}
    found = []
    for node in graph.nodes:
        if made & set(node.all_input_nodes):
            if node.meta["phase"] == "backward":
                found.append(node.name)
            elif getattr(node.target, "is_view", False) or "wait" in node.name:
                made.add(node)
    return found


def test_without_a_checkpoint_gathered_activations_are_kept() -> None:
    """So that the test above can fail."""
    fn = lambda w, x: GATHERING["gathered activations"][1](w, x).square().sum()
    with simulated(a=3) as mesh:
        low = {
            f: sf.shard(sf.grad(f, argnums=(0, 1)), mesh, (P(None, "a"), P("a"))).lower(W2, X2)
            for f in (
                fn,
                sf.checkpoint(fn),
                sf.checkpoint(fn, policy=checkpoint_policies.everything_saveable),
            )
        }
    assert [bool(kept_gathers(one.program.graph)) for one in low.values()] == [True, False, True]


def test_a_fully_sharded_block_gathers_each_weight_once_in_each_phase() -> None:
    params, (x, y) = models.gpt_params(1), models.tokens(8)
    with sf.fake_world(2):
        low = place({"dp": 2}, "fully_sharded", P("dp"), gpt_step(None), params).lower(params, x, y)
    sent = [
        node
        for node in low.program.graph.nodes
        if is_gather(node) and node.meta["collective"].nbytes >= 5 * 6 * 8
    ]
    matrices = collections.Counter(node.meta["phase"] for node in sent)
    assert matrices["forward"] == 9, "tok, pos, q, k, v, o, up, down, head"
    assert matrices["backward"] == 7, "all but tok and pos, whose gradients do not need them"


def test_the_barrier_is_nothing_that_is_computed_whole() -> None:
    with simulated(dp=2) as mesh:
        low = sf.shard(sf.grad(remat()), mesh, (P(), P("dp")), implicit_comm="error").lower(W_, X)
    assert low.fallbacks == () and "after" in targets(low.program)
    assert [(c.kind, c.implicit) for c in low.collectives] == [("all_reduce", False)] * 3


def test_microbatches_of_checkpointed_calls_add_up() -> None:
    rows = torch.cat([X, V])
    step = sf.accumulate(sf.value_and_grad(remat()), microbatches=2)
    close(step(W_, rows), torch.func.grad_and_value(plain)(W_, rows)[::-1])
    assert targets(step.trace(W_, rows).program)["tanh"] == 12


def test_it_composes() -> None:
    both = sf.compose(sf.checkpoint(policy=checkpoint_policies.dots_saveable), sf.value_and_grad)
    close(both(loss)(W_, X), torch.func.grad_and_value(plain)(W_, X)[::-1])


def test_the_peak_of_a_deep_program_falls() -> None:
    w = tuple(W * 4)
    with simulated(dp=2) as mesh:
        x = torch.ones(64, 3, dtype=torch.float64)
        low = [sf.shard(sf.grad(f), mesh, (P(), P("dp"))).lower(w, x) for f in (loss, remat())]
    kept, again = (one.schedule.peak_after for one in low)
    assert again < 0.6 * kept


def test_a_second_call_captures_nothing() -> None:
    made = sf.grad(remat())
    made(W_, X)
    before = dict(counts)
    made(W_, X)
    sf.grad(
        functools.partial(loss, through=sf.checkpoint(layer))
    )  # written out anew it is another partial
    assert dict(counts) == before


# Compiled, on real ranks


def on_ranks() -> Any:
    """(results, products in the code, barriers in the code) of each step on this rank."""
    mesh, found = sf.make_mesh((2,), ("dp",)), {}
    for policy, backend in (
        ("nothing", "inductor"),
        ("everything", "inductor"),
        ("nothing", "aten"),
    ):
        step = sf.shard(
            sf.value_and_grad(remat(POLICIES[policy])), mesh, (P("dp"), P("dp")), backend=backend
        )
        code = step.compile(W_, X).code
        found[policy, backend] = (
            sf.full(step(W_, X)),
            code.count(".mm(") + code.count(".addmm("),
            code.count("  # after buf"),
        )
    return found


def donated() -> Any:
    """Two steps of a function of its donated argument, which the backward reads behind the
    barrier; with and without a mesh.
    """
    fn = sf.checkpoint(lambda w: w.exp().sin())
    step = lambda w: w - 0.1 * sf.grad(lambda w: (fn(w).sin() * V).sum())(w)
    mesh = sf.make_mesh((2,), ("dp",))
    made = sf.shard(step, mesh, (P("dp"),), donate_argnums=(0,))
    w = sf.distribute(X.clone(), mesh, P("dp"))
    assert "  # after buf" in made.compile(w).code
    return sf.full(made(made(w))), step(step(X))


def test_compiled_code_computes_again_on_real_ranks() -> None:
    for found in run_ranks(2, on_ranks):
        for got, _, _ in found.values():
            close(got, torch.func.grad_and_value(plain)(W_, X)[::-1])
        (_, again, barriers), (_, once, none) = (
            found["nothing", "inductor"],
            found["everything", "inductor"],
        )
        assert (once, again) == (FORWARD + BACKWARD, FORWARD + BACKWARD + AGAIN)
        assert (none, barriers) == (0, 3)


def test_a_donated_argument_is_read_again_before_it_is_overwritten() -> None:
    for got, wanted in run_ranks(2, donated):
        close(got, wanted)


# torch.utils.checkpoint


@pytest.mark.parametrize("transform", ["value_and_grad", "bucketed_grad", "jvp of grad"])
def test_torchs_own_checkpoint_is_ours(transform: str) -> None:
    theirs = functools.partial(
        loss,
        through=lambda w, x: torch.utils.checkpoint.checkpoint(layer, w, x, use_reentrant=False),
    )
    run = TRANSFORMS[transform]
    close(run(sf, theirs), run(torch.func, plain))
    assert targets(sf.grad(theirs).trace(W_, X).program) == targets(
        sf.grad(remat()).trace(W_, X).program
    )


@pytest.mark.parametrize("segments", [1, 2, 3, 5])
def test_checkpoint_sequential_is_a_chain_of_calls(segments: int) -> None:
    """All segments but the last compute again. By a module, by a list, and from outside."""
    layers = [nn.Linear(3, 3).double() for _ in range(5)]
    chain = nn.Sequential(*[nn.Sequential(layer, nn.Tanh()) for layer in layers])
    x = torch.randn(2, 3, dtype=torch.float64)
    of = torch.utils.checkpoint.checkpoint_sequential
    by_module = lambda x: of(chain, segments, x, use_reentrant=False).sum()
    by_list = lambda x: of(
        functions=list(chain),
        segments=segments,
        input=x,
        use_reentrant=True,
        preserve_rng_state=False,
    ).sum()
    wanted = torch.func.grad(lambda x: chain(x).sum())(x)
    again = 5 // segments * (segments - 1)
    for fn in (by_module, by_list):
        close(sf.jit(sf.grad(fn), backend="aten")(x), wanted)
        assert targets(sf.grad(fn).trace(x).program)["tanh"] == 5 + again
    found = torch.autograd.grad(sf.jit(by_module, backend="aten")(x), layers[0].weight)
    close(found, torch.autograd.grad(by_module(x), layers[0].weight))


@pytest.mark.parametrize("segments", [0, 3, "2"])
def test_segments_without_functions_are_refused(segments: Any) -> None:
    of = torch.utils.checkpoint.checkpoint_sequential
    fn = sf.jit(lambda x: of([torch.sin] * 2, segments, x, use_reentrant=False))
    with pytest.raises(sf.CaptureError) as caught:
        fn(torch.ones(2))
    text = f"checkpoint_sequential, segments: segments is {segments!r} for 2 functions"
    assert text in str(caught.value)
    assert "try: segments=1, or at most as many" in str(caught.value)


def test_torchs_own_checkpoint_nests_with_ours() -> None:
    theirs = lambda fn: (
        lambda w, x: torch.utils.checkpoint.checkpoint(fn, w, x, use_reentrant=False)
    )
    pair = lambda one: lambda w, x: one(w, one(w, x))
    found = []
    for fn in (
        theirs(pair(sf.checkpoint(layer))),
        sf.checkpoint(pair(theirs(layer))),
        theirs(pair(theirs(layer))),
    ):
        made = sf.grad(lambda w, x, fn=fn: fn(w, x).square().mean())
        close(made(W[0], X), torch.func.grad(lambda w, x: plain((w, w), x))(W[0], X))
        found.append(targets(made.trace(W[0], X).program)["tanh"])
    assert found == [5, 5, 5]


# Refusals

CHOICES = (
    "everything_saveable, nothing_saveable, dots_saveable, checkpoint_dots, "
    "dots_with_no_batch_dims_saveable, "
    "checkpoint_dots_with_no_batch_dims; save_only_these_names, "
    "save_anything_except_these_names, save_any_names_but_these "
    "with names; or save_from_both_policies of two policies"
)
BAD: dict[str, tuple[Callable[[], Any], type[sf.ShardError], str]] = {
    "unknown": (
        lambda: sf.checkpoint(layer, policy="dots"),
        sf.ShardError,
        (
            "checkpoint, policy: the policy is dots\n  needed: one of checkpoint_policies\n "
            f" try: {CHOICES}"
        ),
    ),
    "names without a policy": (
        lambda: sf.checkpoint(policy="save('h')"),
        sf.ShardError,
        (
            "checkpoint, policy: the policy is save('h')\n  needed: one of "
            f"checkpoint_policies\n  try: {CHOICES}"
        ),
    ),
    "no Python": (
        lambda: sf.checkpoint(layer, policy="h h"),
        sf.ShardError,
        (
            "checkpoint, policy: the policy is h h\n  needed: one of checkpoint_policies\n  "
            f"try: {CHOICES}"
        ),
    ),
    "a function": (
        lambda: sf.checkpoint(layer, policy=checkpoint_policies.save_only_these_names),
        sf.TreeError,
        (
            "checkpoint, policy: a function\n  needed: a str\n  try: one of "
            "checkpoint_policies, such as dots_saveable"
        ),
    ),
    "a name that is none": (
        lambda: checkpoint_policies.save_only_these_names(3),
        sf.ShardError,
        (
            "save_only_these_names: the policy is save_only_these_names(3)\n  needed: one "
            f"of checkpoint_policies\n  try: {CHOICES}"
        ),
    ),
    "both of one": (
        lambda: checkpoint_policies.save_from_both_policies("h", "dots_saveable"),
        sf.ShardError,
        "save_from_both_policies: the policy is save_from_both_policies(h, dots_saveable)\n"
        f"  needed: one of checkpoint_policies\n  try: {CHOICES}",
    ),
    "not a function": (
        lambda: sf.checkpoint(3),
        sf.TreeError,
        "checkpoint: a int\n  needed: a function\n  try: checkpoint(fn, policy=...)",
    ),
    "not a name": (
        lambda: sf.checkpoint_name(X, 3),
        sf.TreeError,
        "checkpoint_name, name: a int\n  needed: a str\n  try: checkpoint_name(x, 'h')",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused_says_what_came_and_what_would_do(case: str) -> None:
    call, kind, text = BAD[case]
    with pytest.raises(kind) as caught:
        call()
    assert without_line(caught.value) == text and type(caught.value) is kind


def test_a_policy_that_is_wrong_inside_of_a_function_is_refused_alike() -> None:
    with pytest.raises(sf.ShardError) as caught:
        sf.grad(lambda x: sf.checkpoint(torch.sin, policy="dots")(x).sum())(X)
    assert without_line(caught.value) == BAD["unknown"][2]
    close(
        sf.grad(
            lambda x: sf.checkpoint(
                torch.sin, policy=checkpoint_policies.save_only_these_names("h")
            )(x).sum()
        )(X),
        X.cos(),
    )


contexts_of = torch.utils.checkpoint.create_selective_checkpoint_contexts
Policy = torch.utils.checkpoint.CheckpointPolicy
MM = torch.ops.aten.mm.default


def every_second() -> Any:
    """The contexts of a policy that counts, as torchtitan's."""
    count = 0

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        if op is not MM or args[0].shape[1] != args[1].shape[0]:
            return Policy.MUST_RECOMPUTE
        count += 1
        return Policy.PREFER_SAVE if count % 2 else Policy.PREFER_RECOMPUTE

    return contexts_of(policy)


CONTEXTS: dict[str, tuple[Any, int]] = {  # and the products that it saves
    "ops": (functools.partial(contexts_of, [MM]), 2),
    "a function": (functools.partial(contexts_of, lambda ctx, op, *args: op is MM), 2),
    "a function that counts": (every_second, 1),
    "a function made inside": (None, 2),
    "no op": (functools.partial(contexts_of, [torch.ops.aten.bmm.default]), 0),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_fn_of_torch_says_what_is_saved(name: str) -> None:
    context_fn, count = CONTEXTS[name]
    w, x = torch.randn(3, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    layer = lambda x: ((x @ w).sin() @ w).sin() @ w  # the last product is not read

    def loss(x: Any) -> Any:
        made = context_fn or (lambda: contexts_of([MM]))
        out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=made)
        return out.square().sum()

    wanted = torch.func.grad(lambda x: layer(x).square().sum())(x)
    close(sf.jit(sf.grad(loss), backend="aten")(x), wanted)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("a",))
        close(sf.full(sf.shard(sf.grad(loss), mesh, P("a"), backend="aten")(x)), wanted)
    saved = [str(line) for line in sf.saved_residuals(loss, x)]
    # the result is read by the loss, outside of the call
    assert sum("output of aten.mm" in line for line in saved) == count + 1


def raising(_: Any, op: Any, *args: Any) -> Any:
    raise ZeroDivisionError("of mine")


BAD_CONTEXTS: dict[str, tuple[Any, str]] = {
    "other contexts": (
        lambda: (contextlib.nullcontext(), contextlib.nullcontext()),
        "context_fn returns contexts that are not those of selective checkpointing",
    ),
    "offloading": (
        functools.partial(contexts_of, lambda *_: Policy.MUST_CPU_OFFLOAD),
        "its policy answers CheckpointPolicy.MUST_CPU_OFFLOAD for aten.sin.default",
    ),
    "a policy that raises": (
        functools.partial(contexts_of, raising),
        "the policy raises ZeroDivisionError for aten.sin.default: of mine",
    ),
}


@pytest.mark.parametrize("name", BAD_CONTEXTS)
def test_other_context_fns_are_refused_by_name(name: str) -> None:
    context_fn, got = BAD_CONTEXTS[name]
    fn = lambda x: torch.utils.checkpoint.checkpoint(
        torch.sin, x, use_reentrant=False, context_fn=context_fn
    ).sum()
    with pytest.raises(sf.CaptureError) as caught:
        sf.grad(fn)(X)
    assert str(caught.value).splitlines()[0] == f"torch.utils.checkpoint: {got}"
