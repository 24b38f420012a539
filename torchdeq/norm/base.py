"""What every weight normalisation shares: W * min(t, g / N(W)), computed once per forward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized

from torchdeq.norm.computed import Parts, computed, was_overwritten
from torchdeq.norm.options import read_options
from torchdeq.registry import Registry

NORMS: Registry[type[Any]] = Registry("norm")

Targets = dict[type[nn.Module], tuple[str | Sequence[str], int | Sequence[int]]]


def common_targets() -> Targets:
    """The layers with a weight, and the dimension of its rows (the outputs)."""
    first = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    second = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    targets: Targets = dict.fromkeys(first, ("weight", 0))
    return targets | dict.fromkeys(second, ("weight", 1))


@dataclass(frozen=True)
class Norm(ABC):
    r"""One normalisation on one module.

    .. math:: W = V \min(t, g / N(V))

    ``V`` and ``g`` are parameters; ``V`` is the one that was there, so ties to it hold.
    ``module.weight`` is a plain attribute, not a ``Parameter``: a tensor with a graph, computed by
    calling the norm, so that every evaluation of f until the next call uses the same one.
    ``load_state_dict``, ``deepcopy`` and unpickling compute it anew by themselves; after an
    optimizer's step or a move :func:`torchdeq.reset_norm` does.

    An initialiser may write into it: what ``nn.init``, ``reset_parameters()`` or a ``copy_`` under
    ``no_grad`` left there becomes the new ``V`` at the next call, as if the norm had been applied
    to a layer with that weight. Assigning a ``Parameter`` does the same. Writes through ``.data``
    leave no trace: they are found, by value, until the first call, and later last only until the
    next, like writes that autograd records and tensors that are assigned. Call ``reset_norm``
    between initialising a model and handing it to DDP, which shares parameters at once.

    A row (or matrix) of norm zero is left alone: its factor is 1, and gradients reach it.

    Args:
        names: names of the parameters to normalise.
        dims: for each of them, the dimension of its rows.
        learn_scale: whether ``g`` is a parameter; otherwise it is ``target_norm``.
        target_norm: the norm without a learnable scale.
        clip: whether the factor is bounded by ``clip_value``.
        clip_value: ``t``.
    """

    names: Sequence[str]
    dims: Sequence[int]
    learn_scale: bool = True
    target_norm: float = 1.0
    clip: bool = False
    clip_value: float = 1.0

    _target_modules: ClassVar[Targets]
    suffixes: ClassVar[tuple[str, ...]]  # of the parts, in the order of their registration
    raw: ClassVar[str]  # the suffix of V

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
        """The parts of which :meth:`weight` makes ``weight`` again, by suffix."""

    @abstractmethod
    def weight(self, parts: Parts, dim: int) -> Tensor:
        """The normalised weight."""

    def start(self, parts: Parts) -> Parts:
        """What to start from where :meth:`split` gave ``parts``."""
        return parts

    def advance(self, parts: Parts, dim: int) -> None:
        """Update the buffers for a forward pass in training."""
        return

    @classmethod
    def target(cls, module: nn.Module) -> type[nn.Module] | None:
        """The registered class a module is normalised as: the nearest one it inherits from.

        ``nn.MultiheadAttention`` keeps its projections together, so its output projection is not
        normalised alone; a module that torch parametrises has a computed weight already.
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
        """Normalise the named parameters of ``module``, by default those registered for its class.

        ``options`` are the fields of the norm or the flags of the same meaning. A flag in
        ``deq_args`` wins over them, with a warning if they differ.
        """
        if names is None or dims is None:
            kind = cls.target(module)
            if kind is None:
                raise TypeError(
                    f"{cls.__name__} does not know which parameter of {type(module).__name__} to "
                    "normalise: pass names and dims, or call register_norm_module"
                )
            names, dims = cls._target_modules[kind]
        given = cls(as_tuple(names), as_tuple(dims), **read_options(cls, deq_args, options))
        absent = {name for name, p in module._parameters.items() if p is None}
        kept = [(name, dim) for name, dim in given.items() if name not in absent]
        norm = replace(given, names=[name for name, _ in kept], dims=[dim for _, dim in kept])
        for name, dim in kept:
            _check_parameter(module, name, dim)
        for name, dim in kept:
            norm._install(module, name, dim)
        hooks = [
            module.register_state_dict_pre_hook(_before_saving),
            module.register_load_state_dict_pre_hook(_before_loading),
            module.register_load_state_dict_post_hook(_after_loading),
        ]
        vars(module).update(_deq_norm=norm, _deq_hooks=hooks)
        return norm

    def __call__(self, module: nn.Module) -> None:
        """Compute the weights of ``module`` for this forward pass.

        In evaluation too: a write through ``.data`` (an average of weights that is swapped in)
        leaves no trace by which an unchanged parameter could be told from a changed one.
        """
        for name, dim in self.items():
            parts = self._parts(module, name)
            self._absorb(module, name, dim, parts)
            if module.training:
                self.advance(parts, dim)
            self._compute(module, name, dim, parts)

    def remove(self, module: nn.Module) -> None:
        """Turn the weights of ``module`` into ordinary parameters, as they are now."""
        for name, dim in self.items():
            parts = self._parts(module, name)
            self._absorb(module, name, dim, parts)
            with torch.no_grad():
                weight = self.weight(parts, dim)
            module.__dict__.pop(name, None)
            for suffix in parts:
                delattr(module, f"{name}_{suffix}")
            trains = parts[self.raw].requires_grad
            module.register_parameter(name, nn.Parameter(weight, requires_grad=trains))
        for handle in module.__dict__.pop("_deq_hooks", ()):
            handle.remove()

    def items(self) -> list[tuple[str, int]]:
        """The names with their dimensions."""
        return list(zip(self.names, self.dims, strict=True))

    def _absorb(self, module: nn.Module, name: str, dim: int, parts: Parts) -> None:
        """Let what an initialiser wrote into the weight reach the parameters."""
        written = self._written(module, name, parts)
        if written is None:
            return
        if written.shape != parts[self.raw].shape:
            raise ValueError(
                f"{name} was given the shape {tuple(written.shape)}, but is normalised with "
                f"{tuple(parts[self.raw].shape)}: call remove_norm before changing it"
            )
        with torch.no_grad():
            for suffix, value in self.start(self.split(written.to(parts[self.raw]), dim)).items():
                parts[suffix].copy_(value)
        self._compute(module, name, dim, parts)

    def _written(self, module: nn.Module, name: str, parts: Parts) -> Tensor | None:
        """The weight, if it is an initialiser's."""
        assigned = module._parameters.pop(name, None)
        if assigned is not None:
            return assigned.detach()
        weight: Tensor | None = module.__dict__.get(name)
        if weight is None or not was_overwritten(weight, parts):
            return None
        return weight.detach()

    def _scale(self, weight: Tensor, norm: Tensor, g: Tensor | None) -> Tensor:
        """``weight * min(t, g / norm)``."""
        zero = norm == 0
        divisor = norm.masked_fill(zero, 1.0)
        factor = torch.where(zero, divisor, (self.target_norm if g is None else g) / divisor)
        if self.clip:
            # Not clamp: its gradient at the bound, where training starts, depends on the release.
            factor = torch.where(factor > self.clip_value, self.clip_value, factor)
        return weight * factor

    def _install(self, module: nn.Module, name: str, dim: int) -> None:
        weight = module._parameters[name]
        assert weight is not None  # checked
        with torch.no_grad():
            parts = self.start(self.split(weight, dim))
        del module._parameters[name]
        for suffix, value in parts.items():
            if suffix == self.raw:  # the same object, so ties and optimizers stay as they are
                module.register_parameter(f"{name}_{suffix}", weight)
            elif suffix == "g":
                scale = nn.Parameter(value, requires_grad=weight.requires_grad)
                module.register_parameter(f"{name}_{suffix}", scale)
            else:
                module.register_buffer(f"{name}_{suffix}", value)
        self._compute(module, name, dim, self._parts(module, name), fresh=True)

    def _parts(self, module: nn.Module, name: str) -> Parts:
        return {
            suffix: getattr(module, f"{name}_{suffix}")
            for suffix in self.suffixes
            if suffix != "g" or self.learn_scale
        }

    def _compute(
        self, module: nn.Module, name: str, dim: int, parts: Parts, fresh: bool = False
    ) -> None:
        watched = tuple(s for s in (self.raw, "g") if s in parts)
        module.__dict__[name] = computed(partial(self.weight, dim=dim), parts, watched, fresh)


