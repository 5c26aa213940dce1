// Line charts: [{ name, color, points: [[x, y], …] }].
function lineChart(node, lines, options) {
  const canvas = make('canvas', { role: 'img', 'aria-label': options.label });
  node.append(make('div', {}, canvas));
  const all = lines.flatMap((line) => line.points);
  let [low, high, left, right] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const [x, y] of all) {
    low = Math.min(low, y);
    high = Math.max(high, y);
    left = Math.min(left, x);
    right = Math.max(right, x);
  }
  if (options.zero) low = Math.min(0, low);
  if (high === low) high = low + 1;
  if (right === left) right = left + 1;
  const height = 190, pad = { left: 66, right: 10, top: 8, bottom: 24 };
  const place = (width) => [(x) => pad.left + ((x - left) / (right - left)) * (width - pad.left - pad.right), (y) => height - pad.bottom - ((y - low) / (high - low)) * (height - pad.top - pad.bottom)];
  function draw() {
    const [pen, width] = context(canvas, height), [px, py] = place(width);
    pen.font = '12px system-ui, sans-serif';
    pen.textBaseline = 'middle';
    for (const y of ticks(low, high, 4, options.binary)) {
      pen.fillStyle = theme('--line');
      pen.fillRect(pad.left, py(y), width - pad.left - pad.right, 1);
      pen.fillStyle = theme('--soft');
      pen.textAlign = 'right';
      pen.fillText(options.y(y), pad.left - 6, py(y));
    }
    pen.textAlign = 'center';
    for (const x of ticks(left, right, (width - pad.left) / 90)) if (px(x) + pen.measureText(options.x(x)).width / 2 <= width) pen.fillText(options.x(x), px(x), height - 10);
    for (const line of lines) {
      pen.strokeStyle = pen.fillStyle = line.color;
      pen.lineWidth = 1.75;
      pen.beginPath();
      line.points.forEach(([x, y], i) => (i ? pen.lineTo(px(x), py(y)) : pen.moveTo(px(x), py(y))));
      pen.stroke();
      if (line.points.length < 60) for (const [x, y] of line.points) pen.fillRect(px(x) - 2, py(y) - 2, 4, 4);
    }
  }
  canvas.addEventListener('pointermove', (event) => {
    const area = canvas.getBoundingClientRect(), [px] = place(area.width);
    let best = null;
    for (const line of lines) for (const point of line.points) {
      const distance = Math.abs(px(point[0]) - (event.clientX - area.left));
      if (!best || distance < best[0]) best = [distance, point[0]];
    }
    const text = best && lines.map((line) => [line.name, line.points.find((point) => point[0] === best[1])]).filter((entry) => entry[1]).map(([name, point]) => `${name}: ${options.y(point[1])}`);
    showTip(event, best && `${options.x(best[1])}\n${text.join('\n')}`);
  });
  canvas.addEventListener('pointerleave', (event) => showTip(event, ''));
  if (lines.length > 1) node.append(legend(lines.map((line) => [line.name, line.color])));
  redraws.push(draw);
  draw();
}
const lineColors = ['#0072b2', '#e69f00', '#009e73', '#cc79a7', '#56b4e9', '#d55e00', '#7a5195', '#999999'];

// Rows of rectangles for a pipeline's step.
function pipelineGrid(grid, ranks, length) {
  const row = 26, width = 1000, left = 64, scale = (width - left) / Math.max(length, 1);
  const picture = svg('svg', { class: 'grid', viewBox: `0 0 ${width} ${ranks.length * row + 4}`, role: 'img', 'aria-label': 'Actions of each rank over time' });
  grid.rows.forEach((actionsOfRank, index) => {
    const y = index * row;
    picture.append(svg('text', { x: 0, y: y + 17, fill: 'currentColor' }, `rank ${ranks[index]}`));
    picture.append(svg('rect', { x: left, y: y + 2, width: grid.length * scale, height: row - 6, fill: 'url(#idle)' }));
    for (const [name, start, duration, kind, batch] of actionsOfRank) {
      const cell = svg('rect', { x: left + start * scale, y: y + 2, width: Math.max(1, duration * scale - 0.6), height: row - 6, fill: actions[kind][1] });
      cell.append(svg('title', {}, `${name}: ${actions[kind][0]} of micro-batch ${batch}, ${time(duration)} from ${time(start)}`));
      picture.append(cell);
      if (duration * scale > 16) picture.append(svg('text', { x: left + (start + duration / 2) * scale, y: y + 17, 'text-anchor': 'middle', fill: '#111111' }, String(batch)));
    }
  });
  return picture;
}

function shareBar(parts, whole) {
  const bar = svg('svg', { viewBox: '0 0 1000 22', preserveAspectRatio: 'none', role: 'img', 'aria-label': parts.map(([name, value]) => `${name} ${percent(value, whole)}`).join(', ') });
  let at = 0;
  for (const [name, value, color] of parts) {
    const width = (1000 * Math.max(0, value)) / Math.max(whole, 1);
    const piece = svg('rect', { x: at, y: 0, width, height: 22, fill: color });
    piece.append(svg('title', {}, `${name}: ${percent(value, whole)}`));
    bar.append(piece);
    at += width;
  }
  return bar;
}
