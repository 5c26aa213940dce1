// The sections, in the order in which they appear. Each shows nothing if the run has no such data.
function showSummary() {
  const node = section('summary', 'What limits this run');
  const list = make('ol', { class: 'findings' });
  for (const finding of data.findings) {
    list.append(make('li', {}, make('span', { class: 'share' }, `${Math.round(100 * finding.share)} %`), make('span', { class: 'what' }, finding.text), make('span', { class: 'advice' }, finding.advice)));
  }
  if (!data.findings.length) node.append(make('p', {}, 'No wait takes 5 % of the time of any rank: the run is limited by its computation.'));
  node.append(list);
  const lengths = data.steps.lengths.map((parts) => Math.max(...parts)).sort((a, b) => a - b);
  const spans = data.workers.reduce((sum, worker) => sum + worker.spans, 0);
  const fact = (value, name) => make('div', {}, make('b', {}, value), make('span', {}, name));
  const facts = make('div', { class: 'facts' }, fact(time(data.length), 'duration'), fact(count(data.workers.length), data.workers.length === 1 ? 'worker' : 'workers'));
  if (lengths.length) facts.append(fact(count(lengths.length), 'steps'), fact(time(lengths[Math.floor(lengths.length / 2)]), 'median step'), fact(time(lengths[Math.min(lengths.length - 1, Math.floor(lengths.length * 0.99))]), 'p99 step'));
  facts.append(fact(count(spans), 'spans'));
  node.append(facts);
  const lost = data.workers.reduce((sum, worker) => sum + worker.lost, 0), error = Math.max(...data.workers.map((worker) => worker.clockError));
  const notes = [[lost === 0 ? 'No span was lost.' : `${count(lost)} spans were lost: figures of short functions are too low.`, lost > 0]];
  notes.push([data.workers.some((worker) => worker.otherHost) ? `Clocks of different hosts agree within ${time(error)}.` : 'All workers share one clock.', false]);
  notes.push(...data.notes.map((note) => [note, true]));
  node.append(make('ul', { class: 'notes' }, ...notes.map(([text, warn]) => make('li', warn ? { class: 'warn' } : {}, text))));
}

function showComparison() {
  const compared = data.comparison;
  if (!compared) return;
  const node = section('comparison', 'Compared with an earlier run', compared.run ? `Run ${compared.run}. Medians of steps differ clearly if their notches do not overlap.` : '');
  const verdict = (figure) => (figure.clear === null ? '–' : figure.clear ? 'clear' : 'within the variation of the steps');
  if (compared.figures.length) node.append(table(['figure', 'before', 'now', 'change', 'difference'], compared.figures.map((figure) => [figure.name, figure.before, figure.after, figure.change, verdict(figure)])));
  node.append(make('ul', { class: 'notes' }, ...compared.notes.map((note) => make('li', { class: 'warn' }, note))));
}

function showRanks() {
  const workers = data.reductions.workers;
  if (!workers || !workers.some((worker) => worker.rounds)) return;
  const node = section('ranks', 'Where each rank spends its steps', 'Sums over all measured steps of data-parallel training.');
  const parts = [['forward', 'forward', '#56b4e9'], ['backward', 'backward', '#009e73'], ['other', 'outside (data, optimizer, program)', '#999999'], ['latePeer', 'waiting for a late rank', '#d55e00'], ['transfer', 'reduction not hidden', '#e69f00']];
  const bars = make('div', { class: 'shares' });
  for (const worker of workers) bars.append(make('span', {}, `rank ${worker.rank}`), shareBar(parts.map(([key, name, color]) => [name, worker[key], color]), worker.whole));
  node.append(bars, legend(parts.map(([, name, color]) => [name, color])));
  node.append(table(['rank', 'steps', 'mean step', ...parts.map(([, name]) => name)], workers.map((worker) => [`rank ${worker.rank}`, count(worker.rounds), time(worker.whole / Math.max(worker.rounds, 1)), ...parts.map(([key]) => percent(worker[key], worker.whole))])));
}

