// Numbers as people read them. null and undefined are "–": not known is not zero.
const NONE = "–";
const known = (value) => typeof value === "number" && Number.isFinite(value);
const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const count = (value) => (known(value) ? grouped.format(value) : NONE);

export function seconds(value) {
  if (!known(value)) return NONE;
  if (value === 0) return "0 s";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 9.995) return `${value.toFixed(2)} s`;
  if (value < 99.95) return `${value.toFixed(1)} s`;
  return `${grouped.format(value)} s`;
}

export function rate(value) {
  if (!known(value) || value <= 0) return NONE;
  if (value < 9.995) return value.toFixed(2);
  return value < 99.95 ? value.toFixed(1) : grouped.format(value);
}

export const tokensPerSecond = (value) => (known(value) && value > 0 ? `${rate(value)} tok/s` : NONE);

const SIZES = ["B", "kB", "MB", "GB", "TB"];
export function bytes(value) {
  if (!known(value)) return NONE;
  let power = 0;
  while (value >= 999.5 && power < SIZES.length - 1) {
    value /= 1000;
    power += 1;
  }
  return `${power && value < 9.95 ? value.toFixed(1) : value.toFixed(0)} ${SIZES[power]}`;
}

export const bytesPerSecond = (value) => (known(value) ? `${bytes(value)}/s` : NONE);
export const percent = (value) => (known(value) ? `${value >= 99.5 || value === 0 ? value.toFixed(0) : value.toPrecision(2)} %` : NONE);
export const times = (value) => (known(value) ? `${value.toFixed(2)}x` : NONE);
export const significant = (value) => (known(value) ? Number(value.toPrecision(3)).toLocaleString("en-US", { maximumFractionDigits: 6 }) : NONE);

export const dollars = (value) => (known(value) ? `$${significant(value)}` : "not available");

// A value with the unit of a target or an alarm.
const UNITS = { "$": (text) => `$${text}`, x: (text) => `${text}x`, "1/s": (text) => `${text} per s`, "1/kWh": (text) => `${text} per kWh` };
export const withUnit = (value, unit) => (UNITS[unit] || ((text) => `${text} ${unit}`))(significant(value));

export const clock = (time) => (known(time) && time > 0 ? new Date(time * 1000).toLocaleTimeString([], { hour12: false }) : NONE);

export const date = (time) => (known(time) && time > 0 ? new Date(time * 1000).toLocaleString([], { hour12: false, month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit" }) : NONE);

export const sum = (values) => values.reduce((total, value) => total + (value || 0), 0);
