"""Kills a training run at random moments and checks that nothing of it shows in the result.

Trains the quickstart twice: once undisturbed, once killed with SIGKILL again and again and started again each time.
Then every recorded loss, gradient norm and learning rate, and every bit of the final state, must be the same.
"""

import argparse
import collections
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from children import DEVNULL, STDOUT, run, start

COMPARED = ("step", "loss", "grad_norm", "learning_rate")
PHASES = ("starting", "compiling or restoring", "stepping", "saving")
# Seconds from the start of a phase within which the kill comes, at random.
LINGER = {"starting": 3.0, "tokenising": 0.5, "compiling or restoring": 4.0, "stepping": 8.0, "saving": 8.0}


def command(folder, options):
    return [
        *(sys.executable, "-m", "dseekjax.train", "--model", "quickstart"),
        f"run.dir={folder / 'run'}",
        f"data.cache_dir={folder / 'cache'}",
        f"train.steps={options.steps}",
        "checkpoint.every_steps=5",
        "evaluation.every_steps=50",
        "insight.print_every_steps=1",
        *options.overrides,
    ]


def phase(folder, output):
    """What a run was doing, by what it has left behind."""
    text = output.read_text() if output.exists() else ""
    if "run directory" not in text:
        return "starting"
    if text.rstrip().splitlines()[-1].startswith("Tokenising") and not (folder / "run" / "config.yaml").exists():
        return "tokenising"
    if list((folder / "run" / "checkpoints").glob("*tmp*")):
        return "saving"
    return "stepping" if re.search(r"(?m)^step \d", text) else "compiling or restoring"


def targets(number):
    """The phase that a kill is meant for: what happens only once comes first, then the others in turn."""
    once = ["tokenising"] * 3
    return once[number] if number < len(once) else PHASES[number % len(PHASES)]


def wait_for(folder, output, wanted, seconds):
    began = time.time()
    while phase(folder, output) != wanted and time.time() - began < seconds:
        time.sleep(0.002)


def kill_again_and_again(folder, options, dice):
    phases = collections.Counter()
    for number in range(options.kills):
        output = folder / f"output-{number}.txt"
        with open(output, "w") as file:
            process = start(command(folder, options), stdout=file, stderr=STDOUT)
            target = targets(number)
            # Not the first save after a start, which would never let a checkpoint come about.
            wait_for(folder, output, "stepping" if target == "saving" else target, options.longest)
            time.sleep(dice.uniform(0, LINGER[target]))
            if target == "saving":
                wait_for(folder, output, target, options.longest)
                time.sleep(dice.uniform(0, 0.1))
            if process.poll() is not None:
                sys.exit(f"run {number} ended by itself: {output.read_text()[-2000:]}\nuse more --steps")
            hit = phase(folder, output)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        phases[hit] += 1
        print(f"kill {number + 1:2} while {hit}: {len(records(folder))} records", flush=True)
    return dict(phases)


def records(folder):
    path = folder / "run" / "metrics.jsonl"
    return [line for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def compare(calm, killed, steps):
    first, second = ([json.loads(line) for line in records(folder)] for folder in (calm, killed))
    if [record["step"] for record in second] != list(range(1, steps + 1)):
        return "steps are missing or doubled"
    for a, b in zip(first, second, strict=True):
        for name in COMPARED:
            if a[name] != b[name]:
                return f"step {a['step']}: {name} is {a[name]!r} undisturbed, {b[name]!r} killed"
    for item in ("params", "state"):
        trees = [
            ocp.StandardCheckpointer().restore((folder / "run" / "checkpoints" / str(steps) / item).absolute())
            for folder in (calm, killed)
        ]
        for name in trees[0]:
            if not np.array_equal(*(np.asarray(tree[name]) for tree in trees)):
                return f"{item} {name} differs"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--longest", type=float, default=60.0, help="seconds after which a phase is no longer waited for"
    )
    parser.add_argument("--seed", type=int, default=None, help="of the moments; random when not given")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="config keys for both runs")
    options = parser.parse_args()
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    with tempfile.TemporaryDirectory() as place:
        calm, killed = Path(place) / "calm", Path(place) / "killed"
        calm.mkdir()
        killed.mkdir()
        began = time.time()
        run(command(calm, options), check=True, stdout=DEVNULL)
        print(f"undisturbed run: {time.time() - began:.0f} s; seed of the kills {seed}", flush=True)
        phases = kill_again_and_again(killed, options, random.Random(seed))
        run(command(killed, options), check=True, stdout=DEVNULL)
        difference = compare(calm, killed, options.steps)
        resumed = sum("Resuming from step" in file.read_text() for file in killed.glob("output-*.txt"))
    print(f"killed while {phases}; {resumed} of the starts resumed from a checkpoint")
    if not resumed:
        difference = difference or "no start resumed from a checkpoint, so nothing was tested: raise --longest"
    print(
        f"DIFFERENT: {difference}" if difference else f"identical: {', '.join(COMPARED)} and all state, to the last bit"
    )
    if options.json:
        print(
            json.dumps(
                {"kills": options.kills, "phases": phases, "resumed": resumed, "seed": seed, "difference": difference}
            )
        )
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