function showSteps() {
  const steps = data.steps;
  if (!steps.numbers.length) return;
  const node = section('steps', 'Steps', `Taken from ${steps.source}.`);
  const lines = data.workers.slice(0, 8).map((worker, w) => ({ name: `rank ${worker.rank}`, color: lineColors[w], points: steps.numbers.map((id, i) => [id, steps.lengths[i][w]]).filter((point) => point[1] > 0) }));
  lineChart(node, lines.filter((line) => line.points.length), { label: 'Duration of each step', x: (x) => `${Math.round(x)}`, y: (y) => time(y), zero: true });
  if (data.workers.length > 8) node.append(make('p', { class: 'soft' }, 'The chart has the first 8 ranks, the table all of them.'));
  const order = steps.numbers.map((id, i) => i).sort((a, b) => Math.max(...steps.lengths[b]) - Math.max(...steps.lengths[a])).slice(0, 8);
  node.append(make('h3', {}, 'Slowest steps'));
  node.append(table(['step', 'longest', 'rank', 'shortest', 'begins at', ''], order.map((i) => {
    const lengths = steps.lengths[i], present = lengths.map((length, w) => [length, w]).filter((entry) => entry[0] > 0).sort((a, b) => b[0] - a[0]);
    const begin = Math.min(...present.map((entry) => steps.begins[i][entry[1]])), end = Math.max(...present.map((entry) => steps.begins[i][entry[1]] + entry[0]));
    return [count(steps.numbers[i]), time(present[0][0]), String(data.workers[present[0][1]].rank), time(present[present.length - 1][0]), time(begin, 3), make('button', { type: 'button', onclick: () => timeline.zoomTo(begin, end) }, 'Show')];
  })));
}

function showBuckets() {
  const buckets = data.reductions.buckets;
  if (!buckets || !buckets.length) return;
  const node = section('buckets', 'Buckets', 'Duration: from the last rank’s start to the end. Hidden: the part of it while a rank still computes gradients. Last: the ranks that start the bucket last, with their share of the steps.');
  node.append(table(['bucket', 'size', 'mean duration', 'hidden', 'mean delay between first and last rank', 'last'], buckets.map((bucket) => [
    `bucket ${bucket.number}`, bytes(bucket.bytes), time(bucket.duration / bucket.rounds), percent(bucket.hidden, bucket.duration), time(bucket.skew / bucket.rounds),
    bucket.last.sort((a, b) => b[1] - a[1]).slice(0, 3).map(([rank, rounds]) => `rank ${rank} (${Math.round((100 * rounds) / bucket.rounds)} %)`).join(', ')])));
}

function showPipeline() {
  const pipeline = data.pipeline;
  if (!pipeline) return;
  const node = section('pipeline', 'Pipeline', `Step ${pipeline.shown}, which has the median length of ${count(pipeline.steps)} steps${pipeline.left_out ? ` with a backward; ${count(pipeline.left_out)} steps without one are left out` : ''}. Over these steps, workers are idle ${(100 * pipeline.idle).toFixed(1)} % of the time. Numbers are micro-batches; hatched time is idle.`);
  const pattern = svg('pattern', { id: 'idle', width: 6, height: 6, patternUnits: 'userSpaceOnUse', patternTransform: 'rotate(45)' }, svg('rect', { width: 6, height: 6, fill: 'var(--track)' }), svg('rect', { width: 1.5, height: 6, fill: 'var(--hatch)' }));
  node.append(svg('svg', { width: 0, height: 0 }, svg('defs', {}, pattern)));
  const length = Math.max(pipeline.measured.length, pipeline.simulated ? pipeline.simulated.length : 0);
  for (const [title, grid] of [['Measured', pipeline.measured], ['The same actions without transfers and waits for messages (simulated)', pipeline.simulated]]) {
    if (!grid) continue;
    node.append(make('h3', {}, `${title}: ${time(grid.length)}, ${(100 * grid.idle).toFixed(1)} % idle`), pipelineGrid(grid, pipeline.ranks, length));
  }
  if (pipeline.simulated && pipeline.simulated.length > pipeline.measured.length) node.append(make('p', { class: 'soft' }, 'The simulated step is longer than the measured one: an action sends its result before it ends, so that the next one overlaps with it; the simulation starts the next one after its end, at the mean time of its kind.'));
  const used = new Set(pipeline.measured.rows.flat().map((action) => action[3]));
  node.append(legend([...used].sort().map((kind) => actions[kind])));
}

function showModules() {
  if (!data.modules.length) return;
  const node = section('modules', 'Modules', 'Forwards and backwards of the modules that the program named, on all ranks. The times of a module contain those of the modules inside it.');
  const times = ([calls, p50, total]) => (calls ? [count(calls), time(p50), time(total)] : ['–', '–', '–']);
  node.append(table(['module', 'forwards', 'p50', 'sum', 'backwards', 'p50', 'sum'], data.modules.slice(0, 60).map((module) => [module.name, ...times(module.forward), ...times(module.backward)]), true));
  if (data.modules.length > 60) node.append(make('p', { class: 'soft' }, `${data.modules.length - 60} more modules with smaller sums are not listed.`));
}

