"""The lock of a step: what differs is named by its line, and what does not is silent."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P

TRAIN = """\
import torch
import shardfn as sf


def layer(x, w):
    return torch.tanh(x @ w)


def loss_fn(params, x):
    for w in params:
        x = layer(x, w)
    return (x * x).mean()


def update(p, g):
    return p - 0.1 * g


def step(params, x):
    loss, grads = sf.bucketed_grad(loss_fn, cap="1MB")(params, x)
    return sf.tree_map(update, params, grads), loss
"""
PARAMS = [sf.ShapeDtype((6, 6))] * 3
X = sf.ShapeDtype((8, 6))
MODULE = "train_for_lock_"
NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # bytecode of a file that is written twice in one second is that of the first
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with sf.fake_world(4, numerics=False):
        yield
    for name in [name for name in sys.modules if name.startswith(MODULE)]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module of the program as it was locked, which is captured once."""
    return program(tmp_path_factory.mktemp("base"), prefix="base_for_lock_")


def program(folder: Path, text: str = TRAIN, name: str = "train.py", prefix: str = MODULE) -> Any:
    """A project with one file, and the file as a module."""
    folder.mkdir(exist_ok=True)
    (folder / "pyproject.toml").touch()
    file = folder / name
    file.write_text(text)
    name = f"{prefix}{next(NUMBERS)}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sharded(
    module: Any, params: Any = None, x: Any = None, axes: Any = None, **options: Any
) -> Any:
    sizes = axes or {"dp": 2, "tp": 2}
    mesh = sf.make_mesh((*sizes.values(),), (*sizes,))
    specs = (P() if params is None else params, P("dp") if x is None else x)
    return sf.shard(module.step, mesh, specs, **options)


def locked(folder: Path, step: Any, *args: Any, **options: Any) -> Any:
    return sf.lock(step, *(args or (PARAMS, X)), path=folder / "locks" / "step.json", **options)


def differences(folder: Path, step: Any, *args: Any, **options: Any) -> list[str]:
    """The lines of the error."""
    with pytest.raises(sf.BudgetError) as error:
        locked(folder, step, *args, **options)
    return [line.strip() for line in str(error.value).splitlines()]


def edited(*pairs: tuple[str, str]) -> str:
    text = TRAIN
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


def test_it_writes_a_file_and_then_compares(tmp_path: Path) -> None:
    step = sharded(program(tmp_path))
    first = locked(tmp_path, step)
    text = (tmp_path / "locks" / "step.json").read_text()
    assert first.state == "written" and str(first).startswith("shard(step) on (dp=2, tp=2): wri")
    assert (tmp_path / "locks" / "step.json").stat().st_mode & 0o777 == 0o644
    second = locked(tmp_path, step)
    assert second.state == "equal" and second.notes == () and second.price == first.price
    assert (tmp_path / "locks" / "step.json").read_text() == text


def test_the_figures_are_those_of_the_lowered_program(tmp_path: Path) -> None:
    step = sharded(program(tmp_path), [P("tp"), P(), P(None, "tp")])
    price = locked(tmp_path, step, hardware="A100").price
    lowered = step.lower(PARAMS, X)
    total = sum(c.nbytes for c in lowered.collectives)
    assert sum(price.bytes.values()) == total == sf.explain(step, PARAMS, X).nbytes > 0
    outside = [c for c in lowered.collectives if c.bucket is None]
    assert sum(x.count for x in price.collectives.values()) == len(outside) > 0
    implicit = sum(x.implicit for x in price.collectives.values())
    assert implicit == sum(c.implicit for c in outside) > 0
    assert len(price.buckets) == len(lowered.plan.buckets)
    assert price.peak_bytes == {"step": lowered.memory.peak}
    assert price.ms["step"] == pytest.approx(1e3 * lowered.time("A100").total, rel=1e-3)
    assert price.arguments["params[0]"] == "f32[6@tp, 6]"
    assert price.results["result[0][2]"] == "f32[6, 6@tp]"


