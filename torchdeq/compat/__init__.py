"""Everything that exists for the interface of torchdeq 0.1.0 (Geng & Kolter, 2023).

| file | contents |
|---|---|
| `functions.py` | `get_solver`, `register_solver`: solvers from and as functions |
| `backward.py` | `backward_factory`: a backward pass as a function |
| `decorator.py` | `deq_decorator`: a map and its start, packed for a solver function |
| `ignored.py` | names that 0.1.0 accepted and ignored: accepted, with a note in the log |
| `names.py` | former names of options |
| `paths.py` | published import paths that end in a function |

`torchdeq.core`, `torchdeq.utils`, `torchdeq.solver.stat` and `torchdeq.norm.{base,spectral,weight}
_norm` are published import paths as well: files that re-export, without code. The page "From
torchdeq 0.1.0" of the documentation lists what differs.
"""
