"""Draws the training steps of `./dev bench ddp`: the time of a step of Python's,
if that of ours is 1.

    picture.py FIGURES.json PICTURE.svg

README shows docs/pictures/steps.svg, which is such a picture. It has the figures
of the table in docs/compared.md, digit for digit (tests/benchmarks/picture_bench_test.py).
"""

import json
import pathlib
import sys
from xml.sax.saxutils import escape

# The names of the steps in the table; the picture has them in this order.
LABELS = {
    "tutorial": "Linear(20, 1) with its loader",
    "mlp": "20–2048–2048–1, 4.2 M parameters, SGD",
    "mlp_zero": "the same, AdamW, sharded, parameters shared",
    "narrow": "66 layers of 64",
    "transformer": "transformer, 4 layers of 256, AdamW",
}

# In pixels.
WIDTH = 800
BARS_FROM = 348  # the labels are to the left
BARS_TO = 690    # the figures are to the right
TOP = 66
ROW = 38
BAR = 11
BELOW = 38

# The picture brings its background, so that it can be read on any page, and
# follows the colours that the reader's system prefers.
STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328 }
.page { fill: #ffffff; stroke: #d1d9e0 }
.title { font-size: 16px; font-weight: 600 }
.ratio { font-weight: 600 }
.more { font-size: 11px; fill: #59636e }
.ours { fill: #0072b2 }
.python { fill: #b8c0c8 }
.range { stroke: #59636e; fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .page { fill: #0d1117; stroke: #3d444d }
  .more { fill: #9198a1 }
  .ours { fill: #56b4e9 }
  .python { fill: #656d76 }
  .range { stroke: #c0c8d0 }
}
"""


def shown(value):
    """Returns a ratio as the table writes it."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def text(x, y, words, kind="", end=False):
    kind = f' class="{kind}"' if kind else ""
    anchor = ' text-anchor="end"' if end else ""
    return f'<text x="{x:g}" y="{y:g}"{kind}{anchor}>{escape(words)}</text>'


def bar(y, length, kind):
    return (f'<rect x="{BARS_FROM}" y="{y:g}" width="{length:.1f}" '
            f'height="{BAR}" rx="2" class="{kind}"/>')


def row(top, result, pixels):
    """Draws one step; `pixels` is the length of 1."""
    ratio, least, most = (shown(result[field]) for field in
                          ("ratio", "ratio_min", "ratio_max"))
    begin, end = (BARS_FROM + float(x) * pixels for x in (least, most))
    return [
        "<g>",
        text(BARS_FROM - 14, top + BAR + 4, LABELS[result["name"]], end=True),
        bar(top, pixels, "ours"),
        bar(top + BAR, float(ratio) * pixels, "python"),
        f'<path class="range" d="M{begin:.1f} {top + 1.5 * BAR - 3:g}v6m0 -3'
        f'H{end:.1f}m0 -3v6"/>',
        text(end + 10, top + 2 * BAR - 1, f"{ratio}×", "ratio"),
        text(end + 48, top + 2 * BAR - 1, f"{least}–{most}", "more"),
        "</g>"]


def key(x, kind, words):
    return (f'<rect x="{x}" y="24" width="{BAR}" height="{BAR}" rx="2" '
            f'class="{kind}"/>' + text(x + 17, 34, words))


def draw(results):
    """Returns the file in SVG for entries of the JSON's "benchmarks", of which
    those that are training steps are drawn."""
    by_name = {result["name"]: result for result in results}
    steps = [by_name[name] for name in LABELS if name in by_name]
    longest = max(float(shown(step["ratio_max"])) for step in steps)
    pixels = (BARS_TO - BARS_FROM) / longest
    height = TOP + ROW * len(steps) + BELOW
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" '
        f'height="{height}" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>The time of a training step with Python's "
        "DistributedDataParallel, if ours is 1</title>",
        f"<style>{STYLE}</style>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" '
        'rx="6" class="page"/>',
        text(24, 34, "Time of a training step, if ours is 1", "title"),
        key(WIDTH - 238, "ours", "Lockstep"),
        key(WIDTH - 138, "python", "Python, Gloo")]
    for number, step in enumerate(steps):
        lines += row(TOP + ROW * number, step, pixels)
    lines += [
        text(24, height - 16, "DistributedDataParallel, two ranks on CPUs. "
             "Thin lines are from the lowest to the highest ratio of a round: "
             "./dev bench ddp", "more"),
        "</svg>"]
    return "\n".join(lines) + "\n"


def main():
    figures, picture = map(pathlib.Path, sys.argv[1:])
    picture.write_text(draw(json.loads(figures.read_text())["benchmarks"]))


if __name__ == "__main__":
    main()
