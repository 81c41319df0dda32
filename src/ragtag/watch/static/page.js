// Draws what the server sends: sections of a run's state (watch/drawable.py), first all, then those that changed.
// Nothing is worked out here but how numbers are written and where they stand.
"use strict";

const sections = {};
const SAYS_MS = 15000; // the server says something every 5 s
const WORDS = {
  busy: "busy: forward, backward, optimizer", waiting: "waiting for a slower device", communicating: "communicating",
  data: "waiting for data", stalled: "stalled: others stood in",
};
const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function svg(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) node.removeAttribute(name);
    else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
  }
}

// How numbers are written.
const known = (value) => value !== null && value !== undefined;
const digits = (value, count = 3) => {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size >= 10 ** (count - 1)) return Math.round(value).toLocaleString("en", { useGrouping: size >= 10000 });
  return size && size < 1e-3 ? value.toExponential(count - 1) : String(Number(value.toPrecision(count)));
};
const percent = (part) => !known(part) ? "–" : `${(100 * part).toFixed(part && Math.abs(part) < 0.1 ? 1 : 0)}\u00a0%`;
const signed = (part) => (part > 0 ? "+" : part < 0 ? "−" : "") + percent(Math.abs(part));
function duration(seconds) {
  if (!known(seconds)) return "–";
  if (seconds < 0.0995) return `${digits(1000 * seconds, 2)}\u00a0ms`;
  if (seconds < 0.9995) return `${digits(1000 * seconds)}\u00a0ms`;
  if (seconds < 90) return `${digits(seconds, seconds < 10 ? 2 : 3)}\u00a0s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes}\u00a0min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60}\u00a0min` : `${Math.floor(hours / 24)}\u00a0d ${hours % 24}\u00a0h`;
}
function bytes(count) {
  if (!known(count)) return "–";
  let unit = 0;
  while (count >= 1000 && unit < 4) { count /= 1000; unit += 1; }
  return `${digits(count)}\u00a0${["B", "kB", "MB", "GB", "TB"][unit]}`;
}
function withUnit(text) {
  const [, number, unit] = text.match(/^(\S+?)(?:\s(\S+))?$/) ?? [null, text, ""];
  return unit ? [`${number} `, element("small", {}, unit)] : [text];
}

// The connection: the newest state comes as server-sent events, and comes again by itself after any break.
let stream = null, heard = 0, failed = "", skew_s = 0, retry_ms = 1000;

function connect() {
  if (stream) stream.close();
  heard = Date.now();
  stream = new EventSource("events");
  stream.onopen = () => { for (const name of Object.keys(sections)) delete sections[name]; };
  stream.onmessage = (event) => {
    const told = JSON.parse(event.data);
    heard = Date.now();
    skew_s = told.server_t - heard / 1000;
    failed = ""; retry_ms = 1000;
    Object.assign(sections, told.sections);
    schedule();
  };
  stream.onerror = () => {
    failed = failed || "connection lost, trying again";
    if (stream.readyState === EventSource.CLOSED) again();
    schedule();
  };
}

async function again() {
  stream.close();
  try {
    const answer = await fetch("events", { signal: AbortSignal.timeout(4000) });
    failed = answer.ok ? failed : answer.status === 403
      ? "this page's token is no longer good: open the address that was printed newly" : (await answer.text()).trim();
    answer.body?.cancel();
  } catch { failed = "connection lost, trying again"; }
  schedule();
  setTimeout(connect, retry_ms);
  retry_ms = Math.min(2 * retry_ms, 5000);
}

let scheduled = false;
function schedule() {
  if (scheduled || document.hidden) return;
  scheduled = true;
  requestAnimationFrame(() => { scheduled = false; draw(); });
}

const drawn = {};
function changed(...names) { // whether one of these sections is another one than when it was last drawn
  return names.filter((name) => drawn[name] !== sections[name] && ((drawn[name] = sections[name]), true)).length > 0;
}

function draw() {
  drawStatus();
  if (!sections.now || !sections.devices) return;
  drawNow();
  const hasNewFindings = changed("findings");
  if (hasNewFindings) drawTroubles();
  if (changed("devices")) drawDevices();
  if (changed("timeline")) drawTimeline();
  lossChart.draw(); etaChart.draw();
  if (changed("decisions")) drawDecisions();
  if (changed("changes", "messages", "evaluation", "checkpoint") || hasNewFindings) drawEvents();
}

