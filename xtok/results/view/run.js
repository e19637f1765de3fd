// A text, also while it is written: rounds of tokens, each tinted by the draft that guessed it.

import { element, painted } from "./element.js";
import { words } from "./words.js";

export class Run {
  // `kind`: "drafted", "alone" or "trace". `onChosen(run, number)` is called when a round is pointed at.
  constructor(kind, colours, onChosen) {
    this.kind = kind;
    this.colours = colours;
    this.onChosen = onChosen;
    this.rounds = [];
    this.seconds = 0;
    this.end = null;
    this.clock = element("p", { class: "clock" });
    this.text = element("div", { class: "text" });
    this.box = element("article", { class: `run ${kind}` }, element("h2", {}, words[kind]), this.clock, this.text);
    this.text.addEventListener("keydown", (event) => this.walk(event));
    this.count();
  }

  get ids() {
    return this.rounds.flatMap((round) => round.tokens.map((token) => token.id));
  }

  add(round, seconds) {
    const number = this.rounds.push(round) - 1;
    this.seconds = seconds;
    const shown = element("span", { class: "one", tabindex: number ? "-1" : "0" });
    for (const token of round.tokens) shown.append(this.tinted(token));
    shown.addEventListener("pointerenter", () => this.onChosen(this, number));
    shown.addEventListener("focus", () => this.onChosen(this, number));
    this.text.append(shown);
    this.count();
  }

  tinted(token) {
    const shown = element("span", { class: "token" }, token.text);
    const colour = this.colours.get(token.draft);
    if (colour) {
      painted(shown, colour).classList.add("tint");
      shown.dataset.draft = token.draft;
    }
    return shown;
  }

  ends(end, seconds) {
    this.end = end;
    if (this.kind === "trace" && end.prompt) this.text.before(element("p", { class: "prompt" }, end.prompt));
    this.seconds = seconds;
    this.count();
  }

  count() {
    const tokens = this.rounds.reduce((sum, round) => sum + round.tokens.length, 0);
    this.clock.textContent = words.clock(tokens, this.end?.stats.target_forwards ?? this.rounds.length, this.seconds);
  }

  // `until`: rounds after it are shown faintly; null for none.
  choose(number, until) {
    [...this.text.children].forEach((shown, position) => {
      shown.classList.toggle("chosen", position === number);
      shown.classList.toggle("later", until !== null && position > until);
      shown.tabIndex = position === Math.max(number, 0) ? 0 : -1;
    });
  }

  walk(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const shown = [...this.text.children];
    const next = shown[shown.indexOf(document.activeElement) + (step ?? 0)];
    if (!step || !next) return;
    event.preventDefault();
    next.focus();
  }
}

// The rounds of a trace, as `Generation.save_trace` writes it.
export function roundsOf(trace) {
  let start = 0;
  return trace.rounds.map((round) => {
    const tokens = trace.tokens.slice(start, (start += round.committed));
    return { tokens, guessed: round.guessed, right: round.right };
  });
}
