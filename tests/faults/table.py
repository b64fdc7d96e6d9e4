"""The faults, one a row."""

from __future__ import annotations

from tests.faults.job import (
    CALL,
    CAPTURE,
    COMPILE,
    LOAD,
    MET,
    SAVE,
    START,
    STEP,
    Fault,
)

LOST, DIFFER, MEET = "RankLostError", "DivergenceError", "RendezvousError"
CHECK = {"SHARDFN_CHECK": "1"}

FAULTS = (
    # a rank ends or stops, at each moment
    Fault("kill -9", START, MEET),
    Fault("kill -9", MET, LOST),
    Fault("kill -9", CAPTURE, LOST),
    Fault("kill -9", COMPILE, LOST),
    Fault("kill -9", CALL, LOST),
    Fault("kill -9", STEP, LOST),
    Fault("kill -9", SAVE, LOST),
    Fault("kill -9", LOAD, LOST),
    Fault("kill -9", CALL, LOST, ranks=(0,)),
    Fault("kill -9", CALL, LOST, size=4, ranks=(2,)),
    Fault("kill -9", STEP, LOST, size=4, ranks=(1, 3)),
    Fault("kill -9", CAPTURE, LOST, ranks=(0,)),
    Fault("SIGSTOP", START, MEET),
    Fault("SIGSTOP", MET, LOST),
    Fault("SIGSTOP", CAPTURE, LOST),
    Fault("SIGSTOP", COMPILE, LOST),
    Fault("SIGSTOP", CALL, LOST),
    Fault("SIGSTOP", STEP, LOST),
    Fault("SIGSTOP", SAVE, LOST),
    Fault("SIGSTOP", LOAD, LOST),
    Fault("SIGSTOP", CALL, LOST, ranks=(0,)),
    Fault("SIGSTOP", CAPTURE, LOST, ranks=(0,)),
    Fault("SIGSTOP", CALL, LOST, size=4, ranks=(2,)),
    Fault("an exception", START, MEET),
    Fault("an exception", MET, LOST),
    Fault("an exception", CAPTURE, LOST),
    Fault("an exception", COMPILE, LOST),
    Fault("an exception", CALL, LOST),
    Fault("an exception", STEP, LOST),
    Fault("an exception", STEP, LOST, ranks=(0,)),
    Fault("an exception", STEP, LOST, size=4, ranks=(3,)),
    Fault("sys.exit(0)", START, MEET),
    Fault("sys.exit(0)", MET, f"{DIFFER} or {LOST}"),
    Fault("sys.exit(0)", CAPTURE, f"{DIFFER} or {LOST}"),
    Fault("sys.exit(0)", STEP, DIFFER),
    Fault("os._exit(3)", CALL, LOST),
    Fault("os._exit(3)", COMPILE, LOST),
    Fault("SIGTERM", STEP, LOST),
    Fault("SIGTERM", CAPTURE, LOST),
    Fault("SIGSEGV", CALL, LOST),
    Fault("SIGINT", STEP, LOST),
    Fault("SIGINT", CALL, LOST),
    # a rank goes on after an error of its own
    Fault("an exception, caught; goes on", CAPTURE, DIFFER, told=True),
    Fault("an exception, caught; goes on", COMPILE, f"{DIFFER} or {LOST}"),
    Fault("an exception, caught; goes on", CALL, DIFFER, told=True),
    Fault("an exception, caught; goes on", STEP, DIFFER, told=True),
    Fault("an exception, caught; goes on", CALL, DIFFER, size=4, told=True),
    # ranks call different things
    Fault("skips a step", STEP, DIFFER, told=True),
    Fault("skips a step", STEP, DIFFER, size=4, ranks=(0,), told=True),
    Fault("makes a step more", STEP, DIFFER, told=True),
    Fault("a smaller last batch", STEP, DIFFER, told=True),
    Fault("a smaller last batch", CAPTURE, DIFFER, told=True),
    Fault("a batch of one row", STEP, DIFFER, told=True),
    Fault("a batch of another dtype", CAPTURE, DIFFER, told=True),
    Fault("another batch of the same shape", CAPTURE, DIFFER, told=True),
    Fault(
        "another batch of the same shape", STEP, DIFFER, variables=CHECK, told=True
    ),
    Fault("other parameters", STEP, DIFFER, variables=CHECK, told=True),
    Fault("other parameters", CAPTURE, DIFFER, told=True),
    Fault("another function", CAPTURE, DIFFER, told=True),
    Fault("another function", STEP, DIFFER, told=True),
    Fault("another function", STEP, DIFFER, variables=CHECK, told=True),
    Fault("another constant", CAPTURE, DIFFER, told=True),
    Fault("another constant", STEP, DIFFER, told=True),
    Fault("another closed-over tensor", CAPTURE, DIFFER, told=True),
    Fault("saves alone", STEP, f"{DIFFER} or {LOST}", told=True),
    Fault("makes a mesh more", STEP, f"{MEET} or {LOST}", told=True),
    Fault("a refused placement", STEP, f"{DIFFER} or {LOST}"),
    Fault("reads a wrong path", STEP, f"{DIFFER} or {LOST}"),
    Fault("other versions", START, DIFFER, told=True),
    # processes do not meet
    Fault("another mesh", START, DIFFER, told=True),
    Fault("WORLD_SIZE too large", START, MEET, variables={"WORLD_SIZE": "3"}),
    Fault(
        "WORLD_SIZE of its own", START, MEET, own={"WORLD_SIZE": "3"}, told=True
    ),
    Fault("RANK of another", START, MEET, size=3, own={"RANK": "2"}),
    Fault("RANK is no number", START, MEET, own={"RANK": "one"}, told=True),
    Fault(
        "port where nobody listens",
        START,
        MEET,
        own={"MASTER_PORT": "9"},
        told=True,
    ),
    Fault(
        "no such host", START, MEET, own={"MASTER_ADDR": "no.such.host"}, told=True
    ),
    # no faults: nothing is raised
    Fault("nothing", START, "right"),
    Fault("nothing", SAVE, "right", size=4),
    Fault("nothing", STEP, "right", variables=CHECK),
    Fault("is late by 1 s", STEP, "right"),
    Fault("is late by 1 s", START, "right"),
    Fault("is late by 1 s", CAPTURE, "right"),
    Fault("is late by 1 s", SAVE, "right"),
    Fault("a local call more", STEP, "right"),
    Fault("is late by twice the timeout", STEP, f"{DIFFER} or {LOST}", told=True),
    Fault(
        "is late by twice the timeout", COMPILE, f"{LOST} or {DIFFER}", told=True
    ),
)