function drawStatus() {
  const now = sections.now, written_t = sections.log?.written_t;
  const quiet_s = known(written_t) ? Date.now() / 1000 + skew_s - written_t : null;
  let text = "connecting", kind = "";
  if (failed) [text, kind] = [failed, "trouble"];
  else if (!now) text = "connecting";
  else if (now.status === "ended") [text, kind] = [now.ended ? `ended: ${now.ended}` : "ended", now.ended ? "trouble" : ""];
  else if (!known(written_t)) text = "waiting for the run's log";
  else if (quiet_s > Math.max(20, 5 * (now.step_s ?? 0))) [text, kind] = [`nothing new for ${duration(quiet_s)}`, "trouble"];
  else if (now.status === "waiting") text = "waiting for the first step";
  else [text, kind] = ["training", "running"];
  write(byId("status"), text);
  byId("status").className = `pill ${kind}`;
}

function drawNow() {
  const { now, run } = sections;
  const here = sections.devices.filter((device) => !device.left);
  const hosts = new Set(here.map((device) => device.host)).size;
  const script = run.script.split("/").at(-1);
  write(byId("name"), run.title);
  document.title = `${now.step ? `${now.step} · ` : ""}${run.title} · ragtag`;
  write(byId("about"), [
    script === run.title ? "" : script, `${here.length} device${here.length === 1 ? "" : "s"} on ${hosts} host${hosts === 1 ? "" : "s"}`,
    run.parameters ? `${(run.parameters / 1e6).toPrecision(3)} M parameters` : "",
    run.global_batch_size ? `${run.global_batch_size} samples a step` : "", run.torch ? `torch ${run.torch}` : "",
  ].filter(Boolean).join(" · "));
  number("speed", now.samples_per_s, known(now.samples_per_s) ? `${digits(now.samples_per_s)} samples/s` : "–");
  write(byId("speed-note"), known(now.step_s)
    ? `${duration(now.step_s)} a step${known(now.predicted_step_s) ? `, ${duration(now.predicted_step_s)} predicted` : ""}` : "");
  number("eta", now.eta, percent(now.eta));
  set(byId("eta-mean"), { "data-value": now.eta_mean });
  write(byId("eta-mean"), percent(now.eta_mean));
  number("loss", now.loss, digits(now.loss, 4));
  const evaluated = sections.evaluation;
  write(byId("loss-note"), evaluated ? `evaluated after step ${evaluated.step}: ${digits(evaluated.value, 4)}`
    : [...Object.entries(now.metrics).slice(0, 2), ["learning rate", now.lr || null], ["gradient norm", now.grad_norm]]
      .filter(([, value]) => known(value)).slice(0, 2).map(([what, value]) => `${what} ${digits(value, 3)}`).join(", "));
  number("left", now.left_s, now.status === "ended" ? "–" : duration(now.left_s));
  write(byId("left-note"), known(now.last_step) ? `step ${now.step} of ${now.last_step}` : `step ${now.step}`);
  const bar = byId("progress");
  bar.hidden = !known(now.last_step);
  set(bar, { "aria-valuemax": now.last_step, "aria-valuenow": now.step });
  bar.firstElementChild.style.width = `${100 * Math.min(1, now.step / (now.last_step || 1))}%`;
  const { log } = sections, lost = log.skipped_lines + log.unknown_lines;
  write(byId("foot"), `${log.path}${lost ? ` · ${lost} lines could not be read` : ""} · ragtag ${run.version}`);
}

function number(id, value, text) {
  const node = byId(id);
  set(node, { "data-value": value });
  if (node.dataset.text === text) return;
  node.dataset.text = text;
  node.replaceChildren(...withUnit(text));
}

function drawTroubles() {
  byId("troubles").replaceChildren(...sections.findings.filter((each) => !each.over).map((each) =>
    element("p", { class: "notice", "data-finding": each.name, "data-cause": each.cause },
      element("b", {}, `${each.name}: ${each.cause}. `), each.text)));
}

function bar(parts) {
  const said = Object.entries(parts).filter(([, part]) => part >= 0.005).map(([kind, part]) => `${kind} ${percent(part)}`);
  const node = element("div", { class: "bar", role: "img", "aria-label": said.join(", ") || "nothing known yet", title: said.join(", ") });
  for (const [kind, part] of Object.entries(parts)) {
    const piece = element("i", { class: kind });
    piece.style.width = `${100 * part}%`;
    node.append(piece);
  }
  return node;
}

