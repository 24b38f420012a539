"""A map under examination, with what has been found about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from torchdeq.config import DEQConfig
from torchdeq.diagnostics.findings import Finding, Kind, Severity
from torchdeq.packed import PackedFn
from torchdeq.packing import Packing
from torchdeq.pytree import State


@dataclass
class Case:
    """A map under examination; the examination replaces `f` by a tamer map where it must.

    Args:
        f: the map.
        z0: the start.
        args: further arguments of `f`.
        config: the options of the caller's DEQ.
    """

    f: Callable[..., Any]
    z0: State
    args: tuple[Any, ...]
    config: DEQConfig
    findings: list[Finding] = field(default_factory=list)
    coupled: bool = False
    eps: float = 0.0

    def __post_init__(self) -> None:
        self.original = self.f
        self.packing = Packing(self.z0)
        self.start = self.packing.pack(self.z0).detach()
        self.eps = torch.finfo(self.packing.dtype).eps

    def add(
        self, kind: Kind, severity: Severity, evidence: str, cure: str = "", *flags: str
    ) -> None:
        """Add a finding."""
        self.findings.append(Finding(kind, severity, evidence, cure, flags))

    def has(self, *kinds: Kind) -> bool:
        """Return whether one of these kinds was found."""
        return any(finding.kind in kinds for finding in self.findings)

    def packed(self, f: Callable[..., Any] | None = None) -> PackedFn:
        """Return the map on rows."""
        return PackedFn(self.packing, self.f if f is None else f, self.args)
