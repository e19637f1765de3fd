// The page: requests texts, shows them as they come and who guessed them, and opens and saves traces.

import { element } from "../view/element.js";
import { View } from "../view/view.js";
import { words } from "../view/words.js";
import { about, Refused, sample, tints, written } from "./server.js";

const of = (id) => document.getElementById(id);
const form = of("ask");
const field = (name) => form.elements[name];
const RETRY = 1000;

let served = null; // what the server last said about itself
let writing = null;
let trace = null; // of what is shown, once it has ended
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

function requested() {
  const sampled = field("picks").value === "sampled";
  const chat = served.chats && field("chat").checked;
  const prompt = field("prompt").value;
  return {
    path: chat ? "v1/chat/completions" : "v1/completions",
    body: {
      ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
      max_tokens: Number(field("tokens").value),
      repetition_penalty: Number(field("penalty").value),
      temperature: sampled ? Number(field("temperature").value) : 0,
      ...(sampled ? { seed: Number(field("seed").value) } : {}),
      return_trace: true,
      stream: true,
    },
  };
}

async function generate() {
  const { path, body } = requested();
  view.begin();
  trace = null;
  const mine = (writing = new AbortController());
  busy(true);
  say(words.writing);
  let some = false;
  try {
    for await (const chunk of written(path, body, field("key").value, mine.signal)) {
      for (const { text, delta } of chunk.choices) {
        const piece = text ?? (delta.reasoning_content ?? "") + (delta.content ?? "");
        some ||= piece !== "";
        view.append(piece);
      }
      if (chunk.trace) {
        trace = chunk.trace;
        view.show(trace, (chunk.timings.prompt_ms + chunk.timings.predicted_ms) / 1000);
      }
    }
    say(words.done);
  } catch (error) {
    if (writing !== mine) return; // something else is shown by now
    if (mine.signal.aborted) say(words.stopped);
    else if (error instanceof Refused) say(words.failed(error.message), true);
    else say(some ? words.lost : words.gone, true);
  } finally {
    if (!trace) view.giveUp();
    busy(false);
  }
}

function busy(is) {
  of("generate").disabled = is || !served;
  of("stop").hidden = !is;
  of("save").disabled = !trace;
}

// traces

// Shows a trace. `read` gives its JSON.
async function open(name, read) {
  try {
    const opened = JSON.parse(await read());
    view.showTrace(opened);
    trace = opened;
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
  link.href = URL.createObjectURL(new Blob([JSON.stringify(trace)], { type: "application/json" }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href));
}

// wiring

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (served && of("stop").hidden) generate();
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
