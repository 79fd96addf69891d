// What is drawn of features: their main directions as colours, and cosines with one of them.

const DIRECTIONS = 3;
const SPARE = 3; // directions carried along, with which the first three settle sooner
const ROUNDS = 16;

/** Features [count, width] as RGBA bytes: their three main directions, each over its own range. */
export function colours(features, count, width) {
  const centred = withoutMean(features, count, width);
  const directions = mainDirections(centred, count, width);
  const rgba = new Uint8ClampedArray(count * 4).fill(255);
  for (let c = 0; c < DIRECTIONS; c++) {
    const along = times(centred, count, width, directions[c]);
    const sorted = Float32Array.from(along).sort();
    const low = quantile(sorted, 0.01);
    const range = quantile(sorted, 0.99) - low;
    for (let i = 0; i < count; i++) {
      rgba[i * 4 + c] = range > 0 ? (255 * (along[i] - low)) / range : 128;
    }
  }
  return rgba;
}

/** The cosine of every row of features with one of them. */
export function cosines(features, count, width, row) {
  const found = new Float32Array(count);
  const own = features.subarray(row * width, (row + 1) * width);
  const length = Math.sqrt(dot(own, own, 0, width));
  for (let i = 0; i < count; i++) {
    const other = features.subarray(i * width, (i + 1) * width);
    found[i] = dot(own, other, 0, width) / (length * Math.sqrt(dot(other, other, 0, width)) || 1);
  }
  return found;
}

function dot(a, b, offset, width) {
  let sum = 0;
  for (let i = 0; i < width; i++) sum += a[i] * b[offset + i];
  return sum;
}

function withoutMean(features, count, width) {
  const mean = new Float64Array(width);
  for (let i = 0; i < features.length; i++) mean[i % width] += features[i] / count;
  return features.map((value, i) => value - mean[i % width]);
}

/** The directions of most variance, by subspace iteration from a fixed start. */
function mainDirections(rows, count, width) {
  let seed = 1;
  const next = () => (seed = (seed * 16807) % 2147483647) / 2147483647 - 0.5;
  let found = Array.from({ length: DIRECTIONS + SPARE }, () =>
    Float64Array.from({ length: width }, next));
  for (let round = 0; round < ROUNDS; round++) {
    found = orthonormal(found.map((one) => across(rows, count, width, one)));
  }
  return found.map((one) => {
    // The sign of a direction is arbitrary: its largest entry is positive, as in Python.
    const largest = one.reduce((a, b) => (Math.abs(b) > Math.abs(a) ? b : a));
    return largest < 0 ? one.map((value) => -value) : one;
  });
}

function times(rows, count, width, direction) {
  return Float64Array.from({ length: count }, (_, i) => dot(direction, rows, i * width, width));
}

function across(rows, count, width, direction) {
  const along = times(rows, count, width, direction);
  const sum = new Float64Array(width);
  for (let i = 0; i < count; i++) {
    for (let j = 0; j < width; j++) sum[j] += along[i] * rows[i * width + j];
  }
  return sum;
}

function orthonormal(directions) {
  const found = [];
  for (const one of directions) {
    for (const other of found) {
      const shared = dot(one, other, 0, one.length);
      for (let i = 0; i < one.length; i++) one[i] -= shared * other[i];
    }
    const length = Math.sqrt(dot(one, one, 0, one.length)) || 1;
    found.push(one.map((value) => value / length));
  }
  return found;
}

function quantile(sorted, share) {
  const place = share * (sorted.length - 1);
  const below = Math.floor(place);
  const above = Math.min(below + 1, sorted.length - 1);
  return sorted[below] + (place - below) * (sorted[above] - sorted[below]);
}
