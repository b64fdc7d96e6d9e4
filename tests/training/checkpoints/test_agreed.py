"""Steps that all ranks take: answers, errors, and what another rank may send."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

import shardfn as sf
from shardfn.training.checkpoints.agreed import Steps, job_texts
from shardfn.training.checkpoints.texts import Texts


@attrs.frozen
class Sent:
    """The exchange of rank 0 with one other rank, which sends a text."""

    text: str
    rank = 0

    def gather(self, text: str) -> list[str]:
        return [text, self.text]

    def scatter(self, texts: list[str]) -> str:
        assert texts[0] == texts[1] or "failed" not in texts[0]
        return texts[0]


def _taken(text: str) -> Any:
    texts: Any = Sent(text)
    return Steps("save", texts).take(lambda: 1, lambda every: [every, None])


def test_one_process_takes_both_steps() -> None:
    assert Steps("save", job_texts()).take(lambda: 3, lambda every: every) == 3
    with pytest.raises(ZeroDivisionError):
        Steps("save", Texts()).take(lambda: 1 // 0, lambda every: every)


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("", sf.CheckpointError, "it sent: \n"),
        ("[" * 10_000, sf.CheckpointError, r"no answer\n  it sent: \[\[\[\["),
        ('{"failed": 3}', sf.CheckpointError, "a rank sent no answer"),
        ('{"failed": {"rank": 1, "kind": "os.abort", "text": "x"}}', sf.CheckpointError,
         r"rank 1 failed\n  os.abort: x"),
        ('{"failed": {"rank": 1, "kind": "TreeError", "text": "f: no"}}', sf.TreeError, "^f: no$"),
        ('{"failed": {"rank": 1, "kind": "x", "text": "x", "system": [2, "gone", "w"]}}',
         FileNotFoundError, "gone: 'w'"),
    ],
    ids=["empty", "deep", "another form", "another error", "one of the family", "the system"],
)  # fmt: skip
def test_an_error_of_another_rank(text: str, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        _taken(text)


def test_an_error_of_the_first_rank_is_told() -> None:
    texts: Any = Sent('{"value": 1}')
    with pytest.raises(KeyError, match="lost"):
        Steps("save", texts).take(lambda: 1, lambda every: [{}["lost"]])
