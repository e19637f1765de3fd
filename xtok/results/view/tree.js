// What was guessed in a round, as a tree: right guesses are tinted, the others have a dashed outline.

import { element, painted } from "./element.js";
import { words } from "./words.js";

const visible = (text) => text.replaceAll("\n", "↵").replaceAll(" ", "␣") || "∅";

export function treeOf(round, colours) {
  const right = new Set(round.right);
  const children = new Map();
  round.guessed.forEach((guess, number) => children.set(guess.parent, [...(children.get(guess.parent) ?? []), number]));

  const shown = (number) => {
    const guess = round.guessed[number];
    const made = element("span", { class: "guess", title: guess.draft ?? words.ownPick }, visible(guess.text));
    made.classList.add(right.has(number) ? "tint" : "wrong");
    if (right.has(number) && colours.has(guess.draft)) painted(made, colours.get(guess.draft));
    if (guess.probability !== null) made.append(element("small", {}, `${Math.round(guess.probability * 100)}%`));
    return made;
  };

  // a guess without rivals stands on the line of the one before it
  const line = (number) => {
    const made = element("li");
    let following = [number];
    while (following.length === 1) {
      made.append(shown(following[0]));
      following = children.get(following[0]) ?? [];
    }
    if (following.length) made.append(element("ul", {}, ...following.map(line)));
    return made;
  };

  return element("ul", {}, ...(children.get(-1) ?? []).map(line));
}
