// The mesh's own HTTP API; addresses are relative, so the page works behind any prefix.

export class ApiError extends Error {
  constructor(status, body) {
    super(body?.message ?? `the mesh answered ${status}`);
    this.status = status;
    this.code = body?.code ?? "unknown";
    this.retryAfter = body?.context?.retry_after_s ?? null;
  }
}

const TOKEN = "rankmesh-token"; // of this tab alone, gone when it closes
let hasAsked = false;

async function call(path, { body, timeoutMs } = {}) {
  const options = { headers: { accept: "application/json" }, signal: AbortSignal.timeout(timeoutMs), cache: "no-store" };
  if (body !== undefined) {
    options.method = "POST";
    options.headers["content-type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  const token = sessionStorage.getItem(TOKEN);
  if (token) options.headers.authorization = `Bearer ${token}`;
  const response = await fetch(path, options);
  if (response.status === 401 && !hasAsked) {
    hasAsked = true;
    const given = window.prompt("This mesh asks for a bearer token");
    if (given) sessionStorage.setItem(TOKEN, given.trim());
    if (given) return call(path, { body, timeoutMs });
  }
  const answer = await response.json().catch(() => null);
  if (!response.ok) throw new ApiError(response.status, answer);
  return answer;
}

export const fetchStatus = () => call("v1/status", { timeoutMs: 4000 });
export const fetchSamples = () => call("v1/samples", { timeoutMs: 20000 });
export const rank = (request) => call("v1/rank", { body: request, timeoutMs: 15000 });
