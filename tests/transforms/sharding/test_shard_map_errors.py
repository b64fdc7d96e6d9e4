"""What shard_map and the collectives refuse, word for word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from message import without_line
from torch.nn.attention.flex_attention import flex_attention

import shardfn as sf
from shardfn import P
from shardfn._compat import strided_shard

X = torch.ones(8, 6)


DP = P("dp")


def mapped(body: Callable[..., Any], ins: Any = DP, outs: Any = DP, **options: Any) -> Any:
    return sf.shard_map(
        body, sf.make_mesh((2, 4), ("dp", "tp")), ins, outs, backend="aten", **options
    )


def named(over: Any = "dp", name: str = "psum", **rest: Any) -> Callable[[], Any]:
    """A call of shard_map around one collective."""

    def body(x: Any) -> Any:
        return getattr(sf, name)(x, over, **rest)

    return lambda: mapped(body)(X)


def fn(x: Any, *rest: Any) -> Any:
    return x


def inside_grad(f: Any) -> Any:
    return sf.grad(lambda p, x: f(p, x)["w"].sum())(TREE, X)


TREE = {"w": X, "b": [X, X[0]]}
CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "an unbound name": (
        named("dpp"),
        sf.CaptureError,
        """psum: no axis is called 'dpp'
  the bound axis names are 'dp' (mesh axis, size 2), 'tp' (mesh axis, size 4)
  try: did you mean 'dp'?""",
    ),
    "an unbound name like no other": (
        named(("dp", "xyz"), "all_gather"),
        sf.CaptureError,
        """all_gather: no axis is called 'xyz'
  the bound axis names are 'dp' (mesh axis, size 2), 'tp' (mesh axis, size 4)
  try: one of 'dp', 'tp'""",
    ),
    "an unbound name in vmap": (
        lambda: sf.vmap(lambda x: sf.pmax(x, "batc"), axis_name="batch")(X),
        sf.CaptureError,
        """pmax: no axis is called 'batc'
  the bound axis names are 'batch' (mapped by vmap, size 8)
  try: did you mean 'batch'?""",
    ),
    "a name of an axis that is not manual": (
        lambda: mapped(lambda x: sf.psum(x, "tp"), axis_names={"dp"})(X),
        sf.CaptureError,
        """psum: 'tp' is a mesh axis that no enclosing shard_map uses
  the bound axis names are 'dp' (mesh axis, size 2)
  try: add 'tp' to axis_names of the enclosing shard_map""",
    ),
    "a name after its vmap": (
        lambda: sf.grad(
            lambda x: sf.psum(sf.vmap(lambda x: sf.psum(x, "i"), axis_name="i")(x).sum(), "i")
        )(X),
        sf.CaptureError,
        """psum over 'i': the call is outside of any shard_map, so no axis name is bound
  try: make the call inside shard_map, or inside vmap(fn, axis_name=...)""",
    ),
    "a collective outside any mesh": (
        lambda: sf.psum(X, "dp"),
        sf.CaptureError,
        """psum over 'dp': the call is outside of any shard_map, so no axis name is bound
  try: make the call inside shard_map, or inside vmap(fn, axis_name=...)""",
    ),
    "a collective in shard alone": (
        lambda: sf.shard(lambda x: sf.psum(x, "dp"), sf.make_mesh((8,), ("dp",)), backend="aten")(
            X
        ),
        sf.CaptureError,
        """psum over 'dp': the call is outside of any shard_map, so no axis name is bound
  try: make the call inside shard_map, or inside vmap(fn, axis_name=...)""",
    ),
    "a name twice": (
        named(("dp", "dp")),
        sf.CaptureError,
        "psum: axis_name is ('dp', 'dp'), which contains an axis twice\n  needed: each name once",
    ),
    "a name that is none": (
        named(3),
        sf.CaptureError,
        "psum: axis_name is 3\n  needed: a name, or a tuple of names",
    ),
    "uneven sizes": (
        lambda: mapped(fn, ({"w": P("dp"), "b": P(None, "tp")}, P(("dp", "tp"))), P())(
            {"w": X[:7], "b": X}, X[:6]
        ),
        sf.PlacementError,
        """shard_map(fn), in_placements: x['w']: dim 0 has size 7, which axis dp cannot shard \
