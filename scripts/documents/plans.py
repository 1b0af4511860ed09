"""Prints what some programs need on clusters, as `scripts/plan compile` tells it: plans.py >docs/plans.md"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from children import DEVNULL, PIPE, run

REPOSITORY = Path(__file__).parents[2]
HEAD = """\
# What some programs need

Compiled for GPUs that were not there, as `scripts/plan_tables` prints it; nothing was run.
*Exposed* is what is sent with no matrix product between its start and its end. Times are estimates from the clusters'
files."""
PLANS = {
    "GPT-2 124M on 8 A100": "--model gpt2_124m --cluster a100_80gb",
    "Llama 3 8B on 64 H100": "--model llama3_8b --cluster h100_sxm --hosts 8",
    "Llama 3 8B on 64 H100, layers gathered as they come": (
        "--model llama3_8b --cluster h100_sxm --hosts 8 mesh.fsdp_prefetch=none"
    ),
    "Llama 3 8B on 64 H100, tensor within hosts": (
        "--model llama3_8b --cluster h100_sxm --hosts 8 --mesh fsdp=8,tensor=8"
    ),
    "Llama 3 8B on 64 H100, tensor within hosts, round a ring": (
        "--model llama3_8b --cluster h100_sxm --hosts 8 --mesh fsdp=8,tensor=8 mesh.tensor_overlap=ring"
    ),
    "GPT-3 175B on 1024 H100": "--model gpt3_175b --cluster h100_sxm --hosts 128 --mesh fsdp=128,tensor=8",
    "GPT-3 175B on 1024 H100, tensor round a ring": (
        "--model gpt3_175b --cluster h100_sxm --hosts 128 --mesh fsdp=128,tensor=8 mesh.tensor_overlap=ring"
    ),
}
WIDTH = 120
# Exit status 3 says that it does not fit, which a table may show.
TOLD = (0, 3)


def folded(line: str) -> Iterator[str]:
    """Parts of at most `WIDTH` characters, between words where that is possible."""
    while len(line) > WIDTH:
        end = line.rfind(" ", 0, WIDTH) + 1 or WIDTH
        yield line[:end].rstrip(" ")
        line = line[end:]
    yield line.rstrip(" ")


def main() -> int:
    print(HEAD)
    for title, words in PLANS.items():
        command = ["scripts/plan", "compile", *words.split()]
        done = run(command, cwd=REPOSITORY, stdout=PIPE, stderr=DEVNULL, text=True)
        if done.returncode not in TOLD:
            print(f"error: {' '.join(command)} ended with status {done.returncode}; run it to see why", file=sys.stderr)
            return 1
        lines = [part for line in done.stdout.splitlines() for part in folded(line)]
        print(f"\n## {title}\n", "```", f"$ {' '.join(command)}", *lines, "```", sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
