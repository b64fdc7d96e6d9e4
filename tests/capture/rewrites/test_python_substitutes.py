"""Functions that Dynamo cannot read, or reads wrongly, and their substitutes: equal in value
and gradient, whole and cut.
"""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import re
import textwrap
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import shardfn as sf
from shardfn import P
from shardfn.capture.rewrites import inner_gradients, python_substitutes
from shardfn.errors import CaptureError

G = torch.Generator().manual_seed(3)
X, Y = (
    torch.randn(5, 7, generator=G, dtype=torch.float64),
    torch.rand(5, 7, generator=G, dtype=torch.float64),
)
COUNTS, WEIGHTS = (
    torch.tensor([1, 2, 3, 1, 2, 1, 4]),
    torch.rand(7, generator=G, dtype=torch.float64),
)
WINDOW = torch.hann_window(8, dtype=torch.float64)
A, B = (
    torch.randn(3, 5, 2, generator=G, dtype=torch.float64),
    torch.randn(3, 5, 1, generator=G, dtype=torch.float64),
)
TARGETS = torch.randint(1, 5, (2, 3), generator=G)
FRAMES, LABELS = torch.tensor([6, 5]), torch.tensor([3, 1])
LOGITS = torch.randn(6, 2, 5, generator=G, dtype=torch.float64)

CASES: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "cov": (torch.cov, X),
    "cov of a row": (lambda x: torch.cov(x[0]), X),
    "cov weighted": (lambda x: torch.cov(x, correction=0, fweights=COUNTS, aweights=WEIGHTS), X),
    "corrcoef": (torch.corrcoef, X),
    "combinations": (lambda x: torch.combinations(x[0], 3), X),
    "combinations with replacement": (lambda x: torch.combinations(x[0], 2, True), X),
    "combinations of none": (lambda x: torch.combinations(x[0], 0).sum() + x.sum(), X),
    "l1_loss": (lambda x: F.l1_loss(x, Y), X),
    "l1_loss weighted": (lambda x: F.l1_loss(x, Y, weight=Y * Y), X),
    "l1_loss weighted by itself, a sum": (lambda x: F.l1_loss(x, Y, weight=x, reduction="sum"), X),
    "l1_loss weighted, of each": (lambda x: F.l1_loss(x, Y, None, None, "none", Y), X),
    "l1_loss weighted, as of old": (lambda x: F.l1_loss(x, Y, False, weight=Y * Y), X),
    "gaussian_nll_loss": (lambda x: F.gaussian_nll_loss(x, Y, Y * Y, full=True), X),
    "gaussian_nll_loss, one variance a row": (
        lambda x: F.gaussian_nll_loss(x, Y, Y[:, 0], reduction="sum"),
        X,
    ),
    "gaussian_nll_loss, held at eps": (
        lambda x: F.gaussian_nll_loss(Y, X, x * x * 1e-9, eps=1e-3, reduction="none"),
        X,
    ),
    "istft": (
        lambda x: torch.istft(
            torch.stft(x, 8, 2, window=WINDOW, return_complex=True), 8, 2, window=WINDOW
        ),
        X.repeat(1, 4),
    ),
    "istft, longer": (
        lambda x: torch.istft(
            torch.stft(x, 8, 2, window=WINDOW, return_complex=True), 8, 2, window=WINDOW, length=26
        ),
        X.repeat(1, 4),
    ),
    "ctc_loss": (lambda x: F.ctc_loss(x.log_softmax(-1), TARGETS, (6, 5), (3, 2)), LOGITS),
    "ctc_loss, lengths in tensors": (
        lambda x: F.ctc_loss(x.log_softmax(-1), TARGETS, FRAMES, LABELS),
        LOGITS,
    ),
    "ctc_loss, targets one after another": (
        lambda x: torch.nn.CTCLoss(blank=1, reduction="none")(
            x.log_softmax(-1), torch.tensor([2, 2, 3, 0]), FRAMES, LABELS
        ),
        LOGITS,
    ),
    "ctc_loss of one sample": (
        lambda x: F.ctc_loss(x[:, 0].log_softmax(-1), TARGETS[0, :2], FRAMES[1], LABELS[1] * 2),
        LOGITS,
    ),
    "lstsq": (lambda a: torch.linalg.lstsq(a, B).solution, A),
    "lstsq by gels": (lambda a: torch.linalg.lstsq(a, B, driver="gels").residuals, A),
}


