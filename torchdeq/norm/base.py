"""The base of weight normalisations: `V * min(t, g / N(V))`, computed once per forward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from torchdeq.norm.computed import Parts, computed, was_overwritten
from torchdeq.norm.options import read_options
from torchdeq.norm.targets import Targets, as_tuple, check_parameter
from torchdeq.registry import Registry

NORMS: Registry[type[Any]] = Registry("norm")


@dataclass(frozen=True)
class Norm(ABC):
    r"""A normalisation of the weights of one module.

    $$W = V \min(t, g / N(V))$$

    `V` and `g` are parameters. `V` is the parameter that the module had before, so tied weights
    stay tied. `module.weight` becomes a plain attribute, not a `Parameter`: a tensor with a graph
    that a call of the norm computes. Every evaluation of `f` until the next call uses this tensor.
    `load_state_dict`, `deepcopy` and unpickling compute it again; after an optimizer step or a move
    to another device or dtype, call `torchdeq.reset_norm`.

    Initialisers may write into `module.weight`: the values that `nn.init`, `reset_parameters()` or
    a `copy_` under `no_grad` leave there become the new `V` at the next call, as if the norm had
    been applied to a layer with that weight. Assigning a `Parameter` does the same. Torch does not
    count writes through `.data`: until the first call the norm detects them by comparing values;
    after it they last until the next call only, as do writes that autograd records and assigned
    tensors. Call `reset_norm` between initialising a model and wrapping it in DDP, which broadcasts
    the parameters when it is constructed.

    A row (or matrix) of norm zero gets the factor 1, so that gradients reach it.

    Only `learn_scale=False` bounds the norm of `W` in training: a learnt `g` may grow, and `clip`
    bounds the factor while `V` may grow.

    Args:
        names: names of the parameters to normalise.
        dims: for each of these parameters, the dimension of its rows.
        learn_scale: whether `g` is a parameter; otherwise it is the constant `target_norm`.
        target_norm: the norm of the weights if `learn_scale` is False; otherwise where `g` of the
            spectral norm starts.
        clip: whether the factor is bounded by `clip_value`.
        clip_value: the bound `t` of the factor.
    """

    names: Sequence[str]
    dims: Sequence[int]
    learn_scale: bool = True
    target_norm: float = 1.0
    clip: bool = False
    clip_value: float = 1.0

    _target_modules: ClassVar[Targets]
    #: Suffixes of the parameters and buffers that replace a weight, in the order of registration.
    suffixes: ClassVar[tuple[str, ...]]
    #: The suffix of `V`.
    raw: ClassVar[str]
    #: Whether applying the norm leaves the weight unchanged (with a learnable scale, no clipping).
    keeps_weight: ClassVar[bool] = False

    def __post_init__(self) -> None:
        names, dims = tuple(self.names), tuple(self.dims)
        if len(names) != len(dims):
            raise ValueError(f"each name needs its dimension: got names {names} and dims {dims}")
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "dims", dims)
        if not self.target_norm >= 0:
            raise ValueError(f"target_norm must be at least 0, got {self.target_norm}")
        if not self.clip_value > 0:
            raise ValueError(f"clip_value must be positive, got {self.clip_value}")

    @abstractmethod
    def split(self, weight: Tensor, dim: int) -> Parts:
        """Return, by suffix, the parameters and buffers from which the method `weight` computes."""

    @abstractmethod
    def weight(self, parts: Parts, dim: int) -> Tensor:
        """Return the normalised weight."""

    def start(self, parts: Parts) -> Parts:
        """Return the initial values of the parameters and buffers, given those from `split`."""
        return parts

    def advance(self, parts: Parts, dim: int) -> None:
        """Update the buffers in place before a forward pass in training mode."""
        return

    @classmethod
    def target(cls, module: nn.Module) -> type[nn.Module] | None:
        """Return the nearest registered class that `module` inherits from; None if it has none.

        The output projection of `nn.MultiheadAttention` is no target: its other projections are not
        layers, and normalising one projection alone makes no sense. Neither is a module that torch
        parametrises: its weight is computed already.
        """
        for kind in type(module).__mro__:
            if kind in cls._target_modules:
                return None if is_parametrized(module) else kind
            if kind is NonDynamicallyQuantizableLinear:
                return None
        return None

    @classmethod
    def apply(
        cls,
        module: nn.Module,
        deq_args: Any = None,
        names: str | Sequence[str] | None = None,
        dims: int | Sequence[int] | None = None,
        **options: Any,
    ) -> Self:
        """Normalise the named parameters of `module`, by default those registered for its class.

        `options` are fields of the norm or the command-line flags for them. A flag in `deq_args`
        overrides an option, with a warning if they differ.
        """
        if names is None or dims is None:
            kind = cls.target(module)
            if kind is None:
                raise TypeError(
                    f"{cls.__name__} does not know which parameter of {type(module).__name__} to "
                    "normalise: pass names and dims, or call register_norm_module"
                )
            names, dims = cls._target_modules[kind]
        norm = cls(as_tuple(names), as_tuple(dims), **read_options(cls, deq_args, options))
        absent = {name for name, p in module._parameters.items() if p is None}
        present = [(name, dim) for name, dim in norm.items() if name not in absent]
        norm = replace(norm, names=[name for name, _ in present], dims=[dim for _, dim in present])
        for name, dim in present:  # all checks first: an error must leave the module unchanged
            check_parameter(module, name, dim)
        for name, dim in present:
            norm._install(module, name, dim)
        hooks = [
            module.register_state_dict_pre_hook(_before_saving),
            module.register_load_state_dict_pre_hook(_before_loading),
            module.register_load_state_dict_post_hook(_after_loading),
        ]
        vars(module).update(_deq_norm=norm, _deq_hooks=hooks)
        return norm

    def __call__(self, module: nn.Module) -> None:
        """Compute the weights of `module` for this forward pass, in training and evaluation.

        Evaluation cannot skip it when the parameters are unchanged: torch does not count writes
        through `.data` (e.g. an average of weights that is swapped in).
        """
        for name, dim in self.items():
            parts = self._parts(module, name)
            self._absorb(module, name, dim, parts)
            if module.training:
                self.advance(parts, dim)
            self._compute(module, name, dim, parts)

    def remove(self, module: nn.Module) -> None:
        """Turn the weights of `module` into ordinary parameters with their current values."""
        for name, dim in self.items():
            parts = self._parts(module, name)
            self._absorb(module, name, dim, parts)
            with torch.no_grad():
                weight = self.weight(parts, dim)
            module.__dict__.pop(name, None)
            for suffix in parts:
                delattr(module, f"{name}_{suffix}")
            trainable = parts[self.raw].requires_grad
            module.register_parameter(name, nn.Parameter(weight, requires_grad=trainable))
        for handle in module.__dict__.pop("_deq_hooks", ()):
            handle.remove()

    def items(self) -> list[tuple[str, int]]:
        """Return the pairs of a parameter's name and the dimension of its rows."""
        return list(zip(self.names, self.dims, strict=True))

    def _absorb(self, module: nn.Module, name: str, dim: int, parts: Parts) -> None:
        """Copy the values that an initialiser wrote into the weight to the parameters."""
        weight = self._initialised_weight(module, name, parts)
        if weight is None:
            return
        if weight.shape != parts[self.raw].shape:
            raise ValueError(
                f"{name} was given the shape {tuple(weight.shape)}, but its norm was applied to "
                f"the shape {tuple(parts[self.raw].shape)}: call remove_norm before changing it"
            )
        with torch.no_grad():
            for suffix, value in self.start(self.split(weight.to(parts[self.raw]), dim)).items():
                parts[suffix].copy_(value)
        self._compute(module, name, dim, parts)

    def _initialised_weight(self, module: nn.Module, name: str, parts: Parts) -> Tensor | None:
        """Return the weight if an initialiser wrote or assigned it; None if the norm computed it.

        Removes an assigned `Parameter` from the module.
        """
        assigned = module._parameters.pop(name, None)
        if assigned is not None:
            return assigned.detach()
        weight: Tensor | None = module.__dict__.get(name)
        if weight is None or not was_overwritten(weight, parts):
            return None
        return weight.detach()

    def _scale(self, weight: Tensor, norm: Tensor, g: Tensor | None) -> Tensor:
        """Return `weight * min(t, g / norm)`."""
        zero = norm == 0
        divisor = norm.masked_fill(zero, 1.0)
        factor = torch.where(zero, divisor, (self.target_norm if g is None else g) / divisor)
        if self.clip:
            # Training starts at the bound, and clamp's gradient there depends on torch's version.
            factor = torch.where(factor > self.clip_value, self.clip_value, factor)
        return weight * factor

    def _install(self, module: nn.Module, name: str, dim: int) -> None:
        """Replace the parameter `name` of the module by its parts and the computed weight."""
        weight = module._parameters[name]
        assert weight is not None  # check_parameter has raised otherwise
        with torch.no_grad():
            parts = self.start(self.split(weight, dim))
        del module._parameters[name]
        for suffix, value in parts.items():
            if suffix == self.raw:  # the same object: optimizers and tied weights refer to it
                module.register_parameter(f"{name}_{suffix}", weight)
            elif suffix == "g":
                scale = nn.Parameter(value, requires_grad=weight.requires_grad)
                module.register_parameter(f"{name}_{suffix}", scale)
            else:
                module.register_buffer(f"{name}_{suffix}", value)
        self._compute(module, name, dim, self._parts(module, name), fresh=True)

    def _parts(self, module: nn.Module, name: str) -> Parts:
        """Return the parameters and buffers of one weight, by suffix."""
        return {
            suffix: getattr(module, f"{name}_{suffix}")
            for suffix in self.suffixes
            if suffix != "g" or self.learn_scale
        }

    def _compute(
        self, module: nn.Module, name: str, dim: int, parts: Parts, fresh: bool = False
    ) -> None:
        """Set the attribute `name` of the module to the weight computed from its parts."""
        watched = tuple(s for s in (self.raw, "g") if s in parts)
        module.__dict__[name] = computed(partial(self.weight, dim=dim), parts, watched, fresh)


def _before_saving(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Copy what an initialiser wrote into the weights to the parameters, which are saved."""
    norm = _norm_of(module)
    for name, dim in norm.items():
        norm._absorb(module, name, dim, norm._parts(module, name))


def _before_loading(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Split the weights in a checkpoint of the layer without norm, so that it loads too."""
    norm = _norm_of(module)
    for name, dim in norm.items():
        if f"{prefix}{name}" in state and f"{prefix}{name}_{norm.raw}" not in state:
            parts = norm.split(state.pop(f"{prefix}{name}"), dim)
            state.update({f"{prefix}{name}_{suffix}": value for suffix, value in parts.items()})


def _after_loading(module: nn.Module, keys: Any) -> None:
    """Compute the weights from the loaded parameters.

    Not from shards: `reset_norm` in the forward pass computes the weights from whole parameters.
    """
    norm = _norm_of(module)
    for name, dim in norm.items():
        parts = norm._parts(module, name)
        if not any(hasattr(part, "to_local") for part in parts.values()):
            norm._compute(module, name, dim, parts)


def _norm_of(module: nn.Module) -> Norm:
    norm: Norm = module.__dict__["_deq_norm"]
    return norm
