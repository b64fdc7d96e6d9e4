"""The price of a step as a record, and as a small file that people can compare line by line."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import stat
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from ...byte_sizes import human_bytes
from ...errors import ShardError, call_site
from ...stored import complete_files
from ...stored.json_text import parsed

FORMAT = 1
NUMBER = re.compile(r"(?<=\[)\d+(?=\])|(?<=\.)\d+(?![^.])")  # of a layer, in a path
RANGE = re.compile(r"(?<=[\[.])(\d+)\.\.(\d+)(?=\]|\.|$)")  # of such numbers
MODE = 0o644  # of a new file: others may read it, as other files of a project
MOST = 2**20  # paths of one range
CONFLICT = ("<<<<<<<", "=======", ">>>>>>>")  # how version control marks lines of two versions


@attrs.frozen
class Sent:
    """The equal collectives of one source line.

    Args:
        count: the number of such collectives in a step.
        bytes: the total bytes that these collectives move on one rank.
        implicit: the number of collectives that no placement asked for.
    """

    count: int
    bytes: int
    implicit: int = 0


@attrs.frozen
class Bucket:
    """A bucket of gradients, or of parameters.

    Args:
        kind: the kind, reduction and mesh axis of the collective.
        dtype: the dtype of the data that is sent.
        bytes: the bytes of the bucket on one rank.
        leaves: the number of leaves.
        first: the path of the first leaf.
        last: the path of the last leaf.
        at: the op that computes the last gradient of the bucket, or reads the bucket first, with
            its source line. `at` is not in the lock file.
    """

    kind: str
    dtype: str
    bytes: int
    leaves: int
    first: str
    last: str
    at: str = attrs.field(default="", eq=False)

    def __str__(self) -> str:
        paths = self.first if self.first == self.last else f"{self.first} to {self.last}"
        noun = "leaf" if self.leaves == 1 else "leaves"
        size = human_bytes(self.bytes)
        return f"{self.kind} of {size} in {self.dtype}, {self.leaves} {noun}: {paths}"


@attrs.frozen(kw_only=True)
class Price:
    """The cost of one rank's step: its collectives, memory and ops. A field is None if it is not
    known, for example because the lock file lacks it.

    Args:
        function: the name of the transformed function.
        mesh: the mesh axes and their sizes.
        device: the device type of the tensors.
        backend: the backend that runs the program.
        rank: the rank of the program.
        torch: the version of torch, on which ops, kernels and closed-over tensors depend.
        hardware: the hardware model of the field `ms`.
        arguments: the dtype, global shape and placements of the arguments, by path.
        closed_over: the number of closed-over tensors of each dtype, shape and placement.
        results: the dtype, global shape and placements of the results, by path.
        collectives: the collectives of each source line, without buckets.
        buckets: the buckets, in the order of the plan.
        bytes: the bytes of a rank's collectives, including buckets, by kind of collective and mesh
            axis.
        peak_bytes: the peak of a rank's memory, by program.
        ms: the predicted milliseconds of a step, by program.
        ops: the ops that each source line runs, with the number of runs.
        kernels: the compiled kernels, with the number of calls in a step.
    """

    function: str | None = None
    mesh: str | None = None
    device: str | None = None
    backend: str | None = None
    rank: int | None = None
    torch: str | None = None
    hardware: str | None = None
    arguments: Mapping[str, str] | None = None
    closed_over: Mapping[str, int] | None = None
    results: Mapping[str, str] | None = None
    collectives: Mapping[str, Sent] | None = None
    buckets: tuple[Bucket, ...] | None = None
    bytes: Mapping[str, int] | None = None
    peak_bytes: Mapping[str, int] | None = None
    ms: Mapping[str, float] | None = None
    ops: Mapping[str, Mapping[str, int]] | None = None
    kernels: Mapping[str, int] | None = None


FIELDS = tuple(field.name for field in attrs.fields(Price))


def text_of(price: Price, **about: Any) -> str:
    """Return a price as the text of its file: one item a line, sorted.

    Args:
        price: the price.
        about: further fields, such as the test that it belongs to.
    """
    values = {name: getattr(price, name) for name in FIELDS}
    for name in ("arguments", "results"):
        if values[name] is not None:
            values[name] = numbered_ranges(values[name])
    fields = {"format": FORMAT, **about, **values}
    parts = [
        f"  {json.dumps(name)}: {_section(value)}"
        for name, value in fields.items()
        if value is not None
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _section(value: Any) -> str:
    """Return the value of a field as JSON, one item a line."""
    if isinstance(value, Mapping):
        items = [
            f"{json.dumps(key, ensure_ascii=False)}: {_item(value[key])}" for key in sorted(value)
        ]
        brackets = "{}"
    elif isinstance(value, tuple):
        items = [_item(x) for x in value]
        brackets = "[]"
    else:
        return json.dumps(value)
    if not items:
        return brackets
    inner = ",\n    ".join(items)
    return f"{brackets[0]}\n    {inner}\n  {brackets[1]}"


def _item(value: Any) -> str:
    is_table = isinstance(value, Mapping)
    if isinstance(value, Sent | Bucket):
        fields = attrs.fields(type(value))
        value = {x.name: getattr(value, x.name) for x in fields if x.eq}
    return json.dumps(value, sort_keys=is_table, ensure_ascii=False)


def read(where: str, path: str) -> tuple[Price, dict[str, Any]]:
    """Read the price of a file: the price, and its other fields. Fields that this version does
    not know stay unread.

    Args:
        where: the function and argument, for errors.
        path: of the file.

    Raises:
        ShardError: the file cannot be read, or is no lock. It stays as it is.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        fields = parsed(text)
    except (OSError, ValueError) as error:
        reason = f"it cannot be read: {error}"
        if isinstance(error, ValueError) and any(
            line.startswith(CONFLICT) for line in text_lines(path)
        ):
            reason = "the file has merge-conflict markers of version control"
        raise _unreadable(where, reason) from None
    if not isinstance(fields, dict) or "format" not in fields:
        raise _unreadable(where, 'the file is not a lock file of shardfn: "format" is missing')
    values: dict[str, Any] = {}
    is_later = isinstance(fields["format"], int) and fields["format"] > FORMAT
    for name in FIELDS:
        if fields.get(name) is None:
            continue
        try:
            values[name] = READERS[name](fields[name])
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            if not is_later:  # a later version may write a field in another form
                raise _unreadable(where, f'its "{name}" is damaged: {error}') from None
    others = {key: x for key, x in fields.items() if key not in FIELDS}
    return Price(**values), others