def _check_parameter(module: nn.Module, name: str, dim: int) -> None:
    weight = module._parameters.get(name)
    if weight is None or isinstance(weight, UninitializedParameter):
        lack = "it has none" if weight is None else "it has no shape yet"
        raise ValueError(
            f"cannot normalise the parameter {name!r} of {type(module).__name__}: {lack}; "
            "initialise the layer first, or filter it out"
        )
    if not -weight.dim() <= dim < weight.dim():
        raise ValueError(f"{name} of the shape {tuple(weight.shape)} has no dimension {dim}")


def _before_saving(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    norm = _norm_of(module)
    for name, dim in norm.items():
        norm._absorb(module, name, dim, norm._parts(module, name))


def _before_loading(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A checkpoint of the plain layer loads too."""
    norm = _norm_of(module)
    for name, dim in norm.items():
        if f"{prefix}{name}" in state and f"{prefix}{name}_{norm.raw}" not in state:
            parts = norm.split(state.pop(f"{prefix}{name}"), dim)
            state.update({f"{prefix}{name}_{suffix}": value for suffix, value in parts.items()})


def _after_loading(module: nn.Module, keys: Any) -> None:
    norm = _norm_of(module)
    for name, dim in norm.items():
        norm._compute(module, name, dim, norm._parts(module, name))


def _norm_of(module: nn.Module) -> Norm:
    norm: Norm = module.__dict__["_deq_norm"]
    return norm


def as_tuple(value: Any) -> tuple[Any, ...]:
    """One name or dimension, or several, as a tuple."""
    return (value,) if isinstance(value, (str, int)) else tuple(value)
