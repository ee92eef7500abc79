// What the page asks of the service. Whatever goes wrong becomes one sentence.

export class Problem extends Error {
  constructor(sentence, status = 0) {
    super(sentence);
    this.status = status;
  }
}

let key = "";
export const setKey = (value) => { key = value; };

export async function json(path, body, signal) {
  return (await ask(path, body, signal)).json();
}

// Server-sent events, as [name, data], while they come.
export async function* events(path, body, signal) {
  const response = await ask(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await read(reader, signal);
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const [name, data] = parsed(part);
        if (name === "error") throw new Problem(data.message);
        if (name) yield [name, data];
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function ask(path, body, signal) {
  const headers = { ...(body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    throw gone(error, signal);
  }
  if (!response.ok) throw new Problem(await sentence(response), response.status);
  return response;
}

async function read(reader, signal) {
  try {
    return await reader.read();
  } catch (error) {
    throw gone(error, signal);
  }
}

function gone(error, signal) {
  return signal?.aborted ? error : new Problem("The service does not answer. Is it still running?");
}

function parsed(part) {
  const lines = part.split("\n");
  const of = (field) => lines.filter((line) => line.startsWith(`${field}: `)).map((line) => line.slice(field.length + 2));
  const data = of("data").join("\n");
  return [of("event")[0], data && JSON.parse(data)];
}

async function sentence(response) {
  const plain = `The service answered with status ${response.status}.`;
  try {
    const reply = await response.json();
    const detail = Array.isArray(reply.detail) ? reply.detail[0]?.msg : reply.detail;
    const text = reply.error?.message ?? detail ?? plain;
    return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
  } catch {
    return plain;
  }
}
