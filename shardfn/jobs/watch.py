"""The watchdog beside a job. A thread of each process publishes over the store of the job which
calls it has made, reads what the others have, and says why a call cannot go on.

A call itself only appends to a list. All that talks to the store runs in threads, since a store
whose server has stopped does not answer.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from .. import _compat
from ..errors import ShardError, call_site
from . import activity, presence
from .calls import COMPARING, RAISED, WHICH_RAISED, Event, Lane
from .verdict import DECIDED, PATIENT, WAITING, WORLD, Heard, Verdict, judged, unheard_of, unserved

BEAT = 0.5  # seconds between two heartbeats, in a job of few processes
FEW = 64  # processes of such a job
LONG = 2.0  # seconds after which a call counts as one that waits
PATIENCE = 3.0  # seconds in which the others tell why a wait has failed
ASKED = 0.1  # seconds between two heartbeats then
FIRST = 1.0  # seconds for the first heartbeat
SHORTEST, LONGEST = 1e-4, 0.01  # seconds between two looks at the store
LINE = 200  # characters of an error
SILENT = 1.5  # seconds more, after which the store itself counts as gone


@attrs.define(eq=False)
class Watch:
    """The state of this process that the others read, and their states.

    Args:
        store: the store of the job, of which it makes clients of its own.
        rank, size: the place of this process.
        timeout: of a collective, in seconds.
        connections: the sockets of the process groups.
    """

    store: Any
    rank: int
    size: int
    timeout: float
    connections: set[tuple[int, int]]
    enter: Callable[[Event | None], None] = attrs.field(init=False)
    log: deque[Event | None] = attrs.Factory(deque)
    lanes: dict[str, Lane] = attrs.Factory(dict)
    now: Event | None = None  # the call that this process is in
    raised: Lane | None = None  # of a call that raised here, before the next one
    changed: float = attrs.Factory(time.monotonic)  # when it last began or ended one
    number: itertools.count[int] = attrs.Factory(itertools.count)  # of heartbeats
    place: dict[str, Any] = attrs.Factory(presence.here)
    left: dict[str, Any] | None = None  # how it ended
    heard: dict[int, tuple[float, Any]] = attrs.Factory(dict)  # rank -> when, what
    verdict: Verdict | None = None
    patience: str = WAITING
    woken: threading.Event = attrs.Factory(threading.Event)
    told: threading.Condition = attrs.Factory(threading.Condition)
    settled: dict[int, Any] = attrs.Factory(dict)  # what has been judged
    beaten: float = attrs.Factory(time.monotonic)  # when a heartbeat was complete
    is_raised: bool = False  # whether the verdict has been raised here
    is_heard: bool = False  # whether it has published anything
    is_over: bool = False
    is_unserved: bool = False  # whether the store has failed
    client: Any = None  # of the store, for comparisons
    threads: list[threading.Thread] = attrs.Factory(list)  # at work
    everyone: Lane = attrs.field(init=False)
    beats: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.enter = self.log.append
        self.everyone = self.lane(WORLD, range(self.size))
        self.beats = BEAT * max(1.0, self.size / FEW)
        self._start(self._run, "shardfn watches")
        with self.told:  # a process that ends at once has been heard
            self.told.wait_for(lambda: self.is_heard or self.is_unserved, FIRST)

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, daemon=True, name=name)
        self.threads = [x for x in self.threads if x.is_alive()]
        thread.start()
        self.threads.append(thread)

    def lane(self, name: str, ranks: Sequence[int]) -> Lane:
        """The calls on a mesh of these ranks."""
        return self.lanes.setdefault(name, Lane(name, tuple(ranks)))

    def _run(self) -> None:
        client = _compat.another_client(self.store, self.timeout)
        while not self.is_over:
            with self._telling():
                self._beat(client)
            is_calm = self.patience is WAITING and self.left is None
            self.woken.wait(self.beats if is_calm else ASKED)
            self.woken.clear()
        if self.left is not None and not self.is_unserved:
            self.left["read"] = True
            with self._telling():
                client.set(f"{KEY}{self.rank}", json.dumps(self.status()))

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """A context that talks to the store, and then wakes who waits for the answer."""
        try:
            yield
        except RuntimeError as error:  # the store is gone, or does not answer
            if not _compat.tells_of_ranks(error):
                raise
            self.is_unserved = True
        finally:
            with self.told:
                self.told.notify_all()

    def _beat(self, client: Any) -> None:
        """Publish what this process does, read the others, conclude."""
        self._drain()
        if self.verdict is not None:
            self._cut()  # a call may have begun meanwhile
        if self.is_unserved:
            return
        mine = self.status()
        client.set(f"{KEY}{self.rank}", json.dumps(mine))
        self.is_heard = True
        self._read(client, [(self.rank + 1) % self.size])
        (text,) = _compat.texts_of(client, [f"{KEY}verdict"])
        if text is not None:
            self._conclude(Verdict.of(text))
        if self.verdict is None:
            self._judge(client, mine)
        elif self.left:
            self._read(client, range(self.size))
        if mine["left"]:  # all calls of this process have been judged
            self.settled = {r: status for r, (_, status) in self.heard.items()}
        self.beaten = time.monotonic()

    def _judge(self, client: Any, mine: Any) -> None:
        now, patience = mine["now"], self.patience
        waits = now is not None and now["long"]
        if waits or self.left or patience is not WAITING:
            ranks = now["ranks"] if now else range(self.size)
            self._read(client, [r for r in ranks if r != self.rank])
        itself = Heard(self.rank, mine, 0.0)
        verdict = judged(itself, self._others(), patience=patience)
        if verdict is None and patience is DECIDED:
            verdict = unheard_of((self.rank + 1) % self.size)
        if verdict is not None:
            first = _compat.put_first(client, f"{KEY}verdict", verdict.text())
            self._conclude(Verdict.of(first))

    def _read(self, client: Any, ranks: Sequence[int]) -> None:
        """Read what other ranks have published last."""
        texts = _compat.texts_of(client, [f"{KEY}{r}" for r in ranks])
        for rank, text in zip(ranks, texts, strict=True):
            if text is None:
                continue
            status = json.loads(text)
            if rank not in self.heard or self.heard[rank][1]["beat"] != status["beat"]:
                self.heard[rank] = time.monotonic(), status

    def _others(self) -> list[Heard]:
        """The ranks that this one has heard, in order."""
        now = time.monotonic()
        return [
            Heard(rank, status, self._age(now - at, status), self.beats)
            for rank, (at, status) in sorted(self.heard.items())
        ]

    def _age(self, seconds: float, status: Any) -> float:
        """The seconds since a process has published. Only those of one host share a clock."""
        if status["place"]["host"] != self.place["host"]:
            return seconds
        return max(seconds, time.time() - status["at"])

    def _drain(self) -> None:
        with self.told:  # one thread at a time
            count = len(self.log)
            for _ in range(count):
                event = self.now = self.log.popleft()
                if event is not None:
                    event.lane.add(event)
        if count:
            self.changed = time.monotonic()

    def status(self) -> dict[str, Any]:
        """The activity of this process, as JSON."""
        event, seconds = self.now, time.monotonic() - self.changed
        is_long = seconds > min(LONG, self.timeout / 2)
        stage = line = sends = now = None
        if is_long or self.patience is not WAITING:
            if event is not None and event.code is not None:
                line, sends = activity.running(event.code, event.sends)
            if line is None:
                stage, line = activity.stage()
        if event is not None:
            now = {
                "lane": event.lane.name,
                "ranks": event.lane.ranks,
                "call": event.lane.count,
                "text": event.text,
                "sends": sends,
                "long": is_long,
                "seconds": round(seconds, 1),
            }
        return {
            "place": self.place,
            "at": time.time(),
            "beat": next(self.number),
            "lanes": {name: x.shown() for name, x in self.lanes.items() if x.count},
            "now": now,
            "stage": stage,
            "line": line,
            "left": self.left,
        }

    def _conclude(self, verdict: Verdict) -> None:
        if self.verdict is None:
            self.verdict = verdict
            self.enter = self._refuse
            self._drain()
            self._cut()

    def _cut(self) -> None:
        """End a wait of this process. A comparison looks itself whether there is a verdict."""
        if self.now is not None and self.now.key != COMPARING:
            _compat.shut_down(self.connections, self.store)

    def _refuse(self, event: Event | None) -> None:
        """Raise the verdict at the begin or the end of any later call."""
        raise self.error("a call" if event is None else event.text)

    def error(self, where: str) -> ShardError:
        """The verdict as an error, to be raised.

        Args:
            where: the function that was called.
        """
        assert self.verdict is not None
        self.is_raised = True
        return self.verdict.error(where, call_site())

    def why(self, where: str, error: BaseException) -> ShardError | None:
        """The reason why a call has failed. None if it is its own.

        Args:
            where: the function that was called.
            error: that it has raised.
        """
        if self.verdict is None and _compat.tells_of_ranks(error):
            self._ask()
        return None if self.verdict is None else self.error(where)

    def _ask(self) -> None:
        """Have the others tell why a wait has failed, for as long as patience lasts."""
        for self.patience, seconds in ((PATIENT, PATIENCE), (DECIDED, SILENT)):
            deadline = time.monotonic() + seconds
            self.woken.set()
            while not self._is_told() and time.monotonic() < deadline:
                with self.told:
                    self.told.wait(ASKED)
        if self.verdict is None:
            self._conclude(self._without_store())

    def _is_told(self) -> bool:
        """Whether there is a verdict, or the store will give none."""
        is_stuck = time.monotonic() - self.beaten > SILENT + self.beats
        return self.verdict is not None or self.is_unserved or is_stuck

    def _without_store(self) -> Verdict:
        """The verdict of a process that does not reach the store."""
        now = time.monotonic()
        at, status = self.heard.get(0, (now, self.status()))
        mine, server = (Heard(self.rank, self.status(), 0.0), Heard(0, status, now - at))
        known = judged(mine, self._others(), patience=PATIENT)
        return known or unserved(server, "the store of the job")

    def gathered(self, where: str, mine: str, lane: Lane | None = None) -> list[str]:
        """The texts of all ranks, by which they compare what they hold.

        Args:
            where: the function, which errors name.
            mine: the text of this rank.
            lane: that of the ranks; None for all of the world.

        Returns:
            A text of each rank of the lane, in its order.

        Raises:
            RankLostError: a rank does not come.
            DivergenceError: a rank is in another call.
        """
        lane = lane or self.everyone
        self.enter(Event(lane, COMPARING, f"a comparison of {where}", {}))
        place = lane, next(lane.gathers), self.rank
        texts: list[str] = []

        def gather() -> None:
            with self._telling():
                if self.client is None:
                    self.client = _compat.another_client(self.store, self.timeout)
                texts.extend(_gathered(self, *place, mine))

        self._start(gather, "shardfn compares")
        is_done: Callable[[], bool] = lambda: bool(texts or self.verdict)
        with self.told:
            self.told.wait_for(is_done, self.timeout)
        if not texts and self.verdict is None:
            self._ask()
        if not texts:
            raise self.error(where)
        self.enter(None)
        return texts

    def has_raised(self, lane: Lane, text: str, error: Exception) -> None:
        """Tell the others that a call has raised an error of its own here."""
        first = str(error).partition("\n")[0][:LINE]
        text = f"{text}{WHICH_RAISED}{type(error).__name__}: {first}"
        self.enter(Event(lane, RAISED, text, {}))
        self.enter(None)
        self.raised = lane
        self.woken.set()

    def caught_up(self, where: str) -> None:
        """Wait, before the call after one that raised, until the others have raised too. Else
        its collectives would meet those in which they still are.

        Raises:
            RankLostError: a rank does not come.
            DivergenceError: a rank is in another call, or has gone on.
        """
        lane, self.raised = self.raised, None
        if lane is not None:
            self.gathered(where, "", lane)

    def leave(self, error: str | None, *, follows: bool) -> None:
        """Tell the others that this process ends.

        Args:
            error: the first line of its error; None if it ends in peace.
            follows: whether that error is of another rank.
        """
        self.left = {"error": error, "follows": follows, "read": False}
        self.woken.set()

    def is_alone(self, *, serves: bool) -> bool:
        """Whether no rank needs this process any more, nor could tell it anything.

        Args:
            serves: whether it serves the store.
        """
        if self.is_unserved:
            return True
        others = [r for r in range(self.size) if r != self.rank]
        return all(presence.is_done(self.settled.get(r), serves=serves) for r in others)


KEY = "shardfn/watch/"


def _gathered(watch: Watch, lane: Lane, number: int, rank: int, mine: str) -> list[str]:
    """The texts of all ranks. The first rank collects them, so that each rank reads one key. A
    rank that sets its next text has read the last answer, which can be deleted then.
    """
    key, client = f"shardfn/compare/{lane.name}/", watch.client
    client.set(f"{key}{number}/{rank}", json.dumps(mine))
    is_first = rank == lane.ranks[0]
    ranks = lane.ranks if is_first else ()
    keys = [f"{key}{number}/{r}" for r in ranks] or [f"{key}{number}"]
    pause = SHORTEST
    # a thread that waits in the store would abort the process when that ends
    while not client.check(keys):
        if watch.is_over or watch.verdict is not None:
            return []
        time.sleep(pause)
        pause = min(2 * pause, LONGEST)
    texts = [x.decode() for x in client.multi_get(keys)]
    if not is_first:
        return json.loads(texts[0])
    everyone = [json.loads(x) for x in texts]
    client.set(f"{key}{number}", json.dumps(everyone))
    for each in (*keys, f"{key}{number - 1}"):
        client.delete_key(each)
    return everyone
