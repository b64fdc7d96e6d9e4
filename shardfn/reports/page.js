// Draws the contents of the report. Rows refer to texts by their number in `strings`.

const contents = JSON.parse(document.getElementById("contents").textContent);
const text = (number) => contents.strings[number];
const byId = (id) => document.getElementById(id);
const COLOURS = 8;
const ROWS = innerWidth < 560 ? 6 : 12; // of a table, before a button shows all

// Elements and texts

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== null));
  return node;
}

function drawn(name, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function bytes(n) {
  let k = 0;
  const units = ["B", "KiB", "MiB", "GiB"];
  while (n >= 1023.95 && k < 3) { n /= 1024; k += 1; }
  return (k ? n.toFixed(1) : String(Math.round(n))) + " " + units[k];
}

function seconds(x) {
  if (x >= 0.9999995) return x.toFixed(3) + " s";
  if (x >= 0.9995e-3) return (1e3 * x).toFixed(3) + " ms";
  if (x >= 0.9995e-6) return Number((1e6 * x).toPrecision(3)) + " us";
  return x ? Number((1e9 * x).toPrecision(3)) + " ns" : "0 us";
}

const share = (part, whole) => (whole ? Math.round((100 * part) / whole) : 0) + "%";
const plural = (n, noun) => n.toLocaleString("en") + " " + noun + (n === 1 ? "" : "s");
const PLACE = contents.collectives.some((row) => row.module) || contents.memory.alive.some((row) => row.module) ? "Module and line" : "Line";
const baseName = (line) => line.slice(line.lastIndexOf("/") + 1);
const colour = (k) => `var(--c${k % COLOURS})`;
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const code = (name) => element("code", {}, name);
const swatched = (fill, name) => element("span", { class: "swatched" }, element("i", { class: "swatch", style: `background:${fill}` }), name);

function place(source, module) {
  const cell = element("span");
  if (module) cell.append(code(text(module)), element("br"));
  if (source) cell.append(element("span", { title: text(source) }, baseName(text(source))));
  if (contents.lines[source]) cell.append(element("br"), element("small", { class: "line" }, code(contents.lines[source])));
  if (!module && !source) cell.append("no line");
  return cell;
}

// Tables

function table(caption, columns, rows, options = {}) {
  const body = element("tbody");
  const heads = columns.map(([name, kind], k) => element("th", { scope: "col", class: kind },
    kind === "n" && rows.length > 1 ? sorter(name, () => sort(k)) : name));
  const made = element("table", {}, element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...heads)), body);
  const region = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, made);
  const more = element("button", { type: "button" });
  const count = element("p", { class: "note" });
  let cells = rows.map((row, k) => ({ row, detail: options.details?.[k] }));
  const words = ({ row, detail }) => [...row, detail ?? ""].map((cell) => cell.textContent ?? cell).join(" ").toLowerCase();
  let lines = cells.map(words);
  let wanted = "", isAll = false;
  const sort = (k) => {
    const sign = heads[k].getAttribute("aria-sort") === "descending" ? -1 : 1;
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[k].setAttribute("aria-sort", sign > 0 ? "descending" : "ascending");
    cells = [...cells].sort((a, b) => sign * (b.row[k].dataset.value - a.row[k].dataset.value));
    lines = cells.map(words);
    fill();
  };
  const fill = () => {
    const fitting = cells.filter((_, k) => lines[k].includes(wanted));
    const shown = isAll ? fitting : fitting.slice(0, ROWS);
    body.replaceChildren(...shown.flatMap(({ row, detail }) => [
      element("tr", {}, ...row.map((cell, k) => element("td", { class: columns[k][1], "data-label": columns[k][0] }, cell ?? ""))),
      ...(detail ? [element("tr", { class: "detail" }, element("td", { colspan: columns.length }, detail))] : [])]));
    more.hidden = shown.length === fitting.length;
    more.textContent = `Show all ${plural(fitting.length, "row")}`;
    count.textContent = wanted ? `${plural(fitting.length, "row")} with "${wanted}"` : "";
    count.hidden = !wanted;
  };
  more.addEventListener("click", () => { isAll = true; fill(); });
  fill();
  const parts = [region, more, count];
  if (options.filter && rows.length > 5) {
    parts.unshift(search(options.filter, (value) => { wanted = value; fill(); }));
  }
  return parts;
}

