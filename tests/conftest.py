"""Seeds, precision and the hypothesis profile of the suite; which tests the library alone has."""

import os
from importlib.util import find_spec

# Before torch: some machines advertise AMX without enabling it, and bfloat16 matmuls die there.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite",
    deadline=None,
    max_examples=15,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("suite")
torch.set_num_threads(1)

# Where only the library is installed, tests of the zoo and of pages and programs that use it are
# left out; tests/test_library_alone.py fails if one is missing here.
ZOO = [
    "contracts/test_families.py",
    "contracts/test_outside_family.py",
    "contracts/test_pretrained.py",
    "golden",
    "test_demo.py",
    "test_docs.py",
    "test_examples.py",
    "test_language_rivals.py",
    "test_provenance.py",
    "test_site.py",
    "test_tables.py",
    "test_timed.py",
    "zoo",
]
collect_ignore = [] if find_spec("safetensors") else ZOO


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
