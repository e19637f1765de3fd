// A text: plain while it is written; then in rounds of tokens, each tinted by the draft that guessed it.

import { element, painted } from "./element.js";
import { words } from "./words.js";

export class Written {
  // `onChosen(number)` is called when a round is pointed at.
  constructor(onChosen) {
    this.onChosen = onChosen;
    this.rounds = [];
    this.clock = element("p", { class: "clock" });
    this.text = element("div", { class: "text" });
    this.box = element("article", { class: "written" }, this.clock, this.text);
    this.text.addEventListener("keydown", (event) => this.walk(event));
  }

  show({ stats }, rounds, colours, seconds) {
    this.rounds = rounds;
    this.text.replaceChildren(...rounds.map((round, number) => this.one(round, number, colours)));
    this.clock.textContent = words.clock(stats.new_tokens, stats.target_forwards, seconds);
  }

  one(round, number, colours) {
    const shown = element("span", { class: "one", tabindex: number ? "-1" : "0" });
    for (const token of round.tokens) shown.append(tinted(token, colours));
    shown.addEventListener("pointerenter", () => this.onChosen(number));
    shown.addEventListener("focus", () => this.onChosen(number));
    return shown;
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

function tinted(token, colours) {
  const shown = element("span", { class: "token" }, token.text);
  const colour = colours.get(token.draft);
  if (colour) {
    painted(shown, colour).classList.add("tint");
    shown.dataset.draft = token.draft;
  }
  return shown;
}

// The rounds of a trace, as `Generation.save_trace` writes it.
export function roundsOf(trace) {
  let start = 0;
  return trace.rounds.map((round) => {
    const tokens = trace.tokens.slice(start, (start += round.committed));
    return { tokens, guessed: round.guessed, right: round.right };
  });
}
