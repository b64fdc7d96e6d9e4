"""Every refusal says which function, which argument, what it got and what to try; each text is
written out here.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional_collectives
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.testing import assert_close

import shardfn as sf
from shardfn import P

X = torch.ones(6, 4)
LOG: list[int] = []
HERE = re.compile(re.escape(__file__) + r":\d+")
FIT = (
    "  try: use placements that fit each tensor and the mesh, such as P('axis'), or None "
    "to keep the argument's placement"
)
PURE = "  needed: one pure graph of tensor ops"


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with sf.fake_world(8):
        yield


def mesh() -> Any:
    return sf.make_mesh((2, 4), ("dp", "tp"))


def sharded(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return sf.shard(fn, mesh(), *args, backend="aten", **options)


def refusal(kind: type[sf.ShardError], call: Callable[[], Any]) -> tuple[sf.ShardError, str]:
    """The error and its text, with HERE for lines of this file."""
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return caught.value, HERE.sub("HERE", str(caught.value))


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def scale(params: Any, batch: Any) -> Any:
    return batch["x"] * params["w"]


PLACEMENTS = {
    "unknown axis": (P("data"), "P('data') names axis 'data'; the mesh has (dp=2, tp=4)"),
    "missing dim": (
        P(None, None, "dp"),
        "P(None, None, 'dp') names dim 2 of a tensor with 2 dims, shape (6, 4)",
    ),
    "axis twice": (P("dp", "dp"), "P('dp', 'dp') uses axis 'dp' twice, for dims 0 and 1"),
    "blocks that do not fit": (
        P("tp*4"),
        "'tp*4' views dim 0 of size 6 as 4 equal blocks, so 4 must divide it; pad it by 2",
    ),
    "missing dim of Shard": (
        [Shard(5), Replicate()],
        "S(5) names dim 5 of a tensor with 2 dims, shape (6, 4)",
    ),
    "too few": (Shard(0), "1 placements [Shard(dim=0)] for a mesh of 2 axes (dp=2, tp=4)"),
    "no placement": ("dp", "'dp' is not a placement; write P('dp') or a torch Placement"),
    "pending": (
        [Partial(), Replicate()],
        (
            "a plain tensor is a global value, so its placement cannot be [Partial(sum), "
            "Replicate()]; use sf.from_local"
        ),
    ),
}


@pytest.mark.parametrize("case", list(PLACEMENTS))
def test_a_placement_that_does_not_fit(case: str) -> None:
    placement, said = PLACEMENTS[case]
    error, text = refusal(sf.PlacementError, lambda: sharded(double, (placement,))(X))
    assert text == f"shard(double), argument x: {said}\n  at: HERE\n{FIT}"
    assert error.arg_path == "x" and error.fix and HERE.match(error.source or "")


def test_all_placements_that_do_not_fit_are_listed_at_once() -> None:
    placements = ({"w": P("zz")}, {"x": P("dp", None, "tp")})
    error, text = refusal(sf.PlacementError, lambda: sharded(scale, placements)({"w": X}, {"x": X}))
    assert text == "\n".join([
        "shard(scale), 2 arguments: in_placements do not fit the arguments",
        "  params['w']: P('zz') names axis 'zz'; the mesh has (dp=2, tp=4)",
        "  batch['x']: P('dp', None, 'tp') names dim 2 of a tensor with 2 dims, shape (6, 4)",
        "  at: HERE",
        FIT,
    ])  # fmt: skip
    assert error.arg_path == "params['w']"


def test_a_tree_that_is_no_prefix_is_answered_with_a_diff() -> None:
    placements = ({"w": P(), "v": P()}, {"y": P("dp")})
    _, text = refusal(sf.TreeError, lambda: sharded(scale, placements)({"w": X}, {"x": X}))
    assert text == "\n".join([
        "shard(scale): the tree of in_placements does not match the arguments",
        "  params: placements have also ['v']",
        "  batch: placements lack ['x']; placements have also ['y']",
        "  at: HERE",
        "  try: give placements in the order of the parameters or by name; one P applies to a "
"whole subtree",
    ])  # fmt: skip


def test_out_placements_that_do_not_fit() -> None:
    fix = "  try: give a prefix of the result's tree, with placements that fit each tensor"
    _, text = refusal(sf.TreeError, lambda: sharded(lambda x: (x, x), P(), (P(), P(), P()))(X))
    assert text == (
        "shard(<lambda>), out_placements: the whole tree: placements have also [2]\n  "
        f"at: HERE\n{fix}"
    )
    _, text = refusal(sf.PlacementError, lambda: sharded(lambda x: (x, x), P(), (P(), P("q")))(X))
    assert text == (
        "shard(<lambda>), out_placements: P('q') names axis 'q'; the mesh has (dp=2, "
        f"tp=4)\n  at: HERE\n{fix}"
    )


def test_a_dtensor_with_another_placement_than_declared_is_never_resharded() -> None:
    x = sf.distribute(X, mesh(), P("dp"))
    _, text = refusal(sf.PlacementError, lambda: sharded(double, P("tp"))(x))
    own, declared = (
        "Shard(dim=0) on dp, Replicate() on tp",
        "Replicate() on dp, Shard(dim=0) on tp",
    )
    said = (
        f"the argument is placed {own}, but in_placements says {declared}; redistribute the "
        "argument before the call"
    )
    assert text == f"shard(double), argument x: {said}\n  at: HERE\n{FIT}"


def test_a_dtensor_on_another_mesh() -> None:
    x = sf.distribute(X, sf.make_mesh((8,), ("dp",)), P("dp"))
    _, text = refusal(sf.PlacementError, lambda: sharded(double)(x))
    assert text == (
        "shard(double), argument x: the DTensor is on another mesh, (dp=8), and the "
        f"function's is (dp=2, tp=4)\n  at: HERE\n{FIT}"
    )


def test_no_mesh() -> None:
    _, text = refusal(sf.PlacementError, lambda: sf.shard(double)(X))
    assert text == (
        "shard(double): no mesh is given, and no current mesh is set\n  at: HERE\n  try: "
        "shard(fn, mesh=...), or call the function inside `with use_mesh(mesh)`"
    )


def mutates(x: torch.Tensor) -> torch.Tensor:
    x[0].add_(1)
    return x * 2


def mutates_tree(p: Any) -> Any:
    p["a"] = p["a"] + 1
    return p


def branches(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def stores(x: torch.Tensor) -> torch.Tensor:
    LOG.append(1)
    return x + 1


def reads(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def grows(x: torch.Tensor) -> torch.Tensor:
    return x.nonzero()


def not_scalar(x: torch.Tensor) -> torch.Tensor:
    return sf.grad(double)(x)


CAPTURE = {
    branches: ("the function branches on a tensor's value", "torch.where(condition, a, b)"),
    stores: (
        "the function changes an object outside of itself: LOG",
        "return the new value instead of storing it",
    ),
    reads: (
        ".item() reads a tensor's value while the function is traced",
        "keep the value a tensor: no .item(), bool() or int()",
    ),
    grows: (
        "the shape of nonzero's result depends on the values of tensors",
        "torch.nonzero_static(x, size=n), which pads to a size that you choose",
    ),
}


@pytest.mark.parametrize("fn", list(CAPTURE), ids=lambda fn: fn.__name__)
def test_a_function_that_is_not_one_pure_graph(fn: Callable[..., Any]) -> None:
    got, fix = CAPTURE[fn]
    error, text = refusal(sf.CaptureError, lambda: sharded(fn, P("dp"))(X))
    assert text == f"shard({fn.__name__}): {got}\n  at: HERE\n{PURE}\n  try: {fix}"
    assert error.source and error.fix == fix
    line = int(error.source.rsplit(":", 1)[1])
    first = fn.__code__.co_firstlineno
    assert first <= line <= first + 3, "the line is in the function"
    assert LOG == [], "a refused side effect has not happened"


def test_a_function_that_writes_to_its_argument() -> None:
    error, text = refusal(sf.CaptureError, lambda: sharded(mutates, P("dp"))(X))
    fix = "return the new value, or write to a copy: x.clone()"
    needed = "a function without side effects"
    assert text == (
        "shard(mutates), argument x: the function writes to this tensor in place\n  at: HERE\n  "
        f"needed: {needed}\n  try: {fix}"
    )
    assert error.arg_path == "x"
    assert torch.equal(X, torch.ones(6, 4)), "and has not written"


def test_a_function_that_changes_its_argument_tree() -> None:
    p = OrderedDict(a=X)  # of a dict, a list or a tuple it would change its own copy
    _, text = refusal(sf.CaptureError, lambda: sharded(mutates_tree)(p))
    fix = "return the new value instead of storing it"
    assert text == (
        "shard(mutates_tree): the function changes an object outside of itself: argument p\n  at: "
        f"HERE\n{PURE}\n  try: {fix}"
    )
    assert p["a"] is X


def test_a_trace_that_fails_inside_grad_leaves_nothing_behind() -> None:
    refusal(sf.CaptureError, lambda: sharded(sf.grad(lambda x: reads(x).sum()))(X))
    assert torch.equal(sf.full(sharded(sf.grad(lambda x: (x * x).sum()))(X)), 2 * X)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        torch.ones(2, requires_grad=True).sum().backward()


class Thing:
    def __init__(self, x: Any) -> None:
        self.x = x


def test_a_result_that_is_neither_tensor_nor_constant() -> None:
    error, text = refusal(sf.CaptureError, lambda: sharded(lambda x: (x, {"t": Thing(x + 1)}))(X))
    fix = "return tensors and constants; turn your own class into a NamedTuple or a dict"
    needed = "a tree of tensors and constants"
    assert text == f"shard(<lambda>): result[1]['t'] is a Thing\n  needed: {needed}\n  try: {fix}"
    assert error.arg_path == "result[1]['t']"


def test_an_argument_that_is_neither_tensor_nor_constant() -> None:
    _, text = refusal(sf.TreeError, lambda: sharded(double)(X.numpy()))
    fix = "torch.as_tensor(x); or x.item() for a constant"
    assert text == (
        "shard(double), argument x: a numpy.ndarray\n  at: HERE\n  needed: a tensor or "
        f"a constant\n  try: {fix}"
    )


def test_a_call_that_does_not_fit_the_signature() -> None:
    _, text = refusal(sf.TreeError, lambda: sharded(scale)(X))
    signature = "(params: 'Any', batch: 'Any') -> 'Any'"
    assert text == (
        "shard(scale): missing a required argument: 'batch'\n  at: HERE\n  try: the "
        f"arguments of {signature}"
    )


def test_a_tensor_that_is_said_to_be_static() -> None:
    _, text = refusal(sf.TreeError, lambda: sharded(double, static_argnums=0)(X))
    fix = "leave this argument out of static_argnums, since tensors are never constants"
    assert text == (
        "shard(double): static argument 0 holds a tensor\n  at: HERE\n  needed: "
        f"constants\n  try: {fix}"
    )
    assert torch.equal(sf.full(sharded(lambda x, k: x * k, static_argnums=1)(X, 3)), X * 3)


def test_what_is_not_covered_yet_is_refused_by_name() -> None:
    branch = lambda x: torch.ops.higher_order.cond(
        x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)
    )
    _, text = refusal(
        sf.CaptureError, lambda: sharded(sf.bucketed_grad(lambda x: branch(x).sum()))(X)
    )
    assert "the function uses torch.cond or another higher-order op under a gradient" in text


def test_s9_6_a_checkpointed_layer_is_captured_and_its_gradient_bucketed() -> None:
    layer = lambda w, x: torch.tanh(x @ w)
    kept = lambda w, x: (
        torch.utils.checkpoint.checkpoint(layer, w, x, use_reentrant=False).square().mean()
    )
    w = torch.linspace(-1, 1, 16).reshape(4, 4)
    step = sharded(sf.bucketed_grad(kept), (P(), P("dp")))
    assert [b.leaves for b in step.lower(w, X).plan.buckets] == [("w",)]
    wanted = sf.value_and_grad(lambda w, x: layer(w, x).square().mean())(w, X)
    assert_close(sf.full(step(w, X)), wanted)


def test_a_checkpointed_function_of_torchs_warns_of_nothing(
    recwarn: pytest.WarningsRecorder,
) -> None:
    inner = lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum()
    assert torch.equal(sf.full(sharded(sf.grad(inner))(X)), X.cos())
    assert not [w for w in recwarn if "checkpoint" in str(w.message)]


def test_an_argument_that_requires_grad_is_not_cut_off_silently() -> None:
    x = X.clone().requires_grad_()
    y = sharded(double)
    y(X)  # a ready signature does not cut it off either
    sf.full(y(x)).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(X, 2))
    with torch.no_grad():
        assert torch.equal(sf.full(sharded(double)(x)), X * 2)


def test_a_world_that_does_not_match_the_mesh() -> None:
    fix = "use a shape whose product is 8, or fake_world(3)"
    _, text = refusal(sf.PlacementError, lambda: sf.make_mesh((3,), ("dp",)))
    assert text == f"make_mesh: shape (3,) needs 3 ranks, but the world has 8\n  try: {fix}"
    _, text = refusal(sf.PlacementError, lambda: sf.make_mesh((2, 4), ("dp", "dp")))
    assert text == (
        "make_mesh: shape (2, 4), axis names ('dp', 'dp')\n  needed: a different name for each axis"
    )
    _, text = refusal(sf.PlacementError, lambda: sf.make_mesh((2, 4), ("dp", "t-p")))
    assert text == "make_mesh: axis names ['t-p']\n  needed: names like dp or tp"


def test_differentiating_integers() -> None:
    _, text = refusal(
        sf.TreeError, lambda: sf.grad(lambda x: x.sum())(torch.ones(3, dtype=torch.int64))
    )
    fix = "torch.tensor(x) for a number; for other values use argnums or a closure"
    got = "an argument cannot be differentiated\n  x is (3,) torch.int64\n  at: HERE"
    assert text == f"grad(<lambda>): {got}\n  needed: floating tensors, or None\n  try: {fix}"


def test_differentiating_what_is_not_a_scalar() -> None:
    _, text = refusal(sf.CaptureError, lambda: sharded(not_scalar, P("dp"))(X))
    fix = "return loss.sum() or loss.mean() of floating values; has_aux=True for (scalar, aux)"
    got = "its value is of shape (6, 4)\n  at: HERE\n  needed: a floating scalar"
    assert text == f"the gradient of double: {got}\n  try: {fix}"


def test_random_numbers_are_refused_where_ranks_would_differ() -> None:
    _, text = refusal(sf.RuleError, lambda: sharded(lambda x: torch.binomial(x, x.sigmoid()))(X))
    said = "the op draws random numbers, and each rank would draw different ones"
    assert text == (
        f"shard(<lambda>), op aten.binomial.default: {said}\n  at: HERE\n  try: pass random "
        "tensors as arguments"
    )


def test_dropout_of_a_kernel_is_refused_where_ranks_would_differ() -> None:
    """Lowered for shapes alone: the kernel is one of CUDA."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    rows = sf.ShapeDtype((4, 4, 64, 32), torch.bfloat16)
    run = sharded(lambda q: kernel(q, q, q, 0.1)[0])
    _, text = refusal(sf.RuleError, lambda: run.lower(rows))
    assert text == (
        "shard(<lambda>), op aten._scaled_dot_product_flash_attention.default: the kernel draws "
        "the random numbers of its dropout, and each rank would draw others\n  at: HERE\n"
        "  try: torch.nn.attention.sdpa_kernel(SDPBackend.MATH), whose dropout is shardfn's"
    )


