"use strict";
// Draws the timeline on a canvas: a lane for each rank, in it a row for computation and waits, and
// one for each mesh axis. An event is [track, start, length, name, line, module, action, bytes,
// bucket + 1, repeats - 1, count - 1], in nanoseconds; zeros at the end are left out.

const ROW = 26, GAP = 10, LEFT = 92, TOP = 24;
const WAITS = { exposed: "waits for", bubble: "" };

function timelineRows(t) {
  const rows = [];
  t.lanes.forEach((lane, k) => {
    const tracks = new Map([["compute", []]]);
    for (const event of lane.events) {
      const track = t.tracks[event[0]];
      const row = track === "exposed" || track === "bubble" ? "compute" : track;
      if (!tracks.has(row)) tracks.set(row, []);
      tracks.get(row).push(event);
    }
    let isFirst = true;
    const order = ["compute", ...contents.axes.map(([name]) => `axis ${name}`)];
    for (const [track, events] of [...tracks].sort(([a], [b]) => order.indexOf(a) - order.indexOf(b))) {
      events.sort((a, b) => a[1] - b[1]);
      rows.push({ lane: k, track, events, title: lane.title, isFirst, label: track.replace("axis ", "over ") });
      isFirst = false;
    }
  });
  let y = TOP;
  for (const row of rows) { if (row.isFirst && y > TOP) y += GAP; row.y = y; y += ROW; }
  return { rows, high: y + 8 };
}

function describeEvent(t, event) {
  const [track, start, length, name, source, module, action, n, bucket, repeats, count] = event;
  const kind = t.tracks[track];
  const first = kind === "exposed" ? `waits for ${text(name)}` : text(name);
  const many = count ? `${first} and ${plural(count, "more short event")}` : first;
  const axis = kind.startsWith("axis ") ? ` over ${kind.slice(5)}` : "";
  const parts = [`${many}${axis}: ${seconds(length / 1e9)} at ${seconds(start / 1e9)}`];
  if (n) parts.push(bytes(n));
  if (bucket) parts.push(`bucket ${bucket - 1}`);
  if (repeats) parts.push(`all ${repeats + 1} runs of a loop's body`);
  if (action) parts.push(text(action));
  if (module) parts.push(text(module));
  if (source) parts.push(baseName(text(source)));
  return parts.join(", ");
}

