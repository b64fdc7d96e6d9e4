"""The plug-in of pytest: the fixture `lock`, which holds the price of a step in a file beside the
test, and `pytest --update-locks`.

pytest imports it in every run, so it imports torch and shardfn only when a test uses the fixture.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = "locks"
WROTE = "shardfn wrote the lock"  # a property of a test's report
FIX = "pytest --update-locks, if the change is intended"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the plug-in."""
    group = parser.getgroup("shardfn")
    text = "write the locks of steps anew, for the fixture `lock` of shardfn"
    group.addoption("--update-locks", action="store_true", help=text)


class Locks:
    """The locks of one test: `lock(step, *args)`.

    Args:
        request: of the fixture.
    """

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._node = request.node
        self._folder = Path(request.path).parent / FOLDER
        self._update = bool(request.config.getoption("--update-locks"))
        self._calls: dict[str, int] = {}  # by name

    def __call__(
        self,
        step: Any,
        *args: Any,
        name: str | None = None,
        tolerances: dict[str, float] | None = None,
        hardware: Any = None,
        links: Any = None,
        kernels: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Hold the price of a step in a file beside the test, and compare it from then on.

        Args:
            step: a transformed function, such as the result of shard.
            args: of the call; `ShapeDtype`s may stand for tensors.
            name: of the file; by default that of the test. The second call of a test has a 2
                after it.
            tolerances: the share by which a field may differ, as in `sf.lock`.
            hardware: as in `sf.lock`.
            links: as in `sf.lock`.
            kernels: as in `sf.lock`.
            kwargs: keyword arguments of the call.

        Returns:
            The `Lock`.

        Raises:
            BudgetError: the price differs from the file's.
        """
        __tracebackhide__ = True  # a failed test shows its own line
        from shardfn.hardware import H100
        from shardfn.proof.locks.lock import checked_options, locked

        options = {"tolerances": tolerances, "links": links, "kernels": kernels}
        path = self._folder / f"{self._stem(name)}.json"
        checked_options(path=path, **options)
        result = locked(
            step,
            args,
            kwargs,
            path,
            update=self._update,
            hardware=H100 if hardware is None else hardware,
            fix=FIX,
            test=self._test(),
            **options,
        )
        if result.state == "written":
            self._node.user_properties.append((WROTE, str(path)))
        return result

    def _test(self) -> str:
        """Return the name of the test with its file."""
        _, _, rest = self._node.nodeid.partition("::")
        return f"{self._node.path.name}::{rest}"

    def _stem(self, name: str | None) -> str:
        """Return the name of a file for the next call."""
        _, _, test = self._node.nodeid.partition("::")
        text = test.replace("::", ".") if name is None else name
        stem = re.sub(r"[^\w.]+", "-", text).strip("-.") or "lock"
        count = self._calls[stem] = self._calls.get(stem, 0) + 1
        return stem if count == 1 else f"{stem}-{count}"


@pytest.fixture
def lock(request: pytest.FixtureRequest) -> Locks:
    """`lock(step, *args)` holds the price of a step in `locks/<test>.json`, and compares it."""
    return Locks(request)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the locks that the run wrote."""
    reports = [x for rows in terminalreporter.stats.values() for x in rows]
    written = dict.fromkeys(
        path
        for report in reports
        for name, path in getattr(report, "user_properties", ())
        if name == WROTE
    )
    if written:
        terminalreporter.section("locks written")
    for path in written:
        terminalreporter.write_line(path)
