"""Read by the type checker, never run: the types of the public face."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import assert_type

from torch_dataloader_utils import (
    Audit,
    CheckpointMismatchError,
    CheckpointStore,
    Codes,
    ColumnFormat,
    DeltaDataset,
    Event,
    FileAudit,
    Hook,
    IcebergDataset,
    MixedDataset,
    PackedBytes,
    Packing,
    Padded,
    Rows,
    RowStep,
    RunLog,
    RunSegment,
    Source,
    StoredCheckpoint,
    StructuredDataLoader,
    StructuredDataset,
    TokenBudget,
    audit,
    to_device,
)
from torch_dataloader_utils.distributed import (
    CheckpointEntry,
    broadcast_states,
    gather_states,
    in_step,
    load_gathered,
    load_rank_state,
    own_state,
    read_states,
    require_same_plan,
    save_rank_state,
)
from torch_dataloader_utils.errors import Difference


def open_tables(path: Path) -> None:
    loader, dataset = IcebergDataset.create_dataloader("db.t", catalog_config={"type": "sql"}, scan_filter="x > 3")
    assert_type(loader, StructuredDataLoader)
    assert_type(dataset, IcebergDataset)
    loader, version = DeltaDataset.create_dataloader(path, version=3, batch_size=4)
    assert_type(version, DeltaDataset)
    table: StructuredDataset = version


def mix_sources(path: Path) -> None:
    sources = {
        "web": Source(
            path,
            columns=["x"],
            filters=[("x", ">", 3)],
            count_rows=True,
            transform=lambda table: table,
            transform_id="same",
        ),
        "code": Source("data/code", "jsonl", count_rows=True),
        "math": Source.iceberg("db.math", catalog_config={"type": "sql"}),
        "more": Source.delta(path, version=3),
    }
    assert_type(sources, dict[str, Source])
    weights = {"web": 0.7, "code": 0.2, "math": 0.1, "more": 0}
    loader, dataset = MixedDataset.create_dataloader(sources, weights, rows_per_epoch=100, source_column="source")
    assert_type(loader, StructuredDataLoader)
    assert_type(dataset, MixedDataset)
    MixedDataset.create_dataloader(sources, [(0, weights), (5_000, weights)], rows_per_epoch=100, batch_size=4)
    dataset.set_weights(weights)
    assert_type(dataset.dump_manifest("web"), bytes)
    assert_type(dataset.get_metrics(), dict[str, Any])


def use_the_loader(path: Path) -> None:
    loader, dataset = StructuredDataset.create_dataloader(path)
    assert_type(loader, StructuredDataLoader)
    assert_type(dataset, StructuredDataset)
    plain: DataLoader[Any] = loader
    iterable: IterableDataset[Any] = dataset
    assert_type(len(loader), int)
    assert_type(loader.state_dict(), dict[str, Any])
    assert_type(dataset.rows_at(3, epoch=1, rank=0, scan=True), Rows)
    assert_type(list(dataset.rows_at(3)), list[tuple[str, int]])
    assert_type(dataset.step_of("part-0.parquet", 5), RowStep | None)
    batch: Any = loader.batch_at(3, 1, scan=True)
    loader.exclude([("a.parquet", 3)])
    dataset.exclude({"a.parquet": range(3)})
    dataset.exclude(pc.field("x") > 3)
    dataset.exclude([("x", ">", 3)])
    loader.load_state_dict(dataset.state_dict())
    loader.load_state_dict([dataset.state_dict()], strict=False, on_changed_files="continue")
    dataset.set_epoch(1)
    assert_type(dataset.epoch, int)
    assert_type(dataset.num_batches, int)
    assert_type(dataset.num_workers, int)
    assert_type(dataset.plan_digest, str)
    assert_type(dataset.get_metrics(), dict[str, Any])
    assert_type(dataset.get_total_metrics(), dict[str, Any])
    assert_type(dataset.dump_manifest(), bytes)


def note(event: Event) -> None:
    hook: Hook = note
    assert_type(event.step, int)
    assert_type(event.worker, int | None)
    assert_type(event.seconds, float | None)
    assert_type(event.paths, tuple[str, ...])


def use_every_parameter() -> None:
    StructuredDataset.create_dataloader(
        ["s3://bucket/a", Path("b")],
        "parquet",
        batch_size=8,
        drop_last=True,
        columns=["x"],
        filters=pc.field("x") > 3,
        transform=lambda table: table.slice(1),
        transform_id="all but the first",
        shuffle=True,
        shuffle_seed=1,
        shuffle_buffer_size=100,
        split_bytes="1MiB",
        split_rows=10,
        num_workers=2,
        num_ranks=2,
        rank=0,
        mesh=None,
        output_format="numpy",
        column_formats={"x": "packed", "y": Padded(-1, length=8), "z": Codes(["a", "b"])},
        fill_nulls={"x": "", "z": -100},
        mask_nulls=["y"],
        packing=Packing("tokens", length=4096, strategy="best_fit", outputs=["cu_seqlens"]),
        count_tokens="num_tokens",
        batching=TokenBudget("tokens", tokens=32_768, padded=True, oversized="alone"),
        collate_fn=len,
        storage_options={"anon": True},
        storage_timeout=30.0,
        manifest=b"",
        read_ahead_bytes="64MiB",
        memory_map=False,
        row_id_column="id",
        fingerprint=True,
        show_progress=True,
        progress_interval_sec=0.5,
        run_log="runs/first",
        hooks=[note, print],
        pin_memory=True,
        persistent_workers=True,
    )


def refuse_what_is_wrong(path: Path) -> None:
    StructuredDataset.create_dataloader(path, output_format="pandas")  # type: ignore[arg-type]
    StructuredDataset.create_dataloader(path, format="feather")  # type: ignore[arg-type]
    StructuredDataset.create_dataloader(path, batch_size="8")  # type: ignore[arg-type]
    StructuredDataset.create_dataloader(path, column_formats={"x": "jagged"})  # type: ignore[dict-item]
    StructuredDataset.create_dataloader(path, packing=Packing("tokens", 8, strategy="first_fit"))  # type: ignore[arg-type]
    StructuredDataset.create_dataloader(path, batching=TokenBudget("tokens", 8, oversized="cut"))  # type: ignore[arg-type]
    StructuredDataset.create_dataloader(path, mask_nulls=[1])  # type: ignore[list-item]


def look_at_formats(packed: PackedBytes) -> None:
    wanted: dict[str, ColumnFormat] = {"x": "padded", "y": Padded(), "z": Codes([1, 2])}
    StructuredDataset.create_dataloader("a", column_formats=wanted)
    assert_type(Padded().length, int | None)
    assert_type(packed.values, Any)
    assert_type(packed.offsets, Any)


def show_progress_on_a_device(loader: StructuredDataLoader) -> None:
    progress = loader.progress("drop")
    assert_type(progress["initial"], int)
    assert_type(progress["total"], int | None)
    moved = to_device(loader, "cuda", depth=3)
    assert_type(moved.state_dict(), dict[str, Any])
    moved.load_state_dict([], strict=False)
    for batch in in_step(moved):
        assert_type(batch, Any)


def use_many_ranks(loader: StructuredDataLoader, dataset: StructuredDataset, directory: Path) -> None:
    states = gather_states(loader)
    assert_type(states, list[dict[str, Any]])
    loader.load_state_dict(own_state(states))
    load_gathered(loader, states)
    assert_type(save_rank_state(loader, directory), Path | str)
    load_rank_state(dataset, directory)
    require_same_plan(dataset)
    require_same_plan(loader)
    loader.load_state_dict(own_state(broadcast_states(states), source=loader))
    for _ in in_step(loader, group=loader.process_group):
        pass
    assert_type(CheckpointEntry(loader).state_dict(), dict[str, str])
    CheckpointEntry(dataset).load_state_dict({"rank-0-of-1": "{}"})
    CheckpointEntry(dataset, elastic=True).load_state_dict({"states_of_all_ranks": "{}"})


def audit_a_training(loader: StructuredDataLoader, store: CheckpointStore) -> None:
    found = audit("s3://bucket/checkpoint", loader, {"anon": True}, key="loader")
    assert_type(found, Audit)
    assert_type(audit(store, ["a.parquet", Path("b.parquet")]).files, tuple[FileAudit, ...])
    assert_type(found.total.done, int)
    assert_type(found.files_match, bool | None)
    assert_type(read_states(Path("checkpoint")), list[dict[str, Any]])
    log = RunLog.read("runs/first", {"anon": True})
    assert_type(log.segments, tuple[RunSegment, ...])
    assert_type(log.segment_of(0, 3, rank=1), RunSegment | None)


def use_a_mesh(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    StructuredDataset.create_dataloader(path, mesh=mesh["dp"], global_batch_size=512)
    StructuredDataset.create_dataloader(path, mesh=2)  # type: ignore[arg-type]


def look_at_an_error(error: CheckpointMismatchError) -> None:
    assert_type(error.differences, tuple[Difference, ...])
    assert_type(error.files_added, tuple[str, ...])


def store_checkpoints(path: Path, model: Module, optimizer: Optimizer) -> None:
    loader, _ = StructuredDataset.create_dataloader(path)
    store = CheckpointStore("s3://bucket/run", keep_last=None, keep_best=("loss", "min", 2), storage_options={})
    assert_type(store.save(3, model=model, optimizer=optimizer, loader=loader), StoredCheckpoint)
    assert_type(store.save(3, model=model, metrics={"loss": 0.5}, async_=True), Future[StoredCheckpoint])
    assert_type(store.restore(model=model, optimizer=[optimizer], loader=loader, step=3), StoredCheckpoint | None)
    assert_type(store.latest(), StoredCheckpoint | None)
    assert_type(store.best(), StoredCheckpoint | None)
    assert_type(store.wait(), StoredCheckpoint | None)
