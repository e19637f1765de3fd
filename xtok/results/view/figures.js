// Forwards used and saved, tokens per forward over time, and where the time went.

import { drawn, element } from "./element.js";
import { words } from "./words.js";

const WIDTH = 440;
const PARTS = ["target", "forwards", "guessing", "aligning", "rest"];

export function figuresOf(runs, colours) {
  const ended = runs.filter((run) => run.end);
  return [
    figure(words.figures, table(ended)),
    figure(words.overTime, overTime(ended)),
    figure(words.timeParts, timeParts(ended)),
    ...ended.filter((run) => run.end.drafts.length).map((run) => figure(words.who, who(run, colours))),
  ];
}

const figure = (title, ...drawnThings) => element("figure", {}, element("figcaption", {}, title), ...drawnThings);

const cell = (text) => element("td", {}, String(text));

function rows(head, ...lines) {
  const titles = element("tr", {}, ...head.map((title) => element("th", { scope: "col" }, title)));
  const body = lines.map(([name, ...cells]) => element("tr", {}, element("th", { scope: "row" }, name), ...cells.map(cell)));
  return element("table", {}, element("thead", {}, titles), element("tbody", {}, ...body));
}

function table(runs) {
  const alone = runs.find((run) => run.kind === "alone");
  const lines = runs.map((run) => {
    const { stats } = run.end;
    const speed = alone && run !== alone && run.seconds ? `${(alone.seconds / run.seconds).toFixed(2)} ×` : "";
    const saved = stats.new_tokens - stats.target_forwards;
    return [words[run.kind], stats.target_forwards, saved, stats.tokens_per_forward.toFixed(2), run.seconds.toFixed(2), speed];
  });
  const { forwardsUsed, forwardsSaved, perForward, seconds, speed } = words;
  return rows(["", forwardsUsed, forwardsSaved, perForward, seconds, speed], ...lines);
}

function who(run, colours) {
  const lines = run.end.drafts.map((draft) => {
    const counts = [0, 0];
    for (const round of run.rounds)
      round.guessed.forEach((guess, number) => {
        if (guess.draft !== draft) return;
        counts[0] += 1;
        counts[1] += round.right.includes(number);
      });
    return [draft, ...counts];
  });
  const made = rows([words.draft, words.guessedCount, words.rightCount], ...lines);
  made.querySelectorAll("tbody th").forEach((name) => {
    const tinted = element("span", { class: "tint" }, name.textContent);
    tinted.style.background = colours.get(name.textContent) ?? "";
    name.replaceChildren(tinted);
  });
  return made;
}

// A bar for each round, and the mean of the last eight.
function overTime(runs) {
  const height = 130;
  const run = runs.find((one) => one.kind !== "alone") ?? runs[0];
  const counts = run.rounds.map((round) => round.tokens.length);
  const most = Math.max(2, ...counts);
  const at = (count) => height - 18 - (count / most) * (height - 26);
  const step = (WIDTH - 30) / counts.length;
  const picture = drawn("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": words.overTime });
  for (const count of new Set([1, most]))
    picture.append(
      drawn("line", { x1: 28, x2: WIDTH, y1: at(count), y2: at(count), stroke: "var(--line)", "stroke-dasharray": "3 3" }),
      drawn("text", { x: 22, y: at(count) + 4, "text-anchor": "end" }, String(count)),
    );
  counts.forEach((count, number) => {
    const bar = { x: 28 + number * step, y: at(count), width: Math.max(step - 1, step * 0.6), height: at(0) - at(count) };
    picture.append(drawn("rect", { ...bar, fill: "var(--target)", opacity: 0.55 }));
  });
  const means = counts.map((_, end) => {
    const last = counts.slice(Math.max(0, end - 7), end + 1);
    return last.reduce((sum, count) => sum + count, 0) / last.length;
  });
  const line = means.map((mean, number) => `${28 + (number + 0.5) * step},${at(mean)}`).join(" ");
  picture.append(drawn("polyline", { points: line, fill: "none", stroke: "var(--forwards)", "stroke-width": 2 }));
  return picture;
}

function partsOf(run) {
  const { stats } = run.end;
  const known = {
    target: stats.seconds_target,
    forwards: stats.seconds_draft_forwards,
    guessing: Math.max(0, stats.seconds_draft - stats.seconds_draft_forwards),
    aligning: stats.seconds_align,
  };
  const sum = Object.values(known).reduce((all, one) => all + one, 0);
  return { ...known, rest: Math.max(0, stats.seconds - sum) };
}

function timeParts(runs) {
  const all = runs.map(partsOf);
  const longest = Math.max(...all.map((parts) => PARTS.reduce((sum, part) => sum + parts[part], 0)), 1e-9);
  const picture = drawn("svg", { viewBox: `0 0 ${WIDTH} ${runs.length * 44}`, role: "img", "aria-label": words.timeParts });
  all.forEach((parts, row) => {
    let left = 0;
    picture.append(drawn("text", { x: 0, y: row * 44 + 12 }, words[runs[row].kind]));
    for (const part of PARTS) {
      const width = (parts[part] / longest) * WIDTH;
      const tip = drawn("title", {}, `${words[part]}: ${(parts[part] * 1000).toFixed(1)} ms`);
      picture.append(drawn("rect", { x: left, y: row * 44 + 17, width, height: 18, fill: `var(--${part})` }, tip));
      left += width;
    }
  });
  const keys = PARTS.map((part) => {
    const key = element("span", { class: "key" }, words[part]);
    key.style.setProperty("--colour", `var(--${part})`);
    return key;
  });
  return element("div", {}, picture, element("p", {}, ...keys));
}
