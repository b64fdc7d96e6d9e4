"""What bucketed_grad refuses, and in which words; plans that are edited and passed back;
gradients that stay unreduced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from bucketed import plan_is_what_runs
from equality import close
from message import without_line
from torch.utils._pytree import tree_leaves

import shardfn as sf
from shardfn import P, Partial

HERE = re.compile(re.escape(__file__) + r":\d+")
SIZE_FIX = "  try: a positive int, or text such as '512KB', '25MB' or '1GiB'"
G = torch.Generator().manual_seed(0)
X = torch.randn(5, 4, generator=G, dtype=torch.float64)
PARAMS = {k: torch.randn(4, 4, generator=G, dtype=torch.float64) for k in "abcd"}
SIZE = 4 * 4 * 8
WHOLE, ROWS = P(), P("dp")


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with sf.fake_world(2):
        yield


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for name in "abcd":
        x = torch.tanh(x @ params[name])
    return (x**2).mean()


def refusal(kind: type[sf.ShardError], call: Callable[[], Any]) -> tuple[sf.ShardError, str]:
    """The error and its text, with HERE for lines of this file."""
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return caught.value, without_line(caught.value)


def sharded(fn: Any, placed: Any = (WHOLE, ROWS), out: Any = None, axis: str = "dp") -> Any:
    return sf.shard(fn, sf.make_mesh((2,), (axis,)), placed, out, backend="aten")


def bucketed(placed: Any = WHOLE, **options: Any) -> Any:
    return sharded(sf.bucketed_grad(loss, **options), (placed, P("dp")))


@pytest.mark.parametrize("what", ["cap", "first_cap", "max_in_flight"])
def test_sizes_that_are_none_are_refused_before_any_call(what: str) -> None:
    for size, said in (
        (0, "0 is not positive"),
        (-1, "-1 is not positive"),
        ("0MB", "'0MB' is not positive"),
    ):
        error, text = refusal(
            sf.ShardError, lambda size=size: sf.bucketed_grad(loss, **{what: size})
        )
        assert text == f"bucketed_grad(loss), {what}: {said}\n{SIZE_FIX}"
        assert error.fix == SIZE_FIX.removeprefix("  try: ")
    for size in ("25 megabytes", "25mb", "", "-1MB", 1.5, True, [25]):
        _, text = refusal(sf.ShardError, lambda size=size: sf.bucketed_grad(loss, **{what: size}))
        assert text == f"bucketed_grad(loss), {what}: {size!r} is not a number of bytes\n{SIZE_FIX}"


@pytest.mark.parametrize("what", ["cap", "max_in_flight"])
def test_none_is_no_size(what: str) -> None:
    _, text = refusal(sf.ShardError, lambda: sf.bucketed_grad(loss, **{what: None}))
    assert text == f"bucketed_grad(loss), {what}: None is not a number of bytes\n{SIZE_FIX}"


def test_s9_1_a_first_cap_above_the_cap_is_refused() -> None:
    fix = "make first_cap at most cap, so that the first bucket closes early"
    for cap, first in (
        ("512KB", "1MB"),
        ("1MB", "1MiB"),
        (10, 11),
        ("512KB", "".join(["1", "MB"])),
    ):
        error, text = refusal(
            sf.ShardError, lambda cap=cap, first=first: sf.bucketed_grad(loss, cap, first)
        )
        assert text == (
            f"bucketed_grad(loss), first_cap: first_cap {first!r} is above cap {cap!r}\n "
            f" try: {fix}"
        )
        assert error.fix == fix


def test_s9_1_the_default_first_cap_gives_way_to_a_small_cap() -> None:
    for options in (
        {"cap": "512KB"},
        {"cap": 1},
        {"cap": "1MB", "first_cap": "1MB"},
        {"cap": 10, "first_cap": 10},
    ):
        sf.bucketed_grad(loss, **options)
    assert {b.cap for b in bucketed(cap=SIZE).lower(PARAMS, X).plan.buckets} == {SIZE}
    assert bucketed().lower(PARAMS, X).plan.buckets[0].cap == 2**20, (
        "1 MiB, as DistributedDataParallel has it"
    )


def test_wrong_options_inside_a_step_come_out_as_they_are() -> None:
    def step(*caps: Any) -> Any:
        return sharded(lambda p, x: sf.bucketed_grad(loss, *caps)(p, x)[1])

    _, text = refusal(sf.ShardError, lambda: step("zz")(PARAMS, X))
    assert text == f"bucketed_grad(loss), cap: 'zz' is not a number of bytes\n{SIZE_FIX}"
    _, text = refusal(sf.ShardError, lambda: step("512KB", "1MB")(PARAMS, X))
    assert text.startswith("bucketed_grad(loss), first_cap: first_cap '1MB' is above cap '512KB'\n")
    step("512KB").lower(PARAMS, X)


def test_parameters_that_are_not_floating_are_all_named() -> None:
    params = {
        **PARAMS,
        "a": torch.ones(4, 4, dtype=torch.int64),
        "m": torch.ones(2, dtype=torch.bool),
        "n": None,
        "k": 3,
    }
    for call in (sf.bucketed_grad(loss), bucketed()):
        error, text = refusal(sf.TreeError, lambda call=call: call(params, X))
        assert text == "\n".join([
            "bucketed_grad(loss), argument params['a']: it cannot be differentiated",
            "  params['a'] is torch.int64",
            "  params['m'] is torch.bool",
            "  params['k'] is of type int",
            "  needed: floating tensors",
            "  try: set argnums to arguments that hold only floating-point tensors",
        ])  # fmt: skip
        assert error.arg_path == "params['a']"


def test_a_reduce_dtype_that_is_not_floating() -> None:
    for dtype in (torch.int32, "float32", float):
        _, text = refusal(
            sf.ShardError, lambda dtype=dtype: sf.bucketed_grad(loss, reduce_dtype=dtype)(PARAMS, X)
        )
        assert text == (
            f"bucketed_grad(loss), reduce_dtype: {dtype!r} is not a floating dtype\n  try: "
            "give a floating-point dtype such as torch.float32"
        )


def test_unused_parameters_have_a_zero_gradient_and_are_listed() -> None:
    params = {
        **PARAMS,
        "z": torch.ones(3, dtype=torch.float64),
        "y": [torch.ones((), dtype=torch.float32)],
    }
    for placed in (P(), {**dict.fromkeys(PARAMS, P("dp")), "z": P("dp"), "y": [P()]}):
        fn = bucketed(placed)
        _, grads = sf.full(fn(params, X))
        assert torch.equal(grads["z"], torch.zeros(3, dtype=torch.float64)) and torch.equal(
            grads["y"][0], torch.zeros(())
        )
        low = fn.lower(params, X)
        assert set(low.plan.unused) == {"params['z']", "params['y'][0]"}
        assert not {"params['z']", "params['y'][0]"} & {
            leaf for b in low.plan.buckets for leaf in b.leaves
        }
        plan_is_what_runs(low)


def test_s9_3_an_ignore_that_matches_nothing() -> None:
    fix = "give a predicate of paths such as those above, or a tree of bools with at least one True"
    said = "it matches no leaf\n  the leaves are params['a'], params['b'], params['c'], params['d']"
    for ignore in (lambda path: "w" in path, False, dict.fromkeys("abcd", False)):
        error, text = refusal(
            sf.TreeError, lambda ignore=ignore: bucketed(ignore=ignore)(PARAMS, X)
        )
        assert text == f"bucketed_grad(loss), ignore: {said}\n  try: {fix}"
        assert error.fix == fix


def test_s9_3_an_ignore_that_does_not_fit_says_where() -> None:
    fix = (
        "give a prefix tree of bools over the differentiated argument, or a predicate of the "
        "leaf's path"
    )
    cases = {
        "typo": (
            {"a": True, "e": True},
            [
                "no leaf is at params['e']",
                *(f"the tree has no bool for params[{k!r}]" for k in "bcd"),
            ],
        ),
        "no bool": ({**dict.fromkeys("abcd", False), "b": "yes"}, ["params['b'] is 'yes'"]),
        "a name": ("a", ["params is 'a'"]),
    }
    for ignore, lines in cases.values():
        _, text = refusal(sf.TreeError, lambda ignore=ignore: bucketed(ignore=ignore)(PARAMS, X))
        assert text == "\n".join(
            [
                "bucketed_grad(loss), ignore: ignore does not fit the leaves",
                *(f"  {s}" for s in lines),
                f"  try: {fix}",
            ]
        )


OTHER: dict[str, Callable[[sf.BucketPlan], Any]] = {
    "more leaves": lambda p: bucketed(plan=p)({**PARAMS, "e": X}, X),
    "fewer leaves": lambda p: sharded(
        sf.bucketed_grad(lambda params, x: (x @ params["a"]).mean(), plan=p)
    )({"a": PARAMS["a"]}, X),
    "other sizes": lambda p: bucketed(plan=p)(
        {**PARAMS, "d": torch.ones(4, 5, dtype=torch.float64)}, X
    ),
    "another dtype": lambda p: bucketed(plan=p)(
        {k: w.float() for k, w in PARAMS.items()}, X.float()
    ),
    "another axis": lambda p: sharded(sf.bucketed_grad(loss, plan=p), (P(), P("tp")), axis="tp")(
        PARAMS, X
    ),
    "another placement": lambda p: bucketed(P("dp"), plan=p)(PARAMS, X),
    "no mesh": lambda p: sf.bucketed_grad(loss, plan=p)(PARAMS, X),
    "another dtype to send": lambda p: bucketed(plan=p, reduce_dtype=torch.float32)(PARAMS, X),
    "an ignored leaf": lambda p: bucketed(plan=p, ignore=lambda path: "'b'" in path)(PARAMS, X),
}
SAID = {
    "more leaves": [
        "bucketed_grad(loss), plan: the bucket plan has other leaves than the function",
        "the plan lacks params['e']",
    ],
    "fewer leaves": [
        "plan: the bucket plan has other leaves than the function",
        "the plan has also params['d']",
        "the plan has also params['b']",
    ],
    "other sizes": [
        (
            "shard(bucketed_grad(loss)), plan: params['d'] sends 160 bytes of torch.float64, "
            "but the plan has 128 bytes of torch.float64"
        )
    ],
    "another dtype": [
        "plan: params['d'] sends 64 bytes of torch.float32, but the plan has 128 bytes of "
        "torch.float64"
    ],
    "another axis": [
        "plan: params['d'] has an all_reduce over tp in the ",
        ", but the plan has no bucket for it",
    ],
    "another placement": [
        (
            "plan: params['a'] has an all_gather over dp in the forward, but the plan has no "
            "bucket for it"
        )
    ],
    "no mesh": [
        "plan: the plan has collectives that this program does not have",
        "the bucket plan sends params['a'] by an all_reduce over dp in the ",
    ],
    "another dtype to send": [
        "plan: params['d'] sends 64 bytes of torch.float32, but the plan has 128 bytes of "
        "torch.float64"
    ],
    "an ignored leaf": [
        "the plan has collectives that this program does not have",
        "the bucket plan sends params['b'] by an all_reduce over dp in the ",
    ],
}


@pytest.mark.parametrize("case", list(OTHER))
def test_a_plan_of_another_program_is_refused(case: str) -> None:
    plan = bucketed(cap=SIZE).lower(PARAMS, X).plan
    error, text = refusal(sf.TreeError, lambda: OTHER[case](plan))
    for words in SAID[case]:
        assert words in text, text
    fixes = (
        "use the plan of the same program: fn.lower(...).plan",
        "use the plan of the same function: fn.lower(...).plan",
    )
    assert text.splitlines()[-1].removeprefix("  try: ") in fixes and error.fix in fixes


def test_what_is_no_plan_is_refused_in_words() -> None:
    for plan in ("plan.json", {"buckets": []}, 3):
        with pytest.raises(sf.ShardError) as error:
            bucketed(plan=plan)(PARAMS, X)
        assert "AttributeError" not in str(error.value) and "plan" in str(error.value)


def contents(plan: sf.BucketPlan) -> set[Any]:
    """What each bucket holds, in any order."""
    return {(b.kind, b.axis, frozenset(zip(b.leaves, b.sizes, strict=True))) for b in plan.buckets}


EDITS: dict[str, Callable[[sf.BucketPlan, list[int]], sf.BucketPlan]] = {
    "as it is": lambda p, r: p,
    "from JSON": lambda p, r: sf.BucketPlan.from_json(p.to_json()),
    "all in one": lambda p, r: p.merge(*r),
    "first and last": lambda p, r: p.merge(r[0], r[-1]),
    "merged and split elsewhere": lambda p, r: p.merge(*r).split(r[0], 3),
    "split into leaves": lambda p, r: (
        p.merge(*r).split(r[0], 1).split(r[0] + 1, 1).split(r[0] + 2, 1)
    ),
    "buckets in another order": lambda p, r: p.renumbered(reversed(p.buckets)),
    "leaves in another order": lambda p, r: p.renumbered(
        attrs.evolve(b, leaves=b.leaves[::-1], sizes=b.sizes[::-1]) for b in p.buckets
    ),
}


@pytest.mark.parametrize(
    ("edit", "placed"),
    [
        *((e, WHOLE) for e in EDITS),
        ("merged and split elsewhere", ROWS),
        ("buckets in another order", ROWS),
    ],
    ids=str,
)
def test_s9_2_an_edited_plan_gives_the_same_values_and_exactly_its_buckets(
    edit: str, placed: sf.P
) -> None:
    fn = bucketed(placed, cap=2 * SIZE, first_cap=SIZE)
    plan = fn.lower(PARAMS, X).plan
    wanted = EDITS[edit](plan, [b.index for b in plan.buckets if b.kind != "all_gather"])
    followed = bucketed(placed, plan=wanted)
    low = followed.lower(PARAMS, X)
    assert contents(low.plan) == contents(wanted)
    plan_is_what_runs(low)
    for a, b in zip(
        tree_leaves(sf.full(followed(PARAMS, X))), tree_leaves(sf.full(fn(PARAMS, X))), strict=True
    ):
        assert torch.equal(a, b), "two terms have one sum, however they travel"


def test_mixed_leaves_in_one_bucket_are_refused() -> None:
    plan = bucketed(P("dp"), cap=1).lower(PARAMS, X).plan
    gather, reduction = (
        next(b for b in plan.buckets if b.kind == kind) for kind in ("all_gather", "reduce_scatter")
    )
    mixed = attrs.evolve(
        plan,
        buckets=tuple(
            attrs.evolve(b, index=gather.index) if b is reduction else b for b in plan.buckets
        ),
    )
    refusal(sf.TreeError, lambda: bucketed(P("dp"), plan=mixed)(PARAMS, X))
    refusal(
        sf.TreeError,
        lambda: bucketed(P("dp"), plan=plan.merge(gather.index, reduction.index))(PARAMS, X),
    )


def test_dependent_leaves_in_one_bucket_are_refused() -> None:
    inner = lambda plan: sf.bucketed_grad(lambda w, x: ((x @ w) ** 3).sum(), cap=1, plan=plan)
    outer = lambda plan=None: sharded(
        sf.bucketed_grad(lambda w, x: inner(plan)(w, x)[1].pow(2).sum(), cap=1, plan=plan)
    )
    plan = outer().lower(PARAMS["a"], X).plan
    assert [b.leaves for b in plan.buckets] == [("w",), ("w",)], (
        "the gradient of a gradient waits for it"
    )
    assert contents(outer(plan).lower(PARAMS["a"], X).plan) == contents(plan)
    one = attrs.evolve(
        plan, buckets=tuple(attrs.evolve(b, index=0, region=0) for b in plan.buckets)
    )
    refusal(sf.TreeError, lambda: outer(one)(PARAMS["a"], X))


def test_s9_2_an_edit_of_the_second_call_in_a_program_is_followed() -> None:
    def twice(plan: Any = None) -> Any:
        fn = sf.bucketed_grad(loss, cap=SIZE, plan=plan)
        return sharded(lambda p, x: (fn(p, x), fn(p, x * 2)))

    plan = twice().lower(PARAMS, X).plan
    second = [b.index for b in plan.buckets if b.region == 1]
    edited = plan.merge(*second)
    assert contents(twice(edited).lower(PARAMS, X).plan) == contents(edited)
    assert contents(twice().trace(PARAMS, X).lower(plan=edited).plan) == contents(edited)


def test_caps_at_lower_are_checked_as_those_of_bucketed_grad() -> None:
    traced = bucketed(cap=1000, first_cap=200).trace(PARAMS, X)
    cases = (
        ("cap", 0, "0 is not positive"),
        ("cap", "x", "'x' is not a number of bytes"),
        ("first_cap", -1, "-1 is not positive"),
    )
    for what, size, said in cases:
        _, text = refusal(sf.ShardError, lambda what=what, size=size: traced.lower(**{what: size}))
        assert text == f"shard(bucketed_grad(loss)), {what}: {said}\n{SIZE_FIX}"
    for caps in ({"cap": 1, "first_cap": 2}, {"first_cap": 2000}):
        refusal(sf.ShardError, lambda caps=caps: traced.lower(**caps))
    assert (
        len(traced.lower(cap=1).plan.buckets) == 4
        and len(traced.lower(cap="1MB").plan.buckets) == 1
    )
    for a, b in zip(
        tree_leaves(sf.full(traced.lower(cap=1).compile()(PARAMS, X))),
        tree_leaves(sf.full(bucketed()(PARAMS, X))),
        strict=True,
    ):
        assert torch.equal(a, b)
    with pytest.raises(sf.ShardError):
        traced.lower(plan="plan.json")


PARTIAL_KINDS = [Partial()]


def unreduced(placed: Any = WHOLE) -> Any:
    return sharded(sf.bucketed_grad(loss), (placed, P("dp")), (P(), PARTIAL_KINDS))


@pytest.mark.parametrize("placed", [P(), P("dp")], ids=str)
def test_gradients_asked_for_unreduced_come_back_pending_and_send_nothing(placed: sf.P) -> None:
    low = unreduced(placed).lower(PARAMS, X)
    assert not [c for c in low.collectives if c.kind != "all_gather" and c.nbytes > 8]
    assert low.plan.unreduced == tuple(f"params[{k!r}]" for k in "abcd")
    assert not [b for b in low.plan.buckets if b.kind != "all_gather"]
    value, grads = unreduced(placed)(PARAMS, X)
    assert all(g.placements == (Partial(),) for g in grads.values())
    wanted = sf.value_and_grad(loss)(PARAMS, X)
    close(sf.full((value, grads)), wanted)


def test_unreduced_gradients_add_up_and_are_reduced_where_it_is_said() -> None:
    _, one = unreduced()(PARAMS, X)
    _, two = unreduced()(PARAMS, 2 * X)
    wanted = sf.tree_map(
        torch.add, sf.value_and_grad(loss)(PARAMS, X)[1], sf.value_and_grad(loss)(PARAMS, 2 * X)[1]
    )
    pending = sharded(lambda a, b: sf.tree_map(torch.add, a, b), None, PARTIAL_KINDS)(one, two)
    assert all(g.placements == (Partial(),) for g in pending.values())
    close(sf.full(pending), wanted)
    update = sharded(lambda p, g: sf.tree_map(lambda p, g: p - sf.constrain(g, P()), p, g), None)
    close(sf.full(update(PARAMS, pending)), sf.tree_map(torch.sub, PARAMS, wanted))


def test_an_unreduced_gradient_whose_value_is_needed_is_refused() -> None:
    _, grads = unreduced()(PARAMS, X)
    fix = "reduce the gradient x first: sf.constrain(x, P()), or constrain x to its final placement"
    said = (
        "the value is an unreduced gradient (Partial sum over dp), but {} needs the reduced value"
    )
    uses = {
        "sub": lambda g: PARAMS["b"] - g["b"],
        "tanh": lambda g: torch.tanh(g["b"]),
        "pow": lambda g: (g["b"] ** 2).sum(),
    }
    for op, fn in uses.items():
        error, text = refusal(sf.PlacementError, lambda fn=fn: sharded(fn, None)(grads))
        got = said.format(op)
        assert text == (
            f"shard(<lambda>), argument g['b']: {got}\n  needed: an explicit reduction\n "
            f" try: {fix}"
        )
        assert (
            error.arg_path == "g['b']" and HERE.fullmatch(error.source or "") and error.fix == fix
        )


def test_that_does_not_depend_on_what_was_called_before() -> None:
    _, grads = unreduced()(PARAMS, X)
    other = sf.from_local(
        [torch.ones(4, 4, dtype=torch.float64)] * 2, sf.make_mesh((2,), ("dp",)), PARTIAL_KINDS
    )
    fn, add = (
        sharded(lambda g: torch.tanh(g), None),
        sharded(lambda a, b: a + b, None, PARTIAL_KINDS),
    )
    fn(other)  # a pending sum that is no gradient is reduced where it is needed
    add(other, other)
    refusal(sf.PlacementError, lambda: fn(grads["a"]))
    refusal(
        sf.PlacementError,
        lambda: sharded(lambda g: torch.tanh(g), None)(add(grads["a"], grads["b"])),
    )


def test_asking_for_a_reduced_value_unreduced_is_refused() -> None:
    fix = (
        "return the gradient unchanged, as sf.grad returns it, or remove Partial from "
        "out_placements"
    )
    step = lambda p, x: sf.tree_map(lambda p, g: p - 0.1 * g, p, sf.bucketed_grad(loss)(p, x)[1])
    error, text = refusal(sf.PlacementError, lambda: sharded(step, out=PARTIAL_KINDS)(PARAMS, X))
    said = (
        "the value is already reduced, or was never Partial, so its placement cannot stay sum "
        "over dp"
    )
    assert text == (
        f"shard(<lambda>), result['a']: {said}\n  needed: a value that is reduced exactly "
        f"once\n  try: {fix}"
    )
    assert error.arg_path == "result['a']" and error.fix == fix
    _, text = refusal(
        sf.PlacementError,
        lambda: sharded(sf.bucketed_grad(loss), (P(), P()), (P(), PARTIAL_KINDS))(PARAMS, X),
    )
    assert text.startswith(f"shard(bucketed_grad(loss)), result[1]['a']: {said}\n"), (
        "the batch is whole: nothing is pending"
    )


def test_some_gradients_may_stay_unreduced_while_others_travel() -> None:
    out = {"a": PARTIAL_KINDS, "b": P(), "c": None, "d": PARTIAL_KINDS}
    fn = sharded(sf.bucketed_grad(loss), out=(P(), out))
    low = fn.lower(PARAMS, X)
    assert [b.leaves for b in low.plan.buckets] == [("params['c']", "params['b']")]
    assert set(low.plan.unreduced) == {"params['a']", "params['d']"}
    close(sf.full(fn(PARAMS, X)), sf.value_and_grad(loss)(PARAMS, X))
