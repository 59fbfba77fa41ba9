// Colour scales, for light and for dark. Zero is the colour of the paper.

const RAMPS = {
  light: {
    sequential: ["#fbfaf7", "#d5e3e0", "#93bfc6", "#4c8fae", "#23598c", "#132a55"],
    diverging: ["#6e1a1f", "#b8423b", "#e39a80", "#fbfaf7", "#8fb7d6", "#3a76b0", "#173b6e"],
  },
  dark: {
    sequential: ["#17191d", "#1f3a4d", "#23677a", "#3f9a8b", "#9bc777", "#f6e97c"],
    diverging: ["#ffb59c", "#e0644f", "#7d2f2e", "#17191d", "#254a78", "#4d8fd1", "#b5dcff"],
  },
};

const darkness = window.matchMedia("(prefers-color-scheme: dark)");
const known = new Map(); // what was looked up in the present theme
darkness.addEventListener("change", () => known.clear());

function remembered(name, find) {
  if (!known.has(name)) known.set(name, find());
  return known.get(name);
}

/** 256 colours [r, g, b] of a scale in the present theme. */
function palette(kind) {
  return remembered(`palette ${kind}`, () => {
    const stops = RAMPS[darkness.matches ? "dark" : "light"][kind].map(channels);
    return Array.from({ length: 256 }, (_, i) => {
      const place = (i / 255) * (stops.length - 1);
      const low = Math.min(Math.floor(place), stops.length - 2);
      return stops[low].map((c, k) => Math.round(c + (stops[low + 1][k] - c) * (place - low)));
    });
  });
}

function channels(hex) {
  return [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
}

/** A colour named in the style sheet, as text and lines use it. */
function ink(name) {
  return remembered(name, () =>
    getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(),
  );
}

/** The colour of a role, which is told; in the dark a third lighter, so that none of them sinks into the paper. */
function roleInk({ colour }) {
  const lighter = darkness.matches ? 1 / 3 : 0;
  return `rgb(${channels(colour).map((c) => Math.round(c + (255 - c) * lighter))})`;
}

const SCORE_INKS = 8; // in the style sheet

/** The name in the style sheet of a score's colour: by its place among all scores. */
function scoreInk(scores, score) {
  return `score-${Math.max(scores.indexOf(score), 0) % SCORE_INKS}`;
}

const RUN_INKS = 8; // in the style sheet

/** The name in the style sheet of a run's colour. */
function runInk(number) {
  return `run-${number % RUN_INKS}`;
}
