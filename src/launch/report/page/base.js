'use strict';
// Elements, numbers and colors for the rest of the page. Names in a trace are a user's text: only textContent shows them.
const data = JSON.parse(document.getElementById('data').textContent);
const kinds = ['call', 'handler', 'autograd', 'optimizer', 'bucket', 'pipeline', 'wait', 'user', 'collective', 'checkpoint', 'module', 'operator'];
// Okabe and Ito (2008), which people with color vision deficiencies can tell apart.
const colors = ['#0072b2', '#56b4e9', '#009e73', '#cc79a7', '#e69f00', '#f0e442', '#d55e00', '#999999', '#f0e442', '#7a5195', '#44aa99', '#bbbbbb'];
const actions = { 0: ['forward', '#56b4e9'], 1: ['backward', '#e69f00'], 2: ['input gradient', '#f0e442'], 3: ['weight gradient', '#009e73'] };

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith('on')) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value);
  }
  for (const child of children) node.append(child);
  return node;
}

function svg(tag, attributes, ...children) {
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  for (const child of children) node.append(child);
  return node;
}

function time(ns, digits) {
  const size = Math.abs(ns);
  if (size < 1e3) return `${Math.round(ns)} ns`;
  if (size < 1e6) return `${(ns / 1e3).toFixed(digits ?? 1)} µs`;
  if (size < 1e9) return `${(ns / 1e6).toFixed(digits ?? 1)} ms`;
  return `${(ns / 1e9).toFixed(digits ?? 2)} s`;
}

function bytes(value) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  while (value >= 1024 && unit + 1 < units.length) {
    value /= 1024;
    ++unit;
  }
  return `${unit ? value.toFixed(1) : value} ${units[unit]}`;
}

const count = (value) => value.toLocaleString('en-US');
const percent = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : '–');
const number = (value) => (Math.abs(value) >= 1e4 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(+value.toPrecision(4)));

function table(heads, rows, names) {
  const body = rows.map((row) => make('tr', {}, ...row.map((cell, i) => make('td', names && i === 0 ? { class: 'name' } : {}, cell))));
  return make('div', { class: 'wide' }, make('table', {}, make('thead', {}, make('tr', {}, ...heads.map((head) => make('th', { scope: 'col' }, head)))), make('tbody', {}, ...body)));
}

const sections = [];
function section(id, title, about) {
  const node = make('section', { id, 'aria-labelledby': `${id}-title` }, make('h2', { id: `${id}-title` }, title));
  if (about) node.append(make('p', { class: 'soft' }, about));
  document.getElementById('main').append(node);
  sections.push([id, title]);
  return node;
}

function legend(entries) {
  return make('div', { class: 'legend' }, ...entries.map(([name, color]) => {
    const mark = make('i');
    mark.style.background = color;
    return make('span', {}, mark, name);
  }));
}

const tip = document.getElementById('tip');
function showTip(event, text) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - box.width - 8)}px`;
  tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18}px`;
}

const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const redraws = [];
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => redraws.forEach((draw) => draw()));
addEventListener('resize', () => redraws.forEach((draw) => draw()));

// Sizes a canvas to its box, in device pixels, and returns a context that draws in CSS pixels.
function context(canvas, height) {
  const width = canvas.parentElement.clientWidth;
  const scale = devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext('2d');
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return [pen, width];
}

// Round steps of an axis; `binary`: of bytes.
function ticks(from, to, most, binary) {
  const rough = (to - from) / Math.max(most, 1);
  if (!(rough > 0)) return [from];
  const unit = binary ? 1024 ** Math.max(0, Math.floor(Math.log2(rough) / 10)) : 1;
  const power = unit * 10 ** Math.floor(Math.log10(rough / unit));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough);
  const list = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) list.push(at);
  return list;
}
