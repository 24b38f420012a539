"""Fields: networks from coordinates to values, with a hidden state in equilibrium."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from deq_zoo.checks import check_fields
from deq_zoo.inr.layers import FILTERS, Filter, FilteredMap, Injection
from torchdeq import DEQConfig, SolverStat, apply_norm, get_deq, reset_norm
from torchdeq.registry import suggest

Kind = Literal["deq", "one_pass", "siren", "ffn", "relu_pe", "mfn"]
KINDS = ("deq", "one_pass", "siren", "ffn", "relu_pe", "mfn")


@dataclass(frozen=True, kw_only=True)
class FieldConfig:
    """The shape of a field.

    Args:
        kind: deq; one_pass, its map applied once to zero; or a baseline without equilibrium:
            siren, ffn (random Fourier features), relu_pe (positional encoding), mfn.
        filter: of deq, one_pass and mfn (which knows fourier and gabor).
        width: of the hidden state.
        layers: in the map of a deq or one_pass; hidden layers of a baseline.
        input_scale: spread of the frequencies; of ffn the standard deviation in cycles, of relu_pe
            the highest one, in half cycles.
        alpha: of gabor's envelopes.
    """

    kind: Kind = "deq"
    filter: Filter = "siren_like"
    width: int = 512
    layers: int = 1
    input_scale: float = 128.0
    alpha: float = 3.0

    def __post_init__(self) -> None:
        for name, known in (("kind", KINDS), ("filter", FILTERS)):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"unknown {name} {value!r}{suggest(value, known)}")
        check_fields(self, 1, "width", "layers")
        for name in ("input_scale", "alpha"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    @property
    def implicit(self) -> bool:
        """Whether there is a fixed point to find."""
        return self.kind == "deq"


class Output(NamedTuple):
    """What a field says of some points.

    Args:
        values: (..., o) of every state that training samples, the last one the best; else one.
        state: (N, width) the last state, to start the next solve from; None without equilibrium.
        stats: of the solve; one sample per point.
    """

    values: list[Tensor]
    state: Tensor | None = None
    stats: SolverStat | None = None


class Field(nn.Module):
    """What every field does: take points of any leading shape, give values of the same."""

    def __init__(self, d: int, o: int) -> None:
        super().__init__()
        if d < 1 or o < 1:
            raise ValueError(f"a field needs coordinates and values, got {d} and {o}")
        self.d, self.o = d, o

    def points(self, x: Tensor) -> Tensor:
        """Points as rows, (N, d)."""
        if not x.is_floating_point():
            raise TypeError(f"coordinates must be floating point, got {x.dtype}")
        if not x.dim() or x.shape[-1] != self.d:
            raise ValueError(f"coordinates must be (..., {self.d}), got {tuple(x.shape)}")
        dtype = next(self.parameters()).dtype
        if x.dtype != dtype:
            raise TypeError(
                f"coordinates are {x.dtype}, the field is {dtype}: convert one, e.g. x.to({dtype})"
            )
        return x.reshape(-1, self.d)

    def forward(self, x: Tensor, z0: Tensor | None = None, **call: Any) -> Output:
        raise NotImplementedError

    def refuse(self, z0: Tensor | None, call: Mapping[str, object]) -> None:
        """Of a field without equilibrium: nothing to start from, and no options of a solve."""
        given = [*(["z0"] if z0 is not None else []), *call]
        if given:
            raise TypeError(
                f"{type(self).__name__} has no equilibrium to solve for: drop {', '.join(given)}"
            )


class _Filtered(Field):
    """What the equilibrium and its explicit twin share: injection, map, decoder and norm."""

    def __init__(self, d: int, o: int, config: FieldConfig, deq: Any = None) -> None:
        super().__init__(d, o)
        self.config, self.options = config, DEQConfig(deq)
        self.injection = Injection(
            d, config.width, config.layers, config.filter, config.input_scale, config.alpha
        )
        self.f = FilteredMap(config.width, config.layers, config.filter)
        self.output_map = nn.Linear(config.width, o)
        # A config from a file gives every option: its default norm must count as if it were given.
        norm = self.options.with_options(norm_type=self.options.norm_type)
        apply_norm(self.f, args=norm)

    def decode(self, z: Tensor, shape: torch.Size) -> Tensor:
        """Values (..., o) of states (N, width), for points of a shape (..., d)."""
        values: Tensor = self.output_map(z)
        return values.view(*shape[:-1], self.o)


class DEQField(_Filtered):
    r"""A field whose hidden state is an equilibrium: DEQ-SIREN and DEQ-MFN.

    $$z^\star = f(z^\star, u(x)), \qquad y = V z^\star + \beta$$

    Shapes: `x` is `(..., d)`, values are `(..., o)`, a state is `(N, width)`. A point is a
    sample of the solver.

    Args:
        d: coordinates of a point.
        o: numbers in a value.
        config: the shape of the network.
        deq: options of the DEQ and of the norm in f: a `DEQConfig`, dict or Namespace.
    """

    def __init__(self, d: int, o: int, config: FieldConfig, deq: Any = None) -> None:
        super().__init__(d, o, config, deq)
        self.deq = get_deq(self.options, coupled=self.options.get("coupled", False))

    def forward(self, x: Tensor, z0: Tensor | None = None, **call: Any) -> Output:
        """Values at points.

        Args:
            x: coordinates.
            z0: where to start, e.g. the states of the training step before; zeros by default.
            **call: options of this call of the DEQ; `f_max_iter=0` with a `z0` takes only the
                steps of the gradient, as a warm start does.
        """
        return self._solved(self.deq, x, z0, **call)

    def exact(self, x: Tensor, tol: float | None = None) -> Tensor:
        """Values with a graph that is exact at every order, for derivatives along coordinates.

        Args:
            x: coordinates.
            tol: of all solves, relative; by default near the precision of `x`.
        """
        tol = 16 * torch.finfo(x.dtype).eps if tol is None else tol
        options = self.options.with_options(
            backward="ift", higher_order=True, n_states=1, indexing=[], f_max_iter=400,
            eval_f_max_iter=400, f_tol=tol, f_stop_mode="rel", b_max_iter=400, b_tol=tol,
            on_failure="ignore", coupled=self.options.get("coupled", False),
        )  # fmt: skip
        return self._solved(get_deq(options).eval(), x, None).values[-1]

    def _solved(self, deq: nn.Module, x: Tensor, z0: Tensor | None, **call: Any) -> Output:
        reset_norm(self.f)  # once per forward pass, not once per evaluation of f
        u = self.injection(self.points(x))
        if z0 is None:
            z0 = torch.zeros_like(u[0])
        elif z0.shape != u[0].shape or z0.dtype != u[0].dtype:
            raise ValueError(
                f"z0 must hold a state of each point, {tuple(u[0].shape)} of {u[0].dtype}: got "
                f"{tuple(z0.shape)} of {z0.dtype}"
            )
        f = self.f.at(u, solving=call.get("f_max_iter") != 0)
        states, stats = deq(f, z0, **call)
        return Output([self.decode(z, x.shape) for z in states], states[-1], stats)


class OnePassField(_Filtered):
    r"""The explicit twin of a `DEQField`, of as many parameters.

    $$y = V f(0, u(x)) + \beta$$

    Args: see `DEQField`; of its options only those of the norm count.
    """

    def forward(self, x: Tensor, z0: Tensor | None = None, **call: Any) -> Output:
        self.refuse(z0, call)
        reset_norm(self.f)
        u = self.injection(self.points(x))
        z = self.f(torch.zeros_like(u[0]), *u)
        return Output([self.decode(z, x.shape)])
