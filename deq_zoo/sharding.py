"""A model whose weights, gradients and optimiser are shared out among the processes: FSDP2.

The unit is the module whose forward pass holds the solve. Its weights are gathered once before, so
processes whose solves take different numbers of steps never wait for each other inside one. By
default this is the computation of the loss as a whole; a model names further units, which each
process calls equally often, by `Model.shard_units`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from deq_zoo.building import try_to_build
from deq_zoo.errors import ZooError
from deq_zoo.model import Model
from deq_zoo.parallel import Parallel
from deq_zoo.task import Batch, Loss, Task, Weights
from deq_zoo.tree import map_tensors
from deq_zoo.weights import load_weights

if TYPE_CHECKING:
    from deq_zoo.preset import Preset
    from deq_zoo.processes import Processes

_ON_MAIN = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Sharded(Parallel):
    """A model of which every process holds a shard of each weight.

    Args:
        preset: task and optimiser.
        model: newly built, equal in all processes.
        processes: of the run, two or more.
    """

    def __init__(self, preset: Preset, model: Model, processes: Processes) -> None:
        accelerator = processes.accelerator
        if preset.precision == "fp16":
            raise ZooError("parallel=fsdp does not scale gradients, which fp16 needs: use bf16")
        if preset.optim.needs_whole_matrices:
            raise ZooError(
                f"{type(preset.optim).__name__} changes whole matrices, and parallel=fsdp holds "
                "shards of them: use parallel=ddp, or Adam"
            )
        self._preset, self._device = preset, accelerator.device
        self._is_main = processes.is_main
        self.model = model.to(accelerator.device)
        changes = type(preset.task).after_step is not Task.after_step
        self._twin = deepcopy(model) if changes and not preset.task.shardwise else None
        empty = _prepare_weights(model)
        mesh = init_device_mesh(accelerator.device.type, (processes.count,))
        for unit in model.shard_units():
            fully_shard(unit, mesh=mesh, ignored_params=empty)
        module = _LossModule(model)
        fully_shard(module, mesh=mesh, ignored_params=empty)
        self.module = module
        _shard_copies(model)
        self.optimizer = accelerator.prepare_optimizer(preset.optim.make_for(model))

    def loss(self, batch: Batch, carry: Any) -> Loss:
        compute = partial(self._preset.task.loss, self.model, batch, carry)
        _, loss = self.module(compute)
        return cast(Loss, loss)

    def after_step(self) -> None:
        """Call `Task.after_step`, with whole weights unless it works on shards."""
        task = self._preset.task
        if task.shardwise:
            task.after_step(self.model)
        elif self._twin is not None:
            _copy(self.model, self._twin)
            task.after_step(self._twin)
            _copy(self._twin, self.model)

    def weights(self) -> dict[str, Tensor]:
        weights: Any = get_model_state_dict(self.model, options=_ON_MAIN)
        whole = {name for name, _ in self.model.named_buffers()}  # not copied yet, on a CPU
        return {key: t.clone() if key in whole else t for key, t in weights.items()}

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimiser's state_dict as one of an optimiser of whole weights."""
        optimizer = self.optimizer.optimizer
        if not optimizer.state:  # torch would take a step to make a state, which counts in Adam
            return cast("dict[str, Any]", optimizer.state_dict())
        named: Any = get_optimizer_state_dict(self.model, optimizer, options=_ON_MAIN)
        if not self._is_main:
            return {}
        names = [name for group in named["param_groups"] for name in group["params"]]
        number = {name: k for k, name in enumerate(names)}
        groups = [
            {**group, "params": [number[name] for name in group["params"]]}
            for group in named["param_groups"]
        ]
        state = {number[name]: named["state"][name] for name in names if name in named["state"]}
        return {"state": state, "param_groups": groups}

    def restore(self, weights: Weights, optimizer: dict[str, Any], source: str) -> None:
        _copy(self.loaded(weights, source), self.model)
        own = self.optimizer.optimizer
        places = [p for group in own.param_groups for p in group["params"]]
        state = {
            number: map_tensors(partial(_shard_like, like=places[number]), values)
            for number, values in optimizer["state"].items()
        }
        own.load_state_dict({**optimizer, "state": state})

    def loaded(self, weights: Weights, source: str) -> Model:
        """Return another model, which has whole weights."""
        model = try_to_build(self._preset, self.model.facts)
        load_weights(model, weights, source)
        model.facts, model.preset = self.model.facts, self._preset
        return model.to(self._device)

    def whole(self) -> Callable[[], Model]:
        weights = self.weights()
        return lambda: self.loaded(weights, "the model in training")


class _LossModule(nn.Module):
    """The loss as the forward pass of a module, during which the weights are whole."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Loss]) -> tuple[Tensor, Loss]:
        """Return the loss that a function computes; FSDP would rebuild a batch as an argument."""
        loss = compute()
        return loss.value, loss  # FSDP looks for the tensor in tuples, not in dataclasses


def _prepare_weights(model: Model) -> set[nn.Parameter]:
    """Bring weights into a form that FSDP can share out; return those without entries."""
    empty = set()
    for name, weight in model.named_parameters():
        if not weight.dim():
            raise ZooError(
                f"parallel=fsdp cannot share out {name}, which is a single number: make it a "
                "tensor of one entry, or use parallel=ddp"
            )
        weight.data = weight.data.contiguous()  # shards are rows in memory
        if not weight.numel():
            empty.add(weight)
            # Optimisers that update many weights at once refuse to mix shards and whole tensors.
            weight.register_post_accumulate_grad_hook(_drop_gradient)
    return empty


def _drop_gradient(weight: Tensor) -> None:
    weight.grad = None


def _shard_copies(model: Model) -> None:
    """Share out the buffers that are copies of weights, as the weights are."""
    parameters = dict(model.named_parameters())
    for buffer, parameter in model.copied_weights().items():
        path, _, name = buffer.rpartition(".")
        like = parameters[parameter]
        setattr(model.get_submodule(path), name, _shard_like(model.get_buffer(buffer), like))


@torch.no_grad()
def _copy(source: Model, target: Model) -> None:
    """Copy the state of one model to another, each of which may be sharded; all processes call it.

    `load_state_dict` would not do: its hooks, e.g. those of norms, compute with whole weights.
    """
    tensors = {**dict(target.named_parameters()), **dict(target.named_buffers())}
    for name, tensor in (*source.named_parameters(), *source.named_buffers()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        tensors[name].copy_(_shard_like(whole, tensors[name]))
    modules = dict(target.named_modules())
    for name, module in source.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            modules[name].set_extra_state(module.get_extra_state())


def _shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this process's shard of a tensor that every process has; numbers are left alone."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    placed = tensor.detach().to(like.device)
    shard = distribute_tensor(placed, like.device_mesh, like.placements, src_data_rank=None)
    return shard.clone()  # a view would keep the whole tensor in memory
