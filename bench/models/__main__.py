"""Train each model for one step on meshes of all kinds, and write docs/models.md.

python -m bench.models [NAME ...]
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

import shardfn as sf

from . import hugging_face, torchs, vision
from .catalogue import Model
from .processes import WORKS, on_processes, verdict
from .schemes import SCHEMES
from .training import Training

MODELS = (*hugging_face.MODELS, *vision.MODELS, *torchs.MODELS)
BACKWARD = SCHEMES[1]
COLUMNS = (
    "model",
    "capture",
    "lowering",
    *(scheme.name for scheme in SCHEMES),
    "`loss.backward()`",
    "2 processes",
)
OF_PARAMETERS = {"tp", "dp x tp", "dp x ep", "sequence"}  # columns of the second table
HEAD = """# Models

Each model in the tables is small, has random weights and is in training mode, with its dropout.
`make models` calls each model as in its documentation, and compares one training step with torch's
autograd and torch's AdamW on one device: the loss, the gradient of every parameter, the buffers,
and the parameters after the step. The test computes in float64, or in float32 if a part of the
model does not support float64. `make models` also writes this page (torch {torch}, transformers
{hub}).

A cell of the tables lists the collectives that one training step sends in a fake world, before
gradients are put into buckets: AG is an all-gather, AR an all-reduce, RS a reduce-scatter, A2A an
all-to-all.

- data parallel: On 4 ranks, parameters are replicated. The batch of 6 examples is sharded unevenly.
- fully sharded: On 4 ranks, every parameter is sharded on its first dim.
- tp: On 4 ranks, the batch is replicated, and the model's own `tp_plan` places the parameters. If a
  model has no `tp_plan`, its matrices are sharded on their last dim, and its convolution kernels on
  their first dim.
- dp x tp: On a mesh of 2 x 2, the batch is sharded on the first axis, and the parameters are
  sharded on the second axis as in the column tp.
- 5 ranks, uneven: The parameters are fully sharded over 5 ranks, a number that divides few dims.
- dp x ep: For models with experts, the batch is sharded on both axes. The model's own `ep_plan`
  places the experts, and tokens are sent to the ranks of their experts.
- sequence: For language models, each of 4 ranks has a part of every sequence.
- `loss.backward()`: Autograd differentiates a call of the loss, on fully sharded DTensors that
  require grad.
- 2 processes: Two Gloo processes run the step and `loss.backward()`, with fully sharded parameters.

The columns capture and lowering show the processor time to capture and to lower the training step
for the first time.

"""


def cell(check: Callable[[], Any]) -> tuple[Any, str]:
    """What a check gives, and the text for what went wrong, or ""."""
    try:
        return check(), ""
    except Exception as error:  # the page says which
        return None, verdict(error)


def tried(training: Training, scheme: Any) -> Any:
    with sf.fake_world(scheme.ranks):
        return training.stepped(scheme)


def by_backward(training: Training) -> None:
    with sf.fake_world(BACKWARD.ranks):
        training.by_backward(BACKWARD)


def row(model: Model) -> list[str]:
    """The cells of a line of the table."""
    training, times, cells = Training(model), ("", ""), []
    for scheme in SCHEMES:
        if not scheme.fits(training.net, training.inputs):
            cells.append("")
            continue
        found, wrong = cell(lambda s=scheme: tried(training, s))
        if found and not cells:
            times = f"{found[0]:.1f} s", f"{found[1]:.1f} s"
        cells.append(wrong or found[2])
    _, wrong = cell(lambda: by_backward(training))
    return [model.name, *times, *cells, wrong or WORKS, on_processes(training)]


def line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def table(rows: list[list[str]], names: set[str]) -> str:
    """The columns of these names, after the name of the model."""
    places = [0, *(i for i, name in enumerate(COLUMNS) if name in names)]
    head = [COLUMNS, ["---"] * len(COLUMNS)]
    return "\n".join(line(row[i] for i in places) for row in [*head, *rows])


def main(names: list[str]) -> None:
    """Try the models of these names, or all, and write the page if all are tried."""
    import transformers

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows: list[list[str]] = []
    for model in MODELS:
        if not names or model.name in names:
            rows.append(row(model))
            print(line(rows[-1]), flush=True)
    if not names:
        head = HEAD.format(torch=torch.__version__, hub=transformers.__version__)
        with open("docs/models.md", "w") as page:
            page.write(f"{head}{table(rows, {*COLUMNS[1:]} - OF_PARAMETERS)}\n\n")
            page.write(f"{table(rows, OF_PARAMETERS)}\n")
    if any("Error: " in text or "silent" in text for text in itertools.chain(*rows)):
        sys.exit("some models are wrong or refused")


if __name__ == "__main__":
    main(sys.argv[1:])