def test_constraints_that_do_not_fit() -> None:
    fix = "use P with axes of the mesh and one entry for each dim"
    _, text = refusal(
        sf.PlacementError, lambda: sharded(lambda x: sf.constrain(x, P(None, None, "dp")))(X)
    )
    assert text == (
        "constrain: a placement of 3 dims for a tensor of 2, shape (6, 4)\n  at: HERE\n "
        f" try: {fix}"
    )
    _, text = refusal(sf.PlacementError, lambda: sharded(lambda x: sf.constrain(x, P("zz")))(X))
    assert (
        text
        == f"constrain: the mesh (dp=2, tp=4) has no axis zz\n  at: HERE\n  try: \
{fix}"
    )


def test_implicit_communication_when_it_is_forbidden() -> None:
    fix = (
        "use a placement that needs no transfer (sf.report suggests one); sf.constrain to "
        "accept this transfer; or implicit_comm='allow' to accept all"
    )
    error, text = refusal(
        sf.PlacementError,
        lambda: sharded(lambda x: x.sort(0)[0], P("dp"), implicit_comm="error")(X),
    )
    assert text == "\n".join([
        "shard(<lambda>): 1 implicit collective, 96 B",
        (
            "  all_gather of self over dp (96 B) for aten.sort.default at HERE: self is "
            "f32[6@dp, 4]; sharded on dim 1, or replicated, self would need no transfer"
        ),
        (
            "  aten.sort.default(self f32[6@dp, 4]) at HERE is computed replicated, for 96 B: "
            "no strategy of the op's sharding rule keeps the sharding"
        ),
        f"  try: {fix}",
    ])  # fmt: skip
    assert HERE.match(error.source or "") and error.fix == fix
    with pytest.warns(UserWarning, match="1 implicit collective, 96 B"):
        sharded(lambda x: x.sort(0)[0], P("dp"), implicit_comm="warn")(X)


