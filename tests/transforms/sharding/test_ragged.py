"""ragged_all_to_all: rows to other ranks or samples by counts that are data, as on one device,
under every transform.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import close
from torch import Tensor
from worlds import simulated

import shardfn as sf
from shardfn import P

N, D = 5, 3  # rows of a rank, features
G = torch.Generator().manual_seed(4)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=G, dtype=torch.float64)


def some_counts(n: int) -> Tensor:
    """(n, n): how many of its rows each rank sends to each; some rows stay."""
    targets = torch.randint(0, n, (n, N - 1), generator=G)
    return torch.stack([torch.bincount(t, minlength=n) for t in targets])


X, W, C = normal(3 * N, D), normal(D, D), torch.tensor([[1, 3, 0], [0, 1, 2], [2, 0, 1]])
XS, CS = normal(2, 3 * N, D), torch.stack([C, torch.tensor([[0, 0, 4], [1, 0, 0], [2, 2, 1]])])


def received(x: Tensor, counts: Tensor, rows: int) -> Tensor:
    """What all ranks receive, (n * rows, ...), of the rows of all, on one device."""
    n = len(counts)
    chunks = x.split(x.shape[0] // n)
    out = []
    for target, source in itertools.product(range(n), range(n)):
        start = int(counts[source, :target].sum())
        out.append(chunks[source][start : start + int(counts[source, target])])
        if source == n - 1:
            missing = rows - int(counts[:, target].sum())
            out.append(x.new_zeros(missing, *x.shape[1:]))
    return torch.cat(out)


def there_and_back(w: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """Send rows, compute, and send them back."""
    there, came = sf.ragged_all_to_all(x, counts.reshape(-1), "a")
    back, _ = sf.ragged_all_to_all((there @ w).tanh(), came, "a", rows=N)
    return 2 * back + x


def one_device(w: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """`there_and_back` of the rows of all ranks: those that are sent are the first of each."""
    is_sent = torch.arange(N) < counts.sum(1, keepdim=True)  # (n, N)
    return 2 * torch.where(is_sent.reshape(-1, 1), (x @ w).tanh(), 0.0) + x


def on_ranks(local: Callable[..., Any], mesh: Any, **options: Any) -> Callable[..., Tensor]:
    return sf.shard_map(local, mesh, (P(), P("a"), P("a")), P("a"), **options)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_rows_come_in_the_order_of_their_senders(n: int, backend: str) -> None:
    x, counts = normal(n * N, D), some_counts(n)
    local = lambda x, counts: sf.ragged_all_to_all(x, counts.reshape(-1), "a", rows="2.5x")
    with simulated(a=n) as mesh:
        send = sf.shard_map(local, mesh, P("a"), P("a"), backend=backend)
        rows, came = sf.full(send(x, counts))
    assert torch.equal(rows, received(x, counts, 13))  # 2.5 times 5, rounded up
    assert torch.equal(came, counts.T.reshape(-1))


def losses(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: f(*args).sin().sum()


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_the_gradient_goes_back_by_the_transposed_counts(backend: str) -> None:
    with simulated(a=3) as mesh:
        of_both = sf.grad(losses(on_ranks(there_and_back, None)), (0, 1))
        grad = sf.shard(of_both, mesh, (P(), P("a"), P("a")), backend=backend)
        got = sf.full(grad(W, X, C))
        counts = {"ragged_all_to_all": 4, "all_gather": 2}  # two of rows each way, two of counts
        comms = sf.assert_comms(grad, W, X, C, counts=counts)
    close(got, torch.func.grad(losses(one_device), (0, 1))(W, X, C))
    exchanges = [c.nbytes for c in comms.collectives if c.kind == "ragged_all_to_all"]
    assert exchanges == 4 * [N * D * 8]


# each of a function of x, by `sf` or by `torch.func`
TRANSFORMS: dict[str, Callable[[Any, Any], Any]] = {
    "jvp": lambda m, f: m.jvp(f, (X,), (X.cos(),)),
    "vjp": lambda m, f: m.vjp(f, X)[1](X.cos()),
    "jacrev": lambda m, f: m.jacrev(f)(X),
    "jacfwd": lambda m, f: m.jacfwd(f)(X),
    "vmap": lambda m, f: m.vmap(f)(XS),
    "vmap of another dim": lambda m, f: m.vmap(f, 2, 1)(XS.movedim(0, 2)),
    "hessian": lambda m, f: m.hessian(losses(f))(X),
    "vmap of grad": lambda m, f: m.vmap(m.grad(losses(f)))(XS),
    "grad of vmap": lambda m, f: m.grad(losses(m.vmap(f)))(XS),
    "linearize": lambda m, f: m.linearize(f, X)[1](X.cos()),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_those_of_one_device(name: str) -> None:
    transform = TRANSFORMS[name]
    with simulated(a=3) as mesh:
        f = on_ranks(there_and_back, mesh)
        got = sf.full(transform(sf, lambda x: f(W, x, C)))
    close(got, transform(torch.func, lambda x: one_device(W, x, C)))


def test_samples_of_a_vmap_have_counts_of_their_own() -> None:
    each = lambda x, counts: there_and_back(W, x, counts)
    wanted = torch.stack([one_device(W, x, c) for x, c in zip(XS, CS, strict=True)])
    with simulated(a=3) as mesh:
        f = on_ranks(there_and_back, mesh)
        outside = sf.vmap(lambda x, counts: f(W, x, counts))
        of_one = sf.vmap(lambda counts: f(W, X, counts))
        inside = sf.shard_map(sf.vmap(each), mesh, P(None, "a"), P(None, "a"))
        close(sf.full(outside(XS, CS)), wanted)
        close(sf.full(inside(XS, CS)), wanted)
        close(sf.full(of_one(CS)), torch.stack([one_device(W, X, c) for c in CS]))
        twice = sf.vmap(lambda x: sf.vmap(lambda counts: f(W, x, counts))(CS))
        every = [[one_device(W, x, c) for c in CS] for x in XS]
        close(sf.full(twice(XS)), torch.stack([torch.stack(row) for row in every]))
        sent = [c.kind for c in inside.lower(XS, CS).collectives]
        assert sent.count("ragged_all_to_all") == 2  # for both samples at once
        gradient = sf.grad(lambda x: losses(outside)(x, CS))(XS)
    pairs = lambda x: torch.stack([one_device(W, y, c) for y, c in zip(x, CS, strict=True)])
    close(sf.full(gradient), torch.func.grad(losses(pairs))(XS))


def steps(w: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    step = lambda carry, _: (there_and_back(w, carry, counts), None)
    return sf.scan(step, x, None, length=3)[0]


def chosen(w: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    send = lambda x: there_and_back(w, x, counts)
    return sf.cond(w.sum() > 0, send, lambda x: send(-x), x)


@sf.custom_vjp
def doubled(x: Tensor, counts: Tensor) -> Tensor:
    return 2 * sf.ragged_all_to_all(x, counts, "a")[0]


def doubled_forward(x: Tensor, counts: Tensor) -> Any:
    rows, came = sf.ragged_all_to_all(x, counts, "a")
    return 2 * rows, came


def doubled_backward(came: Tensor, g: Tensor) -> Any:
    return 2 * sf.ragged_all_to_all(g, came, "a", rows=N)[0], None


doubled.defvjp(doubled_forward, doubled_backward)


def by_rule(w: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    return doubled((x @ w).tanh(), counts.reshape(-1))


def repeat(w: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    for _ in range(3):
        x = one_device(w, x, counts)
    return x


# per-rank code, and what it is on one device
INSIDE: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "scan": (steps, repeat),
    "cond": (chosen, lambda w, x, c: one_device(w, x if W.sum() > 0 else -x, c)),
    "checkpoint": (sf.checkpoint(there_and_back), one_device),
    "custom_vjp": (by_rule, lambda w, x, c: 2 * received((x @ w).tanh(), c, 3 * N)),
}


@pytest.mark.parametrize("name", INSIDE)
def test_what_per_rank_code_holds_is_that_of_one_device(name: str) -> None:
    local, plain = INSIDE[name]
    with simulated(a=3) as mesh:
        f = on_ranks(local, None)
        value = sf.shard(f, mesh, backend="aten")(W, X, C)
        gradient = sf.shard(sf.grad(losses(f), (0, 1)), mesh)(W, X, C)
        close(sf.full(value), plain(W, X, C))
        close(sf.full(gradient), torch.func.grad(losses(plain), (0, 1))(W, X, C))


def test_gradients_of_a_parameter_are_one_bucket_after_the_exchange() -> None:
    loss = lambda w, x, c: sf.psum(there_and_back(w, x, c).sin().sum(), "a")
    with simulated(a=3) as mesh:
        step = sf.shard_map(sf.bucketed_grad(loss), mesh, (P(), P("a"), P("a")), P())
        close(sf.full(step(W, X, C))[1], torch.func.grad(losses(one_device))(W, X, C))


def test_microbatches_accumulate_as_one_batch() -> None:
    def loss(w: Tensor, x: Tensor, counts: Tensor) -> Tensor:
        rows = sf.shard_map(
            lambda w, x, c: there_and_back(w, x.flatten(0, 1), c.flatten(0, 1)),
            None,
            (P(), P(None, "a"), P(None, "a")),
            P("a"),
        )
        return rows(w, x, counts).sin().sum()

    x, counts = XS.view(2, 3 * N, D), CS
    with simulated(a=3) as mesh:
        step = sf.shard(sf.accumulate(sf.grad(loss), 2), mesh, backend="aten")
        got = sf.full(step(W, x, counts))
    each = [torch.func.grad(losses(one_device))(W, y, c) for y, c in zip(x, counts, strict=True)]
    close(got, sum(each) / 2)


def test_other_mesh_axes_have_counts_of_their_own() -> None:
    x, counts = normal(2 * 3 * N, D), torch.cat([some_counts(3), some_counts(3)])
    local = lambda x, c: sf.ragged_all_to_all(x, c.reshape(-1), "a")
    spec = P(("dp", "a"))
    halves = zip(x.chunk(2), counts.chunk(2), strict=True)
    wanted = torch.cat([received(*half, 3 * N) for half in halves])
    with simulated(dp=2, a=3) as mesh:
        rows, came = sf.full(sf.shard_map(local, mesh, spec, spec)(x, counts))
    assert torch.equal(rows, wanted)
    assert torch.equal(came, torch.cat([c.T.reshape(-1) for c in counts.chunk(2)]))


def test_an_exchange_inside_of_a_nested_shard_map_is_that_of_its_axis() -> None:
    x, counts = normal(2 * 3 * N, D), torch.cat([some_counts(3), some_counts(3)])

    def outer(w: Tensor, x: Tensor, counts: Tensor) -> Tensor:
        inner = sf.shard_map(there_and_back, None, (P(), P("a"), P("a")), P("a"), axis_names={"a"})
        return inner(w, x, counts).sin()

    def plain(w: Tensor, x: Tensor) -> Tensor:
        halves = zip(x.chunk(2), counts.chunk(2), strict=True)
        return torch.cat([one_device(w, *half) for half in halves]).sin()

    with simulated(dp=2, a=3) as mesh:
        ins = (P(), P("dp"), P("dp"))
        f = sf.shard_map(outer, mesh, ins, P("dp"), axis_names={"dp"})
        value = sf.full(f(W, x, counts))
        gradient = sf.full(sf.grad(losses(lambda w, x: f(w, x, counts)), (0, 1))(W, x))
    close(value, plain(W, x))
    close(gradient, torch.func.grad(losses(plain), (0, 1))(W, x))


@pytest.mark.parametrize("spec", [P(None, "tp"), P("tp"), P(("a", "tp")), P()], ids=str)
def test_features_stay_sharded_over_an_axis_that_shardfn_plans(spec: P) -> None:
    local = lambda x, c: sf.ragged_all_to_all(x, c.reshape(-1), "a")[0]
    plain = lambda x, c: received(x, c, 3 * N)
    with simulated(a=3, tp=2) as mesh:
        f = sf.shard_map(local, mesh, P("a"), P("a"), axis_names={"a"})
        value = sf.shard(lambda x, c: f(x.sin(), c), mesh, (spec, P()), backend="aten")
        gradient = sf.shard(sf.grad(losses(f)), mesh, (spec, P()), backend="aten")
        close(sf.full(value(X, C)), plain(X.sin(), C))
        close(sf.full(gradient(X, C)), torch.func.grad(losses(plain))(X, C))
        sent = [c.nbytes for c in value.lower(X, C).collectives if c.kind == "ragged_all_to_all"]
    assert sent == [N * (2 if spec == P(None, "tp") else D) * 8]


def test_a_tuple_of_axes_counts_the_first_slowest() -> None:
    x, counts = normal(6 * N, D), some_counts(6)
    axes = ("dp", "a")
    local = lambda x, c: sf.ragged_all_to_all(x, c.reshape(-1), axes, rows=11)
    plain = lambda x: received(x, counts, 11)
    with simulated(dp=2, a=3) as mesh:
        f = sf.shard_map(local, mesh, P(axes), P(axes))
        rows, came = sf.full(f(x, counts))
        gradient = sf.full(sf.grad(lambda x: losses(lambda y: f(y, counts)[0])(x))(x))
    assert torch.equal(rows, plain(x)) and torch.equal(came, counts.T.reshape(-1))
    close(gradient, torch.func.grad(losses(plain))(x))


def with_one_gather(w: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """`there_and_back`, with the counts of all ranks."""
    every = sf.all_gather(counts.reshape(-1), "a")
    there, _ = sf.ragged_all_to_all(x, every, "a")
    back, _ = sf.ragged_all_to_all((there @ w).tanh(), every.T, "a", rows=N)
    return 2 * back + x


def test_counts_of_all_ranks_are_gathered_once() -> None:
    with simulated(a=3) as mesh:
        f = on_ranks(with_one_gather, None)
        grad = sf.shard(sf.grad(losses(f), (0, 1)), mesh, (P(), P("a"), P("a")), backend="aten")
        close(sf.full(grad(W, X, C)), torch.func.grad(losses(one_device), (0, 1))(W, X, C))
        sf.assert_comms(grad, W, X, C, counts={"ragged_all_to_all": 4, "all_gather": 1})
        each = sf.vmap(lambda x, c: on_ranks(with_one_gather, mesh)(W, x, c))(XS, CS)
    close(sf.full(each), torch.stack([one_device(W, x, c) for x, c in zip(XS, CS, strict=True)]))


def test_counts_of_all_that_differ_between_ranks_are_refused() -> None:
    local = lambda x, c: sf.ragged_all_to_all(x, c.reshape(-1).repeat(3, 1), "a")[0]
    with simulated(a=3) as mesh, pytest.raises(sf.CaptureError) as caught:
        sf.shard_map(local, mesh, P("a"), P("a"))(X, C)
    assert without_line(caught.value) == (
        "ragged_all_to_all, send_counts: the matrix of all counts varies over a\n  needed: "
        "one matrix that is equal on all ranks\n  try: sf.all_gather of each rank's counts "
        "over the axis; or pass only this rank's counts"
    )


def test_samples_take_the_counts_of_all_samples_too() -> None:
    samples = X.view(3, N, D)
    send = lambda x: sf.ragged_all_to_all(x, C, "i", rows=9)
    rows, came = sf.vmap(send, axis_name="i")(samples)
    assert torch.equal(rows.flatten(0, 1), received(X, C, 9)) and torch.equal(came, C.T)


def test_samples_of_a_named_vmap_exchange_rows_as_ranks_do() -> None:
    samples = X.view(3, N, D)
    over = lambda x, c: sf.vmap(
        lambda x, c: sf.ragged_all_to_all(x, c, "i", rows=9), axis_name="i"
    )(x, c)
    plain = lambda x: received(x.flatten(0, 1), C, 9).view(3, 9, D)
    rows, came = over(samples, C)
    assert torch.equal(rows, plain(samples)) and torch.equal(came, C.T)
    close(
        sf.grad(lambda x: over(x, C)[0].sin().sum())(samples),
        torch.func.grad(losses(plain))(samples),
    )
    close(sf.jacfwd(lambda x: over(x, C)[0])(samples), torch.func.jacfwd(plain)(samples))
    with simulated(a=3) as mesh:
        assert torch.equal(sf.full(sf.shard(over, mesh, (P("a"), P("a")))(samples, C))[0], rows)
    both = sf.vmap(over)(XS.view(2, 3, N, D), CS)[0]
    for got, x, counts in zip(both, XS, CS, strict=True):
        assert torch.equal(got.flatten(0, 1), received(x, counts, 9))


DTYPES = [torch.bool, torch.int16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_rows_of_any_dtype_arrive_as_they_were(dtype: torch.dtype, backend: str) -> None:
    x = (3 * X).to(dtype)
    plain = x.view(torch.uint8) if dtype.itemsize == 1 else x
    local = lambda x, c: sf.ragged_all_to_all(x, c.reshape(-1), "a")[0]
    with simulated(a=3) as mesh:
        got = sf.full(sf.shard_map(local, mesh, P("a"), P("a"), backend=backend)(x, C))
    assert got.dtype == dtype
    assert torch.equal(got.view(plain.dtype), received(plain, C, 3 * N))


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_rows_keep_their_order_in_memory(backend: str) -> None:
    def local(x: Tensor, c: Tensor) -> Tensor:
        rows, _ = sf.ragged_all_to_all(x.T.reshape(2, N, D).transpose(0, 1), c.reshape(-1), "a")
        return rows.transpose(0, 1).reshape(6, -1)

    def plain(x: Tensor) -> Tensor:
        every = [y.T.reshape(2, N, D).transpose(0, 1) for y in x.split(D)]
        rows = received(torch.cat(every), C, 3 * N)
        return torch.cat([y.transpose(0, 1).reshape(6, -1) for y in rows.split(3 * N)])

    x = normal(3 * D, 2 * N)
    with simulated(a=3) as mesh:
        f = sf.shard_map(local, mesh, P("a"), P("a"), backend=backend)
        close(sf.full(f(x, C)), plain(x))


def test_a_tree_sends_each_leaf_by_one_exchange_of_counts() -> None:
    local = lambda x, c: sf.ragged_all_to_all(
        {"u": x, "v": (x[:, 0], x > 0)}, c.reshape(-1), "a", rows=9
    )[0]
    with simulated(a=3) as mesh:
        f = sf.shard_map(local, mesh, P("a"), P("a"), backend="aten")
        got = sf.full(f(X, C))
        kinds = [c.kind for c in f.lower(X, C).collectives]
    assert torch.equal(got["u"], received(X, C, 9))
    assert torch.equal(got["v"][0], received(X[:, 0], C, 9))
    assert torch.equal(got["v"][1], received(X > 0, C, 9))
    assert sorted(kinds) == ["all_gather", *3 * ["ragged_all_to_all"]]


def test_what_all_ranks_have_is_sent_by_each_and_its_gradient_summed() -> None:
    local = lambda x: sf.ragged_all_to_all(x, [1, 2, 0], "a")[0]
    counts = torch.tensor(3 * [[1, 2, 0]])
    plain = lambda x: received(x.repeat(3, 1), counts, 3 * N)
    with simulated(a=3) as mesh:
        f = sf.shard_map(local, mesh, P(), P("a"))
        close(sf.full(f(X[:N])), plain(X[:N]))
        close(sf.full(sf.grad(losses(f))(X[:N])), torch.func.grad(losses(plain))(X[:N]))


def test_a_world_without_values_plans_and_prices_the_exchange() -> None:
    local = lambda x, c: sf.ragged_all_to_all(x, c.reshape(-1), "a", rows=64)
    with sf.fake_world(64, numerics=False):
        mesh = sf.make_mesh((64,), ("a",))
        f = sf.shard_map(local, mesh, P("a"), P("a"), backend="aten")
        x, counts = torch.empty(64 * N, D), torch.empty(64, 64, dtype=torch.int64)
        rows, _ = f(x, counts)
        assert rows.shape == (64 * 64, D)
        (sent,) = (t for t in f.lower(x, counts).transfers if t.kind == "ragged_all_to_all")
    assert (sent.axis, sent.nbytes, sent.implicit) == ("a", N * D * 4, False)
    assert sent.op == "ragged_all_to_all"


def test_the_rows_of_a_step_are_sent_while_another_is_computed() -> None:
    def local(w: Tensor, x: Tensor, c: Tensor) -> Tensor:
        rows, _ = sf.ragged_all_to_all(x, c.reshape(-1), "a", rows=N)
        own = (x @ w).tanh() @ w  # of what stays
        return rows + own

    with simulated(a=3) as mesh:
        lowered = on_ranks(local, mesh, backend="aten").lower(W, X, C)
    names = [
        n.name for n in next(iter(lowered.programs.values())).graph.nodes if n.op == "call_function"
    ]
    start = next(i for i, name in enumerate(names) if name.startswith("ragged_all_to_all"))
    products = [i for i, name in enumerate(names) if name.startswith("mm")]
    waits = [i for i, name in enumerate(names) if name.startswith("wait_tensor")]
    assert start < products[0] < products[1] < waits[-1]


REFUSED: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "counts of floats": (
        lambda c: c.double(),
        None,
        {},
        """ragged_all_to_all over a, send_counts: got shape (3,), torch.float64
  needed: shape (3,), torch.int64: the number of rows for each of 3 ranks; or shape (3, 3) with \
