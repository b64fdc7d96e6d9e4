"""The reference: one page for each public name, made of its docstring when the site is built."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import shardfn

CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
MARK = re.compile(r"(^\s*\*{1,2}(?=\w+:))|\*|_(?!\w)", re.MULTILINE)
GROUPS = {
    "Stage a function": "shard jit shard_map compose functionalize auto ShapeDtype mark_dynamic "
    "explain_retrace clear_cache load_compiled",
    "Worlds and meshes": "fake_world make_mesh use_mesh current_mesh",
    "Placements": "P Shard Replicate Partial Stage Zigzag zigzag distribute from_local full "
    "constrain pin placements fsdp strategy Strategy tree_map",
    "Derivatives": "grad value_and_grad bucketed_grad pipelined_grad accumulate vjp jvp linearize "
    "jacfwd jacrev hessian vmap custom_vjp custom_jvp checkpoint checkpoint_name "
    "checkpoint_policies saved_residuals Bucket BucketPlan",
    "Loops and branches": "scan map cond while_loop",
    "Code of one rank": "psum pmean pmax pmin psum_scatter all_gather all_to_all ppermute "
    "ragged_all_to_all pvary axis_index axis_size",
    "Pipelines": "Schedule schedules",
    "Random numbers": "random init",
    "Training": "optim clip_by_global_norm ema mixed_precision loss_scale loader Loader save load "
    "Saving save_safetensors load_safetensors",
    "Price of a step": "explain Explanation assert_comms lock plan sweep Sweep report Report "
    "draw overlay Hardware Link Efficiency measure_hardware",
    "Proofs and debugging": "check rule audit Audit compare inspect_ranks first_nan meshes debug",
    "Errors": "ShardError ArtefactError BudgetError CapacityError CaptureError CheckpointError "
    "DivergenceError FakeValueError PlacementError RankLostError RendezvousError RuleError "
    "ScheduleError TorchVersionError TreeError",
}

OF_TORCH = {
    "Shard": """\
.. py:class:: shardfn.Shard(dim)

   torch's own class, ``torch.distributed.tensor.Shard``. On one mesh axis each rank holds a chunk
   of a tensor dim, as ``torch.chunk`` cuts. The chunks may be unequal.

   :param dim: the tensor dim, from 0.
   :raises TypeError: dim is not an int.

   >>> import torch, shardfn as sf
   >>> with sf.fake_world(2):
   ...     mesh = sf.make_mesh((2,), ("dp",))
   ...     x = sf.distribute(torch.ones(5, 3), mesh, sf.Shard(0))
   ...     [tuple(x.to_local(rank=r).shape) for r in range(2)]
   [(3, 3), (2, 3)]
""",
    "Replicate": """\
.. py:class:: shardfn.Replicate()

   torch's own class, ``torch.distributed.tensor.Replicate``. On one mesh axis every rank holds the
   same global value.

   >>> import torch, shardfn as sf
   >>> with sf.fake_world(2):
   ...     mesh = sf.make_mesh((2,), ("dp",))
   ...     x = sf.distribute(torch.ones(5, 3), mesh, sf.Replicate())
   ...     tuple(x.to_local(rank=1).shape)
   (5, 3)
""",
    "Partial": """\
.. py:class:: shardfn.Partial(reduce_op="sum")

   torch's own class, ``torch.distributed.tensor.Partial``. On one mesh axis each rank holds a term;
   the value is the reduction of all terms.

   :param reduce_op: the reduction: ``"sum"``, ``"avg"``, ``"max"`` or ``"min"``.
   :raises PlacementError: at its first use, not here, where the reduction is another one.

   >>> import torch, shardfn as sf
   >>> with sf.fake_world(2):
   ...     mesh = sf.make_mesh((2,), ("dp",))
   ...     x = sf.from_local(torch.ones(3), mesh, [sf.Partial()])
   ...     sf.full(x)
   tensor([2., 2., 2.])
""",
}
__test__ = OF_TORCH  # doctest runs their examples


def names() -> list[str]:
    """Every name of the reference, group by group."""
    return [name for group in GROUPS.values() for name in group.split()]


def entry(name: str, users: Collection[str] = ()) -> str:
    """The page of one public name, in reStructuredText.

    Args:
        name: of the public names.
        users: the paths of the pages that use it, from docs, without their suffix.

    Example:
        >>> print(entry("jit"))
        sf.jit
        ======
        <BLANKLINE>
        .. autofunction:: shardfn.jit
        <BLANKLINE>
    """
    value = getattr(shardfn, name)
    title = f"sf.{name}"
    parts = [title, "=" * len(title), "", OF_TORCH.get(name) or directive(name, value)]
    if inspect.isclass(value) and issubclass(value, shardfn.ShardError):
        parts.append("What causes it, and what to do: :doc:`/reference/errors`.\n")
        if "__init__" not in vars(value):
            parts.append("Its arguments are those of :doc:`/reference/names/ShardError`.\n")
    if users:
        parts += ["How to", "------", "", *(f"- :doc:`/{user}`" for user in users), ""]
    return "\n".join(parts)


def directive(name: str, value: Any) -> str:
    """What autodoc is to read of a name."""
    if isinstance(value, ModuleType):
        return f".. automodule:: {value.__name__}\n   :members:\n"
    if inspect.isclass(value):
        return f".. autoclass:: shardfn.{name}\n   :members:\n"
    if callable(value):
        return f".. autofunction:: shardfn.{name}\n"
    return f".. autodata:: shardfn.{name}\n   :no-value:\n"


def as_restructured(lines: list[str]) -> list[str]:
    """A docstring whose code, between single backticks, and whose names reStructuredText reads as
    they are meant.

    Args:
        lines: of a docstring.

    Example:
        >>> as_restructured(["Make `P`s of clip_ and **kw.", "Example:", ">>> x_"])
        ['Make ``P``\\\\ s of clip\\\\_ and \\\\*\\\\*kw.', 'Example:', '>>> x_']
    """
    end = next((i for i, line in enumerate(lines) if line.strip() == "Example:"), len(lines))
    parts = CODE.split("\n".join(lines[:end]))
    for k, text in enumerate(parts):
        if k % 2:
            parts[k] = f"``{' '.join(text.split())}``"
            continue
        text = MARK.sub(lambda match: match[1] or f"\\{match[0]}", text)
        parts[k] = f"\\ {text}" if k and re.match(r"\w", text) else text
    return "".join(parts).split("\n") + lines[end:]


def write(folder: Path, users: Mapping[str, Collection[str]]) -> None:
    """Write the page of each name, where it differs from the one that is there.

    Args:
        folder: of the pages.
        users: for each name, the pages that use it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in names():
        page = folder / f"{name}.rst"
        text = entry(name, users[name])
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def trees() -> str:
    """A table of contents for each group, which the first page of the reference ends with."""
    out = []
    for title, group in GROUPS.items():
        paths = [f"sf.{name} <names/{name}>" for name in group.split()]
        out += [f"## {title}", "", "```{toctree}", ":maxdepth: 1", "", *paths, "```", ""]
    return "\n".join(out)
