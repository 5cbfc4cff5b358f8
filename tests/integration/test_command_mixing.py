"""`tdu mixing`: what it says of the plan's order, held against the batches of real loaders."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import Commands
from conftest import ACCESS_KEY, SECRET_KEY

from torch_dataloader_utils import StructuredDataset
from torch_dataloader_utils.cli.mixing import MixingOptions, Order, mixing
from torch_dataloader_utils.reading.row_groups.decoder import Decoder

ROWS, LABELS, FILES = 24_000, 8, 6


@pytest.fixture
def tdu(tmp_path):
    return Commands(tmp_path)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Files sorted by label, in row groups of 200 rows, with a text of ten letters."""
    directory = tmp_path_factory.mktemp("mixing") / "data"
    directory.mkdir()
    labels = np.arange(ROWS) * LABELS // ROWS
    table = pa.table(
        {"label": labels, "name": [f"class {n}" for n in labels], "x": np.zeros(ROWS), "text": ["0123456789"] * ROWS}
    )
    for number, part in enumerate(np.split(np.arange(ROWS), FILES)):
        rows = table.slice(part[0], len(part))
        pq.write_table(rows, directory / f"part-{number}.parquet", row_group_size=200)
    return directory


def design_effect_of_loader(data, options: MixingOptions, order: Order, epochs: int) -> float:
    """Return chi-square for each degree of freedom of the batches of real loaders, of all ranks."""
    found = ideal = 0.0
    for rank in range(options.ranks):
        loader, _ = StructuredDataset.create_dataloader(
            data,
            columns=["label"],
            batch_size=options.batch_size,
            num_workers=options.workers,
            num_ranks=options.ranks,
            rank=rank,
            **order.arguments,
        )
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            for batch in loader:
                counts = np.bincount(batch["label"].numpy(), minlength=LABELS)
                expected = len(batch["label"]) / LABELS
                found += ((counts - expected) ** 2 / expected).sum() / (LABELS - 1)
                ideal += (ROWS - len(batch["label"])) / (ROWS - 1)
    return found / ideal


@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.errors.UnevenRanksWarning")
@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 2)], ids=["one process", "two ranks of two workers"])
def test_what_is_computed_from_the_plan_is_what_loaders_deliver(data, ranks, workers):
    options = MixingOptions(batch_size=100, ranks=ranks, workers=workers, buffer_sizes=(100, 1_000, ROWS))
    found = mixing(data, "label", options)
    assert [str(one.order) for one in found.orders] == [
        "file order",
        "shards only",
        "100 rows",
        "1,000 rows",
        "24,000 rows",
    ]
    for one in found.orders:
        delivered = design_effect_of_loader(data, options, one.order, epochs=3 if one.order.shuffle else 1)
        assert one.mixing.design_effect == pytest.approx(delivered), one.order


