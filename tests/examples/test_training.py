"""The training examples have the losses of one device in a fake world, and a run that goes on has
those of one that was not interrupted. `make examples` runs all of them, under torchrun too.
"""

from __future__ import annotations

import importlib
import pathlib
from typing import Any

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
ATEN = ["--backend", "aten"]
LLAMA = [*ATEN, "--layers", "1", "--width", "16", "--context", "8", "--batch", "4"]


def example(name: str) -> Any:
    """The module of an example."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        return importlib.import_module(name)


@pytest.mark.parametrize("name", ["per_sample_gradients", "hessian_vector"])
def test_an_example_has_the_figures_of_one_device_in_a_fake_world(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = example(name).main
    one = main([*ATEN, "--steps", "4", "--fake", "1"])
    fake = main([*ATEN, "--steps", "4", "--fake", "8"])
    assert len(one) == 4 and "step 3 " in capsys.readouterr().out
    assert fake == pytest.approx(one, rel=1e-5)


def test_adapters_learn_on_a_frozen_base(capsys: pytest.CaptureFixture[str]) -> None:
    losses = example("finetune_lora").main([*ATEN, "--fake", "8"])
    assert losses[-1] < 0.8 * losses[0]
    assert "1428 of 8581 parameters are trained" in capsys.readouterr().out


def test_a_network_with_batch_norm_learns() -> None:
    losses = example("resnet").main([*ATEN, "--fake", "8", "--epochs", "3"])
    assert len(losses) == 9 and losses[-1] < 0.8 * losses[0]


def test_a_llama_that_goes_on_has_the_losses_of_one_that_was_not_interrupted(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    main = example("train_llama").main
    saved = ["--folder", str(tmp_path), "--save-every", "2"]
    args = [*LLAMA, "--fake", "4", "--steps", "4"]
    whole = main([*args, *saved, "--peak", "1"])
    assert capsys.readouterr().out.count("tokens/s") == 4
    (tmp_path / "step-00000004").rename(tmp_path / "later")
    left = main([*args, *saved, "--resume"])
    assert left == whole[2:]
