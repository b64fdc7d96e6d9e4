"""Calls that cannot be captured: found by frame or text, each with what to write instead."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from shardfn import world
from shardfn.capture.refusals import unsupported as table
from shardfn.capture.refusals.unsupported import unsupported

USER = "/home/me/model.py"
C10D = "/site/torch/distributed/distributed_c10d.py"


class Frame(NamedTuple):
    filename: str
    name: str
    line: str = ""


@pytest.mark.parametrize("name", ["barrier", "new_group", "isend", "broadcast"])
def test_a_function_of_torch_is_found_among_the_frames(name: str) -> None:
    frames = [Frame(USER, "step"), Frame(C10D, name), Frame(C10D, "inner")]
    assert unsupported(frames, "") == table.TORCH[name]


def test_a_function_of_the_user_with_such_a_name_is_not_meant() -> None:
    assert unsupported([Frame(USER, "barrier")], "") is None


def test_a_function_of_ours_is_found() -> None:
    frames = [Frame(USER, "step"), Frame(world.__file__, "fake_world")]
    assert unsupported(frames, "") == table.WORLD


def test_a_mesh_is_known_by_its_constructor() -> None:
    frames = [Frame("/site/torch/distributed/device_mesh.py", "__init__")]
    assert unsupported(frames, "") == table.MESH


@pytest.mark.parametrize(
    ("file", "name", "row"),
    [
        ("/site/torch/nn/parallel/distributed.py", "__init__", table.WRAPS),
        ("/site/torch/nn/parallel/distributed.py", "forward", table.DDP),
        ("/site/torch/distributed/fsdp/_fully_shard/_api.py", "fully_shard", table.WRAPS),
        ("/site/torch/distributed/fsdp/_fully_shard/_state.py", "forward", table.FSDP),
        ("/site/torch/distributed/tensor/parallel/api.py", "parallelize_module", table.WRAPS),
    ],
)
def test_what_wraps_a_module_is_told_from_a_call_of_it(
    file: str, name: str, row: tuple[str, str]
) -> None:
    assert unsupported([Frame(USER, "step"), Frame(file, name)], "") == row


def test_the_users_line_tells_where_a_call_is_refused_at_once() -> None:
    frames = [Frame(USER, "step", "with CommDebugMode() as counts:")]
    said = "makes a DTensor or takes one apart"
    assert unsupported(frames, said) == table.COUNTS
    assert unsupported(frames, "something else") is None
    made = f"Dynamo does not know {table.CPP[1]}."
    assert unsupported([Frame(USER, "step", "store = dist.HashStore()")], made) == table.STORE
    assert unsupported([Frame(USER, "step", "lock = Lock()")], made) == table.OF_CPP


def test_attributes_of_groups_have_functions_in_their_place() -> None:
    assert table.of_attribute("barrier") == table.WAITS
    assert table.of_attribute("send") == table.POINT
    got, fix = table.of_attribute("allreduce")
    assert got.endswith(": .allreduce") and "dist.all_reduce(x, group=group)" in fix
    assert table.of_attribute("bound_device_id")[0].startswith("it reads .bound_device_id")


def test_without_frames_the_text_tells() -> None:
    assert unsupported([], "Skip calling function `barrier`") == table.WAITS
    for sign, row in table.SIGNS.items():
        assert unsupported([], f"Dynamo says: {sign} ...") == row


def test_the_users_line_tells_where_torchs_wrapper_is_refused() -> None:
    wrapper = Frame("/site/torch/distributed/c10d_logger.py", "wrapper")
    frames = [Frame(USER, "step", "group = dist.new_group([0, 1])"), wrapper]
    assert unsupported(frames, "") == table.GROUP
    frames = [Frame(USER, "step", "my_new_group(1)"), wrapper]
    assert unsupported(frames, "") == table.OTHER


def test_any_other_function_of_torch_distributed_has_a_row_too() -> None:
    assert unsupported([Frame(C10D, "unheard_of")], "") == table.OTHER
    assert unsupported([], "something else") is None


def test_other_functions_of_fully_shard_have_a_row_of_their_own() -> None:
    at = Frame("/site/torch/distributed/fsdp/_fully_shard/_fsdp_param.py", "unshard")
    assert unsupported([at], "") == table.FSDP


def test_every_row_is_a_problem_and_an_alternative() -> None:
    rows = [*table.TORCH.values(), *table.OURS.values(), *table.SIGNS.values()]
    for problem, fix in rows:
        assert problem.startswith(("it ", "local_map")) and fix


@pytest.mark.parametrize("sign", table.LOCAL_MAPS)
def test_a_mistake_of_local_map_is_found_where_it_was_raised(sign: str) -> None:
    at = Frame("/site/torch/distributed/_func_map.py", table.LOCAL_MAP_FRAME)
    assert unsupported([Frame(USER, "step"), at], sign) == table.LOCAL_MAPS[sign]
    assert unsupported([at, Frame(USER, "inner")], sign) is None
