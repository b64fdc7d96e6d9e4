"""One rank's program as text: a training step, a loop and a shard_map, whole."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P


def same_text(text: str, wanted: str) -> None:
    """Equal, apart from columns and the lines of the source; the header is on several lines."""
    lines = [re.sub(r"\s+# \S+\.py:\d+$", "", line) for line in text.splitlines()]
    lines = [re.sub(r"(\S) {2,}(?=\d)", r"\1  ", line) for line in lines]
    lines[:1] = lines[0].replace(": ", "; ").split("; ")
    assert "\n".join(lines) == textwrap.dedent(wanted).strip()


@pytest.fixture
def mesh() -> Any:
    with sf.fake_world(6):
        yield sf.make_mesh((2, 3), ("dp", "tp"))


def test_a_training_step_is_printed_whole(mesh: Any) -> None:
    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ params["w1"]) @ params["w2"]).sum()

    def step(params: Any, x: torch.Tensor) -> Any:
        value, grads = sf.value_and_grad(loss)(params, x)
        return sf.tree_map(lambda p, g: p - g, params, grads), value

    where = {"w1": P(None, "tp"), "w2": P("tp", None)}
    params = {"w1": torch.ones(4, 6), "w2": torch.ones(6, 2)}
    low = sf.shard(step, mesh, (where, P("dp")), backend="aten").lower(params, torch.ones(8, 4))
    same_text(
        low.text(),
        """
        shard(step) on mesh (dp=2, tp=3)
        23 ops of one rank
        3 all_reduce over dp, 52 B
        1 all_reduce over tp, 4 B
          legend: n@axis: a dim of global size n, sharded over the mesh axis; sum@axis: a \
Partial sum over the mesh axis
          in    %params.w1: f32[4, 6@tp]
          in    %params.w2: f32[6@tp, 2]
          in    %x: f32[8@dp, 4]
          %mm = mm(%x, %params.w1): f32[8@dp, 6@tp]
          %tanh = tanh(%mm): f32[8@dp, 6@tp]
          %mm_1 = mm(%tanh, %params.w2): f32[8@dp, 2; sum@tp]
          %sum = sum(%mm_1, []): f32[; sum@dp sum@tp]
          %all_reduce = all_reduce[sum, dp](%sum): f32[]  4 B
          %wait_tensor = wait_tensor(%all_reduce): f32[; sum@tp]
          %all_reduce_1 = all_reduce[sum, tp](%wait_tensor): f32[]  4 B
          %t = t(%tanh): f32[6@tp, 8@dp]
          %full = full([], 1, dtype=torch.float32, device=cpu): f32[]
          %expand = expand(%full, [4, 2]): f32[8@dp, 2]
          %mm_2 = mm(%t, %expand): f32[6@tp, 2; sum@dp]
          %all_reduce_2 = all_reduce[sum, dp](%mm_2): f32[2, 2]  16 B
          %t_1 = t(%params.w2): f32[2, 6@tp]
          %mm_3 = mm(%expand, %t_1): f32[8@dp, 6@tp]
          %tanh_backward = tanh_backward(%mm_3, %tanh): f32[8@dp, 6@tp]
          %t_2 = t(%x): f32[4, 8@dp]
          %mm_4 = mm(%t_2, %tanh_backward): f32[4, 6@tp; sum@dp]
          %all_reduce_3 = all_reduce[sum, dp](%mm_4): f32[4, 2]  32 B
          %wait_tensor_1 = wait_tensor(%all_reduce_3): f32[4, 6@tp]
          %sub = sub(%params.w1, %wait_tensor_1): f32[4, 6@tp]
          %wait_tensor_2 = wait_tensor(%all_reduce_2): f32[6@tp, 2]
          %sub_1 = sub(%params.w2, %wait_tensor_2): f32[6@tp, 2]
          %wait_tensor_3 = wait_tensor(%all_reduce_1): f32[]
          return
            result.0.w1 = %sub: f32[4, 6@tp]
            result.0.w2 = %sub_1: f32[6@tp, 2]
            result.1 = %wait_tensor_3: f32[]
        """,
    )


def test_a_loop_is_printed_with_its_body_and_the_collectives_in_it(mesh: Any) -> None:
    def f(xs: torch.Tensor) -> torch.Tensor:
        def body(c: torch.Tensor, x: torch.Tensor) -> Any:
            c = torch.tanh(c + x.sum())
            return c, c

        return sf.scan(body, torch.zeros(()), xs)[0]

    low = sf.shard(f, mesh, (P(None, "dp"),), backend="aten").lower(torch.ones(3, 4))
    same_text(
        low.text(),
        """
        shard(f) on mesh (dp=2, tp=3)
        3 ops of one rank
        3 all_reduce over dp, 12 B
          legend: n@axis: a dim of global size n, sharded over the mesh axis; sum@axis: a \
