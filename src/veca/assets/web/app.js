// The page: what is chosen, what is drawn. The network is in worker.js.

const $ = (id) => document.getElementById(id);
const DIALS = ['cores', 'keep', 'size'];
const MOST_PIXELS = 1e8;
const NAMES = { wasm: 'WebAssembly', webgpu: 'WebGPU' };
const RAMP = [[20, 18, 58], [91, 42, 134], [195, 61, 107], [246, 143, 70], [253, 246, 184]];

const about = await (await fetch('about.json')).json();
const worker = new Worker('worker.js', { type: 'module' });
let device = 'wasm';
let photo = null; // {data, height, width, bitmap}: what is shown
let sent = false; // whether the worker has it
let spot = [0.5, 0.5]; // down and across
let busy = false, again = false, id = 0;

function say(text = '') {
  $('message').textContent = text;
}

// ------------------------------------------------------------------------------------ the worker

const answers = {
  loading: ({ text }) => say(`${text} ...`),
  ready({ device: on, threads, agreement }) {
    if (on === 'webgpu' && !(agreement >= about.check.gate)) {
      fallBack(`it gave other numbers than Python, cosine ${agreement.toFixed(3)}`);
      return;
    }
    device = on;
    say(agreement >= about.check.gate ? '' : `On this machine the network differs from Python's `
      + `(cosine ${agreement.toFixed(3)}); take the numbers and pictures with care.`);
    $('device').textContent = NAMES[on];
    const how = on === 'webgpu' ? 'the GPU' : threads > 1 ? `${threads} threads` : 'one thread';
    $('device-what').textContent = `${how}; agrees ${agreement.toFixed(4)} with Python`;
    $('on').value = on;
    document.documentElement.dataset.ready = on;
    free();
  },
  seen({ ms, grid, rgba, pixels, id: which }) {
    $('ms').textContent = ms < 10 ? `${ms.toFixed(1)} ms` : `${Math.round(ms)} ms`;
    $('ms-what').textContent = `the network, on this machine, at ${pixels[1]} x ${pixels[0]}`;
    const count = grid[0] * grid[1];
    $('tokens').textContent = count.toLocaleString('en');
    const keep = Number($('keep').value);
    $('tokens-what').textContent = keep < 1
      ? `patches; about ${Math.round(count * keep).toLocaleString('en')} tokens go on`
      : 'patches, each a token';
    draw($('features'), grid, rgba);
    document.documentElement.dataset.seen = which;
    worker.postMessage({ type: 'similar', id: which, row: Math.floor(spot[0] * grid[0]),
      column: Math.floor(spot[1] * grid[1]) });
    free();
  },
  similar({ grid, values, id: which }) {
    const low = Math.min(...values), high = Math.max(...values);
    $('low').textContent = low.toFixed(2);
    $('high').textContent = high.toFixed(2);
    const rgba = new Uint8ClampedArray(values.length * 4).fill(255);
    values.forEach((value, i) => rgba.set(ramp((value - low) / (high - low || 1)), i * 4));
    draw($('similarity'), grid, rgba);
    document.documentElement.dataset.similar = which;
  },
  features(found) {
    waiting.splice(0).forEach((give) => give(found));
  },
  failed({ task, text, size }) {
    if (device === 'webgpu' && task !== 'similar' && !size) {
      fallBack(text);
      return;
    }
    say(task === 'start' ? `The network could not be loaded: ${text}. Reload the page to try again.` : text);
    free();
  },
};
worker.onmessage = ({ data }) => answers[data.type](data);
worker.onerror = () => say('This browser cannot run module workers; a newer one can.');

/** WebAssembly in place of WebGPU, for as long as the page is open. */
function fallBack(why) {
  $('run-on-why').textContent = `WebGPU is not used: ${why}.`;
  for (const option of $('on').options) option.disabled = option.value === 'webgpu';
  again = Boolean(photo);
  start('wasm');
}

function start(on) {
  device = on;
  busy = true;
  document.body.classList.add('busy');
  worker.postMessage({ type: 'start', device, settings: about });
}

function free() {
  busy = false;
  document.body.classList.toggle('busy', again);
  if (again) look();
}

/** Run with what is chosen now; while the last run goes on, once more after it. */
function look() {
  if (!photo) return;
  again = busy;
  if (busy) return;
  busy = true;
  document.body.classList.add('busy');
  const chosen = Object.fromEntries(DIALS.map((name) => [name, Number($(name).value)]));
  const { data, height, width } = photo;
  worker.postMessage({ type: 'look', id: ++id, ...chosen, photo: sent ? null : { data, height, width } });
  sent = true;
}

// ------------------------------------------------------------------------------------ pictures

function ramp(share) {
  const place = Math.max(0, Math.min(1, share)) * (RAMP.length - 1);
  const below = Math.min(Math.floor(place), RAMP.length - 2);
  return RAMP[below].map((value, c) => value + (place - below) * (RAMP[below + 1][c] - value));
}

function draw(canvas, [rows, columns], rgba) {
  canvas.width = columns;
  canvas.height = rows;
  canvas.style.aspectRatio = `${photo.width} / ${photo.height}`;
  canvas.getContext('2d').putImageData(new ImageData(rgba, columns, rows), 0, 0);
}

