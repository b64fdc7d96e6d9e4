"""Torch, as its user knows it, answers the same before `import shardfn`, after it, after every
kind of transform has run, and in another thread while captures run.

A sample of the programs that torch.compile compiles runs in `make test`, all of them in `make
sweeps`; what such programs read of torch, by identity, is compared in both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from bystander import run
from effort import asked

from tests.support.reading.source import ROOT

NEGATIVE = "compiled, negative variance"
PHASES = (
    "imported",
    "afterwards",
    "as Dynamo reads",
    "as its graph is traced",
    "beside captures",
    "at last",
)


@pytest.fixture(scope="module")
def seen(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, str]]:
    """The answers of a new interpreter, by phase and program.

    Inductor's cache is new too: its first real compilation starts a thread of its own.
    """
    cached = str(tmp_path_factory.mktemp("inductor"))
    paths = [str(ROOT), str(ROOT / "tests" / "support")]
    done = subprocess.run(
        [sys.executable, "-m", "bystander.run", *sorted(asked(request, "name"))],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCHINDUCTOR_CACHE_DIR": cached},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_unchanged(seen: dict[str, dict[str, str]], name: str) -> None:
    answers = {p: seen[p][name] for p in PHASES if name in seen.get(p, {})}
    assert answers == dict.fromkeys(answers, seen["before"][name])


@pytest.mark.parametrize("name", [name for name in run.ALL if name not in run.COMPILED])
def test_torch_answers_the_same_before_during_and_after_us(
    seen: dict[str, dict[str, str]], name: str
) -> None:
    assert_unchanged(seen, name)


@pytest.mark.parametrize("name", [name for name in run.COMPILED if name != NEGATIVE])
def test_torch_compile_answers_the_same_before_and_after_us(
    seen: dict[str, dict[str, str]], name: str
) -> None:
    assert_unchanged(seen, name)


@pytest.mark.parametrize("name", [NEGATIVE])
def test_the_table_holds_what_it_is_to_hold(seen: dict[str, dict[str, str]], name: str) -> None:
    assert_unchanged(seen, name)
    on_demand = () if os.environ.get(run.RACES) else ("afterwards", "beside captures")
    assert [*seen] == ["before", *(p for p in PHASES if p not in on_demand)]
    assert len(run.ALL) >= 80 and len(run.BESIDE) >= 60 and len(run.HELD) >= 40
    assert "ValueError: ['var has negative" in seen["at last"][name]
