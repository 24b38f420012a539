"""Fields: networks from coordinates to values, with a hidden state in equilibrium."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deq_zoo.checks import check_fields
from deq_zoo.inr.blocks import block_size
from deq_zoo.inr.layers import FILTERS, Filter, FilteredMap, Injection
from deq_zoo.inr.statistics import join, thin
from deq_zoo.model import Model
from deq_zoo.output import Output
from torchdeq import DEQConfig, apply_norm, get_deq, reset_norm
from torchdeq.registry import suggest

Kind = Literal["deq", "one_pass", "siren", "ffn", "relu_pe", "mfn"]
KINDS = ("deq", "one_pass", "siren", "ffn", "relu_pe", "mfn")


@dataclass(frozen=True, kw_only=True)
class FieldConfig:
    """The shape of a field.

    Args:
        kind: deq; one_pass, the map of a deq applied once to zero; or a baseline without
            equilibrium: siren, ffn (random Fourier features), relu_pe (positional encoding), mfn.
        filter: of deq, one_pass and mfn (fourier and gabor only).
        width: of the hidden state.
        layers: in the map of a deq or one_pass; hidden layers of a baseline.
        input_scale: spread of the frequencies; in ffn the standard deviation in cycles, in relu_pe
            the highest frequency in half cycles.
        alpha: shape of the Gamma distribution of gabor's envelopes.
    """

    kind: Kind = "deq"
    filter: Filter = "siren_like"
    width: int = 512
    layers: int = 1
    input_scale: float = 128.0
    alpha: float = 3.0

    def __post_init__(self) -> None:
        for name, allowed in (("kind", KINDS), ("filter", FILTERS)):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"unknown {name} {value!r}{suggest(value, allowed)}")
        check_fields(self, 1, "width", "layers")
        for name in ("input_scale", "alpha"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    @property
    def implicit(self) -> bool:
        """Return whether the field has an equilibrium to solve for."""
        return self.kind == "deq"


class Field(Model):
    """The base of fields, functions of points (..., d) with values (..., o).

    Args:
        d: coordinates of a point.
        o: numbers in a value.
        width: of the hidden state.
    """

    def __init__(self, d: int, o: int, width: int) -> None:
        super().__init__()
        if d < 1 or o < 1:
            raise ValueError(f"a field needs coordinates and values, got {d} and {o}")
        self.d, self.o, self.width = d, o, width

    def points(self, x: Tensor) -> Tensor:
        """Return coordinates (..., d) as rows (N, d)."""
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

    def forward(
        self, x: Tensor, z0: Tensor | None = None, **call: Any
    ) -> Output[Tensor, Tensor | None]:
        """Return the values at points; the state is (N, width), one for each point."""
        raise NotImplementedError

    def predict(
        self, x: Tensor, z0: Tensor | None = None, **call: Any
    ) -> Output[Tensor, Tensor | None]:
        """Return the values (..., o) at coordinates (..., d) of any floating point type.

        Points are computed in blocks. The statistics are those of a few points of each block.

        Args:
            x: coordinates, from -1 to 1 within the signal.
            z0: (N, width) states to start from.
            **call: options of this call of the DEQ.
        """
        return super().predict(x, z0, **call)

    def _predict(self, x: Tensor, z0: Tensor | None, **call: Any) -> Output[Tensor, Tensor | None]:
        like = next(self.parameters())
        points = self.points(x.to(like.device, like.dtype) if x.is_floating_point() else x)
        size = block_size(self.width)
        starts = [None] * -(-max(1, len(points)) // size) if z0 is None else z0.split(size)
        outputs = [self(p, z, **call) for p, z in zip(points.split(size), starts, strict=True)]
        values = torch.cat([out.prediction for out in outputs]).view(*x.shape[:-1], self.o)
        states = [out.state for out in outputs if out.state is not None]
        stats = join([thin(out.stats) for out in outputs if out.stats is not None])
        return Output([values], torch.cat(states) if states else None, stats)

    def refuse_solve(self, z0: Tensor | None, call: Mapping[str, object]) -> None:
        """Raise `TypeError` for a start or options of a solve: for fields without equilibrium."""
        given = [*(["z0"] if z0 is not None else []), *call]
        if given:
            raise TypeError(
                f"{type(self).__name__} has no equilibrium to solve for: drop {', '.join(given)}"
            )


class _Filtered(Field):
    """The common part of the equilibrium and its explicit twin: injection, f, decoder and norm."""

    def __init__(self, d: int, o: int, config: FieldConfig, deq: Any = None) -> None:
        super().__init__(d, o, config.width)
        self.config, self.options = config, DEQConfig(deq)
        self.injection = Injection(
            d, config.width, config.layers, config.filter, config.input_scale, config.alpha
        )
        self.f = FilteredMap(config.width, config.layers, config.filter)
        self.output_map = nn.Linear(config.width, o)
        # `apply_norm` leaves an option alone that was not given; the default norm is applied here.
        norm = self.options.with_options(norm_type=self.options.norm_type)
        apply_norm(self.f, args=norm)

    def decode(self, z: Tensor, shape: torch.Size) -> Tensor:
        """Return the values (..., o) of states (N, width), for points of a shape (..., d)."""
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

    def forward(
        self, x: Tensor, z0: Tensor | None = None, **call: Any
    ) -> Output[Tensor, Tensor | None]:
        """Return the values at points.

        Args:
            x: coordinates.
            z0: states to start from, e.g. those of the training step before; zeros by default.
            **call: options of this call of the DEQ; with `f_max_iter=0` there is no solve, only
                the steps of the gradient from `z0`, as in a warm start.
        """
        return self._solve(self.deq, x, z0, **call)

    def exact(self, x: Tensor, tol: float | None = None) -> Tensor:
        """Return values whose derivatives of every order are exact, e.g. along coordinates.

        Args:
            x: coordinates.
            tol: relative tolerance of all solves; by default near the precision of `x`.
        """
        tol = 16 * torch.finfo(x.dtype).eps if tol is None else tol
        options = self.options.with_options(
            backward="ift", higher_order=True, n_states=1, indexing=[], f_max_iter=400,
            eval_f_max_iter=400, f_tol=tol, f_stop_mode="rel", b_max_iter=400, b_tol=tol,
            on_failure="ignore", coupled=self.options.get("coupled", False),
        )  # fmt: skip
        return self._solve(get_deq(options).eval(), x, None).prediction

    def _solve(
        self, deq: nn.Module, x: Tensor, z0: Tensor | None, **call: Any
    ) -> Output[Tensor, Tensor | None]:
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
        if call.get("compact"):  # points leave with their injection
            call["args"] = f.rows
        states, stats = deq(f, z0, **call)
        values = [self.decode(z, x.shape) for z in states]
        return Output(values, states[-1].detach(), stats)


class OnePassField(_Filtered):
    r"""The explicit twin of a `DEQField`, with the same parameters.

    $$y = V f(0, u(x)) + \beta$$

    Args: see `DEQField`; of the options, only those of the norm have an effect.
    """

    def forward(
        self, x: Tensor, z0: Tensor | None = None, **call: Any
    ) -> Output[Tensor, Tensor | None]:
        self.refuse_solve(z0, call)
        reset_norm(self.f)
        u = self.injection(self.points(x))
        z = self.f(torch.zeros_like(u[0]), *u)
        return Output([self.decode(z, x.shape)], None)
