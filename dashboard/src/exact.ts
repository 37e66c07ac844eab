// JSON as text: numbers keep their digits and objects the order of their keys, which values of JavaScript do not.

const TOKENS = /"[^"\\]*(?:\\.[^"\\]*)*"|[{}[\],:]|[^\s{}[\],:"]+/g;
const LINE = 100;

/** The members of an object or array: each key ("" in an array) with the text of its value. */
export function members(text: string): [string, string][] {
  const found: [string, string][] = [];
  let depth = 0;
  let start = -1;
  let key = "";
  for (const { 0: token, index } of text.matchAll(TOKENS)) {
    const closes = token === "}" || token === "]";
    if (closes) depth -= 1;
    if (depth === 0 ? closes : depth === 1 && token === ",") {
      if (start >= 0) found.push([key, text.slice(start, index).trim()]);
      start = -1;
      key = "";
    } else if (depth === 1 && token === ":") {
      key = JSON.parse(text.slice(start, index));
      start = -1;
    } else if (depth === 1 && start < 0) start = index;
    if (token === "{" || token === "[") depth += 1;
  }
  return found;
}

/** What users put into jobs: kept as the text of its JSON. */
const OF_USERS = ["payload", "result", "progress"];

/** A document of the API. */
export function decode<T>(text: string): T {
  const document = JSON.parse(text);
  if (document && OF_USERS.some((name) => name in document)) {
    for (const [name, value] of members(text)) if (OF_USERS.includes(name)) document[name] = value === "null" ? null : value;
  }
  return document as T;
}

/** JSON on one line if it is short, else indented. */
export function indented(text: string): string {
  if (text.length <= LINE) return text;
  let made = "";
  let last = "";
  let depth = 0;
  const line = () => "\n" + "  ".repeat(depth);
  for (const [token] of text.matchAll(TOKENS)) {
    const begins = last === "{" || last === "[";
    if (token === "}" || token === "]") {
      depth -= 1;
      if (!begins) made += line();
    } else if (begins || last === ",") made += line();
    made += token === ":" ? ": " : token;
    if (token === "{" || token === "[") depth += 1;
    last = token;
  }
  return made;
}

const WORDS: Record<string, string> = { true: "True", false: "False", null: "None", ",": ", ", ":": ": " };

/** JSON as a Python literal. */
export function python(text: string): string {
  let made = "";
  for (const [token] of text.matchAll(TOKENS)) {
    // Of the escapes of JSON, Python does not know \/ and reads surrogates one by one.
    made += token[0] === '"' ? JSON.stringify(JSON.parse(token)) : (WORDS[token] ?? token);
  }
  return made;
}
