"""What a path stands for: which files, in which order, and what is said when there are none."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pairwise import pairwise
from support import all_rows_of, batches_of, open_loader

from torch_dataloader_utils import UnreadableFileError
from torch_dataloader_utils.storage import zip_archives
from torch_dataloader_utils.storage.zip_archives import mixes_up_files

ROWS = 10


def write_file(path: Path, number: int) -> Path:
    """Write a Parquet file whose ten values begin at 10 * `number`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"value": np.arange(ROWS * number, ROWS * (number + 1))}), path)
    return path


def values_of(path: Any, **options: Any) -> list[int]:
    """Return the values that a path delivers, in order."""
    loader, _ = open_loader(path, **options)
    return [int(value) for batch in loader for value in batch["value"]]


def numbers_of(path: Any, **options: Any) -> list[int]:
    """Return the numbers of the files that a path stands for, in order; each file whole."""
    values = values_of(path, **options)
    numbers = [value // ROWS for value in values[::ROWS]]
    assert values == [ROWS * number + row for number in numbers for row in range(ROWS)]
    return numbers


def listed(path: Any) -> list[str]:
    """Return the paths under the root that a state records."""
    _, dataset = open_loader(path)
    return [file[0] for file in dataset.state_dict()["files"]]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files 0 to 4, two of them deeper, in the order of their paths."""
    for number, name in enumerate(("a.parquet", "b/c.parquet", "b/d/e.parquet", "f.parquet", "g.parquet")):
        write_file(tmp_path / "tree" / name, number)
    return tmp_path / "tree"


# What a path may be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "numbers"),
    [
        ("a.parquet", [0]),
        ("b/d/e.parquet", [2]),
        ("", [0, 1, 2, 3, 4]),
        ("/", [0, 1, 2, 3, 4]),
        ("b", [1, 2]),
        ("*.parquet", [0, 3, 4]),
        ("?.parquet", [0, 3, 4]),
        ("[af].parquet", [0, 3]),
        ("*", [0, 1, 2, 3, 4]),
        ("b*", [1, 2]),
        ("**", [0, 1, 2, 3, 4]),
        ("**/*.parquet", [0, 1, 2, 3, 4]),
        ("*/*.parquet", [1]),
    ],
)
def test_a_file_a_directory_in_depth_and_a_glob(tree, path, numbers):
    assert numbers_of(f"{tree}/{path}") == numbers


def test_a_path_object_a_string_and_a_file_url_are_the_same_dataset(tree):
    states = [open_loader(path)[1].state_dict() for path in (tree, str(tree), f"file://{tree}", f"{tree}/")]
    assert all(state == states[0] for state in states)
    assert numbers_of(f"file://{tree}/b/*.parquet") == [1]
    assert numbers_of(f"file://{tree}/g.parquet") == [4]


def test_a_relative_path_is_the_same_dataset_as_an_absolute_one(tree, monkeypatch):
    monkeypatch.chdir(tree.parent)
    absolute = open_loader(tree)[1].state_dict()
    for path in ("tree", "./tree", Path("tree"), "tree/b/.."):
        assert open_loader(path)[1].state_dict() == absolute
    monkeypatch.chdir(tree)
    assert open_loader(".")[1].state_dict() == absolute


def test_a_mixed_list_is_one_dataset_sorted_by_path(tree):
    paths = [f"file://{tree}/g.parquet", tree / "b", f"{tree}/[a-b].parquet", str(tree / "f.parquet")]
    assert numbers_of(paths) == [0, 1, 2, 3, 4]
    assert listed(paths) == listed(tree)


def test_any_order_of_a_list_gives_the_same_dataset(tree):
    paths = [tree / "a.parquet", tree / "b", tree / "f.parquet", tree / "g.parquet"]
    whole = open_loader(tree)[1].state_dict()
    for order in itertools.permutations(paths):
        assert open_loader(list(order))[1].state_dict() == whole


def test_any_order_in_which_a_directory_lists_its_files_gives_the_same_dataset(tmp_path, monkeypatch):
    """Directories are listed in the order in which their files were made, or in one of the file system's own."""
    names = [f"part-{number}.parquet" for number in range(12)]
    by_name = sorted(names)
    orders = []
    for copy in range(4):
        random.Random(copy).shuffle(names)
        for name in names:
            write_file(tmp_path / str(copy) / name, by_name.index(name))
        orders.append(numbers_of(tmp_path / str(copy)))
    assert orders == [list(range(12))] * 4

    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: contextlib.nullcontext(list(real(path))[::-1]))
    assert numbers_of(tmp_path / "0") == list(range(12))
    assert numbers_of(f"{tmp_path}/0/*.parquet") == list(range(12))


