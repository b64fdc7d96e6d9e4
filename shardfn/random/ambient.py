"""The state that torch's own random calls draw from: named keys, each with the number of calls
that it has served.

A call's numbers follow from the key, the number of the call and the element. A captured function
takes (key, number of its first call) as an input, so the next call of it draws others.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .. import _compat
from ..errors import CaptureError, ShardError, problem
from ..ops.random_bits import AMBIENT, AMBIENT_KEY, STATE, WORD, random_bits, strides_of
from .keys import words_of

DEFAULT = "default"
WORDS = 3  # of a state: the two of its key, the number of the next call
SEEDS = 64  # torch's seeds whose states are remembered; the oldest are forgotten first
MOST_CALLS = WORD + 1  # of one key: the number of a call is one word of a counter
PLACE = torch.zeros(WORDS, dtype=torch.int64)  # stands for the state in what is captured

_tag: contextvars.ContextVar[str] = contextvars.ContextVar("tag", default=DEFAULT)


class States:
    """Named random states; the same on every rank that seeds and calls alike.

    `torch.manual_seed(seed)` seeds them too, as `seed(seed)` does, until `seed` is called. Where
    torch's state is put back to another seed, as by `torch.random.fork_rng`, they go on from
    where that seed was left.

    Example:
        >>> import shardfn as sf
        >>> sf.random.state.seed(7)
        >>> saved = sf.random.state.get()
        >>> saved["default"]
        tensor([7, 0, 0])
        >>> sf.random.state.set(saved)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # two threads never take the same call
        self._states: dict[str, list[int]] = {DEFAULT: [0, 0, 0]}
        self._own: set[str] = set()  # the states that do not follow torch's seed
        self._seen: tuple[Any, int | None] = (None, _compat.last_seeding()[1])
        self._left: dict[int | None, dict[str, list[int]]] = {}  # by torch's seeds of before
        self._seed: int | None = None  # torch's, which the states follow
        self._agreed: int | None = None  # the last that was compared between ranks

    def seed(self, seed: int, tag: str | None = None) -> None:
        """Start a state again from a seed.

        Args:
            seed: an int; its low 64 bits count.
            tag: the name of the state, made if there is none; by default that of the
                innermost `fork`.

        Raises:
            ShardError: the seed is not an int.
        """
        with self._lock:
            self._follow()
            name = _tag.get() if tag is None else tag
            self._own.add(name)
            self._states[name] = [*words_of(seed), 0]

    def get(self) -> dict[str, torch.Tensor]:
        """All states, as a tree that `set` takes back and a checkpoint can hold.

        Returns:
            For each tag an int64 tensor of shape (3,): the key's words, the number of calls.
        """
        with self._lock:
            self._follow()
            return {tag: torch.tensor(state) for tag, state in self._states.items()}

    def set(self, states: Mapping[str, torch.Tensor]) -> None:
        """Take states back that `get` gave; other states stay.

        Raises:
            ShardError: not such a tree, or a tag that is not known here: `seed` makes one.
        """
        wrong = [tag for tag, x in states.items() if not _is_state(x)]
        if wrong:
            fix = "what sf.random.state.get() returned, from the same version of shardfn"
            got = f"{wrong[0]!r} is {_described(states[wrong[0]])}"
            needed = f"an int64 tensor of shape ({WORDS},)"
            text = problem("random.state.set", got, needed=needed, fix=fix)
            raise ShardError(text, arg_path=f"states[{wrong[0]!r}]", fix=fix)
        with self._lock:
            self._follow()
            strange = [tag for tag in states if tag not in self._states]
            if strange:
                known = ", ".join(map(repr, self._states))
                fix = f"sf.random.state.seed(0, {strange[0]!r}) before"
                got = f"there is no state {strange[0]!r}, only {known}"
                text = problem("random.state.set", got, fix=fix)
                raise ShardError(text, arg_path=f"states[{strange[0]!r}]", fix=fix)
            self._states.update({tag: x.tolist() for tag, x in states.items()})

    @contextlib.contextmanager
    def fork(self, tag: str) -> Iterator[None]:
        """Draw from another state inside; where there is none of that name, one is split off.

        Args:
            tag: the name of the state; the outer one stands where it stood afterwards.
        """
        with self._lock:
            self._follow()
            if tag not in self._states:
                self._states[tag] = _state_from(self._current(), tag)
        token = _tag.set(tag)
        try:
            yield
        finally:
            _tag.reset(token)

    @contextlib.contextmanager
    def again(self, states: Mapping[str, torch.Tensor], tag: str) -> Iterator[None]:
        """Draw from states of before inside; the present ones stand where they stood afterwards."""
        with self._lock:
            self._follow()
            present = self._states
            self._states = {name: x.tolist() for name, x in states.items()}
        token = _tag.set(tag)
        try:
            yield
        finally:
            _tag.reset(token)
            with self._lock:
                self._states = present

    @property
    def tag(self) -> str:
        """The name of the state in use."""
        return _tag.get()

    def take(self, calls: int) -> torch.Tensor:
        """Reserve some calls and return the state of the first: int64 (3,)."""
        with self._lock:
            self._follow()
            state = self._current()
            if state[2] + calls > MOST_CALLS:
                state[:] = _state_from(state, "")
            taken = torch.tensor(state)
            state[2] += calls
            return taken

    def unagreed(self) -> int | None:
        """Torch's seed, if states follow it and other ranks have not been asked for theirs."""
        with self._lock:
            self._follow()
            is_new = self._seed != self._agreed and DEFAULT not in self._own
            self._agreed = self._seed
            return self._seed if is_new else None

    def _current(self) -> list[int]:
        """The state in use."""
        tag = _tag.get()
        if tag not in self._states:
            self._states[tag] = _state_from(self._states[DEFAULT], tag)
        return self._states[tag]

    def _follow(self) -> None:
        """Take the states of torch's seed, if that has changed or was set once more."""
        call, seed = now = _compat.last_seeding()
        before, known = self._seen
        if call is before and seed == known:
            return
        is_set = call is not before and _compat.seed_of(call) in (seed, None)
        self._seen = now
        if not is_set and seed == known:
            return  # seeded elsewhere, and put back
        self._seed = seed
        following = {tag: x for tag, x in self._states.items() if tag not in self._own}
        own = {tag: x for tag, x in self._states.items() if tag in self._own}
        self._left[known] = following
        new = {DEFAULT: [*words_of(seed), 0]}
        self._states = {**(new if is_set else self._left.pop(seed, new)), **own}
        while len(self._left) > SEEDS:
            self._left.pop(next(iter(self._left)))


