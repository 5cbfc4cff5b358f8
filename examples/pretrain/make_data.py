"""Tokenise real text as Parquet files: what is in every environment with this package.

    python examples/pretrain/make_data.py /tmp/documents

Nothing is downloaded. A document is what a topic of `help()` says, the source of a module of Python's standard library,
or the description of an installed package. A byte-pair tokenizer is trained on them, and kept as `tokenizer.json`. Each
row of the files is a document:

    tokens: list of int32, as the tokenizer encodes the text
    ids: list of int32, as long: the number of each token among all, by which the demonstration counts them
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<end>"
"""The token that ends each document. It has the number 0."""

VOCABULARY = 2_048
DOCUMENTS_PER_FILE = 100
DOCUMENTS_PER_ROW_GROUP = 10


def texts() -> Iterator[str]:
    """Yield the documents, in a fixed order."""
    yield from (text for _, text in sorted(topics.items()))
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield module.read_text(encoding="utf-8")
    descriptions = {each.metadata["Name"]: each.metadata.get_payload() or "" for each in distributions()}
    yield from (str(text) for _, text in sorted(descriptions.items()) if text)


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Return a byte-pair tokenizer that is trained on the documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def write(folder: Path, documents: list[list[int]]) -> int:
    """Write tokenised documents, and return how many tokens they have."""
    folder.mkdir(parents=True, exist_ok=True)
    offsets = np.append(0, np.cumsum([len(tokens) for tokens in documents])).astype(np.int32)
    total = int(offsets[-1])
    values = {
        "tokens": np.fromiter((token for tokens in documents for token in tokens), np.int32, total),
        "ids": np.arange(total, dtype=np.int32),
    }
    table = pa.table({name: pa.ListArray.from_arrays(offsets, column) for name, column in values.items()})
    for number, start in enumerate(range(0, len(documents), DOCUMENTS_PER_FILE)):
        part = table.slice(start, DOCUMENTS_PER_FILE)
        pq.write_table(part, folder / f"part-{number:03d}.parquet", row_group_size=DOCUMENTS_PER_ROW_GROUP)
    return total


def main() -> None:
    """Train the tokenizer, and write the documents."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=200, help="how many, at most")
    arguments = parser.parse_args()
    documents = list(texts())
    documents = documents[:: max(1, len(documents) // arguments.documents)][: arguments.documents]  # of every kind
    tokenizer = train_tokenizer(documents)
    total = write(arguments.folder / "documents", [each.ids for each in tokenizer.encode_batch(documents)])
    tokenizer.save(str(arguments.folder / "tokenizer.json"))
    print(f"{len(documents):,} documents of {total:,} tokens, {tokenizer.get_vocab_size():,} words")


if __name__ == "__main__":
    main()
