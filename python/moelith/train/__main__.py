"""python -m moelith.train: the command line. Every option may also be given as an environment variable."""

import argparse
import dataclasses
import os
import signal
import sys
from pathlib import Path

from .errors import DISK_FULL, TrainError


def usable_cpus() -> int:
    """CPUs that this process may use: its affinity, and the quota of its control group."""
    cpus = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cpus = min(cpus, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cpus


def parse(arguments: list[str]) -> argparse.Namespace:
    def variable(name):
        return os.environ.get(name) or None

    parser = argparse.ArgumentParser(prog="python -m moelith.train", description=__doc__.split(":")[0] + ": trains a "
                                     "byte-level mixture-of-experts language model.")
    add = parser.add_argument
    add("--data", default=variable("DATA"), help="a file or folder of text, plain or .gz (DATA; default: the "
        "project's own documents and sources and text that the system carries)")
    add("--steps", default=variable("STEPS"), help="optimizer steps in all (STEPS; default: the preset's)")
    add("--resume", nargs="?", const="1", default=variable("RESUME"), help="go on from the run's checkpoint (RESUME=1)")
    add("--preset", default=variable("PRESET"), help="model size: tiny, small, base, large (PRESET; default: tiny)")
    add("--name", default=variable("NAME"), help="of the run and its folder (NAME; default: the preset's)")
    add("--device", default=variable("DEVICE"), help="cpu or cuda (DEVICE; default: cuda where there is a GPU that "
        "the layer runs on, but cpu for fp32)")
    add("--dtype", default=variable("DTYPE"), help="storage of weights and activations: fp32 or bf16, both with "
        "float32 accumulation and master weights (DTYPE; default: fp32 on a CPU, bf16 on a GPU)")
    add("--seed", default=variable("SEED"), help="of weights and data order (SEED; default: 0)")
    add("--threads", default=variable("THREADS"), help="CPU threads (THREADS; default: all that may be used)")
    add("--ep", default=variable("EP"), help="under torchrun: processes that share the experts of a layer (EP; default: "
        "all of a host); the others are replicas of them")
    add("--runs", default=variable("RUNS") or "runs", help="folder of all runs (RUNS; default: runs)")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="changes a field of the preset, as "
        "--set layers=2; fields: see Preset in model.py")
    return parser.parse_args(arguments)


def whole_number(name: str, text: str | None, least: int) -> int | None:
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise TrainError(f"{name}: {text!r}; accepted: whole numbers from {least} on")
    return value


def choice(name: str, value: str | None, accepted) -> str | None:
    if value is not None and value not in accepted:
        raise TrainError(f"{name}: {value!r}; accepted: {', '.join(accepted)}")
    return value


def changed(preset, changes: list[str]):
    """The preset with --set's changes."""
    types = {f.name: f.type for f in dataclasses.fields(preset)}
    for change in changes:
        field, _, value = change.partition("=")
        if field not in types:
            raise TrainError(f"--set: {change!r}; accepted: FIELD=VALUE with FIELD of {', '.join(types)}")
        try:
            preset = dataclasses.replace(preset, **{field: types[field](value)})
        except ValueError:
            raise TrainError(f"--set: {change!r}; accepted: {field}=<{types[field].__name__}>") from None
    return preset


def default_device(dtype: str | None) -> str:
    """cuda where this build, this machine's GPU and the dtype go together, otherwise cpu."""
    import torch

    import moelith
    from moelith.runtime import Group

    from .ranks import choose_gpu

    if dtype == "fp32" or not torch.cuda.is_available():
        return "cpu"
    choose_gpu()  # where the plan is made
    smallest = moelith.LayerConfig(hidden_size=8, intermediate_size=8, num_experts=1, top_k=1)
    try:
        Group.single().plan(smallest.key, moelith.PlanOptions().key, torch.bfloat16, "cuda", 0)
    except NotImplementedError as why:
        print(f"training on the CPU, since the layer does not run on the GPU here: {why}")
        return "cpu"
    return "cuda"


def run(arguments: list[str]) -> int:
    options = parse(arguments)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what PyTorch asks for, for deterministic results
    import torch

    from . import checkpoint, loop
    from .model import PRESETS
    from .ranks import Ranks

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False

    steps = whole_number("STEPS", options.steps, 1)
    seed = whole_number("SEED", options.seed, 0)
    threads = whole_number("THREADS", options.threads, 1)
    ep = whole_number("EP", options.ep, 1)
    preset_name = choice("PRESET", options.preset, PRESETS)
    dtype = choice("DTYPE", options.dtype, loop.DTYPES)
    device = choice("DEVICE", options.device, ("cpu", "cuda"))
    resuming = choice("RESUME", options.resume, ("0", "1")) == "1"
    if device == "cuda" and not torch.cuda.is_available():
        raise TrainError("DEVICE: cuda, but PyTorch finds no GPU here; accepted: cpu")
    name = options.name or preset_name or "tiny"
    if name != Path(name).name or name.startswith("."):
        raise TrainError(f"NAME: {name!r}; accepted: a folder name, without '/'")
    folder = Path(options.runs) / name
    own_cpus = max(1, usable_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    if resuming:
        saved = checkpoint.latest(folder)
        if saved is None:
            raise TrainError(f"RESUME: there is no checkpoint in {folder}; accepted: the NAME of a run that saved one")
        config = loop.Config.from_json(checkpoint.read_state(saved).config)
        for what, given, there in (("PRESET", preset_name, config.preset_name), ("DATA", options.data, config.data),
                                   ("DTYPE", dtype, config.dtype), ("SEED", seed, config.seed),
                                   ("--set", changed(config.preset, options.set), config.preset)):
            if given is not None and given != there:
                raise TrainError(f"{what}: {given}, but the run to resume has {there}; leave it out, or start a new "
                                 "run under another NAME")
        device = torch.device(device or default_device(config.dtype))
        ranks = Ranks.from_environment(ep, device)
        threads = threads or (config.threads if ranks.world == 1 else own_cpus)
        config = dataclasses.replace(config, steps=steps or config.steps, threads=threads)
        job = loop.resume(folder, config, saved, device, ranks)
        if ranks.first:
            print(f"resumed {saved} at step {job.step}")
    else:
        preset = changed(PRESETS[preset_name or "tiny"], options.set)
        device = torch.device(device or default_device(dtype))
        ranks = Ranks.from_environment(ep, device)
        steps = steps or preset.steps
        config = loop.Config(
            preset_name=preset_name or "tiny", preset=preset, data=options.data,
            dtype=dtype or ("bf16" if device.type == "cuda" else "fp32"), seed=seed or 0,
            threads=threads or own_cpus, steps=steps, horizon=max(steps, preset.steps))
        job = loop.start(folder, config, device, ranks)
    if ranks.first:
        print(job.describe())
        if job.step >= config.steps:
            print(f"the run has made its {config.steps} steps; STEPS=<more> goes on")
    ended_by = job.train()
    if ranks.first:
        if ended_by is not None:
            print(f"stopped by {signal.Signals(ended_by).name} and saved at step {job.step}; RESUME=1 goes on")
        loop.finish(job)
    ranks.wait_for_all()  # torchrun ends the others when one leaves with an error's status
    ranks.close()
    return 0 if ended_by is None else 128 + ended_by


def main() -> int:
    try:
        return run(sys.argv[1:])
    except TrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; nothing was saved since the last checkpoint", file=sys.stderr)
        return 128 + signal.SIGINT
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        print(f"error: cannot write {error.filename or 'to the run'}: {error.strerror}; checkpoints saved before are "
              "intact", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
