"""The command line: what its commands say is what loaders do, on local files and on S3; and how they fail."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import SECRET, Commands
from conftest import ACCESS_KEY, SECRET_KEY
from jobs.processes import inherited, processes_with, wait_until_none
from terminals import Terminal

from torch_dataloader_utils import MixedDataset, Packing, Source, StructuredDataset, UnevenRanksWarning
from torch_dataloader_utils.cli.parser import COMMANDS, command_module, make_parser
from torch_dataloader_utils.errors import UnreadableFileError

OLD_STATES = Path(__file__).parents[1] / "resources" / "old_states"
FILES, ROWS_OF_A_FILE, RANKS, BATCH = 4, 1_200, 2, 50
SETTINGS = {"batch_size": BATCH, "num_workers": 0, "shuffle": True, "shuffle_buffer_size": 600}
COLORS = "\x1b[3"


@dataclass(frozen=True)
class Place:
    """Where the data and checkpoints are.

    Attributes:
        root: The directory, or the bucket's URL.
        directory: The directory of which the bucket is a copy.
        options: What commands need to read there.
    """

    root: str
    directory: Path
    options: tuple[str, ...] = ()

    def at(self, name: str) -> str:
        """Return a path there."""
        return f"{self.root}/{name}"


@pytest.fixture
def tdu(tmp_path):
    return Commands(tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Files, the states of two ranks after 7 and after 11 batches, and what the ranks delivered, by step."""
    directory = tmp_path_factory.mktemp("command_line")
    write_files(directory / "data")
    for batches in (7, 11):
        save_states(directory / f"after-{batches}", directory / "data", batches)
    return directory


@pytest.fixture(scope="module", params=["local", "S3"])
def place(request, made):
    if request.param == "local":
        return Place(str(made), made)
    s3 = request.getfixturevalue("s3")
    options = (f"client_kwargs.endpoint_url={s3.url}", f"key={ACCESS_KEY}", f"secret={SECRET_KEY}")
    bucket = s3.new_bucket(made)
    save_states(made / "on_s3", f"s3://{bucket}/data", 7, storage_options=s3.storage_options())
    for path in (made / "on_s3").iterdir():
        s3.client().upload_file(str(path), bucket, f"after-7/{path.name}")
    shutil.rmtree(made / "on_s3")
    flags = tuple(word for option in options for word in ("--storage-option", option))
    return Place(f"s3://{bucket}", made, flags)


def write_files(directory):
    directory.mkdir()
    for number in range(FILES):
        ids = np.arange(number * ROWS_OF_A_FILE, (number + 1) * ROWS_OF_A_FILE)
        table = pa.table({"id": ids, "x": np.zeros(ROWS_OF_A_FILE)})
        pq.write_table(table, directory / f"part-{number}.parquet", row_group_size=100)


def loader_of(path, rank, **options: Any):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnevenRanksWarning)
        return StructuredDataset.create_dataloader(str(path), num_ranks=RANKS, rank=rank, **(SETTINGS | options))[0]


def save_states(directory, path, batches, **options: Any):
    """Save what two ranks have delivered, as `save_rank_state` does."""
    directory.mkdir()
    for rank in range(RANKS):
        loader = loader_of(path, rank, **options)
        for _ in zip(range(batches), loader, strict=False):
            pass
        (directory / f"loader-{rank:05}-of-{RANKS:05}.json").write_text(json.dumps(loader.state_dict()))


def delivered(path, rank):
    """Return the ids of the rows of each step of a rank, as a loader delivers them."""
    return [batch["id"].tolist() for batch in loader_of(path, rank)]


def ids_of(found):
    """Return the ids of rows that a command names."""
    numbers = [int(path.removeprefix("part-").removesuffix(".parquet")) for path in found["files"]]
    return [number * ROWS_OF_A_FILE + row for number, row in zip(numbers, found["rows"], strict=True)]


# What they say -------------------------------------------------------------------------------------------------------


def test_plan_says_what_loaders_do(tdu, place):
    flags = ["--ranks", RANKS, "--workers", 0, "--batch-size", BATCH, "--buffer", 600, *place.options]
    found = tdu("plan", place.at("data"), *flags, "--json").value
    assert (found["files"]["files"], found["files"]["rows"]) == (FILES, FILES * ROWS_OF_A_FILE)
    for rank, of_rank in enumerate(found["ranks"]):
        steps = delivered(place.directory / "data", rank)
        assert (of_rank["steps"], of_rank["rows"]) == (len(steps), sum(map(len, steps)))
    text = tdu("plan", place.at("data"), *flags).out
    assert f"{FILES * ROWS_OF_A_FILE:,}" in text
    assert SECRET not in text
    assert COLORS not in text


