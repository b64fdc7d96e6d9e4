"""No thread of shardfn imports a module. A child that a process forks meanwhile (a worker of a
DataLoader) has a copy of the module's lock and no thread that opens it: it waits for good.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WATCHED = """
import sys, threading

class Watch:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is not threading.main_thread():
            print("imported:", name)

{imports}
sys.meta_path.insert(0, Watch())
{call}
for thread in threading.enumerate():
    if not (thread.daemon or thread is threading.main_thread()):
        thread.join()
print({done})
"""
CALLS = {
    "compile": (
        "from shardfn.compile import ahead",
        "ahead.prepare_compiler()",
        "ahead.own_folder().read(ahead._name(ahead.header_folder()))",
        b"compiled",
    ),
    "save": (
        "import tempfile, torch, shardfn as sf",
        """
folder = tempfile.mkdtemp()
saving = sf.save(folder, {"w": torch.ones(2), "step": 3}, background=True)
""",
        "sf.load(saving.wait(), like={'w': torch.zeros(2), 'step': 0})['w'].tolist()",
        [1.0, 1.0],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_thread_imports(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHARDFN_CACHE_DIR", str(tmp_path))
    imports, call, done, result = CALLS[name]
    out = subprocess.run(
        [sys.executable, "-c", WATCHED.format(imports=imports, call=call, done=done)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.stdout == f"{result}\n", out.stdout + out.stderr
