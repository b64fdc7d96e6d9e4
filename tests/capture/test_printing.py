"""Programs as text: names of inputs from their paths, loops, results; short and whole."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn.capture.printed_names import dotted, dotted_names, is_name_of_path
from shardfn.capture.printing import legend


def same_text(text: str, wanted: str) -> None:
    """Equal, apart from columns and the lines of the source."""
    lines = [re.sub(r"\s+# \S+\.py:\d+$", "", line) for line in text.splitlines()]
    assert "\n".join(lines) == textwrap.dedent(wanted).strip()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("x", "x"),
        ("params['w1']", "params.w1"),
        ("args[0][2]", "args.0.2"),
        ("x.a", "x.a"),
        ("params['layers'][0]['w']", "params.layers.0.w"),
        ("p['a.b c']", "p.a_b_c"),
        ('p["it\'s"]', "p.it_s"),
        ("<closed over 0>", "closed_over_0"),
        ("p[(1, 'a')]", "p_1_a"),
        ("['']", "x"),
    ],
)
def test_a_path_is_printed_as_a_dotted_name(path: str, name: str) -> None:
    assert dotted(path) == name
    assert re.fullmatch(r"\w+(\.\w+)*", name)


def test_paths_that_look_alike_have_names_of_their_own() -> None:
    paths = ["x[0]", "x['0']", "x.0", "x['0_1']", "x['a b']", "x['a_b']"]
    names = dotted_names(paths)
    assert names == ["x.0", "x.0_1", "x.0_2", "x.0_1_1", "x.a_b", "x.a_b_1"]
    assert [is_name_of_path(n, p) for n, p in zip(names, paths, strict=True)] == [
        True, False, False, False, False, False,
    ]  # fmt: skip


def test_inputs_and_results_are_called_by_their_paths() -> None:
    def f(params: Any, mm: torch.Tensor) -> Any:
        return {"y": mm @ params["w 1"], "pair": (params["b"], 3)}

    args = {"w 1": torch.ones(3, 2), "b": torch.ones(2)}, torch.ones(5, 3)
    same_text(
        str(sf.jit(f, backend="aten").trace(*args)),
        """
        jit(f): 1 ops over global shapes
          in    %params.w_1: f32[3, 2]   # params['w 1']
          in    %params.b: f32[2]
          in    %mm: f32[5, 3]
          %mm_1 = mm(%mm, %params.w_1): f32[5, 2]
          return
            result.y = %mm_1: f32[5, 2]
            result.pair.0 = %params.b: f32[2]
        """,
    )


def test_a_loop_is_printed_with_its_body_in_the_whole_text() -> None:
    def f(w: torch.Tensor, xs: torch.Tensor) -> Any:
        def body(c: torch.Tensor, x: torch.Tensor) -> Any:
            c = torch.tanh(c @ w) + x
            return c, c.sum()

        return sf.scan(body, xs[0], xs)[1]

    traced = sf.jit(f, backend="aten").trace(torch.ones(4, 4), torch.ones(3, 5, 4))
    around = """
        jit(f): 3 ops over global shapes
          in    %w: f32[4, 4]
          in    %xs: f32[3, 5, 4]
          %select = select(%xs, 0, 0): f32[5, 4]
          %scan = scan(%w, %select, %xs): (f32[5, 4], f32[3])
          BODY
          %getitem_1 = getitem(%scan, 1): f32[3]
          return result = %getitem_1: f32[3]
    """
    body = """\
  3 steps of body(%carry: f32[5, 4], %step_input: f32[5, 4]):
              %mm = mm(%carry, %w): f32[5, 4]
              %tanh = tanh(%mm): f32[5, 4]
              %add = add(%tanh, %step_input): f32[5, 4]
              %sum_1 = sum(%add, []): f32[]
              return %add, %sum_1"""
    same_text(str(traced), around.replace("          BODY\n", ""))
    same_text(traced.text(), around.replace("BODY", body))


def test_a_branch_is_printed_with_both_graphs_in_the_whole_text() -> None:
    f = lambda x: sf.cond(x.sum() > 0, torch.sin, torch.cos, x)
    text = sf.jit(f, backend="aten").trace(torch.ones(3)).text()
    assert "    if true:\n      %sin = sin(%x): f32[3]" in text
    assert "    if false:\n      %cos = cos(%x): f32[3]" in text


def test_a_shard_map_is_printed_with_its_collective() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        summed = lambda x: sf.psum(x * sf.axis_index("dp"), "dp")
        text = str(sf.shard_map(summed, mesh, P("dp"), P()).trace(torch.ones(6, 3)))
    assert "%mul = mul(%prim_to_local, %axis_index): f32[3, 3]" in text
    assert "%psum = psum(%mul, dp, False): f32[3, 3]" in text
    assert text.splitlines()[-1] == "  return result = %prim_from_local: f32[3, 3]"


def test_many_inputs_and_results_are_shortened_and_the_whole_text_has_them_all() -> None:
    traced = sf.jit(lambda *xs: [x + 1 for x in xs], backend="aten").trace(*[torch.ones(2)] * 20)
    short, whole = str(traced), traced.text()
    assert "  ...   12 more inputs\n" in short and "  ...   12 more results\n" in short
    assert "more" not in whole
    assert all(f"result.{i} = %add" in whole for i in range(20))


def test_the_legend_explains_the_placements_that_occur_and_no_others() -> None:
    assert legend(["  in    %x: f32[3]   # x['8@dp']"]) == []
    assert legend(["  in    %x: f32[8@dp:2+1+0, 4; max@tp]"]) == [
        "  legend: n@axis: a dim of global size n, sharded over the mesh axis; @axis:n: each "
        "shard's size is a multiple of n; @axis+before+after: a shard with a halo of that "
        "many rows on each side; max@axis: a Partial max over the mesh axis"
    ]
    assert legend(["  %y = sum(%x, dim=0): f32[8; pp=1.2]"]) == [
        "  legend: axis=n: the value is only on pipeline stage n of the mesh axis"
    ]
    assert legend(["  %y = prim_redistribute(%x, ;|pp=@1): f32[8]"]) == []


def test_the_stage_of_a_value_stands_in_its_type() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("pp", "tp"))
        x = sf.distribute(torch.ones(4, 3), mesh, P("tp", pp=sf.Stage(1, chunk=2)))
        text = str(sf.shard(lambda x: x * 2, mesh, backend="aten").lower(x))
    assert "in    %x: f32[4@tp, 3; pp=1.2]" in text
    assert "axis=n: the value is only on pipeline stage n of the mesh axis" in text
