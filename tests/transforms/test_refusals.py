"""Every check that runs while Dynamo reads a function arrives in our words, with the user's
line.
"""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from worlds import simulated

import shardfn as sf
from shardfn import P

PACKAGE = pathlib.Path(sf.__file__).parent
OF_TRAINING = (
    "mixed_precision.py",
    "clip.py",
    "ema.py",
    "loss_scale.py",
    "optim/optimizer.py",
    "optim/checks.py",
    "optim/placed.py",
    "optim/schedule.py",
    "optim/trees.py",
)
X = torch.arange(6.0).reshape(3, 2)
CHECKED = "constant_in_graph"


def raising() -> Iterator[tuple[str, bool]]:
    """(function, whether Dynamo runs it as it is) for every function of the transforms that
    raises.
    """
    transforms = sorted((PACKAGE / "transforms").rglob("*.py"))
    training = [PACKAGE / "training" / name for name in OF_TRAINING]
    for file in (*transforms, *training, PACKAGE / "argnums.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(n, ast.Raise) for n in ast.walk(node)
            ):
                decorators = " ".join(map(ast.unparse, node.decorator_list))
                yield f"{file.stem}.{node.name}", CHECKED in decorators


def unruled(x: Tensor) -> Any:
    return sf.custom_vjp(torch.sin)(x)


def ruled_twice(x: Tensor) -> Any:
    fn = sf.custom_jvp(torch.sin)
    fn.defjvp(lambda p, t: (p[0].sin(), t[0]))
    fn.defjvp(lambda p, t: (p[0].sin(), t[0]))
    return fn(x)


def no_pair(x: Tensor) -> Any:
    fn = sf.custom_vjp(torch.sin)
    fn.defvjp(torch.sin, lambda kept, g: (g,))
    return sf.grad(lambda y: fn(y).sum())(x)


def unknown_keyword(x: Tensor) -> Any:
    fn = sf.custom_vjp(lambda x, y: x * y)
    fn.defvjp(lambda x, y: (x * y, y), lambda y, g: (g * y, None))
    return fn(x, z=x)


