"""A fixed part of torch's operators, chosen by the hash of the name, and every one that once
failed; all of them: make conformance.
"""

from __future__ import annotations

import pytest
from ranks import run_ranks

from conformance import dtypes, judge
from conformance.__main__ import SAMPLE, chosen, in_sample
from conformance.real import checked
from conformance.workers import judged

CALLS = 1  # of each operator; make conformance tries all
REAL_CALLS = 3
PARTS = 6  # of the operators that real processes try
SLOW = {"grid_sampler_3d", "nn.functional.max_unpool3d"}  # minutes; judged by make conformance
ONCE_FAILED = {  # and why
    "H": "a result that is an attribute of an argument was lost",
    "T": "the same",
    "nn.functional.hardsigmoid": "its decomposed gradient divides by a rounded 6",
    "linalg.solve": "an op that only checks has no result",
    "cdist": "the gradient of batches that broadcast",
    "nn.functional.linear_cross_entropy.chunked": "no gradient under torch.func",
    "linalg.eig": "a conjugate that torch had not computed yet could not be sent",
    "nn.functional.silu.complex": "a complex number without dims could not be reduced",
    "sparse.sampled_addmm": "sparse tensors have no strides",
}
NAMES = sorted({n for n in chosen(None) if in_sample(n, SAMPLE)} - SLOW | ONCE_FAILED.keys())


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_is_right_or_refused_however_it_is_cut(name: str) -> None:
    bad = [v for v in judged(name, CALLS).verdicts if v.what in (judge.WRONG, judge.CRASHED)]
    assert not bad, "\n".join(f"{v.what} {v.case}\n  {v.said}" for v in bad[:5])


DTYPES = ("bool", "uint8", "int32", "float16", "bfloat16", "complex64")


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_operator_is_right_in_every_dtype(dtype: str) -> None:
    cases = [case for name in NAMES[::8] for case in dtypes.cases(name, [dtype], CALLS)]
    verdicts = map(dtypes.op_by_op, cases)
    bad = [v for v in verdicts if v.what in (judge.WRONG, judge.CRASHED)]
    assert cases
    assert not bad, "\n".join(f"{v.what} {v.case}\n  {v.said}" for v in bad[:5])


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("n", [2, 3])
def test_cases_come_out_the_same_on_real_gloo_processes(n: int, part: int) -> None:
    names = [n for n in NAMES if n not in ONCE_FAILED][::3]
    results = run_ranks(n, checked, names[part::PARTS], 0.1, REAL_CALLS)
    assert len({count for count, _ in results}) == 1 and results[0][0] > 1
    assert not (wrong := [said for _, found in results for said in found]), "\n".join(wrong[:5])
