"""`Clock`: simulates the timeline of a rank's program, and those of all stages of a pipeline."""

from __future__ import annotations

import collections
from collections.abc import Callable, Generator, Mapping, Sequence

import attrs
import torch

from ...collectives import SEND
from ...hardware import Hardware, Link, physical_links
from ...ops.loops import Branch, Loop, Scan, loop_of
from ...ops.messages import Message, Receive, Send
from ...ops.nodes import origin_of
from ...ops.pipeline import Pipeline, Run
from ...partition.planner import op_cost
from ...source_text import NOWHERE, Origin
from ...types import Collective, MeshAxes
from .events import BUBBLE, COMPUTE, EXPOSED, Event, GraphRun, InnerRuns, axis_track
from .links import Links, Sending

# the seconds of each op of a graph
Prices = Callable[[torch.fx.Graph, Hardware], Mapping[torch.fx.Node, float]]


@attrs.frozen
class Timeline:
    """The seconds of compute, communication and exposed communication of one rank's step. Compute
    has one queue, and each mesh axis one queue of collectives.
    """

    compute: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0  # exposed communication

    @property
    def total(self) -> float:
        """Return the time of the step."""
        return self.compute + self.exposed

    @property
    def hidden(self) -> float:
        """Return the share of communication that overlaps with compute."""
        return 1.0 if self.communication == 0 else max(0.0, 1 - self.exposed / self.communication)


class Clock:
    """A model of time: the seconds of each op and collective of a program.

    Args:
        hardware: the model.
        axes: of the mesh.
        links: of axes, in place of the hardware's. Such a link is used by nothing else.
        stage_axis: of a pipeline. Its messages and collectives share no link with others.
        prices: the seconds of the ops of a graph. None: each op runs as one kernel.
    """

    def __init__(
        self,
        hardware: Hardware,
        axes: MeshAxes,
        links: Mapping[str, Link],
        stage_axis: str | None = None,
        prices: Prices | None = None,
    ) -> None:
        self.prices = prices
        self.hardware = hardware
        self.sizes = dict(zip(axes.names, axes.sizes, strict=True))
        self.links = {**hardware.links(axes), **links}
        self.stage_axis = stage_axis
        alone = {axis: axis_track(axis) for axis in (*links, stage_axis) if axis is not None}
        self.physical = {**physical_links(hardware, axes), **alone}
        self.runs: dict[torch.fx.Graph, GraphRun] = {}  # of graphs that start while nothing is sent
        self.seconds: dict[torch.fx.Node, float] = {}

    def send(self, node: torch.fx.Node) -> float:
        """Return the seconds of a collective on a link that nothing else uses."""
        record: Collective = node.meta["collective"]
        link, n = self.links[record.axis], self.sizes[record.axis]
        is_in_8_bits = self.hardware.float8 and op_cost.is_gathered_in_8_bits(node)
        return link.send(record.kind, record.nbytes / 2 if is_in_8_bits else record.nbytes, n)

    def message(self, send: Send) -> float:
        """Return the seconds of a message."""
        return self.links[send.axis].send(SEND, send.message.aval.nbytes, self.sizes[send.axis])

    def op(self, node: torch.fx.Node) -> float:
        """Return the seconds of an op."""
        if node not in self.seconds:
            if self.prices is None:
                self.seconds[node] = op_cost.seconds(node, self.hardware)
            else:
                self.seconds |= self.prices(node.graph, self.hardware)
        return self.seconds[node]

    def timeline(self, graph: torch.fx.Graph) -> Timeline:
        """Simulate a graph on one rank that never waits for other stages."""
        run = self.run(graph)
        busy = run.busy
        return Timeline(busy.get(COMPUTE, 0.0), run.communication, busy.get(EXPOSED, 0.0))

    def run(self, graph: torch.fx.Graph) -> GraphRun:
        """Simulate a graph on one rank that never waits for other stages, from a moment at which
        nothing is sent.
        """
        if graph not in self.runs:
            rank = Rank(self)
            for _ in rank.play(graph, None):
                raise AssertionError("a single rank waits for no other rank")
            self.runs[graph] = rank.finish()
        return self.runs[graph]

    def run_together(self, graphs: Sequence[torch.fx.Graph]) -> list[GraphRun]:
        """Simulate the graphs of all coordinates of a pipeline's axis. The step ends on all of them
        when the last is done.
        """
        mail = Mail(len(graphs))
        ranks = [Rank(self, k) for k in range(len(graphs))]
        waiting = {k: rank.play(graphs[k], mail) for k, rank in enumerate(ranks)}
        while waiting:
            before = mail.progress
            for k, playing in list(waiting.items()):
                if next(playing, "done") == "done":
                    del waiting[k]
                    mail.progress += 1
            assert mail.progress != before, "the pipeline ranks wait for each other for ever"
        last = max(rank.now for rank in ranks)
        for rank in ranks:
            rank.wait_for_stages(last, "the last coordinate", NOWHERE)
        return [rank.finish() for rank in ranks]