def test_row_ids_count_through_the_files_sorted_by_path(tree):
    loader, _ = open_loader([tree / "g.parquet", tree / "a.parquet", tree / "b"], shuffle=True)
    delivered = {
        int(value): int(row) for batch in loader for value, row in zip(batch["value"], batch["row"], strict=True)
    }
    places = {0: 0, 1: 1, 2: 2, 4: 3}
    assert delivered == {ROWS * n + row: ROWS * place + row for n, place in places.items() for row in range(ROWS)}


def test_directories_whose_names_begin_alike_are_distinct(tmp_path):
    write_file(tmp_path / "ab" / "x.parquet", 0)
    write_file(tmp_path / "abc" / "x.parquet", 1)
    assert listed([tmp_path / "abc", tmp_path / "ab"]) == ["ab/x.parquet", "abc/x.parquet"]
    assert numbers_of([tmp_path / "abc", tmp_path / "ab"]) == [0, 1]
    assert numbers_of(tmp_path / "ab") == [0]


def test_a_dataset_moved_to_another_directory_is_resumed(tree, tmp_path):
    loader, _ = open_loader(tree)
    whole = batches_of(loader)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    tree.rename(tmp_path / "moved")
    moved, _ = open_loader(tmp_path / "moved")
    moved.load_state_dict(state)
    assert batches_of(moved) == whole[1:]


# What is passed over, and what is taken as it is ---------------------------------------------------------------------

PASSED_OVER = (
    "_SUCCESS",
    "_metadata",
    "_common_metadata",
    "_started.parquet",
    ".a.parquet.crc",
    "a.parquet.crc",
    ".hidden.parquet",
    "notes.txt",
    "table.csv",
    "parquet",
    "a.parquet.bak",
    "_temporary/0/x.parquet",
    ".staging/x.parquet",
    "_delta_log/00.json",
    "deeper/_tmp/x.parquet",
)


@pytest.mark.filterwarnings("ignore::torch_dataloader_utils.MetadataFileWarning")  # one of them is named like it
@pytest.mark.parametrize("path", ["", "*", "**", "**/*", "[a-z_.]*"])
def test_what_is_no_data_is_passed_over(tmp_path, path):
    for name in PASSED_OVER:
        write_file(tmp_path / "data" / name, 99)
    for number, name in enumerate(("_date=1/a.parquet", "deeper/B.PARQUET", "x.parq", "y.pq")):
        write_file(tmp_path / "data" / name, number)
    assert numbers_of(f"{tmp_path}/data/{path}") == [0, 1, 2, 3]


@pytest.mark.parametrize("name", PASSED_OVER)
def test_a_file_that_is_named_in_full_is_taken_as_it_is(tmp_path, name):
    write_file(tmp_path / "data" / "a.parquet", 1)
    odd = write_file(tmp_path / "data" / name, 2)
    assert numbers_of(odd) == [2]
    assert numbers_of(f"file://{odd}") == [2]
    assert sorted(numbers_of([tmp_path / "data" / "a.parquet", odd])) == [1, 2]


def test_a_directory_that_is_named_in_full_may_be_hidden(tmp_path):
    write_file(tmp_path / ".cache" / "_run" / "a.parquet", 1)
    assert numbers_of(tmp_path / ".cache" / "_run") == [1]


def test_a_directory_may_be_named_like_a_file(tmp_path):
    write_file(tmp_path / "x.parquet" / "part-0.parquet", 0)
    write_file(tmp_path / "x.parquet" / "part-1.parquet", 1)
    write_file(tmp_path / "y.parquet", 2)
    assert numbers_of(tmp_path / "x.parquet") == [0, 1]
    assert numbers_of(tmp_path) == [0, 1, 2]
    assert numbers_of(f"{tmp_path}/*.parquet") == [0, 1, 2]


