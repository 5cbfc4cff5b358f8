"""`tdu bench`: what it measures is the whole of the files, its figures fit together, and nothing is left behind."""

from __future__ import annotations

import os
import signal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import Commands
from conftest import ACCESS_KEY, SECRET_KEY
from jobs.forked import start
from jobs.processes import processes_of_sessions, wait_until_none
from support import write_dataset

from torch_dataloader_utils.cli.bench import BenchOptions, LoaderPasses, RawArrow, Setting, bench, measure
from torch_dataloader_utils.cli.opening import open_dataset
from torch_dataloader_utils.cli.parser import UsageError, make_parser

QUICK = ("--seconds", "0.01", "--rounds", "2")
FEW = BenchOptions(workers=(0,), batch_sizes=(16,), seconds=0.01, rounds=1)


@pytest.fixture
def tdu(tmp_path):
    return Commands(tmp_path)


@pytest.fixture
def data(tmp_path):
    write_dataset(tmp_path / "data")
    return tmp_path / "data"


def test_every_setting_is_measured_beside_arrow_and_the_figures_fit_together(tdu, data):
    done = tdu("bench", data, "--workers", "0,2", "--batch-sizes", "16,64", "--columns", "value,name", *QUICK, "--json")
    assert done.code == 0, done
    assert done.err == ""
    found = done.value
    assert (found["files"], found["rows"], found["columns"]) == (4, 443, ["value", "name"])
    assert found["rounds"] in {1, 2}  # on a machine that is very busy the second is left out
    settings = [one["setting"] for one in found["measured"]]
    assert settings == [{"workers": workers, "batch_size": size} for workers in (0, 2) for size in (16, 64)]
    assert found["advice"]["setting"] in settings
    for one in [found["raw"], *found["measured"]]:
        rates = one["rows_per_s"]
        assert 0 < rates["low"] <= rates["median"] <= rates["high"]
        assert one["first_batch_s"]["low"] > 0
        assert one["stored_bytes_per_s"] == pytest.approx(rates["median"] * found["stored_row_bytes"])
        assert one["decoded_bytes_per_s"] == pytest.approx(rates["median"] * found["decoded_row_bytes"])
    raw = found["raw"]["rows_per_s"]
    for one in found["measured"]:
        rates, ratio = one["rows_per_s"], one["of_raw"]
        assert rates["low"] / raw["high"] <= ratio["low"] <= ratio["high"] <= rates["high"] / raw["low"]


def test_text_has_a_line_for_arrow_and_for_each_setting_and_warns_of_the_page_cache(tdu, data):
    done = tdu("bench", data, "--workers", "0", "--batch-sizes", "16,64", "--buffer", "100", *QUICK)
    assert done.code == 0, done
    lines = [line.split() for line in done.out.splitlines()]
    assert any(line[:2] == ["raw", "Arrow"] for line in lines)
    assert {tuple(line[:2]) for line in lines if line[:1] == ["0"]} == {("0", "16"), ("0", "64")}
    assert "Advice: num_workers=0, batch_size=" in done.out
    assert "page cache" in done.out


def test_row_bytes_are_those_of_the_chosen_columns(data):
    dataset = open_dataset(data, columns=["value", "name"])
    stored = rows = 0
    for path in data.iterdir():
        footer = pq.read_metadata(path)
        rows += footer.num_rows
        chunks = [footer.row_group(group).column(column) for group in range(footer.num_row_groups) for column in (0, 2)]
        stored += sum(chunk.total_compressed_size for chunk in chunks)
    assert dataset.stored_row_bytes() == pytest.approx(stored / rows)
    names = [f"row {value}" for value in range(443)]
    raw = RawArrow(dataset.opened)
    assert sum(batch.num_rows for batch in raw.begin()) == 443
    assert raw.decoded_row_bytes == pytest.approx(8 + 4 + len("".join(names)) / 443, rel=0.05)


def test_arrow_alone_decodes_the_same_rows_as_the_loader_delivers(data):
    dataset = open_dataset(data, columns=["name", "value"])
    raw = RawArrow(dataset.opened)
    decoded = pa.Table.from_batches(raw.begin())
    loader, _ = dataset.loader(output_format="arrow")
    assert decoded.to_pydict() == pa.concat_tables(loader).to_pydict()
    assert decoded["value"].to_pylist() == list(range(443))


@pytest.mark.usefixtures("leaves_nothing_behind")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_of_the_loader_counts_the_rows_that_it_took(data, workers):
    passes = LoaderPasses(open_dataset(data), Setting(workers, 16))
    for _ in range(2):
        assert sum(len(batch["value"]) for batch in passes.begin()) == passes.rows() == 443
    batches = passes.begin()
    assert len(next(batches)["value"]) + len(next(batches)["value"]) == passes.rows()
    del batches
    passes.close()


