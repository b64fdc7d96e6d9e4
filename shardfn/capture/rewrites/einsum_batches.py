"""Products of vectors with several matrices each, written as an einsum, as products of matrices.

In `einsum("td,tkdf->tkf", x, w[ids])` each token is multiplied by the weights of k experts. Torch
would copy the weights to one wide matrix for each token, in which experts are no batch dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

EINSUMS = (torch.einsum, torch.functional.einsum)
BATCHES = 2  # the fewest batch dims of matrices: torch makes a product over one by itself


def einsum(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute torch.einsum; a product of vectors with matrices as one of matrices."""
    product = None if kwargs else Product.of(*args)
    return torch.einsum(*args, **kwargs) if product is None else product.value()


@attrs.frozen(eq=False)
class Product:
    """A product of vectors with matrices.

    Args:
        x: vectors, with the dims of `vector`.
        w: matrices, with the dims of `matrix`: batch dims, then rows and columns.
        vector: the labels of x.
        matrix: the labels of w.
        result: the labels of the result.
    """

    x: torch.Tensor
    w: torch.Tensor
    vector: str
    matrix: str
    result: str

    @classmethod
    def of(cls, equation: Any = None, *operands: Any) -> Product | None:
        """Return the product that an einsum is; None if it is none."""
        tensors = [x for x in operands if isinstance(x, torch.Tensor)]
        if not isinstance(equation, str) or "." in equation or len(tensors) != len(operands):
            return None
        sides, _, result = equation.replace(" ", "").partition("->")
        labels = sides.split(",")
        if len(labels) != 2 or len(operands) != 2:
            return None
        (x, w), (of_x, of_w) = operands, labels
        products = cls(x, w, of_x, of_w, result), cls(w, x, of_w, of_x, result)
        return next((product for product in products if product.is_one()), None)

    def is_one(self) -> bool:
        """Return whether these are vectors and matrices with equal batch dims, after which the
        matrices may have more.
        """
        vector, matrix, result = ({*x} for x in (self.vector, self.matrix, self.result))
        every = self.vector, self.matrix, self.result
        if any(len({*x}) != len(x) for x in every) or len(self.matrix) < BATCHES + 2:
            return False
        pairs = [(self.x, self.vector), (self.w, self.matrix)]
        if any(x.dim() != len(labels) for x, labels in pairs) or self.x.dtype != self.w.dtype:
            return False
        sizes = [dict(zip(labels, x.shape, strict=True)) for x, labels in pairs]
        terms = vector - result
        return (
            vector <= matrix
            and result == matrix - terms
            and len(terms) == 1
            and len({*self.matrix[-2:]} & terms) == 1
            and not {*self.matrix[-2:]} <= vector
            and len(vector) > 1
            and {*self.matrix[: len(vector) - 1]} == vector & result
            and all(sizes[0][label] == sizes[1][label] for label in vector)
        )

    def value(self) -> torch.Tensor:
        """Compute it."""
        *batch, row, column = self.matrix
        own = column if row in self.vector else row
        term = row if own == column else column
        x = _ordered(self.x, self.vector, [x for x in (*batch, term) if x in self.vector])
        for place, label in enumerate(batch):
            x = x if label in self.vector else x.unsqueeze(place)
        if own == column:
            y = (x.unsqueeze(-2) @ self.w).squeeze(-2)
        else:
            y = (self.w @ x.unsqueeze(-1)).squeeze(-1)
        return _ordered(y, [*batch, own], self.result)


def _ordered(x: torch.Tensor, labels: Sequence[str], order: Sequence[str]) -> torch.Tensor:
    """Permute the dims of a tensor, if they are not in this order."""
    places = [labels.index(label) for label in order]
    return x if places == [*range(x.dim())] else x.permute(places)
