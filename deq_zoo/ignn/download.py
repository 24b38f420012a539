"""Downloads of public data sets, if the user asks for them."""

from __future__ import annotations

from pathlib import Path

from deq_zoo.errors import ZooError
from deq_zoo.packages import optional

PLANETOID = ("cora", "citeseer", "pubmed")


def download(root: str | Path | None, name: str) -> None:
    """Download Planetoid, PPI, Amazon Photo or a TU set into a folder by means of PyG."""
    if name in ("amazon", "chains", "rings"):
        why = "PyG does not have its files" if name == "amazon" else "it is made by rule"
        raise ZooError(f"{name} cannot be downloaded, since {why}: drop download=true")
    if root is None:
        raise ZooError("download=true needs a folder to put the files into: name a --data-dir")
    datasets = optional("torch_geometric.datasets", "ignn", "downloads of graphs")
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
