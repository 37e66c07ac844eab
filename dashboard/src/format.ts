// Numbers, times and text as people read them.

const whole = new Intl.NumberFormat("en");
const MINUTE = 60;
const HOUR = 3_600;
const DAY = 86_400;

export const number = (value: number): string => whole.format(value);

export function rate(perSecond: number | null | undefined): string {
  if (perSecond == null) return "–";
  return perSecond >= 10 ? whole.format(Math.round(perSecond)) : perSecond.toFixed(1);
}

/** A duration in at most two units. */
export function duration(seconds: number | null | undefined): string {
  if (seconds == null) return "–";
  const s = Math.max(0, seconds);
  if (s < 0.0995) return `${Math.round(s * 1000)} ms`;
  if (s < 9.95 && !Number.isInteger(s)) return `${s.toFixed(1)} s`;
  if (s < MINUTE) return `${Math.round(s)} s`;
  if (s < HOUR) return pair(s, MINUTE, "min", 1, "s");
  if (s < DAY) return pair(s, HOUR, "h", MINUTE, "min");
  return pair(s, DAY, "d", HOUR, "h");
}

function pair(s: number, big: number, bigName: string, small: number, smallName: string): string {
  const first = Math.floor(s / big);
  const rest = Math.floor((s - first * big) / small);
  return rest ? `${first} ${bigName} ${rest} ${smallName}` : `${first} ${bigName}`;
}

export const percent = (part: number | null | undefined): string => (part == null ? "–" : `${Math.round(part * 100)} %`);

/** A moment in the reader's zone, to the millisecond, with the zone. */
export const exact = (at: number): string =>
  new Date(at * 1000).toLocaleString(undefined, {
    year: "numeric",
    month: "short",
    day: "numeric",
    hour: "2-digit",
    minute: "2-digit",
    second: "2-digit",
    fractionalSecondDigits: 3,
    timeZoneName: "short",
  });

export const clock = (at: number): string =>
  new Date(at * 1000).toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export function relative(at: number, now: number): string {
  const seconds = now - at;
  if (Math.abs(seconds) < 1) return "now";
  return seconds > 0 ? `${duration(Math.max(1, Math.round(seconds)))} ago` : `in ${duration(Math.max(1, Math.round(-seconds)))}`;
}

const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff\ufff9-\uffff]/g;

/** Text with its invisible characters made visible: a control character or a mark that turns the direction must not
 *  change how the rest is read. */
export const visible = (text: string): string =>
  text.replace(INVISIBLE, (each) => `\\u${each.charCodeAt(0).toString(16).padStart(4, "0")}`);

export function shortened(text: string, most: number): string {
  return text.length <= most ? text : `${text.slice(0, most)}…`;
}

/** Text as one word of a shell. */
export const shell = (text: string): string => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);

export const plural = (count: number, one: string, many = `${one}s`): string => `${number(count)} ${count === 1 ? one : many}`;
