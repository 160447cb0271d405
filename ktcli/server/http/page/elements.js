// Makes elements of the page. Text becomes text nodes only.

// Paths of icons on a grid of 24, drawn as strokes.
const ICONS = {
  attach: "M8 12.5l6.5-6.5a3 3 0 0 1 4.2 4.2l-8.5 8.5a5 5 0 0 1-7-7l8-8",
  check: "M5 13l4 4L19 7",
  close: "M6 6l12 12M18 6L6 18",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  down: "M12 5v14M6 13l6 6 6-6",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  export: "M12 15V4M7 9l5-5 5 5M4 15v5h16v-5",
  goOn: "M7 5v14l11-7z",
  import: "M12 4v11M7 10l5 5 5-5M4 15v5h16v-5",
  next: "M9 5l7 7-7 7",
  previous: "M15 5l-7 7 7 7",
  remove: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13M10.5 11v5.5M13.5 11v5.5",
  restore: "M4 12a8 8 0 1 0 2.5-5.8M4 4v5h5",
  retry: "M20 12a8 8 0 1 1-2.5-5.8M20 4v5h-5",
};

export function element(name, about = {}, ...children) {
  const { aria = {}, ...properties } = about;
  const made = Object.assign(document.createElement(name), properties);
  for (const [key, value] of Object.entries(aria)) made.setAttribute(key === "role" ? key : `aria-${key}`, value);
  made.append(...children);
  return made;
}

export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg"), path = document.createElementNS(space, "path");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

// A button whose text is its name, behind an icon.
export const button = (text, run, iconName = null) =>
  element("button", { type: "button", onclick: run }, ...(iconName ? [icon(iconName)] : []), element("span", { textContent: text }));

// A button that shows an icon only; its name is a tooltip, too.
export const iconButton = (iconName, name, run) =>
  element("button", { type: "button", className: "icon", title: name, onclick: run, aria: { label: name } }, icon(iconName));
