"""The three worlds have the same losses, and a rank that fails says where."""

import attrs
import pytest
import torch
import torch.multiprocessing as mp

from shardfn_demo import gpt, runs
from shardfn_demo.verdict import judge

JOB = runs.Job(config=gpt.Config(context=7, width=16, heads=4, layers=1), steps=3, batch=2)

JOB64 = attrs.evolve(JOB, dtype=torch.float64)


def test_the_three_worlds_have_the_same_losses():
    told = {"one": [], "eight": [], "two": []}
    one = runs.one_device(JOB, told["one"].append)
    eight = runs.simulated(JOB, told["eight"].append)
    two = runs.processes(JOB, told["two"].append, backend="aten")
    verdict = judge([one, eight, two])
    assert verdict.holds, verdict.sentence
    assert [list(run.losses) for run in (one, eight, two)] == list(told.values())
    assert one.collectives == () and eight.collectives and two.collectives
    assert "all_reduce" in eight.program


def test_dropout_draws_the_same_in_the_three_worlds():
    job = attrs.evolve(JOB64, config=attrs.evolve(JOB.config, dropout=0.1))
    one = runs.one_device(job, lambda _: None)
    eight = runs.simulated(job, lambda _: None)
    two = runs.processes(job, lambda _: None, backend="aten")
    for other in (eight, two):
        assert other.losses == pytest.approx(one.losses, rel=1e-10, abs=0)
    assert "random_bits(" in eight.program and "random_bits(" in two.program
    assert eight.collectives == runs.simulated(JOB64, lambda _: None).collectives
    without = runs.one_device(JOB64, lambda _: None)
    assert one.losses[0] != without.losses[0]


def test_the_demo_trains_with_dropout_and_other_users_of_the_model_ask_for_it():
    assert runs.Job().config.dropout == 0.1
    assert gpt.Config().dropout == 0


def test_a_rank_that_fails_ends_the_run_with_its_traceback():
    with pytest.raises(mp.ProcessRaisedException, match=r"in rank_main(.|\n)*negative dimension"):
        runs.processes(attrs.evolve(JOB, batch=-1), print, backend="aten")
    assert not mp.active_children()


def test_traffic_is_counted_by_kind():
    record = lambda kind, nbytes: type("Record", (), {"kind": kind, "nbytes": nbytes})
    traffic = runs.by_kind(
        [record("all_reduce", 3), record("all_gather", 5), record("all_reduce", 4)]
    )
    assert traffic == (runs.Traffic("all_gather", 1, 5), runs.Traffic("all_reduce", 2, 7))
