// The page: requests texts, shows them as they come, and opens and saves traces.

import { element } from "../view/element.js";
import { View } from "../view/view.js";
import { words } from "../view/words.js";
import { about, race, Refused, sample, tints } from "./server.js";

const of = (id) => document.getElementById(id);
const form = of("ask");
const field = (name) => form.elements[name];
const RETRY = 1000;

let served = null; // what the server last said about itself
let writing = null;
let again;

for (const labelled of document.querySelectorAll("[data-word]")) labelled.prepend(words[labelled.dataset.word]);
field("prompt").placeholder = words.placeholder;
const view = new View(of("view"), {});

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
  busy(false);
  of("served").textContent = words.served(served.model, served.drafts);
  of("as-chat").hidden = !served.chats;
  if (served.chats) field("penalty").value = 1; // chat models do without
  field("tokens").max = served.tokens;
  field("tokens").value = Math.min(field("tokens").value, served.tokens);
  for (const draft of served.drafts) {
    const box = element("input", { type: "checkbox", name: "draft", value: draft, checked: "" });
    of("drafts").append(element("label", {}, box, ` ${draft}`));
  }
  of("drafts").hidden = !served.drafts.length;
  of("examples").append(...served.prompts.map(example));
  of("examples").hidden = !served.prompts.length;
  if (!field("prompt").value) field("prompt").value = served.prompts[0] ?? "";
}

function example(prompt) {
  const made = element("button", { type: "button", class: "example", title: prompt }, prompt);
  made.addEventListener("click", () => (field("prompt").value = prompt));
  return made;
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

function requested(alone) {
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
      alone,
    },
  };
}

async function generate(alone) {
  const { path, body } = requested(alone);
  view.show(alone ? ["drafted", "alone"] : ["drafted"], body.drafts);
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
  of("generate").disabled = of("compare").disabled = is || !served;
  of("stop").hidden = !is;
}

// traces

// Shows a trace. `read` gives its JSON.
async function open(name, read) {
  try {
    view.showTrace(JSON.parse(await read()));
  } catch {
    say(words.broken, true);
    return;
  }
  writing?.abort();
  writing = null;
  say(name);
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
  if (served && of("stop").hidden) generate(event.submitter === of("compare"));
});
form.addEventListener("invalid", () => (of("advanced").open = true), true); // else its fields can't be pointed out
form.addEventListener("change", () => {
  const sampled = field("picks").value === "sampled";
  field("temperature").disabled = field("seed").disabled = !sampled;
});
of("stop").addEventListener("click", () => writing?.abort());
of("sample").addEventListener("click", () => open(words.sampleOpened, sample));
of("open").addEventListener("click", () => of("file").click());
of("file").addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  if (file) await open(file.name, () => file.text());
  target.value = ""; // the same again is a change, too
});
field("key").addEventListener("change", begin);
of("save").addEventListener("click", save);

view.tints = await tints();
begin();
