"""Streams: many samples through a fixed number of slots, each at the cost of its own difficulty.

The public interface:

- `Stream(f, slots=64, solver=None, stop=None, has_aux=False, halt=None, restart=None, restarts=0,
  choose="residual", time_limit=None, ahead=None, example=None, eps=None)`;
- `stream.run(requests, ordered=False)` yields a `Result` for each `Request` of an iterator;
- `stream.submit(request, timeout=60.0)` returns a `concurrent.futures.Future` of a `Result`, from
  any thread; `StreamFull` if the queue has no room in time, `StreamClosed` after `close`;
- `stream.solve(z0, args=(), on_failure="warn")` solves one large batch, as `torchdeq.solve`;
  `stream.solve_batches(batches)` solves several without a pause between them;
- `stream.close(drain=True, timeout=60.0)`; a `with` block closes at its end;
- `stream.counts` (calls, evaluations, useful, finished), `stream.waiting`, `stream.busy`;
- `Request(z0, args=(), id=None, stop=None, time_limit=None)`, without batch dimensions;
- `Result`: `id`, `status` (a `StreamStatus`), `z`, `residual`, `relative`, `evaluations`, `steps`,
  `aux`, `attempts`, `error`, `seconds`.
"""

from torchdeq.stream.request import (
    Request,
    Result,
    StreamClosed,
    StreamFull,
    StreamStatus,
)
from torchdeq.stream.rule import Counts
from torchdeq.stream.stream import Stream

__all__ = [
    "Counts",
    "Request",
    "Result",
    "Stream",
    "StreamClosed",
    "StreamFull",
    "StreamStatus",
]