def numbered_ranges(rows: Mapping[str, str]) -> dict[str, str]:
    """Write the equal rows of layers as one: paths that differ in one number, where these follow
    each other.

    Example:
        >>> numbered_ranges({"w[0]": "f32[3]", "w[1]": "f32[3]", "w[2]": "f32[5]", "b": "f32[]"})
        {'w[0..1]': 'f32[3]', 'w[2]': 'f32[5]', 'b': 'f32[]'}
    """
    groups: dict[tuple[str, ...], dict[tuple[str, ...], str]] = {}
    for path, row in rows.items():
        group = groups.setdefault(tuple(NUMBER.split(path)), {})
        group[tuple(NUMBER.findall(path))] = row
    result: dict[str, str] = {}
    for texts, group in groups.items():
        for position in range(len(texts) - 1):
            group = _joined(group, position)
        for numbers, row in group.items():
            pairs = itertools.zip_longest(texts, numbers, fillvalue="")
            result["".join(itertools.chain.from_iterable(pairs))] = row
    return result


def _joined(group: Mapping[tuple[str, ...], str], position: int) -> dict[tuple[str, ...], str]:
    """Join the rows that follow each other in the number at one position, and are equal."""
    columns: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[int, str]] = {}
    for numbers, row in group.items():
        others = numbers[:position], numbers[position + 1 :]
        columns.setdefault(others, {})[int(numbers[position])] = row
    result: dict[tuple[str, ...], str] = {}
    for (before, after), column in columns.items():
        runs: list[list[int]] = []
        for n in sorted(column):
            if runs and n == runs[-1][-1] + 1 and column[n] == column[n - 1]:
                runs[-1].append(n)
            else:
                runs.append([n])
        for run in runs:
            number = str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}"
            result[*before, number, *after] = column[run[0]]
    return result


def _expanded(path: str) -> list[str]:
    """Return the paths that one with ranges of numbers stands for."""
    ranges = [range(int(first), int(last) + 1) for first, last in RANGE.findall(path)]
    if not ranges:
        return [path]
    if math.prod(map(len, ranges)) > MOST:
        raise ValueError(f"{path!r} expands to too many paths")
    form = RANGE.sub("{}", path.replace("{", "{{").replace("}", "}}"))
    return [form.format(*numbers) for numbers in itertools.product(*ranges)]


def text_lines(path: str) -> list[str]:
    """Return the lines of a file, as far as they are text."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.readlines()


def _unreadable(where: str, reason: str) -> ShardError:
    needed = "a file that sf.lock has written"
    fix = (
        "restore the file from version control; or delete the file, and the next call writes it "
        "again"
    )
    return ShardError.of(where, reason, needed=needed, fix=fix, source=call_site(), arg_path="path")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r} is not an int of 0 or more")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise TypeError(f"{value!r} is not a number of 0 or more")
    return float(value)


def _table(item: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    """Return a reader of a dict whose values the given function reads."""

    def reader(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise TypeError(f"{value!r} is not an object")
        return {key: item(x) for key, x in value.items()}

    return reader


def _by_path(value: Any) -> dict[str, str]:
    rows = _table(_text)(value)
    return {path: row for key, row in rows.items() for path in _expanded(key)}


def _sent(value: Any) -> Sent:
    return Sent(_count(value["count"]), _count(value["bytes"]), _count(value.get("implicit", 0)))


def _buckets(value: Any) -> tuple[Bucket, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list")
    return tuple(
        Bucket(
            _text(x["kind"]),
            _text(x["dtype"]),
            _count(x["bytes"]),
            _count(x["leaves"]),
            _text(x["first"]),
            _text(x["last"]),
        )
        for x in value
    )


READERS: dict[str, Callable[[Any], Any]] = {
    "function": _text,
    "mesh": _text,
    "device": _text,
    "backend": _text,
    "rank": _count,
    "torch": _text,
    "hardware": _text,
    "arguments": _by_path,
    "closed_over": _table(_count),
    "results": _by_path,
    "collectives": _table(_sent),
    "buckets": _buckets,
    "bytes": _table(_count),
    "peak_bytes": _table(_count),
    "ms": _table(_number),
    "ops": _table(_table(_count)),
    "kernels": _table(_count),
}


def write(where: str, path: str, text: str) -> None:
    """Write the text of a lock, and the folder that it stands in.

    Raises:
        ShardError: it cannot be written.
    """
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        mode = stat.S_IMODE(os.stat(path).st_mode) if os.path.exists(path) else MODE
        complete_files.write(path, text.encode())
        os.chmod(path, mode)
    except (OSError, ValueError) as error:  # ValueError: a path that no system has
        fix = "path='locks/step.json', in a writable folder"
        got = f"it cannot be written: {error}"
        raise ShardError.of(where, got, fix=fix, source=call_site(), arg_path="path") from None
