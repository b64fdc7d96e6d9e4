"""Layers, losses and ops of torch as programs, each of a mebibyte or more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shardfn as sf
from shardfn._tree import leaves

R = torch.randn
Fn = Callable[..., torch.Tensor]
Program = tuple[Any, tuple[Any, ...]]  # a transformed function, and its arguments
IMAGES = (8, 16, 32, 32)
LINES = (16, 32, 256)
BOXES = (4, 8, 8, 16, 16)
SEQUENCE = (8, 64, 128)


def first_of(out: Any) -> torch.Tensor:
    """The first tensor of a result."""
    while not isinstance(out, torch.Tensor):
        out = out[0]
    return out


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A floating-point tensor in another dtype."""
    return x.to(dtype) if x.is_floating_point() else x


def module(make: Callable[[], nn.Module], *args: Any) -> Callable[[], tuple[Fn, Any]]:
    """A module as a function of its parameters and inputs, and those."""

    def made() -> tuple[Fn, Any]:
        torch.manual_seed(0)
        fn, params, buffers = sf.functionalize(make())

        def value(params: Any, *args: torch.Tensor) -> torch.Tensor:
            return first_of(fn(params, buffers, *args)[0])

        return value, (params, *map(given, args))

    return made


def function(fn: Fn, *args: Any) -> Callable[[], tuple[Fn, Any]]:
    """A function, and tensors of some shapes."""
    return lambda: (lambda *xs: first_of(fn(*xs)), tuple(map(given, args)))


def given(x: Any) -> torch.Tensor:
    """An argument: random numbers of a shape, or the tensor itself."""
    return R(x) if isinstance(x, tuple) else x


def numbers(most: int, *shape: int) -> torch.Tensor:
    """Random whole numbers."""
    return torch.randint(0, most, shape)


def is_differentiable(tree: Any) -> bool:
    """Whether a tree holds floating-point tensors alone, and some."""
    tensors = leaves(tree)
    return bool(tensors) and all(x.is_floating_point() for x in tensors)


def program(made: tuple[Fn, Any], kind: str, dtype: torch.dtype) -> Program:
    """A function as it is, or its gradient by all floating-point arguments."""
    fn, args = made
    args = sf.tree_map(lambda x: cast(x, dtype), args)
    if kind == "forward":
        return sf.jit(fn), args
    places = tuple(k for k, x in enumerate(args) if is_differentiable(x))
    loss = lambda *xs: fn(*xs).square().mean()
    return sf.jit(sf.value_and_grad(loss, argnums=places)), args


class Attention(nn.Module):
    """Self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(128, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def gated_halves(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Both halves of a product, of which one gates the other."""
    a, b = (x @ w).split(256, 1)
    return a.tanh() * b


def sdpa(is_causal: bool) -> Fn:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def up(mode: str, size: float = 2) -> Fn:
    """Interpolation by a factor."""
    plain = mode in ("nearest", "nearest-exact", "area")
    return lambda x: F.interpolate(
        x, scale_factor=size, mode=mode, align_corners=None if plain else False
    )


def bag(mode: str) -> Any:
    return module(lambda: nn.EmbeddingBag(2000, 128, mode=mode), numbers(2000, 64, 16))


def conv(kind: type[nn.Module], shape: tuple[int, ...], **kwargs: Any) -> Any:
    channels = shape[1]
    return module(lambda: kind(channels, 2 * channels, 3, **kwargs), shape)