ODD_NAMES = (
    "a b.parquet",
    "a%20b.parquet",
    "a#b.parquet",
    "a&b;c,d.parquet",
    "a::b.parquet",
    "a'b\"c.parquet",
    "a\\b.parquet",
    "day=2024-01-01/x.parquet",
    "[brackets].parquet",
    "[0-9].parquet",
    "{a,b}.parquet",
    "what?.parquet",
    "star*.parquet",
    "~tilde.parquet",
    "-dash.parquet",
    "日本/ünïcödé.parquet",
    "e\u0301.parquet",
    "\u00e9.parquet",
    "line\nbreak.parquet",
    " .parquet",
)


@pytest.mark.parametrize("name", ODD_NAMES)
def test_an_odd_name_means_the_file_of_that_name_where_there_is_one(tmp_path, name):
    write_file(tmp_path / "0.parquet", 7)
    odd = write_file(tmp_path / name, 1)
    write_file(tmp_path / "what1.parquet", 8)
    write_file(tmp_path / "starry.parquet", 9)
    assert numbers_of(odd) == [1]
    assert numbers_of(str(odd)) == [1]


def test_odd_names_in_a_directory_are_all_delivered_and_resumed(tmp_path):
    for number, name in enumerate(ODD_NAMES):
        write_file(tmp_path / name, number)
    loader, _ = open_loader(tmp_path, shuffle=True)
    whole = batches_of(loader)
    assert sorted(itertools.chain(*whole)) == list(range(ROWS * len(ODD_NAMES)))
    assert sorted(listed(tmp_path)) == sorted(ODD_NAMES)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    resumed, _ = open_loader(tmp_path, shuffle=True)
    resumed.load_state_dict(loader.state_dict())
    assert batches_of(resumed) == whole[5:]


def test_a_glob_below_a_directory_with_brackets_is_written_with_the_bracket_escaped(tmp_path):
    write_file(tmp_path / "run[1]" / "a.parquet", 1)
    write_file(tmp_path / "run1" / "a.parquet", 2)
    assert numbers_of(f"{tmp_path}/run[[]1]/*.parquet") == [1]
    assert numbers_of(f"{tmp_path}/run[1]/*.parquet") == [2]
    assert numbers_of(tmp_path / "run[1]") == [1]


def test_a_link_to_a_file_and_to_a_directory_are_followed(tmp_path):
    write_file(tmp_path / "there" / "a.parquet", 1)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "b.parquet").symlink_to(tmp_path / "there" / "a.parquet")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    assert numbers_of(tmp_path / "here") == [1]
    assert numbers_of(tmp_path / "here" / "b.parquet") == [1]
    assert numbers_of(tmp_path / "link") == [1]


@pytest.mark.parametrize("path", ["", "*", "**", "*/*.parquet", "**/*.parquet", "link*/a.parquet"])
def test_a_linked_directory_below_the_path_is_followed(tmp_path, path):
    write_file(tmp_path / "elsewhere" / "a.parquet", 0)
    write_file(tmp_path / "elsewhere" / "_hidden" / "b.parquet", 99)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "broken").symlink_to(tmp_path / "gone")
    assert numbers_of(f"{tmp_path}/data/{path}") == [0]


@pytest.mark.parametrize("path", ["", "**", "*", "**/*.parquet"])
def test_a_link_that_leads_back_is_an_error_that_names_it(tmp_path, path):
    write_file(tmp_path / "data" / "deep" / "a.parquet", 0)
    (tmp_path / "data" / "deep" / "back").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "deep" / "again").symlink_to(tmp_path / "data" / "deep")
    with pytest.raises(
        ValueError, match=r"the link '.*/deep/(back|again).*' leads back to .*a directory that holds it"
    ):
        open_loader(f"{tmp_path}/data/{path}")