function sorter(name, onSort) {
  const made = element("button", { type: "button", class: "sort", title: `Sort by ${name.toLowerCase()}` }, name);
  made.addEventListener("click", onSort);
  return made;
}

// A figure in a cell, with the value by which a column is sorted.
const figure = (value, shown) => element("span", { "data-value": value }, shown);
const counted = (n) => figure(n, n.toLocaleString("en"));
const sized = (n) => figure(n, bytes(n));
const timed = (x) => figure(x, seconds(x));

function search(label, onSearch) {
  const input = element("input", { type: "search", autocomplete: "off" });
  const labelled = element("label", {}, label + " ", input);
  input.addEventListener("input", () => onSearch(input.value.trim().toLowerCase()));
  return element("div", { class: "tools" }, labelled);
}

function keys(items) {
  return element("ul", { class: "keys" }, ...items.map(([fill, name]) =>
    element("li", {}, element("i", { style: `background:${fill}` }), name)));
}

// The step

function drawStep() {
  const s = contents.summary;
  byId("name").textContent = contents.name;
  const ranks = contents.axes.reduce((n, [, size]) => n * size, 1);
  const rank = contents.axes.map(([name], k) => `${name}=${contents.rank[k]}`).join(", ");
  const whose = contents.timeline.lanes.length > 1 ? `the rank at ${rank}` : "one rank";
  byId("where").textContent = `Mesh ${contents.mesh}, ${plural(ranks, "rank")}, on ${contents.hardware}. Figures are those of ${whose}.`;
  const lines = byId("sentences");
  if (s.fits === false) lines.classList.add("bad");
  lines.append(...s.sentences.map((sentence) => element("p", {}, sentence)));
  const tile = (name, value, note) => element("div", {}, element("dt", {}, name),
    element("dd", {}, value, element("small", {}, note)));
  const spare = s.fits ? `, ${bytes(s.capacity - s.peak)} to spare` : "";
  const room = s.capacity ? `${share(s.peak, s.capacity)} of ${bytes(s.capacity)}${spare}` : "the device's is not known";
  byId("tiles").append(
    tile("Time of a step", seconds(s.total), `on ${contents.hardware}`),
    tile("Peak of memory", bytes(s.peak), room),
    tile("MFU", s.mfu === null ? "not known" : (100 * s.mfu).toFixed(1) + "%", "of the device's peak arithmetic"),
    tile("Payload of collectives", bytes(s.nbytes), `${plural(s.collectives, "collective")} of a rank`),
    tile("Bound by", s.bound[0] || "nothing", s.bound[0] ? share(s.bound[1], s.total) + " of the step" : ""));
  const parts = s.parts.map(([name, took]) => [partColour(name), `${name}: ${seconds(took)}, ${share(took, s.total)}`, took]);
  byId("parts").append(
    element("div", { class: "bar", role: "img", "aria-label": parts.map((part) => part[1]).join("; ") },
      ...parts.map(([fill, title, took]) => element("span", { style: `background:${fill};flex:${took / s.total}`, title }))),
    keys(parts), element("p", { class: "note" }, contents.assumed));
  if (contents.endless) byId("parts").append(element("p", { class: "note" },
    `${plural(contents.endless, "while loop")} counted as one turn each: how many turns they take depends on values.`));
}

function partColour(name) {
  const own = { arithmetic: "var(--c0)", "memory traffic": "var(--traffic)", "the bubble": "var(--c7)" };
  return own[name] ?? colour(contents.axes.findIndex(([axis]) => name.endsWith(` ${axis}`)) + 1);
}