the counts of all ranks
  try: torch.bincount(destinations, minlength=3), where destinations holds the target rank of \
each row""",
    ),
    "counts of another shape": (
        lambda c: c.reshape(1, 3),
        None,
        {},
        """ragged_all_to_all over a, send_counts: got shape (1, 3), torch.int64
  needed: shape (3,), torch.int64: the number of rows for each of 3 ranks; or shape (3, 3) with \
the counts of all ranks
  try: torch.bincount(destinations, minlength=3), where destinations holds the target rank of \
each row""",
    ),
    "counts that are a text": (
        lambda c: "all",
        None,
        {},
        """ragged_all_to_all over a, send_counts: got str
  needed: shape (3,), torch.int64: the number of rows for each of 3 ranks; or shape (3, 3) with \
the counts of all ranks
  try: torch.bincount(destinations, minlength=3), where destinations holds the target rank of \
each row""",
    ),
    "an x without rows": (
        None,
        lambda x: x.sum(),
        {},
        """ragged_all_to_all over a, x: a tensor without dims
  needed: a tensor whose dim 0 counts the rows
  try: x.reshape(1)""",
    ),
    "no rows": (
        None,
        None,
        {"rows": 0},
        """ragged_all_to_all over a, rows: got 0, and x has 5 rows
  needed: 1 row or more
  try: rows=64 for 64 rows; rows="1.5x" for 1.5 times the rows of x, rounded up; rows=None for \
