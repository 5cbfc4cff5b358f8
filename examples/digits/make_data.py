"""Write scikit-learn's handwritten digits as PNG images in Parquet files: 1,500 to train on, 297 to validate with.

    python examples/digits/make_data.py /tmp/digits

The images (1,797 of 8 x 8 pixels, in grey) are in the package itself, so nothing is downloaded. Each row has the file
of an image, its label, and its number in scikit-learn's order:

    image: binary    label: int64    id: int64
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from sklearn.datasets import load_digits

TRAINING_ROWS = 1_500
ROWS_PER_FILE = 300
ROWS_PER_ROW_GROUP = 100


def png(pixels: npt.NDArray[np.float64]) -> bytes:
    """Encode an image whose pixels are from 0 to 16."""
    file = io.BytesIO()
    Image.fromarray((pixels * 255 / 16).round().astype(np.uint8)).save(file, "png")
    return file.getvalue()


def read_digits() -> pa.Table:
    """Return all images."""
    digits = load_digits()
    images = pa.array([png(pixels) for pixels in digits.images], pa.binary())
    return pa.table({"image": images, "label": digits.target.astype(np.int64), "id": np.arange(len(images))})


def write(folder: Path, rows: pa.Table) -> None:
    """Write several files, each of a few row groups."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, len(rows), ROWS_PER_FILE)):
        part = rows.slice(start, ROWS_PER_FILE)
        pq.write_table(part, folder / f"digits-{number}.parquet", row_group_size=ROWS_PER_ROW_GROUP)


def main() -> None:
    """Write the images into a folder for training and one for validation."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    rows = read_digits()
    write(folder / "training", rows.slice(0, TRAINING_ROWS))
    write(folder / "validation", rows.slice(TRAINING_ROWS))
    print(f"{len(rows):,} images in {len(list(folder.glob('*/*.parquet')))} files below {folder}")


if __name__ == "__main__":
    main()
