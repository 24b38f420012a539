"""Methods without a promise of stability: a release may change or remove them.

- `Reversible`: published in 2025, limited to some tens of steps by its precision, and used by no
  model of the zoo.
"""

from torchdeq.experimental.reversible import Reversible
from torchdeq.grad import BACKWARDS

BACKWARDS.seal()

__all__ = ["Reversible"]
