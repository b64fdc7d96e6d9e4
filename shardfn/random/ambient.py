"""`sf.random.state`: the named random states that torch's own random calls draw from inside
captured functions. Each is a key with the number of calls that it has served.

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
PLACEHOLDER_STATE = torch.zeros(
    WORDS, dtype=torch.int64
)  # stands for the state in what is captured

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
        """Start a random state again from a seed.

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
        """Return all states, as a tree that `set` takes back and a checkpoint can hold.

        Returns:
            For each tag an int64 tensor of shape (3,): the key's words, the number of calls.
        """
        with self._lock:
            self._follow()
            return {tag: torch.tensor(state) for tag, state in self._states.items()}

    def set(self, states: Mapping[str, torch.Tensor]) -> None:
        """Restore states that `get` returned; other states stay.

        Raises:
            ShardError: not such a tree, or a tag that is not known here: `seed` makes one.
        """
        invalid = [tag for tag, x in states.items() if not _is_state(x)]
        if invalid:
            fix = "pass a result of sf.random.state.get() of the same version of shardfn"
            got = f"{invalid[0]!r} is {_shape_and_dtype(states[invalid[0]])}"
            needed = f"an int64 tensor of shape ({WORDS},)"
            text = problem("random.state.set", got, needed=needed, fix=fix)
            raise ShardError(text, arg_path=f"states[{invalid[0]!r}]", fix=fix)
        with self._lock:
            self._follow()
            unknown = [tag for tag in states if tag not in self._states]
            if unknown:
                names = ", ".join(map(repr, self._states))
                fix = f"sf.random.state.seed(0, {unknown[0]!r}) before"
                got = f"no random state is named {unknown[0]!r}; the names are {names}"
                text = problem("random.state.set", got, fix=fix)
                raise ShardError(text, arg_path=f"states[{unknown[0]!r}]", fix=fix)
            self._states.update({tag: x.tolist() for tag, x in states.items()})

    @contextlib.contextmanager
    def fork(self, tag: str) -> Iterator[None]:
        """Draw from another named state inside the context; a new name is split off the current
        state.

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
        """Draw from earlier states inside the context, as a recomputation does; afterwards the
        present ones are as before.
        """
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
        """Return the name of the state in use."""
        return _tag.get()

    def take(self, calls_so_far: int) -> torch.Tensor:
        """Reserve some calls and return the state of the first: int64 (3,)."""
        with self._lock:
            self._follow()
            state = self._current()
            if state[2] + calls_so_far > MOST_CALLS:
                state[:] = _state_from(state, "")
            taken = torch.tensor(state)
            state[2] += calls_so_far
            return taken

    def uncompared_seed(self) -> int | None:
        """Return torch's seed if states follow it and ranks have not compared it yet; else None."""
        with self._lock:
            self._follow()
            is_new = self._seed != self._agreed and DEFAULT not in self._own
            self._agreed = self._seed
            return self._seed if is_new else None

    def _current(self) -> list[int]:
        """Return the state in use, split off the default one if it is new."""
        tag = _tag.get()
        if tag not in self._states:
            self._states[tag] = _state_from(self._states[DEFAULT], tag)
        return self._states[tag]

    def _follow(self) -> None:
        """Adopt torch's seed if it has changed or was set once more since the last look."""
        call, seed = now = _compat.last_seeding()
        last_call, last_seed = self._seen
        if call is last_call and seed == last_seed:
            return
        is_set = call is not last_call and _compat.seed_of(call) in (seed, None)
        self._seen = now
        if not is_set and seed == last_seed:
            return  # seeded elsewhere, and put back
        self._seed = seed
        following = {tag: x for tag, x in self._states.items() if tag not in self._own}
        independent = {tag: x for tag, x in self._states.items() if tag in self._own}
        self._left[last_seed] = following
        new = {DEFAULT: [*words_of(seed), 0]}
        self._states = {**(new if is_set else self._left.pop(seed, new)), **independent}
        while len(self._left) > SEEDS:
            self._left.pop(next(iter(self._left)))


def _state_from(state: Sequence[int], name: str) -> list[int]:
    """Derive a new state from the key of another one and a name."""
    key = torch.tensor(state[:2])
    hashed = hashlib.blake2b(name.encode(), digest_size=8).digest()
    number = torch.tensor(int.from_bytes(hashed, "little", signed=True))
    bits = int(random_bits(key, number, [], [], STATE, 0, torch.int64))
    return [bits & WORD, (bits >> 32) & WORD, 0]


def _is_state(x: Any) -> bool:
    """Return whether a value is an int64 tensor of shape (3,)."""
    return isinstance(x, torch.Tensor) and (tuple(x.shape), x.dtype) == ((WORDS,), torch.int64)


def _shape_and_dtype(x: Any) -> str:
    """Describe a value in an error: a tensor by shape and dtype."""
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else repr(x)


state = States()


class Source:
    """Where the random calls of a trace, or of `plain`, get their state from."""

    def next(self, device: torch.device) -> tuple[torch.Tensor, int]:
        """Return a state, and the number of this call counted from the first one of that state."""
        raise NotImplementedError


class Traced(Source):
    """The source of a function that is being captured: it counts the random calls.

    Args:
        state: stands for the state in the trace.
        calls: the calls that the state has served before.
    """

    def __init__(self, state: torch.Tensor, calls: int = 0) -> None:
        self.state, self.calls = state, calls

    def next(self, device: torch.device) -> tuple[torch.Tensor, int]:
        self.calls += 1
        state = _compat.unwrapped(self.state)
        is_there = state.device.type == device.type
        return state if is_there else state.to(device), self.calls - 1


