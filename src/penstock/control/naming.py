"""How people are told of nodes and numbers."""

from __future__ import annotations

from collections.abc import Collection


def listed(numbers: Collection[int]) -> str:
    return ", ".join(map(str, numbers))


def named(nodes: Collection[str]) -> str:
    """Nodes in the order of their numbers: 10 comes after 9."""
    return ", ".join(f"node {n}" for n in sorted(nodes, key=lambda n: (len(n), n)))
