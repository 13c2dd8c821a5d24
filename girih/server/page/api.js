// The server's paths. A key that was typed in is kept in this page's memory only.

let key = "";

export function setKey(value) {
  key = value;
}

/** What the server answered instead of what was asked for. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Fetch a path; throws `Refusal` with the server's own words. */
export async function ask(path, { body, signal } = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = { headers, signal };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  // a page whose address has a password in it may not ask for relative paths
  const response = await fetch(new URL(path, location.origin), options).catch((error) => {
    throw signal?.aborted ? error : new Refusal(0, "the server does not answer");
  });
  if (!response.ok) throw new Refusal(response.status, await reasonOf(response));
  return response;
}

async function reasonOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

/** Yield the objects of a stream of events until it ends. */
export async function* events(response) {
  const decoder = new TextDecoder();
  let rest = "";
  for await (const piece of pieces(response.body.getReader())) {
    const parts = (rest + decoder.decode(piece, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: ?/, "");
      if (data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw new Refusal(500, event.error.message);
      yield event;
    }
  }
}

async function* pieces(reader) {
  try {
    for (let next = await reader.read(); !next.done; next = await reader.read()) yield next.value;
  } finally {
    await reader.cancel();
  }
}
