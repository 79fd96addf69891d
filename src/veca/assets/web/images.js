// From decoded pixels to what the network takes, as veca.preprocess does it to the bit: the short
// side scaled, both sides on the patch grid, bicubic with antialias in 8 bit, then normalised.

const BITS = 22; // of a weight; the sum of 255 times them fits 32

/** [height, width] that a photo is fitted to. */
export function fittedSize(height, width, size, patch) {
  const short = Math.min(height, width);
  return [height, width].map((side) => {
    const scaled = Math.floor((2 * side * size + short) / (2 * short));
    return patch * Math.max(1, Math.floor((2 * scaled + patch) / (2 * patch)));
  });
}

/** RGBA bytes on white as RGB bytes. */
export function onWhite(rgba) {
  const rgb = new Uint8ClampedArray((rgba.length / 4) * 3);
  for (let from = 0, to = 0; from < rgba.length; from += 4, to += 3) {
    const alpha = rgba[from + 3];
    for (let c = 0; c < 3; c++) {
      const value = rgba[from + c];
      rgb[to + c] = alpha === 255 ? value : (value * alpha + 255 * (255 - alpha)) / 255;
    }
  }
  return rgb;
}

function cubic(x) {
  const a = -0.5;
  x = Math.abs(x);
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  if (x < 2) return (((x - 5) * x + 8) * x - 4) * a;
  return 0;
}

/** For each place of the result: the first source place, and whole-number weights from there. */
function taps(source, result) {
  const scale = source / result;
  const stretch = Math.max(scale, 1); // shrinking widens the filter, which is the antialias
  const support = 2 * stretch;
  return Array.from({ length: result }, (_, place) => {
    const centre = (place + 0.5) * scale;
    const first = Math.max(0, Math.trunc(centre - support + 0.5));
    const last = Math.min(source, Math.trunc(centre + support + 0.5));
    const weights = new Float64Array(last - first);
    let sum = 0;
    for (let i = 0; i < weights.length; i++) {
      weights[i] = cubic((i + first - centre + 0.5) / stretch);
      sum += weights[i];
    }
    for (let i = 0; i < weights.length; i++) {
      const value = (weights[i] / sum) * 2 ** BITS;
      weights[i] = Math.trunc(value < 0 ? value - 0.5 : value + 0.5);
    }
    return [first, weights];
  });
}

/** One pass: `lines` of `source` pixels each become `result` long. Strides are in bytes. */
function pass(from, lines, source, result, lineIn, stepIn, lineOut, stepOut) {
  const to = new Uint8ClampedArray(lines * result * 3);
  const half = 2 ** (BITS - 1);
  taps(source, result).forEach(([first, weights], place) => {
    for (let line = 0; line < lines; line++) {
      const begin = line * lineIn + first * stepIn;
      const end = line * lineOut + place * stepOut;
      for (let c = 0; c < 3; c++) {
        let sum = half;
        for (let i = 0, at = begin + c; i < weights.length; i++, at += stepIn) {
          sum += from[at] * weights[i];
        }
        to[end + c] = Math.floor(sum / 2 ** BITS);
      }
    }
  });
  return to;
}

/** RGB bytes of height x width as RGB bytes of newHeight x newWidth. */
export function resize(rgb, height, width, newHeight, newWidth) {
  if (newWidth !== width) {
    rgb = pass(rgb, height, width, newWidth, width * 3, 3, newWidth * 3, 3);
  }
  if (newHeight !== height) {
    rgb = pass(rgb, newWidth, height, newHeight, 3, newWidth * 3, 3, newWidth * 3);
  }
  return rgb;
}

/** RGB bytes as float32 [3, height, width], normalised. */
export function normalised(rgb, mean, std) {
  const count = rgb.length / 3;
  const pixels = new Float32Array(rgb.length);
  for (let c = 0; c < 3; c++) {
    for (let i = 0; i < count; i++) {
      pixels[c * count + i] = (rgb[i * 3 + c] / 255 - mean[c]) / std[c];
    }
  }
  return pixels;
}