function cell(label, attributes, ...content) {
  return element("td", { role: "cell", "data-label": label, ...attributes }, ...content.filter(known));
}

function drawDevices() {
  for (const [column, knows] of [["memory", (device) => known(device.peak_memory_bytes ?? device.memory_bytes)], ["condition", (device) => known(device.temperature_c ?? device.clock_mhz)]])
    byId("devices").classList.toggle(`no-${column}`, !sections.devices.some(knows));
  const total = sections.devices.reduce((sum, device) => sum + (device.share ?? 0), 0) || 1;
  byId("rows").replaceChildren(...sections.devices.map((device) => {
    const { parts, verdict, left } = device, lost = Object.entries(parts).filter(([kind]) => kind !== "busy");
    const [worst, much] = lost.reduce((most, each) => each[1] > most[1] ? each : most, ["", 0]);
    const condition = [known(device.temperature_c) ? `${digits(device.temperature_c)} °C` : "", known(device.clock_mhz) ? `${digits(device.clock_mhz, 4)} MHz` : ""].filter(Boolean);
    const row = element("tr", {
      role: "row", class: left ? "gone" : null, "data-device": device.name, "data-rank": device.rank, "data-share": device.share,
      "data-planned-share": device.planned_share, "data-gain": verdict?.gain ?? null,
    },
    cell("Device", {}, element("span", {}, device.name), element("small", {}, [device.host, device.model || device.device].filter(Boolean).join(" · ")),
      left ? element("small", {}, `gone after step ${left.step}${left.reason ? `: ${left.reason}` : ""}`) : null),
    cell("Share", { class: "number" }, known(device.share) ? `${device.share}` : "–", known(device.share) ? element("small", {}, percent(device.share / total)) : null),
    cell("Time", { class: "wide" }, bar(parts), element("small", {}, `busy ${percent(parts.busy)}${much >= 0.005 ? `, ${worst} ${percent(much)}` : ""}`)),
    cell("Samples/s", { class: "number" }, digits(device.samples_per_s), known(device.speed_samples_per_s) ? element("small", {}, `${digits(device.speed_samples_per_s)} when busy`) : null),
    cell("Memory", { class: "number memory" }, bytes(device.peak_memory_bytes ?? device.memory_bytes), known(device.total_memory_bytes) ? element("small", {}, `of ${bytes(device.total_memory_bytes)}`) : null),
    cell("Condition", { class: "number condition" }, condition[0] ?? "–", condition[1] ? element("small", {}, condition[1]) : null),
    cell("Verdict", {}, verdict && !left ? element("span", {
      class: `pill ${verdict.gain > 0.005 ? "adds" : verdict.gain < -0.005 ? "costs" : ""}`, "data-verdict": verdict.text, title: `after step ${verdict.step}`,
    }, verdict.text) : left ? "gone" : "–"));
    for (const [kind, part] of Object.entries(parts)) row.dataset[kind] = part;
    return row;
  }));
}

function drawTimeline() {
  const { kinds, devices, duration_s, spans, ends_s, first_step, last_step } = sections.timeline;
  if (!spans.length) return;
  const lanes = devices.map(() => element("div", { class: "lane" }));
  const place = (node, start_s, stop_s) => { node.style.left = `${100 * start_s / duration_s}%`; if (stop_s) node.style.width = `${100 * (stop_s - start_s) / duration_s}%`; };
  let step = 0, before_s = 0;
  for (const [device, kind, start_s, stop_s] of spans) {
    if (start_s < before_s) step = 0;
    while (ends_s[step] <= start_s) step += 1;
    before_s = start_s;
    const piece = element("i", { class: kinds[kind], title: `step ${first_step + step}: ${kinds[kind]} ${duration(stop_s - start_s)}` });
    place(piece, start_s, stop_s);
    lanes[device].append(piece);
  }
  const rows = devices.map((name, index) => {
    for (const end_s of ends_s.slice(0, -1)) { const line = element("u"); place(line, end_s); lanes[index].append(line); }
    const parts = sections.devices.find((device) => device.name === name)?.parts ?? {};
    const idle = percent(1 - (parts.busy ?? 0));
    set(lanes[index], { role: "img", "aria-label": `${name}, the last steps: ${Object.entries(parts).map(([kind, part]) => `${kind} ${percent(part)}`).join(", ")}` });
    return element("div", { class: "lane-row", "data-lane": name }, element("div", { class: "lane-label" }, `${name} `, element("small", {}, `not busy ${idle}`)), lanes[index]);
  });
  byId("timeline").replaceChildren(...rows, element("div", { class: "axis lanes-axis" },
    element("span", {}, `step ${first_step}`), element("span", {}, duration(duration_s)), element("span", {}, `step ${last_step}`)));
}

