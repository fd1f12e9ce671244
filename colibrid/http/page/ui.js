"use strict";
// The page of /ui. All data come from the API with the key that was typed in, which is kept in `key` only.
// Text of models and servers is only ever put into the page as text.

const $ = (id) => document.getElementById(id);
const POLL_MS = 1000;
const RATES = 120; // points of the line
const FADE = 0.8; // of "lately", a poll
const LOOKS = "metrics"; // scope that the right side needs

let key = "";
let running = null; // AbortController of the answer on its way
let history = []; // of the chat
let last = null; // state of the poll before
let rates = [];
let recent = []; // by layer: work lately
let mayLook = true;

class Refused extends Error {
  constructor(status, error) {
    super(error.message || "The server answered with status " + status + ".");
    this.status = status;
    this.code = error.code;
  }
}

async function ask(path, body, signal) {
  const headers = key ? { Authorization: "Bearer " + key } : {};
  const options = { headers, signal, cache: "no-store", credentials: "omit" };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    options.method = "POST";
    options.body = JSON.stringify(body);
  }
  const answer = await fetch(path, options);
  if (!answer.ok) {
    let error = {};
    try {
      error = (await answer.json()).error || {};
    } catch { /* no JSON: the status has to do */ }
    throw new Refused(answer.status, error);
  }
  return answer;
}

// Calls `take` with each event of a stream. Throws what the stream says is wrong.
async function stream(path, body, signal, take) {
  const answer = await ask(path, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue;
      const data = block.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(200, event.error);
      take(event);
    }
  }
}

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function say(text, bad) {
  $("said").textContent = text;
  $("said").classList.toggle("bad", Boolean(bad));
}

// ---------------------------------------------------------------- key

function askKey(why) {
  $("key-said").textContent = why || "";
  if (!$("ask-key").open) $("ask-key").showModal();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  $("key").value = "";
  $("ask-key").close();
  mayLook = true;
  start().then(poll);
});
$("change-key").addEventListener("click", () => askKey());

// ---------------------------------------------------------------- asking

function options() {
  const wanted = {
    temperature: Number($("temperature").value),
    max_tokens: Number($("max-tokens").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  if ($("experts").value) wanted.experts = { per_token: Number($("experts").value) };
  return wanted;
}

// Runs one answer; the button stops it meanwhile.
async function answering(button, work) {
  if (running) {
    running.abort();
    return;
  }
  const label = button.textContent;
  running = new AbortController();
  button.textContent = "Stop";
  const began = performance.now();
  let first = 0;
  let usage = null;
  say("");
  try {
    await work(running.signal, (event) => {
      if (!first && event.choices.length) first = performance.now();
      if (event.usage) usage = event.usage;
    });
    if (usage) {
      const s = (performance.now() - first) / 1000;
      const rate = usage.completion_tokens > 1 && s > 0 ? ((usage.completion_tokens - 1) / s).toFixed(1) : "-";
      const cached = (usage.prompt_tokens_details || {}).cached_tokens || 0;
      say(usage.prompt_tokens + " prompt tokens" + (cached ? " (" + cached + " held)" : "") + ", " +
        usage.completion_tokens + " new, first after " + Math.round(first - began) + " ms, then " + rate + " a second" +
        (usage.experts ? "; " + usage.experts.assignments + " uses of experts" : ""));
    }
  } catch (error) {
    if (error.name === "AbortError") say("Stopped.");
    else if (error.status === 401) askKey(error.message);
    else say(error.message, true);
  } finally {
    running = null;
    button.textContent = label;
    poll();
  }
}

function bubble(role, text) {
  const element = make("p", "message " + role, text);
  $("messages").append(element);
  element.scrollIntoView({ block: "end" });
  return element;
}

$("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("chat-input").value.trim();
  if (!running && !text) return;
  answering($("chat-send"), async (signal, note) => {
    $("chat-input").value = "";
    history.push({ role: "user", content: text });
    bubble("user", text);
    const target = { thought: null, assistant: null };
    let said = "";
    const add = (role, more) => {
      if (!more) return;
      target[role] = target[role] || bubble(role, "");
      target[role].append(more);
      $("messages").scrollTop = $("messages").scrollHeight;
    };
    try {
      await stream("v1/chat/completions", { messages: history, ...options() }, signal, (one) => {
        note(one);
        const delta = one.choices.length ? one.choices[0].delta : {};
        add("thought", delta.reasoning_content);
        add("assistant", delta.content);
        said += delta.content || "";
      });
    } finally {
      if (said) history.push({ role: "assistant", content: said });
      else history.pop();
    }
  });
});
$("chat-input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("chat-form").requestSubmit();
  }
});
$("chat-clear").addEventListener("click", () => {
  history = [];
  $("messages").replaceChildren();
});

