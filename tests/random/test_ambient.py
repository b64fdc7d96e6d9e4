"""Named random states (S5)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from worlds import simulated

import shardfn as sf
from shardfn import P, random
from shardfn.errors import ShardError
from shardfn.random import ambient

state = random.state
X = torch.zeros(6, 2)
draw = sf.jit(torch.rand_like)


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    """The states as they were, whatever a test does."""
    before = state.get()
    state.seed(0)
    yield
    state.set(before)


def test_s5_1_named_states_are_seeded_got_set_and_forked() -> None:
    state.seed(5)
    state.seed(6, "data")
    saved = state.get()
    assert saved["default"].tolist() == [5, 0, 0]
    assert saved["data"].tolist() == [6, 0, 0]
    first = draw(X)
    with state.fork("data"):
        other = draw(X)
        assert not torch.equal(other, first)
    assert state.get()["default"].tolist() == [5, 0, 1]
    assert state.get()["data"].tolist() == [6, 0, 1]
    state.set(saved)
    assert torch.equal(draw(X), first)
    with state.fork("data"):
        assert torch.equal(draw(X), other)


def _drawn() -> list[torch.Tensor]:
    """What both states draw next."""
    with state.fork("data"):
        return [draw(X), draw(X)]


def test_s5_1_a_state_in_a_checkpoint_goes_on_where_it_was(tmp_path: Path) -> None:
    state.seed(2**63 + 5)
    state.seed(6, "data")
    draw(X), _drawn()
    model = {"weight": torch.ones(3)}
    torch.save({"model": model, "random": state.get()}, tmp_path / "file")
    dcp.save(
        {"model": model, "random": state.get()}, checkpoint_id=tmp_path / "folder", no_dist=True
    )
    wanted = draw(X), *_drawn()

    state.set(torch.load(tmp_path / "file")["random"])
    assert all(map(torch.equal, (draw(X), *_drawn()), wanted))

    state.seed(0)
    state.seed(0, "data")
    loaded = {"model": {"weight": torch.zeros(3)}, "random": state.get()}
    dcp.load(loaded, checkpoint_id=tmp_path / "folder", no_dist=True)
    state.set(loaded["random"])
    assert all(map(torch.equal, (draw(X), *_drawn()), wanted))
    assert torch.equal(loaded["model"]["weight"], model["weight"])


def test_s5_1_a_fork_of_a_new_name_is_split_off_by_its_name() -> None:
    drawn = {}
    for tag in ("left", "right"):
        with state.fork(f"new {tag}"):
            drawn[tag] = draw(X)
    assert not torch.equal(drawn["left"], drawn["right"])


def test_s5_1_seed_inside_a_fork_is_that_of_the_fork() -> None:
    with state.fork("inner"):
        state.seed(9)
    assert state.get()["inner"].tolist() == [9, 0, 0]
    assert state.get()["default"].tolist() == [0, 0, 0]


def test_s5_2_shards_draw_apart_replicas_alike_and_all_of_it_as_one_device() -> None:
    wanted = draw(X)
    with simulated(a=2, b=3) as mesh:
        state.seed(0)
        drawn = sf.shard(torch.rand_like, mesh, (P("b"),))(X)
    assert torch.equal(sf.full(drawn), wanted)
    assert wanted.unique().numel() == wanted.numel()


def test_s5_3_a_program_on_a_part_of_the_ranks_moves_the_state_of_all() -> None:
    with simulated(a=2, b=2) as whole:
        sf.shard(torch.rand_like, whole["a"], (P("a"),))(X)
    assert state.get()["default"].tolist() == [0, 0, 1]


def test_s5_4_threads_never_take_the_same_call() -> None:
    draw(X)
    drawn: list[torch.Tensor] = []
    threads = [
        threading.Thread(target=lambda: drawn.extend(draw(X) for _ in range(20))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({tuple(x.flatten().tolist()) for x in drawn}) == 80
    assert state.get()["default"].tolist() == [0, 0, 81]


def test_simulated_ranks_share_one_state_and_take_it_once() -> None:
    with simulated(a=4) as mesh:
        f = sf.shard(torch.rand_like, mesh, (P("a"),))
        f(X), f(X)
    assert state.get()["default"].tolist() == [0, 0, 2]


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(ShardError, match="no random state is named 'elsewhere'"):
        state.set({"elsewhere": torch.zeros(3, dtype=torch.int64)})
    with pytest.raises(ShardError, match=r"'default' is \(2,\) torch.int64"):
        state.set({"default": torch.zeros(2, dtype=torch.int64)})
    with pytest.raises(ShardError, match="seed is 'seven'"):
        state.seed("seven")  # type: ignore[arg-type]


def test_s5_1_tags_that_begin_alike_fork_apart() -> None:
    drawn = []
    for tag in ("dropout of layer 1", "dropout of layer 2"):
        with state.fork(tag):
            drawn.append(draw(X))
    assert not torch.equal(*drawn)


def test_the_call_after_two_to_the_32_has_numbers_of_its_own() -> None:
    state.seed(3)
    first = draw(X)
    state.set({"default": torch.tensor([3, 0, 2**32 - 1])})
    last = draw(X)
    assert state.get()["default"].tolist() == [3, 0, 2**32]
    after = draw(X)
    assert state.get()["default"][:2].tolist() != [3, 0]
    assert state.get()["default"][2] == 1
    assert not torch.equal(after, first)
    assert not torch.equal(after, last)


def test_a_draw_on_another_device_takes_the_state_there() -> None:
    state = torch.zeros(3, dtype=torch.int64)
    source = ambient.Traced(state)
    assert source.next(torch.device("cpu"))[0] is state
    there, number = source.next(torch.device("meta"))
    assert there.device.type == "meta" and number == 1
