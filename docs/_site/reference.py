"""The reference: one page for each public name, made of its docstring when the site is built."""

from __future__ import annotations

import inspect
import re
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


def names() -> list[str]:
    """Every name of the reference, group by group."""
    return [name for group in GROUPS.values() for name in group.split()]


def entry(name: str) -> str:
    """The page of one public name, in reStructuredText.

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
    if (getattr(value, "__module__", None) or "").startswith("torch."):
        home = f"{value.__module__}.{value.__qualname__}"
        text = f"``{title}`` is torch's own class, ``{home}``.\n\n{inspect.getdoc(value)}"
        body = text.split("\n\n.. ", maxsplit=1)[0].partition("Args:")[0].strip()
        return f"{title}\n{'=' * len(title)}\n\n{body}\n"
    return f"{title}\n{'=' * len(title)}\n\n{directive(name, value)}"


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


def write(folder: Path) -> None:
    """Write the page of each name, where it differs from the one that is there.

    Args:
        folder: of the pages.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in names():
        page = folder / f"{name}.rst"
        text = entry(name)
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def trees() -> str:
    """A table of contents for each group, which the first page of the reference ends with."""
    out = []
    for title, group in GROUPS.items():
        paths = [f"sf.{name} <names/{name}>" for name in group.split()]
        out += [f"## {title}", "", "```{toctree}", ":maxdepth: 1", "", *paths, "```", ""]
    return "\n".join(out)
