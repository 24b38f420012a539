"""The state of a training run, in which processes may differ: to a checkpoint and back.

A checkpoint holds whole weights and a whole state of the optimiser, whatever number of processes
wrote it and however they held the model, and the rest of every process.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from accelerate.utils import set_seed

from deq_zoo.checkpoint import Checkpoint
from deq_zoo.randomness import random_state, restore_random_state
from deq_zoo.running_statistics import merged_statistics, own_buffers, restore_buffers
from deq_zoo.task import Shard, generator
from deq_zoo.tree import to_device
from deq_zoo.values import to_data

if TYPE_CHECKING:
    from deq_zoo.trainer import Trainer

_log = logging.getLogger("deq_zoo")


def collect_state(trainer: Trainer) -> Checkpoint:
    """Return a checkpoint of all processes, whole in process 0; each of them must call this."""
    processes, model = trainer.processes, trainer.bare_model
    with merged_statistics(model, processes) as own:
        weights = trainer.parallel.weights()
        buffers = own_buffers(model, own, processes)
    states = processes.gather(
        {
            "carry": to_device(trainer.carry, torch.device("cpu")),
            "randomness": random_state(),
            "own": {"window": trainer.window.state(), "buffers": buffers},
        }
    )
    scaler = processes.accelerator.scaler
    return Checkpoint(
        step=trainer.step,
        model=weights,
        optimizer=trainer.parallel.optimizer_state(),
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
    notes = checkpoint.notes
    trainer.parallel.restore(checkpoint.model, checkpoint.optimizer, str(trainer.run.last))
    trainer.step = checkpoint.step
    trainer.best, trainer.best_step = notes["best"], notes.get("best_step")
    scaler = trainer.processes.accelerator.scaler
    if scaler is not None and notes["scaler"] is not None:
        scaler.load_state_dict(notes["scaler"])
    if len(checkpoint.carry) == trainer.processes.count:
        _restore_own(trainer, checkpoint)
    else:
        _derive_own(trainer, checkpoint)


def _restore_own(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Set the state of this process alone to what it was."""
    rank = trainer.processes.rank
    trainer.carry = to_device(checkpoint.carry[rank], trainer.devices.device)
    if checkpoint.by_process:
        own = checkpoint.by_process[rank]
        restore_buffers(trainer.bare_model, own["buffers"])
        trainer.window.restore(own["window"])
    else:  # a checkpoint of an earlier version
        trainer.window.restore(checkpoint.notes["window"])
    restore_random_state(checkpoint.randomness["ranks"][rank])


def _derive_own(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Set the state of this process alone from those of another number of processes.

    Each process has the merged statistics of batch norms, which are in the saved model, and draws
    from a generator of its own, which depends on the seed and the step.
    """
    processes, carries = trainer.processes, checkpoint.carry
    shard = Shard(processes.rank, processes.count)
    carry = None
    if all(each is not None for each in carries):
        carry = trainer.task.split_carry(carries, shard)
    trainer.carry = to_device(carry, trainer.devices.device)
    if checkpoint.by_process:
        windows = [own["window"] for own in checkpoint.by_process]
        trainer.window.restore_shared(windows, processes.count)
    rng = generator("resume", trainer.preset.seed, trainer.step, processes.rank)
    set_seed(rng.initial_seed() % 2**32)
    if processes.is_main:
        _log.warning(
            "the number of processes has changed from %d to %d: the run sees the same samples in "
            "the same order, but draws other random numbers (e.g. for dropout), and its weights "
            "will not be those of a run without the change, bit for bit",
            len(carries),
            processes.count,
        )