into 2 \
equal chunks; pad it by 1
  x['b']: dim 1 has size 6, which axis tp cannot shard into 4 equal chunks; pad it by 2
  rest[0]: dim 0 has size 6, 3 of it on a rank, which axis tp cannot shard into 4 equal chunks; \
pad it by 2
  needed: equal shards on all ranks
  try: use sizes divisible by the number of ranks, and placements that fit each tensor""",
    ),
    "a result that varies": (
        lambda: mapped(
            lambda x: {"loss": x.sum(), "n": sf.psum(x.sum(), "dp")}, P(("dp", "tp")), P()
        )(X),
        sf.PlacementError,
        """shard_map(<lambda>), out_placements: result['loss'] varies over dp and tp, but its \
out_placements require the same value on all ranks of these axes
  try: apply sf.psum or sf.pmean over dp and tp to result['loss'], or name dp and tp in its \
out_placements""",
    ),
    "a result that varies over one axis": (
        lambda: mapped(lambda x: sf.psum(x.sum(), "dp"), P(("dp", "tp")), P())(X),
        sf.PlacementError,
        """shard_map(<lambda>), out_placements: result varies over tp, but its out_placements \
require \
the same value on all ranks of this axis
  try: apply sf.psum or sf.pmean over tp to result, or name tp in its out_placements""",
    ),
    "a result made of the rank's number": (
        lambda: mapped(lambda x: x + sf.axis_index("dp"), P(), P())(X),
        sf.PlacementError,
        """shard_map(<lambda>), out_placements: result varies over dp, but its out_placements \
require \
the same value on all ranks of this axis
  try: apply sf.psum or sf.pmean over dp to result, or name dp in its out_placements""",
    ),
    "a perm that is none": (
        named("tp", "ppermute", perm=[(0, 1), (0, 2), (3, 2), (5, -1)]),
        sf.PlacementError,
        """ppermute over tp: 0 is a source 2 times
  source 5 is not a rank of the axis
  2 is a target 2 times
  target -1 is not a rank of the axis
  needed: numbers from 0 to 3
  try: give pairs (source, target), with each rank at most once as source and once as target""",
    ),
    "in_placements of another tree": (
        lambda: inside_grad(mapped(fn, ({"w": P(), "c": P()}, (P(), P())), P())),
        sf.TreeError,
        """shard_map(fn), in_placements: the placements do not match the tree
  x: placements lack ['b']; placements have also ['c']
  rest[0]: placements have a tuple, the arguments have a tensor
  try: give one placement for each leaf, or one P for all leaves of a subtree""",
    ),
    "in_placements of another count": (
        lambda: inside_grad(mapped(fn, (P(),), P())),
        sf.TreeError,
        """shard_map(fn), in_placements: the placements do not match the tree
  the whole tree: placements lack rest
  try: give one placement for each leaf, or one P for all leaves of a subtree""",
    ),
    "in_placements of another tree at the door": (
        lambda: mapped(fn, ({"w": P(), "c": P()}, P()), P())(TREE, X),
        sf.TreeError,
        """shard_map(fn): the tree of in_placements does not match the arguments
  x: placements lack ['b']; placements have also ['c']
  try: give placements in the order of the parameters or by name; one P applies to a whole \
subtree""",
    ),
    "out_placements of another tree": (
        lambda: mapped(lambda x: {"a": x, "b": (x, x)}, P(), {"a": (P(),), "b": (P(), P(), P())})(
            X
        ),
        sf.TreeError,
        """shard_map(<lambda>), out_placements: the placements do not match the tree
  result['a']: placements have a tuple, the values have a tensor
  result['b']: placements have also [2]
  try: give one placement for each leaf, or one P for all leaves of a subtree""",
    ),
    "an axis that the mesh does not have": (
        lambda: mapped(lambda x: x, P("dp"), P("dq"))(X),
        sf.PlacementError,
        """shard_map(<lambda>), out_placements: result: P('dq') names axis 'dq'; the mesh has \