def test_the_file_is_small_sorted_and_names_no_machine(tmp_path: Path) -> None:
    locked(tmp_path, sharded(program(tmp_path)))
    text = (tmp_path / "locks" / "step.json").read_text()
    assert str(tmp_path) not in text and str(Path(sf.__file__).parents[1]) not in text
    assert not re.search(r"20\d\d-|:\d+\b(?!,)", text.replace('": ', "")), "no time, no line number"
    fields = json.loads(text)
    assert fields["arguments"] == {"params[0..2]": "f32[6, 6]", "x": "f32[8@dp, 6]"}
    for section in fields.values():
        if isinstance(section, dict):
            assert list(section) == sorted(section)
    assert "train.py::layer::return torch.tanh(x @ w)" in fields["ops"]
    rows = sum(len(x) for x in fields.values() if isinstance(x, dict | list))
    scalars = sum(not isinstance(x, dict | list) for x in fields.values())
    sections = sum(bool(x) for x in fields.values() if isinstance(x, dict | list))
    empty = len(fields) - scalars - sections
    assert len(text.splitlines()) == 2 + rows + scalars + 2 * sections + empty


SAME = {
    "lines above": edited(("import torch\n", "import torch\n\n# a comment\nA = 1\n\n\n")),
    "a comment": edited(("return torch.tanh(x @ w)", "return torch.tanh(x @ w)  # activated")),
    "other lines": edited(("tanh(x @ w)", "tanh(\n        x\n        @ w,\n    )")),
    "another name": edited(("(x, w):", "(h, w):"), ("tanh(x @ w)", "tanh(h @ w)")),
    "another function": edited(("layer", "dense")),
    "two statements": edited(("return torch.tanh(x @ w)", "y = x @ w\n    return torch.tanh(y)")),
    "one statement": edited(
        ("        x = layer(x, w)\n", "        x = torch.tanh(x @ w)\n")
    ),
    "a function at the end": edited(
        ("def update(p, g):\n    return p - 0.1 * g\n\n\n", ""),
        ("grads), loss\n", "grads), loss\n\n\ndef update(p, g):\n    return p - 0.1 * g\n"),
    ),
    "a function inside": edited(
        ("def layer(x, w):\n    return torch.tanh(x @ w)\n\n\n", ""),
        ("    for w", "    def layer(x, w):\n        return torch.tanh(x @ w)\n\n    for w"),
    ),
    "code that does not run": edited(("for w in", "if False:\n        x = x.sin()\n    for w in")),
    "a cap that changes no bucket": edited(('"1MB"', '"2MB"')),
}  # fmt: skip


@pytest.mark.parametrize("change", SAME)
def test_code_that_is_written_otherwise_is_no_difference(
    change: str, base: Any, tmp_path: Path
) -> None:
    specs = [P(None, "tp"), P("tp"), P()]
    locked(tmp_path, sharded(base, specs))
    assert locked(tmp_path, sharded(program(tmp_path, SAME[change]), specs)).state == "equal"


def test_another_file_or_folder_is_no_difference(tmp_path: Path) -> None:
    specs = [P(None, "tp"), P("tp"), P()]
    here, there = tmp_path / "here", tmp_path / "there"
    locked(here, sharded(program(here), specs))
    moved = program(there)
    (there / "locks").mkdir()
    (there / "locks" / "step.json").write_text((here / "locks" / "step.json").read_text())
    assert locked(there, sharded(moved, specs)).state == "equal"
    (there / "train.py").unlink()
    assert locked(there, sharded(program(there, name="model.py"), specs)).state == "equal"


def constrained(spec: str) -> str:
    return edited((
        "return torch.tanh(x @ w)",
        f"return torch.tanh(sf.constrain(x, sf.{spec}) @ w)",
    ))  # fmt: skip