@pytest.mark.parametrize("case", CASES)
def test_a_substitute_equals_the_function_in_value_and_gradient(case: str) -> None:
    fn, x = CASES[case]
    loss = lambda x: (fn(x) * 0.5).sin().sum()
    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf), leaf)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("a",))
        assert_close(
            sf.full(sf.shard(fn, mesh, P("a"), backend="aten")(x)), fn(x), rtol=1e-10, atol=1e-10
        )
        got = sf.full(sf.shard(sf.grad(loss), mesh, P("a"), backend="aten")(x))
    assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_ctc_losses_of_every_pair_of_lengths_are_torchs(zero_infinity: bool) -> None:
    targets = torch.tensor([[1, 1, 2], [2, 4, 3]])
    options: dict[str, Any] = {"reduction": "none", "zero_infinity": zero_infinity}
    loss = lambda x, n, k: F.ctc_loss(x.log_softmax(-1), targets, n, k, **options)
    ours = sf.jit(sf.value_and_grad(lambda *a: loss(*a).nan_to_num().sum()), backend="aten")
    values = sf.jit(loss, backend="aten")
    for n, k in itertools.product(range(1, 5), range(4)):
        lengths = torch.tensor([n, 4]), torch.tensor([k, 3 - k])
        leaf = LOGITS[:4].clone().requires_grad_()
        wanted = loss(leaf, *lengths)
        assert_close(values(leaf.detach(), *lengths), wanted.detach())
        (gradient,) = torch.autograd.grad(wanted.nan_to_num().sum(), leaf)
        assert_close(ours(leaf.detach(), *lengths)[1], gradient, equal_nan=True)


BATCHES = torch.randn(3, 6, 4, generator=G, dtype=torch.float64)
HOW: dict[str, Callable[[Any], Any]] = {
    "jit": lambda fn: sf.jit(fn, backend="aten"),
    "compiled": sf.jit,
    "vmap": lambda fn: sf.vmap(fn, in_axes=(None, None, 0)),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", [torch.nn.BatchNorm1d, torch.nn.SyncBatchNorm])
def test_a_batch_norm_without_a_momentum_averages_over_all_batches(kind: Any, how: str) -> None:
    norm = kind(4, momentum=None).double()
    fn, params, buffers = sf.functionalize(norm)
    call = HOW[how](fn)
    if how == "vmap":
        found = call(params, buffers, BATCHES)
        single = [fn(params, buffers, x) for x in BATCHES]
        wanted = (
            torch.stack([y for y, _ in single]),
            {name: torch.stack([after[name] for _, after in single]) for name in buffers},
        )
        assert_close(found, wanted)
        return
    for x in BATCHES:
        y, buffers = call(params, buffers, x)
        assert_close(y, norm(x))
        assert_close(buffers, dict(norm.named_buffers()))


@pytest.mark.parametrize("kind", [torch.nn.BatchNorm1d, torch.nn.SyncBatchNorm])
def test_a_closed_over_batch_norm_without_a_momentum_counts_its_batches(kind: Any) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), kind(4, momentum=None))
    plain, ours = layers.double(), copy.deepcopy(layers).double()
    step = sf.jit(lambda x: ours(x).sin().sum(), backend="aten")
    for x in BATCHES:
        plain(x).sin().sum().backward()
        step(x).backward()
    assert_close(dict(ours.named_buffers()), dict(plain.named_buffers()))
    gradients = [[p.grad for p in layers.parameters()] for layers in (ours, plain)]
    assert_close(*gradients)
    for layers in (plain, ours):
        layers.eval()
    assert_close(step(BATCHES[0]), plain(BATCHES[0]).sin().sum())


def test_a_sync_batch_norm_without_a_momentum_is_refused_in_a_module_of_several_ranks() -> None:
    fn, params, buffers = sf.functionalize(torch.nn.SyncBatchNorm(4, momentum=None).double())
    with sf.fake_world(2):
        step = sf.shard(fn, sf.make_mesh((2,), ("a",)), (P(), P(), P("a")), backend="aten")
        with pytest.raises(sf.CaptureError, match="a SyncBatchNorm with momentum=None") as caught:
            step(params, buffers, BATCHES[0])
    assert caught.value.fix is not None and caught.value.fix.startswith("BatchNorm1d(n, momentum=")


