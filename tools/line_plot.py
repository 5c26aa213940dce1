"""Draws series of points as an SVG, for tools/scale-report and tools/bench-report."""
import math

COLORS = ["#3b6fb6", "#c8553d", "#4c956c", "#8e5ea2", "#b8860b", "#4a4e69", "#00798c", "#d1495b"]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 80, 210, 40, 50


def decades(low, high):
    return [10.0 ** power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]


def label_of(number):
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:g} {unit}"
    return f"{number:g}"


def draw(title, unit, series, across="workers", x_label="{:,}".format, y_label=label_of, linear=None):
    """An SVG as text. Series are (label, points, dashed), points (x, y) in order. Readable on light and on dark pages.
    `linear`: the values at the lines of a vertical axis that is not logarithmic."""
    points = [point for _, line, _ in series for point in line]
    xs, ys = sorted({x for x, _ in points}), [y for _, y in points]
    ticks = linear or decades(min(ys), max(ys))
    if len(ticks) == 1:
        ticks.append(ticks[0] * 10)
    low, high = math.log(xs[0]), math.log(xs[-1]) if len(xs) > 1 else math.log(xs[0]) + 1
    height = (lambda y: y) if linear else math.log
    bottom, top = height(ticks[0]), height(ticks[-1])

    def x_of(x):
        return LEFT + (math.log(x) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y_of(y):
        return HEIGHT - BOTTOM - (height(y) - bottom) / (top - bottom) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">',
             "<style>text { font: 12px sans-serif; fill: #444 } .title { font-size: 14px; font-weight: bold }"
             " line { stroke: #ccc } @media (prefers-color-scheme: dark) { text { fill: #ccc } line { stroke: #555 } }"
             "</style>",
             f'<text class="title" x="{LEFT}" y="20">{title}</text>']
    for y in ticks:
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_of(y):.1f}" y2="{y_of(y):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y_of(y) + 4:.1f}" text-anchor="end">{y_label(y)}</text>')
    free = 0  # where the next label may begin
    for x in xs:
        if x_of(x) < free:
            continue
        free = x_of(x) + 46
        parts.append(f'<text x="{x_of(x):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x_label(x)}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{across}</text>')
    parts.append(f'<text transform="translate(16 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">{unit}</text>')
    # Labels beside the plot, moved apart; dotted lines connect them with series that end earlier.
    ends = sorted((y_of(line[-1][1]), index) for index, (_, line, _) in enumerate(series))
    places, last = {}, -math.inf
    for y, index in ends:
        last = max(y, last + 15)
        places[index] = last
    for index, (label, line, dashed) in enumerate(series):
        color = COLORS[index % len(COLORS)]
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line)
        style = f'fill="none" stroke="{color}" stroke-width="2"' + (' stroke-dasharray="5 4"' if dashed else "")
        parts.append(f'<polyline points="{path}" {style}/>')
        parts += [f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3" fill="{color}"/>' for x, y in line]
        end, edge = x_of(line[-1][0]), WIDTH - RIGHT
        if end < edge:
            parts.append(f'<polyline points="{end:.1f},{y_of(line[-1][1]):.1f} {edge + 8},{places[index]:.1f}" fill="none"'
                         f' stroke="{color}" stroke-dasharray="1 4"/>')
        parts.append(f'<text x="{edge + 12}" y="{places[index] + 4:.1f}" style="fill: {color}">{label}</text>')
    return "\n".join(parts) + "\n</svg>\n"
