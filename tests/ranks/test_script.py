"""Scripts for torchrun are audited as they are, or refused by name."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

import shardfn as sf
from shardfn.__main__ import main

NET = """
    import torch.distributed as dist
    from torch import nn

    RANK = dist.get_rank()


    def made():
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
"""
TRAIN = """
    import argparse
    import os

    import torch
    import torch.distributed as dist
    from torch.nn.functional import mse_loss
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler


    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", type=float, default=0.01)
        parser.add_argument("--divided", action="store_true")
        options = parser.parse_args()
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        import net

        assert net.RANK == dist.get_rank() == int(os.environ["RANK"])
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(48, 3), torch.randn(48, 2))
        sampler = DistributedSampler(data)
        loader = DataLoader(data, 4, sampler=sampler, num_workers=2, persistent_workers=True)
        model = DistributedDataParallel(net.made())
        lr = options.lr / (dist.get_world_size() if options.divided else 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                mse_loss(model(x), y).backward()
                optimizer.step()
        dist.destroy_process_group()


    if __name__ == "__main__":
        main()
"""


@pytest.fixture
def train(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(textwrap.dedent(NET))
    return written(tmp_path, TRAIN)


def written(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_a_right_script_exits_with_0(train: str, capsys: pytest.CaptureFixture[str]) -> None:
    before, argv = set(sys.modules), [*sys.argv]
    assert main(["audit", train, "--world", "4"]) == 0
    assert "of train.py on 4 ranks equal those of one device" in capsys.readouterr().out
    assert "net" not in set(sys.modules) - before and sys.argv == argv


def test_a_wrong_script_exits_with_1(train: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["audit", train, "--mesh", "dp=2", "--steps", "1", "--", "--lr", "0.1", "--divided"]
    assert main(command) == 1
    text = capsys.readouterr().out
    assert "x 1/2 on every rank = 1 / size of dp: learning rate divided once more" in text


def test_a_mesh_makes_the_process_group_of_a_script(tmp_path: Path) -> None:
    text = """
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (WORLD,))
        torch.manual_seed(0)
        model = fully_shard(torch.nn.Linear(3, 2), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.arange(24.0).view(8, 3).chunk(WORLD)[mesh.get_local_rank()]
        model(x).square().mean().backward()
        optimizer.step()
    """
    world = "import os\nWORLD = int(os.environ['WORLD_SIZE'])\n"
    path = written(tmp_path, world + textwrap.dedent(text))
    assert sf.audit(path, None, world=4).ok


def test_a_batch_sampler_over_a_distributed_one_gives_whole_batches(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(textwrap.dedent(NET))
    batches = "batch_sampler=BatchSampler(sampler, 4, False), num_workers=2)"
    text = TRAIN.replace("4, sampler=sampler, num_workers=2, persistent_workers=True)", batches)
    text = text.replace("import DataLoader,", "import BatchSampler, DataLoader,")
    assert batches in text
    assert sf.audit(written(tmp_path, text), None, world=3, steps=2).ok


def test_another_script_may_be_the_single_device_step(train: str, tmp_path: Path) -> None:
    alone = tmp_path / "alone.py"
    alone.write_text(textwrap.dedent(TRAIN).replace("DataLoader(data, 4,", "DataLoader(data, 12,"))
    script = sf.audit(train, str(alone), world=3, steps=2)
    assert script.ok


@pytest.mark.parametrize(
    "text, words",
    [
        ("import multiprocessing as m\nm.Process(target=print).start()", "starts a process"),
        (
            "import shardfn as sf\nsf.make_mesh((2,), ('dp',))",
            "calls sf.make_mesh, which sets up a process group of torch.distributed",
        ),
        ("import subprocess\nsubprocess.run(['true'])", "starts a subprocess"),
        ("import torch\ntorch.ones(2).to('cuda')", "uses a GPU"),
        ("import torch\ntorch.cuda.Stream()", "uses a GPU"),
        ("raise SystemExit(3)", "ends with code 3"),
    ],
)
def test_what_one_process_cannot_run_is_named(text: str, words: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(sf.CaptureError, match=f"the script {words}") as error:
        sf.audit(path, None, world=2)
    assert str(error.value).startswith("audit(train.py): ")


def test_a_script_without_a_step_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "print('nothing')")
    assert main(["audit", path, "--world", "2"]) == 2
    assert "called no module, took no gradient and returned no tensor" in capsys.readouterr().err


def test_a_wrong_mesh_is_refused_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["audit", "train.py", "--mesh", "dp:2"])
    assert "'dp:2' is not of the form dp=4,tp=2" in capsys.readouterr().err


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(sf.ShardError, match=r"no file .*gone\.py"):
        sf.audit(str(tmp_path / "gone.py"), None, world=2)
