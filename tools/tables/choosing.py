"""Decision tables: a situation, a choice, and the numbers of ours behind it."""

from __future__ import annotations

from typing import Any

from tools.tables.frame import markdown, power, read, table
from tools.tables.gradients import cosine, products
from tools.tables.library import MAPS, SOLVERS, milliseconds, solved

HEADER = ["Situation", "Choice", "Measured", "How"]
SOLVES, COSTS = "[benchmarks](benchmarks.md)", "[gradients](gradients.md#what-it-costs)"
GRAPH, RIVALS = (
    "[one graph](benchmarks.md#one-graph)",
    "[rivals](benchmarks.md#beside-other-libraries)",
)
STREAMS, SCALE = "[streams](benchmarks.md#streams)", "[simulated ranks](simulated_scale.md)"
NOTHING = "no measurement of ours"


def _family(name: str, section: str = "measured") -> str:
    """Return a link to the README of a family."""
    return f"[{name}](../deq_zoo/{name}/README.md#{section})"


def _solve(case: str, solver: str, tol: float = 1e-5) -> str:
    run = solved(case, solver, tol)
    time = milliseconds(run["seconds"]["median"])
    return f"{SOLVERS[solver]} {run['calls']} ({time} ms)"


def _launches(solver: str) -> str:
    counts = read("cost")["counts"]["ours"]
    return f"{counts[f'{solver}, tensor, small, tolerance, cpu']['launches']:.0f}"


def _auto() -> str:
    """Return the time of `auto` relative to the fastest of each map, smallest and largest."""
    ratios = []
    for case in MAPS:
        best = min(solved(case, name, 1e-5)["seconds"]["median"] for name in SOLVERS)
        ratios.append(solved(case, "auto", 1e-5)["seconds"]["median"] / best)
    return f"{min(ratios):.1f} to {max(ratios):.1f}"


def _bare(solver: str) -> str:
    """Return the time of 30 evaluations relative to bare calls, smallest and largest."""
    costs = [
        r["cost"]["ours"] for r in read("solvers")["overhead"]["rows"] if r["solver"] == solver
    ]
    ratios = [cost["total"]["median"] / cost["bare"]["median"] for cost in costs]
    return f"{min(ratios):.1f} to {max(ratios):.1f}"


def _states(solver: str) -> str:
    found = read("solvers")["memory"]
    (row,) = (row for row in found["rows"] if row["solver"] == solver)
    return f"{row['peak']['ours'] / found['state']:.0f}"


@table("solvers", "cost", "lm/compare", "lm/nfe")
def choose_solver() -> str:
    """Return which solver to take."""
    original = [read("lm/compare")["rows"][f"original {seed}"] for seed in (0, 1)]
    curves = [read("lm/nfe")["rows"][f"original {seed}"] for seed in (0, 1)]
    radii = " and ".join(f"{run['spectral_radius']:.0f}" for run in original)
    ends = " and ".join(power(curve["residual"][-1]) for curve in curves)
    evaluations = curves[0]["steps"][-1]
    launches = ", ".join(f"{name} {_launches(key)}" for key, name in SOLVERS.items())
    rows = [
        ["`f` is cheap, or contracts well", "`fixed_point_iter`",
         f"launches for an evaluation beside `f`: {launches}; chain of 1000: "
         f"{_solve('chain', 'fixed_point_iter')}, {_solve('chain', 'anderson')}", SOLVES],
        ["`f` is expensive and contracts slowly", "`anderson`",
         f"32 x 4096: {_solve('mlp-wide', 'fixed_point_iter')}, {_solve('mlp-wide', 'anderson')}, "
         f"{_solve('mlp-wide', 'broyden')}; attention: {_solve('attention', 'fixed_point_iter')}, "
         f"{_solve('attention', 'anderson')}, {_solve('attention', 'broyden')}", SOLVES],
        ["`f` does not contract", "`broyden`, as published for transformers",
         f"a transformer with spectral radii of {radii}: residuals of {ends} after {evaluations} "
         "evaluations; no comparison: other solvers were not measured there",
         _family("lm", "designs-of-the-deq-transformer-an-earlier-comparison")],
        ["tight tolerances", "`anderson` or `broyden`; `newton_krylov` where both fail",
         f"to 1e-6, attention: {_solve('attention', 'anderson', 1e-6)}, "
         f"{_solve('attention', 'broyden', 1e-6)}, {_solve('attention', 'newton_krylov', 1e-6)}; "
         "a map on which Newton-Krylov wins is not among ours", SOLVES],
        ["you do not know how `f` behaves", "`auto`",
         f"{_auto()} times as long as the fastest of the four, by map", SOLVES],
        ["a fixed budget, no residual wanted", "`simple_fixed_point_iter`",
         f"{_bare('simple_fixed_point_iter')} times as long as bare calls of `f`, by map; "
         f"`fixed_point_iter` {_bare('fixed_point_iter')}", SOLVES],
        ["memory is short", "`fixed_point_iter`, or `anderson` with a small `m`",
         f"states at the peak: plain {_states('fixed_point_iter')}, Anderson "
         f"{_states('anderson')}, Broyden {_states('broyden')}", "[memory](memory.md)"],
    ]  # fmt: skip
    return markdown(HEADER, rows)


