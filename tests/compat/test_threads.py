"""Threads: patches count in the thread that entered them, and the last one restores torch."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

import shardfn as sf
from shardfn._compat import threads
from shardfn._compat.threads import capturing, is_capturing, overridden, replaced, staging


def elsewhere(fn):
    """The result of a function in another thread."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(fn()))
    thread.start()
    thread.join()
    return found[0]


def test_a_capture_is_of_one_thread() -> None:
    with capturing():
        assert is_capturing() and not elsewhere(is_capturing)
    assert not is_capturing()


def test_a_function_is_overridden_for_the_calls_that_are_ours() -> None:
    home = SimpleNamespace(f=lambda x: x)
    with overridden(home, "f", lambda old, x: old(x) + 1, is_capturing), capturing():
        assert home.f(1) == 2 and elsewhere(lambda: home.f(1)) == 1
    assert home.f(1) == 1


def test_the_last_of_several_contexts_restores_the_original() -> None:
    home = SimpleNamespace(x=1)
    first, second = (replaced(home, "x", lambda old: old + 10) for _ in range(2))
    first.__enter__()
    second.__enter__()
    assert home.x == 11, "replaced once"
    first.__exit__(None, None, None)
    assert home.x == 11
    second.__exit__(None, None, None)
    assert home.x == 1


def test_staging_is_re_entrant_and_keeps_other_threads_out() -> None:
    order: list[str] = []

    def stage() -> None:
        with staging():
            order.append("other")

    with staging(), staging():
        thread = threading.Thread(target=stage)
        thread.start()
        order.append("mine")
    thread.join()
    assert order == ["mine", "other"]


def test_a_lock_that_nobody_will_release_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import convert_frame

    taken = SimpleNamespace(acquire=lambda blocking: not blocking and False)
    monkeypatch.setattr(convert_frame, "compile_lock", taken)
    monkeypatch.setattr(threads, "_is_lost", lambda: True)
    with pytest.raises(sf.ShardError, match="this process: the process was forked"), staging():
        pass