class Chart {
  // One or several curves over steps; arrow keys or a pointer show the value at a step.
  constructor(id, title, curves, form, limits) {
    Object.assign(this, { title, curves, form, limits, at: null, keys: "" });
    this.note = element("p", {}, " ");
    this.ends = [element("span"), element("span")];
    this.plot = element("div", { class: "plot", tabindex: "0", role: "slider", "aria-label": `${title} at a step; arrow keys move`, "aria-valuemin": 0, "aria-valuemax": 0, "aria-valuenow": 0 });
    byId(id).append(this.note, this.plot, element("div", { class: "axis" }, ...this.ends));
    this.plot.addEventListener("pointermove", (event) => {
      const box = this.plot.getBoundingClientRect();
      this.show(Math.round((event.clientX - box.left) / box.width * ((this.points?.length ?? 1) - 1)), true);
    });
    for (const name of ["pointerleave", "blur"]) this.plot.addEventListener(name, () => this.show(null));
    this.plot.addEventListener("focus", () => this.show(this.at ?? this.points.length - 1));
    this.plot.addEventListener("keydown", (event) => {
      const last = this.points.length - 1, at = this.at ?? last, far = Math.max(1, Math.round(last / 10));
      const to = { ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1, PageDown: at - far, PageUp: at + far, Home: 0, End: last }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.show(to);
    });
    this.points = [];
  }

  points_of(name) {
    const blocks = sections[`curves.${name}.blocks`] ?? 0;
    return Array.from({ length: blocks }, (_, block) => sections[`curves.${name}.${block}`] ?? []).flat();
  }

  draw() {
    const blocks = this.curves.flatMap((name) => [`curves.${name}.blocks`, ...Array.from({ length: sections[`curves.${name}.blocks`] ?? 0 }, (_, block) => `curves.${name}.${block}`)]);
    if (!changed(...blocks, `${this.title} marks`)) return;
    const all = this.curves.map((name) => this.points_of(name));
    this.points = all[0];
    if (!this.points.length) { write(this.note, "Nothing is known yet."); return; }
    const values = all.flat().map(([, value]) => value), steps = all.flat().map(([step]) => step);
    this.first = Math.min(...steps); this.last = Math.max(...steps, this.first + 1);
    [this.low, this.high] = this.limits(Math.min(...values), Math.max(...values));
    const picture = svg("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" });
    const labels = this.ticks().map((value) => {
      picture.append(svg("line", { class: "grid", x1: 0, x2: 100, y1: 100 - this.y(value), y2: 100 - this.y(value) }));
      const label = element("span", { class: "tick" }, this.form(value));
      label.style.bottom = `${this.y(value)}%`;
      return label;
    });
    for (const { step } of [...sections.decisions, ...sections.changes])
      if (step >= this.first && step <= this.last) picture.append(svg("line", { class: "mark", x1: this.x(step), x2: this.x(step), y1: 0, y2: 100 }));
    all.forEach((points, index) => picture.append(svg("polyline", { class: `curve ${this.curves[index]}`, points: points.map(([step, value]) => `${this.x(step).toFixed(2)},${(100 - this.y(value)).toFixed(2)}`).join(" ") })));
    this.plot.replaceChildren(picture, ...labels);
    write(this.ends[0], `step ${this.first}`); write(this.ends[1], `step ${this.last}`);
    set(this.plot, { "aria-valuemin": this.first, "aria-valuemax": this.last });
    this.show(this.at);
  }

  x(step) { return 100 * (step - this.first) / (this.last - this.first); }
  y(value) { return 100 * (value - this.low) / ((this.high - this.low) || 1); }

  ticks() {
    const rough = (this.high - this.low) / 4 || 1, power = 10 ** Math.floor(Math.log10(rough));
    const size = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((each) => each >= rough * 0.999);
    const found = [];
    for (let value = Math.ceil(this.low / size - 1e-9) * size; value <= this.high + 1e-9 * size; value += size) found.push(Number(value.toPrecision(10)));
    return found;
  }

  show(at, byPointer = false) {
    if (!this.points.length) return;
    this.at = at === null ? null : Math.max(0, Math.min(this.points.length - 1, at));
    const [step, value] = this.points[this.at ?? this.points.length - 1];
    const text = `step ${step}: ${this.form(value, true)}`;
    for (const old of this.plot.querySelectorAll(".cursor, .dot")) old.remove();
    if (this.at !== null) {
      const cursor = element("span", { class: "cursor" }), dot = element("span", { class: "dot" });
      cursor.style.left = dot.style.left = `${this.x(step)}%`;
      dot.style.bottom = `${this.y(value)}%`;
      this.plot.append(cursor, dot);
    }
    write(this.note, this.at === null ? this.legend() : text);
    set(this.plot, byPointer ? {} : { "aria-valuenow": step, "aria-valuetext": text });
  }

  legend() {
    const marks = sections.decisions.length + sections.changes.length ? "Dashed lines: decisions, devices that come or go." : "";
    return `${this.curves.length > 1 && sections.evaluation ? "Yellow: evaluations. " : ""}${marks}` || " ";
  }
}