function percent(logprob) {
  const share = Math.exp(logprob) * 100;
  if (share < 0.001) return "< 0.001 %";
  return share.toFixed(share >= 10 ? 0 : share >= 0.1 ? 1 : 3) + " %";
}

function alternatives(span, top) {
  for (const other of $("tokens").querySelectorAll(".chosen")) other.classList.remove("chosen");
  span.classList.add("chosen");
  const rows = Object.entries(top || {}).sort((a, b) => b[1] - a[1]).map(([token, logprob]) => {
    const row = make("tr");
    row.append(make("td", "", JSON.stringify(token)), make("td", "number", percent(logprob)));
    return row;
  });
  $("alternatives").tBodies[0].replaceChildren(...rows);
  $("alternatives").hidden = rows.length === 0;
}

function addTokens(found) {
  found.tokens.forEach((token, index) => {
    const logprob = found.token_logprobs[index];
    const level = logprob === null ? "" : "p" + Math.min(9, Math.floor(Math.exp(logprob) * 10));
    const span = make("span", level, token);
    span.tabIndex = 0;
    if (logprob !== null) span.title = percent(logprob);
    const top = found.top_logprobs[index];
    span.addEventListener("click", () => alternatives(span, top));
    span.addEventListener("keydown", (event) => {
      if (event.key === "Enter") alternatives(span, top);
    });
    $("tokens").append(span);
  });
}

$("complete-form").addEventListener("submit", (event) => {
  event.preventDefault();
  answering($("complete-send"), async (signal, note) => {
    const prompt = $("complete-input").value;
    $("tokens").replaceChildren(make("span", "prompt", prompt));
    $("alternatives").hidden = true;
    await stream("v1/completions", { prompt, logprobs: 5, ...options() }, signal, (one) => {
      note(one);
      if (one.choices.length && one.choices[0].logprobs) addTokens(one.choices[0].logprobs);
    });
  });
});

for (const name of ["chat", "complete"]) {
  $("tab-" + name).addEventListener("click", () => {
    for (const other of ["chat", "complete"]) {
      $(other).hidden = other !== name;
      $("tab-" + other).setAttribute("aria-selected", String(other === name));
    }
  });
}

// ---------------------------------------------------------------- looking