def test_sorted_labels_are_not_mixed_without_shuffle_and_the_smallest_buffer_that_is_enough_is_advised(data):
    found = mixing(data, "name", MixingOptions(batch_size=100, buffer_sizes=(1_000, 6_000, ROWS)))
    first, shards, *_, whole = found.orders
    assert first.mixing.intraclass_correlation == pytest.approx(1)
    assert shards.mixing.intraclass_correlation > 0.9
    assert abs(whole.mixing.design_effect - 1) < 4 * whole.mixing.error
    assert found.labels == tuple((f"class {number}", ROWS // LABELS) for number in range(LABELS))
    assert found.advised is not None
    advised = found.orders[found.advised]
    assert advised.effective_part > 0.85
    assert all(one.effective_part < 0.9 for one in found.orders[: found.advised])
    assert f"shuffle_buffer_size={advised.order.buffer_size}" in found.advice


def test_costs_are_the_decoded_bytes_of_two_shards_of_each_stream(data):
    options = MixingOptions(batch_size=100, workers=2, buffer_sizes=(1_000,))
    found = mixing(data, "label", options)
    row_bytes = 8 + 8 + 2 * 4 + len("class 0") + 10  # two numbers, and two texts with their offsets
    assert found.row_bytes == pytest.approx(row_bytes, rel=0.01)
    assert found.orders[-1].rows_together == 1_000
    assert found.orders[-1].memory_bytes == pytest.approx(2 * 2 * 1_000 * row_bytes, rel=0.01)
    few = mixing(data, "label", options, columns=["x"])
    assert few.row_bytes == 8
    assert few.orders[-1].memory_bytes == 2 * 2 * 1_000 * 8


def test_default_buffers_end_with_all_rows(data):
    found = mixing(data, "label", MixingOptions())
    assert [one.order.buffer_size for one in found.orders] == [None, None, 1024, 4096, 16384, ROWS]


def test_no_shuffle_is_advised_where_labels_are_mixed_already(tmp_path):
    labels = np.random.default_rng(0).integers(0, 3, 5_000)
    pq.write_table(pa.table({"y": labels}), tmp_path / "random.parquet", row_group_size=500)
    found = mixing(tmp_path, "y", MixingOptions(batch_size=100))
    assert found.advised == 0
    assert "No shuffle is needed" in found.advice


def test_where_no_buffer_is_enough_the_advice_says_what_would_help(tmp_path):
    pq.write_table(pa.table({"y": np.arange(5_000) // 500}), tmp_path / "one.parquet", row_group_size=5_000)
    found = mixing(tmp_path, "y", MixingOptions(batch_size=100, buffer_sizes=(500,)))
    assert found.advised is None
    assert found.advice.endswith("Smaller row groups would mix better (they have up to 5,000 rows).")


def test_the_advice_names_what_limits_the_rows_that_are_shuffled_together(data):
    options = MixingOptions(batch_size=100, workers=2, buffer_sizes=(ROWS,))
    found = mixing(data, "label", options, split_bytes=5_000)
    assert found.advised is None
    assert found.orders[-1].rows_together < ROWS // 8
    assert found.advice.endswith("(they have up to 200 rows), as would fewer workers or a larger split_bytes.")


def test_text_files_are_counted(tmp_path):
    lines = "".join(f"{number},{number // 500}\n" for number in range(2_000))
    (tmp_path / "data.csv").write_text(f"x,y\n{lines}", encoding="utf-8")
    found = mixing(tmp_path, "y", MixingOptions(batch_size=100), format="csv")
    assert found.rows == 2_000
    assert found.orders[0].mixing.intraclass_correlation == pytest.approx(1)


def test_rates_are_measured_if_asked_for(data):
    found = mixing(data, "label", MixingOptions(buffer_sizes=(1_000,), seconds=0.01))
    assert all(one.rows_per_s is not None and one.rows_per_s > 0 for one in found.orders)


def test_the_command_shows_a_bar_for_each_order_and_draws_a_picture(tdu, data, tmp_path):
    picture = tmp_path / "mixing.svg"
    words = ["--label", "label", "--batch-size", "100", "--buffers", f"1000,{ROWS}", "--within", "15"]
    done = tdu("mixing", data, *words, "--plot", picture)
    assert done.code == 0, done
    assert done.err == ""
    shares = {line[:14].strip(): line.count("█") for line in done.out.splitlines() if "░" in line or "█" in line}
    assert list(shares) == ["file order", "shards only", "1,000 rows", "24,000 rows"]
    assert shares["file order"] == 0
    assert shares["24,000 rows"] == 10
    assert "Advice: shuffle_buffer_size=24000" in done.out
    root = ET.parse(picture).getroot()  # noqa: S314 - our own picture
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"file order", "shards only", "1,000 rows", "24,000 rows"} <= set(texts)
    bars = list(root.iter("{http://www.w3.org/2000/svg}rect"))[1:]  # the first is the background
    heights = [float(bar.attrib["height"]) for bar in bars]
    assert len(heights) == 4
    assert heights[0] < heights[2] < heights[3]


def test_json_has_the_figures_of_each_order(tdu, data):
    done = tdu("mixing", data, "--label", "name", "--batch-size", "100", "--buffers", "1000", "--ranks", "2", "--json")
    assert done.code == 0, done
    found = done.value
    assert found["rows"] == ROWS
    assert found["options"]["ranks"] == 2
    assert [order["order"]["buffer_size"] for order in found["orders"]] == [None, None, 1000]
    assert found["orders"][0]["mixing"]["intraclass_correlation"] == pytest.approx(1)


def test_labels_on_s3_are_read(s3, data):
    bucket = s3.new_bucket(data)
    options = {"key": ACCESS_KEY, "secret": SECRET_KEY, "client_kwargs": {"endpoint_url": s3.url}}
    found = mixing(f"s3://{bucket}", "label", MixingOptions(buffer_sizes=(1_000,)), storage_options=options)
    local = mixing(data, "label", MixingOptions(buffer_sizes=(1_000,)))
    assert [one.mixing for one in found.orders] == [one.mixing for one in local.orders]


def test_each_row_group_is_read_once_whatever_the_number_of_buffers(data, monkeypatch):
    read = []
    decode = Decoder.whole

    def noted(self, path, numbers, size):
        read.extend((path, number) for number in numbers)
        return decode(self, path, numbers, size)

    monkeypatch.setattr(Decoder, "whole", noted)
    mixing(data, "label", MixingOptions(buffer_sizes=(1_000, 6_000, ROWS)), columns=["label", "x"])
    assert len(read) == len(set(read)) == ROWS // 200


def test_failures_of_the_command_say_what_is_wrong(tdu, data, tmp_path):
    assert "did you mean 'label'" in tdu.fails("mixing", data, "--label", "lable")
    assert "one value alone" in tdu.fails("mixing", data, "--label", "x")
    assert "its name ends with .svg" in tdu.fails("mixing", data, "--label", "label", "--plot", tmp_path / "mixing.png")
