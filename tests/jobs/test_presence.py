"""A process of the same host sees whether another runs, is stopped, or has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from shardfn.jobs import presence


def test_this_process_runs() -> None:
    assert presence.state_of(presence.here()) == "runs"


def test_stopped_and_ended_processes_are_seen() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = presence._stat(sleeper.pid)[1]
    place = {**presence.here(), "process": sleeper.pid, "start": start}
    os.kill(sleeper.pid, signal.SIGSTOP)
    os.waitpid(sleeper.pid, os.WUNTRACED)
    assert presence.state_of(place) == "stopped"
    sleeper.kill()
    sleeper.communicate()
    assert presence.state_of(place) == "ended"


def test_a_number_that_another_process_has_now_counts_as_ended() -> None:
    assert presence.state_of({**presence.here(), "start": "0"}) == "ended"


def test_only_its_own_host_can_tell() -> None:
    assert presence.state_of({**presence.here(), "host": "elsewhere"}) is None
    assert presence.state_of({**presence.here(), "space": "pid:[1]"}) is None


def test_a_process_is_done_when_it_has_left_and_reads_no_more() -> None:
    status = {"place": presence.here(), "left": None}
    assert not presence.is_done(None, serves=False)
    assert not presence.is_done(status, serves=False)
    left = {**status, "left": {"read": False}}
    assert presence.is_done(left, serves=False)
    assert not presence.is_done(left, serves=True)
    assert presence.is_done({**status, "left": {"read": True}}, serves=True)
    ended = {**status, "place": {**presence.here(), "start": "0"}}
    assert presence.is_done(ended, serves=True)
