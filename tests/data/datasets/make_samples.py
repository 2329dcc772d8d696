"""Writes the images in the folder samples/, from which the tests make damaged
files. They are small, so that a test can try every byte.

    make_samples.py FOLDER
"""

import pathlib
import struct
import sys
import zlib

import numpy
from PIL import Image

WIDTH, HEIGHT = 13, 10


def pixels(channels):
    y, x, c = numpy.mgrid[0:HEIGHT, 0:WIDTH, 0:channels]
    return ((13 * x + 7 * y * (c + 1) + 40 * c) % 256).astype(numpy.uint8)


def interlaced_png(image):
    """A PNG in seven passes (Adam7), which Pillow does not write."""
    passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4),
              (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
    raw = b""
    for x, y, right, down in passes:
        part = image[y::down, x::right]
        if part.size:
            raw += b"".join(b"\0" + row.tobytes() for row in part)

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(
            ">I", zlib.crc32(body))

    height, width, _ = image.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 1)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
            + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b""))


def main():
    folder = pathlib.Path(sys.argv[1])
    gray = Image.fromarray(pixels(1)[:, :, 0])
    colour = Image.fromarray(pixels(3))
    gray.save(folder / "gray.jpg", quality=80)
    colour.save(folder / "colour.jpg", quality=80)
    colour.save(folder / "progressive.jpg", quality=80, progressive=True)
    Image.fromarray(pixels(4), "CMYK").save(folder / "cmyk.jpg", quality=80)
    gray.save(folder / "gray.png")
    colour.save(folder / "colour.png")
    Image.fromarray(pixels(4), "RGBA").save(folder / "alpha.png")
    colour.quantize(8).save(folder / "palette.png")
    (folder / "interlaced.png").write_bytes(interlaced_png(pixels(3)))


main()
