"""Wrong use of a mixture: each error names the source, and says what to do."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from torch_dataloader_utils import CheckpointMismatchError, ColumnError, MixedDataset, RunLog, Source, StructuredDataset


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Return a directory of two sources of 100 rows, one without rows, one of another schema, and a text file."""
    root = tmp_path_factory.mktemp("sources")
    tables = {name: pa.table({"x": range(100)}) for name in ("web", "code")}
    tables |= {"none": tables["web"].slice(0, 0), "words": pa.table({"x": ["a", "b"]}), "z": pa.table({"z": range(9)})}
    for name, table in tables.items():
        (root / name).mkdir()
        pq.write_table(table, root / name / "part.parquet")
    (root / "nothing").mkdir()
    (root / "lines.jsonl").write_text('{"x": 1}\n')
    return root


def open_with(root, code: Any, weights: Any = None, **options: Any):
    """Make a mixture of "web" and of another source under the name "code"."""
    given = {"num_workers": 0, "num_ranks": 1, "rank": 0, "batch_size": 10, **options}
    weights = {"web": 0.7, "code": 0.3} if weights is None else weights
    return MixedDataset.create_dataloader({"web": Source(root / "web"), "code": code}, weights, **given)


FILTER = pc.field("x") > 1_000


@pytest.mark.parametrize(
    ("path", "options", "error", "message"),
    [
        ("absent", {}, FileNotFoundError, r"source 'code': there is no file or directory .*absent"),
        ("nothing", {}, FileNotFoundError, "source 'code': found no .parquet"),
        ("none", {}, ValueError, "source 'code' has the weight 0.3 of 1, .* leave no row: give it the weight 0"),
        ("code", {"filters": FILTER, "count_rows": True}, ValueError, "source 'code' has the weight .* leave no row"),
        ("code", {"filters": FILTER}, ValueError, r"source 'code' .* make the Source with count_rows=True"),
        ("lines.jsonl", {"format": "jsonl"}, ValueError, r"source 'code' .* make the Source with count_rows=True"),
        ("words", {}, ColumnError, "'x' is string in source 'code' but int64 in source 'web'"),
        ("z", {}, ColumnError, "'z' is in source 'code' but not in source 'web'"),
        ("code", {"columns": ["y"]}, ColumnError, "source 'code': there is no column 'y'"),
    ],
    ids=["absent", "no files", "no rows", "none left", "uncounted", "text", "types", "columns", "column"],
)
def test_what_is_wrong_with_a_source_is_named_with_it(root, path, options, error, message):
    with pytest.raises(error, match=message) as caught:
        open_with(root, Source(root / path, **options))
    assert str(caught.value).count("count_rows=True") <= 1


def test_a_manifest_of_other_files_is_named_with_its_source(root):
    _, dataset = open_with(root, Source(root / "code"))
    with pytest.raises(ValueError, match=r"source 'code': the manifest holds .*web"):
        open_with(root, Source(root / "code", manifest=dataset.dump_manifest("web")))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "code",
    [{"path": "none"}, {"path": "web", "filters": FILTER, "count_rows": True}],
    ids=["no rows", "none left"],
)
def test_a_source_without_rows_may_rest(root, code):
    source = Source(**{**code, "path": root / code["path"]})
    loader, dataset = open_with(root, source, {"web": 1, "code": 0})
    assert len(loader) == 10
    assert sorted(row for batch in loader for row in batch["x"].tolist()) == list(range(100))
    loader.load_state_dict([loader.state_dict()], strict=False)
    assert not list(loader)
    loader.set_epoch(1)
    assert len(list(loader)) == 10
    with pytest.raises(ValueError, match=r"source 'code' has the weight 0\.5 of 1"):
        dataset.set_weights({"web": 1, "code": 1})


@pytest.mark.parametrize(
    ("weights", "message"),
    [([0.7, 0.3], r"weights holds 0.7: expected a mapping .* such as \{'web': 1\}"), (0.7, "list of pairs")],
    ids=["numbers", "number"],
)
def test_weights_without_names_are_refused_with_an_example(root, weights, message):
    with pytest.raises(TypeError, match=message):
        open_with(root, Source(root / "code"), weights)


@pytest.mark.parametrize("name", ["path", "format", "columns", "filters", "count_rows", "manifest", "partitioning"])
def test_what_belongs_to_a_source_says_where_to_give_it(root, name):
    with pytest.raises(TypeError, match=rf"{name}: give that to each source, as in Source\(path, {name}=\.\.\.\)"):
        open_with(root, Source(root / "code"), **{name: None})


def test_storage_options_beside_the_sources_are_those_of_the_run_log_alone(root, tmp_path):
    with pytest.raises(TypeError, match=r"Source\(path, storage_options="):
        open_with(root, Source(root / "code"), storage_options={"anon": True})
    loader, _ = open_with(root, Source(root / "code"), storage_options={}, run_log=tmp_path / "log")
    assert sum(len(batch["x"]) for batch in loader) == 142
    assert RunLog.read(tmp_path / "log") is not None


def test_sources_given_to_a_single_dataset_are_sent_to_the_mixture(root):
    with pytest.raises(TypeError, match="MixedDataset mixes sources"):
        StructuredDataset.create_dataloader({"web": Source(root / "web")})


def test_a_state_of_other_files_of_a_source_is_continued_with_permission(root):
    state = open_with(root, Source([root / "code" / "part.parquet", root / "web" / "part.parquet"]))[0].state_dict()
    loader, _ = open_with(root, Source([root / "code" / "part.parquet"]))
    with pytest.raises(CheckpointMismatchError, match="on_changed_files='continue'") as caught:
        loader.load_state_dict(state)
    advice = str(caught.value).partition("What to do")[2]
    assert "rows of source" not in advice


def test_states_of_a_mixture_and_of_a_single_dataset_are_told_apart(root):
    loader, _ = open_with(root, Source(root / "code"))
    single, _ = StructuredDataset.create_dataloader(root / "web", num_workers=0, num_ranks=1, rank=0)
    for source, target in ((loader, single), (single, loader)):
        with pytest.raises(CheckpointMismatchError, match="a state of a mixture into a MixedDataset") as caught:
            target.load_state_dict(source.state_dict())
        assert "create the loader" not in str(caught.value)