@pytest.mark.parametrize("path", ["", "*", "**", "*/*.parquet"])
def test_a_file_that_a_link_names_a_second_time_is_an_error_that_says_both_names(tmp_path, path):
    write_file(tmp_path / "data" / "2024" / "a.parquet", 0)
    (tmp_path / "data" / "latest").symlink_to(tmp_path / "data" / "2024")
    with pytest.raises(ValueError, match=r"latest/a\.parquet' is named twice, also as .*2024/a\.parquet'"):
        open_loader(f"{tmp_path}/data/{path}")
    assert numbers_of(tmp_path / "data" / "latest") == [0]


def test_a_name_with_a_question_mark_and_an_equals_sign_stays_whole(tmp_path):
    directory = tmp_path / "lr?a=1" / "sub"
    write_file(directory / "a.parquet", 0)
    assert open_loader(directory)[1].state_dict()["plan"]["root"] == str(directory)


def test_a_broken_link_named_like_data_is_an_error_that_names_it(tmp_path):
    write_file(tmp_path / "data" / "a.parquet", 0)
    (tmp_path / "data" / "b.parquet").symlink_to(tmp_path / "gone.parquet")
    with pytest.raises(FileNotFoundError, match=r"b\.parquet"):
        open_loader(tmp_path / "data")


@pytest.mark.parametrize("path", ["", "*", "*/*.parquet", "**"])
def test_a_directory_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch, path):
    write_file(tmp_path / "data" / "a.parquet", 0)
    write_file(tmp_path / "data" / "closed" / "b.parquet", 1)
    real = os.scandir

    def scandir(path):  # permissions keep nothing from root, which tests may run as
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError, match="closed"):
        open_loader(f"{tmp_path}/data/{path}")


def test_files_without_a_common_directory_are_named_in_full(tree, tmp_path_factory):
    with tempfile.TemporaryDirectory(dir="/var/tmp") as other:
        write_file(Path(other) / "z.parquet", 5)
        loader, dataset = open_loader([tree / "a.parquet", other], batch_size=ROWS)
        batches = iter(loader)
        next(batches)
        state = dataset.state_dict()
        splits = [split for shard in state["completed_shards"] for split in shard["splits"]]
        assert [split["path"] for split in splits] == [str(tree / "a.parquet")]
        dataset.load_state_dict(state)
        assert [batch["value"].tolist() for batch in loader] == [list(range(50, 60))]


# Chains of storages ----------------------------------------------------------------------------------------------


@pairwise(workers=[0, 2], path=["", "/*.parquet", "/b/d/e.parquet"], cache=["simplecache", "filecache"])
def test_a_cached_storage_delivers_what_its_target_does(in_memory, cache, path, workers, tmp_path):
    whole = numbers_of(in_memory + path)
    options = {cache: {"cache_storage": str(tmp_path / "cache")}}
    url = f"{cache}::{in_memory}{path}"
    loader, dataset = open_loader(
        url, storage_options=options, num_workers=workers, multiprocessing_context=FORK[workers]
    )
    batches = iter(loader)
    first = next(batches)["value"].tolist()
    dataset.load_state_dict(dataset.state_dict())
    rest = [int(value) for batch in loader for value in batch["value"]]
    assert sorted(value // ROWS for value in [*first, *rest][::ROWS]) == sorted(whole)


FORK = {0: None, 2: "fork"}  # only a forked worker sees the memory that the files lie in


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "compressed"])
def test_files_in_an_archive_are_delivered_and_resumed(tree, tmp_path, compression):
    if compression == zipfile.ZIP_STORED and mixes_up_files():
        pytest.skip("this release of Python returns wrong bytes of such files")
    with zipfile.ZipFile(tmp_path / "tree.zip", "w", compression) as archive:
        for file in sorted(tree.rglob("*.parquet")):
            archive.write(file, file.relative_to(tree))
    for path, numbers in (("*.parquet", [0, 3, 4]), ("**", [0, 1, 2, 3, 4]), ("b/c.parquet", [1])):
        url = f"zip://{path}::{tmp_path}/tree.zip"
        assert numbers_of(url) == numbers
        loader, dataset = open_loader(url)
        whole = batches_of(loader)
        next(iter(loader))
        dataset.load_state_dict(dataset.state_dict())
        assert batches_of(loader) == whole[1:]


