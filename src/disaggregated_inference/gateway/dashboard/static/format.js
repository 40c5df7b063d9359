// Numbers as people read them. null and undefined are "–": not known is not zero.
const NONE = "–";
const known = (value) => typeof value === "number" && Number.isFinite(value);
const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const fine = new Intl.NumberFormat("en-US", { maximumFractionDigits: 6 });

// A node may report any number: none is longer than its place on the page.
const LONGEST = 1e9;
const whole = (value) => (value < LONGEST ? grouped.format(value) : value.toExponential(1));
const LAST_DAY_S = 8.64e12; // that a date can be

export const count = (value) => (known(value) ? whole(value) : NONE);

export function seconds(value) {
  if (!known(value)) return NONE;
  if (value === 0) return "0 s";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 9.995) return `${value.toFixed(2)} s`;
  if (value < 99.95) return `${value.toFixed(1)} s`;
  return `${whole(value)} s`;
}

export function rate(value) {
  if (!known(value) || value <= 0) return NONE;
  if (value < 9.995) return value.toFixed(2);
  return value < 99.95 ? value.toFixed(1) : whole(value);
}

export const tokensPerSecond = (value) => (known(value) && value > 0 ? `${rate(value)} tok/s` : NONE);

const SIZES = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];
export function bytes(value) {
  if (!known(value)) return NONE;
  let power = 0;
  while (value >= 999.5 && power < SIZES.length - 1) {
    value /= 1000;
    power += 1;
  }
  return `${power && value < 9.95 ? value.toFixed(1) : whole(value)} ${SIZES[power]}`;
}

export const bytesPerSecond = (value) => (known(value) ? `${bytes(value)}/s` : NONE);
export const times = (value) => (known(value) ? `${value < 1e6 ? value.toFixed(2) : value.toExponential(1)}x` : NONE);
export const significant = (value, digits = 3) => (!known(value) ? NONE : value >= LONGEST ? value.toExponential(digits - 1) : fine.format(Number(value.toPrecision(digits))));

// Not "$0" for what is little, but not nothing.
export const dollars = (value) => (!known(value) ? "not available" : value > 0 && value < 1e-6 ? "< $0.000001" : `$${significant(value)}`);

// Energy is in joules everywhere.
const JOULES = ["J", "kJ", "MJ", "GJ", "TJ"];
export function joules(value) {
  if (!known(value)) return "not available";
  let power = 0;
  while (value >= 999.5 && power < JOULES.length - 1) {
    value /= 1000;
    power += 1;
  }
  return `${significant(value)} ${JOULES[power]}`;
}

// A value with the unit of a target or an alarm. One that is not the goal, or not 100 %, is not rounded to it.
const UNITS = { x: (text) => `${text}x`, "1/s": (text) => `${text} per s`, "1/kWh": (text) => `${text} per kWh` };
export function withUnit(value, unit, goal) {
  const limits = unit === "%" ? [goal, 100] : [goal];
  const digits = [3, 4, 5, 6, 7].find((each) => !limits.some((limit) => value !== limit && Number(value.toPrecision(each)) === limit)) || 8;
  return unit === "$" ? dollars(value) : (UNITS[unit] || ((text) => `${text} ${unit}`))(significant(value, digits));
}

// Made once, since to make one costs more than to use it often. "h23": midnight is 00, not 24.
export const momentFormat = (options) => new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23", ...options });
const CLOCK = momentFormat({ second: "2-digit" });
const DATE = momentFormat({ month: "short", day: "numeric", second: "2-digit" });
const written = (format, time) => (known(time) && time > 0 && time < LAST_DAY_S ? format.format(time * 1000) : NONE);

export const clock = (time) => written(CLOCK, time);
export const date = (time) => written(DATE, time);

export const sum = (values) => values.reduce((total, value) => total + (value || 0), 0);
