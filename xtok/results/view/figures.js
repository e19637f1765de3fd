// Forward passes used and saved, tokens per forward pass over time, accepted tokens by draft, and where the time went.

import { drawn, element, painted } from "./element.js";
import { words } from "./words.js";

const WIDTH = 440;
const PARTS = ["target", "forwards", "guessing", "aligning", "rest"];

export function figuresOf(trace, rounds, colours, seconds) {
  const figures = [
    figure(words.figures, table(trace.stats, seconds)),
    figure(words.overTime, ...overTime(rounds, colours)),
    figure(words.timeParts, ...timeParts(trace.stats)),
  ];
  return trace.drafts.length ? [...figures, figure(words.who, who(trace.drafts, rounds, colours))] : figures;
}

const figure = (title, ...drawnThings) => element("figure", {}, element("figcaption", {}, title), ...drawnThings);

const picture = (height, label) => drawn("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label });

// What the colours of a chart mean: pairs of a text and a colour.
function legend(...pairs) {
  const keys = pairs.map(([text, colour]) => painted(element("span", { class: "key" }, text), colour));
  return element("p", { class: "keys" }, ...keys);
}

const cell = (text) => element("td", {}, ...[text].flat());

function rows(head, ...lines) {
  const titles = element("tr", {}, ...head.map((title) => element("th", { scope: "col" }, title)));
  const body = lines.map(([name, ...cells]) => element("tr", {}, element("th", { scope: "row" }, name), ...cells.map(cell)));
  return element("table", {}, element("thead", {}, titles), element("tbody", {}, ...body));
}

function table(stats, seconds) {
  const saved = stats.new_tokens - stats.target_forwards;
  const numbers = [stats.target_forwards, saved, stats.tokens_per_forward.toFixed(2), seconds.toFixed(2)];
  const head = [words.forwardsUsed, words.forwardsSaved, words.perForward, words.seconds];
  return rows(head, numbers.map(String));
}

function who(drafts, rounds, colours) {
  const guesses = rounds.flatMap((round) => round.guessed.map((guess, number) => [guess, round.right.includes(number)]));
  const lines = drafts.map((draft) => {
    const own = guesses.filter(([guess]) => guess.draft === draft);
    const accepted = own.filter(([, right]) => right).length;
    const rate = own.length ? `${Math.round((100 * accepted) / own.length)}%` : "–";
    const name = painted(element("span", { class: "tint" }, draft), colours.get(draft));
    return [name, String(own.length), String(accepted), rate];
  });
  return rows([words.draft, words.guessedCount, words.acceptedCount, words.rate], ...lines);
}

// A bar for each round, of the tokens of each draft and the target's own, and the mean of the last eight.
function overTime(written, colours) {
  const height = 130;
  const counts = written.map((round) => round.tokens.length);
  const most = Math.max(2, ...counts);
  const at = (count) => height - 8 - (count / most) * (height - 16);
  const step = (WIDTH - 30) / counts.length;
  const chart = picture(height, words.overTime);
  for (const count of new Set([1, most]))
    chart.append(
      drawn("line", { x1: 28, x2: WIDTH, y1: at(count), y2: at(count), stroke: "var(--line)", "stroke-dasharray": "3 3" }),
      drawn("text", { x: 22, y: at(count) + 4, "text-anchor": "end" }, String(count)),
    );
  written.forEach((round, number) => {
    const bar = drawn("g", { class: "bar" });
    round.tokens.forEach((token, below) => {
      const place = { x: 28 + number * step, y: at(below + 1), width: Math.max(step - 1.5, step * 0.6), height: at(0) - at(1) };
      bar.append(painted(drawn("rect", place), colours.get(token.draft) ?? "var(--own)"));
    });
    chart.append(bar);
  });
  const means = counts.map((_, end) => {
    const last = counts.slice(Math.max(0, end - 7), end + 1);
    return last.reduce((sum, count) => sum + count, 0) / last.length;
  });
  const line = means.map((mean, number) => `${28 + (number + 0.5) * step},${at(mean)}`).join(" ");
  chart.append(drawn("polyline", { points: line, fill: "none", stroke: "var(--mark)", "stroke-width": 2 }));
  return [chart, legend(...colours, [words.ownPick, "var(--own)"], [words.mean, "var(--mark)"])];
}

function partsOf(stats) {
  const known = {
    target: stats.seconds_target,
    forwards: stats.seconds_draft_forwards,
    guessing: Math.max(0, stats.seconds_draft - stats.seconds_draft_forwards),
    aligning: stats.seconds_align,
  };
  const sum = Object.values(known).reduce((all, one) => all + one, 0);
  return { ...known, rest: Math.max(0, stats.seconds - sum) };
}

function timeParts(stats) {
  const parts = partsOf(stats);
  const sum = Math.max(PARTS.reduce((all, part) => all + parts[part], 0), 1e-9);
  const chart = picture(22, words.timeParts);
  let left = 0;
  for (const part of PARTS) {
    const width = (parts[part] / sum) * WIDTH;
    const tip = drawn("title", {}, `${words[part]}: ${(parts[part] * 1000).toFixed(1)} ms`);
    chart.append(painted(drawn("rect", { x: left, y: 2, width, height: 18 }, tip), `var(--${part})`));
    left += width;
  }
  return [chart, legend(...PARTS.map((part) => [words[part], `var(--${part})`]))];
}
