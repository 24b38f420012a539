"""Wrong chains, noises and networks are errors that say what to do."""

from __future__ import annotations

from typing import Any

import pytest

from deq_zoo.diffusion import ParallelChain, parallel_sample, spaced
from deq_zoo.diffusion.package import diffusers
from tests.zoo.diffusion.nets import draw, make_net, make_scheduler


def make_learned() -> Any:
    """Return a scheduler whose variance the network would have to predict."""
    return diffusers().DDPMScheduler(variance_type="learned")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda: ParallelChain(make_net(), make_scheduler(), 10, scope="row"),  # type: ignore[arg-type]
            "did you mean|known",
        ),
        (lambda: ParallelChain(make_net(), make_scheduler(), 0), "1 to 1000 steps"),
        (lambda: ParallelChain(make_net(), make_scheduler(), 1001), "1 to 1000 steps"),
        (lambda: ParallelChain(make_net(), make_scheduler(), [0, 10]), "falling"),
        (lambda: ParallelChain(make_net(), make_scheduler(), [1000, 10]), "between 0 and 999"),
        (lambda: ParallelChain(make_net(), make_scheduler(), 10, -1.0), "eta must be"),
        (lambda: ParallelChain(make_net(), make_scheduler(), 10, chunk=0), "chunk"),
        (lambda: ParallelChain(make_net(), diffusers().DDPMScheduler(), 10, 0.5), "drop eta"),
        (
            lambda: ParallelChain(
                make_net(), diffusers().DDPMScheduler(variance_type="learned"), 10
            ),
            "fixed size",
        ),
        (lambda: spaced("cubic", 10), "known"),
    ],
)
def test_mistakes_are_errors(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        change()


def test_other_schedulers_are_refused() -> None:
    with pytest.raises(TypeError, match="EulerDiscreteScheduler"):
        ParallelChain(make_net(), diffusers().EulerDiscreteScheduler(), 10)


def test_wrong_noise_and_networks_in_training_mode_are_refused() -> None:
    x = draw(2, 1, 4, 4)
    noisy = ParallelChain(make_net(), make_scheduler(), 10, 1.0)
    with pytest.raises(ValueError, match="adds noise"):
        parallel_sample(noisy, x)
    with pytest.raises(ValueError, match="noise must be"):
        parallel_sample(noisy, x, draw(2, 9, 1, 4, 4))
    with pytest.raises(ValueError, match="z0 must be"):
        parallel_sample(ParallelChain(make_net(), make_scheduler(), 10), x, z0=x)
    with pytest.raises(ValueError, match=r"\(B, C, H, W\)"):
        parallel_sample(ParallelChain(make_net(), make_scheduler(), 10), x[0])
    with pytest.raises(ValueError, match="drop noise"):
        parallel_sample(ParallelChain(make_net(), make_scheduler(), 10), x, draw(2, 10, 1, 4, 4))
    partly = make_net()
    partly.second.train()
    for restless in (make_net().train(), partly):
        with pytest.raises(ValueError, match=r"unet\.eval"):
            parallel_sample(ParallelChain(restless, make_scheduler(), 10), x)
