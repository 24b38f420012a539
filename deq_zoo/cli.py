"""The command line, `deq-zoo COMMAND`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deq_zoo.arguments import make_parser
from deq_zoo.errors import ZooError
from deq_zoo.family import families, find_family
from deq_zoo.packages import install, missing
from deq_zoo.predictions import OutFolder, Prediction
from deq_zoo.preset import PRESETS, Preset, find_preset, load_presets

_NEEDS = f"needs packages of the zoo: {install('zoo')}, or the extra of one family"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a mistake of the user's is told in one paragraph."""
    parser = make_parser()
    args, others = parser.parse_known_args(argv)
    if others and args.command != "sample":
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    args.options = others
    try:
        return int(_COMMANDS[args.command](args) or 0)
    except ZooError as error:
        print(f"deq-zoo: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("deq_zoo", "torchdeq"):
            raise
        print(f"deq-zoo: {error.name} is not installed; this command {_NEEDS}", file=sys.stderr)
    except BrokenPipeError:  # the reader of our output has gone
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 1
    except OSError as error:
        print(f"deq-zoo: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("deq-zoo: interrupted", file=sys.stderr)
        return 130
    return 2


def _with_changes(preset: Preset, args: argparse.Namespace) -> Preset:
    """The preset as the command line wants it."""
    from deq_zoo.values import with_settings
    from torchdeq import DEQConfig

    given = {name: value for name, value in vars(args).items() if name in DEQConfig.names()}
    changed = with_settings(_moved(preset.with_deq(**given), args), args.set)
    assert isinstance(changed, Preset)
    return changed.with_deq()  # as --set has left it


def _moved(preset: Preset, args: argparse.Namespace) -> Preset:
    """The preset with its data where the command line says it is."""
    return preset if args.data_dir is None else preset.with_data_dir(args.data_dir)


def _list(args: argparse.Namespace) -> None:
    load_presets(None if args.family is None else find_family(args.family))
    lacking = {name for name, family in families().items() if missing(family)}
    for name in sorted(PRESETS):
        family = name.partition("-")[0]
        if args.family in (None, family):
            summary = (PRESETS[name].__doc__ or "").strip().split("\n")[0]
            mark = f" (not installed: torchdeq[{family}])" if family in lacking else ""
            print(f"{name:24} {summary}{mark}")


def _info(args: argparse.Namespace) -> None:
    from deq_zoo.values import paths

    preset = _with_changes(find_preset(args.name), args)
    model = _try_to_build(preset)
    print((PRESETS[args.name].__doc__ or "").strip())
    count = sum(p.numel() for p in model.parameters())
    print(f"\n{type(model).__name__}: {count:,} parameters")
    if preset.target is not None:
        print(f"published: {preset.target.metric} {preset.target.value} ({preset.target.source})")
    print("\nsettings (change one with --set KEY=VALUE):")
    for path, _, value in paths(preset):
        print(f"  {path} = {value}")


def _train(args: argparse.Namespace) -> int:
    from deq_zoo.training import train_changed

    result = train_changed(
        args.name,
        lambda preset: _with_changes(preset, args),
        out=args.out,
        resume=args.resume,
        force=args.force,
        quiet=args.quiet,
        cpu=args.cpu,
        max_seconds=args.max_seconds,
        report=not args.no_report,
    )
    if not result.main:
        return 0
    if not result.finished:
        print(
            f"stopped at step {result.step} of {result.steps}; --resume goes on from "
            f"{result.run.path}"
        )
        if result.interrupted:
            return 128 + result.interrupted
    _print_result(result.run.preset(), result.metrics, result.run)
    return 0


def _try_to_build(preset: Preset) -> Any:
    """Settings that do not fit together are told before a folder is made or replaced."""
    import torch

    with torch.random.fork_rng(devices=[]):
        try:
            model = preset.task.build()
            preset.optim.make(p for p in model.parameters() if p.requires_grad)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise ZooError(f"this preset cannot be built: {error}") from None
    return model


def _print_result(preset: Preset, metrics: dict[str, float], run: Any) -> None:
    if not sys.stdout.isatty():
        print(json.dumps({"run": str(run.path), **metrics}))
        return
    for name, value in metrics.items():
        print(f"{name}: {value:.4g}")
    if preset.target is not None:
        print(f"published {preset.target.metric}: {preset.target.value} ({preset.target.source})")
    print(f"run: {run.path}" + (f", report: {run.report}" if run.report.exists() else ""))


def _open(args: argparse.Namespace) -> tuple[Any, Preset, Any]:
    import torch

    from deq_zoo.loading import open_model

    model, preset = open_model(args.run, best=not args.last, data_dir=args.data_dir)
    accelerator = None if args.cpu else torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if accelerator is None else accelerator
    return model.to(device), preset, device


def _evaluate(args: argparse.Namespace) -> None:
    from deq_zoo.evaluate import evaluate
    from deq_zoo.weights import load_weights

    model, preset, device = _open(args)
    changed = _with_changes(preset, args)
    if changed != preset:
        weights = model.state_dict()
        model = _try_to_build(changed).to(device)
        load_weights(model, weights, str(args.run))
    found = evaluate(changed.task, model, "test", thorough=True)
    print(json.dumps({"metrics": dict(found.metrics), "solver": found.solver.summary()}, indent=1))


def _predict(args: argparse.Namespace) -> None:
    model, preset, _ = _open(args)
    missing = [str(file) for file in args.files if not file.exists()]
    if missing:
        raise ZooError(f"no such file: {', '.join(missing)}")
    for result in preset.task.predict(
        model, args.files, OutFolder(args.out or Path("predictions"))
    ):
        print(result.text if isinstance(result, Prediction) else result, flush=True)


def _sample(args: argparse.Namespace) -> None:
    from deq_zoo.values import paths, with_settings

    model, preset, _ = _open(args)
    options = preset.task.sampling()
    if args.list:
        for name, _, value in paths(options):
            print(f"--{name.replace('_', '-')} (default: {value})")
        return
    options = with_settings(options, _as_settings(args.options))
    for result in preset.task.sample(model, options, OutFolder(args.out)):
        print(result.text, flush=True)


def _as_settings(words: Sequence[str]) -> list[str]:
    """`--scale 4`, `--scale=4` and `scale=4` all read `scale=4`."""
    settings = []
    left = iter(words)
    for word in left:
        name, equals, value = word.removeprefix("--").partition("=")
        if not equals and word.startswith("--"):
            given = next(left, None)
            if given is None:
                raise ZooError(f"{word} needs a value")
            value, equals = given, "="
        if not equals:
            raise ZooError(f"options of sampling read --name value or name=value, got {word!r}")
        settings.append(f"{name.replace('-', '_')}={value}")
    return settings


def _convert(args: argparse.Namespace) -> None:
    from deq_zoo.convert import convert_file

    out = args.out or args.file.with_suffix(".safetensors")
    if out.exists() and not args.force:
        raise ZooError(f"{out} exists already: choose another --out, or replace it with --force")
    preset = _with_changes(find_preset(args.preset), args)
    _try_to_build(preset)
    count = convert_file(args.file, preset, args.preset, out)
    print(f"{count} tensors written to {out}")


def _report(args: argparse.Namespace) -> None:
    from deq_zoo.report import write_report
    from deq_zoo.run import Run

    run = Run.open(args.run)
    write_report(run, _moved(run.preset(), args))
    print(run.report)


_COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "list": _list,
    "info": _info,
    "train": _train,
    "evaluate": _evaluate,
    "predict": _predict,
    "sample": _sample,
    "report": _report,
    "convert": _convert,
}
