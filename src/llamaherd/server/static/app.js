// The page: chat, suggestions, figures. It speaks to the same endpoints as everybody else.

import { Plot } from "/static/plot.js";

const $ = (id) => document.getElementById(id);

function headers() {
  const key = $("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function call(path, body, signal) {
  const answer = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers: headers(),
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
  });
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  throw new Error(said.error?.message ?? said.error ?? `${answer.status} ${answer.statusText}`);
}

// ------------------------------------------------------------------------------------------ tabs

const tabs = [...document.querySelectorAll("[role=tab]")];

function show(tab) {
  for (const other of tabs) {
    const chosen = other === tab;
    other.setAttribute("aria-selected", String(chosen));
    other.tabIndex = chosen ? 0 : -1;
    $(other.getAttribute("aria-controls")).hidden = !chosen;
  }
  location.replace(`#${tab.id.slice(4)}`);
}

for (const [i, tab] of tabs.entries()) {
  tab.addEventListener("click", () => show(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(i + step + tabs.length) % tabs.length];
    show(next);
    next.focus();
  });
}

// ------------------------------------------------------------------------------------------ chat

const conversation = [];
let running = null;

function add(role, text) {
  const item = document.createElement("li");
  item.className = role;
  item.textContent = text;
  $("messages").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ") || part === "data: [DONE]") continue;
      yield JSON.parse(part.slice(6));
    }
  }
}

async function send() {
  const text = $("chat-input").value.trim();
  if (!text || running) return;
  $("chat-input").value = "";
  conversation.push({ role: "user", content: text });
  add("user", text);
  const item = add("assistant", "");
  running = new AbortController();
  $("chat-stop").disabled = false;
  let said = "";
  try {
    const body = {
      model: $("model").value,
      messages: conversation,
      stream: true,
      temperature: Number($("chat-temperature").value),
      max_tokens: Number($("chat-tokens").value),
    };
    for await (const event of events(await call("/v1/chat/completions", body, running.signal))) {
      if (event.error) throw new Error(event.error.message);
      said += event.choices[0]?.delta.content ?? "";
      item.textContent = said;
    }
  } catch (error) {
    if (error.name !== "AbortError") add("error", error.message);
  }
  if (said) conversation.push({ role: "assistant", content: said });
  else item.remove();
  running = null;
  $("chat-stop").disabled = true;
  $("chat-input").focus();
}

$("chat-form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("chat-input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
$("chat-stop").addEventListener("click", () => running?.abort());
$("chat-clear").addEventListener("click", () => {
  running?.abort();
  conversation.length = 0;
  $("messages").replaceChildren();
});

// --------------------------------------------------------------------------------------- suggest

$("suggest-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const note = $("suggest-note");
  note.textContent = "…";
  const began = performance.now();
  try {
    const answer = await call("/v1/suggestions", {
      model: $("model").value,
      prompt: $("suggest-input").value,
      n: Number($("suggest-n").value),
      max_tokens: Number($("suggest-tokens").value),
      temperature: Number($("suggest-temperature").value),
      beam: $("suggest-beam").checked,
      stop: ["\n"],
    });
    const { suggestions } = await answer.json();
    note.textContent = `${suggestions.length} in ${((performance.now() - began) / 1000).toFixed(2)} s; `
      + "the bar is the mean probability of a token, the number that of the whole text";
    $("suggestions").replaceChildren(...suggestions.map(shown));
  } catch (error) {
    note.textContent = error.message;
  }
});

function shown({ text, score, logprob }) {
  const item = document.createElement("li");
  const chance = document.createElement("span");
  chance.className = "chance";
  chance.textContent = Math.exp(logprob).toPrecision(2);
  const bar = document.createElement("meter");
  bar.max = 1;
  bar.value = Math.exp(score);
  chance.append(bar);
  const said = document.createElement("span");
  said.textContent = text;
  item.append(chance, said);
  return item;
}

// --------------------------------------------------------------------------------------- figures

const number = (v) => (v >= 100 ? v.toFixed(0) : v.toFixed(1).replace(/\.0$/, ""));
const plots = {
  open: new Plot($("plots"), "Requests", number),
  waiting: new Plot($("plots"), "Waiting", number),
  rate: new Plot($("plots"), "Tokens/s", number),
  cells: new Plot($("plots"), "KV cells used", (v) => `${(v * 100).toFixed(0)} %`),
  hits: new Plot($("plots"), "Prefix-cache hits", (v) => `${(v * 100).toFixed(0)} %`),
  restarts: new Plot($("plots"), "Worker restarts", number),
};
let before = null;

