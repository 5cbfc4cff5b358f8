"""What an elastic load leaves of the passes of a mixture whose files have changed since they began. Pure.

Where a source's files are the same, a number of rows says how far its pass has come. Where they are not, the sequence
of the pass is another one, and only content tells what was taken of it. So a state records both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch_dataloader_utils.checkpoint.file_changes import FileChanges
from torch_dataloader_utils.checkpoint.merge.claims import with_rows
from torch_dataloader_utils.checkpoint.run import Run
from torch_dataloader_utils.checkpoint.saved_state import SavedMixture, SavedRows, SavedState
from torch_dataloader_utils.planning.manifest import Layout, Split
from torch_dataloader_utils.planning.mixture.source_paths import SourcePath, parse_source_path
from torch_dataloader_utils.planning.plan import DeliveredBaseline


@dataclass(frozen=True, slots=True)
class ChangedPasses:
    """The passes that had begun, and whose files have changed since.

    Attributes:
        carried: What earlier epochs have taken of these passes, and what they have carried over of all others.
        changed: By source and pass the paths of files that were removed or rewritten.
        sources: The sources whose files have changed.
    """

    carried: DeliveredBaseline
    changed: dict[tuple[str, int], tuple[str, ...]]
    sources: frozenset[str]


def begun_passes(
    mixture: SavedMixture, baseline: DeliveredBaseline, files: FileChanges, layout: Layout
) -> ChangedPasses:
    """Return the passes whose files have changed and of which a row was taken.

    Args:
        mixture: What a state records of the mixture.
        baseline: What was delivered of the epoch.
        files: How the files differ, with the name of the source before each path.
        layout: The files to which row numbers refer.
    """
    sources = frozenset(path.partition("/")[0] for path in (*files.added, *files.removed, *files.changed))
    earlier = _taken(mixture.earlier, layout, sources)
    carried = _taken(mixture.carried, layout)
    parts = (earlier, carried, baseline)
    begun = {
        (path.source, path.number)
        for part in parts
        for path in _paths((*part.done, *(split for shard in part.partial for split in shard.shard.splits)))
        if path.source in sources
    }
    gone = {*files.removed, *files.changed}
    changed: dict[tuple[str, int], list[str]] = defaultdict(list, {key: [] for key in begun})
    for path, _ in layout:
        source, number, rest = parse_source_path(path)
        if (source, number) in begun and f"{source}/{rest}" in gone:
            changed[source, number].append(path)
    together = with_rows(carried, earlier.done, earlier.partial)  # a shard may be in both
    return ChangedPasses(together, {key: tuple(paths) for key, paths in sorted(changed.items())}, sources)


def changed_roots(saved: SavedState, run: Run) -> Iterator[tuple[str, str]]:
    """Yield the roots that differ: the dataset's, or those of sources whose files differ."""
    if saved.mixture is None or run.mixture is None:
        if saved.root != run.manifest.root:
            yield saved.root, run.manifest.root
        return
    own = {source.name: source.manifest for source in run.mixture.sources}
    for source in saved.mixture.sources:
        manifest = own.get(source.name)
        if manifest is not None and source.fingerprint != manifest.fingerprint and source.root != manifest.root:
            yield source.root, manifest.root


def _taken(rows: SavedRows, layout: Layout, sources: Iterable[str] | None = None) -> DeliveredBaseline:
    """Return saved rows, or those of some sources, by ranges of files."""

    def counts(split: Split) -> bool:
        return sources is None or parse_source_path(split.path).source in sources

    done = tuple(filter(counts, rows.whole(layout)))
    partial = (shard.partial(layout) for shard in rows.in_progress)
    return DeliveredBaseline(done, tuple(part for part in partial if counts(part.shard.splits[0])), (), 0)


def _paths(splits: Iterable[Split]) -> Iterator[SourcePath]:
    return map(parse_source_path, {split.path for split in splits})
