"""Records a command on a terminal as a picture that plays once, in SVG.

    record.py [--speed N] PICTURE.svg COMMAND ARGUMENT...

For example, after `./dev build` and on a machine with nothing else to do:

    record.py --speed 3 docs/pictures/demo.svg ./dev demo

Whatever shows no motion shows the last screen. Needs pyte (PyPI), a terminal in
Python.
"""

import argparse
import fcntl
import os
import pathlib
import pty
import shutil
import struct
import sys
import termios
import time
from xml.sax.saxutils import escape

import pyte

COLUMNS = 92
LINES = 1000       # of the whole output, which must not scroll
SHOWN = 22         # of them at a time
FRAME_S = 0.2      # the shortest time for which a state is shown
# In pixels.
CHARACTER = 7.83   # of a font of 13
LINE = 18
MARGIN = 14
BAR = 30

STYLE = """
.page { fill: #0d1117; stroke: #3d444d }
.dot { fill: #3d444d }
text { font: 13px ui-monospace, SFMono-Regular, "DejaVu Sans Mono", Menlo, monospace; fill: #d1d7e0; white-space: pre }
.more { font-size: 11px; fill: #768390; text-anchor: end }
.say { fill: #6cb6ff; font-weight: 600 }
"""


def record(command, speed):
    """Runs the command. Returns [(seconds, lines)], a state of the screen each,
    at the time when it is shown, and the exit code."""
    child, terminal = pty.fork()
    if child == 0:
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ,
                struct.pack("HHHH", SHOWN, COLUMNS, 0, 0))
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    states, begin = [(0, ())], time.monotonic()

    def shown_at():
        return (time.monotonic() - begin) / speed

    def keep():
        last = screen.cursor.y + 1
        lines = tuple(line.rstrip() for line in screen.display[:last])
        states.append((shown_at(), lines))

    while True:
        try:
            read = os.read(terminal, 65536)
        except OSError:  # the command has ended
            break
        if not read:
            break
        sys.stdout.buffer.write(read)
        sys.stdout.flush()
        stream.feed(read)
        if shown_at() - states[-1][0] >= FRAME_S:
            keep()
    keep()
    return states, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def spans_of(states):
    """Returns {line: [(text, from, to)]}; `to` is None for what stays."""
    spans = {}
    for at, lines in states:
        for number, text in enumerate(lines):
            one = spans.setdefault(number, [])
            if one and one[-1][0] == text:
                continue
            if one:
                one[-1] = (*one[-1][:2], at)
            one.append((text, at, None))
    return spans


def shown_text(number, text, begin, end):
    """Draws a line that is visible from `begin` to `end`."""
    kind = ' class="say"' if text.startswith(("==>", "$ ")) else ""
    head = f'<text y="{LINE * number}"{kind}'
    if end is not None:
        return (f'{head} opacity="0">{escape(text)}<set attributeName="opacity" '
                f'to="1" begin="{begin:.1f}s" end="{end:.1f}s"/></text>')
    motion = (f'<set attributeName="opacity" to="0" begin="0s" end="{begin:.1f}s"/>'
              if begin >= 0.1 else "")
    return f"{head}>{escape(text)}{motion}</text>"


def draw(states, title, speed):
    width = round(COLUMNS * CHARACTER) + 2 * MARGIN
    height = BAR + SHOWN * LINE + MARGIN
    texts = [shown_text(number, *span)
             for number, spans in spans_of(states).items()
             for span in spans if span[0]]
    # The whole output moves up when it is longer than the window.
    scrolls, above = [], 0
    for at, lines in states:
        if len(lines) - SHOWN > above:
            above = len(lines) - SHOWN
            scrolls.append((at, above))
    moves = []
    for number, (at, lines_above) in enumerate([(0, 0), *scrolls[:-1]]):
        end = scrolls[number][0] if scrolls else 0
        moves.append(
            '<animateTransform attributeName="transform" type="translate" '
            f'calcMode="discrete" values="0 {-LINE * lines_above}" '
            f'begin="{at:.1f}s" dur="{max(end - at, 0.1):.1f}s"/>')
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" '
        'rx="8" class="page"/>',
        *(f'<circle cx="{18 + 18 * dot}" cy="16" r="5" class="dot"/>'
          for dot in range(3)),
        *([f'<text class="more" x="{width - MARGIN}" y="20">shown {speed:g} times '
           "as fast</text>"] if speed != 1 else []),
        f'<svg x="{MARGIN}" y="{BAR}" width="{width - 2 * MARGIN}" '
        f'height="{SHOWN * LINE + 4}">',
        f'<g transform="translate(0 {LINE - 4})">',
        f'<g transform="translate(0 {-LINE * above})">', *moves,
        *texts, "</g></g></svg></svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=pathlib.Path)
    parser.add_argument("--speed", type=float, default=1,
                        help="show it so many times as fast (default: 1)")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if not args.command or not shutil.which(args.command[0]):
        parser.error("name a command to record")
    states, code = record(args.command, args.speed)
    prompt = "$ " + " ".join(args.command)
    states = [(at, (prompt, *lines)) for at, lines in states]
    args.picture.write_text(draw(states, prompt, args.speed))
    return code


if __name__ == "__main__":
    sys.exit(main())
