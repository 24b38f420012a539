"""Functions on whole models: apply norms, reset them once per forward pass, remove them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from torchdeq.callers import stack_level
from torchdeq.config import DEQConfig
from torchdeq.distributed.sharding import units_inside
from torchdeq.norm.base import NORMS, Norm
from torchdeq.norm.options import read_options
from torchdeq.norm.targets import as_tuple
from torchdeq.tracing import graph_solver, untraced

Filter = str | Sequence[str] | None


def apply_norm(
    model: nn.Module,
    norm_type: str = "weight_norm",
    prefix_filter_out: Filter = None,
    filter_out: Filter = None,
    args: Any = None,
    **norm_kwargs: Any,
) -> None:
    """Normalise the weights of every linear and convolutional layer of `model`, in place.

    A subclass of a registered layer is normalised like its nearest registered base class. A layer
    that already has this norm with the same options does not change. Torch's global random
    generator does not advance.

    Args:
        model: the model whose layers are changed.
        norm_type: `"weight_norm"`, `"spectral_norm"`, a registered name, or `"none"`.
        prefix_filter_out: skip modules whose name in `named_modules()` starts with one of these.
        filter_out: skip modules whose name contains one of these.
        args: options of the whole program: a `Namespace`, dict or `DEQConfig`. Its options for
            norms override the keywords, as command-line flags should, with a warning if they
            differ.
        norm_kwargs: options of the norm, e.g. `clip=True` (or `norm_clip=True`).

    Example:
        >>> apply_norm(model, "spectral_norm", filter_out=["embedding"], learn_scale=False)
    """
    config = DEQConfig(args)
    norm_type = _chosen_norm(norm_type, config)
    if norm_type == "none":
        return
    norm_class = NORMS[norm_type]
    modules = dict(model.named_modules())
    skipped = _matches(modules, "prefix_filter_out", prefix_filter_out, str.startswith)
    skipped |= _matches(modules, "filter_out", filter_out, str.__contains__)
    targets = [n for n, m in modules.items() if n not in skipped and _is_target(norm_class, m)]
    if not targets:
        _warn_no_target(model, norm_type)
    for name in targets:
        _apply_to(modules[name], name, norm_class, config, norm_kwargs)


@untraced
def reset_norm(model: nn.Module) -> None:
    """Compute the normalised weights of `model`; call it once at the start of a forward pass.

    Example:
        >>> def forward(self, x):
        ...     reset_norm(self)
        ...     return self.deq(lambda z: self.f(z, x), torch.zeros_like(x))
    """
    if graph_solver() is not None:
        return  # an export has computed the weights, which are constants of its graph
    _check_shards(model)
    for module in model.modules():
        norm = find_norm(module)
        if norm is not None:
            norm(module)


def _check_shards(model: nn.Module) -> None:
    """Raise if `fully_shard` owns normalised weights and may scatter them before they are used."""
    for unit in units_inside(model.modules()):
        if any(find_norm(module) is not None for module in unit.modules()):
            raise RuntimeError(
                f"the normalised weights in {type(unit).__name__} are sharded here, and a norm "
                "needs whole weights until the backward pass ends: call reset_norm inside the "
                "forward pass of the module on which fully_shard was called (or call fully_shard "
                "on the module whose forward calls reset_norm)"
            )


def remove_norm(model: nn.Module) -> None:
    """Turn the normalised weights of `model` into ordinary parameters with the same values."""
    for module in list(model.modules()):
        norm = find_norm(module)
        if norm is not None:
            norm.remove(module)
            del module._deq_norm


def register_norm(norm_type: str, norm_class: type[Any]) -> None:
    """Register a norm under a name, for `apply_norm`.

    Args:
        norm_type: the name.
        norm_class: a subclass of `torchdeq.norm.Norm`, or any class with a dict `_target_modules`
            (from module class to names and dims) and a class method
            `apply(module, deq_args=None, **norm_kwargs)`. The method returns an object that
            torchdeq stores on the module: its `__call__(module)` computes the weight, its
            `remove(module)` restores the plain parameter.

    Example:
        >>> register_norm("frobenius", FrobeniusNorm)
    """
    if norm_type == "none":
        raise ValueError("'none' means no normalisation; choose another name")
    missing = [name for name in ("_target_modules", "apply") if not hasattr(norm_class, name)]
    if missing:
        raise TypeError(f"a norm needs {' and '.join(missing)}, which {norm_class!r} does not have")
    NORMS.register(norm_type, norm_class)


def register_norm_module(
    module_class: type[nn.Module],
    norm_type: str,
    names: str | Sequence[str] = "weight",
    dims: int | Sequence[int] = 0,
) -> None:
    """Register a class of modules that a norm should normalise from now on.

    Args:
        module_class: the class; its subclasses are normalised too.
        norm_type: the name of the norm.
        names: the parameters to normalise.
        dims: for each of these parameters, the dimension of its rows.

    Example:
        >>> register_norm_module(nn.Bilinear, "weight_norm", "weight", 0)
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise TypeError(f"module_class must be a subclass of nn.Module, got {module_class!r}")
    if len(as_tuple(names)) != len(as_tuple(dims)):
        raise ValueError(f"each name needs its dimension: got names {names} and dims {dims}")
    NORMS[norm_type]._target_modules[module_class] = (names, dims)


