// Small values that the browser keeps: for all tabs, or for this tab. Where storage is blocked or full, until the page is left.

const PREFIX = "kt.";

function kept(area, name, value) {
  try {
    if (value === undefined) return window[area].getItem(name);
    window[area].setItem(name, value);
  } catch { /* it is blocked or full */ }
  return null;
}

// Reads a value, or writes it where one is given.
export const inBrowser = (name, value) => kept("localStorage", PREFIX + name, value);
export const inSession = (name, value) => kept("sessionStorage", PREFIX + name, value);
