// What was generated: the text, the chosen round with its guesses, and figures. The view knows nothing of a server.

import { element, painted } from "./element.js";
import { figuresOf } from "./figures.js";
import { headlineOf, pendingHeadline } from "./headline.js";
import { treeOf } from "./tree.js";
import { language, words } from "./words.js";
import { roundsOf, Written } from "./written.js";

export class View {
  // `parent`: the element that the view fills. `tints`: the colours of kinds of drafts.
  constructor(parent, tints) {
    this.tints = tints;
    this.colours = new Map();
    this.written = null;
    this.chosen = 0;
    this.headline = element("section", { id: "headline", hidden: "" });
    this.legend = element("p", { id: "legend", hidden: "" });
    this.texts = element("div");
    this.ties = element("p", { id: "ties", role: "status" });
    this.title = element("h2");
    this.position = element("input", { type: "range", id: "position", min: 0, value: 0, "aria-label": words.position });
    this.counts = element("p", { id: "counts", "aria-live": "polite" });
    this.tree = element("div", { id: "tree" });
    const row = element("div", { class: "row" }, this.title, this.button("previous", -1), this.position, this.button("next", 1));
    this.round = element("section", { id: "round", hidden: "" }, row, this.counts, this.tree);
    this.figures = element("section", { id: "figures", hidden: "" });
    this.position.addEventListener("input", () => this.choose(Number(this.position.value), true));
    this.hint = element("p", { id: "hint", hidden: "" }, words.hint);
    parent.replaceChildren(this.headline, this.ties, this.legend, this.texts, this.hint, this.round, this.figures);
    document.documentElement.lang = language;
  }

  button(name, by) {
    const made = element("button", { type: "button", id: name }, words[name]);
    made.addEventListener("click", () => this.step(by));
    return made;
  }

  // An empty text, to which pieces are appended until all of it is shown.
  begin() {
    this.written = new Written((number) => this.choose(number));
    this.texts.replaceChildren(this.written.box);
    this.ties.textContent = "";
    this.headline.replaceChildren(...pendingHeadline());
    this.headline.hidden = false;
    this.legend.hidden = this.hint.hidden = this.round.hidden = this.figures.hidden = true;
  }

  append(piece) {
    this.written.text.append(piece);
  }

  // To be called when an unfinished text has ended.
  giveUp() {
    this.headline.hidden = true;
  }

  // A trace, as `Generation.to_dict` has it, of a text that took so many seconds. All of it is drawn before anything is shown,
  // and throws if it is no trace.
  show(trace, seconds) {
    const rounds = roundsOf(trace);
    const colours = this.coloursOf(trace.drafts);
    const keys = trace.drafts.map((draft) => painted(element("span", { class: "tint" }, draft), colours.get(draft)));
    const figures = figuresOf(trace, rounds, colours, seconds);
    const headline = headlineOf(trace, seconds);
    for (const round of rounds) treeOf(round, colours);
    const written = new Written((number) => this.choose(number));
    written.show(trace, rounds, colours, seconds);

    [this.written, this.colours] = [written, colours];
    this.texts.replaceChildren(written.box);
    this.legend.replaceChildren(...keys, element("span", { class: "own" }, words.ownPick));
    this.headline.replaceChildren(...headline);
    this.figures.replaceChildren(...figures);
    this.legend.hidden = this.headline.hidden = this.hint.hidden = this.figures.hidden = false;
    this.round.hidden = true;
    const ties = trace.stats.near_ties;
    this.ties.textContent = ties?.length ? words.ties(ties.length, ties[0].position + 1, ties[0].margin) : "";
  }

  // A trace of a file, with its prompt and its first round.
  showTrace(trace) {
    this.show(trace, trace.stats.seconds);
    if (trace.prompt) this.written.text.before(element("p", { class: "prompt" }, trace.prompt));
    if (this.written.rounds.length) this.choose(0);
  }

  // `stepping`: the rounds after it are shown faintly, as not there yet.
  choose(number, stepping = false) {
    const { rounds } = this.written;
    const round = rounds[number];
    const name = words.round(number + 1, rounds.length);
    this.written.choose(number, stepping ? number : null);
    this.chosen = number;
    this.round.hidden = false;
    this.title.textContent = name;
    this.counts.textContent = words.counts(round.guessed.length, round.right.length, round.tokens.length);
    this.tree.replaceChildren(round.guessed.length ? treeOf(round, this.colours) : words.nothing);
    this.position.max = rounds.length - 1;
    this.position.value = number;
    this.position.setAttribute("aria-valuetext", name);
  }

  step(by) {
    this.choose(Math.min(this.written.rounds.length - 1, Math.max(0, this.chosen + by)), true);
  }

  // Each kind has a colour of its own; a name of no known kind is a model's.
  coloursOf(drafts) {
    const kind = (draft) => draft.replace(/ \(\d+\)$/, "");
    return new Map(drafts.map((draft) => [draft, this.tints[kind(draft)] ?? this.tints["draft model"]]));
  }
}