function showFunctions() {
  const functions = data.calls.functions;
  if (!functions.length) return;
  const node = section('functions', 'Functions', 'Calls: from the call to its result, at the caller. Handler: at the callee.');
  node.append(table(['function', 'calls', 'p50', 'p99', 'longest', 'sum', 'handler p50', 'handler p99'], functions.slice(0, 40).map((figures) => [
    figures.name, count(figures.calls || figures.served), ...(figures.calls ? [time(figures.p50), time(figures.p99), time(figures.longest), time(figures.total)] : ['–', '–', '–', '–']),
    ...(figures.served ? [time(figures.servedP50), time(figures.servedP99)] : ['–', '–'])]), true));
  if (functions.length > 40) node.append(make('p', { class: 'soft' }, `${functions.length - 40} more functions with smaller sums are not listed.`));
}

function showTraffic() {
  const traffic = data.calls.traffic;
  if (!traffic.length) return;
  const ranks = [...new Set(traffic.flatMap((entry) => [entry[0], entry[1]]))].sort((a, b) => a - b), most = Math.max(...traffic.map((entry) => entry[2]));
  const node = section('traffic', 'Traffic of calls', 'Bytes of requests and replies from the rank on the left to the rank above. Collective operations are not included.');
  const cell = new Map(traffic.map((entry) => [`${entry[0]},${entry[1]}`, entry]));
  const grid = table(['from \\ to', ...ranks.map((rank) => `rank ${rank}`)], ranks.map((from) => [`rank ${from}`, ...ranks.map((to) => {
    const entry = cell.get(`${from},${to}`);
    return entry ? `${bytes(entry[2])} in ${count(entry[3])}` : '–';
  })]));
  grid.querySelectorAll('tbody tr').forEach((row, y) => row.querySelectorAll('td').forEach((box, x) => {
    const entry = x > 0 && cell.get(`${ranks[y]},${ranks[x - 1]}`);
    if (entry) box.style.background = `rgba(0, 114, 178, ${(0.08 + 0.37 * (entry[2] / most)).toFixed(3)})`;
  }));
  node.append(grid);
}

function showCurves() {
  const tags = [...new Set(data.curves.map((curve) => curve.tag))];
  if (!tags.length) return;
  const node = section('curves', 'Curves', 'Values that the program logged, by step.'), box = make('div', { class: 'two' });
  node.append(box);
  for (const tag of tags.slice(0, 24)) {
    const part = make('div', {}, make('h3', {}, tag));
    box.append(part);
    const lines = data.curves.filter((curve) => curve.tag === tag).slice(0, 8).map((curve, i) => ({ name: `rank ${curve.rank}`, color: lineColors[i], points: curve.points.map((point) => [point[1], point[2]]) }));
    lineChart(part, lines, { label: `Values of ${tag}`, x: (x) => String(Math.round(x)), y: number });
  }
}

function showMemory() {
  const lines = data.memory.filter((worker) => worker.points.length > 1).slice(0, 8).map((worker, i) => ({ name: `rank ${worker.rank}`, color: lineColors[i], points: worker.points }));
  if (!lines.length) return;
  const node = section('memory', 'Memory', 'Resident memory of each process.');
  lineChart(node, lines, { label: 'Resident memory over time', x: (x) => time(x), y: bytes, zero: true, binary: true });
}

function showWorkers() {
  const node = section('workers', 'Workers');
  node.append(table(['worker', 'rank', 'host', 'process', 'spans', 'lost', 'clock error', 'trace'], data.workers.map((worker) => [
    worker.name, String(worker.rank), worker.host, String(worker.process), count(worker.spans), count(worker.lost), worker.otherHost ? `± ${time(worker.clockError)}` : 'same clock', worker.complete ? 'complete' : 'cut off'])));
}

document.getElementById('about').textContent = [data.run && `run ${data.run}`, new Date(data.began).toLocaleString(), `${data.workers.length} worker${data.workers.length === 1 ? '' : 's'} on ${[...new Set(data.workers.map((worker) => worker.host))].join(', ')}`].filter(Boolean).join('  ·  ');
showSummary();
showComparison();
timeline.show();
showRanks();
showSteps();
showBuckets();
showPipeline();
showModules();
showFunctions();
showTraffic();
showCurves();
showMemory();
showWorkers();
document.querySelector('header').append(make('nav', { 'aria-label': 'Sections' }, ...sections.map(([id, title]) => make('a', { href: `#${id}` }, title))));