def _pass(method: str, case: str = "cell") -> dict[str, Any]:
    rows = read("gradients")["passes"]["rows"]
    (row,) = (r for r in rows if (r["case"], r["method"]) == (case, method))
    found: dict[str, Any] = row
    return found


def _cost(method: str) -> str:
    row = _pass(method)
    return f"{row['held'] / 1e6:.0f} MB, {row['ratio']['median']:.2f} of the time"


@table("gradients")
def choose_gradient() -> str:
    """Return which gradient to take, by its cost and its quality on known spectra."""
    whole = f"{_pass('unrolled 20')['held'] / 1e6:.0f} MB"
    rows = [
        ["an exact gradient, and the solve is long", "`ift=True`, `b_solver=\"gmres\"`",
         f"20 calls: {_cost('implicit, 20 calls')} of unrolling them, which keeps {whole}", COSTS],
        ["a cheap direction, spectral radius up to 0.9", "`grad=1` to `5`, `tau` 0.5 to 1",
         f"cosine with the exact one, 1 and 5 steps: {cosine(1, 0.5):.2f} and {cosine(5, 0.5):.2f} "
         f"at radius 0.5, {cosine(1, 0.9):.2f} and {cosine(5, 0.9):.2f} at 0.9; 5 steps: "
         f"{_cost('phantom 5, 20 calls')}", COSTS],
        ["a spectral radius near 1", "`ift=True`, `b_solver=\"gmres\"`",
         f"at 0.99 the cosine of 5 steps is {cosine(5, 0.99):.2f}; products: GMRES "
         f"{products('gmres', 0.99)}, Anderson {products('anderson', 0.99)}", COSTS],
        ["an exact gradient, and the solve is short", "unrolled: `f_max_iter=0`, `grad=n`",
         f"12 steps: {_cost('unrolled 12')} of 20 steps", COSTS],
        ["unrolled steps do not fit into memory", "`mem_gc`",
         f"20 steps: {_cost('unrolled 20, mem_gc')} of plain unrolling", COSTS],
        ["the exact gradient of a fixed number of steps, constant memory",
         "`experimental.Reversible`, tens of steps at most",
         f"20 steps: {_cost('reversible 20')} of unrolling", COSTS],
        ["second derivatives, `torch.func`", "`Implicit(higher_order=True)`", NOTHING,
         "[gradients](gradients.md)"],
    ]  # fmt: skip
    return markdown(HEADER, rows)