(dp=2, \
tp=4); did you mean 'dp'?
  needed: equal shards on all ranks
  try: use sizes divisible by the number of ranks, and placements that fit each tensor""",
    ),
    "axis_names that the mesh does not have": (
        lambda: mapped(fn, axis_names={"dq"})(X),
        sf.PlacementError,
        """shard_map(fn), axis_names: the mesh (dp=2, tp=4) has no axis 'dq'
  try: did you mean 'dp'?""",
    ),
    "a placement on an axis that is not manual": (
        lambda: mapped(fn, P("dp", "tp"), P("dp"), axis_names={"dp"})(X),
        sf.PlacementError,
        """shard_map(fn), in_placements: x: P('dp', 'tp') names axis 'tp', which is not in the \
axis_names of this shard_map
  needed: equal shards on all ranks
  try: use sizes divisible by the number of ranks, and placements that fit each tensor""",
    ),
    "nested over an axis that is manual": (
        lambda: mapped(sf.shard_map(fn, None, DP, DP, axis_names={"dp"}), axis_names={"dp"})(X),
        sf.PlacementError,
        """shard_map(fn): an enclosing shard_map already uses dp
  try: give axis_names only axes that no enclosing shard_map uses""",
    ),
    "nested where none is left": (
        lambda: mapped(sf.shard_map(fn, None, DP, DP))(X),
        sf.PlacementError,
        """shard_map(fn): an enclosing shard_map already uses dp, tp
  try: one shard_map over these axes""",
    ),
    "a nested placement on an axis that is manual": (
        lambda: mapped(sf.shard_map(fn, None, DP, P("tp")), axis_names={"dp"})(X),
        sf.PlacementError,
        """shard_map(fn), in_placements: x: P('dp') names axis 'dp', which already belongs to an \
enclosing shard_map
  needed: equal shards on all ranks
  try: use sizes divisible by the number of ranks, and placements that fit each tensor""",
    ),
    "psum_scatter of a size that does not divide": (
        named("tp", "psum_scatter", scatter_dimension=-1, tiled=True),
        sf.PlacementError,
        """psum_scatter over tp: dim 1 of shape (4, 6) has size 6
  needed: a multiple of 4
  try: pad the dim, or use another dim""",
    ),
    "all_to_all of another size": (
        named("tp", "all_to_all", split_axis=1, concat_axis=0),
        sf.PlacementError,
        """all_to_all over tp: dim 1 of shape (4, 6) has size 6
  needed: size 4; or tiled=True and a multiple of 4
  try: pad the dim, or use another dim""",
    ),
    "all_to_all of a dim that is not there": (
        named("tp", "all_to_all", split_axis=2, concat_axis=0),
        sf.PlacementError,
        """all_to_all over tp: split_axis is 2, but the value has shape (4, 6)
  try: a dim from -2 to 1""",
    ),
    "constrain on a manual axis": (
        lambda: mapped(lambda x: sf.constrain(x, P(None, "dp")))(X),
        sf.PlacementError,
        """constrain: P(None, 'dp') names dp, which belongs to an enclosing shard_map
  try: give this axis only in in_placements and out_placements, or leave it out of axis_names""",
    ),
    "a pending argument": (
        lambda: mapped(fn, ([sf.Partial(), sf.Replicate()],), P(), axis_names={"dp"})(X),
        sf.PlacementError,
        """shard_map(fn), in_placements: x: Partial('sum') over dp; only a result can be Partial
  needed: equal shards on all ranks
  try: use sizes divisible by the number of ranks, and placements that fit each tensor""",
    ),
    "a pending maximum": (
        lambda: mapped(fn, P(), [sf.Partial("max"), sf.Replicate()])(X),
        sf.PlacementError,
        """shard_map(fn), out_placements: result: Partial('max') over dp; only a sum or a mean \
