// What was generated: the texts, the chosen round with its guesses, and figures. The view knows nothing of a server.

import { element, painted } from "./element.js";
import { figuresOf } from "./figures.js";
import { headlineOf, pendingHeadline } from "./headline.js";
import { Run, roundsOf } from "./run.js";
import { treeOf } from "./tree.js";
import { language, words } from "./words.js";

export class View {
  // `parent`: the element that the view fills. `tints`: the colours of kinds of drafts.
  constructor(parent, tints) {
    this.tints = tints;
    this.colours = new Map();
    this.runs = [];
    this.chosen = null;
    this.headline = element("section", { id: "headline", hidden: "" });
    this.legend = element("p", { id: "legend", hidden: "" });
    this.texts = element("div", { id: "runs" });
    this.verdict = element("p", { id: "verdict", role: "status" });
    this.title = element("h2");
    this.position = element("input", { type: "range", id: "position", min: 0, value: 0, "aria-label": words.position });
    this.counts = element("p", { id: "counts", "aria-live": "polite" });
    this.tree = element("div", { id: "tree" });
    const row = element("div", { class: "row" }, this.title, this.button("previous", -1), this.position, this.button("next", 1));
    this.round = element("section", { id: "round", hidden: "" }, row, this.counts, this.tree);
    this.figures = element("section", { id: "figures", hidden: "" });
    this.position.addEventListener("input", () => this.choose(this.chosen.run, Number(this.position.value), true));
    const hint = element("p", { id: "hint" }, words.hint);
    parent.replaceChildren(this.headline, this.verdict, this.legend, this.texts, hint, this.round, this.figures);
    document.documentElement.lang = language;
  }

  button(name, by) {
    const made = element("button", { type: "button", id: name }, words[name]);
    made.addEventListener("click", () => this.step(by));
    return made;
  }

  // Empty texts of some kinds, to which rounds are added.
  show(kinds, drafts) {
    this.colours = this.coloursOf(drafts);
    this.runs = kinds.map((kind) => new Run(kind, this.colours, (run, number) => this.choose(run, number)));
    this.chosen = null;
    this.texts.replaceChildren(...this.runs.map((run) => run.box));
    this.say("");
    this.headline.replaceChildren(...pendingHeadline(kinds.length > 1));
    this.headline.hidden = false;
    this.round.hidden = this.figures.hidden = true;
    const keys = drafts.map((draft) => painted(element("span", { class: "tint" }, draft), this.colours.get(draft)));
    this.legend.replaceChildren(...keys, element("span", { class: "own" }, words.ownPick));
    this.legend.hidden = false;
  }

  // A trace, as `Generation.to_dict` has it. All of it is drawn before anything is shown, and throws if it is no trace.
  showTrace(trace) {
    const rounds = roundsOf(trace);
    const seconds = trace.stats.seconds;
    const fill = (run) => {
      for (const round of rounds) run.add(round, seconds);
      run.ends(trace, seconds);
    };
    const tried = new Run("trace", new Map(), () => {});
    fill(tried);
    for (const round of rounds) treeOf(round, new Map());
    figuresOf([tried], this.coloursOf(trace.drafts));

    this.show(["trace"], trace.drafts);
    fill(this.runs[0]);
    this.conclude();
    const ties = trace.stats.near_ties;
    if (ties?.length) this.say("", "", words.ties(ties.length, ties[0].position + 1, ties[0].margin));
    if (rounds.length) this.choose(this.runs[0], 0);
  }

  // To be called when no more rounds come: draws the figures, and says whether two texts are the same, by their ids.
  conclude() {
    const [drafted, alone] = this.runs;
    if (drafted.rounds.length && alone && !(drafted.end && alone.end)) this.say(words.unknown);
    this.headline.hidden = !this.runs.every((run) => run.end);
    if (!this.headline.hidden) {
      const same = alone && this.compare(drafted, alone);
      this.headline.replaceChildren(...headlineOf(drafted, alone, same));
    }
    if (!this.runs.some((run) => run.end)) return;
    this.figures.replaceChildren(...figuresOf(this.runs, this.colours));
    this.figures.hidden = false;
  }

  // Whether both have the same ids, which is said, too.
  compare(drafted, alone) {
    const [one, other] = [drafted.ids, alone.ids];
    const differs = one.findIndex((id, position) => id !== other[position]);
    const same = differs < 0 && one.length === other.length;
    const position = differs < 0 ? Math.min(one.length, other.length) : differs;
    this.say(same ? words.yes : words.no(position + 1), same ? "right" : "wrong", aboutTies(drafted, alone, same, position));
    return same;
  }

  say(sentence, kind = "", more = "") {
    const space = sentence && more && words.space;
    this.verdict.replaceChildren(element("span", {}, sentence), space, more);
    this.verdict.className = kind;
  }

  // `stepping`: the rounds after it are shown faintly, as not there yet.
  choose(run, number, stepping = false) {
    for (const other of this.runs) other.choose(other === run ? number : -1, stepping && other === run ? number : null);
    this.chosen = { run, number };
    const round = run.rounds[number];
    const name = words.round(number + 1, run.rounds.length, words[run.kind]);
    this.round.hidden = false;
    this.title.textContent = name;
    this.counts.textContent = words.counts(round.guessed.length, round.right.length, round.tokens.length);
    this.tree.replaceChildren(round.guessed.length ? treeOf(round, this.colours) : words.nothing);
    this.position.max = run.rounds.length - 1;
    this.position.value = number;
    this.position.setAttribute("aria-valuetext", name);
  }

  step(by) {
    const { run, number } = this.chosen;
    this.choose(run, Math.min(run.rounds.length - 1, Math.max(0, number + by)), true);
  }

  // Each kind has a colour of its own; a name of no known kind is a model's.
  coloursOf(drafts) {
    const kind = (draft) => draft.replace(/ \(\d+\)$/, "");
    return new Map(drafts.map((draft) => [draft, this.tints[kind(draft)] ?? this.tints["draft model"]]));
  }
}

// Near-ties: at which token two texts differ in half precision without fixed shapes, or model.generate may give another one.
function aboutTies(drafted, alone, same, position) {
  const ties = drafted.end.stats.near_ties; // null if they are unknown
  if (same && ties?.length) return words.ties(ties.length, ties[0].position + 1, ties[0].margin);
  if (same) return ties && drafted.end.seed === null ? words.noTies : "";
  const tie = [...(ties ?? []), ...(alone.end.stats.near_ties ?? [])].find((one) => one.position === position);
  return tie ? words.differ(tie.margin) : "";
}