the largest possible number, the rows of x of all ranks together""",
    ),
    "rows that are a fraction": (
        None,
        None,
        {"rows": 2.5},
        """ragged_all_to_all over a, rows: got 2.5, and x has 5 rows
  needed: 1 row or more
  try: rows=64 for 64 rows; rows="1.5x" for 1.5 times the rows of x, rounded up; rows=None for \
the largest possible number, the rows of x of all ranks together""",
    ),
    "rows that are a word": (
        None,
        None,
        {"rows": "many"},
        """ragged_all_to_all over a, rows: got 'many', and x has 5 rows
  needed: 1 row or more
  try: rows=64 for 64 rows; rows="1.5x" for 1.5 times the rows of x, rounded up; rows=None for \
the largest possible number, the rows of x of all ranks together""",
    ),
    "rows that are data": (
        None,
        None,
        {"rows": torch.tensor(3)},
        """ragged_all_to_all over a, rows: got a tensor, and x has 5 rows
  needed: 1 row or more
  try: rows=64 for 64 rows; rows="1.5x" for 1.5 times the rows of x, rounded up; rows=None for \
the largest possible number, the rows of x of all ranks together""",
    ),
}


def without_line(error: BaseException) -> str:
    return "\n".join(line for line in str(error).split("\n") if not line.startswith("  at: "))


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused_when_the_function_is_read(name: str) -> None:
    of_counts, of_x, options, text = REFUSED[name]

    def local(x: Tensor, c: Tensor) -> Tensor:
        own = x if of_x is None else of_x(x)
        counts = c.reshape(-1) if of_counts is None else of_counts(c.reshape(-1))
        return sf.ragged_all_to_all(own, counts, "a", **options)[0]

    with simulated(a=3) as mesh, pytest.raises(sf.PlacementError) as caught:
        sf.shard_map(local, mesh, P("a"), P("a"), backend="aten")(X, C)
    assert without_line(caught.value) == text
    assert caught.value.source is not None


def test_an_unknown_axis_is_refused() -> None:
    local = lambda x, c: sf.ragged_all_to_all(x, c.reshape(-1), "b")[0]
    with simulated(a=3) as mesh, pytest.raises(sf.CaptureError, match="no axis is called 'b'"):
        sf.shard_map(local, mesh, P("a"), P("a"))(X, C)
    with pytest.raises(sf.CaptureError, match="outside of any shard_map"):
        sf.ragged_all_to_all(X, [1], "b")


TOO_MANY = torch.tensor([[2, 1, 0], [3, 0, 0], [1, 0, 1]])  # six rows for rank 0


# counts, and the first line of what is raised as the program runs
WHEN_IT_RUNS: dict[str, tuple[Tensor, type[sf.ShardError], str]] = {
    "a negative count": (C - 5, sf.ShardError, "ragged_all_to_all, send_counts: rank "),
    "more rows than there are": (
        TOO_MANY * 2,
        sf.ShardError,
        "ragged_all_to_all, send_counts: rank 0 of the axis sends 6 rows, but has 5",
    ),
    "more rows than the bound": (
        TOO_MANY,
        sf.CapacityError,
        "ragged_all_to_all, rows: rank 0 of the axis receives 6 rows, but has room for 4",
    ),
}


@pytest.mark.parametrize("name", WHEN_IT_RUNS)
@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_wrong_counts_are_refused_as_the_program_runs(name: str, backend: str) -> None:
    counts, error, text = WHEN_IT_RUNS[name]
    local = lambda x, c: sf.ragged_all_to_all(x, c.reshape(-1), "a", rows=4)[0]
    with simulated(a=3) as mesh:
        f = sf.shard_map(local, mesh, P("a"), P("a"), backend=backend)
        with pytest.raises(error) as caught:
            f(X, counts)
        assert str(caught.value).startswith(text)
        assert __file__ in str(caught.value.source)
        assert torch.equal(sf.full(f(X, torch.eye(3).long())), received(X, torch.eye(3).long(), 4))


@pytest.mark.parametrize("name", WHEN_IT_RUNS)
def test_samples_refuse_the_counts_that_ranks_refuse(name: str) -> None:
    counts, error, text = WHEN_IT_RUNS[name]
    with pytest.raises(error) as caught:
        sf.vmap(lambda x, c: sf.ragged_all_to_all(x, c, "i", rows=4), axis_name="i")(
            X.view(3, N, D), counts
        )
    assert str(caught.value).startswith(text)
    assert __file__ in str(caught.value.source)


@pytest.mark.parametrize("count", [-1, N + 1, N])
@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_a_rank_that_is_alone_refuses_wrong_counts_too(count: int, backend: str) -> None:
    local = lambda x, c: sf.ragged_all_to_all(x, c, "a", rows=4)[0]
    error = sf.CapacityError if count == N else sf.ShardError
    with simulated(a=1) as mesh:
        f = sf.shard_map(local, mesh, P("a"), P("a"), backend=backend)
        with pytest.raises(error, match="ragged_all_to_all, "):
            f(X[:N], torch.tensor([count]))


def test_ranks_that_have_different_counts_diverge_in_the_simulator() -> None:
    from shardfn.collectives import COLLECTIVES, RAGGED_ALL_TO_ALL
    from shardfn.runtime import simulator
    from shardfn.types import Collective

    record = Collective(RAGGED_ALL_TO_ALL, "a", 8, None, "send", "f.py:1", False)
    what = (COLLECTIVES[RAGGED_ALL_TO_ALL].overload, 4, "group")
    asked = {
        rank: simulator.Request(record, what, X[:N], (torch.full((2, 2), rank),))
        for rank in range(2)
    }
    with pytest.raises(sf.DivergenceError, match="a collective with different counts"):
        simulator._same_request([0, 1], asked)