CHAINS_WITH_ONE_PLACE = (
    "zip://in/{name}::{place}.zip",
    "tar://in/{name}::file://{place}.tar",
    "dir://in/{name}::file://{place}",
    "simplecache::zip://in/{name}::{place}.zip",
    "zip://in/{name}::simplecache::{place}.zip",
)


# Old releases of fsspec (2025.5) leave the file of an archive behind a cache to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("chain", CHAINS_WITH_ONE_PLACE)
def test_a_list_of_files_in_several_archives_or_roots_is_an_error_that_names_two(tmp_path, chain):
    for number, place in enumerate(("one", "two")):
        for name in ("a.parquet", "b.parquet"):
            write_file(tmp_path / place / "in" / name, number)
        for kind in ("zip", "tar"):
            shutil.make_archive(str(tmp_path / place), kind, tmp_path / place, "in")

    def url(place: str, name: str) -> str:
        return chain.format(name=name, place=tmp_path / place)

    for name in ("b.parquet", "a.parquet", "*.parquet"):
        with pytest.raises(ValueError, match=r"two\b.* and .*one\b.* are on two storages"):
            open_loader([url("one", "a.parquet"), url("two", name)])
    with pytest.raises(ValueError, match=r"missing\b.* and .*one\b.* are on two storages"):
        open_loader([url("one", "a.parquet"), url("missing", "b.parquet")])
    assert numbers_of([url("two", "a.parquet"), url("two", "b.parquet")]) == [1, 1]


def test_the_archive_of_a_list_may_be_named_in_two_ways(tree, tmp_path):
    shutil.make_archive(str(tmp_path / "tree"), "zip", tree)
    archive = tmp_path / "tree.zip"
    assert numbers_of([f"zip://a.parquet::{archive}", f"zip://b::file://{archive}"]) == [0, 1, 2]


def test_a_list_behind_a_cache_is_one_dataset_and_behind_two_an_error(in_memory):
    urls = [f"simplecache::{in_memory}/{path}" for path in ("a.parquet", "b", "[fg].parquet")]
    assert numbers_of(urls) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="are on two storages"):
        open_loader([f"simplecache::{in_memory}/a.parquet", f"filecache::{in_memory}/b"])


def test_files_of_an_archive_that_this_python_reads_wrongly_are_refused_by_name(tree, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "tree.zip", "w") as archive:
        archive.write(tree / "b" / "c.parquet", "stored/c.parquet")
        archive.write(tree / "b" / "c.parquet", "c.parquet", zipfile.ZIP_DEFLATED)
    monkeypatch.setattr(zip_archives, "mixes_up_files", lambda: False)
    manifest = open_loader(f"zip://**::{tmp_path}/tree.zip")[1].dump_manifest()
    monkeypatch.setattr(zip_archives, "mixes_up_files", lambda: True)
    for path, known in (("stored", None), ("stored/c.parquet", None), ("**", None), ("**", manifest)):
        with pytest.raises(UnreadableFileError, match=r"stored/c\.parquet is in the archive without.*use a later one"):
            open_loader(f"zip://{path}::{tmp_path}/tree.zip", manifest=known)
    assert numbers_of(f"zip://c.parquet::{tmp_path}/tree.zip") == [1]


# Errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["nothing", "nothing.parquet", "nothing/*.parquet", "tree/*.csv", "tree/b/d/nothing"])
def test_a_path_that_stands_for_nothing_is_an_error_that_says_what_was_looked_for(tree, path):
    with pytest.raises(FileNotFoundError) as raised:
        open_loader(tree.parent / path)
    assert str(tree.parent / path) in str(raised.value)


def test_a_list_with_one_path_that_stands_for_nothing_is_an_error_that_names_it(tree):
    with pytest.raises(FileNotFoundError) as raised:
        open_loader([tree, tree / "nothing"])
    assert str(tree / "nothing") in str(raised.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="This system has no named pipes.")
def test_a_pipe_is_an_error_that_says_that_it_is_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "a.parquet")
    (tmp_path / "link").symlink_to(tmp_path / "a.parquet")
    for name in ("a.parquet", "link"):
        with pytest.raises(UnreadableFileError, match=rf"/{name}' is neither a regular file nor a directory"):
            open_loader(tmp_path / name)


