// Colours of groups and requests, chosen in OKLCH so that all look equally strong, in light and in dark.

// Hue and added lightness of glazed tiles: turquoise, saffron, cobalt, terracotta, plum, leaf, rose, sky.
const GLAZES = [[195, 0], [80, 0.13], [262, -0.06], [38, 0.03], [325, -0.02], [140, 0.05], [5, 0.05], [230, 0.1]];
const GOLDEN_ANGLE = 137.508;

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** The colours of the map for the theme now; every colour is [red, green, blue], 0 to 255. */
export function palette() {
  const dark = isDark();
  const ground = dark ? [33, 41, 46] : [233, 230, 222];
  const light = dark ? 0.72 : 0.6;
  const grey = dark ? [104, 116, 122] : [178, 180, 176];
  const group = (index) => {
    const [hue, lighter] = GLAZES[index % GLAZES.length];
    return oklch(light + lighter * (dark ? 0.6 : 1), 0.125, hue + 20 * Math.floor(index / GLAZES.length));
  };
  return {
    ground, // a slab that nobody has
    line: dark ? [245, 240, 225] : [25, 35, 40], // around the page that is looked at
    group: {
      used: group,
      cached: (index) => mix(group(index), ground, 0.42),
      free: (index) => mix(group(index), ground, 0.13),
    },
    request: {
      used: (id) => oklch(light + 0.06 * ((id % 3) - 1), 0.13, (id * GOLDEN_ANGLE + 195) % 360),
      cached: grey,
      free: mix(grey, ground, 0.25),
      other: mix(grey, ground, 1.6),
    },
  };
}

/** `share` of a colour, the rest of another; more than 1 goes beyond it. */
export function mix(colour, other, share) {
  return colour.map((value, i) => Math.round(Math.min(255, Math.max(0, other[i] + (value - other[i]) * share))));
}

/** A colour of OKLCH in sRGB: lightness 0 to 1, chroma, hue in degrees. */
function oklch(lightness, chroma, hue) {
  const a = chroma * Math.cos((hue * Math.PI) / 180);
  const b = chroma * Math.sin((hue * Math.PI) / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map(encode);
}

function encode(linear) {
  const value = Math.min(1, Math.max(0, linear));
  return Math.round(255 * (value <= 0.0031308 ? 12.92 * value : 1.055 * value ** (1 / 2.4) - 0.055));
}
