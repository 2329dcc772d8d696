"""What Python says of the files and transforms that the tests compare.

    peers.py csv|files|images|safetensors|torch FOLDER

Writes files into FOLDER with Python's own writers, and prints as JSON what
Python reads from them. Arrays are files of plain bytes beside them.
"""

import csv
import gzip
import json
import os
import pathlib
import random
import struct
import sys

import numpy

FOLDER = pathlib.Path(sys.argv[2])


def save(name, array):
    """Writes the elements; returns where they are and what they are."""
    array = numpy.ascontiguousarray(array)
    (FOLDER / name).write_bytes(array.tobytes())
    return {"file": name, "dtype": str(array.dtype), "sizes": array.shape}


def csv_files():
    """Tables of hard texts and of hard numbers."""
    rng = random.Random(7)
    pieces = ["", "a", "ü", " ", ",", ";", '"', '""', "\n", "\r\n", "\r", "1",
              "x y", "\t", "'", "\\"]
    tables = []
    for number in range(200):
        width = rng.randint(1, 5)
        rows = [["".join(rng.choices(pieces, k=rng.randint(0, 4)))
                 for _ in range(width)] for _ in range(rng.randint(1, 6))]
        name, separator = f"text{number}.csv", rng.choice(",;\t|")
        with open(FOLDER / name, "w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter=separator,
                       quoting=rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
                       lineterminator=rng.choice(["\n", "\r\n"])).writerows(rows)
        with open(FOLDER / name, newline="", encoding="utf-8") as file:
            read = [row for row in csv.reader(file, delimiter=separator) if row]
        tables.append({"file": name, "separator": separator, "rows": read})

    bits = numpy.random.default_rng(1).integers(0, 2**64, 3000, numpy.uint64)
    doubles = bits.view(numpy.float64)
    doubles = doubles[numpy.isfinite(doubles)][:2400]
    with numpy.errstate(over="ignore"):
        floats = doubles.astype(numpy.float32)
    doubles = doubles[numpy.isfinite(floats)]
    formats = [repr, "{:.17e}".format, "{:.3f}".format, "{:+.6g}".format]
    texts = [[formats[(i + j) % 4](float(value)) for j, value in enumerate(row)]
             for i, row in enumerate(doubles[:len(doubles) // 6 * 6]
                                     .reshape(-1, 6))]
    with gzip.open(FOLDER / "numbers.csv", "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerow("abcdef")
        writer.writerows(texts)
    wide = numpy.array([[float(text) for text in row] for row in texts])
    return {"tables": tables,
            "float64": save("numbers.f64", wide),
            "float32": save("numbers.f32", wide.astype(numpy.float32))}


def write_idx(name, array, packed):
    kinds = {"uint8": 8, "int8": 9, "int16": 11, "int32": 12, "float32": 13,
             "float64": 14}
    header = struct.pack(">BBBB", 0, 0, kinds[str(array.dtype)], array.ndim)
    header += b"".join(struct.pack(">I", size) for size in array.shape)
    content = header + array.astype(array.dtype.newbyteorder(">")).tobytes()
    opened = gzip.open if packed else open
    with opened(FOLDER / name, "wb") as file:
        file.write(content)


def binary_files():
    rng = numpy.random.default_rng(3)
    idx = []
    for number, dtype in enumerate(["uint8", "int8", "int16", "int32",
                                    "float32", "float64"]):
        for packed in (False, True):
            kind = numpy.dtype(dtype)
            sizes = (7, 3, 4)[:number % 3 + 1]
            bits = rng.integers(0, 256, (*sizes, kind.itemsize), numpy.uint8)
            array = bits.view(kind).reshape(sizes)
            name = f"{dtype}{int(packed)}"
            write_idx(name, array, packed)
            idx.append({"file": name, "array": save(name + ".raw", array)})

    images = rng.integers(0, 256, (20, 3, 32, 32), numpy.uint8)
    labels = rng.integers(0, 10, 20, numpy.uint8)
    for part in range(5):
        rows = slice(4 * part, 4 * part + 4)
        records = numpy.concatenate(
            [labels[rows, None], images[rows].reshape(4, -1)], axis=1)
        records.tofile(FOLDER / f"data_batch_{part + 1}.bin")
    tokens = {}
    for dtype in ("uint16", "uint32"):
        array = rng.integers(0, 2**16 if dtype == "uint16" else 2**32, 1000
                             ).astype(dtype)
        array.tofile(FOLDER / f"tokens.{dtype}")
        tokens[dtype] = save(f"tokens.{dtype}.raw", array.astype(numpy.int64))
    return {"idx": idx, "tokens": tokens,
            "cifar": {"images": save("cifar.raw", images),
                      "labels": labels.tolist()}}


def image_folder(root):
    """The samples of torchvision.datasets.ImageFolder, as its page says."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    samples = []
    for label, name in enumerate(classes):
        for folder, _, names in sorted(
                os.walk(os.path.join(root, name), followlinks=True)):
            samples += [[os.path.join(folder, name), label]
                        for name in sorted(names)
                        if name.lower().endswith((".jpg", ".jpeg", ".png"))]
    return classes, samples


def images():
    from PIL import Image

    rng = numpy.random.default_rng(5)

    def picture(height, width, channels):
        """Smooth colours with some noise, so that a JPEG is not all noise."""
        y, x, c = numpy.mgrid[0:height, 0:width, 0:channels]
        smooth = 127 + 120 * numpy.sin(x / 9 + c) * numpy.cos(y / 7 - 2 * c)
        noisy = smooth + rng.normal(0, 8, smooth.shape)
        return noisy.clip(0, 255).astype(numpy.uint8)

    root = FOLDER / "root"
    count = 0

    def save_image(image, ending, **options):
        nonlocal count
        folder = root / ["b", "a b", "B", "a/x", "a/x-y"][count % 5]
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{count}{ending}", **options)
        count += 1

    for height, width in [(1, 1), (8, 8), (17, 33), (64, 47), (100, 130)]:
        colour = Image.fromarray(picture(height, width, 3))
        gray = Image.fromarray(picture(height, width, 1)[:, :, 0])
        cmyk = Image.frombytes("CMYK", (width, height),
                               picture(height, width, 4).tobytes())
        alpha = Image.frombytes("RGBA", (width, height),
                                picture(height, width, 4).tobytes())
        gray_alpha = Image.frombytes("LA", (width, height),
                                     picture(height, width, 2).tobytes())
        for subsampling in (0, 1, 2):  # 4:4:4, 4:2:2, 4:2:0
            for progressive in (False, True):
                save_image(colour, ".jpg", quality=90, subsampling=subsampling,
                           progressive=progressive)
        save_image(colour, ".JPEG", quality=30, restart_marker_blocks=2)
        save_image(gray, ".jpeg", quality=75, optimize=True)
        save_image(cmyk, ".jpg", quality=85)
        turned = Image.Exif()
        turned[0x0112] = 6  # the orientation, which is not applied
        save_image(colour, ".jpg", exif=turned)
        for image in (colour, gray, alpha, gray_alpha, gray.convert("1"),
                      colour.quantize(200), colour.quantize(3),
                      alpha.quantize(16)):
            save_image(image, ".PNG" if count % 2 else ".png")
        save_image(colour.quantize(5), ".png", transparency=2)
        save_image(gray, ".png", transparency=7)
        save_image(colour, ".png", transparency=(1, 2, 3))
    # Images that Pillow does not write: 2 and 4 bits of gray, 16 bits, in a
    # PNG.
    import zlib
    for bits, kind, channels in [(2, 0, 1), (4, 0, 1), (16, 2, 3), (16, 6, 4)]:
        height, width = 9, 21
        raw = rng.integers(0, 256, (height, (width * channels * bits + 7) // 8),
                           numpy.uint8)
        data = b"".join(b"\0" + row.tobytes() for row in raw)
        content = b"\x89PNG\r\n\x1a\n"
        for name, body in [
                (b"IHDR", struct.pack(">IIBBBBB", width, height, bits, kind,
                                      0, 0, 0)),
                (b"IDAT", zlib.compress(data)), (b"IEND", b"")]:
            content += (struct.pack(">I", len(body)) + name + body
                        + struct.pack(">I", zlib.crc32(name + body)))
        (root / "b" / f"{bits}-{channels}.png").write_bytes(content)

    (root / "b" / "note.txt").write_text("no image")
    classes, samples = image_folder(root)
    listed = []
    for number, (path, label) in enumerate(samples):
        with Image.open(path) as image:
            pixels = numpy.asarray(image.convert("RGB")).transpose(2, 0, 1)
        listed.append({"path": path, "label": label,
                       "pixels": save(f"{number}.raw", pixels)})
    return {"classes": classes, "samples": listed}


def safetensors_files():
    """Two files that count as one dataset; nothing if the package is missing."""
    try:
        from safetensors.numpy import save_file
    except ImportError:
        return {}
    rng = numpy.random.default_rng(2)
    columns = []
    for dtype in ["uint8", "int8", "int16", "int32", "int64", "float32",
                  "float64", "bool"]:
        values = rng.integers(0, 2, (9, 3, 5)).astype(dtype)
        columns.append({"name": f"column of {dtype}",
                        "array": save(f"{dtype}.raw", values.view(
                            numpy.uint8 if dtype == "bool" else dtype)),
                        "values": values})
    for name, rows in [("one", slice(0, 4)), ("two", slice(4, 9))]:
        save_file({column["name"]: numpy.ascontiguousarray(column["values"][rows])
                   for column in columns},
                  FOLDER / f"{name}.safetensors", metadata={"by": "Python"})
    for column in columns:
        del column["values"]
    return {"files": ["one.safetensors", "two.safetensors"], "columns": columns}


def of_torch():
    import torch
    import torch.nn.functional as F
    from torch.utils.data import ConcatDataset, Subset, random_split
    splits = []
    for size, lengths, seed in [
            (10, [7, 3], 42), (11, [0.5, 0.25, 0.25], 0), (1, [1], 3),
            (100, [0.9, 0.1], 7), (1797, [1000, 700, 97], 2**40),
            (7, [1 / 3, 1 / 3, 1 / 3], 5), (3, [0, 3], 1)]:
        generator = torch.Generator().manual_seed(seed)
        parts = random_split(range(size), lengths, generator=generator)
        splits.append({"size": size, "lengths": lengths, "seed": seed,
                       "parts": [list(part.indices) for part in parts]})
    orders = [{"size": size, "seed": seed,
               "order": torch.randperm(
                   size, generator=torch.Generator().manual_seed(seed)).tolist()}
              for size in (0, 1, 10, 1000, 70000) for seed in (0, 123456789)]
    joined = ConcatDataset([Subset(range(10), [3, 3, 9]), range(100, 102),
                            range(0)])
    generator = torch.Generator().manual_seed(1)
    resized = []
    for dtype in (torch.uint8, torch.float32):
        for height, width, size in [(40, 60, (20, 30)), (33, 17, (50, 9)),
                                    (5, 5, (5, 8)), (64, 48, (7, 7))]:
            for antialias in (True, False):
                image = torch.randint(0, 256, (3, height, width),
                                      generator=generator).to(dtype)
                result = F.interpolate(image[None], size=size, mode="bilinear",
                                       align_corners=False, antialias=antialias)
                name = f"resize{len(resized)}"
                resized.append({
                    "antialias": antialias, "size": size,
                    "image": save(name + ".in", image.numpy()),
                    "result": save(name + ".out", result[0].numpy())})
    middles = [{"have": have, "want": want,
                "begin": int(round((have - want) / 2.0))}
               for have in range(1, 14) for want in range(1, have + 1)]
    return {"splits": splits, "orders": orders,
            "joined": [joined[i] for i in range(len(joined))],
            "resized": resized, "middles": middles}


print(json.dumps({"csv": csv_files, "files": binary_files, "images": images,
                  "safetensors": safetensors_files, "torch": of_torch}[sys.argv[1]]()))