def test_plan_writes_a_picture_and_a_manifest(tdu, made, tmp_path):
    plot, manifest = tmp_path / "plan.svg", tmp_path / "manifest"
    done = tdu("plan", made / "data", "--workers", 2, "--ranks", 3, "--plot", plot, "--save", manifest)
    assert done.code == 0
    texts = [text.text for text in ET.parse(plot).iter("{http://www.w3.org/2000/svg}text")]  # noqa: S314 - our own
    assert {f"part-{number}.parquet" for number in range(FILES)} | {"rank 2, worker 1"} <= set(texts)
    _, dataset = StructuredDataset.create_dataloader(made / "data", manifest=manifest.read_bytes(), num_workers=0)
    assert f"{FILES} files" in repr(dataset)


def test_plan_and_mixing_write_where_the_data_is(tdu, place):
    (place.directory / "written").mkdir(exist_ok=True)
    plot, manifest = place.at("written/plan.svg"), place.at("written/manifest")
    done = tdu("plan", place.at("data"), *place.options, "--workers", 0, "--plot", plot, "--save", manifest)
    assert (done.code, done.err) == (0, "")
    assert tdu("diff", manifest, manifest, *place.options).code == 0
    mixed = place.at("written/mixing.svg")
    done = tdu("mixing", place.at("data"), *place.options, "--label", "id", "--plot", mixed, "--workers", 0)
    assert (done.code, done.err) == (0, "")
    storage = {name: option for name, _, option in (word.partition("=") for word in place.options[1::2])}
    endpoint = storage.pop("client_kwargs.endpoint_url", None)
    if endpoint is not None:
        storage |= {"client_kwargs": {"endpoint_url": endpoint}}
    for picture in (plot, mixed):
        with fsspec.open(picture, "rb", **storage) as file:
            assert ET.parse(file).getroot().tag == "{http://www.w3.org/2000/svg}svg"  # noqa: S314 - our own


@pytest.mark.parametrize(
    "command",
    [("plan", ""), ("verify", "after-7", ""), ("verify", ""), ("diff", "after-7", "")],
    ids=["plan", "verify data", "verify", "diff"],
)
def test_an_empty_path_is_not_the_working_directory(tdu, made, monkeypatch, command):
    monkeypatch.chdir(made)
    assert "path is empty" in tdu.fails(*command)


def test_plan_advises_where_workers_have_nothing_to_read(tdu, made):
    found = tdu("plan", made / "data", "--ranks", 60, "--workers", 2, "--json").value
    [advice] = [one for one in found["advice"] if one["about"] == "workers"]
    idle = sum(rows == 0 for rank in found["ranks"] for rows in rank["worker_rows"])
    assert idle > 0
    assert f"{idle} of them have nothing to read" in advice["reason"]


def test_verify_finds_nothing_wrong_with_unchanged_files(tdu, place):
    done = tdu("verify", place.at("after-7"), place.at("data"), "--json", *place.options)
    assert done.code == 0, done
    assert done.value["is_fine"] is True
    assert done.value["total"]["done"] + done.value["total"]["under_way"] == RANKS * 7 * BATCH


def test_verify_fails_where_the_states_of_ranks_are_missing(tdu, made, tmp_path):
    shutil.copytree(made / "after-7", tmp_path / "some")
    doomed = sorted((tmp_path / "some").iterdir())[1]
    doomed.unlink()
    for path, missing in ((tmp_path / "some", [1]), (made / "after-7" / doomed.name, [0, *range(2, RANKS)])):
        done = tdu("verify", path, made / "data")
        assert (done.code, f"Not complete: the states of ranks {missing} of {RANKS} are missing" in done.out) == (
            1,
            True,
        )
        value = tdu("verify", path, "--json").value
        assert (value["missing_ranks"], value["is_fine"]) == (missing, False)
    (tmp_path / "today").mkdir()
    shutil.copy(made / "data" / "part-0.parquet", tmp_path / "today")
    done = tdu("verify", tmp_path / "some", tmp_path / "today")
    assert (done.code, "Not fine: the states of ranks [1] missing, " in done.out) == (1, True)


