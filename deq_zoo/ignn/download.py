"""Public sets from the network, if asked for."""

from __future__ import annotations

from pathlib import Path

from deq_zoo.errors import ZooError

PLANETOID = ("cora", "citeseer", "pubmed")
EXTRA = "pip install 'torchdeq[graphs]'"


def download(root: str | Path | None, name: str) -> None:
    """Let PyG fetch Planetoid, PPI, Amazon Photo or a TU set into a folder; needs the network."""
    if name in ("amazon", "chains", "rings"):
        why = "PyG does not have its files" if name == "amazon" else "it is made by rule"
        raise ZooError(f"{name} cannot be downloaded, since {why}: drop download=true")
    if root is None:
        raise ZooError("download=true needs a folder to put the files into: name a --data-dir")
    try:
        from torch_geometric import datasets  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise ZooError(f"downloads are PyG's, which is not installed: {EXTRA}") from None
    try:
        if name in PLANETOID:
            datasets.Planetoid(str(root), name)
        elif name == "ppi":
            datasets.PPI(str(root))
        elif name == "photo":
            datasets.Amazon(str(root), "photo")
        else:
            datasets.TUDataset(str(root), name)
    except OSError as error:
        raise ZooError(f"PyG could not fetch {name}: {error}") from error
