"""The state that the runtime keeps between calls."""

from __future__ import annotations

import copy
import pickle

from shardfn.runtime.store import CallStore, Compared, Earlier, FunctionStore


def test_the_entry_that_was_used_last_is_tried_first() -> None:
    store = CallStore()
    for entry in ("a", "b", "a"):
        store.put_first(entry)
    assert store.entries == ("a", "b")


def test_entries_of_stores_of_the_same_function_are_found_too() -> None:
    first, second = CallStore(), CallStore()
    for store in (first, second):
        store.kin.update((first, second))
    first.put_first("a")
    second.put_first("b")
    assert first.every() == ("a", "b") and second.every() == ("b", "a")


def test_clear_forgets_programs_and_no_warnings() -> None:
    store = CallStore(changes={"x": 1})
    store.put_first("a")
    store.programs.append("p")
    store.followed["k"] = "r"
    store.clear()
    assert (store.entries, store.programs, store.followed) == ((), [], {})
    assert store.changes == {"x": 1}


def test_a_copy_of_a_function_has_no_programs_of_the_original() -> None:
    store = FunctionStore(lambda: "fn", requests=[("jit", (), "r")], programs=["p"])
    for made in (copy.copy(store), copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        assert (made.owner(), made.requests, made.programs) == (None, [], [])
    store.clear()
    assert (store.requests, store.programs) == ([], [])


def test_donated_arguments_are_taken_by_one_caller() -> None:
    earlier = Earlier()
    assert earlier.take() is None
    earlier.put(["a"])
    earlier.put(["b"])
    assert earlier.take() == ["b"] and earlier.take() is None


def test_ranks_have_not_compared_at_first() -> None:
    assert not Compared().is_done
