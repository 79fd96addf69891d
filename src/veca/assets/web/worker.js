// The network and all arithmetic, beside the page so that it never stands still.

import { colours, cosines } from './features.js';
import { fittedSize, normalised, onWhite, resize } from './images.js';

const RUNTIME = { wasm: 'ort.wasm.min.mjs', webgpu: 'ort.webgpu.min.mjs' };
const MOST_PIXELS = 2 ** 21; // more would run for minutes

let ort, session, about;
let photo = null; // {rgb, height, width}
let fitted = null; // the photo at one size: {size, height, width, pixels}
let seen = null; // what came out last

const here = (path) => new URL(path, import.meta.url).href;

async function download(path, say) {
  const answer = await fetch(here(path));
  if (!answer.ok) throw new Error(`${path} is missing (${answer.status})`);
  const total = Number(answer.headers.get('Content-Length'));
  const parts = [];
  let got = 0;
  for (const reader = answer.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) break;
    parts.push(value);
    got += value.length;
    say(`loading the network: ${(got / 1e6).toFixed(1)}${total ? ` of ${(total / 1e6).toFixed(1)}` : ''} MB`);
  }
  return new Uint8Array(await new Blob(parts).arrayBuffer());
}

async function start({ device, settings }) {
  about = settings;
  const say = (text) => postMessage({ type: 'loading', text });
  const model = await download(about.models[device].file, say);
  say('starting the runtime');
  ort = await import(here(`ort/${RUNTIME[device]}`));
  ort.env.logLevel = 'error';
  ort.env.wasm.wasmPaths = here('ort/');
  // More than one needs memory that is shared, which servers have to allow (COOP and COEP).
  const threads = self.crossOriginIsolated ? Math.min(4, navigator.hardwareConcurrency || 1) : 1;
  ort.env.wasm.numThreads = threads;
  if (device === 'webgpu') {
    const adapter = navigator.gpu && (await navigator.gpu.requestAdapter());
    if (!adapter) throw new Error('this browser gives no GPU');
  }
  await session?.release().catch(() => {}); // one that is broken cannot be released
  session = null;
  session = await ort.InferenceSession.create(model, { executionProviders: [device] });
  say('checking the network');
  postMessage({ type: 'ready', device, threads, agreement: await selfCheck() });
}

/** Does it compute here what Python computed? The cosine of the global embedding of one photo. */
async function selfCheck() {
  const answer = await fetch(here(about.check.photo));
  const [rgba, height, width] = await decode(await answer.blob());
  const before = [photo, fitted, seen];
  photo = { rgb: onWhite(rgba), height, width };
  fitted = null;
  try {
    await run({ size: about.check.size, cores: about.check.cores, keep: 1 });
    return cosines(new Float32Array([...about.check.cls, ...seen.cls]), 2, about.width, 0)[1];
  } finally {
    [photo, fitted, seen] = before;
  }
}

async function decode(blob) {
  const bitmap = await createImageBitmap(blob, {
    imageOrientation: 'from-image', colorSpaceConversion: 'none', premultiplyAlpha: 'none',
  });
  const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
  const context = canvas.getContext('2d', { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0);
  const { data, height, width } = context.getImageData(0, 0, bitmap.width, bitmap.height);
  return [data, height, width];
}

function fit(size) {
  if (fitted?.size === size) return;
  const [height, width] = fittedSize(photo.height, photo.width, size, about.patch_size);
  if (height * width > MOST_PIXELS) {
    throw new RangeError(`${width} x ${height} pixels are too many for a browser; choose a smaller size.`);
  }
  const rgb = resize(photo.rgb, photo.height, photo.width, height, width);
  fitted = { size, height, width, pixels: normalised(rgb, about.image_mean, about.image_std) };
}

async function run({ size, cores, keep }) {
  fit(size);
  const { height, width, pixels } = fitted;
  const inputs = {
    images: new ort.Tensor('float32', pixels, [1, 3, height, width]),
    cores: new ort.Tensor('int64', BigInt64Array.from([BigInt(cores)]), []),
    keep: new ort.Tensor('float32', Float32Array.from([keep]), []),
  };
  const began = performance.now();
  const out = await session.run(inputs, ['cls', 'patches']);
  const ms = performance.now() - began;
  const grid = [height / about.patch_size, width / about.patch_size];
  seen = { cls: out.cls.data, patches: out.patches.data, grid, ms };
}

async function look(request) {
  if (request.photo) {
    const { data, height, width } = request.photo;
    photo = { rgb: onWhite(data), height, width };
    fitted = seen = null;
  }
  await run(request);
  const [rows, columns] = seen.grid;
  const rgba = colours(seen.patches, rows * columns, about.width);
  postMessage({
    type: 'seen', id: request.id, ms: seen.ms, grid: seen.grid, rgba,
    pixels: [fitted.height, fitted.width],
  });
}

function similar({ id, row, column }) {
  if (!seen) return;
  const [rows, columns] = seen.grid;
  const place = Math.min(row, rows - 1) * columns + Math.min(column, columns - 1);
  const values = cosines(seen.patches, rows * columns, about.width, place);
  postMessage({ type: 'similar', id, grid: seen.grid, values });
}

function features() {
  postMessage({ type: 'features', cls: seen.cls, patches: seen.patches, grid: seen.grid });
}

const tasks = { start, look, similar, features };
let last = Promise.resolve();
onmessage = ({ data }) => {
  // One after the other: a session runs one picture at a time.
  last = last.then(() => tasks[data.type](data)).catch((error) => {
    // A size that is too large is no fault of the device.
    const size = error instanceof RangeError;
    postMessage({ type: 'failed', task: data.type, size, text: String(error.message || error) });
  });
};