def test_verify_names_each_file_that_differs(tdu, made, tmp_path):
    shutil.copytree(made / "data", tmp_path / "today")
    (tmp_path / "today" / "part-1.parquet").unlink()
    pq.write_table(pa.table({"id": [1], "x": [0.0]}), tmp_path / "today" / "part-2.parquet")
    done = tdu("verify", made / "after-7", tmp_path / "today")
    assert done.code == 1
    lines = done.out.splitlines()
    for name, how in (("part-1.parquet", "removed since"), ("part-2.parquet", "bytes, has")):
        assert any(name in line and how in line for line in lines), done.out
    assert done.err == ""


def test_rows_of_every_step_are_those_that_loaders_deliver(tdu, place):
    everything = [delivered(place.directory / "data", rank) for rank in range(RANKS)]
    for step in (0, 6, 7, 30):
        found = tdu("rows", place.at("after-7"), step, "--json", *place.options).value
        assert [ids_of(of_rank) for of_rank in found["ranks"]] == [steps[step] for steps in everything]
        assert [of_rank["delivered"] for of_rank in found["ranks"]] == [step < 7] * RANKS
        assert found["bytes_read"] == 0


def test_a_skipped_step_is_not_said_to_be_delivered_or_to_come(tdu, made, tmp_path):
    loader = loader_of(made / "data", 0)
    loader.skip_steps(2, 4)
    loader.skip_steps(8, 9)
    for _ in zip(range(4), loader, strict=False):
        pass
    state = tmp_path / "state.json"
    state.write_text(json.dumps(loader.state_dict()))
    for step in range(10):
        found = tdu("rows", state, step, "--rank", 0, "--json").value
        skipped = step in (2, 3, 8)
        assert (found["skipped"], found["ranks"][0]["delivered"]) == (skipped, step < 6 and not skipped)
        assert ("Skipped" in tdu("rows", state, step, "--rank", 0).out) == skipped


def test_the_step_of_a_row_is_the_one_that_loaders_deliver_it_in(tdu, place):
    for rank in range(RANKS):
        steps = delivered(place.directory / "data", rank)
        for step in (3, len(steps) - 1):
            file, row = divmod(steps[step][4], ROWS_OF_A_FILE)
            path = f"part-{file}.parquet" if step == 3 else place.at(f"data/part-{file}.parquet")
            [found] = tdu("step", place.at("after-7"), path, row, "--json", *place.options).value["steps"]
            assert (found["rank"], found["step"], found["place"]) == (rank, step, 4)
            assert found["delivered"] is (step < 7)


def test_diff_tells_progress_from_settings_and_files(tdu, place, made, tmp_path):
    done = tdu("diff", place.at("after-7"), place.at("after-11"), "--json", *place.options)
    assert {change["name"] for change in done.value["progress"]} >= {"step", "rows delivered"}
    if place.options:  # the states on S3 are of files on S3, and the others of local ones
        assert [change["name"] for change in done.value["settings"]] == ["path"]
        return
    assert (done.code, done.value["settings"], done.value["files"]) == (0, [], [])
    shutil.copytree(made / "data", tmp_path / "data")
    (tmp_path / "data" / "part-0.parquet").unlink()
    save_states(tmp_path / "other", tmp_path / "data", 3, shuffle_seed=1)
    done = tdu("diff", made / "after-7", tmp_path / "other")
    assert done.code == 1
    assert "shuffle_seed" in done.out
    assert "part-0.parquet" in done.out
    assert "removed" in done.out


def save_mixture(path: Path, data: Path, epoch: int = 0, **options: Any) -> Path:
    """Save a state of a mixture of two sources after a batch."""
    shares = {"weights": {"a": 0.5, "b": 0.5}, "rows_per_epoch": 1_000}
    sources = {name: Source(str(data / name)) for name in "ab"}
    loader, _ = MixedDataset.create_dataloader(sources, **{**shares, "batch_size": 50, "num_workers": 0, **options})
    loader.set_epoch(epoch)
    next(iter(loader))
    path.write_text(json.dumps(loader.state_dict()))
    return path