@table("flow/budgets", "lm_designs/quality", "lm_designs/ablate", "diffusion/inversion", "ignn/ppi")
def choose_trained_gradient() -> str:
    """Return which gradient to take, by what training with it gave."""
    errors = {(r["way"], r["nfe"]): r["warps"] for r in read("flow/budgets")["rows"]}
    cheap = read("lm_designs/quality")["rows"]
    two, exact = cheap["2 steps, none before"], cheap["implicit, GMRES to 1e-2"]
    names = {"no residual loss": "two steps", "one step": "one", "implicit gradient": "implicit"}
    trained = read("lm_designs/ablate")["rows"]
    losses = ", ".join(f"{name} {trained[key]['held_out_loss']:.3f}" for key, name in names.items())
    inverted = {r["scheme"]: r["seconds_to_release"] for r in read("diffusion/inversion")["rows"]}
    tissues = {r["model"]: r for r in read("ignn/ppi")["rows"]}
    scores = ", ".join(
        f"{name} {row['median']:.1f} ({row['worst']:.1f} to {row['best']:.1f})"
        for name in ("phantom gradient", "implicit")
        for row in (tissues[f"IGNN, {name}"],)
    )
    rows = [
        ["a map that contracts (attractor)",
         "`f_max_iter=0`, `grad=2`; `ift=True`, `b_solver=\"gmres\"` if it must be exact",
         f"after training, relative error {two['error']:.2f} in {two['ms']:.0f} ms; GMRES "
         f"{exact['error']:.3f} in {exact['ms']:.0f} ms; held-out loss of 300 seconds of training, "
         f"one seed: {losses}", _family("lm", "attractors")],
        ["states of the solve can be supervised (flow)", "a phantom step at several states",
         f"pixels after equal time: {errors['correction', 12]:.2f}; last state alone "
         f"{errors['no correction', 12]:.2f}, unrolled {errors['unrolled', 12]:.2f}",
         _family("flow")],
        ["inversion of a diffusion chain, one thread",
         "`sequential`; `phantom` or `implicit` if memory is short",
         f"seconds to the same error: sequential {inverted['sequential']:.0f}, phantom "
         f"{inverted['phantom']:.0f}, implicit {inverted['implicit']:.0f}, the release "
         f"{inverted['release']:.0f}", _family("diffusion")],
        ["a graph network on PPI, minutes of training", "undecided: too short to rank",
         f"micro-F1 after 20 epochs, three seeds: {scores}; OhmNet's labels, not the paper's",
         _family("ignn")],
    ]  # fmt: skip
    return markdown(HEADER, rows)


def _rank(gradient: str, unit: str, world: int = 64) -> str:
    (row,) = (
        row for row in read("simulated_scale")["rows"]
        if (row["model"], row["gradient"], row["unit"], row["world"])
        == ("equilibrium", gradient, unit, world)
    )  # fmt: skip
    received = sum(row["bytes_received"].values()) / 1e9
    peak = sum(row["peak_bytes"].values()) / 1e6
    return f"{row['collectives']['all-gather']} all-gathers, {received:.2f} GB, peak {peak:.0f} MB"


@table("simulated_scale", "recorded/collectives")
def choose_unit() -> str:
    """Return which unit of sharding to take."""
    counts = {(r["unit"], r["gradient"]): r for r in read("recorded/collectives")["rows"]}
    alone = sum(counts["none: DDP", "all"]["all_gathers"])
    rows = [
        ["the model and its optimiser fit on each device", "DDP",
         f"{alone} all-gathers, {counts['none: DDP', 'all']['all_reduces']} all-reduces of the "
         "library", "[many processes](distributed.md#units-inside-f)"],
        ["the gathered weights of the layer fit", "the layer",
         f"64 ranks, implicit: {_rank('implicit', 'layer')}; phantom: {_rank('phantom', 'layer')}",
         SCALE],
        ["the gathered weights of the layer do not fit, implicit gradient", "the blocks of `f`",
         f"{_rank('implicit', 'block')}", SCALE],
        ["memory is still short, implicit gradient", "the blocks: linear maps save little more",
         f"linear maps: {_rank('implicit', 'linear')}", SCALE],
        ["memory is short, phantom gradient", "the layer, too: blocks save little, and send more",
         f"blocks: {_rank('phantom', 'block')}", SCALE],
        ["time is what counts", "try the layer first",
         f"{NOTHING}: simulated ranks have counts and bytes, no time", SCALE],
    ]  # fmt: skip
    return markdown(HEADER, rows)


