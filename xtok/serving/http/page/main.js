// The page: requests texts, shows them as they come, and opens and saves traces.

import { element } from "../view/element.js";
import { View } from "../view/view.js";
import { words } from "../view/words.js";
import { about, race, Refused, tints } from "./server.js";

const of = (id) => document.getElementById(id);
const form = of("ask");
const field = (name) => form.elements[name];
const RETRY = 1000;

let served = null; // what the server last said about itself
let writing = null;
let again;

for (const labelled of document.querySelectorAll("[data-word]")) labelled.prepend(words[labelled.dataset.word]);
const view = new View(of("view"), []);

// A status that stays is set once, for a screen reader would read it again and again.
const say = (status, wrong = false) => {
  if (of("status").textContent !== status) of("status").textContent = status;
  of("status").classList.toggle("wrong", wrong);
};

// what is served

async function begin() {
  clearTimeout(again);
  if (served) return;
  try {
    served = await about(field("key").value);
  } catch (error) {
    wait(error);
    return;
  }
  say("");
  of("write").disabled = false;
  of("served").textContent = words.served(served.model, served.drafts);
  of("as-chat").hidden = !served.chats;
  if (served.chats) field("penalty").value = 1; // chat models do without
  field("tokens").max = served.tokens;
  for (const draft of served.drafts) {
    const box = element("input", { type: "checkbox", name: "draft", value: draft });
    box.checked = true;
    of("drafts").append(element("label", {}, box, ` ${draft}`));
  }
  of("drafts").hidden = !served.drafts.length;
  for (const prompt of served.prompts) of("examples").append(element("option", { value: prompt }, prompt.slice(0, 24)));
  of("examples").parentElement.hidden = !served.prompts.length;
  if (!field("prompt").value) field("prompt").value = served.prompts[0] ?? "";
}

// Says why nothing is served, and tries again later, or when the key is given.
function wait(error) {
  if (error.status === 401) {
    of("key").hidden = false;
    say(field("key").value ? words.wrongKey : words.locked, true);
    return;
  }
  say({ loading: words.loading, broken: error.message }[error.code] ?? words.gone, error.code !== "loading");
  again = setTimeout(begin, RETRY);
}

// requests

function requested() {
  const sampled = field("picks").value === "sampled";
  const chat = served.chats && field("chat").checked;
  const drafts = [...form.querySelectorAll("[name=draft]:checked")].map((box) => box.value);
  const prompt = field("prompt").value;
  return {
    path: chat ? "v1/race/chat/completions" : "v1/race/completions",
    body: {
      ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
      max_tokens: Number(field("tokens").value),
      repetition_penalty: Number(field("penalty").value),
      temperature: sampled ? Number(field("temperature").value) : 0,
      ...(sampled ? { seed: Number(field("seed").value) } : {}),
      drafts,
      alone: field("race").checked,
    },
  };
}

async function write() {
  const { path, body } = requested();
  view.show(["drafted", ...(body.alone ? ["alone"] : [])], body.drafts);
  of("save").disabled = true;
  const byKind = new Map(view.runs.map((run) => [run.kind, run]));
  const mine = (writing = new AbortController());
  busy(true);
  say(words.waiting);
  try {
    for await (const event of race(path, body, field("key").value, mine.signal)) {
      if (event.round || event.end) say(words.writing);
      if (event.round) byKind.get(event.run).add(event.round, event.seconds);
      if (event.end) byKind.get(event.run).ends(event.end, event.seconds);
    }
    say(words.done);
  } catch (error) {
    if (writing !== mine) return; // something else is shown by now
    if (mine.signal.aborted) say(words.stopped);
    else if (error instanceof Refused) say(words.failed(error.message), true);
    else say(view.runs[0].rounds.length ? words.lost : words.gone, true);
  } finally {
    busy(false);
  }
  view.conclude();
  of("save").disabled = !view.runs[0].end;
}

function busy(is) {
  of("write").disabled = is || !served;
  of("stop").disabled = !is;
}

// traces

async function open(file) {
  try {
    view.showTrace(JSON.parse(await file.text()));
  } catch {
    say(words.broken, true);
    return;
  }
  writing?.abort();
  writing = null;
  say(file.name);
  of("save").disabled = false;
}

function save() {
  const link = element("a", { download: "trace.json" });
  link.href = URL.createObjectURL(new Blob([JSON.stringify(view.runs[0].end)], { type: "application/json" }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href));
}

// wiring

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (served && !of("write").disabled) write();
});
form.addEventListener("change", () => {
  const sampled = field("picks").value === "sampled";
  field("temperature").disabled = field("seed").disabled = !sampled;
});
of("stop").addEventListener("click", () => writing?.abort());
of("examples").addEventListener("change", (event) => (field("prompt").value = event.target.value));
of("open").addEventListener("click", () => of("file").click());
of("file").addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  if (file) await open(file);
  target.value = ""; // the same again is a change, too
});
field("key").addEventListener("change", begin);
of("save").addEventListener("click", save);

view.palette = await tints();
begin();
