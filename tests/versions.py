"""What older versions of torch cannot do, as marks of tests."""

from __future__ import annotations

import pytest
import torch

from torchdeq.export.program import exports_loops

needs_cpu_shards = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"),
    reason=f"fully_shard of torch {torch.__version__} needs an accelerator",
)
needs_exported_loops = pytest.mark.skipif(
    not exports_loops(), reason=f"torch {torch.__version__} exports no loops"
)
