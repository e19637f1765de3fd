// The page: asks for texts, shows them as they come, and steps through them.

import { element } from "./element.js";
import { figuresOf } from "./figures.js";
import { Run, roundsOf } from "./run.js";
import { about, race, Refused, tints } from "./server.js";
import { treeOf } from "./tree.js";
import { language, words } from "./words.js";

const of = (id) => document.getElementById(id);
const form = of("ask");
const field = (name) => form.elements[name];
const RETRY = 1000;

let served = null; // what the server last told of itself
let palette = [];
let colours = new Map();
let runs = [];
let chosen = null;
let writing = null;
let again;

// words

document.documentElement.lang = language;
for (const told of document.querySelectorAll("[data-word]")) told.prepend(words[told.dataset.word]);
of("place").setAttribute("aria-label", words.place);

// Said once: who hears the page would hear it again and again.
const say = (told, wrong = false) => {
  if (of("status").textContent !== told) of("status").textContent = told;
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

// Says why nothing is served, and asks again: where that is the key, when it is given.
function wait(error) {
  if (error.status === 401) {
    of("key").hidden = false;
    say(field("key").value ? words.wrongKey : words.locked, true);
    return;
  }
  const told = { loading: words.loading, broken: error.message }[error.code] ?? words.gone;
  say(told, error.code !== "loading");
  again = setTimeout(begin, RETRY);
}

// asking

function asked() {
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
  const { path, body } = asked();
  show(["drafted", ...(body.alone ? ["alone"] : [])], body.drafts);
  const byKind = new Map(runs.map((run) => [run.kind, run]));
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
    else say(runs[0].rounds.length ? words.lost : words.gone, true);
  } finally {
    busy(false);
  }
  conclude();
}

function busy(is) {
  of("write").disabled = is || !served;
  of("stop").disabled = !is;
}

// showing

function show(kinds, drafts) {
  colours = paletteOf(drafts);
  runs = kinds.map((kind) => new Run(kind, colours, choose));
  chosen = null;
  of("runs").replaceChildren(...runs.map((run) => run.box));
  of("verdict").textContent = "";
  of("verdict").className = "";
  of("round").hidden = of("figures").hidden = true;
  of("save").disabled = true;
  legend(drafts);
}

const paletteOf = (drafts) => new Map(drafts.map((draft, number) => [draft, palette[number % palette.length]]));

function legend(drafts) {
  const keys = drafts.map((draft) => {
    const key = element("span", { class: "tint" }, draft);
    key.style.background = colours.get(draft) ?? "";
    return key;
  });
  of("legend").replaceChildren(...keys, element("span", { class: "own" }, words.ownPick));
  of("legend").hidden = false;
}

// What is to be said when no more comes: whether the two are the same, by their ids.
function conclude() {
  const ended = runs.filter((run) => run.end);
  if (ended.length) {
    of("figures").replaceChildren(...figuresOf(runs, colours));
    of("figures").hidden = false;
  }
  of("save").disabled = !runs[0]?.end;
  if (runs.length === 2 && runs[0].rounds.length) verdict(...runs);
}

function verdict(drafted, alone) {
  const [one, other] = [drafted.ids, alone.ids];
  const differs = one.findIndex((id, place) => id !== other[place]);
  const same = differs < 0 && one.length === other.length;
  const known = drafted.end && alone.end;
  of("verdict").className = !known ? "" : same ? "right" : "wrong";
  const place = differs < 0 ? Math.min(one.length, other.length) : differs;
  const told = !known ? words.unknown : same ? words.yes : words.no(place + 1);
  of("verdict").textContent = known ? [told, ...aboutTies(drafted, alone, same, place)].join(words.stop) : told;
}

// Near-ties: where two texts part in half precision without fixed shapes, and where model.generate might part from both.
function aboutTies(drafted, alone, same, place) {
  const ties = drafted.end.stats.near_ties; // null where nothing says so
  if (same && ties?.length) return [words.ties(ties.length, ties[0].position + 1, ties[0].margin)];
  if (same) return ties && drafted.end.seed === null ? [words.noTies] : [];
  const tie = [...(ties ?? []), ...(alone.end.stats.near_ties ?? [])].find((one) => one.position === place);
  return tie ? [words.parted(tie.margin)] : [];
}

function choose(run, number, stepping = false) {
  for (const other of runs) other.choose(other === run ? number : -1, stepping && other === run ? number : null);
  chosen = { run, number };
  const round = run.rounds[number];
  of("round").hidden = false;
  of("round").querySelector("h2").textContent = words.round(number + 1, run.rounds.length, words[run.kind]);
  of("told").textContent = words.told(round.guessed.length, round.right.length, round.tokens.length);
  of("tree").replaceChildren(round.guessed.length ? treeOf(round, colours) : words.nothing);
  of("place").max = run.rounds.length - 1;
  of("place").value = number;
  of("place").setAttribute("aria-valuetext", words.round(number + 1, run.rounds.length, words[run.kind]));
}

function step(by) {
  if (!chosen) return;
  const { run, number } = chosen;
  choose(run, Math.min(run.rounds.length - 1, Math.max(0, number + by)), true);
}

// traces

async function open(file) {
  let trace, rounds, figures;
  try {
    trace = JSON.parse(await file.text());
    rounds = roundsOf(trace);
    figures = sketch(trace, rounds);
  } catch {
    say(words.broken, true);
    return;
  }
  writing?.abort();
  writing = null;
  show(["trace"], trace.drafts);
  for (const round of rounds) runs[0].add(round, trace.stats.seconds);
  runs[0].ends(trace, trace.stats.seconds);
  say(file.name);
  of("figures").replaceChildren(...figures);
  of("figures").hidden = of("save").disabled = false;
  if (rounds.length) choose(runs[0], 0);
}

// All that is drawn of a trace, to see whether it is one before anything is shown. Throws where it is none.
function sketch(trace, rounds) {
  const tried = new Run("trace", new Map(), () => {});
  for (const round of rounds) {
    tried.add(round, trace.stats.seconds);
    treeOf(round, new Map());
  }
  tried.ends(trace, trace.stats.seconds);
  return figuresOf([tried], paletteOf(trace.drafts));
}

function save() {
  const link = element("a", { download: "trace.json" });
  link.href = URL.createObjectURL(new Blob([JSON.stringify(runs[0].end)], { type: "application/json" }));
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
of("previous").addEventListener("click", () => step(-1));
of("next").addEventListener("click", () => step(1));
of("place").addEventListener("input", (event) => chosen && choose(chosen.run, Number(event.target.value), true));

palette = await tints();
begin();