OTHER: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "a new op": (
        edited(("return (x * x)", "x = x.sin()\n    return (x * x)")),
        {},
        ["train.py:12 now runs cos x 1 (was 0), mul x 1 (was 0), sin x 1 (was 0)"],
    ),
    "a new op on a line": (
        edited(("return torch.tanh(x @ w)", "return torch.tanh(torch.sin(x @ w))")),
        {},
        ["train.py:6 now runs cos x 3 (was 0), mul x 3 (was 0), sin x 3 (was 0)"],
    ),
    "an op that is gone": (
        edited(("p - 0.1 * g", "p - g")), {}, ["train.py:16 now runs mul x 0 (was 3)"],
    ),
    "a layer more": (
        edited(("for w in params", "for w in [*params, params[0]]")),
        {},
        ["train.py:6 now runs add x 1 (was 0), mm x 11 (was 8), tanh x 4 (was 3), "
         "tanh_backward x 4 (was 3)"],
    ),
    "a gather": (
        constrained('P()'),
        {},
        ["train.py:6 now gathers 192 B over dp (was 0)",
         "in all 192 B of all_gather over dp (was 0)",
         "in all 0 B of all_reduce over dp (was 436 B)"],
    ),
    "another cap": (
        edited(('"1MB"', "100")),
        {},
        ["3 buckets of all_reduce[sum, dp] (was 1)",
         "bucket 2, ready at mm_7, train.py:6, is now all_reduce[sum, dp] of 144 B in float32, "
         "1 leaf: params[0]",
         "bucket 0 was all_reduce[sum, dp] of 432 B in float32, 3 leaves: params[2] to params[0]"],
    ),
    "a placement": (
        TRAIN,
        {"params": [P(), P(None, "tp"), P()]},
        ["argument params[1] is f32[6, 6@tp], was f32[6, 6]",
         "result[0][1] is f32[6, 6@tp], was f32[6, 6]"],
    ),
    "placements of layers": (
        TRAIN,
        {"params": [P("tp"), P("tp"), P("tp")]},
        ["argument params[*], 3 of them, are f32[6@tp, 6], were f32[6, 6]"],
    ),
    "a placement of the batch": (TRAIN, {"x": P()}, ["argument x is f32[8, 6], was f32[8@dp, 6]",
         "0 buckets of all_reduce[sum, dp] (was 1)"]),
    "another mesh": (
        TRAIN, {"axes": {"dp": 4, "tp": 1}}, ["mesh is (dp=4, tp=1), was (dp=2, tp=2)"],
    ),
    "another backend": (TRAIN, {"backend": "aten"}, ["backend is aten, was inductor"]),
}  # fmt: skip


@pytest.mark.parametrize("change", OTHER)
def test_a_change_is_named_by_its_line(change: str, base: Any, tmp_path: Path) -> None:
    text, options, wanted = OTHER[change]
    locked(tmp_path, sharded(base))
    before = (tmp_path / "locks" / "step.json").read_bytes()
    step = sharded(program(tmp_path, text), **options)
    lines = differences(tmp_path, step)
    assert {*wanted} <= {*lines}, "\n".join(lines)
    assert (tmp_path / "locks" / "step.json").read_bytes() == before
    assert locked(tmp_path, step, update=True).state == "written"
    assert locked(tmp_path, step).state == "equal"
    back = differences(tmp_path, sharded(base))
    assert len(back) > 3, "the way back differs too"


def test_the_message_says_what_to_do(base: Any, tmp_path: Path) -> None:
    locked(tmp_path, sharded(base))
    step = sharded(program(tmp_path, constrained("P()")))
    with pytest.raises(sf.BudgetError) as error:
        locked(tmp_path, step)
    head, *lines, at, fix = str(error.value).splitlines()
    path = str(tmp_path / "locks" / "step.json")
    assert head == f"lock(shard(step)), path {path!r}: the price differs from the lock"
    assert lines[0] == "  train.py:6 now gathers 192 B over dp (was 0)"
    assert at.startswith(f"  at: {__file__}:")
    assert fix == "  try: sf.lock(..., update=True), if the change is intended"
    assert error.value.arg_path == "path" and error.value.fix == fix.removeprefix("  try: ")


def test_the_line_that_has_changed_comes_first(base: Any, tmp_path: Path) -> None:
    locked(tmp_path, sharded(base))
    text = edited(("for w in params", "for w in [*params, params[0]]"))
    lines = differences(tmp_path, sharded(program(tmp_path, text)))
    assert lines[1].startswith("train.py:6 now runs add x 1 (was 0)")
    assert lines[2].startswith("the peak is 1.5 KiB")