def test_a_directory_without_data_is_an_error_that_names_it_and_what_was_passed_over(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"\.parquet.* at .*empty'$"):
        open_loader(tmp_path / "empty")
    write_file(tmp_path / "empty" / "table.csv", 0)
    with pytest.raises(FileNotFoundError, match=r"empty'.*table\.csv"):
        open_loader(tmp_path / "empty")


def test_the_same_file_twice_is_an_error_that_names_it(tree, monkeypatch):
    monkeypatch.chdir(tree)
    file = tree / "a.parquet"
    for other in (file, str(file), f"file://{file}", tree, f"{tree}/*.parquet", "a.parquet", f"{tree}/b/../a.parquet"):
        with pytest.raises(ValueError, match=r"a\.parquet' is named twice"):
            open_loader([file, other])


@pytest.mark.parametrize("name", ["data", "memory", "s3", "git"])
def test_a_directory_may_be_named_as_a_protocol_is(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for directory in (name, "other"):
        (tmp_path / directory).mkdir()
        write_file(tmp_path / directory / "a.parquet", 3)
    for paths in (name, [name, "other"], ["other", name]):
        loader, _ = open_loader(paths)
        assert len(loader.dataset._opened_files.manifest.files) == (1 if paths == name else 2)
        assert len(list(loader)) > 0


def test_paths_on_two_storages_are_an_error(tree):
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe_file("/two/a.parquet", (tree / "a.parquet").read_bytes())
    try:
        for paths in ([tree, "memory://two/a.parquet"], ["memory://two/a.parquet", tree]):
            with pytest.raises(ValueError, match=r"memory://two/a\.parquet.*are on two storages"):
                open_loader(paths)
    finally:
        filesystem.rm("/two", recursive=True)


# A storage that is not the local one --------------------------------------------------------------------------------


@pytest.fixture
def in_memory(tree: Path) -> Iterator[str]:
    """The files of `tree` in fsspec's memory, and the URL of their directory."""
    filesystem = fsspec.filesystem("memory")
    filesystem.put(f"{tree}/", "/listing/tree/", recursive=True)
    yield "memory://listing/tree"
    filesystem.rm("/listing", recursive=True)


@pytest.mark.parametrize(
    ("path", "numbers"),
    [
        ("", [0, 1, 2, 3, 4]),
        ("/b", [1, 2]),
        ("/*.parquet", [0, 3, 4]),
        ("/**", [0, 1, 2, 3, 4]),
        ("/b/d/e.parquet", [2]),
    ],
)
def test_files_in_memory_are_listed_and_delivered(in_memory, path, numbers):
    assert numbers_of(in_memory + path) == numbers


def test_files_in_memory_are_resumed_at_every_batch(in_memory):
    options = {"shuffle": True, "shuffle_buffer_size": 20}
    loader, _ = open_loader(in_memory, **options)
    states, whole = [loader.state_dict()], []
    for batch in loader:
        whole.append(batch["row"].tolist())
        states.append(loader.state_dict())
    assert sorted(itertools.chain(*whole)) == list(range(50))
    for stop, state in enumerate(states):
        resumed, _ = open_loader(in_memory, **options)
        resumed.load_state_dict(state)
        assert batches_of(resumed) == whole[stop:]


def test_a_file_twice_or_a_missing_one_in_memory_is_an_error_that_names_it(in_memory):
    with pytest.raises(ValueError, match=r"memory://.*/tree/a\.parquet' is named twice"):
        open_loader([in_memory, f"{in_memory}/a.parquet"])
    with pytest.raises(FileNotFoundError, match=r"memory://.*/tree/nothing"):
        open_loader(f"{in_memory}/nothing")


def test_a_local_dataset_and_its_copy_in_memory_have_the_same_state(tree, in_memory):
    here, _ = open_loader(tree)
    there, _ = open_loader(in_memory)
    assert here.state_dict()["plan"]["fingerprint"] == there.state_dict()["plan"]["fingerprint"]
    assert all_rows_of(here) == all_rows_of(there)