Partial sum over the mesh axis
          in    %xs: f32[3, 4@dp]
          coord %coord_dp: this rank's index on mesh axis dp
          coord %coord_tp: this rank's index on mesh axis tp
          %full = full([], 0, dtype=torch.float32, device=cpu): f32[]
          %scan = scan(%coord_dp, %coord_tp, %full, %xs): (f32[])
            3 steps of body(%carry: f32[], %step_input: f32[4@dp]):
              %sum = sum(%step_input, []): f32[; sum@dp]
              %all_reduce = all_reduce[sum, dp](%sum): f32[]  4 B
              %wait_tensor = wait_tensor(%all_reduce): f32[]
              %add = add(%carry, %wait_tensor): f32[]
              %tanh = tanh(%add): f32[]
              return %tanh
          %getitem = getitem(%scan, 0): f32[]
          return result = %getitem: f32[]
        """,
    )
    short = str(low)
    assert "steps of body" in short and "all_reduce[sum, dp]" in short


def test_a_shard_map_introduces_the_coordinate_that_it_reads(mesh: Any) -> None:
    summed = lambda x: sf.psum(x * sf.axis_index("dp"), "dp")
    mapped = sf.shard_map(summed, in_placements=P("dp"), out_placements=P())
    low = sf.shard(mapped, mesh, (P("dp"),), backend="aten").lower(torch.ones(6, 3))
    same_text(
        str(low),
        """
        shard(shard_map(<lambda>)) on mesh (dp=2, tp=3)
        4 ops of one rank
        1 all_reduce over dp, 36 B
          legend: n@axis: a dim of global size n, sharded over the mesh axis
          in    %x: f32[6@dp, 3]
          coord %coord_dp: this rank's index on mesh axis dp
          %clone = clone(%coord_dp): i64[]
          %mul = mul(%x, %clone): f32[3, 3]
          %all_reduce = all_reduce[sum, dp](%mul): f32[3, 3]  36 B
          %wait_tensor = wait_tensor(%all_reduce): f32[3, 3]
          return result = %wait_tensor: f32[3, 3]
        """,
    )


def test_an_input_called_as_a_coordinate_keeps_its_name(mesh: Any) -> None:
    def f(coord_dp: torch.Tensor) -> torch.Tensor:
        return sf.constrain(coord_dp * 2, P("dp"))

    low = sf.shard(f, mesh, (P(),), P("dp"), backend="aten").lower(torch.ones(6))
    text = str(low)
    assert "in    %coord_dp: f32[6]" in text
    assert "coord %coord_dp_1: this rank's index on mesh axis dp" in text
    assert "_default" not in text


def test_names_are_unique_and_every_name_is_introduced_before_its_use(mesh: Any) -> None:
    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ params["w"]) ** 2).mean()

    low = sf.shard(sf.bucketed_grad(loss), mesh, (P(None, "tp"), P("dp")), backend="aten").lower(
        {"w": torch.ones(4, 6)}, torch.ones(8, 4)
    )
    introduced: set[str] = set()
    for line in low.text().splitlines():
        made, _, used = line.partition(" = ")
        new = re.findall(r"%[\w.]+", made)
        if made.startswith("    result"):
            new = []
        assert set(re.findall(r"%[\w.]+", used)) <= introduced, line
        assert not introduced & set(new), line
        introduced |= set(new)
