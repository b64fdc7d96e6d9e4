"""Every example runs as a script, on one device, in a fake world and on real ranks, and its
figures agree. Two of them run under torchrun; the others run in processes that have imported
torch, with the environment that torchrun gives.
"""

import contextlib
import functools
import importlib
import io
import os
import pathlib
import re
import runpy
import subprocess
import sys
from unittest import mock

import pytest
import torch
from ranks import run_ranks

import shardfn as sf

ROOT = pathlib.Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
TUTORIALS = (("examples/ddp_tutorial.py",), ("examples/finetune.py", "--backend", "aten"))
SMALL = ("--steps", "3", "--layers", "1", "--backend", "aten")


def run(*arguments):
    """Run Python on the arguments and return what it prints."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_on_a_rank(*arguments):
    """`run_here` in a process of a job, whose ranks are those of its process group."""
    os.environ["RANK"] = str(torch.distributed.get_rank())
    os.environ["WORLD_SIZE"] = str(torch.distributed.get_world_size())
    return run_here(*arguments)


@functools.cache
def in_fake_world(*script, ranks):
    """The figures that a script prints in a fake world of some ranks."""
    return figures(run_here(*script, "--fake", str(ranks)))


def run_here(script, *arguments):
    """Run a script in this process, which has imported torch, and return what it prints."""
    said = io.StringIO()
    argv = mock.patch.object(sys, "argv", [script, *arguments])
    with argv, contextlib.redirect_stdout(said):
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return said.getvalue()


def figures(said, word="loss"):
    """The numbers that follow a word."""
    return [float(number) for number in re.findall(rf"{word} +(-?\d+\.\d+)", said)]


def test_hello_prints_the_loss_of_one_device_twice():
    one, eight = figures(run_here("examples/hello.py"))
    assert eight == pytest.approx(one, rel=1e-5)


def test_hello_is_short_enough_to_read_at_a_glance():
    lines = (ROOT / "examples" / "hello.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 22


def test_both_spellings_of_the_pipeline_have_the_numbers_of_the_function_alone():
    said = run_here("examples/pipeline.py")
    for word in ("loss", "gradient of down"):
        alone, stacked, composed = figures(said, word)
        assert stacked == pytest.approx(alone, rel=1e-5) and composed == pytest.approx(
            alone, rel=1e-5
        )


def test_one_script_says_the_same_in_both_worlds(tmp_path):
    script = "examples/both_worlds.py"
    fake = run_here(script, "--fake", "2", "--folder", str(tmp_path / "fake"))
    folder = str(tmp_path / "real")
    real = run_ranks(2, run_on_a_rank, script, "--folder", folder)[0]
    assert len(figures(fake)) == 6 and fake == real


@pytest.mark.parametrize("script", TUTORIALS, ids=lambda script: script[0])
def test_a_loop_of_a_tutorial_has_the_losses_of_one_device(script):
    one = in_fake_world(*script, ranks=1)
    fake = in_fake_world(*script, ranks=4)
    real = figures(run_ranks(2, run_on_a_rank, *script)[0])
    assert len(one) >= 8 and one[-1] < one[0]
    assert fake == pytest.approx(one, rel=1e-4)
    assert real == pytest.approx(one, rel=1e-4)


def test_the_ddp_tutorial_has_the_losses_of_plain_torch(monkeypatch):
    (script,) = TUTORIALS[0]
    found = in_fake_world(script, ranks=4)
    monkeypatch.setattr(sf, "shard", lambda fn, *_: fn)
    plain = figures(run_here(script, "--fake", "4"))
    assert found == pytest.approx(plain, rel=1e-5)


def test_gpt_trains_alike_on_one_device_in_a_fake_world_and_under_torchrun():
    one = run("examples/gpt.py", *SMALL)
    fake = run_here("examples/gpt.py", *SMALL, "--fake", "8")
    real = run(*TORCHRUN, "examples/gpt.py", *SMALL)
    assert (
        "1 ranks: dp 1 x tp 1" in one
        and "8 ranks: dp 2 x tp 4" in fake
        and "2 ranks: dp 1 x tp 2" in real
    )
    assert len(figures(one)) == 3
    assert figures(fake) == pytest.approx(figures(one), rel=1e-5)
    assert figures(real) == pytest.approx(figures(one), rel=1e-5)


def uninterrupted():
    """The digest after 30 steps of examples/restarts.py."""
    sys.path.insert(0, str(ROOT / "examples"))
    restarts = importlib.import_module("restarts")
    mesh = sf.make_mesh((2,), ("dp",))
    train, state = restarts.trainer(mesh), restarts.first(mesh)
    for k in range(30):
        state = train(state, restarts.batch(k))
    return restarts.digest(state)


def test_a_training_that_is_killed_ends_with_the_bits_of_an_uninterrupted_one(tmp_path):
    torchrun = (*TORCHRUN, "--max-restarts=1", "--monitor-interval=0.1")
    said = run(*torchrun, "examples/restarts.py", str(tmp_path), "--steps=30", "--kill=1")
    assert "start 1: rank 0 begins" in said
    assert f"parameters {run_ranks(2, uninterrupted)[0]}" in said
    assert len(os.listdir(tmp_path)) == 2  # nothing of a save that was killed