def test_diff_compares_the_sources_and_the_weights_of_mixtures(tdu, tmp_path):
    for name in "ab":
        write_files(tmp_path / name)
    first = save_mixture(tmp_path / "first.json", tmp_path)
    later = tdu("diff", first, save_mixture(tmp_path / "later.json", tmp_path, epoch=3), "--json")
    assert (later.code, later.value["settings"], later.value["files"], later.value["notes"]) == (0, [], [], [])
    assert {change["name"] for change in later.value["progress"]} == {"epoch", "rows delivered"}
    for name, options, expected in (
        ("weights", {"weights": {"a": 0.7, "b": 0.3}}, "from row 0: a 7/10, b 3/10"),
        ("weights", {"weights": [(0, {"a": 1, "b": 1}), (300, {"a": 0, "b": 1})]}, "from row 300: a 0, b 1"),
        ("rows_per_epoch", {"rows_per_epoch": 500}, "500"),
    ):
        other = save_mixture(tmp_path / "other.json", tmp_path, **options)
        found = tdu("diff", first, other, "--json")
        assert (found.code, found.value["files"], found.value["notes"]) == (1, [], [])
        [change] = found.value["settings"]
        assert change["name"] == name
        assert expected in str(change["second"])
    pq.write_table(pa.table({"id": [1], "x": [0.0]}), tmp_path / "b" / "part-3.parquet")
    found = tdu("diff", first, save_mixture(tmp_path / "other.json", tmp_path), "--json")
    assert found.code == 1
    assert [(file["path"], file["change"]) for file in found.value["files"]] == [("b: part-3.parquet", "rewritten")]
    assert found.value["settings"] == []


def test_diff_shows_excluded_rows_and_skipped_steps(tdu, made, tmp_path):
    def saved(name: str, **calls: Any) -> Path:
        loader = loader_of(made / "data", 0)
        next(iter(loader))
        for call, arguments in calls.items():
            getattr(loader, call)(*arguments)
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(loader.state_dict()))
        return path

    first = saved("first")
    assert tdu("diff", first, saved("second")).code == 0
    for calls, expected in (
        ({"exclude": ([("part-1.parquet", 5)],)}, {"exclude": "rows 1205 from epoch 0 on"}),
        ({"skip_steps": (5, 9)}, {"skip_steps": "5 to 8"}),
        ({"skip_steps": (5, 6), "restore_skipped": ()}, {"skip_steps": "5", "restore_skipped": True}),
    ):
        found = tdu("diff", first, saved("second", **calls), "--json")
        assert found.code == 1
        assert {change["name"]: change["second"] for change in found.value["settings"]} == expected


def test_of_a_packed_run_no_step_is_known(tdu, tmp_path):
    tokens = [list(range(length)) for length in range(1, 30)]
    pq.write_table(pa.table({"tokens": tokens}), tmp_path / "documents.parquet")
    loader, _ = StructuredDataset.create_dataloader(
        str(tmp_path / "documents.parquet"), packing=Packing("tokens", length=16, separator=0), num_workers=0
    )
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    for command in (("rows", "0"), ("step", "documents.parquet", "0")):
        error = tdu.fails(command[0], tmp_path / "state.json", *command[1:])
        assert "was saved with packing: only reading tells of which rows its sequences are made" in error


def test_diff_compares_manifests(tdu, made, tmp_path):
    shutil.copytree(made / "data", tmp_path / "data")
    for number in (1, 2):
        tdu("plan", tmp_path / "data", "--workers", 0, "--save", tmp_path / f"manifest-{number}")
        pq.write_table(pa.table({"id": [1], "x": [0.0]}), tmp_path / "data" / "part-3.parquet")
    first, second = tmp_path / "manifest-1", tmp_path / "manifest-2"
    assert tdu("diff", first, first).code == 0
    done = tdu("diff", first, second, "--json")
    assert done.code == 1
    assert [(file["path"], file["change"]) for file in done.value["files"]] == [("part-3.parquet", "rewritten")]
    assert "is a manifest" in tdu.fails("diff", first, made / "after-7")


def test_a_dataset_of_a_glob_is_opened_as_its_states_list_it(tdu, made, tmp_path):
    loader = loader_of(made / "data" / "part-[12].parquet", 0)
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    found = tdu("rows", tmp_path / "state.json", 0, "--rank", 0, "--json").value
    assert ids_of(found["ranks"][0]) == next(iter(loader))["id"].tolist()