const lossChart = new Chart("loss-chart", "Loss", ["loss", "evaluations"], (value, exact) => digits(value, exact ? 4 : 3), (low, high) => [low - 0.03 * (high - low || 1), high + 0.03 * (high - low || 1)]);
const etaChart = new Chart("eta-chart", "Efficiency", ["eta"], (value) => percent(value), (_, high) => [0, Math.max(1, high)]);

function item(when, className, ...content) {
  return element("li", {}, element("span", { class: "when" }, when), element("div", { class: className }, ...content));
}

function drawDecisions() {
  if (!sections.decisions.length) return;
  byId("decisions").replaceChildren(...sections.decisions.map((each) => {
    const outcome = [
      each.predicted_step_s ? `predicted ${duration(each.predicted_step_s)} a step (${signed(-each.predicted_gain)} of its time)` : "nothing predicted",
      known(each.achieved_step_s) ? `achieved ${duration(each.achieved_step_s)} over ${each.achieved_over} step${each.achieved_over === 1 ? "" : "s"}` : "not measured yet",
    ].join(", ");
    const line = item(`step ${each.step}`, "", each.reason, element("small", {}, outcome));
    set(line, { "data-decision": each.step, "data-predicted": each.predicted_step_s, "data-achieved": each.achieved_step_s });
    return line;
  }));
}

function drawEvents() {
  const time = (t) => new Date(1000 * t).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
  const { evaluation, checkpoint } = sections;
  const found = [
    ...sections.changes.map((each) => ({ t: each.t, text: each.joined ? `${each.name} has joined after step ${each.step}` : `${each.name} is gone after step ${each.step}${each.reason ? `: ${each.reason}` : ""}` })),
    ...sections.findings.filter((each) => each.over).map((each) => ({ t: each.t, over: each.name, text: `over since step ${each.step}: ${each.text}` })),
    ...sections.messages.map((each) => ({ t: each.t, level: each.level, text: `${each.source ? `${each.source}: ` : ""}${each.text}` })),
    ...(checkpoint ? [{ t: checkpoint.t, text: `checkpoint of step ${checkpoint.step} is complete: ${checkpoint.path}` }] : []),
    ...(evaluation ? [{ t: evaluation.t, text: `evaluated after step ${evaluation.step}: ${[`${digits(evaluation.value, 4)}`, ...Object.entries(evaluation.metrics).map(([name, value]) => `${name} ${digits(value, 4)}`)].join(", ")}` }] : []),
  ].sort((one, other) => other.t - one.t);
  if (found.length) byId("events").replaceChildren(...found.map((each) => {
    const line = item(time(each.t), each.level ?? "", each.text);
    set(line, { "data-over": each.over });
    return line;
  }));
}

byId("legend").replaceChildren(...Object.entries(WORDS).map(([kind, words]) => element("li", {}, element("i", { class: kind, "aria-hidden": "true" }), words)));
document.addEventListener("visibilitychange", schedule);
setInterval(() => {
  if (stream.readyState !== EventSource.CLOSED && Date.now() - heard > SAYS_MS) { failed = "connection lost, trying again"; connect(); }
  schedule();
}, 1000);
connect();
