// The server's routes that the page uses: what is served, and a text as it is written.

export class Refused extends Error {
  constructor(status, error) {
    super(error?.message ?? `${status}`);
    this.status = status;
    this.code = error?.code;
  }
}

const permitted = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

async function answered(path, key, more = {}) {
  const answer = await fetch(path, { ...more, headers: { ...more.headers, ...permitted(key) } });
  if (answer.ok) return answer;
  const failure = await answer.json().catch(() => null);
  throw new Refused(answer.status, failure?.error);
}

export const tints = async () => (await answered("page/tints")).json();

export const sample = async () => (await answered("page/sample.json")).text();

// What is served. Throws `Refused` while that is loaded, or without the key, and what fetch throws.
export const about = async (key) => (await answered("v1/page", key)).json();

// The chunks of a text. Throws `Refused` if the server refuses or fails, and what fetch throws if it goes away.
export async function* written(path, body, key, signal) {
  const headers = { "Content-Type": "application/json" };
  const answer = await answered(path, key, { method: "POST", headers, body: JSON.stringify(body), signal });
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(500, chunk.error);
    yield chunk;
  }
  throw new TypeError("The stream ended early.");
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const lines = held.split("\n");
    held = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}
