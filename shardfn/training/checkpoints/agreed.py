"""Steps of a collective function, in which a failure on one rank fails on all ranks. Ranks exchange
JSON texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist

from ..._compat.distributed.checkpoint_plans import blocks_read
from ...errors import CheckpointError, ShardError
from ...stored.json_text import parsed
from ...world import current_world
from .texts import Texts

Joint = Callable[[list[Any]], Sequence[Any]]

# The errors that have the same class on the other ranks.
FAMILY = {cls.__name__: cls for cls in ShardError.__subclasses__()}


@attrs.frozen
class Steps:
    """Run the steps of a collective function so that a failure on one rank fails on all.

    Args:
        where: the function, for its errors.
        texts: between its ranks.
    """

    where: str
    texts: Texts

    def take(self, own: Callable[[], Any], joint: Joint) -> Any:
        """Take a step on all ranks, and then one on the first rank.

        Args:
            own: run by each rank; returns JSON.
            joint: run by the first rank with what all returned; one answer for each, as JSON.

        Returns:
            The answer for this rank.

        Raises:
            Exception: this rank's error, or that of the first rank that failed.
        """
        value, error = _tried(own)
        every = self.texts.gather(self._told(value, error))
        answers: list[str] = []
        if every:
            found, failed = _tried(lambda: joint(list(map(self._heard, every))))
            error = error or failed
            answers = [self._told(answer, failed) for answer in found or [None] * len(every)]
        answer = self.texts.scatter(answers)
        if error is not None:
            raise error
        return self._heard(answer)

    def _told(self, value: Any, error: BaseException | None) -> str:
        """Encode the outcome of a step for the other ranks."""
        if error is None:
            return json.dumps({"value": value})
        failed: dict[str, Any] = {
            "rank": self.texts.rank,
            "kind": type(error).__name__,
            "text": str(error),
        }
        if isinstance(error, OSError):
            failed["system"] = [error.errno, error.strerror, error.filename]
        return json.dumps({"failed": failed}, default=str)

    def _heard(self, text: str) -> Any:
        """Decode the outcome of another rank's step.

        Raises:
            Exception: its error.
            CheckpointError: something else than what ranks tell each other.
        """
        try:
            told = parsed(text)
            if "failed" not in told:
                return told["value"]
            failed = told["failed"]
            kind, line = str(failed["kind"]), str(failed["text"])
            if "system" in failed:
                number, cause, path = failed["system"]
                raise OSError(number, cause, path)
            if kind in FAMILY:
                raise FAMILY[kind](line)
            got = f"rank {failed['rank']} failed"
        except (KeyError, TypeError, ValueError):
            got, kind, line = "a rank sent no answer", "it sent", text[:80]
        fix = "read the error message of the failed rank"
        raise CheckpointError.of(self.where, got, f"{kind}: {line}", fix=fix)


def read(
    where: str,
    targets: Mapping[str, torch.Tensor],
    metadata: Any,
    fill: Callable[[Any, tuple[slice, ...], torch.Tensor], Any],
) -> None:
    """Fill tensors with the blocks of them that this rank holds, on all ranks or none.

    Args:
        where: the function, for its errors.
        targets: plain tensors and DTensors by name, written in place.
        metadata: DCP's record of the chunks of these tensors.
        fill: copies a block of a chunk to the memory of this rank.

    Raises:
        Exception: this rank's error, or that of the first rank that failed.
    """

    def own() -> None:
        for block in blocks_read(targets, metadata):
            fill(*block)

    Steps(where, job_texts()).take(own, lambda every: every)


def job_texts() -> Texts:
    """Make the exchange of texts between the ranks of the job; a fake world has one process."""
    is_alone = current_world().kind == "simulated"
    is_shared = dist.is_initialized() and not is_alone
    return Texts(dist.group.WORLD if is_shared else None)


def _tried(step: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Run a step, and return its value or its error."""
    try:
        return step(), None
    except BaseException as error:
        return None, error