def test_unknown_options() -> None:
    _, text = refusal(sf.ShardError, lambda: sf.shard(double, mesh(), backend="xla"))
    assert text == "shard(double): backend is 'xla'\n  needed: one of aten, inductor"
    _, text = refusal(sf.ShardError, lambda: sf.shard(double, mesh(), implicit_comm="maybe"))
    assert text == "shard(double): implicit_comm is 'maybe'\n  needed: one of allow, warn, error"
    _, text = refusal(sf.TreeError, lambda: sf.shard(3, mesh()))
    assert text == "shard: a int\n  at: HERE\n  needed: a function\n  try: shard(fn, mesh, ...)"


def test_distribute_and_from_local_name_every_leaf_that_does_not_fit() -> None:
    _, text = refusal(
        sf.PlacementError,
        lambda: sf.distribute({"a": X, "b": X}, mesh(), {"a": P("q"), "b": P(None, None, "dp")}),
    )
    assert text == "\n".join([
        "distribute: ['a']: P('q') names axis 'q'; the mesh has (dp=2, tp=4)",
        "  ['b']: P(None, None, 'dp') names dim 2 of a tensor with 2 dims, shape (6, 4)",
        "  try: give placements that fit each tensor",
    ])  # fmt: skip
    _, text = refusal(
        sf.PlacementError, lambda: sf.distribute(X, mesh(), [Partial(), Replicate()])
    )  # it would be twice X
    said = (
        "a plain tensor is a global value, so its placement cannot be [Partial(sum), "
        "Replicate()]; use sf.from_local"
    )
    assert text == f"distribute: the tensor: {said}\n  try: give placements that fit each tensor"
    _, text = refusal(sf.TreeError, lambda: sf.distribute({"a": X}, mesh(), {"b": P()}))
    assert text == (
        "distribute: the placements do not match the given tree\n  the whole tree: placements "
        "lack ['a']; placements have also ['b']"
    )
    _, text = refusal(sf.PlacementError, lambda: sf.from_local(X, mesh(), P("zz")))
    assert text == "from_local: P('zz') names axis 'zz'; the mesh has (dp=2, tp=4)"
    _, text = refusal(sf.PlacementError, lambda: sf.from_local([X] * 3, mesh(), P("dp")))
    needed = "one tensor, or one for each rank of a simulated mesh"
    assert text == f"from_local: 3 tensors\n  needed: {needed}"


def test_values_of_simulated_ranks_that_differ_are_not_read_as_one() -> None:
    m = sf.make_mesh((8,), ("dp",))
    x = sf.distribute(torch.arange(8.0), m, P("dp"))
    _, text = refusal(sf.DivergenceError, lambda: x.to_local().sum().item())
    values = [float(i) for i in range(8)]
    assert text == (
        f"aten._local_scalar_dense.default: ranks hold different values: {values}\n  "
        "try: read the global value with sf.full(x)"
    )
    summed = functional_collectives.all_reduce(x.to_local(), "sum", m)
    assert summed.item() == sum(values)
