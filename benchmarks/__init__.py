"""What the solvers cost and how fast they converge, beside torchdeq 0.1.0."""
