// The timeline: one row for each thread and kind of a worker. Draws only what is visible.
const timeline = (() => {
  const gutter = 176, top = 22, levelHeight = 15;
  const rows = [];
  let total = 0;
  data.timeline.workers.forEach((worker, index) => {
    rows.push({ head: `rank ${data.workers[index].rank} (${data.workers[index].name})`, y: total, height: 22 });
    total += 22;
    for (const track of worker.tracks) {
      const size = track.begins.length, begins = new Float64Array(size), ends = new Float64Array(size);
      const levels = new Uint8Array(size), reach = new Float64Array(size), open = [];
      let at = 0, deepest = 0, far = 0;
      for (let i = 0; i < size; ++i) {
        begins[i] = at += track.begins[i];
        ends[i] = at + track.lengths[i];
        while (open.length && open[open.length - 1] <= at) open.pop();
        levels[i] = Math.min(open.length, 7);
        open.push(ends[i]);
        deepest = Math.max(deepest, levels[i]);
        reach[i] = far = Math.max(far, ends[i]);
      }
      const height = (deepest + 1) * levelHeight + 5;
      rows.push({ title: track.title, track, names: worker.names, begins, ends, levels, reach, y: total, height, worker: index });
      total += height;
    }
    total += 6;
  });
  const view = { from: 0, to: Math.max(data.length, 1) };
  let box, canvas, detail, chosen = null;

  // The first element of an ascending array that is greater than `value`.
  function after(array, value) {
    let low = 0, high = array.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (array[middle] > value) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  const describe = (row, i) => {
    const track = row.track, parts = [row.names[track.names[i]], `${time(track.lengths[i], 3)} from ${time(row.begins[i], 3)}`, kinds[track.kinds[i]] || 'other'];
    parts.push(`id ${track.ids[i]}`);
    if (track.peers[i] >= 0) parts.push(`peer rank ${track.peers[i]}`);
    if (track.bytes[i] > 0) parts.push(bytes(track.bytes[i]));
    return parts;
  };

  function color(row, i) {
    const kind = row.track.kinds[i];
    if (kind === 4 && /^(forward|backward)$/.test(row.names[row.track.names[i]])) return row.names[row.track.names[i]] === 'forward' ? '#56b4e9' : '#009e73';
    if (kind !== 5) return colors[kind] || '#999999';
    const letter = /^\d+([FBIW])/.exec(row.names[row.track.names[i]]);
    return letter ? actions['FBIW'.indexOf(letter[1])][1] : colors[6];  // a wait in a step
  }

  function drawRow(pen, width, row, y) {
    const scale = (width - gutter) / (view.to - view.from), last = after(row.begins, view.to), taken = new Float64Array(8).fill(-1);
    pen.font = '11px system-ui, sans-serif';
    for (let i = after(row.reach, view.from); i < last; ++i) {
      if (row.ends[i] < view.from) continue;
      const left = gutter + Math.max(0, (row.begins[i] - view.from) * scale);
      const right = gutter + Math.min(width - gutter, (row.ends[i] - view.from) * scale);
      const level = row.levels[i];
      if (right - left < 1 && left < taken[level]) continue;  // in the pixel of the previous one
      taken[level] = Math.max(Math.floor(left) + 1, right);
      const shown = Math.max(1, right - left - (right - left > 3 ? 1 : 0)), at = y + 3 + level * levelHeight;
      pen.fillStyle = color(row, i);
      pen.fillRect(left, at, shown, levelHeight - 2);
      if (chosen && chosen.row === row && chosen.i === i) {
        pen.strokeStyle = theme('--text');
        pen.lineWidth = 2;
        pen.strokeRect(left, at, shown, levelHeight - 2);
      }
      if (shown < 34) continue;
      pen.fillStyle = /^#(0072b2|009e73|7a5195|d55e00)$/.test(color(row, i)) ? '#ffffff' : '#111111';
      pen.save();
      pen.beginPath();
      pen.rect(left, at, shown - 2, levelHeight);
      pen.clip();
      pen.fillText(row.names[row.track.names[i]], left + 3, at + 10);
      pen.restore();
    }
  }

  function drawAxis(pen, width, height) {
    const scale = (width - gutter) / (view.to - view.from);
    pen.fillStyle = theme('--panel');
    pen.fillRect(0, 0, width, top);
    pen.font = '12px system-ui, sans-serif';
    const marks = ticks(view.from, view.to, (width - gutter) / 110), step = marks.length > 1 ? marks[1] - marks[0] : view.to;
    const unit = step >= 1e8 ? [1e9, 's'] : step >= 1e5 ? [1e6, 'ms'] : step >= 100 ? [1e3, 'µs'] : [1, 'ns'];
    for (const at of marks) {
      const x = gutter + (at - view.from) * scale;
      pen.fillStyle = theme('--line');
      pen.fillRect(x, top - 5, 1, height - top + 5);
      pen.fillStyle = theme('--soft');
      const text = `${+(at / unit[0]).toFixed(6)} ${unit[1]}`;
      if (x + 4 + pen.measureText(text).width < width) pen.fillText(text, x + 4, 14);
    }
  }

  function draw() {
    const height = Math.min(total + top + 4, 558), [pen, width] = context(canvas, height), scroll = box.scrollTop;
    drawAxis(pen, width, height);
    pen.save();
    pen.beginPath();
    pen.rect(0, top, width, height - top);
    pen.clip();
    for (const row of rows) {
      const y = row.y + top - scroll;
      if (y > height || y + row.height < top) continue;
      if (row.head) {
        pen.fillStyle = theme('--track');
        pen.fillRect(0, y, width, 20);
        pen.fillStyle = theme('--text');
        pen.font = '600 13px system-ui, sans-serif';
        pen.fillText(row.head, 8, y + 14, width - 16);
        continue;
      }
      pen.fillStyle = theme('--soft');
      pen.font = '12px system-ui, sans-serif';
      pen.fillText(row.title, 16, y + 14, gutter - 24);
      drawRow(pen, width, row, y);
    }
    pen.restore();
  }

  function find(event) {
    const area = canvas.getBoundingClientRect(), x = event.clientX - area.left, y = event.clientY - area.top - top + box.scrollTop;
    const row = rows.find((candidate) => candidate.track && y >= candidate.y && y < candidate.y + candidate.height);
    if (!row || x < gutter || event.clientY - area.top < top) return null;
    const perPixel = (view.to - view.from) / (area.width - gutter), at = view.from + (x - gutter) * perPixel;
    const level = Math.floor((y - row.y - 3) / levelHeight);
    let best = null;
    for (let i = after(row.begins, at + perPixel * 2) - 1, tried = 0; i >= 0 && tried < 5000; --i, ++tried) {
      if (row.reach[i] < at - perPixel * 2) break;
      if (row.levels[i] !== level || row.ends[i] < at - perPixel * 2) continue;
      best = { row, i };
      break;
    }
    return best;
  }

  function set(from, to) {
    const least = 100, whole = Math.max(data.length, 1), length = Math.min(Math.max(to - from, least), whole);
    view.from = Math.min(Math.max(0, (from + to - length) / 2), whole - length);
    view.to = view.from + length;
    draw();
  }
  const zoom = (factor, at = (view.from + view.to) / 2) => set(at - (at - view.from) * factor, at + (view.to - at) * factor);
  const pan = (share) => set(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));

  function choose(place) {
    chosen = place;
    detail.textContent = place ? describe(place.row, place.i).join('  ·  ') : '';
    draw();
  }
  function step(direction) {  // the next span of the row
    if (!chosen) {
      const row = rows.find((candidate) => candidate.track);
      return row && choose({ row, i: 0 });
    }
    const i = Math.min(Math.max(chosen.i + direction, 0), chosen.row.begins.length - 1);
    if (chosen.row.begins[i] < view.from || chosen.row.ends[i] > view.to) {
      const half = (view.to - view.from) / 2, middle = (chosen.row.begins[i] + chosen.row.ends[i]) / 2;
      set(middle - half, middle + half);
    }
    choose({ row: chosen.row, i });
  }

  function keys(event) {
    const act = { ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), a: () => pan(-0.2), d: () => pan(0.2), '+': () => zoom(0.6), '=': () => zoom(0.6), w: () => zoom(0.6),
      '-': () => zoom(1.6), s: () => zoom(1.6), 0: () => set(0, data.length), n: () => step(1), p: () => step(-1), Escape: () => choose(null) }[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  }

  function drag(event) {
    if (event.button !== 0) return;
    const start = event.clientX, from = view.from, to = view.to, width = canvas.clientWidth - gutter;
    let moved = false;
    const move = (now) => {
      moved = moved || Math.abs(now.clientX - start) > 3;
      const shift = ((start - now.clientX) / width) * (to - from);
      if (moved) set(from + shift, to + shift);
    };
    const end = (now) => {
      removeEventListener('pointermove', move);
      removeEventListener('pointerup', end);
      if (!moved) choose(find(now));
    };
    addEventListener('pointermove', move);
    addEventListener('pointerup', end);
  }

  function show() {
    if (!rows.some((row) => row.track)) return;
    const node = section('timeline', 'Timeline', 'A long run is shown from its middle; “All” shows everything. Drag to move, Ctrl + wheel to zoom, click a span for its figures. Keys: arrows or A D, + − or W S, 0 for all, N and P for the next and previous span.');
    const used = new Set(data.timeline.workers.flatMap((worker) => worker.tracks.flatMap((track) => [...new Set(track.kinds)])));
    const entries = [...used].sort((a, b) => a - b).filter((kind) => kind !== 5).map((kind) => [kinds[kind] || 'other', colors[kind] || '#999999']);
    if (data.reductions.buckets && data.reductions.buckets.length) entries.push(['forward', '#56b4e9'], ['backward', '#009e73']);
    if (used.has(5)) entries.push(...(data.pipeline ? [...new Set(data.pipeline.measured.rows.flat().map((action) => action[3]))].sort().map((kind) => actions[kind]) : []), ...(used.has(6) ? [] : [['wait', colors[6]]]));
    detail = make('p', { id: 'detail', 'aria-live': 'polite' });
    canvas = make('canvas', { tabindex: 0, role: 'img', 'aria-label': 'Spans of all workers over time. The tables below have the same figures.', onkeydown: keys, onpointerdown: drag,
      onpointermove: (event) => { const place = event.buttons ? null : find(event); showTip(event, place && describe(place.row, place.i).join('\n')); }, onpointerleave: (event) => showTip(event, '') });
    canvas.addEventListener('wheel', (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const area = canvas.getBoundingClientRect(), share = Math.max(0, (event.clientX - area.left - gutter) / (area.width - gutter));
      zoom(event.deltaY > 0 ? 1.25 : 0.8, view.from + share * (view.to - view.from));
    }, { passive: false });
    const spacer = make('div');
    spacer.style.height = `${Math.max(0, total + top + 4 - 558)}px`;
    box = make('div', { class: 'scroll', onscroll: draw }, canvas, spacer);
    const button = (text, act, label) => make('button', { type: 'button', 'aria-label': label, onclick: act }, text);
    node.append(make('div', { class: 'bar' }, button('+', () => zoom(0.5), 'Zoom in'), button('−', () => zoom(2), 'Zoom out'), button('All', () => set(0, data.length), 'Show the whole run')), legend(entries), box, detail);
    if (data.timeline.shortest > 0) node.append(make('p', { class: 'soft' }, `Spans shorter than ${time(data.timeline.shortest)} are not drawn; all figures include them.`));
    redraws.push(draw);
    const begins = data.steps.begins.map((parts, i) => Math.min(...parts.filter((begin, w) => data.steps.lengths[i][w] > 0)));
    const first = Math.floor(begins.length / 2) - 3;  // a long run begins with six steps of its middle
    if (first > 3) set(begins[first], begins[first + 6]);
    else draw();
  }
  return { show, zoomTo: (from, to) => { const margin = (to - from) * 0.05; set(from - margin, to + margin); document.getElementById('timeline').scrollIntoView(); canvas.focus({ preventScroll: true }); } };
})();