class Mail:
    """What coordinates of a pipeline's axis have sent to each other.

    Args:
        n: the number of coordinates.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.progress = 0  # counts what has happened
        self.arrivals: dict[tuple[int, int], float] = {}  # by pipeline and message
        self.events: dict[tuple[int, int], tuple[Record, int]] = {}  # of messages, and where
        # of each collective over the axis, by its number: when each coordinate is ready for it
        self.ready: dict[int, dict[int, float]] = collections.defaultdict(dict)

    def send(self, pipeline: int, message: Message, arrival: float, record: Record) -> None:
        """Note when a message arrives, whose event is the last of a record."""
        self.arrivals[pipeline, message.number] = arrival
        self.events[pipeline, message.number] = record, len(record.events) - 1
        self.progress += 1

    def receive(self, pipeline: int, message: Message, now: float) -> None:
        """Note when a message is read."""
        record, i = self.events[pipeline, message.number]
        record.events[i] = attrs.evolve(record.events[i], read=now)

    def meet(self, number: int, coordinate: int, now: float) -> None:
        """Note that a coordinate is ready for a collective over the axis."""
        self.ready[number][coordinate] = now
        self.progress += 1

    def start_of(self, number: int) -> float | None:
        """Return when a collective over the axis starts; None while a coordinate is not ready."""
        ready = self.ready[number]
        return max(ready.values()) if len(ready) == self.n else None


class Record:
    """The events of one run of a graph, while it is simulated.

    Args:
        start: when the run starts.
    """

    def __init__(self, start: float) -> None:
        self.start = start
        self.events: list[Event] = []
        self.inner: list[InnerRuns] = []
        self.starts: dict[str, float] = {}

    def finish(self, now: float) -> GraphRun:
        """Return the run, which ends now."""
        return GraphRun(now - self.start, tuple(self.events), tuple(self.inner), self.starts)


class Rank:
    """One rank in a simulation: compute runs in order, and the collectives of each axis run in
    order beside it.

    Args:
        clock: the model of time.
        coordinate: on the axis of a pipeline.
    """

    def __init__(self, clock: Clock, coordinate: int = 0) -> None:
        self.clock = clock
        self.coordinate = coordinate
        self.now = 0.0
        self.links = Links(clock.physical)
        self.free = 0.0  # when the last message or collective over the stages' axis ends
        self.meetings = self.pipelines = 0
        self.record = Record(0.0)

    def finish(self) -> GraphRun:
        """Return what the rank did."""
        return self.record.finish(self.now)

    def play(self, graph: torch.fx.Graph, mail: Mail | None) -> Generator[None]:
        """Simulate a graph from now on. Yield while the rank waits for other coordinates; without
        mail it waits for none.
        """
        sent: dict[torch.fx.Node, tuple[Collective, Sending]] = {}
        for node in graph.nodes:
            self.record.starts[node.name] = self.now - self.record.start
            record = node.meta.get("collective")
            if record is not None and mail is not None and record.axis == self.clock.stage_axis:
                sent[node] = record, (yield from self._meet(node, mail))
            elif record is not None:
                sent[node] = record, self._start(node)
            elif node.target is op_cost.WAIT:
                if node.args[0] in sent:
                    self._wait(*sent.pop(node.args[0]))
            elif isinstance(node.target, Pipeline):
                yield from self._pipeline(node.target, mail)
            elif isinstance(node.target, Loop):
                self._loop(node)
            elif node.op == "call_function":
                self._compute(node)
        for record, sending in sent.values():
            self._wait(record, sending)

    def _compute(self, node: torch.fx.Node) -> None:
        """Run an op."""
        seconds = self.clock.op(node)
        if seconds:
            name = getattr(node.target, "_opname", node.name)
            self._add(Event(name, COMPUTE, self.now, seconds, **origin_of(node)))
            self.now += seconds

    def _start(self, node: torch.fx.Node) -> Sending:
        """Start a collective."""
        axis = node.meta["collective"].axis
        latency = self.clock.links[axis].latency
        sending = Sending(latency, self.clock.send(node) - latency)
        self.links.start(axis, sending, self.now)
        return sending

    def _meet(self, node: torch.fx.Node, mail: Mail) -> Generator[None, None, Sending]:
        """Start a collective over the stages' axis when all coordinates are ready for it."""
        number = self.meetings
        self.meetings += 1
        mail.meet(number, self.coordinate, max(self.now, self.free))
        while (start := mail.start_of(number)) is None:
            yield
        self.free = start + self.clock.send(node)
        return Sending(0.0, 0.0, start, self.free)

    def _wait(self, record: Collective, sending: Sending) -> None:
        """Wait for a collective: first for coordinates that are not ready, then for its bytes."""
        is_own = sending.end is not None and record.axis == self.clock.stage_axis
        if is_own and sending.start is not None:
            self.wait_for_stages(sending.start, record.kind, record.origin)
        end = self.links.finish(record.axis, sending, self.now)
        assert sending.start is not None
        event = _sent(record, sending.start, end - sending.start)
        self._add(attrs.evolve(event, read=max(self.now, end)))
        self._expose(end, event)

    def _expose(self, end: float, event: Event) -> None:
        """Wait for the end of a collective or message."""
        seconds = end - self.now
        if seconds > 0:
            self._add(attrs.evolve(event, track=EXPOSED, start=self.now, seconds=seconds))
            self.now = end

    def wait_for_stages(self, until: float, why: str, origin: Origin) -> None:
        """Wait for other coordinates of a pipeline."""
        seconds = until - self.now
        if seconds > 0:
            axis = self.clock.stage_axis
            event = Event(f"wait for {why}", BUBBLE, self.now, seconds, axis=axis, **origin)
            self._add(event)
            self.now = until

    def _loop(self, node: torch.fx.Node) -> None:
        """Run all turns of a loop, or the longer body of a branch. A while loop counts as one
        turn.
        """
        loop = loop_of(node)
        graphs = list(loop.graphs)
        if isinstance(loop, Branch):
            graphs = [max(graphs, key=lambda graph: self.clock.run(graph).seconds)]
        turns = loop.length if isinstance(loop, Scan) else 1
        for graph in graphs:
            self._bodies(repr(loop), graph, turns, None, origin_of(node))

    def _bodies(
        self, name: str, graph: torch.fx.Graph, count: int, action: str | None, origin: Origin
    ) -> None:
        """Run a body so many times. Once nothing is sent from outside of it, its runs are equal."""
        while count and not self.links.is_idle(self.now):
            self._inner(InnerRuns(name, self.now, self._beside(graph), 1, action, **origin))
            count -= 1
        if count:
            run = self.clock.run(graph)
            self._inner(InnerRuns(name, self.now, run, count, action, **origin))
            self.now += count * run.seconds

    def _beside(self, graph: torch.fx.Graph) -> GraphRun:
        """Run a body while collectives from outside of it are under way."""
        outer, self.record = self.record, Record(self.now)
        for _ in self.play(graph, None):
            raise AssertionError("a loop body must not wait for another pipeline stage")
        run, self.record = self.finish(), outer
        return run

    def _pipeline(self, pipeline: Pipeline, mail: Mail | None) -> Generator[None]:
        """Run the instructions of a coordinate. Its messages follow each other, beside all
        computation; it ends when they have arrived.
        """
        number = self.pipelines
        self.pipelines += 1
        last: Send | None = None
        for x in pipeline.instructions:
            if isinstance(x, Receive) and mail is not None:
                key = number, x.message.number
                while key not in mail.arrivals:
                    yield
                name = f"{x.message.about} of coordinate {x.message.source}"
                self.wait_for_stages(mail.arrivals[key], name, x.message.origin)
                mail.receive(number, x.message, self.now)
            elif isinstance(x, Send):
                self._send(x)
                last = x
                if mail is not None:
                    mail.send(number, x.message, self.free, self.record)
            elif isinstance(x, Run):
                self._bodies(str(x), pipeline.graphs[x.graph], 1, str(x), NOWHERE)
        if last is not None:
            self._expose(self.free, _message(last, 0.0, 0.0))

    def _send(self, x: Send) -> None:
        """Start a message."""
        start, seconds = max(self.now, self.free), self.clock.message(x)
        self.free = start + seconds
        self._add(_message(x, start, seconds))

    def _add(self, event: Event) -> None:
        self.record.events.append(event.later(-self.record.start, None))

    def _inner(self, bodies: InnerRuns) -> None:
        self.record.inner.append(attrs.evolve(bodies, start=bodies.start - self.record.start))


def _sent(record: Collective, start: float, seconds: float) -> Event:
    """Return the event of a collective."""
    return Event(
        record.kind,
        axis_track(record.axis),
        start,
        seconds,
        axis=record.axis,
        nbytes=record.nbytes,
        bucket=record.bucket,
        **record.origin,
    )


def _message(x: Send, start: float, seconds: float) -> Event:
    """Return the event of a message."""
    message = x.message
    return Event(
        SEND,
        axis_track(x.axis),
        start,
        seconds,
        axis=x.axis,
        nbytes=message.aval.nbytes,
        action=message.action,
        target=message.target,
        **message.origin,
    )