def test_the_demo_loses_and_repeats_no_row_and_leaves_nothing_behind(tdu, tmp_path):
    (tmp_path / "scratch").mkdir()
    done = tdu("demo", "--json", TMPDIR=str(tmp_path / "scratch"))
    assert done.code == 0, done
    found = done.value
    assert (found["lost"], found["repeated"], found["holds"]) == (0, 0, True)
    assert 0 < found["resumed_at"] < found["killed_after"]
    assert found["steps_as_planned"] == found["steps"] > found["killed_after"]
    assert list((tmp_path / "scratch").iterdir()) == []


# How they fail -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["plan", "verify", "rows", "step", "diff"])
def test_what_is_not_there_is_named(tdu, command):
    more = {"rows": ["3"], "step": ["part-0.parquet", "3"], "diff": ["/no/other"]}.get(command, [])
    assert "/no/such/place" in tdu.fails(command, "/no/such/place", *more)


@pytest.mark.parametrize("command", ["verify", "rows", "step", "diff"])
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"{}", b"PK\x03\x04damaged", b"\x80\x04.", b"PAR1" * 9, b"[" * 9999],
    ids=["empty", "half", "no state", "a damaged zip", "a pickle", "Parquet", "nested"],
)
def test_a_file_that_is_no_checkpoint_is_named(tdu, tmp_path, command, content):
    path = tmp_path / "checkpoint"
    path.write_bytes(content)
    more = {"rows": ["3"], "step": ["part-0.parquet", "3"], "diff": [path]}.get(command, [])
    tdu.fails(command, path, *more)


def test_a_state_that_was_edited_is_refused(tdu, made, tmp_path):
    state = json.loads((made / "after-7" / "loader-00000-of-00002.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps(state | {"batches_delivered": 8}))
    for command in (["verify"], ["rows"], ["diff"]):
        more = {"rows": [3], "diff": [made / "after-7"]}.get(command[0], [])
        assert "checksum" in tdu.fails(*command, tmp_path / "state.json", *more)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "COMMAND"),
        (("plam",), "plan"),
        (("plan",), "PATH"),
        (("plan", "data", "--bufer", "5"), "did you mean '--buffer'?"),
        (("plan", "data", "--batch_size=5"), "tdu plan --help"),
        (("plan", "data", "--ranks", "0"), "--ranks"),
        (("plan", "data", "--split-bytes", "12XB"), "12XB"),
        (("plan", "data", "--columns", "id,,x"), "--columns"),
        (("plan", "data", "--columns", "idd"), "did you mean 'id'"),
        (("plan", "data", "--plot", "plan.bmp"), ".svg"),
        (("plan", "data", "--save", "no/such/directory"), "no/such/directory"),
        (("plan", "none", "--save", "no/such/directory"), "no/such/directory"),
        (("plan", "none", "--plot", "no/such.svg"), "no/such.svg"),
        (("plan", "none", "--save", "data"), "data: Is a directory"),
        (("mixing", "none", "--label", "x", "--plot", "no/such.svg"), "no/such.svg"),
        (("plan", "data", "--format", "csv"), "parquet"),
        (("rows", "after-7", "-1"), "STEP"),
        (("rows", "after-7", "9999"), "9999"),
        (("rows", "after-7", "0", "--rank", "9"), "--rank 9"),
        (("rows", "after-7", "0", "--filter", "x > 3"), "--filter"),
        (("rows", "after-7", "0", "--path", "elsewhere"), "elsewhere"),
        (("step", "after-7", "part-9.parquet", "0"), "part-9.parquet"),
        (("step", "after-7", "part-0.parquet", "99999"), "99999"),
        (("verify", "data"), "no states"),
        (("completion", "fish"), "fish"),
    ],
    ids=[
        "no command",
        "a misspelt command",
        "no path",
        "a misspelt option",
        "an option of another tool",
        "no ranks",
        "no bytes",
        "an empty name",
        "a misspelt column",
        "another picture",
        "a missing directory",
        "a missing directory, before the files are listed",
        "a missing directory of a picture, before",
        "a directory in place of a file, before",
        "a missing directory of a picture of labels, before",
        "another format",
        "a negative step",
        "a late step",
        "a missing rank",
        "no filter",
        "a missing dataset",
        "a missing file",
        "a missing row",
        "no checkpoint",
        "another shell",
    ],
)
def test_what_is_wrong_is_said(tdu, made, monkeypatch, arguments, said):
    monkeypatch.chdir(made)
    assert said in tdu.fails(*arguments)