def test_a_batch_norm_without_a_momentum_counts_the_batches_of_all_ranks() -> None:
    norm = torch.nn.BatchNorm1d(4, momentum=None).double()
    fn, params, buffers = sf.functionalize(norm)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("a",))
        step = sf.shard(fn, mesh, (P(), P(), P("a")), backend="aten")
        for x in BATCHES:
            y, buffers = step(params, buffers, x)
            assert_close(sf.full(y), norm(x))
        after = {name: sf.full(x) for name, x in buffers.items()}
    assert_close(after, dict(norm.named_buffers()))


class Logged(torch.nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        a, b = x.sum(), x.mean()
        return (
            self.make([a, b]),
            self.make(([a, 1.0], [2.0, b])),
            self.make([a, 3], dtype=torch.float32),
            self.make([1, 2]),
            a.new_tensor([a, b]),
        )


@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor, torch.asarray])
def test_a_tensor_of_a_list_of_tensors_has_their_values_and_no_gradient(make: Any) -> None:
    module = Logged(make)
    fn, params, buffers = sf.functionalize(module)
    ours: tuple[Callable[[Any], Any], ...] = (module, lambda x: fn(params, buffers, x)[0])
    for f in ours:
        assert_close(sf.jit(f, backend="aten")(X), module(X))
        gradient = sf.grad(lambda x, f=f: f(x)[0].sum() + x.sum())(X)
        assert_close(gradient, torch.ones_like(X))
        with sf.fake_world(2):
            step = sf.shard(f, sf.make_mesh((2,), ("a",)), P("a"), backend="aten")
            assert_close(sf.full(step(X)), module(X))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="not in this torch")
def test_chunked_linear_cross_entropy_has_its_gradient() -> None:
    options = (
        torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2)
        if hasattr(torch.nn, "LinearCrossEntropyOptions")
        else None
    )
    target = torch.tensor([0, 2, 1, 3, 0])
    loss = lambda w: F.linear_cross_entropy(X, w, target, options=options)
    w = torch.randn(4, 7, generator=G, dtype=torch.float64)
    wanted = torch.func.grad(lambda w: F.cross_entropy(X @ w.T, target))(w)
    assert_close(sf.grad(loss)(w), wanted, rtol=1e-12, atol=1e-12)


def test_substitutes_take_the_arguments_of_torchs_functions() -> None:
    known = 0
    for fn, ours in {**python_substitutes.TABLE, **inner_gradients.TABLE}.items():
        try:
            taken = inspect.signature(fn).parameters.values()
        except ValueError:
            continue  # a function of C++
        given = inspect.signature(ours).parameters.values()
        rows = {x.name: (x.kind, x.default) for x in taken}
        newer = [x for x in given if x.name not in rows]  # what a later torch takes
        assert [(x.name, x.kind, x.default) for x in given if x not in newer] == [
            (name, *row) for name, row in rows.items()
        ], fn
        assert all(x.kind is x.KEYWORD_ONLY and x.default is None for x in newer), fn
        known += 1
    assert known > 3


def test_what_is_called_eagerly_stays_torchs_own() -> None:
    sf.grad(lambda x: torch.cov(x).sum())(X)
    assert type(torch.cov).__name__ == "builtin_function_or_method"


NEGATIVE = torch.tensor([1, 2, -3, 1, 2, 1, 4])
STOPPED: dict[str, Callable[[torch.Tensor], Any]] = {
    "a negative variance": lambda x: F.gaussian_nll_loss(x, Y, Y - 0.5),
    "negative counts": lambda x: torch.cov(x, fweights=NEGATIVE),
    "negative weights": lambda x: torch.cov(x, aweights=-WEIGHTS),
    "weights that add up to zero": lambda x: torch.cov(x, fweights=COUNTS * 0),
    "gaps between windows": lambda x: torch.istft(
        torch.stft(x.repeat(1, 4), 8, 8, window=WINDOW, return_complex=True),
        8,
        8,
        window=WINDOW,
        center=False,
    ),
    "more frames than there are": lambda x: F.ctc_loss(
        x[:, None].expand(5, 2, 7), TARGETS, FRAMES, LABELS
    ),
    "more labels than there are": lambda x: F.ctc_loss(
        x[:, None].expand(5, 2, 7), TARGETS, FRAMES - 1, LABELS + 1
    ),
    "labels that are left over": lambda x: F.ctc_loss(
        x[:, None].expand(5, 2, 7), TARGETS.flatten(), FRAMES - 1, LABELS + 2
    ),
}