// Memory

function drawMemory() {
  const m = contents.memory;
  const used = m.kinds.map((name, k) => [name, k]).filter(([, k]) => m.moments.some((row) => row[2 + k]));
  const chart = byId("memory-chart");
  chart.append(element("p", {}, peakOf(m)));
  if (m.moments.length) {
    const frame = element("div"), wide = () => Math.max(320, chart.clientWidth);
    let last = 0;
    const draw = () => {
      if (wide() === last) return;
      last = wide();
      frame.replaceChildren(...memoryChart(m, used, last));
    };
    chart.append(frame);
    new ResizeObserver(draw).observe(chart);
    draw();
  }
  const rows = m.alive.map((row) => [
    swatched(colour(row.kind), m.kinds[row.kind]), code(text(row.name)), code(`${text(row.dtype)}[${row.shape.join(", ")}]`),
    counted(row.count), sized(row.nbytes), figure(row.nbytes, share(row.nbytes, m.peak)), place(row.source, row.module)]);
  byId("alive").append(...table("Tensors at the peak, of a rank: shapes are local",
    [["Kind", ""], ["Tensor", "wide"], ["Local shape", "where"], ["Count", "n"], ["Bytes", "n"], ["Share", "n"], [PLACE, "where"]],
    rows, { filter: "Find a tensor" }));
  if (m.left_out_rows) byId("alive").append(element("p", { class: "note" },
    `${plural(m.left_out_rows, "smaller row")} left out, ${bytes(m.left_out)} in all.`));
}

function memoryChart(m, used, wide) {
  const high = 240, left = 70, top = 14, bottom = 22;
  const inner = wide - left - 8, tall = high - top - bottom, n = m.moments.length;
  const total = (row) => row.slice(2).reduce((a, b) => a + b, 0);
  const peak = Math.max(m.peak, ...m.moments.map(total)) || 1, capacity = contents.summary.capacity;
  const isNear = capacity && capacity < 4 * peak;
  const most = isNear ? Math.max(peak, capacity) : peak;
  const x = (k) => left + (inner * k) / n, y = (size) => top + tall * (1 - size / most);
  const svg = drawn("svg", { viewBox: `0 0 ${wide} ${high}`, class: "chart", tabindex: "0", role: "img",
    "aria-label": `Memory over ${m.ops} ops; the peak is ${bytes(m.peak)}. Arrow keys move along the step.` });
  for (const part of [0, 0.5, 1]) {
    svg.append(drawn("line", { x1: left, x2: wide - 8, y1: y(part * most), y2: y(part * most), stroke: "var(--line)" }));
    const label = drawn("text", { x: left - 8, y: y(part * most) + 4, "text-anchor": "end" });
    label.textContent = bytes(part * most);
    svg.append(label);
  }
  const below = m.moments.map(() => 0);
  for (const [, kind] of used) {
    const above = m.moments.map((row, k) => below[k] + row[2 + kind]);
    const up = above.map((size, k) => `L${x(k).toFixed(1)},${y(size).toFixed(1)}L${x(k + 1).toFixed(1)},${y(size).toFixed(1)}`);
    const down = below.map((size, k) => `L${x(k + 1).toFixed(1)},${y(size).toFixed(1)}L${x(k).toFixed(1)},${y(size).toFixed(1)}`).reverse();
    svg.append(drawn("path", { d: "M" + (up.join("") + down.join("")).slice(1) + "Z", fill: colour(kind) }));
    above.forEach((size, k) => { below[k] = size; });
  }
  phases(m).forEach(([from, to, name]) => {
    const label = drawn("text", { x: x((from + to) / 2), y: high - 6, "text-anchor": "middle" });
    label.textContent = name;
    svg.append(label, drawn("line", { x1: x(from), x2: x(from), y1: top, y2: high - 4, stroke: "var(--soft)", "stroke-dasharray": "2 3" }));
  });
  if (isNear) {
    const label = drawn("text", { x: wide - 12, y: Math.max(y(capacity) + 12, 12), "text-anchor": "end" });
    label.textContent = `a device has ${bytes(capacity)}`;
    svg.append(drawn("line", { x1: left, x2: wide - 8, y1: y(capacity), y2: y(capacity), class: "capacity" }), label);
  }
  const cursor = drawn("line", { y1: top, y2: high - bottom, stroke: "var(--ink)", "stroke-width": "1.5" });
  svg.append(cursor);
  const readout = element("p", { class: "readout", "aria-live": "polite" });
  let at = m.moments.reduce((best, row, k) => (total(row) > total(m.moments[best]) ? k : best), 0);
  const show = (k) => {
    at = Math.max(0, Math.min(n - 1, k));
    const row = m.moments[at];
    cursor.setAttribute("x1", x(at + 0.5));
    cursor.setAttribute("x2", x(at + 0.5));
    const parts = used.filter(([, kind]) => row[2 + kind]).map(([name, kind]) => `${bytes(row[2 + kind])} of ${name}`);
    const line = text(row[0]) ? ` at ${baseName(text(row[0]))}` : "";
    readout.textContent = `${bytes(total(row))}${line}: ${parts.join(", ")}.`;
  };
  const under = (event) => {
    const box = svg.getBoundingClientRect();
    return Math.floor((((event.clientX - box.left) / box.width) * wide - left) / inner * n);
  };
  svg.addEventListener("pointermove", (event) => show(under(event)));
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -n, End: n }[event.key];
    if (step) { event.preventDefault(); show(at + step); }
  });
  show(at);
  const names = used.map(([name, kind]) => [colour(kind), name]);
  const room = capacity && !isNear ? [element("p", { class: "note" },
    `A device has ${bytes(capacity)}, ${Math.round(capacity / peak).toLocaleString("en")} times the peak: above this picture.`)] : [];
  return [svg, keys(names), readout, ...room];
}