def test_the_state_of_a_mixture_is_counted_and_has_no_rows_of_steps(tdu, tmp_path):
    write_files(tmp_path / "data")
    sources = {name: Source(tmp_path / "data") for name in ("web", "books")}
    loader, _ = MixedDataset.create_dataloader(sources, weights={"web": 0.5, "books": 0.5}, batch_size=4, num_workers=0)
    next(iter(loader))
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    found = tdu("verify", tmp_path / "state.json")
    assert (found.code, "those of later epochs are left" in found.out) == (0, True)
    assert "the states are of a mixture" in tdu.fails("verify", tmp_path / "state.json", tmp_path / "data")
    for question in (["rows", tmp_path / "state.json", "0"], ["step", tmp_path / "state.json", "part-0.parquet", "0"]):
        assert "of a mixture of the sources web, books" in tdu.fails(*question)


def test_text_whose_rows_are_not_counted_is_told_in_bytes(tdu, made, tmp_path):
    text = "x\n" + "".join(f"{number}\n" for number in range(100))
    (tmp_path / "a.csv").write_text(text)
    loader, _ = StructuredDataset.create_dataloader(str(tmp_path / "a.csv"), format="csv", batch_size=8, num_workers=0)
    next(iter(loader))
    (tmp_path / "text.json").write_text(json.dumps(loader.state_dict()))
    out = tdu("verify", tmp_path / "text.json").out
    assert re.search(r"rank +batches +bytes\n +0 +1 +292\n", out)
    assert re.search(r"file +bytes +done .*\n +a.csv +292 ", out)
    loader, _ = StructuredDataset.create_dataloader(str(made / "data"), batch_size=8, num_workers=0)
    next(iter(loader))
    (tmp_path / "rows.json").write_text(json.dumps(loader.state_dict()))
    found = tdu("diff", tmp_path / "rows.json", tmp_path / "text.json", "--json")
    assert "292 bytes" in {file["how"] for file in found.value["files"] if file["path"] == "a.csv"}
    assert {"name": "rows delivered", "first": 8, "second": None} in found.value["progress"]
    assert {"name": "bytes delivered", "first": None, "second": 292} in found.value["progress"]


def test_the_files_of_a_mixture_and_of_a_dataset_are_not_compared(tdu, made, tmp_path):
    loader, _ = StructuredDataset.create_dataloader(str(made / "data"), batch_size=8, num_workers=0)
    next(iter(loader))
    (tmp_path / "rows.json").write_text(json.dumps(loader.state_dict()))
    write_files(tmp_path / "data")
    sources = {name: Source(tmp_path / "data") for name in ("web", "books")}
    loader, _ = MixedDataset.create_dataloader(
        sources, weights=dict.fromkeys(sources, 1.0), batch_size=4, num_workers=0
    )
    (tmp_path / "mixed.json").write_text(json.dumps(loader.state_dict()))
    for given in (("rows.json", "mixed.json"), ("mixed.json", "rows.json")):
        found = tdu("diff", *(tmp_path / name for name in given), "--json")
        assert (found.code, found.value["files"]) == (1, [])
        assert found.value["notes"] == [
            "one state is of a mixture and the other of a single dataset: files are not compared"
        ]


def test_damaged_and_foreign_files_are_named(tdu, tmp_path):
    write_files(tmp_path / "data")
    (tmp_path / "data" / "part-1.parquet").write_bytes(b"PAR1 and nothing else PAR1")
    assert "part-1.parquet" in tdu.fails("plan", tmp_path / "data")


