"""Normalise the weights of a model: apply, reset once per forward pass, remove."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from torchdeq.callers import stack_level
from torchdeq.config import DEQConfig
from torchdeq.norm.base import NORMS, Norm, as_tuple
from torchdeq.norm.options import read_options
from torchdeq.tracing import untraced

Filter = str | Sequence[str] | None


def apply_norm(
    model: nn.Module,
    norm_type: str = "weight_norm",
    prefix_filter_out: Filter = None,
    filter_out: Filter = None,
    args: Any = None,
    **norm_kwargs: Any,
) -> None:
    """Normalise the weights of every linear and convolutional layer of ``model``.

    Subclasses of these layers are normalised as their nearest registered class; a layer that has
    this norm with these options already is left as it is.

    Args:
        model: changed in place; its random state is not.
        norm_type: ``'weight_norm'``, ``'spectral_norm'``, a registered name, or ``'none'``.
        prefix_filter_out: skip modules whose name (of ``named_modules()``) starts with one of
            these.
        filter_out: skip modules whose name contains one of these.
        args: options of the whole program: a ``Namespace``, dict or ``DEQConfig``. What it says
            about norms wins over the keywords, as the flags of a command line should; a difference
            warns.
        norm_kwargs: options of the norm, e.g. ``clip=True`` (or ``norm_clip=True``).

    Example:
        >>> apply_norm(model, "spectral_norm", filter_out=["embedding"], target_norm=0.9)
    """
    config = DEQConfig(args)
    given = config.get("norm_type", norm_type)
    if norm_type not in ("weight_norm", given):  # the default: nobody asked for it
        warnings.warn(
            f"norm_type {norm_type!r} is overruled by norm_type {given!r} in args: "
            "leave one of them out",
            stacklevel=stack_level(),
        )
    if given == "none":
        return
    norm_class = NORMS[given]
    modules = dict(model.named_modules())
    skipped = _matches(modules, "prefix_filter_out", prefix_filter_out, str.startswith)
    skipped |= _matches(modules, "filter_out", filter_out, str.__contains__)
    found = False
    for name, module in modules.items():
        if name in skipped or not _is_target(norm_class, module):
            continue
        _apply_to(module, name, norm_class, config, norm_kwargs)
        found = True
    if not found:
        kinds = ", ".join(kind.__name__ for kind in norm_class._target_modules)
        warnings.warn(
            f"{given!r} found nothing to normalise in {type(model).__name__}: it looks for {kinds}",
            stacklevel=stack_level(),
        )


@untraced
def reset_norm(model: nn.Module) -> None:
    """Compute the normalised weights of ``model``: call it once at the start of a forward pass.

    Example:
        >>> def forward(self, x):
        ...     reset_norm(self)
        ...     return self.deq(lambda z: self.f(z, x), torch.zeros_like(x))
    """
    for module in model.modules():
        norm = _norm_of(module)
        if norm is not None:
            norm(module)


def remove_norm(model: nn.Module) -> None:
    """Turn the normalised weights of ``model`` into ordinary parameters of the same values."""
    for module in list(model.modules()):
        norm = _norm_of(module)
        if norm is not None:
            norm.remove(module)
            del module._deq_norm


def register_norm(norm_type: str, norm_class: type[Any]) -> None:
    """Make a normalisation of your own known to :func:`apply_norm`.

    Args:
        norm_type: its name.
        norm_class: a subclass of ``torchdeq.norm.Norm``, or any class with a dict
            ``_target_modules`` (module class to names and dims), a class method
            ``apply(module, deq_args=None, **norm_kwargs)`` returning an object to be kept with the
            module, whose ``__call__(module)`` computes the weight and ``remove(module)`` undoes it.

    Example:
        >>> register_norm("frobenius", FrobeniusNorm)
    """
    if norm_type == "none":
        raise ValueError("'none' means no normalisation; choose another name")
    lacking = [name for name in ("_target_modules", "apply") if not hasattr(norm_class, name)]
    if lacking:
        raise TypeError(f"a norm needs {' and '.join(lacking)}: {norm_class!r} has not")
    NORMS.register(norm_type, norm_class)


def register_norm_module(
    module_class: type[nn.Module],
    norm_type: str,
    names: str | Sequence[str] = "weight",
    dims: int | Sequence[int] = 0,
) -> None:
    """Let a norm know one more class of modules.

    Args:
        module_class: exactly these and their subclasses are normalised from now on.
        norm_type: the name of the norm.
        names: the parameters to normalise.
        dims: for each of them, the dimension of its rows.

    Example:
        >>> register_norm_module(nn.Bilinear, "weight_norm", "weight", 0)
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise TypeError(f"module_class must be a subclass of nn.Module, got {module_class!r}")
    if len(as_tuple(names)) != len(as_tuple(dims)):
        raise ValueError(f"each name needs its dimension: got names {names} and dims {dims}")
    NORMS[norm_type]._target_modules[module_class] = (names, dims)


def _norm_of(module: nn.Module) -> Any:
    """The norm of a module, which may be a module itself; ``getattr`` is slow to find nothing."""
    return module.__dict__.get("_deq_norm") or module._modules.get("_deq_norm")


def _is_target(norm_class: type[Any], module: nn.Module) -> bool:
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
    before = _norm_of(module)
    if before is None:
        module._deq_norm = norm_class.apply(module, deq_args=config, **norm_kwargs)
        return
    same = type(before) is norm_class
    if same and isinstance(before, Norm):
        options = read_options(norm_class, config, norm_kwargs)
        same = before == type(before)(before.names, before.dims, **options)
    if not same:
        raise ValueError(
            f"{name or 'the module'} is normalised already, with {before}: filter it out, or call "
            "remove_norm first"
        )


def _matches(
    modules: dict[str, nn.Module], kind: str, wanted: Filter, test: Callable[[str, str], bool]
) -> set[str]:
    """The names of modules a filter leaves out; one that leaves out nothing is a slip."""
    if wanted is None:
        return set()
    if not isinstance(wanted, str) and not all(isinstance(w, str) for w in wanted):
        raise TypeError(f"{kind} must be a string or a list of strings, got {wanted!r}")
    left_out = set()
    for part in as_tuple(wanted):
        names = {name for name in modules if test(name, part)}
        if not names:
            warnings.warn(
                f"{kind} {part!r} matches no module of the model", stacklevel=stack_level()
            )
        left_out |= names
    return left_out