class TooFew(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return sf.psum(x, "i")

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return ()


def too_few(x: Tensor) -> Any:
    gradient = sf.grad(lambda row: TooFew.apply(row).sum())
    return sf.vmap(gradient, axis_name="i")(x)


def of_module(x: Tensor) -> Any:
    return PURE({"weight": x}, BUFFERS, x)


PURE, PARAMS, BUFFERS = sf.functionalize(torch.nn.Linear(2, 2))

# A function that Dynamo reads, for each check; what it does wrong stands in one line of this file.
TRIGGERS: dict[str, Callable[[Tensor], Any]] = {
    "_dtensor_methods._refuse_no_placements": lambda x: distribute_tensor(x, MESHES[0], Shard(0)),
    "_accumulate.check_rows": lambda x: sf.accumulate(sf.grad(lambda w, y: (w * y).sum()), 2)(
        x[0], x
    ),
    "_accumulate.check_microbatches": lambda x: sf.accumulate(torch.sum, 0)(x),
    "_pipelined_grad.checked_pipeline": lambda x: sf.pipelined_grad(torch.sum, 2, schedule="x")(x),
    "_checkpoint.check_text": lambda x: sf.checkpoint_name(x, 3),
    "_checkpoint.check_segments": lambda x: sf.jit(torch.utils.checkpoint.checkpoint_sequential)(
        [torch.sin], 2, x, use_reentrant=False
    ),
    "mixed_precision._kept": lambda x: sf.mixed_precision(torch.sum, keep=["no"])(x),
    "mixed_precision._check_params": lambda x: sf.mixed_precision(torch.sum)(x.double()),
    "mixed_precision._patterns": lambda x: sf.mixed_precision(torch.sum, keep="no")(x),
    "mixed_precision._check_dtypes": lambda x: sf.mixed_precision(torch.sum, compute=torch.int8)(x),
    "_dynamic.refuse_inside": lambda x: sf.mark_dynamic(x, 0),
    "_constrain.check_placements": lambda x: sf.constrain(x, {"a": P()}),
    "_checks.rows_of": lambda x: sf.scan(lambda c, r: (c, r), x, {"a": x, "b": x[:2]}),
    "_checks.check_carry": lambda x: sf.scan(lambda c, r: (c, r), 1.0, x),
    "_checks.check_step": lambda x: sf.scan(lambda c, r: c + r, x[0], x),
    "_checks.check_after": lambda x: sf.scan(lambda c, r: (c[:1], r), x[0], x),
    "_checks.check_choice": lambda x: sf.cond(x > 0, torch.sin, torch.cos, x),
    "_checks.check_branch_trees": lambda x: sf.cond(x.sum() > 0, lambda: x, lambda: (x,)),
    "_checks.branch_dtypes": lambda x: sf.cond(x.sum() > 0, lambda: x, lambda: x.double()),
    "_custom.check_unruled": ruled_twice,
    "_custom.check_rules": unruled,
    "_custom.check_pair": no_pair,
    "_custom.check_keywords": unknown_keyword,
    "_functions.check_count": too_few,
    "_ragged.check_send_counts": lambda x: sf.vmap(
        lambda r: sf.ragged_all_to_all(r, r, "i"), axis_name="i"
    )(x),
    "_ragged.rows_bound": lambda x: sf.vmap(
        lambda r: sf.ragged_all_to_all(r, r.long(), "i", rows=0), axis_name="i"
    )(torch.ones(2, 2)),
    "_scatter.check_size": lambda x: sf.vmap(lambda r: sf.psum_scatter(r, "i"), axis_name="i")(x),
    "_scatter.check_perm": lambda x: sf.vmap(
        lambda r: sf.ppermute(r, "i", [(0, 9)]), axis_name="i"
    )(x),
    "_flattened.check_aux": lambda x: sf.grad(torch.sum, has_aux=True)(x),
    "_functionalize.check_names": of_module,
    "_functionalize.refuse_values": lambda x: PURE(PARAMS, x, x),
    "_grad.refuse_loss": lambda x: sf.grad(torch.sin)(x),
    "_vjp_jvp.check_tuples": lambda x: sf.jvp(torch.sin, x, x),
    "_options.check_flag": lambda x: sf.grad(torch.sum, has_aux=1)(x),
    "_options.refuse_function": lambda x: sf.vmap(3)(x),
    "_paired.check_alike": lambda x: sf.jvp(torch.sin, (x,), (x[0],)),
    "_paired.check_leaves": lambda x: sf.grad(lambda n: x.sum() * n)(2),
    "_shard_map.check_given": lambda x: sf.shard_map(torch.sin, MESHES[0], out_placements=P())(x),
    "_shard_map.check_axis_names": lambda x: sf.shard_map(
        torch.sin, MESHES[0], P(), P(), axis_names=3
    )(x),
    "_vmap.check_prefix": lambda x: sf.vmap(torch.sin, in_axes=(0, 0))(x),
    "_vmap.batch_size": lambda x: sf.vmap(torch.add)(x, x[:2]),
    "_vmap.check_outs": lambda x: sf.vmap(lambda r: "text")(x),
    "_vmap.check_settings": lambda x: sf.vmap(torch.sin, axis_size=-1)(x),
    "_vmap.check_randomness": lambda x: sf.vmap(torch.sin, randomness="some")(x),
    "_bucket_options.wishes_text": lambda x: sf.bucketed_grad(torch.sum, reduce_dtype=torch.int32)(
        x
    ),
    "_init.refuse_inside": lambda x: sf.init(torch.nn.Identity),
    "checks.refuse_inside": lambda x: sf.optim(torch.optim.SGD),
    "checks.refuse_state": lambda x: SGD.update({"w": x}, {"w": x}, None),
    "checks.check_average": lambda x: sf.ema(0.5).update(x, sf.ema(0.5).init({"w": x})),
    "checks.check_decay": lambda x: sf.ema(2.0),
    "checks.check_averaged": lambda x: sf.ema(0.5).init({"w": 1})["count"],
    "checks.check_selected": lambda x: SCALER.select(x.sum() > 0, {"w": x}, {"v": x}),
    "checks.check_unscaled": lambda x: SCALER.unscale(x.half(), {"scale": x.sum()}),
    "argnums.check_argnums": lambda x: sf.grad(torch.sum, argnums="x")(x),
    "argnums.positions": lambda x: sf.grad(torch.sum, argnums=4)(x),
}
MESHES: list[Any] = []
SGD = sf.optim(torch.optim.SGD)
SCALER = sf.loss_scale()

# Why Dynamo never comes to the others.
ELSEWHERE = {
    "_transformed.options": "abstract",
    "_transformed.inline": "abstract",
    "_transformed.__call__": "passes errors on",
    "_custom.traced": "abstract",
    "_custom.eagerly": "abstract",
    "_functionalize.__get__": "a descriptor's own protocol",
    "_bucketed_grad.bucketed_grad": "skipped in a trace, where wishes_text checks",
    "_bucket_options._refuse_kinds": "called by wishes_text",
    "_bucket_options._dtype_name": "called by wishes_text",
    "_bucket_options._refuse_unfit": "called by wishes_text",
    "_residuals.refuse_none": "saved_residuals is refused in a trace",
    "_functionalize._refuse": "functionalize is refused in a trace",
    "_init._placements": "init is refused in a trace",
    "checks.check_class": "optim is refused in a trace",
    "checks.check_numbers": "optim is refused in a trace",
    "checks.check_options": "called by Optim.checked",
    "checks.check_trees": "called by Optim.checked",
    "checks.check_params": "called by Optim.checked",
    "checks.check_groups": "optim is refused in a trace",
    "checks._refuse_meshes": "skipped in a trace, where shard and jit check meshes",
    "schedule.load_state_dict": "called outside of functions",
    "schedule.__init__": "called outside of functions",
    "placed.placed_like": "called outside of functions",
    "_check._differ": "check is refused in a trace",
    "_pin.pin": "refused in a trace",
    "_pin._layers": "called by pin",
    "_pin._refuse_contradictions": "called by pin",
    "_pin._check": "called by pin",
    "_distribute.distribute": "refused in a trace",
    "_distribute._refuse_dtensors": "called by distribute and from_local",
    "_distribute._check_shards": "called by from_local",
    "_distribute._first_here": "called by from_local",
    "_distribute._given_shards": "called by from_local",
    "_distribute._checked_marks": "called by from_local",
    "_distribute._check_shape": "called by from_local",
    "argnums.of_signature": "called where a transform is made outside of a trace",
    "argnums.of_call": "called where a call is staged",
    "argnums.refuse_static": "called where a call is staged",
    "argnums._refuse_both": "called by of_signature and of_call",
    "_transformed._mesh_for": "an error of the last attempt to stage, passed on",
    "_retrace.explain_retrace": "called outside of a trace",
    "_written._check": "called after a call",
    "_written.refuse_untraceable": "called where a call is staged",
    "_written.refuse_reads": "called where a call is staged",
    "_budget.explain": "called outside of a trace",
    "_budget.assert_comms": "called outside of a trace",
    "_auto._refuse_stages": "called when placements are chosen, after the trace",
    "_auto._refuse_no_tensor": "called where a call is staged",
    "_auto.checked_memory": "called where shard is applied outside of a trace",
    "_budget._bytes": "called by assert_comms",
    "clip._refuse_integers": "called outside of a trace",
    "_dynamic._check": "mark_dynamic is refused in a trace",
    "_custom.refuse_compiled": "called inside of a torch.compile of the user's",
    "_outside._holds_dtensors": "called where a call is staged",
}
# rules are registered outside of functions
MODULES_ELSEWHERE = ("_rule", "_proof", "_sample")


def test_every_raise_of_the_transforms_is_a_check_with_a_trigger_or_is_told_why_not() -> None:
    found = dict(raising())
    checks = {name for name, checked in found.items() if checked} - ELSEWHERE.keys()
    others = {name for name, checked in found.items() if not checked}
    assert checks == TRIGGERS.keys()
    assert {
        name for name in others if name.split(".")[0] not in MODULES_ELSEWHERE
    } <= ELSEWHERE.keys()
    assert ELSEWHERE.keys() <= found.keys()


def lines_of(fn: Any) -> range:
    """The lines of a function of this file."""
    code = fn.__code__
    return range(code.co_firstlineno, max(line for *_, line in code.co_lines() if line) + 1)


@pytest.mark.parametrize("check", TRIGGERS)
def test_a_check_under_dynamo_arrives_in_our_words_with_the_users_line(check: str) -> None:
    assert_in_our_words(check, "jit")


@pytest.mark.parametrize("check", TRIGGERS)
def test_in_shard_too(check: str) -> None:
    assert_in_our_words(check, "shard")


def assert_in_our_words(check: str, outer: str) -> None:
    fn = TRIGGERS[check]
    with simulated(dp=2) as mesh:
        MESHES[:] = [mesh]
        staged = (
            sf.jit(fn, backend="aten")
            if outer == "jit"
            else sf.shard(fn, MESHES[0], backend="aten")
        )
        with pytest.raises(sf.ShardError) as caught:
            staged(X)
    error = caught.value
    file, _, line = (error.source or "").rpartition(":")
    assert file == __file__ and int(line) in lines_of(fn)
    assert "cannot be captured as one graph" not in str(error) and "the function raises" not in str(
        error
    )
    assert f"at: {error.source}" in str(error)


def meets(fn: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """A function that does something for its effect."""

    def run(x: Tensor) -> Tensor:
        fn(x)
        return x

    return run


def inside_world(x: Tensor) -> Tensor:
    with sf.fake_world(2):
        return x * 2


LINEAR = torch.nn.Linear(2, 2)

# What cannot be captured -> what the error says to write instead.
UNSUPPORTED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "new_group": (
        meets(lambda x: dist.new_group([0, 1])),
        "make groups and meshes outside of the function, and close over the mesh",
    ),
    "init_process_group": (meets(lambda x: dist.init_process_group("gloo")), "outside"),
    "destroy_process_group": (meets(lambda x: dist.destroy_process_group()), "outside"),
    "new_subgroups_by_enumeration": (
        meets(lambda x: dist.new_subgroups_by_enumeration([[0, 1]])),
        "make groups and meshes outside of the function, and close over the mesh",
    ),
    "a store": (meets(lambda x: dist.FileStore("store")), "make the object outside"),
    "a group by its name": (
        meets(
            lambda x: dist.distributed_c10d._resolve_process_group(
                MESHES[0].get_group("dp").group_name
            )
        ),
        "mesh.get_group(axis)",
    ),
    "parallelize_module": (
        meets(lambda x: parallelize_module(LINEAR, MESHES[0], ColwiseParallel())),
        "outside of the function, and close over the module",
    ),
    "distribute_module": (
        meets(lambda x: distribute_module(LINEAR, MESHES[0])),
        "outside of the function, and close over the module",
    ),
    "fully_shard": (
        meets(lambda x: fully_shard(LINEAR, mesh=MESHES[0])),
        "outside of the function",
    ),
    "DistributedDataParallel": (
        meets(lambda x: torch.nn.parallel.DistributedDataParallel(LINEAR)),
        "sf.bucketed_grad in place of DistributedDataParallel",
    ),
    "barrier of a group": (
        meets(lambda x: MESHES[0].get_group("dp").barrier()),
        "collectives already keep ranks in step",
    ),
    "a collective of a group": (
        meets(lambda x: MESHES[0].get_group("dp").allreduce([x])),
        "dist.all_reduce(x, group=group)",
    ),
    "get_future": (
        meets(lambda x: dist.all_reduce(x * 1, async_op=True).get_future()),
        "work.wait()",
    ),
    "barrier": (meets(lambda x: dist.barrier()), "collectives already keep ranks in step"),
    "init_device_mesh": (meets(lambda x: init_device_mesh("cpu", (2,))), "make the mesh outside"),
    "DeviceMesh": (meets(lambda x: DeviceMesh("cpu", [0, 1])), "make the mesh outside"),
    "make_mesh": (meets(lambda x: sf.make_mesh((2,), ("q",))), "make the mesh outside"),
    "current_mesh": (meets(lambda x: sf.current_mesh()), "close over the mesh"),
    "fake_world": (inside_world, "enter the fake world outside"),
    "send": (meets(lambda x: dist.send(x, 1)), "sf.ppermute"),
    "isend": (meets(lambda x: dist.isend(x, 1)), "sf.ppermute"),
    "all_gather_object": (
        meets(lambda x: dist.all_gather_object([None], 1)),
        "sf.all_gather for tensors",
    ),
    "distribute": (lambda x: sf.distribute(x, MESHES[0], P("dp")), "sf.constrain"),
    "from_local": (lambda x: sf.from_local(x, MESHES[0], P("dp")), "sf.constrain"),
    "functionalize": (
        meets(lambda x: sf.functionalize(torch.nn.Linear(2, 2))),
        "make the module outside",
    ),
    "pin": (meets(lambda x: sf.pin(LINEAR, {"": P("dp")})), "sf.constrain"),
    "init": (lambda x: sf.init(torch.nn.Identity), "outside of the function"),
    "lower": (meets(lambda x: sf.jit(torch.sin).lower(x)), "call the transformed function"),
    "check": (meets(lambda x: sf.check(torch.sin, x)), "outside of the function"),
}


# Code of one rank, which values in `shard` are not.
OF_ONE_RANK: dict[str, Callable[[Tensor], Any]] = {
    "get_rank": lambda x: x * dist.get_rank(),
    "get_local_rank": lambda x: x * MESHES[0].get_local_rank("dp"),
    "get_coordinate": lambda x: x * MESHES[0].get_coordinate()[0],
    "mesh.get_rank": lambda x: x * MESHES[0].get_rank(),
    "rank of a group": lambda x: x * dist.group.WORLD.rank(),
    "a branch": lambda x: x * 2 if dist.get_rank() == 0 else x,
    "all_reduce": meets(lambda x: dist.all_reduce(x)),
    "broadcast": meets(lambda x: dist.broadcast(x, 0)),
    "DTensor.from_local": lambda x: DTensor.from_local(x, MESHES[0], [Shard(0)]),
    "DTensor.to_local": lambda x: x.to_local(),
}


@pytest.mark.parametrize("call", OF_ONE_RANK)
def test_code_of_one_rank_is_refused_among_global_tensors(call: str) -> None:
    with simulated(dp=2) as mesh:
        MESHES[:] = [mesh]
        staged = sf.shard(OF_ONE_RANK[call], mesh, P("dp"), backend="aten")
        with pytest.raises(sf.CaptureError, match="the call belongs to code of one rank") as caught:
            staged(X)
    assert "sf.jit(fn) or sf.shard_map" in (caught.value.fix or "")
    assert (caught.value.source or "").startswith(__file__)


@pytest.mark.parametrize("call", UNSUPPORTED)
def test_s7_5_what_cannot_be_captured_says_what_to_write_instead(call: str) -> None:
    assert_says_instead(call, "jit")


@pytest.mark.parametrize("call", UNSUPPORTED)
def test_s7_5_in_shard_map_too(call: str) -> None:
    assert_says_instead(call, "shard_map")


def assert_says_instead(call: str, outer: str) -> None:
    fn, instead = UNSUPPORTED[call]
    with simulated(dp=2) as mesh:
        MESHES[:] = [mesh]
        per_rank = sf.shard_map(fn, mesh, P(), P(), backend="aten")
        staged = sf.jit(fn, backend="aten") if outer == "jit" else per_rank
        with pytest.raises(sf.CaptureError) as caught:
            staged(X)
    assert instead in (caught.value.fix or "")
    assert (caught.value.source or "").startswith(__file__)
    assert "cannot be captured as one graph" not in str(caught.value)