def test_s3_that_refuses_or_has_no_such_bucket_is_said_without_the_secret(tdu, s3):
    endpoint = ["--storage-option", f"client_kwargs.endpoint_url={s3.url}"]
    secrets = ["--storage-option", f"key={ACCESS_KEY}", "--storage-option", f"secret={SECRET}"]
    for command in (["plan", "s3://no-such-bucket/data"], ["verify", "s3://no-such-bucket/checkpoint"]):
        assert "no-such-bucket" in tdu.fails(*command, *endpoint, *secrets)
    assert "no-such-bucket" in tdu.fails("plan", f"s3://{ACCESS_KEY}:{SECRET}@no-such-bucket/data", *endpoint)


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (["verify", "URL"], "commands.verify"),
        (["rows", "URL", "0"], "checkpoint_dataset"),
        (["step", "URL", "part-0.parquet", "0"], "checkpoint_dataset"),
        (["diff", "URL", "URL"], "differences"),
    ],
    ids=["verify", "rows", "step", "diff"],
)
def test_a_storage_that_refuses_connections_is_tried_again_for_the_time_of_commands(words, module, monkeypatch):
    """In this process, so that the time can be shorter."""
    monkeypatch.setattr(f"torch_dataloader_utils.cli.{module}.TIMEOUT_SEC", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/checkpoint.json"
    arguments = make_parser(words[:1]).parse_args([url if word == "URL" else word for word in words])
    with pytest.raises(UnreadableFileError, match=r"within storage_timeout=0\.3 s.*127\.0\.0\.1"):
        command_module(words[0]).run(arguments)


@pytest.mark.parametrize("option", ["--storage-options", "--storage_option", "--storage-optio"])
def test_the_value_of_a_misspelt_option_is_not_shown(tdu, option):
    tdu.fails("plan", "data", option, f"secret={SECRET}")
    tdu.fails("plan", "data", f"{option}=secret={SECRET}")
    tdu.fails("plan", "data", "--storage-option", SECRET)


def test_what_a_state_does_not_hold_is_asked_for(tdu):
    """States of earlier releases have no batch size."""
    states, data = OLD_STATES / "states" / "rank_files", OLD_STATES / "data" / "parts"
    assert "--batch-size" in tdu.fails("rows", states, 0, "--path", data)
    [first, *_] = tdu("verify", states, "--json").value["ranks"]
    batch_size = first["rows"] // first["batches"]
    found = tdu("rows", states, 0, "--path", data, "--batch-size", batch_size, "--json").value
    assert [len(of_rank["rows"]) for of_rank in found["ranks"]] == [batch_size] * 3


def test_a_filter_is_asked_for_and_then_whether_to_read(tdu, made, tmp_path):
    loader = loader_of(made / "data", 0, filters=[("id", ">=", 100)])
    steps = [batch["id"].tolist() for _, batch in zip(range(3), loader, strict=False)]
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    rows = ["rows", tmp_path / "state.json", "2", "--rank", "0", "--json"]
    assert "--filter" in tdu.fails(*rows)
    assert "filter" in tdu.fails(*rows, "--filter", '[["id", ">=", 200]]')
    assert "--scan" in tdu.fails(*rows, "--filter", '[["id", ">=", 100]]')
    found = tdu(*rows, "--filter", "[('id', '>=', 100)]", "--scan").value
    assert ids_of(found["ranks"][0]) == steps[2]
    assert found["bytes_read"] > 0


# In a shell ----------------------------------------------------------------------------------------------------------


def test_help_is_shown_without_torch_or_arrow():
    program = """
import sys
from torch_dataloader_utils.cli.main import main
try:
    main(["--help"] if len(sys.argv) == 1 else sys.argv[1:])
finally:
    assert not {"torch", "pyarrow", "numpy", "fsspec"} & set(sys.modules)
"""
    for arguments in ([], ["plan", "--help"], ["rows", "--help"], ["plan", "--ranks", "x"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], env=inherited(), capture_output=True, text=True, check=False
        )
        assert done.returncode == (2 if "x" in arguments else 0), done
        assert "Traceback" not in done.stderr


IN_COPIES = """
import gc, json, os, runpy, sys
import pyarrow.parquet, torch_dataloader_utils.cli.commands.plan, torch_dataloader_utils.dataset.structured
gc.freeze()  # what was imported: to look through it takes most of the time of an interpreter's end
for output, *arguments in json.loads(sys.argv[1]):
    if child := os.fork():  # to import once; a copy ends like any interpreter, for this is its main module
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=sys.stderr, flush=True)
        continue
    os.dup2(os.open(output, os.O_WRONLY), 1)
    sys.argv[1:] = arguments
    runpy.run_module("torch_dataloader_utils", run_name="__main__", alter_sys=True)
"""


def test_a_closed_pipe_is_no_error_and_a_full_disk_is_said(made, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    commands = [
        [str(pipe), "plan", f"{made}/data", "--ranks", "16", "--workers", "0", "--json"],
        ["/dev/full", "plan", f"{made}/data"],
    ]
    ignored = "ignore:This process (pid=:DeprecationWarning"  # of os.fork where there are threads, since Python 3.12
    program = [sys.executable, "-W", ignored, "-c", IN_COPIES, json.dumps(commands)]
    with subprocess.Popen(["head", "-n", "1", str(pipe)], stdout=subprocess.PIPE, text=True) as head:
        try:
            done = subprocess.run(program, env=inherited(), capture_output=True, text=True, check=False, timeout=240)
            assert head.communicate(timeout=60) == ("{\n", None), done
        finally:
            head.kill()  # it waits for as long as nothing has opened the pipe
    said = ["0", "tdu: standard output cannot be written: No space left on device", "2"]
    assert (done.returncode, done.stdout, done.stderr.splitlines()) == (0, "", said)


def test_ctrl_c_ends_a_command_as_it_ends_others(tmp_path):
    """The demo is interrupted in its first training: no word, no process and no file is left."""
    environment = inherited(TMPDIR=str(tmp_path), TDU_TEST=f"interrupted-{os.getpid()}")
    process = subprocess.Popen(
        [sys.executable, "-m", "torch_dataloader_utils", "demo"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert not wait_until_none(lambda: not list(tmp_path.glob("tdu-demo-*/output")))
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=240) == (b"", b"")
    assert process.returncode == -signal.SIGINT
    assert not wait_until_none(lambda: processes_with(f"TDU_TEST=interrupted-{os.getpid()}"))
    assert list(tmp_path.iterdir()) == []


def on_terminal(tdu: Commands, *arguments: Any, **environment: str):
    """Run a command whose standard output is a terminal, and return what it drew."""
    opened = Terminal()
    name = Path(os.ttyname(opened.file.fileno()))
    done = tdu.write_to(name, *arguments, TERM="xterm-256color", **environment)
    drawn = "\n".join(opened.lines())
    opened.file.close()
    assert done == (0, "")
    return drawn


def test_colours_and_boxes_are_drawn_on_a_terminal_alone_and_colours_not_against_the_users_will(tdu, made):
    verify = ["verify", made / "after-7", made / "data"]
    drawn = on_terminal(tdu, *verify)
    assert COLORS in drawn
    assert "╭" in drawn
    refused = on_terminal(tdu, *verify, NO_COLOR="1")
    assert "\x1b" not in refused
    assert "╭" in refused
    piped = tdu(*verify).out
    assert piped.isascii()
    assert "part-0.parquet" in piped


WITHOUT_EXTRA = """
import sys
for name in list(sys.modules):
    if name.partition(".")[0] in ("rich", "shtab") or name.startswith("torch_dataloader_utils.cli"):
        del sys.modules[name]
sys.modules |= {"rich": None, "shtab": None}  # as if they were not there
"""


def test_without_the_extra_a_terminal_gets_plain_text_and_completion_says_what_to_install(made, tmp_path):
    tdu = Commands(tmp_path, WITHOUT_EXTRA)
    drawn = on_terminal(tdu, "plan", made / "data")
    assert "Balance" in drawn
    assert "╭" not in drawn
    assert "\x1b" not in drawn
    assert "pip install shtab" in tdu.fails("completion", "bash")


def test_bash_completes_commands_and_options(tdu, tmp_path):
    pytest.importorskip("shtab")
    script = tmp_path / "tdu.bash"
    script.write_text(tdu("completion", "bash").out)
    for words, expected in ((["tdu", "ver"], "verify"), (["tdu", "rows", "--sto"], "--storage-option")):
        asked = f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
        asked += "complete -p tdu | sed 's/.*-F //; s/ .*//' > /dev/null; $(complete -p tdu | sed 's/.*-F //; s/ .*//')"
        done = subprocess.run(
            ["bash", "-c", f'{asked}; echo "${{COMPREPLY[@]}}"'], capture_output=True, text=True, check=False
        )
        assert done.stdout.strip() == expected, done


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_get_a_script_with_all_commands(tdu, shell):
    pytest.importorskip("shtab")
    script = tdu("completion", shell).out
    assert all(command in script for command in COMMANDS)


def test_a_run_log_that_is_not_there_is_an_error(tdu, tmp_path):
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"x": range(100)}), tmp_path / "data" / "0.parquet")
    loader, _ = StructuredDataset.create_dataloader(
        tmp_path / "data", batch_size=10, num_workers=0, run_log=tmp_path / "log"
    )
    next(iter(loader))
    state = tmp_path / "state.json"
    state.write_text(json.dumps(loader.state_dict()))
    assert tdu("rows", state, 3, "--run-log", tmp_path / "log").code == 0
    wrong = tdu("rows", state, 3, "--run-log", tmp_path / "lgo")
    assert wrong.code == 2
    assert f"--run-log: there is no run log in {tmp_path / 'lgo'}" in wrong.err