def test_a_collective_that_is_gone_is_named_by_the_line_that_sent_it(tmp_path: Path) -> None:
    gathering = constrained("P()")
    locked(tmp_path, sharded(program(tmp_path, gathering)))
    lines = differences(tmp_path, sharded(program(tmp_path, TRAIN)))
    assert "train.py:6 no longer gathers over dp (was 192 B)" in lines
    split = edited(
        (
            "    return torch.tanh(x @ w)",
            "    x = sf.constrain(x, sf.P())\n    return torch.tanh(x @ w)",
        )
    )
    locked(tmp_path, sharded(program(tmp_path, split)), update=True)
    lines = differences(tmp_path, sharded(program(tmp_path, TRAIN)))
    wanted = (
        "train.py, `x = sf.constrain(x, sf.P())` in layer no longer gathers over dp (was 192 B)"
    )
    assert wanted in lines


def test_a_collective_that_moves_between_lines_which_stay_is_a_difference(tmp_path: Path) -> None:
    text = edited(
        ("        x = layer(x, w)\n    return (x * x).mean()",
         "        x = sf.constrain(layer(x, w), A)\n"
         "    x = sf.constrain(x * x, B)\n    return x.mean()"),
        ("import shardfn as sf\n", "import shardfn as sf\n\nA, B = sf.P(), sf.P('dp')\n"),
    )  # fmt: skip
    locked(tmp_path, sharded(program(tmp_path, text)))
    other = text.replace("A, B = sf.P(), sf.P('dp')", "A, B = sf.P('dp'), sf.P()")
    lines = differences(tmp_path, sharded(program(tmp_path, other)))
    assert "train.py:13 no longer gathers over dp (was 384 B in 2 collectives)" in lines
    assert "train.py:14 now gathers 192 B over dp (was 0)" in lines


def test_tolerances_are_by_field(tmp_path: Path) -> None:
    module = program(tmp_path)
    locked(tmp_path, sharded(module))
    wider = (PARAMS, sf.ShapeDtype((10, 6)))
    loose = {"peak_bytes": 0.5, "ms": 0.5}
    lines = differences(tmp_path, sharded(module), *wider)
    (peak,) = (line for line in lines if line.startswith("the peak is"))
    assert re.search(r"\(was .*B, [\d.]+% more; 5% is allowed\)$", peak)
    lines = differences(tmp_path, sharded(module), *wider, tolerances=loose)
    assert not [line for line in lines if "the peak" in line]
    assert "argument x is f32[10@dp, 6], was f32[8@dp, 6]" in lines
    capped = program(tmp_path, constrained("P()"))
    every = float("inf")
    free = {"collectives": every, "bytes": every, "ms": every, "peak_bytes": every, "ops": every}
    assert locked(tmp_path, sharded(capped), tolerances=free).state == "equal"
    del free["bytes"]
    lines = differences(tmp_path, sharded(capped), tolerances=free)
    assert any("now gathers" in line for line in lines)


def test_another_torch_or_device_leaves_ops_out_and_says_so(base: Any, tmp_path: Path) -> None:
    step = sharded(base)
    locked(tmp_path, step)
    path = tmp_path / "locks" / "step.json"
    fields = json.loads(path.read_text())
    fields["torch"] = "2.99"
    line = next(iter(fields["ops"]))
    fields["ops"][line] = {"decomposed_otherwise": 3}
    path.write_text(json.dumps(fields))
    result = locked(tmp_path, step)
    assert result.state == "equal"
    (note,) = result.notes
    assert note.startswith(
        "ops are not compared: the lock was written with torch 2.99 on cpu, and this is torch "
    )
    fields["bytes"]["all_reduce over dp"] += 4
    path.write_text(json.dumps(fields))
    lines = differences(tmp_path, step)
    assert f"note: {note}" in lines, "what both have is compared"
    del fields["torch"]
    path.write_text(json.dumps(fields))
    assert any("decomposed_otherwise" in x for x in differences(tmp_path, step))


