"""A compilation notices that another thread changes a setting of torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from shardfn._compat.compilations import undisturbed as module
from shardfn._compat.compilations.undisturbed import (
    SettingsChanged,
    check_settings,
    process_settings,
    random_state_kept,
    undisturbed,
)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(False)


def elsewhere(change: Callable[[], None]) -> None:
    thread = threading.Thread(target=change)
    thread.start()
    thread.join()


def there_and_back() -> None:
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_dtype(torch.float32)


def deterministic_and_back() -> None:
    torch.use_deterministic_algorithms(True)
    torch.use_deterministic_algorithms(False)


def mkldnn_and_back() -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        pass


CHANGES = {
    "a dtype": lambda: torch.set_default_dtype(torch.float64),
    "a dtype, and back": there_and_back,
    "deterministic, and back": deterministic_and_back,
    "oneDNN, and back": mkldnn_and_back,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_by_another_thread_is_seen_also_when_it_is_undone(
    change: Callable[[], None],
) -> None:
    with undisturbed():
        check_settings()
        elsewhere(change)
        with pytest.raises(SettingsChanged):
            check_settings()
    check_settings()  # nothing is compiled any more


def test_settings_that_are_not_those_of_the_call_are_refused() -> None:
    wanted = process_settings()
    with undisturbed(wanted):
        check_settings()
    torch.set_default_dtype(torch.float64)
    with pytest.raises(SettingsChanged), undisturbed(wanted):
        pass


def test_what_a_thread_changes_itself_and_back_does_not_count() -> None:
    with undisturbed():
        there_and_back()
        elsewhere(lambda: torch.set_default_dtype(torch.get_default_dtype()))
        check_settings()


def test_torchs_own_setters_are_there_again() -> None:
    before = torch._C._set_default_dtype
    with undisturbed(), undisturbed():
        assert torch._C._set_default_dtype is not before
    assert torch._C._set_default_dtype is before
    assert "_set_default_dtype" in module.SETTERS


def test_numbers_that_others_draw_meanwhile_are_not_drawn_twice() -> None:
    from torch._dynamo import utils

    with random_state_kept(), utils.preserve_rng_state():
        first = torch.rand(())
    assert torch.rand(()) != first
    with utils.preserve_rng_state():
        first = torch.rand(())
    assert torch.rand(()) == first, "torch's own puts it back"
