"""What other libraries said when they failed, and on what each of them ran."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

__all__ = ["origins", "what_was_said"]

Results = Mapping[str, Any]


def what_was_said(errors: Iterable[tuple[str, str]]) -> Iterator[str]:
    """List errors, each once.

    Args:
        errors: Where each came from, and its message.
    """
    said: dict[str, list[str]] = {}
    for where, error in errors:
        said.setdefault(error, []).append(where)
    if said:
        yield from ("What was said:", "", *(f"- {'; '.join(where)}: `{error}`" for error, where in said.items()), "")


def origins(ways: Iterable[tuple[str, str, Results]]) -> Iterator[str]:
    """Tell the version of each library, then on what they ran, once for those that ran on the same.

    Args:
        ways: For each its title, its package, which of this library is empty, and its results.
    """
    versions: dict[str, list[str]] = {}
    for title, package, found in ways:
        if "missing" in found:
            yield from (f"Not run: {title}: {found['missing']}", "")
            continue
        source = found["code"]
        own = f"commit `{(source['commit'] or 'unknown')[:12]}`{' with changes' if source['changed'] else ''}"
        versions.setdefault(_machine(found), []).append(f"{package} {found['version']}" if package else own)
    for where, what in versions.items():
        yield from (f"{', '.join(dict.fromkeys(what))}: {where}", "")


def _machine(found: Results) -> str:
    machine = found["machine"]
    packages = ", ".join(f"{package} {version}" for package, version in found["code"]["packages"].items())
    return (
        f"{found['begun'][:10]}, {machine['cores']} cores ({machine['cpu']}), {machine['system']}, Python "
        f"{machine['python']}; {packages}."
    )
