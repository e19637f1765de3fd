// The result in a line, and why it is so: forward passes saved, how much faster, and whether the texts are identical.

import { element } from "./element.js";
import { words } from "./words.js";

const FEW = 1.4; // tokens per forward pass below which the drafts were rarely right

// `alone`: the text by the target alone, or undefined. `same`: whether the two are identical.
export function headlineOf(drafted, alone, same) {
  const { stats } = drafted.end;
  const fewer = (alone?.end.stats.target_forwards ?? stats.new_tokens) / Math.max(1, stats.target_forwards);
  const cards = [card(times(fewer), words.fewer)];
  if (alone) {
    const speed = Number((alone.seconds / drafted.seconds).toFixed(2)); // as it is shown, for 0.999 is no slowdown
    cards.push(card(times(speed), speed < 1 ? words.slower : words.faster, speed < 1 ? "poor" : "good"));
    cards.push(same ? card("✓", words.identical, "good") : card("≠", words.different, "wrong"));
    cards.push(element("p", { id: "why" }, speed < 1 ? reason(drafted, alone, fewer) : words.pays(stats.tokens_per_forward, fewer / speed)));
  } else if (drafted.seconds) cards.push(card((stats.new_tokens / drafted.seconds).toFixed(1), words.perSecond));
  if (drafted.kind === "drafted" && !alone) cards.push(element("p", { id: "why" }, words.uncompared));
  return cards;
}

// What stands there until the texts have ended.
export const pendingHeadline = (compares) =>
  [words.fewer, ...(compares ? [words.faster, words.identical] : [words.perSecond])].map((label) => card("…", label));

const times = (factor) => `${factor.toFixed(factor < 9.95 ? 2 : 1)} ×`;

const card = (value, label, kind = "") =>
  element("div", { class: `card ${kind}` }, element("strong", {}, value), " ", element("span", {}, label));

// Why it took longer than the target alone.
function reason(drafted, alone, fewer) {
  const { stats } = drafted.end;
  if (!stats.proposed) return words.noGuesses;
  if (fewer < FEW) return words.rarelyRight(stats.accepted, stats.proposed, stats.tokens_per_forward);
  const perForward = (run) => run.end.stats.seconds_target / run.end.stats.target_forwards;
  const guessing = (stats.seconds_draft + stats.seconds_align) / stats.target_forwards;
  const checking = perForward(drafted) - perForward(alone);
  if (guessing < checking) return words.slowChecks(perForward(drafted) / perForward(alone));
  return words.slowGuesses(guessing / perForward(alone));
}
