"""The state of a training run, in which processes may differ: to a checkpoint and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deq_zoo.checkpoint import Checkpoint
from deq_zoo.randomness import random_state, restore_random_state
from deq_zoo.running_statistics import merged_statistics, own_buffers, restore_buffers
from deq_zoo.tree import to_device
from deq_zoo.values import to_data
from deq_zoo.weights import load_weights

if TYPE_CHECKING:
    from deq_zoo.trainer import Trainer


def collect_state(trainer: Trainer) -> Checkpoint:
    """Return a checkpoint of all processes; each of them must call this."""
    processes, model = trainer.processes, trainer.bare_model
    accelerator = processes.accelerator
    with merged_statistics(model, processes) as own:
        weights = accelerator.get_state_dict(trainer.model)
        weights = {key: t.detach().to("cpu", copy=True) for key, t in weights.items()}
        buffers = own_buffers(model, own, processes)
    states = processes.gather(
        {
            "carry": to_device(trainer.carry, torch.device("cpu")),
            "randomness": random_state(),
            "own": {"window": trainer.window.state(), "buffers": buffers},
        }
    )
    scaler = accelerator.scaler
    return Checkpoint(
        step=trainer.step,
        model=weights,
        optimizer=trainer.optimizer.optimizer.state_dict(),
        carry=[state["carry"] for state in states],
        randomness={"ranks": [state["randomness"] for state in states]},
        by_process=[state["own"] for state in states],
        notes={
            "best": trainer.best,
            "best_step": trainer.best_step,
            "scaler": None if scaler is None else scaler.state_dict(),
        },
        config={"name": trainer.name, "preset": to_data(trainer.preset)},
        facts=dict(model.facts),
    )


def restore_state(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Set the state of this process to that in a checkpoint."""
    rank, notes = trainer.processes.rank, checkpoint.notes
    load_weights(trainer.bare_model, checkpoint.model, str(trainer.run.last))
    trainer.optimizer.optimizer.load_state_dict(checkpoint.optimizer)
    trainer.step = checkpoint.step
    trainer.best, trainer.best_step = notes["best"], notes.get("best_step")
    trainer.carry = to_device(checkpoint.carry[rank], trainer.devices.device)
    if checkpoint.by_process:
        own = checkpoint.by_process[rank]
        restore_buffers(trainer.bare_model, own["buffers"])
        trainer.window.restore(own["window"])
    else:  # a checkpoint of an earlier version
        trainer.window.restore(notes["window"])
    scaler = trainer.processes.accelerator.scaler
    if scaler is not None and notes["scaler"] is not None:
        scaler.load_state_dict(notes["scaler"])
    restore_random_state(checkpoint.randomness["ranks"][rank])