const sum = (models, field) => models.reduce((total, m) => total + (m[field] ?? 0), 0);

function figures(models) {
  const now = { at: performance.now(), decoded: sum(models, "decoded_tokens") };
  // a restarted worker counts from zero again
  const made = before && now.decoded >= before.decoded ? now.decoded - before.decoded : 0;
  plots.rate.add(before ? (made * 1000) / (now.at - before.at) : 0);
  before = now;
  plots.open.add(sum(models, "open_requests"));
  plots.waiting.add(sum(models, "waiting"));
  plots.cells.add(sum(models, "used_cells") / Math.max(1, sum(models, "n_cells")));
  const reused = sum(models, "reused_tokens");
  plots.hits.add(reused / Math.max(1, reused + sum(models, "prefilled_tokens")));
  plots.restarts.add(sum(models, "restarts"));
  $("models").tBodies[0].replaceChildren(...models.map(row));
  const replicas = models.flatMap((m) => (m.replicas ?? []).map((replica) => replicaRow(m, replica)));
  $("replicas-part").hidden = !replicas.length;
  $("replicas").tBodies[0].replaceChildren(...replicas);
  const stages = models.flatMap((m) => (m.stages ?? []).map((stage) => stageRow(m, stage)));
  $("stages-part").hidden = !stages.length;
  $("stages").tBodies[0].replaceChildren(...stages);
}

function replicaRow(model, replica) {
  const tr = document.createElement("tr");
  const hits = replica.reused_tokens / Math.max(1, replica.reused_tokens + replica.prefilled_tokens);
  const cells = [model.name, replica.name, replica.ready ? "ready" : "lost", replica.host, replica.pid, replica.open_requests,
    `${replica.used_cells} / ${replica.n_cells}`, `${(hits * 100).toFixed(0)} %`, replica.restarts];
  for (const text of cells) tr.insertCell().textContent = text;
  return tr;
}

function stageRow(model, stage) {
  const tr = document.createElement("tr");
  const cells = [model.name, `${stage.start} - ${stage.end - 1}`, stage.host, stage.pid,
    `${(stage.weights / 2 ** 20).toFixed(0)} MiB`, stage.used_cells, `${(stage.latency * 1000).toFixed(1)} ms`];
  for (const text of cells) tr.insertCell().textContent = text;
  const busy = document.createElement("meter");
  busy.value = stage.busy;
  busy.title = busy.textContent = `${(stage.busy * 100).toFixed(0)} %`;
  tr.insertCell().append(busy);
  return tr;
}

function row(model) {
  const state = !model.loaded ? "not loaded" : model.ready ? "ready" : "restarting";
  const hits = model.reused_tokens / Math.max(1, model.reused_tokens + model.prefilled_tokens);
  const cells = model.loaded
    ? [model.name, state, model.open_requests, model.waiting, `${model.used_cells} / ${model.n_cells}`,
       `${(hits * 100).toFixed(0)} %`, `${(model.memory / 2 ** 20).toFixed(0)} MiB`, model.restarts, model.last_death]
    : [model.name, state, "", "", "", "", "", "", ""];
  const tr = document.createElement("tr");
  for (const text of cells) tr.insertCell().textContent = text;
  return tr;
}

async function look() {
  const health = $("health");
  try {
    const { ready, models } = await (await call("/status")).json();
    const names = models.map((m) => m.name);
    const select = $("model");
    if ([...select.options].map((o) => o.value).join() !== names.join()) {
      select.replaceChildren(...names.map((name) => new Option(name, name)));
    }
    figures(models);
    health.textContent = ready ? "ready" : "not ready";
    health.className = ready ? "ready" : "down";
  } catch (error) {
    health.textContent = error.message;
    health.className = "down";
  }
  setTimeout(look, 1000);
}

$("key").value = localStorage.getItem("llamaherd-key") ?? "";
$("key").addEventListener("change", () => localStorage.setItem("llamaherd-key", $("key").value));
const wanted = tabs.find((tab) => tab.id === `tab-${location.hash.slice(1)}`);
if (wanted) show(wanted);
look();