def _chosen_norm(norm_type: str, config: DEQConfig) -> str:
    """Return the name of the norm: that in the options of the program, or else `norm_type`."""
    configured: str = config.get("norm_type", norm_type)
    if norm_type not in ("weight_norm", configured):  # the default is not a user's choice
        warnings.warn(
            f"norm_type {norm_type!r} is overridden by norm_type {configured!r} in args: "
            "leave one of them out",
            stacklevel=stack_level(),
        )
    return configured


def _warn_no_target(model: nn.Module, norm_type: str) -> None:
    """Warn that a norm has nothing to normalise in a model."""
    kinds = ", ".join(kind.__name__ for kind in NORMS[norm_type]._target_modules)
    warnings.warn(
        f"{type(model).__name__} has nothing that {norm_type!r} could normalise: it normalises "
        f"{kinds}; call register_norm_module for other layers",
        stacklevel=stack_level(),
    )


def find_norm(module: nn.Module) -> Any:
    """Return the norm of a module or None; the norm of a program may be a submodule.

    `getattr` with a default is slow: a missing attribute costs an exception.
    """
    return module.__dict__.get("_deq_norm") or module._modules.get("_deq_norm")


def _is_target(norm_class: type[Any], module: nn.Module) -> bool:
    """Return whether a norm normalises a module; norms written for 0.1.0 take exact types only."""
    if issubclass(norm_class, Norm):
        return norm_class.target(module) is not None
    return type(module) in norm_class._target_modules


def _apply_to(
    module: nn.Module,
    name: str,
    norm_class: type[Any],
    config: DEQConfig,
    norm_kwargs: dict[str, Any],
) -> None:
    """Normalise one module, or raise if it has another norm or other options already."""
    norm = find_norm(module)
    if norm is None:
        module._deq_norm = norm_class.apply(module, deq_args=config, **norm_kwargs)
        return
    same = type(norm) is norm_class
    if same and isinstance(norm, Norm):
        options = read_options(norm_class, config, norm_kwargs)
        same = norm == type(norm)(norm.names, norm.dims, **options)
    if not same:
        raise ValueError(
            f"{name or 'the module'} is normalised already, with {norm}: filter it out, or call "
            "remove_norm first"
        )


def _matches(
    modules: dict[str, nn.Module], option: str, patterns: Filter, test: Callable[[str, str], bool]
) -> set[str]:
    """Return the names of the modules that match a filter; warn if a pattern matches none.

    Args:
        modules: the modules by name.
        option: the name of the filter, for messages.
        patterns: one or several strings.
        test: whether a name matches a pattern.
    """
    if patterns is None:
        return set()
    if not isinstance(patterns, str) and not all(isinstance(p, str) for p in patterns):
        raise TypeError(f"{option} must be a string or a list of strings, got {patterns!r}")
    matches = set()
    for pattern in as_tuple(patterns):
        names = {name for name in modules if test(name, pattern)}
        if not names:
            warnings.warn(
                f"{option} {pattern!r} matches no module of the model", stacklevel=stack_level()
            )
        matches |= names
    return matches