def test_closed_over_tensors_are_counted_by_type(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    w, u, v = torch.ones(6, 6), torch.ones(6, 6), torch.ones(6)
    price = sf.lock(sf.jit(lambda x: x @ w + v), X, path=path).price
    assert price.closed_over == {"f32[6, 6]": 1, "f32[6]": 1}
    assert price.arguments == {"x": "f32[8, 6]"}
    with pytest.raises(
        sf.BudgetError, match=r"the function closes over 2 tensors f32\[6, 6\] \(was 1\)"
    ):
        sf.lock(sf.jit(lambda x: x @ w @ u + v), X, path=path)


def test_other_hardware_is_one_difference(base: Any, tmp_path: Path) -> None:
    step = sharded(base)
    locked(tmp_path, step)
    lines = differences(tmp_path, step, hardware="A100")
    assert lines[1:-2] == ["hardware is A100 SXM, NVLink, was H100 SXM, NVLink"]
    slow = {"dp": sf.Link(latency=1e-3, bandwidth=1e9)}
    (line,) = differences(tmp_path, step, links=slow)[1:-2]
    assert line.startswith("the predicted time on H100 SXM, NVLink is ")


def test_kernels_are_counted_where_a_step_is_compiled(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    fn = lambda x, w: torch.tanh(x @ w) @ w
    args = (sf.ShapeDtype((6, 6)),) * 2
    price = sf.lock(sf.jit(fn), *args, path=path, kernels=True).price
    assert price.kernels == {"mm": 2, "cpp_fused": 1}
    (note,) = sf.lock(sf.jit(fn), *args, path=path).notes
    assert note == "kernels were not compared: sf.lock(..., kernels=True) compiles the step"
    fields = json.loads(path.read_text())
    fields["kernels"]["mm"] = 3
    path.write_text(json.dumps(fields))
    with pytest.raises(sf.BudgetError, match=r"kernel mm is called 2 times \(was 3\)"):
        sf.lock(sf.jit(fn), *args, path=path, kernels=True)


def test_kernels_are_refused_where_nothing_is_compiled(tmp_path: Path) -> None:
    with pytest.raises(sf.ShardError) as error:
        locked(tmp_path, sharded(program(tmp_path), backend="aten"), kernels=True)
    head, _, needed, fix = str(error.value).splitlines()
    assert head == "lock, kernels: kernels of shard(step), which is not compiled"
    assert needed.startswith('  needed: backend="inductor", with one process per rank')
    assert fix == "  try: sf.fake_world(n, numerics=False)"
    assert not (tmp_path / "locks").exists()


def test_a_plain_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sf.ShardError) as error:
        sf.lock(torch.sin, X, path=tmp_path / "step.json")
    assert str(error.value).startswith("lock: sin is not a transformed function\n  at: ")
    assert error.value.fix == "sf.shard(fn, mesh, ...)"


def test_a_tolerance_of_no_field_is_refused(base: Any, tmp_path: Path) -> None:
    with pytest.raises(sf.ShardError) as error:
        locked(tmp_path, sharded(base), tolerances={"peak": 0.1})
    head, _, needed, fix = str(error.value).splitlines()
    assert head == "lock: 'peak' in tolerances"
    assert needed == (
        "  needed: some of 'collectives', 'bytes', 'peak_bytes', 'ms', 'ops', 'kernels'"
    )
    assert fix == '  try: tolerances={"peak_bytes": 0.1}'


def test_a_rank_of_a_job_that_is_not_the_first_leaves_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = sharded(program(tmp_path))
    other = sf.shard(step.fn, sf.make_mesh((4, 1), ("dp", "tp")), (P(), P("dp")))
    locked(tmp_path, step)
    from shardfn.proof.locks import lock as module
    from shardfn.world import World

    monkeypatch.setattr(module, "current_world", lambda: World("real", 4, 1))
    assert locked(tmp_path, other).state == "read"
    assert sf.lock(step, PARAMS, X, path=tmp_path / "no.json").state == "read"
    assert os.listdir(tmp_path / "locks") == ["step.json"]