def activation(fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """An activation between products."""
    return function(lambda w, x: fn(x @ w) @ w, (256, 256), (512, 256))


def loss(fn: Fn, target: Callable[[], torch.Tensor] | None = None) -> Any:
    """A loss of what a product gives."""
    y = target() if target else R(1024, 64)
    return function(lambda w, x, y: fn(x @ w, y), (256, 64), (1024, 256), y)


NORMS = {
    "layer norm": module(lambda: nn.LayerNorm(128), SEQUENCE),
    "rms norm": module(lambda: nn.RMSNorm(128), SEQUENCE),
    "group norm": module(lambda: nn.GroupNorm(4, 16), IMAGES),
    "group norm of lines": module(lambda: nn.GroupNorm(4, 32), LINES),
    "instance norm": module(lambda: nn.InstanceNorm2d(16), IMAGES),
    "instance norm affine": module(lambda: nn.InstanceNorm2d(16, affine=True), IMAGES),
    "batch norm 1d": module(lambda: nn.BatchNorm1d(32), LINES),
    "batch norm 2d": module(lambda: nn.BatchNorm2d(16), IMAGES),
    "batch norm 3d": module(lambda: nn.BatchNorm3d(8), BOXES),
    "batch norm eval": module(lambda: nn.BatchNorm2d(16).eval(), IMAGES),
    "local response norm": module(lambda: nn.LocalResponseNorm(3), IMAGES),
    "normalize": function(lambda x: F.normalize(x, dim=-1), SEQUENCE),
    "weight norm": module(
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(512, 512)), (128, 512)
    ),
    "conv and group norm": module(
        lambda: nn.Sequential(nn.Conv2d(16, 16, 3), nn.GroupNorm(4, 16), nn.ReLU()), IMAGES
    ),
    "conv and batch norm": module(
        lambda: nn.Sequential(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU()), IMAGES
    ),
    "small group norm": module(lambda: nn.GroupNorm(2, 4), (2, 4, 5, 5)),
}
POOLS = {
    "max pool 1d": module(lambda: nn.MaxPool1d(2), LINES),
    "max pool 2d": module(lambda: nn.MaxPool2d(2), IMAGES),
    "max pool 2d overlapping": module(lambda: nn.MaxPool2d(3, 2, 1), IMAGES),
    "max pool 3d": module(lambda: nn.MaxPool3d(2), BOXES),
    "avg pool 1d": module(lambda: nn.AvgPool1d(2), LINES),
    "avg pool 2d": module(lambda: nn.AvgPool2d(2), IMAGES),
    "avg pool 3d": module(lambda: nn.AvgPool3d(2), BOXES),
    "adaptive avg pool": module(lambda: nn.AdaptiveAvgPool2d(7), IMAGES),
    "adaptive avg pool to one": module(lambda: nn.AdaptiveAvgPool2d(1), IMAGES),
    "adaptive max pool": module(lambda: nn.AdaptiveMaxPool2d(8), IMAGES),
    "lp pool": module(lambda: nn.LPPool2d(2, 2), IMAGES),
    "fractional max pool": module(lambda: nn.FractionalMaxPool2d(2, output_size=16), IMAGES),
    "conv and max pool": module(
        lambda: nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU(), nn.MaxPool2d(2)), IMAGES
    ),
}
UPSAMPLINGS = {
    "nearest": function(up("nearest"), IMAGES),
    "nearest-exact": function(up("nearest-exact"), IMAGES),
    "bilinear": function(up("bilinear"), IMAGES),
    "bilinear by half": function(up("bilinear", 0.5), IMAGES),
    "bicubic": function(up("bicubic"), (4, 8, 32, 32)),
    "area": function(up("area", 0.5), IMAGES),
    "linear of lines": function(up("linear"), LINES),
    "nearest 1d": function(up("nearest"), LINES),
    "trilinear": function(up("trilinear"), BOXES),
    "nearest 3d": function(up("nearest"), BOXES),
    "pixel shuffle": function(lambda x: F.pixel_shuffle(x, 2), IMAGES),
    "grid sample": function(
        lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), IMAGES, (8, 32, 32, 2)
    ),
    "conv and bilinear": function(
        lambda w, x: up("bilinear")(F.relu(F.conv2d(x, w, padding=1))), (16, 16, 3, 3), IMAGES
    ),
}
CONVOLUTIONS = {
    "conv 1d": conv(nn.Conv1d, LINES),
    "conv 2d": conv(nn.Conv2d, IMAGES),
    "conv 2d without bias": conv(nn.Conv2d, IMAGES, bias=False),
    "conv 2d strided": conv(nn.Conv2d, IMAGES, stride=2, padding=1),
    "conv 2d grouped": conv(nn.Conv2d, IMAGES, groups=4),
    "conv 2d depthwise": conv(nn.Conv2d, IMAGES, groups=16),
    "conv 2d dilated": conv(nn.Conv2d, IMAGES, dilation=2),
    "conv 1 x 1": module(lambda: nn.Conv2d(16, 32, 1), IMAGES),
    "conv 3d": conv(nn.Conv3d, BOXES),
    "transposed conv 1d": conv(nn.ConvTranspose1d, LINES, stride=2),
    "transposed conv 2d": conv(nn.ConvTranspose2d, IMAGES, stride=2),
    "transposed conv 3d": conv(nn.ConvTranspose3d, BOXES, stride=2),
    "two convs": module(
        lambda: nn.Sequential(nn.Conv2d(16, 32, 3), nn.GELU(), nn.Conv2d(32, 16, 3)), IMAGES
    ),
    "unfold": function(lambda x: F.unfold(x, 3), IMAGES),
    "fold": function(lambda x: F.fold(x, (32, 32), 2, stride=2), (8, 64, 256)),
}
ATTENTION = {
    "attention": module(Attention, SEQUENCE),
    "sdpa": function(sdpa(False), *[(8, 4, 64, 32)] * 3),
    "sdpa causal": function(sdpa(True), *[(8, 4, 64, 32)] * 3),
    "softmax attention": function(
        lambda q, k, v: torch.softmax(q @ k.mT / 5, -1) @ v, *[(8, 4, 64, 32)] * 3
    ),
    "masked softmax attention": function(
        lambda q, k, v, m: torch.softmax(q @ k.mT / 5 + m, -1) @ v, *[(8, 4, 64, 32)] * 3, (64, 64)
    ),
    "transformer layer": module(
        lambda: nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, dropout=0.0), SEQUENCE
    ),
    "transformer layer with dropout": module(
        lambda: nn.TransformerEncoderLayer(128, 4, 256, batch_first=True), SEQUENCE
    ),
    "embedding": module(lambda: nn.Embedding(4000, 128), numbers(4000, 64, 16)),
    "embedding with padding": module(
        lambda: nn.Embedding(4000, 128, padding_idx=0), numbers(4000, 64, 16)
    ),
    "embedding bag": bag("mean"),
    "embedding bag sum": bag("sum"),
    "rnn": module(lambda: nn.RNN(64, 128), (16, 16, 64)),
    "lstm": module(lambda: nn.LSTM(64, 128), (16, 16, 64)),
    "gru": module(lambda: nn.GRU(64, 128), (16, 16, 64)),
    "bidirectional lstm": module(lambda: nn.LSTM(64, 64, bidirectional=True), (8, 16, 64)),
    "bilinear layer": module(lambda: nn.Bilinear(64, 64, 64), (256, 64), (256, 64)),
    "linear": module(lambda: nn.Linear(256, 512), (512, 256)),
    "linear on sequences": module(lambda: nn.Linear(128, 256), SEQUENCE),
}
ACTIVATIONS = {
    fn.__name__: activation(fn)
    for fn in (
        *(F.relu, F.gelu, F.silu, F.elu, F.leaky_relu, F.mish, F.softplus, F.hardswish),
        *(torch.tanh, torch.sigmoid, torch.exp, torch.sin, F.selu, F.logsigmoid, F.relu6),
        *(torch.erf, torch.abs, torch.square, F.softsign, F.hardtanh, F.celu, F.tanhshrink),
    )
} | {
    "softmax": activation(lambda x: F.softmax(x, -1)),
    "log_softmax": activation(lambda x: F.log_softmax(x, -1)),
    "softmax of columns": activation(lambda x: F.softmax(x, 0)),
    "glu": function(lambda w, v, x: F.glu(x @ w) @ v, (256, 512), (256, 256), (512, 256)),
    "prelu": function(lambda a, w, x: F.prelu(x @ w, a) @ w, (256,), (256, 256), (512, 256)),
    "dropout": activation(lambda x: F.dropout(x, 0.3)),
    "dropout alone": function(lambda x: F.dropout(x, 0.3), (512, 512)),
    "dropout2d": function(lambda x: F.dropout2d(x, 0.3), IMAGES),
    "alpha dropout": function(lambda x: F.alpha_dropout(x, 0.3, True), (512, 512)),
    "gumbel softmax": function(lambda x: F.gumbel_softmax(x), (512, 512)),
    "rand @ w + x @ w": function(
        lambda w, x: torch.rand(512, 256) @ w + x @ w, (256, 256), (512, 256)
    ),
    "randn + x": function(lambda x: torch.randn(512, 512) + x, (512, 512)),
    "randn_like twice": function(lambda x: (n := torch.randn_like(x)) * x + (n @ x), (512, 512)),
    "addmm": function(torch.addmm, (512, 512), (512, 256), (256, 512)),
    "baddbmm": function(torch.baddbmm, (8, 64, 64), (8, 64, 64), (8, 64, 64)),
    "einsum": function(lambda a, b: torch.einsum("bik,bjk->bij", a, b), (8, 128, 64), (8, 128, 64)),
    "two products": function(lambda w, v, x: x @ w + x @ v, *[(512, 512)] * 3),
    "gated": function(
        lambda w, v, x: (F.silu(x @ w) * (x @ v)) @ w.T, (256, 512), (256, 512), (256, 256)
    ),
}
CLASSES = lambda: numbers(64, 1024)
LOSSES = {
    "cross entropy": loss(F.cross_entropy, CLASSES),
    "cross entropy smoothed": loss(
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), CLASSES
    ),
    "nll": loss(lambda x, y: F.nll_loss(x.log_softmax(-1), y), CLASSES),
    "mse": loss(F.mse_loss),
    "l1": loss(F.l1_loss),
    "smooth l1": loss(F.smooth_l1_loss),
    "huber": loss(F.huber_loss),
    "bce with logits": loss(F.binary_cross_entropy_with_logits, lambda: torch.rand(1024, 64)),
    "bce": loss(lambda x, y: F.binary_cross_entropy(x.sigmoid(), y), lambda: torch.rand(1024, 64)),
    "kl": loss(lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean")),
    "poisson": loss(F.poisson_nll_loss),
    "gaussian": loss(lambda x, y: F.gaussian_nll_loss(x, y, x.exp())),
    "cosine": loss(lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(1024))),
    "multi margin": loss(F.multi_margin_loss, CLASSES),
    "triplet": loss(lambda x, y: F.triplet_margin_loss(x, y, y.roll(1, 0))),
    "margin ranking": loss(lambda x, y: F.margin_ranking_loss(x, y, y.sign())),
}
ROWS = numbers(512, 300)
PLACES = numbers(512, 512, 512)
OPS = {
    "index": function(lambda x: x[ROWS] * 2, (512, 512)),
    "index_select": function(lambda x: x.index_select(1, ROWS), (512, 512)),
    "gather": function(lambda x: x.gather(0, PLACES), (512, 512)),
    "scatter": function(lambda x, y: x.scatter(0, PLACES, y), (512, 512), (512, 512)),
    "scatter_add": function(lambda x, y: x.scatter_add(0, PLACES, y), *[(512, 512)] * 2),
    "index_add": function(lambda x, y: x.index_add(0, ROWS, y), (512, 512), (300, 512)),
    "index_put": function(lambda x, y: x.index_put((ROWS,), y), (512, 512), (300, 512)),
    "scatter_reduce": function(
        lambda x, y: x.scatter_reduce(0, PLACES, y, "amax"), *[(512, 512)] * 2
    ),
    "masked_fill": function(lambda x: x.masked_fill(x > 0, 1.0), (512, 512)),
    "where": function(lambda x, y: torch.where(x > 0, x, y), *[(512, 512)] * 2),
    "sort": function(lambda x: x.sort(-1).values, (512, 512)),
    "argsort": function(lambda x: x.gather(-1, x.argsort(-1)), (512, 512)),
    "topk": function(lambda x: x.topk(64, -1).values, (512, 512)),
    "median": function(lambda x: x.median(-1).values, (512, 512)),
    "kthvalue": function(lambda x: x.kthvalue(5, -1).values, (512, 512)),
    "cumsum": function(lambda x: x.cumsum(-1), (512, 512)),
    "cumsum of columns": function(lambda x: x.cumsum(0), (512, 512)),
    "cumprod": function(lambda x: x.cumprod(-1), (512, 512)),
    "logcumsumexp": function(lambda x: x.logcumsumexp(-1), (512, 512)),
    "cummax": function(lambda x: x.cummax(-1).values, (512, 512)),
    "max": function(lambda x: x.max(-1).values, (512, 512)),
    "amax": function(lambda x: x.amax(0), (512, 512)),
    "prod": function(lambda x: x.prod(-1), (512, 512)),
    "std": function(lambda x: x.std(-1), (512, 512)),
    "var of columns": function(lambda x: x.var(0), (512, 512)),
    "norm": function(lambda x: x.norm(dim=-1), (512, 512)),
    "logsumexp": function(lambda x: x.logsumexp(-1), (512, 512)),
    "cat": function(lambda x, y: torch.cat([x.sin(), y.cos()], 1), *[(512, 512)] * 2),
    "cat of products": function(lambda x, y: torch.cat([x @ y, y @ x]).relu(), *[(512, 512)] * 2),
    "stack": function(lambda x, y: torch.stack([x, y]).relu(), *[(512, 512)] * 2),
    "split": function(gated_halves, *[(512, 512)] * 2),
    "pad": function(lambda x: F.pad(x, (1, 2, 3, 4)), (512, 512)),
    "pad reflect": function(lambda x: F.pad(x, (2, 2, 2, 2), mode="reflect"), IMAGES),
    "pad replicate": function(lambda x: F.pad(x, (2, 2, 2, 2), mode="replicate"), IMAGES),
    "pad circular": function(lambda x: F.pad(x, (2, 2, 2, 2), mode="circular"), IMAGES),
    "roll": function(lambda x: x.roll(3, 0), (512, 512)),
    "flip": function(lambda x: x.flip(0), (512, 512)),
    "tril": function(lambda x: x.tril() @ x, (512, 512)),
    "transpose": function(lambda x: x.t().contiguous(), (512, 512)),
    "repeat": function(lambda x: x.repeat(2, 1), (512, 512)),
    "repeat_interleave": function(lambda x: x.repeat_interleave(2, 0), (512, 512)),
    "one_hot": function(lambda w, y: F.one_hot(y, 64).float() @ w, (64, 512), CLASSES()),
    "cdist": function(lambda x, y: torch.cdist(x, y), (256, 64), (512, 64)),
    "cosine similarity": function(lambda x, y: F.cosine_similarity(x, y), *[(512, 512)] * 2),
    "diagonal": function(lambda x: torch.diag_embed(x.diagonal()) + x, (512, 512)),
    "in place": function(lambda x: x.clone().mul_(2).add_(1).relu_(), (512, 512)),
    "fft": function(lambda x: torch.fft.rfft(x).abs(), (512, 512)),
    "inverse": function(lambda x: torch.linalg.inv(x + 50 * torch.eye(256)), (256, 256)),
    "cholesky": function(lambda x: torch.linalg.cholesky(x @ x.T + torch.eye(256)), (256, 256)),
    "svd": function(lambda x: torch.linalg.svdvals(x), (256, 256)),
}
KINDS = {
    "norms": NORMS,
    "pools": POOLS,
    "upsampling": UPSAMPLINGS,
    "convolutions": CONVOLUTIONS,
    "attention": ATTENTION,
    "activations": ACTIVATIONS,
    "losses": LOSSES,
    "ops": OPS,
}
