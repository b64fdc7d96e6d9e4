"""`rule`: sharding rules by users are proved when they are registered, count before ours, and
go when they are removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import run_ranks
from stagings import counts, forget
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P, RuleError
from shardfn.partition.rule_api import registry
from shardfn.partition.rule_api.einsum import parsed

aten = torch.ops.aten
MESHES = ({"dp": 2}, {"dp": 3}, {"dp": 2, "tp": 2})


@torch.library.custom_op("rules::scale", mutates_args=())
def scale(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return x * c


@torch.library.custom_op("rules::product", mutates_args=())
def product(
    x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None = None, relu: bool = False
) -> torch.Tensor:
    z = x @ y if bias is None else x @ y + bias
    return z.relu() if relu else z


@torch.library.custom_op("rules::moments", mutates_args=())
def moments(xs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack(xs).sum(0), torch.stack([x.sum(-1) for x in xs]).sum(0)


@torch.library.custom_op("rules::double", mutates_args=("x",))
def double(x: torch.Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op("rules::unread", mutates_args=())
def unread(x: torch.Tensor) -> torch.Tensor:
    return x + 1


scale.register_fake(lambda x, c: torch.empty_like(x))
scale.register_autograd(
    lambda ctx, g: (scale(g, ctx.saved_tensors[1]), (g * ctx.saved_tensors[0]).sum(0)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
product.register_fake(lambda x, y, bias=None, relu=False: x.new_empty(x.shape[0], y.shape[1]))
moments.register_fake(lambda xs: (torch.empty_like(xs[0]), xs[0].new_empty(xs[0].shape[:-1])))


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64
    )


X, C, Y, BIAS = randn(5, 3), randn(3), randn(3, 7), randn(7)


@pytest.fixture(autouse=True)
def no_rules() -> Iterator[None]:
    registry.clear()
    yield
    registry.clear()


def collectives(fn: Any, placements: Any, *args: Any, n: int = 2) -> list[str]:
    with simulated(dp=n) as mesh:
        lowered = sf.shard(fn, mesh, placements, backend="aten").lower(*args)
        return [c.kind for c in lowered.collectives]


def refused(*args: Any, **kwargs: Any) -> list[str]:
    with pytest.raises(RuleError) as error:
        sf.rule(*args, **kwargs)
    assert not registry.active(), "what is refused is not registered"
    return str(error.value).splitlines()


# What a rule does.


def test_without_a_rule_an_op_is_gathered_and_with_one_it_is_not() -> None:
    assert collectives(scale, (P("dp"), P()), X, C) == ["all_gather"]
    sf.rule(scale, "b c, c -> b c", example=(X, C))
    assert collectives(scale, (P("dp"), P()), X, C) == []
    assert collectives(scale, (P(None, "dp"), P("dp")), X, C) == []


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("cut", [P("dp"), P(None, "dp")])
def test_values_are_those_of_one_device(mesh: dict[str, int], cut: P) -> None:
    sf.rule(scale, "b c, c -> b c", example=(X, C))
    sf.rule(product, "i k, k j, j -> i j", need_whole="k", example=(X, Y, BIAS))
    fn = lambda x, c, y, bias: product(scale(x, c), y, bias).tanh()
    sf.check(
        fn,
        X,
        C,
        Y,
        BIAS,
        worlds=[mesh],
        placements=(cut, P(), P(None, "tp") if "tp" in mesh else P(), P()),
        rtol=1e-12,
    )


@pytest.mark.parametrize("mesh", MESHES)
def test_a_contracted_factor_leaves_a_pending_sum(mesh: dict[str, int]) -> None:
    sf.rule(product, "i k, k j, j -> i j", example=(X, Y))
    sf.check(product, X, Y, worlds=[mesh], placements=(P(None, "dp"), P("dp")), rtol=1e-12)
    assert collectives(product, (P(None, "dp"), P("dp")), X, Y) == ["all_reduce"]


def test_a_list_of_tensors_is_one_input_and_each_result_has_its_own_dims() -> None:
    sf.rule(moments, "... c -> ... c, ...", example=([X, 2 * X],))
    assert collectives(lambda x, y: moments([x, y]), P("dp"), X, X) == []
    assert collectives(lambda x, y: moments([x, y])[1], P(None, "dp"), X, X) == ["all_reduce"]
    sf.check(lambda x, y: moments([x, y]), X[None], X[None], placements=P(None, "dp"), rtol=1e-12)


@pytest.mark.parametrize("mesh", MESHES)
def test_the_gradient_of_a_custom_op_is_sharded_too(mesh: dict[str, int]) -> None:
    sf.rule(scale, "b c, c -> b c", example=(X, C))
    fn = sf.value_and_grad(lambda x, c: (scale(x, c) ** 2).sum(), argnums=(0, 1))
    assert torch.allclose(fn(X, C)[1][1], 2 * (X * X * C).sum(0))
    sf.check(fn, X, C, worlds=[mesh], placements=(P("dp"), P()), rtol=1e-12)
    assert "all_gather" not in collectives(fn, (P("dp"), P()), X, C)


def compiled() -> Any:
    sf.rule(scale, "b c, c -> b c", example=(X, C))
    fn = sf.value_and_grad(lambda x, c: (scale(x, c) ** 2).sum(), argnums=(0, 1))
    train = sf.shard(fn, sf.make_mesh((2,), ("dp",)), (P("dp"), P()), backend="inductor")
    outs = [train(X, C) for _ in range(2)]
    return (
        sf.full(outs[1]),
        [c.kind for c in train.lower(X, C).collectives],
        counts["compilations"],
    )


def test_a_rule_counts_on_real_ranks_with_inductor() -> None:
    for (value, gradients), kinds, compilations in run_ranks(2, compiled):
        assert_close(
            (value, gradients), (((X * C) ** 2).sum(), (2 * X * C * C, 2 * (X * X * C).sum(0)))
        )
        assert sorted(kinds) == ["all_reduce", "all_reduce"]
        assert compilations == 1


def test_a_function_is_given_the_call_and_answers_with_choices() -> None:
    seen = []

    @sf.rule(product, example=(X, Y, BIAS, True))
    def by_rows(call: Any) -> Any:
        seen.append((call.shapes, call.out_shapes, call["relu"], call["bias"].dtype))
        return [((sf.Shard(0), sf.Replicate(), "R"), (0,)), (("R", 1, 0), (sf.Shard(1),))]

    assert seen[0] == (((5, 3), (3, 7), (7,)), ((5, 7),), True, torch.float64)
    assert collectives(product, (P("dp"), P(), P()), X, Y, BIAS) == []
    assert repr(by_rows) == "rule(rules.product.default): by_rows"


def test_a_function_may_answer_with_a_mapping() -> None:
    sf.rule(product, lambda call: "i k, k j, j -> i j" if not call["relu"] else [], example=(X, Y))
    assert collectives(product, (P("dp"), P()), X, Y) == []
    assert collectives(lambda x, y: product(x, y, relu=True), (P("dp"), P()), X, Y) == [
        "all_gather"
    ]


def test_s8_4_a_rule_takes_the_place_of_ours_and_of_private_twins_and_ours_comes_back() -> None:
    fn, reshape = (lambda x: x.exp(), lambda x: torch.ops.aten._unsafe_view(x, [5, 3, 1]))
    assert collectives(fn, P("dp"), X) == collectives(reshape, P("dp"), X) == []
    with (
        sf.rule(aten.exp.default, "a b -> a b", need_whole="a", example=(X,)),
        sf.rule(aten.view.default, lambda call: []),
    ):
        assert collectives(fn, P("dp"), X) == collectives(reshape, P("dp"), X) == ["all_gather"]
        assert collectives(fn, P(None, "dp"), X) == []
    assert collectives(fn, P("dp"), X) == collectives(reshape, P("dp"), X) == []


def test_the_last_rule_counts_and_removing_it_brings_back_the_one_before() -> None:
    rows = sf.rule(scale, "b c, c -> b c", need_whole="c")
    columns = sf.rule(scale, "b c, c -> b c", need_whole="b")
    assert collectives(scale, (P("dp"), P()), X, C) == ["all_gather"]
    columns.remove()
    columns.remove()
    assert collectives(scale, (P("dp"), P()), X, C) == []
    rows.remove()
    assert collectives(scale, (P("dp"), P()), X, C) == ["all_gather"]


def test_an_op_that_capture_takes_apart_stays_whole_if_it_has_a_rule() -> None:
    fn = lambda x: x.mean(1)
    names = lambda: {
        n.target
        for n in sf.grad(lambda x: fn(x).sum()).trace(X).program.graph.graph.nodes
        if n.op == "call_function"
    }
    assert aten.mean.dim not in names()
    with sf.rule(aten.mean.dim, "b c -> b", need_whole="c", example=(X, [1])):
        assert aten.mean.dim in names()
        assert collectives(fn, P("dp"), X) == []
        sf.check(fn, X, worlds=MESHES)
    assert aten.mean.dim not in names()


# What is staged.


def test_a_new_rule_partitions_anew_and_captures_nothing_and_the_old_program_is_kept() -> None:
    with simulated(dp=2) as mesh:
        fn = sf.shard(scale, mesh, (P("dp"), P()), backend="aten")
        forget()
        assert torch.equal(sf.full(fn(X, C)), X * C)
        counted = lambda: (counts["captures"], counts["partitions"])
        assert counted() == (1, 1)
        with sf.rule(scale, "b c, c -> b c"):
            for _ in range(2):
                assert torch.equal(sf.full(fn(X, C)), X * C)
                assert counted() == (1, 2)
        fn(X, C)
        assert counted() == (1, 2), "without the rule the first program is right again"


# What is proved.


def test_a_factor_that_the_op_works_along_is_refused_with_the_first_wrong_element() -> None:
    lines = refused(aten.cumsum.default, "a b -> a b", example=(torch.ones(5, 3), 0))
    assert lines == [
        "rule(aten.cumsum.default): the strategy (0,) -> (0,) is wrong on 2 ranks",
        "  inputs (5, 3)",
        (
            "  result 0, shape (5, 3): the first different element is at (3, 0): got 1.0, "
            "expected 4.0"
        ),
        "  needed: the same result as the op on global inputs",
        (
            "  try: name in need_whole each dim that the op needs whole on every rank (in a "
            "strategy of a rule function, use 'R', replicated); or correct the rule"
        ),
    ]


def test_a_pending_sum_is_refused_where_the_op_is_not_linear() -> None:
    for rule in ("i k, k j, j -> i j", lambda call: [(("sum", "R"), ("sum",))]):
        first, inputs, differs, *_ = refused(product, rule, example=(X, Y, None, True))
        assert "-> ('sum',) is wrong on 2 ranks" in first
        assert inputs == "  inputs (5, 3), (3, 7)"
        assert "the first different element is at (0, " in differs


def test_an_op_that_fails_on_pieces_and_pieces_of_a_wrong_shape_are_refused() -> None:
    lines = refused(product, lambda call: [(("R", 0), ("sum",))], example=(X, Y))
    assert lines[2].startswith("  the op fails on the shards: ")
    lines = refused(aten.t.default, "a b -> a b", example=(X[:, :3],))
    assert lines[0].startswith(
        "rule(aten.t.default), 'a b -> a b': factor a has two sizes: 5 in input 0, 3 in result 0"
    )
    lines = refused(aten.t.default, lambda call: [((0,), (0,))], example=(X,))
    assert lines[2] == (
        "  the op fails on the shards: t_default has the local shape (3, 3), but its "
        "placement gives (2, 5)"
    )


def test_a_wrong_rule_that_was_not_proved_is_refused_where_it_is_used() -> None:
    sf.rule(aten.t.default, lambda call: [((0,), (0,))])
    with pytest.raises(
        RuleError, match="rule\\(aten.t.default\\): the op returns \\(3, 3\\) on a rank"
    ) as error:
        collectives(lambda x: x.t(), P("dp"), X)
    assert "try: sf.rule(..., example=(arguments of the op))" in str(error.value)


def test_a_rule_is_proved_for_other_arguments_on_demand() -> None:
    rule = sf.rule(product, lambda call: "i k, k j, j -> i j", example=(X, Y))
    rule.check(X, Y, None)
    with pytest.raises(RuleError, match="is wrong on 2 ranks"):
        rule.check(X, Y, relu=True)


@pytest.mark.filterwarnings("ignore:Converting a tensor")
def test_a_wrong_gradient_is_refused_and_the_rule_taken_back() -> None:
    @torch.library.custom_op("rules::impure", mutates_args=())
    def impure(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    impure.register_fake(torch.empty_like)
    impure.register_autograd(lambda ctx, g: g * float(g.sum()))
    lines = refused(impure, "a b -> a b", example=(X,))
    assert lines[0] == "rule(rules.impure.default), its gradient"
    assert (
        lines[1].startswith("grad(rules.impure.default): the function ")
        and "a tensor's value" in lines[1]
    )


# What is refused.

NEEDED = (
    "  needed: a name for each dim, as in 'b i k, k j -> b i j', for rules::scale(Tensor x, "
    "Tensor c) -> Tensor"
)
MAPPINGS = {
    "b c, c": ["the rule must have exactly one arrow (->) between inputs and results"],
    "b c, c -> b c -> b": ["the rule must have exactly one arrow (->) between inputs and results"],
    "b c -> b c": ["the rule names 1 inputs, but the op takes 2 tensor arguments"],
    "b c, c -> b c, b": ["the rule names 2 results, but the op returns 1"],
    "b c, c -> b d": ["the dim name d is in a result of the rule, but in none of its inputs"],
    "b b, c -> b c": ["input 'b b': it names b twice"],
    "b-c, c -> c": ["input 'b-c': 'b-c' is not a name"],
    "b ..., c -> b ...": [
        f"{kind} 'b ...': ... stands for leading dims and must come first"
        for kind in ("input", "result")
    ],
}


@pytest.mark.parametrize("text", list(MAPPINGS))
def test_a_mapping_that_cannot_be_read_is_refused(text: str) -> None:
    wrong = MAPPINGS[text]
    assert refused(scale, text) == [
        f"rule(rules.scale.default), {text!r}: {wrong[0]}",
        *(f"  {w}" for w in wrong[1:]),
        NEEDED,
    ]


def test_need_whole_names_factors() -> None:
    assert refused(scale, "b c, c -> b c", need_whole="k")[0].endswith(
        "need_whole names k, which is not a dim name in the rule"
    )


def test_a_pending_sum_needs_an_example() -> None:
    assert refused(product, "i k, k j, j -> i j") == [
        (
            "rule(rules.product.default), 'i k, k j, j -> i j': sharding k leaves a Partial "
            "sum, which is right only if the op sums over k"
        ),
        "  needed: an example, with which shardfn checks the rule",
        "  try: example=(arguments of the op), or need_whole=('k',)",
    ]


def test_dims_and_sizes_that_do_not_fit_are_refused_all_at_once() -> None:
    assert refused(scale, "b c d, b -> b c d", example=(X, C)) == [
        (
            "rule(rules.scale.default), 'b c d, b -> b c d': input 0 has 2 dims, shape (5, "
            "3); the rule names 'b c d'"
        ),
        "  result 0 has 2 dims, shape (5, 3); the rule names 'b c d'",
        "  factor b has two sizes: 5 in input 0, 3 in input 1",
        (
            "  try: give one name for each dim, equal names for equal sizes, and 1 for a dim "
            "of size 1; or pass a function as the rule"
        ),
    ]


def test_a_dim_of_size_one_is_written_so() -> None:
    sf.rule(scale, "b c, 1 -> b c", example=(X, C[:1]))
    assert refused_size("b c, 1 -> b c") == "factor 1 has two sizes: 3 in input 1, 1 in the rule"


def refused_size(text: str) -> str:
    with pytest.raises(RuleError) as error:
        sf.rule(scale, text, example=(X, C))
    return str(error.value).splitlines()[0].partition(": ")[2]


OPS = {
    "rules::nothing": ["rule(rules::nothing): the op does not exist", "  needed: one op"],
    torch.exp: ["rule(exp): the op does not exist: it is a builtin_function_or_method"],
    double: [
        "rule(rules.double.default): the op writes to its arguments: "
        "rules::double(Tensor(a0!) x) -> ()"
    ],
    aten.zeros.default: [
        "rule(aten.zeros.default): the op takes no tensor, so a rule has nothing to place"
    ],
    aten.bernoulli.p: [
        "rule(aten.bernoulli.p): the op draws random numbers, and each rank would draw "
        "different ones"
    ],
    aten.sum: ["rule(sum): the op has 2 overloads: aten.sum.dim_IntList, aten.sum.default"],
    aten.dropout.default: [
        "rule(aten.dropout.default): the op draws random numbers, and each rank would draw "
        "different ones"
    ],
    aten.linear.default: [
        (
            "rule(aten.linear.default): the op is composite: shardfn decomposes it into other "
            "ops at capture, which `fn.trace(*args)` shows"
        ),
        "  try: rules for those",
    ],
    torch.ops.shardfn.prim_align.default: [
        "rule(shardfn.prim_align.default): the op is one of shardfn's own ops"
    ],
}


@pytest.mark.parametrize("op", list(OPS), ids=lambda op: getattr(op, "__name__", str(op)))
def test_an_op_that_can_have_no_rule_is_refused(op: Any) -> None:
    assert refused(op, "a -> a")[: len(OPS[op])] == OPS[op]


def test_arguments_that_are_none_are_refused() -> None:
    said = "rule(rules.scale.default): "
    assert refused(scale, ["b c, c -> b c"]) == [
        said + "the rule is a list",
        "  try: a text, or a function",
    ]
    assert refused(scale, lambda call: [], need_whole="b") == [
        said + "need_whole goes with a text",
        "  try: 'R' in the function's strategies",
    ]
    lines = [
        said + "example is a tensor",
        "  try: example=(x,), with all positional arguments of the op",
    ]
    assert refused(scale, "b c, c -> b c", example=X) == lines


def test_a_composite_op_says_what_it_becomes() -> None:
    (first, fix) = refused(aten.linear.default, "b i, o i -> b o", example=(X, randn(4, 3)))
    assert first == (
        "rule(aten.linear.default): the op is composite: shardfn decomposes it into other ops "
        "at capture: aten.t.default, aten.mm.default"
    )
    assert fix == "  try: rules for those"


def test_an_op_without_a_fake_implementation_is_refused() -> None:
    first, fix = refused(unread, "a b -> a b", example=(X,))
    assert first.startswith(
        "rule(rules.unread.default), example: the op fails on the example: There was no fake "
        "impl registered"
    )
    assert fix == (
        "  try: give arguments that the op accepts, and a fake implementation by "
        "torch.library.register_fake"
    )


@pytest.mark.parametrize(
    "answer", [3, [(("R",), ("R",))], [((0, 5), (0,))], [(("avg", "R"), ("R",))]], ids=str
)
def test_an_answer_that_is_no_list_of_choices_is_refused(answer: Any) -> None:
    text = refused(scale, lambda call: answer, example=(X, C))[0]
    assert "fails: the rule " in text or "fails: it raises " in text


def test_a_mapping_is_read_into_rows() -> None:
    factors = parsed("...k,k j->... j", ("k",))
    assert factors.ins == (("...", "k"), ("k", "j"))
    assert factors.outs == (("...", "j"),)
    assert factors.contracted == []
