"""lock: the price of a step as a small file under version control."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import attrs

from ...accepted import accept
from ...byte_sizes import human_bytes
from ...errors import BudgetError, ShardError, call_site
from ...hardware import H100, Hardware, Link
from ...tracebacks import filter_errors
from ...transforms._transformed import Bound, Transformed, name_of
from ...world import current_world
from . import lock_file
from .lock_diff import TOLERANCES, differences
from .lock_file import Price
from .lock_price import read_price
from .source_lines import SourceLines

WRITTEN, CHECKED, READ = "written", "equal", "read"
FIX = "sf.lock(..., update=True), if the change is intended"


@attrs.frozen(repr=False)
class Lock:
    """The cost of a step, and the result of the comparison with the lock file.

    Args:
        path: the path of the lock file.
        price: the cost of the step: its collectives, memory and ops.
        state: the action of `lock`: "written", "equal" (within the tolerances), or "read" on a rank
            that neither writes nor compares.
        notes: the fields that were not compared, with the reason.
    """

    path: str
    price: Price
    state: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        price = self.price
        sent = price.collectives or {}
        count = sum(x.count for x in sent.values()) + len(price.buckets or ())
        noun = "collective" if count == 1 else "collectives"
        total = human_bytes(sum((price.bytes or {}).values()))
        peak = human_bytes(max((price.peak_bytes or {}).values()))
        of = "a rank" if len(price.peak_bytes or {}) == 1 else "of all programs"
        ms = sum((price.ms or {}).values())
        lines = [
            f"{price.function} on {price.mesh}: {self.state}, {self.path}",
            f"  {count} {noun}, {total} {of}; peak {peak}; {ms:.4g} ms on {price.hardware}",
            *(f"  {note}" for note in self.notes),
        ]
        return "\n".join(lines)

    __repr__ = __str__


@filter_errors
def lock(
    fn: Any,
    *args: Any,
    path: str | os.PathLike[str],
    update: bool = False,
    tolerances: Mapping[str, float] | None = None,
    hardware: Hardware | str = H100,
    links: Mapping[str, Link] | None = None,
    kernels: bool = False,
    **kwargs: Any,
) -> Lock:
    """Write the cost of a step to a file, or compare the cost with an existing file, without
    running the step.

    Commit the lock file to version control. The lock file lists the collectives of each source
    line, the bytes by mesh axis, the memory peak, the predicted time, the placements of arguments
    and results, and the ops of each line. `lock` identifies a source line by its function and text,
    so moving code does not change the lock file.

    Args:
        fn: a transformed function, such as the result of shard.
        args: the arguments of the call. `ShapeDtype`s (global shape, dtype) may stand for tensors.
        path: the path of the lock file, which `lock` writes if the file does not exist.
        update: whether to overwrite an existing lock file.
        tolerances: a dict with the allowed relative difference for each field of the lock file;
            `math.inf` allows any difference. The default tolerance is 0.05 for "peak_bytes", 0.1
            for "ms", and 0 for "collectives", "bytes", "ops" and "kernels".
        hardware: an `sf.Hardware` for the predicted time, or the name of one, such as "H100".
        links: a dict from mesh axes to `sf.Link`s, which replace the links of the hardware.
        kernels: whether to compile the step, and to record its kernels in the lock file too.
        kwargs: the keyword arguments of the call.

    Returns:
        A `Lock` with the fields `price` (the cost of the step), `state` ("written" or "equal") and
        `notes` (the fields that were not compared).

    Raises:
        BudgetError: the cost of the step differs from the cost in the lock file. The message lists
            all differences by source line.
        ShardError: the lock file cannot be read or written, or fn is not a transformed function.
            `lock` does not change a lock file that it cannot read.

    Source: lock files of package managers; snapshot tests.

    Example:
        >>> import os, tempfile, torch, shardfn as sf
        >>> with sf.fake_world(4), tempfile.TemporaryDirectory() as folder:
        ...     mesh = sf.make_mesh((4,), ("dp",))
        ...     total = sf.shard(lambda x: x.sum(), mesh, sf.P("dp"), sf.P())
        ...     path = os.path.join(folder, "total.json")
        ...     states = [sf.lock(total, sf.ShapeDtype((8,)), path=path).state for _ in range(2)]
        >>> states
        ['written', 'equal']
    """
    options = {"update": update, "tolerances": tolerances, "links": links, "kernels": kernels}
    checked_options(path=path, **options)
    return locked(fn, args, kwargs, path, hardware=hardware, **options)


def checked_options(**options: Any) -> None:
    """Check the options of a lock.

    Raises:
        ShardError: lists those that are wrong.
    """
    accept("lock", **options)


@filter_errors
def locked(
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    update: bool = False,
    tolerances: Mapping[str, float] | None = None,
    hardware: Hardware | str = H100,
    links: Mapping[str, Link] | None = None,
    kernels: bool = False,
    fix: str = FIX,
    test: str | None = None,
) -> Lock:
    """`lock`, for a call that gives all options.

    Args:
        fn: a transformed function.
        args: of the call.
        kwargs: of the call.
        path: of the file.
        update: whether to write it in any case.
        tolerances: by field.
        hardware: the model of the time.
        links: of mesh axes.
        kernels: whether to compile the step.
        fix: what to do about a difference.
        test: the test that the file belongs to.
    """
    if isinstance(fn, Bound):
        fn, args = fn.func, (*fn.args, *args)
    if not isinstance(fn, Transformed):
        got = f"{name_of(fn)} is not a transformed function"
        raise ShardError.of("lock", got, fix="sf.shard(fn, mesh, ...)", source=call_site())
    shares = {**TOLERANCES, **(tolerances or {})}
    _check_fields(shares)
    path = os.fspath(path)
    where = f"lock({name_of(fn)}), path {path!r}"
    before, others = lock_file.read(where, path) if os.path.lexists(path) else (None, {})
    if test is not None and not update:
        _check_test(where, path, test, others.get("test"))
    lines = SourceLines(os.path.dirname(os.path.abspath(path)))
    now = read_price(
        fn.lower(*args, **kwargs), lines, hardware=hardware, links=links, kernels=kernels
    )
    world = current_world()
    if world.kind == "real" and world.rank:
        return Lock(path, now.price, READ, ("rank 0 writes and compares the file",))
    if before is not None and not update:
        result = differences(before, now.price, lines, now.places, shares)
        if result.lines:
            notes = [f"note: {note}" for note in result.notes]
            got = ("the price differs from the lock", *result.lines, *notes)
            raise BudgetError.of(where, *got, fix=fix, source=call_site(), arg_path="path")
        return Lock(path, now.price, CHECKED, result.notes)
    about = {"test": test} if test is not None else {}
    lock_file.write(where, path, lock_file.text_of(now.price, **about))
    return Lock(path, now.price, WRITTEN)


def _check_test(where: str, path: str, test: str, other: Any) -> None:
    """Check that a file is not the lock of another test of the same name.

    Raises:
        ShardError: names the other test.
    """
    if not isinstance(other, str) or other == test:
        return
    folder = os.path.dirname(os.path.dirname(os.path.abspath(path)))
    if os.path.exists(os.path.join(folder, other.partition("::")[0])):
        got = f"the lock file belongs to the test {other}, but this test is {test}"
        fix = 'lock(step, ..., name="another_name")'
        raise ShardError.of(where, got, fix=fix, source=call_site(), arg_path="path")


def _check_fields(shares: Mapping[str, float]) -> None:
    """Check that tolerances are of fields that have one.

    Raises:
        ShardError: names the others.
    """
    unknown = [name for name in shares if name not in TOLERANCES]
    if unknown:
        got = f"{', '.join(map(repr, unknown))} in tolerances"
        needed = f"some of {', '.join(map(repr, TOLERANCES))}"
        fix = 'tolerances={"peak_bytes": 0.1}'
        source = call_site()
        raise ShardError.of(
            "lock", got, needed=needed, fix=fix, source=source, arg_path="tolerances"
        )
