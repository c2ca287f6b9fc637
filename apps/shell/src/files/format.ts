// Formats sizes, times, counts, kinds and names.

import type { FileEntry } from "./api";

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const AGE_UNITS = [["day", 86_400], ["hour", 3_600], ["minute", 60], ["second", 1]] as const;
export const KIND_LABELS: Record<FileEntry["kind"], string> = {
  file: "file",
  directory: "directory",
  link: "link",
  special: "device, FIFO or socket",
  unknown: "unknown kind",
};
const relativeTime = new Intl.RelativeTimeFormat("en-GB");

export function formatBytes(bytes: number): string {
  let [value, unit] = [bytes, 0];
  while (value >= 1024 && unit < BYTE_UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  const maximumFractionDigits = unit > 0 && value < 10 ? 1 : 0;
  return `${value.toLocaleString(undefined, { maximumFractionDigits })} ${BYTE_UNITS[unit]}`;
}

export function formatCount(count: number, singular: string, plural = `${singular}s`): string {
  return `${count.toLocaleString()} ${count === 1 ? singular : plural}`;
}

/** Formats a time to the second. */
export function formatTimestamp(timestamp: string): string {
  return new Date(timestamp).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
}

const isToday = (date: Date) => date.toDateString() === new Date().toDateString();

/** Formats a time to the minute, with the date unless it is today. */
export function formatMoment(timestamp: string): string {
  const date = new Date(timestamp);
  return date.toLocaleString(undefined, { ...(isToday(date) ? {} : { dateStyle: "medium" }), timeStyle: "short" });
}

/** Formats a time as a date, or as a time of day if the date is today. */
export function formatDateOrTime(timestamp: string): string {
  const date = new Date(timestamp);
  return isToday(date) ? formatMoment(timestamp) : date.toLocaleDateString(undefined, { dateStyle: "medium" });
}

/** Formats how long ago a time was, such as "3 minutes ago". */
export function formatAge(timestamp: string): string {
  const seconds = Math.round((Date.now() - Date.parse(timestamp)) / 1000);
  if (seconds < 5) return "a moment ago";
  const [unit, length] = AGE_UNITS.find(([, length]) => seconds >= length) ?? ["second", 1];
  return relativeTime.format(-Math.floor(seconds / length), unit);
}

/**
 * Replaces control characters, invisible characters that can break lines or reorder text, and U+FEFF, with visible
 * ones.
 */
export function toVisibleText(text: string): string {
  return text.replace(/[\p{Cc}\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/gu, (character) => {
    const code = character.charCodeAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    return code === 0x7f ? "\u2421" : "\ufffd";
  });
}
