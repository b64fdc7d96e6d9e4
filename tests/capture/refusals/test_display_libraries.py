"""Libraries that show values or progress are refused by name, at the user's line."""

from __future__ import annotations

import pprint
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.capture.refusals import display_libraries

rich_console = pytest.importorskip("rich.console")
rich_progress = pytest.importorskip("rich.progress")
tqdm = pytest.importorskip("tqdm")
tqdm_auto = pytest.importorskip("tqdm.auto")

X = torch.arange(3.0)
CONSOLE = rich_console.Console()
BAR = tqdm.tqdm(total=3, disable=True)


def looped(steps: Callable[[], Any]) -> Callable[[Any], Any]:
    def loop(x: Any) -> Any:
        for _ in steps():
            x = 2 * x
        return x

    return loop


VALUES, PROGRESS = display_libraries.VALUES, display_libraries.PROGRESS
CALLS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "pformat": (lambda x: print(pprint.pformat(x)) or x, "pprint", VALUES),
    "PrettyPrinter": (lambda x: pprint.PrettyPrinter().pprint(x) or x, "pprint", VALUES),
    "Console.print": (lambda x: CONSOLE.print(x) or x, "rich", VALUES),
    "Console.log": (lambda x: CONSOLE.log(x) or x, "rich", VALUES),
    "track": (looped(lambda: rich_progress.track(range(3))), "rich", PROGRESS),
    "tqdm": (looped(lambda: tqdm.tqdm(range(3))), "tqdm", PROGRESS),
    "trange": (looped(lambda: tqdm.trange(3)), "tqdm", PROGRESS),
    "tqdm.auto": (looped(lambda: tqdm_auto.tqdm(range(3))), "tqdm", PROGRESS),
    "tqdm.write": (lambda x: tqdm.tqdm.write("a") or x, "tqdm", PROGRESS),
    "set_postfix": (lambda x: BAR.set_postfix(loss=x.sum()) or x, "tqdm", PROGRESS),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("around", [lambda f: f, lambda f: sf.grad(lambda x: f(x).sum())])
def test_a_library_that_shows_values_is_refused_at_the_users_line(
    name: str, around: Any, capsys: Any
) -> None:
    f, library, fix = CALLS[name]
    with pytest.raises(sf.CaptureError) as caught:
        sf.jit(around(f), backend="aten")(X)
    first = str(caught.value).splitlines()[0]
    assert f": the function calls {library}, which would show what the trace computes" in first
    assert caught.value.fix == fix
    assert caught.value.source is not None and caught.value.source.startswith(__file__)
    shown = capsys.readouterr()
    assert shown.out == shown.err == ""


def test_what_the_errors_say_to_write_works(capsys: Any) -> None:
    def f(x: Any) -> Any:
        sf.debug.callback(lambda x: CONSOLE.print(x), x)
        sf.debug.print("x is {}", x)
        return x

    step = sf.jit(f, backend="aten")
    for x in (X, X + 1):
        step(x)
        shown = capsys.readouterr().out.splitlines()
        assert shown[-1] == f"x is {x}"
