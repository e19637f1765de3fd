// The result in a line: forward passes saved, and how fast it was.

import { element } from "./element.js";
import { words } from "./words.js";

// `seconds`: how long the text took; 0 if that is unknown.
export function headlineOf({ stats }, seconds) {
  const cards = [card(times(stats.new_tokens / Math.max(1, stats.target_forwards)), words.fewer)];
  if (seconds) cards.push(card((stats.new_tokens / seconds).toFixed(1), words.perSecond));
  return cards;
}

// What stands there until the text has ended.
export const pendingHeadline = () => [words.fewer, words.perSecond].map((label) => card("…", label));

const times = (factor) => `${factor.toFixed(factor < 9.95 ? 2 : 1)} ×`;

const card = (value, label) => element("div", { class: "card" }, element("strong", {}, value), " ", element("span", {}, label));