function peakOf(m) {
  const sums = new Map();
  for (const row of m.alive) sums.set(row.kind, (sums.get(row.kind) ?? 0) + row.nbytes);
  const kinds = [...sums].sort((a, b) => b[1] - a[1]).map(([kind, n]) => `${bytes(n)} of ${m.kinds[kind]}`);
  const at = placed({ source: m.at, module: m.module });
  const lines = new Map();
  for (const row of m.alive) lines.set(row.source, (lines.get(row.source) ?? 0) + row.nbytes);
  lines.delete(0);
  const most = [...lines].sort((a, b) => b[1] - a[1]).slice(0, 2).map(([line, n]) => `${baseName(text(line))} (${bytes(n)})`);
  const made = most.length ? ` Most of it is made at ${most.join(" and ")}.` : "";
  const whose = m.holder ? ` on the rank at ${m.holder}, which holds most` : "";
  return `The peak${whose} is ${bytes(m.peak)}${at ? `, at ${at}` : ""}: ${kinds.join(", ")}.${made}`;
}

// The forward, the backward and what follows, as [from, to, name]; nothing without a backward. Where
// both run at once, the border is where the fewest ops are on the wrong side.
function phases(m) {
  const names = m.moments.map((row) => text(row[1])), n = names.length;
  if (!names.includes("backward")) return [];
  const last = names.lastIndexOf("backward") + 1;
  let wrong = names.filter((name) => name === "forward").length, border = 0, least = wrong;
  names.slice(0, last).forEach((name, k) => {
    wrong += name === "backward" ? 1 : name === "forward" ? -1 : 0;
    if (wrong < least) { least = wrong; border = k + 1; }
  });
  return [[0, border, "forward"], [border, last, "backward"], [last, n, "after it"]].filter(([from, to]) => to - from > n / 12);
}

