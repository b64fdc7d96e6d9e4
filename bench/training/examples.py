"""Every training example on one device, on 8 simulated ranks and under torchrun: their figures
agree, and a run that goes on has those of one that was not interrupted. `make examples`.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
LLAMA = ("--layers", "2", "--width", "32", "--context", "16", "--steps", "6")
# example -> arguments
EXAMPLES: dict[str, tuple[str, ...]] = {
    "finetune_lora": (),
    "resnet": (),
    "per_sample_gradients": (),
    "hessian_vector": (),
    "train_llama": (*LLAMA, "--dtype", "float32"),
}
CLOSE = 1e-4  # of figures in float32


def figures(*args: str) -> list[float]:
    """The losses that an example prints."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *args, "--backend", "aten"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    found = re.findall(r"(?:loss|curvature) (\S+)", done.stdout)
    return [float(x) for x in found]


def difference(found: list[float], wanted: list[float]) -> float:
    """The largest relative difference."""
    pairs = zip(found, wanted, strict=True)
    return max(abs(x - y) / abs(y) for x, y in pairs)


def check(name: str, args: tuple[str, ...]) -> bool:
    """Whether an example has the figures of one device everywhere."""
    script = f"examples/{name}.py"
    one = figures(script, *args)
    fake = difference(figures(script, *args, "--fake", "8"), one)
    real = difference(figures(*TORCHRUN, script, *args), one)
    print(f"{name:22} 8 simulated {fake:.1e}  2 processes {real:.1e}", flush=True)
    return max(fake, real) < CLOSE


def check_resumed() -> bool:
    """Whether a Llama goes on as if it had not been interrupted, on its ranks and on others."""
    script = "examples/train_llama.py"
    with tempfile.TemporaryDirectory() as folder:
        saves = ("--folder", folder, "--save-every", "3")
        args = (script, *EXAMPLES["train_llama"])
        whole = figures(*args, "--fake", "8")
        figures(*args, "--fake", "8", *saves, "--stop", "3")
        saves = ("--folder", folder, "--save-every", "99", "--resume")
        same = difference(figures(*args, "--fake", "8", *saves), whole[3:])
        other = difference(figures(*args, "--fake", "3", *saves), whole[3:])
    print(f"resumed: on 8 ranks {same:.1e}, on 3 {other:.1e}")
    return same == 0 and other < CLOSE


def main() -> None:
    """Run all, or those that the command line names."""
    names = sys.argv[1:] or [*EXAMPLES, "resumed"]
    rows = [check_resumed() if name == "resumed" else check(name, EXAMPLES[name]) for name in names]
    sys.exit(0 if all(rows) else 1)


if __name__ == "__main__":
    main()