def _state_from(state: Sequence[int], name: str) -> list[int]:
    """A new state that follows from the key of another one and a name."""
    key = torch.tensor(state[:2])
    hashed = hashlib.blake2b(name.encode(), digest_size=8).digest()
    number = torch.tensor(int.from_bytes(hashed, "little", signed=True))
    bits = int(random_bits(key, number, [], [], STATE, 0, torch.int64))
    return [bits & WORD, (bits >> 32) & WORD, 0]


def _is_state(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and (tuple(x.shape), x.dtype) == ((WORDS,), torch.int64)


def _described(x: Any) -> str:
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else repr(x)


state = States()


class Source:
    """Where the random calls of a trace, or of `plain`, get their state from."""

    def next(self, device: torch.device) -> tuple[torch.Tensor, int]:
        """(a state, the number of this call from the first one of that state)."""
        raise NotImplementedError


class Traced(Source):
    """The random calls of a function that is being captured; they are counted.

    Args:
        state: stands for the state in the trace.
    """

    def __init__(self, state: torch.Tensor) -> None:
        self.state, self.calls = state, 0

    def next(self, device: torch.device) -> tuple[torch.Tensor, int]:
        self.calls += 1
        is_there = self.state.device.type == device.type
        state = self.state if is_there else self.state.to(device)
        return state, self.calls - 1


class Eager(Source):
    """Random calls that are made one by one."""

    def next(self, device: torch.device) -> tuple[torch.Tensor, int]:
        return state.take(1).to(device), 0


class StateMissing(Exception):
    """The body of a loop or a branch draws random numbers, and has no state to draw from."""


class Missing(Source):
    """The random calls of a body that has no state: who traces it catches the error, and traces
    it again with one.
    """

    def next(self, device: torch.device) -> tuple[torch.Tensor, int]:
        raise StateMissing


_source: contextvars.ContextVar[Source | None] = contextvars.ContextVar("source", default=None)


@contextlib.contextmanager
def drawing_from(source: Source | None) -> Iterator[None]:
    """Torch's random calls inside, where they are ours to replace, draw from this source; None
    for torch's own generators.
    """
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


def is_drawing() -> bool:
    """Whether torch's random calls of this thread draw from a source of ours."""
    return _source.get() is not None


def is_eager() -> bool:
    """Whether torch's random calls of this thread are made one by one, under `plain`."""
    return isinstance(_source.get(), Eager)


def draw(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The numbers of one call: uniform in [0, 1) for a floating dtype, else all bits."""
    source = _source.get()
    assert source is not None, "no capture is at work"
    state, call = source.next(device)
    size = list(shape)
    return random_bits(state, None, size, strides_of(size), AMBIENT, call, dtype)


def _key_words(shape: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The two words of new keys that one call makes."""
    source = _source.get()
    assert source is not None, "no capture is at work"
    state, call = source.next(device)
    size = list(shape)
    bits = random_bits(state, None, size, strides_of(size), AMBIENT_KEY, call, torch.int64)
    return bits & WORD, (bits >> 32) & WORD


def call_key(device: torch.device) -> torch.Tensor:
    """A key of one call, for numbers that take several draws: int64 (2,)."""
    return torch.stack(_key_words([], device))


def new_states(shape: Sequence[int], device: str) -> torch.Tensor:
    """States of their own for the bodies of a loop or a branch, made by one call: int64
    (*shape, 3).
    """
    first, second = _key_words(shape, torch.device(device))
    return torch.stack([first, second, torch.zeros_like(first)], -1)


def after_calls(state: torch.Tensor, calls: int) -> torch.Tensor:
    """The state when it has served some calls: int64 (3,)."""
    return torch.stack([state[0], state[1], state[2] + calls])


def calls() -> int:
    """How many random calls the trace has made so far."""
    source = _source.get()
    return source.calls if isinstance(source, Traced) else 0


def state_at(before: int) -> torch.Tensor | int:
    """The state that the random calls after the first ones drew from, or 0 without such calls."""
    source = _source.get()
    if isinstance(source, Traced) and source.calls > before:
        return after_calls(source.state, before)
    return 0


def resume(state: torch.Tensor | int, is_mapped: bool) -> contextvars.Token[Source | None]:
    """Have random calls draw from a state, until `stop`.

    Raises:
        CaptureError: samples of a vmap would draw different numbers from it.
    """
    if is_mapped and isinstance(state, torch.Tensor):
        got = "in a body that vmap maps it pulls back through a function that draws random numbers"
        fix = "the pullback inside of the function that vmap maps, or sf.random with a key"
        raise CaptureError.of("vjp", got, fix=fix)
    return _source.set(Traced(state) if isinstance(state, torch.Tensor) else _source.get())


def stop(token: contextvars.Token[Source | None]) -> None:
    """Have random calls draw as they did before."""
    _source.reset(token)