// Collectives

function drawCollectives() {
  const axes = contents.axes.map(([name]) => name);
  const rows = contents.collectives.map((row) => [
    swatched(colour(axes.indexOf(text(row.axis)) + 1), code(`${text(row.kind)}${row.op ? " " + text(row.op) : ""} over ${text(row.axis)}`)),
    sized(row.nbytes), counted(row.count), timed(row.seconds), timed(row.exposed),
    element("span", { class: text(row.asked) === "implicit" ? "tag warn" : "tag plain" }, text(row.asked)),
    sentFrom(row)]);
  const details = contents.collectives.map((row) => (row.why || row.instead.length ? remedy(row) : null));
  if (!rows.length) {
    byId("sent").append(element("p", {}, "Ranks send each other nothing."));
    return;
  }
  byId("sent").append(element("p", {}, mostSent()));
  byId("sent").append(...table("Collectives of a step by line, the longest wait first; bytes are the payload of a rank: of a gather what it has afterwards",
    [["Collective", "wide"], ["Bytes", "n"], ["Count", "n"], ["Time", "n"], ["Exposed", "n"], ["Asked by", ""], [PLACE, "where"]],
    rows, { filter: "Find a collective", details }));
  drawSentByLine();
}

// The lines of collectives, with their shares of the bytes: those that a bucket's members are read at, or its own.
const linesOf = (row) => (row.lines.length ? row.lines : [[row.source, 1]]);

function drawSentByLine() {
  const sums = new Map();
  for (const row of contents.collectives) {
    for (const [line, part] of linesOf(row)) {
      const sum = sums.get(line) ?? { nbytes: 0, gathered: 0, seconds: 0, exposed: 0 };
      for (const name of ["nbytes", "seconds", "exposed"]) sum[name] += row[name] * part;
      if (text(row.kind) === "all_gather") sum.gathered += row.nbytes * part;
      sums.set(line, sum);
    }
  }
  const rows = [...sums].sort(([, a], [, b]) => b.nbytes - a.nbytes).map(([line, sum]) => [
    place(line, 0), sized(sum.nbytes), sized(sum.gathered), timed(sum.seconds), timed(sum.exposed)]);
  byId("sent-by-line").append(...table("Collectives of a line, the most bytes first",
    [["Line", "where"], ["Bytes", "n"], ["Gathered", "n"], ["Time", "n"], ["Exposed", "n"]], rows, { filter: "Find a line" }));
}

function mostSent() {
  const all = contents.collectives, s = contents.summary;
  const origin = (row) => (placed(row) ? ` at ${placed(row)}` : row.carries ? ` for ${text(row.carries)}` : "");
  const named = (row) => `${text(row.kind)} over ${text(row.axis)}${origin(row)}`;
  const largest = all.reduce((a, b) => (b.nbytes > a.nbytes ? b : a));
  const [longest] = all;
  const waits = longest.exposed ? ` A rank waits longest for ${named(longest)}: ${seconds(longest.exposed)}.` : " A rank waits for none of them.";
  return `${plural(s.collectives, "collective")} of a rank carry ${bytes(s.nbytes)}. Most bytes: ${named(largest)}, ${bytes(largest.nbytes)}.${mostGathered(all)}${waits}`;
}

// The line whose values are gathered most, over all axes.
function mostGathered(all) {
  const sums = new Map();
  for (const row of all.filter(({ kind }) => text(kind) === "all_gather")) {
    for (const [line, part] of linesOf(row)) sums.set(line, (sums.get(line) ?? 0) + row.nbytes * part);
  }
  if (!sums.size) return " Nothing is gathered.";
  const [line, size] = [...sums].reduce((a, b) => (b[1] > a[1] ? b : a));
  return ` Gathered most: ${bytes(size)} for ${line ? baseName(text(line)) : "no line"}.`;
}