function drawTimeline() {
  const t = contents.timeline, body = byId("timeline-body");
  const { rows, high } = timelineRows(t);
  const canvas = element("canvas", { class: "chart", tabindex: "0", role: "img", style: `height:${high}px`,
    "aria-label": `Timeline of a step of ${seconds(t.total / 1e9)}. Arrow keys choose an event, plus and minus zoom, 0 shows the whole step.` });
  const readout = element("p", { class: "readout", "aria-live": "polite" },
    "Point at an event, or focus the timeline and use the arrow keys; + and - zoom, 0 shows the whole step.");
  const view = { from: 0, to: t.total || 1, chosen: null };
  const button = (label, act) => {
    const made = element("button", { type: "button" }, label);
    made.addEventListener("click", act);
    return made;
  };
  const axes = contents.axes.map(([name]) => name);
  const fills = { compute: "--c0", exposed: "--wait", bubble: "--c7" };
  const fillOf = (track) => fills[track] ?? `--c${(axes.indexOf(track.replace("axis ", "")) + 1) % COLOURS}`;
  const inner = () => canvas.clientWidth - LEFT - 8;
  const x = (time) => LEFT + ((time - view.from) / (view.to - view.from)) * inner();

  function paint() {
    const scale = devicePixelRatio || 1, wide = canvas.clientWidth;
    canvas.width = wide * scale;
    canvas.height = high * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const colours = Object.fromEntries(t.tracks.map((track) => [track, style(fillOf(track))]));
    const ink = style("--ink"), soft = style("--soft"), line = style("--line"), card = style("--card");
    ticks(pen, wide, soft, line);
    for (const row of rows) {
      if (row.isFirst && row.y > TOP) { pen.fillStyle = line; pen.fillRect(0, row.y - GAP / 2, wide, 1); }
      pen.save();
      pen.beginPath();
      pen.rect(LEFT, row.y, inner(), ROW);
      pen.clip();
      for (const event of row.events) {
        const left = x(event[1]), width = Math.max(x(event[1] + event[2]) - left, 0.6);
        if (left + width < LEFT || left > wide) continue;
        pen.fillStyle = colours[t.tracks[event[0]]];
        pen.fillRect(left, row.y + 2, width > 3 ? width - 0.6 : width, ROW - 4);
        if (width > 60) {
          pen.fillStyle = style("--on");
          const from = Math.max(left, LEFT);
          const label = t.tracks[event[0]] === "exposed" ? "waits" : text(event[6] || event[3]);
          if (pen.measureText(label).width < left + width - from - 8) pen.fillText(label, from + 4, row.y + ROW / 2);
        }
        if (event === view.chosen) { pen.strokeStyle = ink; pen.lineWidth = 2; pen.strokeRect(left, row.y + 2, width, ROW - 4); }
      }
      pen.restore();
      pen.fillStyle = card;
      pen.fillRect(0, row.y, LEFT - 1, ROW);
      pen.fillStyle = soft;
      pen.fillText(row.isFirst && row.title ? row.title : row.label.slice(0, 13), 8, row.y + ROW / 2);
    }
  }

  function ticks(pen, wide, soft, line) {
    const span = view.to - view.from, rough = span / Math.max(2, inner() / 130), unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((k) => k * unit).find((k) => k >= rough);
    for (let at = Math.ceil(view.from / step) * step; at <= view.to; at += step) {
      pen.fillStyle = line;
      pen.fillRect(x(at), TOP - 6, 1, high);
      pen.fillStyle = soft;
      if (x(at) < wide - 60) pen.fillText(seconds(at / 1e9).replace(/\.0+ /, " "), x(at) + 3, 10);
    }
  }

  function show(from, to) {
    const span = Math.min(Math.max(to - from, t.total / 1e5, 10), t.total || 1);
    view.from = Math.min(Math.max(0, from), t.total - span);
    view.to = view.from + span;
    paint();
  }

  function zoom(factor, centre = (view.from + view.to) / 2) {
    show(centre - (centre - view.from) * factor, centre + (view.to - centre) * factor);
  }

  function choose(event) {
    view.chosen = event;
    readout.textContent = describeEvent(t, event);
    const middle = event[1] + event[2] / 2, span = view.to - view.from;
    if (middle < view.from || middle > view.to) show(middle - span / 2, middle + span / 2); else paint();
  }

  function at(pointer) {
    const box = canvas.getBoundingClientRect();
    const row = rows.find((each) => pointer.clientY - box.top >= each.y && pointer.clientY - box.top < each.y + ROW);
    const time = view.from + ((pointer.clientX - box.left - LEFT) / inner()) * (view.to - view.from);
    return { row, time };
  }

  let drag = null;
  canvas.addEventListener("pointerdown", (pointer) => { drag = { x: pointer.clientX, from: view.from, to: view.to }; });
  addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("pointermove", (pointer) => {
    if (drag && view.to - view.from < t.total) {
      const moved = ((drag.x - pointer.clientX) / inner()) * (drag.to - drag.from);
      show(drag.from + moved, drag.to + moved);
      return;
    }
    const { row, time } = at(pointer);
    const slack = (1.5 / inner()) * (view.to - view.from);
    const event = row?.events.find((each) => time >= each[1] - slack && time <= each[1] + each[2] + slack);
    if (event && event !== view.chosen) choose(event);
  });
  canvas.addEventListener("wheel", (wheel) => {
    if (!wheel.ctrlKey && !wheel.metaKey) return;
    wheel.preventDefault();
    zoom(wheel.deltaY > 0 ? 1.25 : 0.8, at(wheel).time);
  }, { passive: false });
  canvas.addEventListener("dblclick", (pointer) => zoom(0.4, at(pointer).time));

  function neighbour(step) {
    const row = rows.find((each) => each.events.includes(view.chosen)) ?? rows[0];
    const k = row.events.indexOf(view.chosen) + step;
    return row.events[Math.max(0, Math.min(row.events.length - 1, k))];
  }

  function otherRow(step) {
    const k = rows.findIndex((each) => each.events.includes(view.chosen)) + step;
    const row = rows[Math.max(0, Math.min(rows.length - 1, k))];
    const time = view.chosen ? view.chosen[1] : 0;
    return row.events.find((each) => each[1] + each[2] >= time) ?? row.events[row.events.length - 1];
  }

  const acts = {
    ArrowRight: () => choose(neighbour(1)), ArrowLeft: () => choose(neighbour(-1)),
    ArrowDown: () => choose(otherRow(1)), ArrowUp: () => choose(otherRow(-1)),
    "+": () => zoom(0.5, centre()), "=": () => zoom(0.5, centre()), "-": () => zoom(2, centre()), 0: () => show(0, t.total),
  };
  const centre = () => (view.chosen ? view.chosen[1] + view.chosen[2] / 2 : (view.from + view.to) / 2);
  canvas.addEventListener("keydown", (key) => {
    if (!acts[key.key] || key.ctrlKey || key.metaKey || !rows.some((row) => row.events.length)) return;
    key.preventDefault();
    acts[key.key]();
  });

  const names = t.tracks.filter((track) => track !== "compute" && track !== "exposed" && track !== "bubble");
  const used = [["var(--c0)", "computes"]];
  if (t.tracks.includes("exposed")) used.push(["var(--wait)", "waits for a collective"]);
  if (t.tracks.includes("bubble")) used.push(["var(--c7)", "waits for another stage (bubble)"]);
  used.push(...names.map((track) => [`var(${fillOf(track)})`, `sends ${track.replace("axis ", "over ")}`]));
  body.append(
    element("div", { class: "tools" }, button("Zoom in", () => zoom(0.5, centre())), button("Zoom out", () => zoom(2, centre())),
      button("Earlier", () => show(view.from - (view.to - view.from) / 2, view.to - (view.to - view.from) / 2)),
      button("Later", () => show(view.from + (view.to - view.from) / 2, view.to + (view.to - view.from) / 2)),
      button("Whole step", () => show(0, t.total))),
    canvas, keys(used), readout, ...notesOfTimeline(t),
    element("h3", {}, "The longest"), ...table("Ops and collectives of a step that take longest, by line",
      [["Op", "wide"], ["Time", "n"], ["Count", "n"], ["Module and line", "where"]],
      t.ops.map((op) => [
        swatched(`var(${op.axis ? fillOf("axis " + text(op.axis)) : "--c0"})`, code(text(op.name) + (op.axis ? ` over ${text(op.axis)}` : ""))),
        timed(op.seconds), counted(op.count), place(op.source, op.module)]), { filter: "Find an op" }));
  new ResizeObserver(paint).observe(canvas);
  document.addEventListener("themed", paint);
}

function notesOfTimeline(t) {
  const drawnEvents = t.lanes.reduce((n, lane) => n + lane.events.length, 0);
  const notes = [];
  if (t.lanes.length === 1) notes.push(`One rank is drawn: all ${plural(t.lanes[0].ranks, "rank")} do the same at the same time.`);
  else notes.push(`A rank of each coordinate is drawn; ${plural(t.lanes[0].ranks, "rank")} of a coordinate do the same at the same time.`);
  if (t.left_out_lanes) notes.push(`${plural(t.left_out_lanes, "coordinate")} left out.`);
  if (drawnEvents < t.events) notes.push(`The step is too large to draw: short events that follow each other are drawn as one (${t.events.toLocaleString("en")} events as ${drawnEvents.toLocaleString("en")}).`);
  return [element("p", { class: "note" }, notes.join(" "))];
}
