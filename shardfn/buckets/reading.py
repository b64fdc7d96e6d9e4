"""The conversion of JSON to a bucket plan, with a check of each value."""

from __future__ import annotations

import json
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import attrs

LONGEST = 2**26  # characters of a plan
LARGEST = 2**63 - 1  # bytes, and other counts


class Check(NamedTuple):
    """Check the JSON values of one type."""

    accepts: Callable[[Any], bool]
    needed: str


CHECKS: dict[Any, Check] = {
    int: Check(lambda x: type(x) is int and 0 <= x <= LARGEST, "an int from 0 to 2**63 - 1"),
    str: Check(lambda x: isinstance(x, str), "text"),
    str | None: Check(lambda x: x is None or isinstance(x, str), "text, or null"),
}


def read(kind: type, text: str, required: Sequence[str] = ()) -> tuple[Any, list[str]]:
    """Parse a record from JSON text, checking every value.

    Args:
        kind: an attrs class; its annotations say what each field holds.
        text: the JSON.
        required: fields that the text must have although they have a default.

    Returns:
        The record, and the problems of the text. With problems, the record is None.
    """
    if not isinstance(text, str | bytes | bytearray):
        return None, [f"the plan must be text; got {type(text).__name__}"]
    if len(text) > LONGEST:
        return None, [f"the text has {len(text)} characters, and at most {LONGEST} are allowed"]
    try:
        fields = json.loads(text)
    except RecursionError:
        return None, ["the text is nested too deeply"]
    except ValueError as error:
        return None, [f"it is not JSON: {error}"]
    wrong: list[str] = []
    record = _value(kind, fields, "plan", wrong)
    if not wrong:
        wrong = [f"plan.{name}: missing" for name in required if name not in fields]
    return (None if wrong else record), wrong


def _value(kind: Any, x: Any, path: str, wrong: list[str]) -> Any:
    """Convert a JSON value to a type; problems are added to `wrong`."""
    if typing.get_origin(kind) is tuple:
        return _items(typing.get_args(kind)[0], x, path, wrong)
    if attrs.has(kind):
        return _record(kind, x, path, wrong)
    accepts, needed = CHECKS[kind]
    if not accepts(x):
        wrong.append(f"{path}: it is {_said(x)}, must be {needed}")
    return x


def _items(kind: Any, x: Any, path: str, wrong: list[str]) -> tuple[Any, ...]:
    if not isinstance(x, list):
        wrong.append(f"{path}: must be a list; got {_said(x)}")
        return ()
    return tuple(_value(kind, item, f"{path}[{i}]", wrong) for i, item in enumerate(x))


def _record(kind: type, x: Any, path: str, wrong: list[str]) -> Any:
    if not isinstance(x, dict):
        wrong.append(f"{path}: must be an object; got {_said(x)}")
        return None
    known = attrs.fields_dict(kind)
    types = typing.get_type_hints(kind)
    before = len(wrong)
    wrong += [f"{path}.{name}: unknown" for name in x if name not in known]
    wrong += [
        f"{path}.{name}: missing"
        for name, field in known.items()
        if name not in x and field.default is attrs.NOTHING
    ]
    fields = {
        name: _value(types[name], value, f"{path}.{name}", wrong)
        for name, value in x.items()
        if name in known
    }
    return None if len(wrong) > before else kind(**fields)


def _said(x: Any) -> str:
    """Print a value in an error, shortened."""
    text = json.dumps(x)
    return text if len(text) <= 40 else f"{text[:40]}..."