@pytest.mark.parametrize("case", STOPPED)
def test_where_torch_stops_at_a_value_the_result_and_its_gradient_are_nan(case: str) -> None:
    fn = STOPPED[case]
    with pytest.raises((ValueError, RuntimeError)):
        fn(X)
    loss, gradient = sf.value_and_grad(lambda x: fn(x).sum())(X)
    assert loss.isnan() and gradient.isnan().any()


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a negative number": (
        lambda x: F.gaussian_nll_loss(x, Y, -1.0),
        "F.gaussian_nll_loss: var is negative",
    ),
    "a variance of another size": (
        lambda x: F.gaussian_nll_loss(x, Y, Y[:2]),
        "F.gaussian_nll_loss: var is of incorrect size",
    ),
    "a reduction": (
        lambda x: F.gaussian_nll_loss(x, Y, Y, reduction="all"),
        "F.gaussian_nll_loss: reduction 'all' is not valid",
    ),
    "counts that do not count": (
        lambda x: torch.cov(x, fweights=WEIGHTS),
        "torch.cov: fweights are torch.float64",
    ),
    "weights for other samples": (
        lambda x: torch.cov(x, aweights=WEIGHTS[:3]),
        r"torch.cov: aweights have shape \(3,\), of 7 samples",
    ),
    "a matrix": (lambda x: torch.combinations(x), "torch.combinations: input has 2"),
    "a window": (
        lambda x: torch.istft(
            torch.stft(x.repeat(1, 4), 8, 2, window=WINDOW, return_complex=True),
            8,
            2,
            window=WINDOW[:5],
        ),
        r"torch.istft: window has shape \(5,\)",
    ),
    "frequencies": (
        lambda x: torch.istft(torch.complex(x, x)[:4], 8, window=WINDOW),
        "torch.istft: 4 frequencies for n_fft 8",
    ),
    "lengths that do not count": (
        lambda x: F.ctc_loss(x[:, None].expand(5, 2, 7), TARGETS, FRAMES / 2, LABELS),
        r"F.ctc_loss: input_lengths are torch.float32 of shape \(2,\)",
    ),
    "targets of other samples": (
        lambda x: F.ctc_loss(x[:, None].expand(5, 2, 7), TARGETS[:1], FRAMES - 1, LABELS),
        r"F.ctc_loss: targets have shape \(1, 3\), for 2 samples",
    ),
    "a spectrum": (
        lambda x: torch.istft(x, 8),
        "torch.istft: input must be complex with 2 or 3 dims; got torch.float64",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_torch_refuses_and_is_known_at_capture_is_an_error_by_name(case: str) -> None:
    fn, text = REFUSED[case]
    with pytest.raises((ValueError, RuntimeError, TypeError)) as torchs:
        fn(X)
    with pytest.raises((sf.CaptureError, torchs.type)) as ours:
        sf.jit(fn, backend="aten")(X)
    assert str(ours.value) == str(torchs.value) or re.search(text, str(ours.value))


class Weighted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(Y * Y)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.l1_loss(x, Y, weight=self.weight)


def test_a_module_passes_the_weight_of_an_l1_loss() -> None:
    module = Weighted()
    fn, params, buffers = sf.functionalize(module)
    wanted = module(X)
    assert_close(sf.jit(fn, backend="aten")(params, buffers, X)[0], wanted)
    assert_close(sf.jit(lambda x: module(x), backend="aten")(X), wanted)


def test_a_weight_of_another_shape_is_refused() -> None:
    with pytest.raises(CaptureError, match="F.l1_loss: weight has shape"):
        sf.jit(lambda x: F.l1_loss(x, Y, weight=Y[0]), backend="aten")(X)


def test_torchs_other_functions_pass_all_arguments_on_to_a_mode() -> None:
    """What a function of torch leaves out is lost under a mode of torch functions."""
    own = (x for x in vars(F).values() if isinstance(x, types.FunctionType))
    functions = {x.__name__: x for x in own if x.__module__ == F.__name__}
    found = {(name, x) for name, function in functions.items() for x in not_passed(function)}
    assert found <= {("l1_loss", "weight")}


def not_passed(function: Any) -> set[str]:
    """The parameters of a function that it does not hand to `handle_torch_function`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    lost: set[str] = set()
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "handle_torch_function":
            given = (x for arg in call.args[2:] for x in ast.walk(arg))
            names = {x.id for x in given if isinstance(x, ast.Name)}
            names |= {str(x.arg) for x in call.keywords}
            lost |= set(inspect.signature(function).parameters) - names
    return lost


def test_the_default_device_is_a_constant_of_each_program() -> None:
    scale = lambda x: x * (2 if torch.get_default_device().type == "cpu" else 3)
    made = lambda x: x + torch.ones(5, 7, dtype=x.dtype, device=torch.get_default_device())
    run = sf.jit(scale, backend="aten")
    for _ in range(2):
        assert_close(run(X), 2 * X)
        with torch.device("meta"):
            assert_close(run(X), 3 * X)
    assert_close(sf.jit(made, backend="aten")(X), X + 1)


def test_methods_of_the_names_of_a_parameters_class_are_those_of_text() -> None:
    w = torch.nn.Parameter(WEIGHTS)
    tests: list[Callable[[Any], bool]] = [
        lambda w: type(w).__module__.startswith("torch"),
        lambda w: w.__class__.__module__.split(".")[1] == "nn",
        lambda w: type(w).__name__.lower() == "parameter",
        lambda w: not getattr(type(w), "__qualname__").endswith("Tensor"),  # noqa: B009
    ]
    for test in tests:
        read = lambda x, test=test: x * w if test(w) else x
        assert_close(sf.jit(read, backend="aten")(X), X * w)
        assert_close(sf.grad(lambda x, read=read: read(x).sum())(X), w.expand(5, 7))


class Formatted:
    def __format__(self, spec: str) -> str:
        return f"<{spec}>"


def test_format_follows_its_specification() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
        n, width = x.shape[0], x.shape[1]
        texts = [format(10, "b"), format(10), format(1.2345, ".2f"), format("q", ">5")]
        texts += [format(n, "03d"), format(3, f">{width}"), format(Formatted(), "a"), format(None)]
        return x * 2, [*texts, *map(format, [1, 2], ["b", "03"]), f"{10:b}"]

    assert sf.jit(fn, backend="aten")(X)[1] == fn(X)[1]


def stack(kind: str) -> Any:
    """An encoder, a decoder or both, without dropout, of width 8."""
    options: Any = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64}
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, **options)
    if kind == "encoder":
        module = torch.nn.TransformerEncoder(layer, 2)
        return lambda x, mask: module(x, mask=mask)
    if kind == "decoder":
        own = torch.nn.TransformerDecoderLayer(8, 2, 16, **options)
        module = torch.nn.TransformerDecoder(own, 2)
        return lambda x, mask: module(x, 2 * x, tgt_mask=mask)
    module = torch.nn.Transformer(8, 2, 1, 1, 16, **options)
    return lambda x, mask: module(x, 2 * x, src_mask=mask, tgt_mask=mask)


SEQUENCES = torch.randn(3, 5, 8, generator=G, dtype=torch.float64)
CAUSAL = torch.nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)


@pytest.mark.parametrize("mask", [CAUSAL, CAUSAL < 0, CAUSAL.flip(1)], ids=["causal", "bool", "no"])
@pytest.mark.parametrize("kind", ["encoder", "decoder", "both"])
def test_a_mask_of_a_transformer_is_applied_whether_it_is_causal_or_not(
    kind: str, mask: torch.Tensor
) -> None:
    call = stack(kind)
    want = call(SEQUENCES, mask)
    assert_close(sf.jit(call, backend="aten")(SEQUENCES, mask), want)
    assert_close(sf.jit(lambda x: call(x, mask.clone()), backend="aten")(SEQUENCES), want)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        got = sf.shard(call, mesh, (P("dp"), P()), backend="aten")(SEQUENCES, mask)
        assert_close(sf.full(got), want)


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("has_norm", [True, False])
def test_padding_after_a_sequence_is_zero_where_torch_takes_nested_tensors(
    has_norm: bool, is_training: bool, follows: bool
) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, dtype=torch.float64)
    norm = torch.nn.LayerNorm(8, dtype=torch.float64) if has_norm else None
    encoder = torch.nn.TransformerEncoder(layer, 2, norm).train(is_training)
    if norm is not None:
        torch.nn.init.normal_(norm.bias, generator=G)
    padding = torch.arange(5) >= torch.tensor([5, 3, 1])[:, None]
    padding = padding if follows else padding.flip(1)

    def call(x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return encoder(x, src_key_padding_mask=padding)

    for has_grad in (True, False):
        with torch.set_grad_enabled(has_grad):
            want = call(SEQUENCES, padding)
            assert_close(sf.jit(call, backend="aten")(SEQUENCES, padding), want)
            fn, *state = sf.functionalize(encoder)
            step = sf.jit(fn, backend="aten")
            assert_close(step(*state, SEQUENCES, src_key_padding_mask=padding)[0], want)