can be \
Partial
  needed: equal shards on all ranks
  try: use sizes divisible by the number of ranks, and placements that fit each tensor""",
    ),
    "no mesh": (
        lambda: sf.grad(lambda x: sf.shard_map(fn, None, P(), P())(x).sum())(X),
        sf.PlacementError,
        """shard_map(fn): no mesh is given, and no current mesh is set
  try: shard_map(fn, mesh, ...), or call the function inside `with use_mesh(mesh)`""",
    ),
    "another mesh than that of the call": (
        lambda: sf.shard(mapped(fn), sf.make_mesh((8,), ("dp",)), backend="aten")(X),
        sf.PlacementError,
        """shard_map(fn): the mesh used here is (dp=2, tp=4), but the enclosing call has the \
mesh (dp=8)
  needed: one mesh
  try: pass the same mesh to both calls, or no mesh to the inner call""",
    ),
    "a transform of torch.func around it": (
        lambda: torch.func.vmap(mapped(lambda x: sf.psum(x, "dp"), P(), P()))(X),
        sf.CaptureError,
        """shard_map: shard_map is called inside a transform of torch.func
  try: use shardfn's transforms (sf.vmap, sf.grad, ...) around it, which capture the function \
first""",
    ),
    "a collective inside a branch": (
        lambda: mapped(
            lambda x: torch.cond(x.sum() > 0, lambda x: sf.psum(x, "dp"), lambda x: x * 1, (x,))
        )(X),
        sf.CaptureError,
        """cond: the body calls psum, and the condition varies over dp
  try: call the collective before or after the branch or loop, or make the condition equal on \
all ranks of dp by psum or pmax""",
    ),
    "a collective inside an op that calls its graph once for each element": (
        lambda: mapped(
            lambda x: flex_attention(
                *3 * (x[:, None, None],), score_mod=lambda score, b, h, i, j: sf.psum(score, "dp")
            )
        )(X),
        sf.CaptureError,
        """shard_map(<lambda>): the function calls psum inside the op flex_attention
  try: call the collective before or after the op, or use a Python loop""",
    ),
    "an argument on a stage": (
        lambda: mapped(fn, P("dp", tp=1))(X),
        sf.PlacementError,
        """shard_map(fn), in_placements: x: P('dp', tp=1) is on a pipeline stage, but in shard_map \
every rank has a value
  needed: equal shards on all ranks
  try: use sizes divisible by the number of ranks, and placements that fit each tensor""",
    ),
    "a result on a stage": (
        lambda: mapped(fn, P("dp"), P("dp", tp=0))(X),
        sf.PlacementError,
        """shard_map(fn), out_placements: result: P('dp', tp=0) is on a pipeline stage, but in \
shard_map every rank has a value
  needed: equal shards on all ranks
  try: use sizes divisible by the number of ranks, and placements that fit each tensor""",
    ),
    "a stage among placements": (
        lambda: mapped(fn, [sf.Shard(0), sf.Stage(1)])(X),
        sf.PlacementError,
        """shard_map(fn), in_placements: x: Stage is not a placement that shard_map supports
  needed: equal shards on all ranks
  try: use sizes divisible by the number of ranks, and placements that fit each tensor""",
    ),
    "a strided shard": (
        lambda: mapped(fn, [strided_shard(0, 2), sf.Replicate()])(X),
        sf.PlacementError,
        """shard_map(fn), in_placements: x: _StridedShard is not a placement that shard_map supports
  needed: equal shards on all ranks
  try: use sizes divisible by the number of ranks, and placements that fit each tensor""",
    ),
    "no function": (
        lambda: sf.shard_map(3),
        sf.TreeError,
        "shard_map: a int\n  needed: a function\n  try: shard_map(fn, mesh, ...)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_named_with_what_to_do(case: str) -> None:
    call, kind, text = CASES[case]
    with sf.fake_world(8), pytest.raises(kind) as caught:
        call()
    assert without_line(caught.value) == text


def test_after_a_mistake_no_name_stays_bound() -> None:
    with sf.fake_world(8):
        with pytest.raises(sf.CaptureError):
            named("pd")()
        with pytest.raises(sf.CaptureError, match="outside of any shard_map"):
            sf.psum(X, "dp")
