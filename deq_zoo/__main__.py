"""`python -m deq_zoo` is `deq-zoo`."""

import sys

from deq_zoo.cli import main

sys.exit(main())
