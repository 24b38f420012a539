"""jaxopt and optimistix as contestants, in an environment of their own: JSON lines in and out.

Started by `benchmarks.rivals` with the Python of that environment; needs neither torch nor this
package. Solvers are compiled as a whole; the first run is not timed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from time import process_time
from typing import Any

import jax
import jax.numpy as jnp
import jaxopt
import numpy as np
import optimistix

MAX = 400
CELLS: dict[tuple[str, str, float], Callable[[], Any]] = {}


def layer_norm(y: Any) -> Any:
    """Return rows with mean 0 and variance 1, as torch does."""
    y = y - y.mean(-1, keepdims=True)
    return y / jnp.sqrt((y * y).mean(-1, keepdims=True) + 1e-5)


def maps(arrays: dict[str, Any]) -> dict[str, Callable[[Any], Any]]:
    """Return the maps of `benchmarks.rivals`, with the same weights."""
    a = {name: jnp.asarray(value) for name, value in arrays.items()}

    def mlp(z: Any) -> Any:
        return jnp.tanh(a["mlp_x"] + z @ a["mlp_W"])

    def wide(z: Any) -> Any:
        return jnp.tanh(a["wide_x"] + z @ a["wide_W"])

    def cell(z: Any) -> Any:
        hidden = jax.nn.gelu(z @ a["cell_U"], approximate=False)
        return layer_norm(a["cell_x"] + hidden @ a["cell_D"])

    return {"mlp": mlp, "wide": wide, "cell": cell}


def solver(name: str, f: Callable[[Any], Any], z0: Any, tol: float) -> Callable[[], Any]:
    """Return a compiled solve to a tolerance in the solver's own terms."""
    size = float(np.sqrt(z0.size))  # jaxopt's tolerance is absolute, on the norm of all numbers
    if name == "jaxopt plain":
        rule = jaxopt.FixedPointIteration(lambda z, _: f(z), maxiter=MAX, tol=tol * size)
        run = jax.jit(lambda z: rule.run(z, None).params)
    elif name == "jaxopt anderson":
        rule = jaxopt.AndersonAcceleration(
            lambda z, _: f(z), history_size=6, maxiter=MAX, tol=tol * size
        )
        run = jax.jit(lambda z: rule.run(z, None).params)
    elif name == "jaxopt broyden":
        rule = jaxopt.Broyden(lambda z: f(z) - z, maxiter=MAX, tol=tol * size)
        run = jax.jit(lambda z: rule.run(z).params)
    else:
        method = optimistix.FixedPointIteration(rtol=tol, atol=tol)
        run = jax.jit(
            lambda z: (
                optimistix.fixed_point(
                    lambda y, _: f(y), method, z, max_steps=MAX, throw=False
                ).value
            )
        )
    return lambda: jax.block_until_ready(run(z0))


NAMES = ["jaxopt plain", "jaxopt anderson", "jaxopt broyden", "optimistix plain"]


def residual(f: Callable[[Any], Any], z: Any) -> float:
    """Return the worst relative residual of a batch."""
    fz = f(z)
    gap = jnp.linalg.norm(fz - z, axis=1) / jnp.linalg.norm(fz, axis=1)
    return float(gap.max())


def plain_count(f: Callable[[Any], Any], z0: Any, tol: float) -> int:
    """Return the evaluations of jaxopt's plain iteration."""
    size = float(np.sqrt(z0.size))
    rule = jaxopt.FixedPointIteration(lambda z, _: f(z), maxiter=MAX, tol=tol * size)
    return int(rule.run(z0, None).state.iter_num)


def main(weights: str) -> None:
    """Answer requests until the input ends; an error is an answer, too."""
    arrays = dict(np.load(weights))
    known = maps(arrays)
    for line in sys.stdin:
        ask = json.loads(line)
        try:
            reply = answer(ask, known, arrays)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {str(error).splitlines()[:1]}"}
        print(json.dumps(reply), flush=True)


def answer(
    ask: dict[str, Any], known: dict[str, Callable[[Any], Any]], arrays: dict[str, Any]
) -> dict[str, Any]:
    """Return names, or the residual, the evaluations or the seconds of one solve."""
    if ask["op"] == "hello":
        versions = {name: version(name) for name in ("jax", "jaxopt", "optimistix")}
        return {"solvers": NAMES, "versions": versions}
    key = (ask["case"], ask["solver"], ask["tol"])
    f = known[ask["case"]]
    if key not in CELLS:
        z0 = jnp.zeros_like(arrays[f"{ask['case']}_x"])
        CELLS[key] = solver(ask["solver"], f, z0, ask["tol"])
    run = CELLS[key]
    z = run()
    if ask["op"] == "residual":
        return {"residual": residual(f, z)}
    if ask["op"] == "count":
        return {"evaluations": plain_count(f, jnp.zeros_like(z), ask["tol"])}
    count, start = 0, process_time()
    while (elapsed := process_time() - start) < ask["least"] or not count:
        run()
        count += 1
    return {"seconds": elapsed / count}


if __name__ == "__main__":
    main(*sys.argv[1:])
