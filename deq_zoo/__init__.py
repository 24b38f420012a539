"""Deep equilibrium models built on the public names of torchdeq."""
