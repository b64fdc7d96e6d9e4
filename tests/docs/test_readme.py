"""The README's examples are one program, and it runs."""

import os
import re
import subprocess
import sys

from tests.support.reading.source import ROOT


def test_the_examples_in_the_readme_run(tmp_path):
    examples = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    script = tmp_path / "example.py"
    script.write_text("\n".join(examples))
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=path, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "all_reduce" in run.stdout
    assert "bytes a rank" in run.stdout