function drawPhoto() {
  const canvas = $('photo');
  const scale = Math.min(1, 900 / photo.width);
  canvas.width = Math.round(photo.width * scale);
  canvas.height = Math.max(1, Math.round(photo.height * scale));
  const context = canvas.getContext('2d');
  context.drawImage(photo.bitmap, 0, 0, canvas.width, canvas.height);
  const [y, x] = [spot[0] * canvas.height, spot[1] * canvas.width];
  const radius = canvas.width / 45;
  for (const [colour, line] of [['#000', radius / 2.2], ['#fff', radius / 4.5]]) {
    context.beginPath();
    context.arc(x, y, radius, 0, 2 * Math.PI);
    context.strokeStyle = colour;
    context.lineWidth = line;
    context.stroke();
  }
}

async function open(blob, name) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(blob, {
      imageOrientation: 'from-image', colorSpaceConversion: 'none', premultiplyAlpha: 'none',
    });
  } catch {
    say(`${name} is not an image that this browser can read; drop a photo, such as a JPEG or a PNG.`);
    return false;
  }
  const { width, height } = bitmap;
  if (width * height > MOST_PIXELS) {
    say(`${name} has ${Math.round((width * height) / 1e6)} megapixels, too many for a browser; scale it down.`);
    return false;
  }
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext('2d', { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0);
  photo = { data: context.getImageData(0, 0, width, height).data, width, height, bitmap };
  sent = false;
  spot = [0.5, 0.5];
  if (document.documentElement.dataset.ready) say();
  drawPhoto();
  look();
  return true;
}

async function pick(button, path) {
  const done = await open(await (await fetch(path)).blob(), path);
  if (done) mark(button);
}

function mark(button) {
  for (const one of $('gallery').children) one.setAttribute('aria-pressed', one === button);
}

async function take(file) {
  if (file && (await open(file, file.name))) mark(null);
}

// ------------------------------------------------------------------------------------ controls

function showDials() {
  $('cores-value').textContent = $('cores').value;
  $('keep-value').textContent = `${Math.round(100 * Number($('keep').value))} %`;
  $('size-value').textContent = `${$('size').value} px`;
}

function move(down, across) {
  spot = [down, across].map((share) => Math.max(0, Math.min(0.9999, share)));
  drawPhoto();
  const { width: columns, height: rows } = $('features');
  worker.postMessage({ type: 'similar', id, row: Math.floor(spot[0] * rows),
    column: Math.floor(spot[1] * columns) });
}

for (const name of DIALS) {
  $(name).addEventListener('input', () => {
    showDials();
    look();
  });
}
for (const name of ['photo', 'features', 'similarity']) {
  $(name).addEventListener('click', (event) => {
    const box = $(name).getBoundingClientRect();
    if (photo) move((event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width);
  });
}
const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
$('photo').addEventListener('keydown', (event) => {
  const step = STEPS[event.key];
  if (!step || !photo) return;
  event.preventDefault();
  move(spot[0] + step[0] / $('features').height, spot[1] + step[1] / $('features').width);
});
$('file').addEventListener('change', () => {
  take($('file').files[0]);
  $('file').value = ''; // the same file may be chosen again
});
for (const [kind, on] of [['dragenter', true], ['dragover', true], ['dragleave', false], ['drop', false]]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    document.body.classList.toggle('dragged', on);
  });
}
document.addEventListener('drop', (event) => take(event.dataTransfer.files[0]));
$('on').addEventListener('change', () => {
  start($('on').value);
  again = true;
});

// ------------------------------------------------------------------------------------ begin

/** What the network gave last: {cls, patches, grid}. For the console, and for tests. */
const waiting = [];
window.veca = {
  features: () => new Promise((give) => {
    waiting.push(give);
    worker.postMessage({ type: 'features' });
  }),
};

if (window.self !== window.top) {
  document.documentElement.classList.add('inside');
  const frame = window.parent.document.body;
  const follow = () => {
    const scheme = frame.dataset.mdColorScheme;
    if (scheme) document.documentElement.dataset.theme = scheme === 'slate' ? 'dark' : 'light';
  };
  follow();
  // As high as what is in it, so that the page around it scrolls and this one does not.
  new ResizeObserver(() => {
    window.frameElement.style.height = `${document.documentElement.offsetHeight}px`;
  }).observe(document.body);
  new MutationObserver(follow).observe(frame, { attributeFilter: ['data-md-color-scheme'] });
}
$('cores').max = about.num_cores;
$('cores').value = Math.min(32, about.num_cores);
$('keep').min = about.least_keep;
showDials();
$('about').textContent = `${about.name}: ${about.models.wasm.precision}, ${(about.models.wasm.bytes / 1e6).toFixed(1)} MB, `
  + `one file for every number of cores and share of tokens; ${about.runtime}. Made by veca ${about.version}.`;
const can = ['wasm', ...(navigator.gpu && about.models.webgpu ? ['webgpu'] : [])];
$('on').replaceChildren(...can.map((name) => new Option(NAMES[name], name)));
$('run-on').hidden = can.length < 2;
for (const path of about.photos) {
  const button = document.createElement('button');
  const picture = new Image();
  picture.src = path;
  picture.alt = path.replace(/^.*\/|\.\w+$/g, '');
  button.append(picture);
  button.addEventListener('click', () => pick(button, path));
  $('gallery').append(button);
}
const gpu = can.includes('webgpu') && (await navigator.gpu.requestAdapter().catch(() => null));
if (!gpu) $('run-on').hidden = true;
// An adapter that a processor stands in for is slower than WebAssembly.
start(gpu && !gpu.info?.isFallbackAdapter ? 'webgpu' : 'wasm');
await pick($('gallery').children[about.first], about.photos[about.first]);