def test_files_that_are_too_large_for_the_time_are_read_in_part(data):
    passes = LoaderPasses(open_dataset(data), Setting(0, 16))
    assert measure(passes, seconds=0).rows == 16  # the third batch, after which the time is over
    passes.close()


def test_many_small_files_and_a_shuffle_are_measured(tmp_path):
    for number in range(120):
        pq.write_table(pa.table({"x": np.arange(3) + 3 * number}), tmp_path / f"{number:03d}.parquet")
    found = bench(tmp_path, FEW, shuffle=True, shuffle_buffer_size=50)
    assert (found.files, found.rows) == (120, 360)
    assert found.measured[0].rows_per_s.median > 0


def test_where_arrow_alone_cannot_read_the_files_the_loader_is_measured_all_the_same(tmp_path):
    """Arrow's scanner does not know the suffix .zst."""
    with pa.CompressedOutputStream(str(tmp_path / "a.csv.zst"), "zstd") as file:
        file.write(b"x,y\n" + b"".join(b"%d,a\n" % number for number in range(500)))
    found = bench(tmp_path, FEW, format="csv")
    assert found.raw is None
    assert found.decoded_row_bytes is None
    assert found.measured[0].of_raw is None
    assert found.measured[0].rows_per_s.median > 0
    assert "There is no comparison with raw Arrow" in found.notes[0]


def test_files_on_s3_are_measured_without_showing_secrets(tdu, s3, data):
    bucket = s3.new_bucket(data)
    options = {"key": ACCESS_KEY, "secret": SECRET_KEY, "client_kwargs.endpoint_url": s3.url}
    words = [word for name, value in options.items() for word in ("--storage-option", f"{name}={value}")]
    done = tdu("bench", f"s3://{bucket}", *words, "--workers", "0,2", "--batch-sizes", "64", *QUICK, "--json")
    assert done.code == 0, done
    found = done.value
    assert found["rows"] == 443
    assert found["raw"]["rows_per_s"]["low"] > 0
    assert not any("page cache" in note for note in found["notes"])
    assert SECRET_KEY not in done.out + done.err


def test_rounds_that_would_take_far_longer_than_announced_are_left_out(data, monkeypatch):
    monkeypatch.setattr("torch_dataloader_utils.cli.bench.OVERTIME", 0.0)
    found = bench(data, BenchOptions(workers=(0,), batch_sizes=(16,), seconds=0.01, rounds=3))
    assert found.rounds == 1
    assert "Only 1 of 3 rounds" in found.notes[-1]


def test_files_without_rows_and_columns_with_nulls_are_refused_in_a_line(tdu, tmp_path):
    pq.write_table(pa.table({"x": pa.array([], pa.int64())}), tmp_path / "empty.parquet")
    assert "the files have no rows" in tdu.fails("bench", tmp_path / "empty.parquet", *QUICK)
    pq.write_table(pa.table({"x": [1, None]}), tmp_path / "nulls.parquet")
    assert "column 'x' holds 1 nulls" in tdu.fails("bench", tmp_path / "nulls.parquet", *QUICK)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers=-1"], "'-1' is not between 0"),
        (["--workers", "0,two"], "'two' is not an integer"),
        (["--batch-sizes", "0"], "'0' is not between 1"),
        (["--seconds", "soon"], "'soon' is not a number"),
        (["--seconds", "nan"], "'nan' is not more than 0"),
        (["--seconds", "0"], "'0' is not more than 0"),
    ],
    ids=["negative workers", "workers in words", "no rows", "seconds in words", "not a number", "no seconds"],
)
def test_wrong_numbers_are_refused(words, message):
    with pytest.raises(UsageError, match=message):
        make_parser(["bench"]).parse_args(["bench", "data", *words])


@pytest.mark.parametrize(
    "signal_number",
    [
        pytest.param(signal.SIGINT, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, id="term", marks=pytest.mark.soak),
        pytest.param(signal.SIGKILL, id="kill", marks=pytest.mark.soak),
    ],
)
@pytest.mark.usefixtures("tdu")
def test_a_command_that_is_ended_leaves_no_workers_behind(data, tmp_path, signal_number):
    words = ["bench", str(data), "--workers", "2", "--batch-sizes", "16", "--seconds", "0.5", "--rounds", "100"]
    output, errors = tmp_path / "stdout", tmp_path / "stderr"
    process = start(tmp_path / "command.py", str(errors), *words, output=output, environment={})
    try:
        assert not wait_until_none(lambda: len(processes_of_sessions({process.pid})) < 3), (
            "the workers have not started"
        )
        os.kill(process.pid, signal_number)
        process.join(120)
        assert process.exitcode == -signal_number
        assert not wait_until_none(lambda: processes_of_sessions({process.pid}))
    finally:
        for pid in processes_of_sessions({process.pid}):
            os.kill(pid, signal.SIGKILL)