function placed(row) {
  const line = row.source ? baseName(text(row.source)) : "";
  if (row.module) return line ? `${text(row.module)} (${line})` : text(row.module);
  return line;
}

function sentFrom(row) {
  const cell = row.source || row.module ? place(row.source, row.module) : element("span");
  const add = (said) => {
    if (cell.childNodes.length) cell.append(element("br"));
    cell.append(element("small", {}, said));
  };
  if (row.buckets.length) add(`${plural(row.buckets.length, "bucket")}: ${text(row.carries)}`);
  const shown = row.lines.slice(0, 3).map(([line, part]) => `${baseName(text(line))} (${bytes(part * row.nbytes)})`);
  const others = row.lines.length - shown.length;
  const verb = !row.buckets.length ? "made at" : text(row.kind) === "all_gather" ? "read at" : "gradients of what is read at";
  if (shown.length) add(`${verb} ${shown.join(", ")}${others ? ` and ${plural(others, "other line")}` : ""}`);
  if (!cell.childNodes.length) cell.append("no line");
  return cell;
}

function remedy(row) {
  const cell = element("span", {}, text(row.why));
  if (!row.instead.length) return cell;
  const head = row.saves ? `Instead, ${text(row.saves)}: ` : "To try, its gain is not estimated: ";
  const changes = row.instead.flatMap((number, k) => (k ? [element("br"), code(text(number))] : [code(text(number))]));
  cell.append(element("span", { class: row.saves ? "instead" : "instead try" }, head, ...changes));
  return cell;
}

// Placements

function drawPlacements() {
  const p = contents.placements;
  const rows = p.rows.map((row) => [
    code(text(row.path)), code(text(row.placement)), `${text(row.dtype)} ${text(row.shape).replaceAll("x", " × ")}`,
    counted(row.count), sized(row.nbytes)]);
  byId("placed").append(element("p", {}, p.total + "."));
  const columns = [["Argument", "wide"], ["Placement", "where"], ["Global shape", "where"], ["Count", "n"], ["Bytes of a rank", "n"]];
  if (rows.length <= ROWS) byId("placed").append(...table("Placements of the arguments", columns, rows));
  else {
    const tree = element("div");
    const show = (wanted) => {
      const kept = rows.map((_, k) => k).filter((k) => rows[k].map((cell) => cell.textContent ?? cell).join(" ").toLowerCase().includes(wanted));
      const root = treeOf(kept);
      tree.replaceChildren(...[...root.children].map(([name, node]) => branch(name, node, columns, rows, Boolean(wanted))), ...own(root, columns, rows));
      if (!kept.length) tree.append(element("p", { class: "note" }, "No argument has this name or placement."));
    };
    byId("placed").append(search("Find an argument or a placement", show), tree);
    show("");
  }
  if (p.left_out) byId("placed").append(element("p", { class: "note" }, `${plural(p.left_out, "row")} left out.`));
}

// The modules of arguments, by the names in their paths: of p['layers.0.up'] those are p, layers, 0.
function treeOf(numbers) {
  const root = { children: new Map(), numbers: [] };
  for (const k of numbers) {
    const names = text(contents.placements.rows[k].path).replace(/\[['"]?([^\]'"]*)['"]?\]/g, ".$1").split(".");
    let node = root;
    for (const name of names.slice(0, -1)) {
      if (!node.children.has(name)) node.children.set(name, { children: new Map(), numbers: [] });
      node = node.children.get(name);
    }
    node.numbers.push(k);
  }
  return root;
}