// The pen of a canvas that has as many points as the screen gives it; `width` and `height` are then those of the page.
function penOf(canvas) {
  const scale = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

function drawRates() {
  const { pen, width, height } = penOf($("rates"));
  const most = Math.max(10, ...rates);
  const style = getComputedStyle(document.documentElement);
  const bar = width / RATES;
  pen.fillStyle = style.getPropertyValue("--accent");
  rates.forEach((rate, index) => {
    const tall = (height - 18) * (rate / most);
    pen.fillRect(width - (rates.length - index) * bar, height - tall, Math.max(1, bar - 1), tall);
  });
  pen.fillStyle = style.getPropertyValue("--soft");
  pen.font = "11px system-ui, sans-serif";
  pen.fillText(Math.round(most) + " / s", 5, 13);
}

function heatRows(state) {
  return $("heat-mode").value === "all" ? state.load.map((row) => row.assignments) : recent;
}

// Dark blue over magenta to yellow; 0 stays dark.
function heatColour(share) {
  const t = Math.sqrt(Math.max(0, Math.min(1, share)));
  return "hsl(" + Math.round(250 + 170 * t) % 360 + " 80% " + Math.round(8 + 52 * t) + "%)";
}

function drawHeat(state) {
  const { pen, width, height } = penOf($("heat"));
  const rows = heatRows(state);
  const edge = (number, parts, size) => Math.round((number * size) / parts);
  rows.forEach((row, y) => {
    const most = Math.max(...row);
    const [top, bottom] = [edge(y, rows.length, height), edge(y + 1, rows.length, height)];
    row.forEach((value, x) => {
      const [left, right] = [edge(x, row.length, width), edge(x + 1, row.length, width)];
      const gap = right - left > 6 && bottom - top > 6 ? 1 : 0;
      pen.fillStyle = heatColour(most > 0.5 ? value / most : 0);
      pen.fillRect(left, top, right - left - gap, bottom - top - gap);
    });
  });
}

$("heat").addEventListener("mousemove", (event) => {
  if (!last || !last.load.length) return;
  const box = $("heat").getBoundingClientRect();
  const y = Math.min(last.load.length - 1, Math.floor(((event.clientY - box.top) / box.height) * last.load.length));
  const row = last.load[Math.max(0, y)];
  const count = row.assignments.length;
  const x = Math.max(0, Math.min(count - 1, Math.floor(((event.clientX - box.left) / box.width) * count)));
  const mean = row.assignments.reduce((sum, one) => sum + one, 0) / count;
  const times = mean ? (row.assignments[x] / mean).toFixed(2) : "0";
  $("heat-said").textContent = "Layer " + row.layer + ", expert " + x + ": " + row.assignments[x] + " tokens, " + times +
    " times the layer's mean; its most loaded has " + row.imbalance + " times";
});
$("heat-mode").addEventListener("change", () => last && drawHeat(last));

function showSlots(state) {
  const parts = [];
  for (const engine of state.engines) {
    const busy = engine.slots.filter((slot) => slot.state !== "free");
    parts.push(make("p", "small", "Engine " + engine.engine + ": " + engine.phase + ", " + engine.running + " of " +
      engine.slots.length + " slots, " + engine.queued + " waiting"));
    const cells = make("div", "cells");
    for (const slot of engine.slots) {
      const cell = make("div", "cell " + slot.state);
      cell.title = "slot " + slot.slot + ": " + slot.state;
      cells.append(cell);
    }
    parts.push(cells);
    if (!busy.length) continue;
    const table = make("table");
    const head = make("tr");
    for (const name of ["slot", "prompt", "held", "new", "at most", "s"]) head.append(make("th", "number", name));
    table.append(head);
    for (const slot of busy) {
      const row = make("tr");
      for (const value of [slot.slot, slot.prompt_tokens, slot.cached_tokens, slot.output_tokens, slot.max_tokens,
        slot.age_s.toFixed(1)]) {
        row.append(make("td", "number", String(value)));
      }
      table.append(row);
    }
    parts.push(table);
  }
  $("slots").replaceChildren(...parts);
}

function look(state) {
  const now = performance.now();
  if (last) {
    const rate = Math.max(0, state.output_tokens - last.output_tokens) / ((now - last.at) / 1000);
    rates = [...rates, rate].slice(-RATES);
    $("rate").textContent = rate < 10 ? rate.toFixed(1) : String(Math.round(rate));
  }
  recent = state.load.map((row, y) => row.assignments.map((value, x) => {
    const before = last && last.load[y] ? last.load[y].assignments[x] : value;
    return (recent[y] ? recent[y][x] : 0) * FADE + Math.max(0, value - before);
  }));
  last = { ...state, at: now };
  $("model").textContent = state.model;
  $("state").textContent = state.device + ", " + state.engines.filter((one) => one.phase === "ready").length + " of " +
    state.engines.length + " engines ready";
  drawRates();
  drawHeat(state);
  showSlots(state);
}

let timer = 0;

async function poll() {
  clearTimeout(timer);
  if (!document.hidden && mayLook && !$("ask-key").open) {
    try {
      look(await (await ask("ui/state")).json());
    } catch (error) {
      if (error.status === 401) askKey(key ? error.message : "");
      else if (error.status === 403) {
        mayLook = false;
        $("look").hidden = true;
        $("state").textContent = "this key has no scope " + LOOKS + ", so there is nothing to see of the engine";
      } else $("state").textContent = error.status ? error.message : "the server does not answer";
    }
  }
  clearTimeout(timer); // another one may have been started meanwhile
  timer = setTimeout(poll, POLL_MS);
}

async function start() {
  $("look").hidden = false;
  try {
    const models = (await (await ask("v1/models")).json()).data;
    $("model").textContent = models[0].id;
    $("change-key").hidden = !key;
  } catch (error) {
    if (error.status === 401) askKey(key ? error.message : "");
    else $("state").textContent = error.message;
  }
}

start().then(poll);