class Earlier(Traced):
    """The source of what computes a value again.

    Args:
        state: the state before that value.
        before: the source of the calls around.
    """

    def __init__(self, state: torch.Tensor, before: Source | None) -> None:
        super().__init__(state)
        self.before, self.is_apart = before, _compat.samples_draw_apart()

    def next(self, device: torch.device) -> tuple[torch.Tensor, int]:
        if self.is_apart:
            raise CaptureError.of(
                "vmap",
                "a pullback or a push of a value outside of it draws the random numbers of that "
                'value, and randomness="different" asks for others',
                fix='randomness="same"',
            )
        return super().next(device)


class Eager(Source):
    """The source under `plain`: each call takes the next number of the real state."""

    def next(self, device: torch.device) -> tuple[torch.Tensor, int]:
        return state.take(1).to(device), 0


class StateMissing(Exception):
    """The body of a loop or a branch draws random numbers, and has no state to draw from."""


class NoState(Source):
    """The source of a body that has no state: the tracer catches the error, and traces the body
    again with one.
    """

    def next(self, device: torch.device) -> tuple[torch.Tensor, int]:
        raise StateMissing


_source: contextvars.ContextVar[Source | None] = contextvars.ContextVar("source", default=None)


@contextlib.contextmanager
def drawing_from(source: Source | None) -> Iterator[None]:
    """Replace torch's random calls inside the context by draws from a source; None restores
    torch's own generators.
    """
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


def draw_from_earlier(state: torch.Tensor) -> None:
    """Draw from an earlier state until `draw_as_before` is called."""
    _source.set(Earlier(state, _source.get()))


def draw_as_before() -> None:
    """Draw from the source that was in use before the last `draw_from_earlier`."""
    source = _source.get()
    assert isinstance(source, Earlier)
    _source.set(source.before)


def is_drawing() -> bool:
    """Return whether torch's random calls of this thread draw from a source of ours."""
    return _source.get() is not None


def is_eager() -> bool:
    """Return whether torch's random calls of this thread run one by one, under `plain`."""
    return isinstance(_source.get(), Eager)


def draw(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Draw the numbers of one random call: uniform in [0, 1) for a floating dtype,
    else all bits.
    """
    source = _source.get()
    assert source is not None, "torch draws from shardfn's random source only during a capture"
    state, call = source.next(device)
    size = list(shape)
    return random_bits(state, None, size, strides_of(size), AMBIENT, call, dtype)


def _draw_key_words(
    shape: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the two words of new keys in one random call."""
    source = _source.get()
    assert source is not None, "torch draws from shardfn's random source only during a capture"
    state, call = source.next(device)
    size = list(shape)
    bits = random_bits(state, None, size, strides_of(size), AMBIENT_KEY, call, torch.int64)
    return bits & WORD, (bits >> 32) & WORD


def call_key(device: torch.device) -> torch.Tensor:
    """Draw a key in one random call, for numbers that take several draws: int64 (2,)."""
    return torch.stack(_draw_key_words([], device))


def new_states(shape: Sequence[int], device: str) -> torch.Tensor:
    """Draw separate states for the bodies of a loop or a branch in one random call: int64 (*shape,
    3).
    """
    first, second = _draw_key_words(shape, torch.device(device))
    return torch.stack([first, second, torch.zeros_like(first)], -1)


def after_calls(state: torch.Tensor, calls_so_far: int) -> torch.Tensor:
    """Return a state that has served some more calls: int64 (3,)."""
    return torch.stack([state[0], state[1], state[2] + calls_so_far])


def is_counting() -> bool:
    """Return whether the random calls of this trace are counted from one state."""
    return isinstance(_source.get(), Traced)


def count_calls(calls: int) -> None:
    """Count random calls that the steps of a loop have made."""
    source = _source.get()
    assert isinstance(source, Traced), "no calls are counted"
    source.calls += calls


def states_of_steps(length: int) -> torch.Tensor:
    """Return a row for each step of a loop: the state before the loop, and the number of the
    step: int64 (length, 4).
    """
    source = _source.get()
    assert isinstance(source, Traced), "no calls are counted"
    before = after_calls(source.state, source.calls)
    numbers = torch.arange(length, device=before.device)
    return torch.cat([before.expand(length, WORDS), numbers.unsqueeze(1)], 1)


def state_of_step(row: torch.Tensor, calls: int) -> torch.Tensor:
    """Return the state of a step, of a row of `states_of_steps` and the calls of one step."""
    return torch.stack([row[0], row[1], row[2] + row[3] * calls])


def calls_so_far() -> int:
    """Return how many random calls the trace has made."""
    source = _source.get()
    return source.calls if isinstance(source, Traced) else 0


def state_after(before: int) -> torch.Tensor | int:
    """Return the state after the first `before` calls of the trace, or 0 if no call
    followed them.
    """
    source = _source.get()
    if isinstance(source, Traced) and source.calls > before:
        return after_calls(source.state, before)
    return 0


def draw_from_state(state: torch.Tensor | int, is_mapped: bool) -> contextvars.Token[Source | None]:
    """Make random calls draw from a state, until `restore_source`.

    Raises:
        CaptureError: samples of a vmap would draw different numbers from it.
    """
    if is_mapped and isinstance(state, torch.Tensor):
        got = (
            "in a loop or branch under vmap, the pullback belongs to a function that draws random "
            "numbers"
        )
        fix = "call the pullback inside the function that vmap maps; or use sf.random with a key"
        raise CaptureError.of("vjp", got, fix=fix)
    return _source.set(Traced(state) if isinstance(state, torch.Tensor) else _source.get())


def restore_source(token: contextvars.Token[Source | None]) -> None:
    """Make random calls draw from the previous source."""
    _source.reset(token)