function branch(name, node, columns, rows, isOpen) {
  while (node.children.size === 1 && !node.numbers.length) {
    const [[inner, next]] = node.children;
    name += "." + inner;
    node = next;
  }
  const every = (each) => [...each.numbers, ...[...each.children.values()].flatMap(every)];
  const all = every(node), sum = all.reduce((n, k) => n + contents.placements.rows[k].nbytes, 0);
  const made = element("details", {}, element("summary", {}, code(name), " ", element("small", {}, `${plural(all.length, "row")}, ${bytes(sum)}`)));
  const open = () => {
    if (made.children.length > 1) return;
    made.append(...[...node.children].map(([inner, next]) => branch(inner, next, columns, rows, isOpen)), ...own(node, columns, rows, name));
  };
  made.addEventListener("toggle", open);
  if (isOpen) { open(); made.open = true; }
  return made;
}

const own = (node, columns, rows, name = "the arguments") =>
  (node.numbers.length ? table(`Placements in ${name}`, columns, node.numbers.map((k) => rows[k])) : []);

// The program

function drawProgram() {
  const { ops, outline, blocks } = contents.program;
  const tree = element("div");
  const note = outline
    ? `The program is too large to show: of its ${plural(ops, "op")}, collectives and loops are shown, with the number of ops left out beside them.`
    : `${plural(ops, "op")}.`;
  const count = element("p", { class: "note", "aria-live": "polite" }, note);
  const show = (wanted) => {
    const found = { n: 0 };
    const kept = wanted ? blocks.map((block) => matching(block, wanted, found)).filter(Boolean) : blocks;
    tree.replaceChildren(...kept.map((block) => fold(block, wanted, blocks.length === 1 || Boolean(wanted), ops < 80)));
    count.textContent = wanted ? `${plural(found.n, "line")} with "${wanted}".` : note;
  };
  byId("ops").append(search("Find an op, a line or a module", show), count, tree);
  show("");
}

// A block is [title, ops, left out, lines]; a line is a text or a block.
function matching([title, ops, left, lines], wanted, found) {
  if (title.toLowerCase().includes(wanted)) { found.n += ops; return [title, ops, left, lines]; }
  const kept = lines.map((line) => {
    if (typeof line !== "string") return matching(line, wanted, found);
    if (!line.toLowerCase().includes(wanted)) return null;
    found.n += 1;
    return line;
  }).filter(Boolean);
  return kept.length ? [title, ops, left, kept] : null;
}

function fold([title, ops, left, lines], wanted, isOpen, isSmall) {
  const some = left ? `${plural(ops, "op")}, ${left.toLocaleString("en")} left out` : plural(ops, "op");
  const made = element("details", {}, element("summary", {}, element("code", {}, title), " ", element("small", {}, some)));
  const open = () => {
    if (made.children.length > 1) return;
    let texts = [];
    const flush = () => { if (texts.length) made.append(element("pre", {}, ...texts)); texts = []; };
    for (const line of lines) {
      if (typeof line === "string") { texts.push(...highlighted(line, wanted), "\n"); continue; }
      flush();
      made.append(fold(line, wanted, isSmall || (Boolean(wanted) && lines.length < 20), isSmall));
    }
    flush();
  };
  made.addEventListener("toggle", open);
  if (isOpen) { open(); made.open = true; }
  return made;
}

const COLLECTIVE = /= (all_gather|all_reduce|reduce_scatter|all_to_all|permute|ppermute|halo|send)\[/;

function highlighted(line, wanted) {
  const parts = [];
  let rest = line;
  for (let at = wanted ? rest.toLowerCase().indexOf(wanted) : -1; at >= 0; at = rest.toLowerCase().indexOf(wanted)) {
    parts.push(rest.slice(0, at), element("mark", {}, rest.slice(at, at + wanted.length)));
    rest = rest.slice(at + wanted.length);
  }
  parts.push(rest);
  return COLLECTIVE.test(line) ? [element("b", {}, ...parts)] : parts;
}

// Light and dark

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = name === "dark" ? "Light page" : "Dark page";
  document.dispatchEvent(new Event("themed"));
}

function themes() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  byId("theme").addEventListener("click", () =>
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
}

themes();
drawStep();
drawTimeline();
drawMemory();
drawCollectives();
drawPlacements();
drawProgram();