@table("one_graph", "rivals")
def choose_export() -> str:
    """Return when to export."""
    micros = {r["name"]: r["micros"]["median"] for r in read("one_graph")["rows"]}
    times = {
        (r["contestant"], r["case"]): f"{1e3 * r['time']['median']:.0f}"
        for r in read("rivals")["rows"] if r["time"] is not None
    }  # fmt: skip
    ahead = micros["one graph, AOTInductor"]
    rows = [
        ["inference, a small state, latency counts", "export, AOTInductor",
         f"microseconds per evaluation, 32 x 64: {ahead:.0f}; the library {micros['library']:.0f}, "
         f"bare `f` {micros['bare f']:.0f}", GRAPH],
        ["the same, without a C++ compiler at hand", "export, onnxruntime",
         f"{micros['one graph, onnxruntime']:.0f}", GRAPH],
        ["the same, within Python", "`torch.compile` of the exported program",
         f"{micros['one graph, torch.compile']:.0f}", GRAPH],
        ["a large state", "either: export for where it runs, not for speed",
         f"plain iteration, 32 x 1024, milliseconds: the library "
         f"{times['ours fixed_point_iter', 'wide']}, compiled loops of others "
         f"{times['optimistix plain', 'wide']} and {times['jaxopt plain', 'wide']}; our own graph "
         "was not measured there", RIVALS],
        ["training", "the library", f"{NOTHING}: exported programs are for inference",
         "[export](export.md)"],
    ]  # fmt: skip
    return markdown(HEADER, rows)


def _load(load: str) -> str:
    """Return what a stream gains over fixed batches, by solver."""
    rows = [row for row in read("stream")["rows"] if row["load"] == load]
    gains = (f"{row['solver']} {row['ratio']:.2f}" for row in rows)
    shares = (f"{row['useful'] / row['fixed']:.2f}" for row in rows)
    return f"speed-up: {', '.join(gains)}; useful share of fixed batches: {', '.join(shares)}"


def _compact(hard: int) -> str:
    """Return how much faster compacted batches are, smallest and largest, by hard samples."""
    gains = [row["speed_up"] for row in read("choices")["compacted"] if row["hard"] == hard]
    return f"{min(gains):.2f} to {max(gains):.2f}"


@table("stream", "choices", "flow/reuse", "reason/halting", "serving")
def choose_stream() -> str:
    """Return when to stream."""
    films = {
        (r["reuse"], r["most"]): r["aepe"] for r in read("flow/reuse")["rows"]
        if r["way"] == "correction, near starts" and not r["tolerance"]
    }  # fmt: skip
    halts, load = read("reason/halting")["rows"], read("serving")
    head, residual, every = (
        halts[name]
        for name in ("stream, head, 0.01, residual", "stream, residual, 0.01, residual",
                     "all restarts")
    )  # fmt: skip
    rows = [
        ["few hard samples among many easy ones", "stream", _load("conv, 1 hard in 64"), STREAMS],
        ["the same, within one batch", "`compact=True`",
         f"one hard in 32, speed-up: {_compact(1)}; all equal: {_compact(0)}",
         "[large batches](precision.md#large-batches)"],
        ["passages of a text, unequally hard", "stream", _load("lm-quick, passages"), STREAMS],
        ["samples are equally hard", "fixed batches",
         f"an MLP, {_load('MLP 256, equal')}; digits, {_load('mdeq-quick, test set')}", STREAMS],
        ["frames of a video", "start from the last state",
         f"error with 2 evaluations and the last state {films[True, 2]:.2f}, with 12 from zero "
         f"{films[False, 12]:.2f}", _family("flow")],
        ["a learnt halting signal, and restarts",
         "stream; halt by the head for speed, by the residual for accuracy",
         f"{head['exact']:.1f} % exact with {head['evaluations']:.1f} evaluations, "
         f"{residual['exact']:.1f} % with {residual['evaluations']:.1f}; {every['starts']} full "
         f"solves of every puzzle, {every['top1']:.1f} % with {every['evaluations']:.0f}",
         _family("reason", "inference")],
        ["requests that come one by one", "`deq-zoo serve`",
         f"no comparison; one figure: {load['per_second']:.0f} requests a second, 50 at a time; "
         f"latency {load['p50_ms']:.0f} ms, 99th percentile {load['p99_ms']:.0f} ms",
         "[serving](serving.md#a-server)"],
    ]  # fmt: skip
    return markdown(HEADER, rows)
