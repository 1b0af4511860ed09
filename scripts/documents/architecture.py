"""Draws the rooms of the house and what each imports, as the code has it: architecture.py FILE.svg

A room's sentence is the first of its docstring. Arrows that follow from others are left out. Where a room stands is
said here, in `PLACES`; an arrow that would point up is an error, for then the code or the picture has gone wrong.
"""

import ast
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "dseekjax"
KERNELS = "pallas_kernels"
DOORS = ("prepare", "train", "evaluate", "generate", "convert", "plan")


@dataclass(frozen=True)
class Place:
    left: float
    tier: int
    width: float = 1.5


PLACES = {
    "checkpoint": Place(0, 4),
    "insight": Place(1.75, 4),
    "plan": Place(3.5, 4),
    "generation": Place(5.6, 4),
    "evaluation": Place(7.7, 4),
    "training": Place(0, 3, 6.6),
    "data": Place(7.7, 3),
    "distributed": Place(7.7, 2),
    "parallel": Place(0, 2, 1.2),
    "comms": Place(1.35, 2, 1.2),
    "precision": Place(2.7, 2, 1.2),
    "memory": Place(4.05, 2, 1.2),
    "optim": Place(5.4, 2, 1.2),
    "models": Place(0, 1, 6.6),
    KERNELS: Place(0, 0, 6.6),
}
WIDTH = 9.2
HEIGHT = 0.62
"""Of a box; tiers are 1 apart."""


def rooms() -> list[str]:
    """The folders of the package, and the kernels beside it."""
    return [*sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")), KERNELS]


def imported(path: Path) -> set[str]:
    """Modules of this repository that a file imports, those of dseekjax without that name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    ours = {name for name in names if name.split(".")[0] in ("dseekjax", KERNELS)}
    return {name.removeprefix("dseekjax.") for name in ours}


def imports_between_rooms() -> dict[str, set[str]]:
    """For each room, those that it imports."""
    known = rooms()
    found = {}
    for room in known:
        folder = REPOSITORY / room if room == KERNELS else PACKAGE / room
        names = {name.split(".")[0] for path in folder.rglob("*.py") for name in imported(path)}
        found[room] = (names & set(known)) - {room}
    return found


def arrows() -> list[tuple[str, str]]:
    """Who imports whom, without what follows from other arrows."""
    direct = imports_between_rooms()

    def below(room: str) -> set[str]:
        return direct[room].union(*(below(lower) for lower in direct[room]))

    return sorted(
        (room, lower)
        for room, lowers in direct.items()
        for lower in lowers
        if not any(lower in below(other) for other in lowers - {lower})
    )


def rooms_behind(door: str) -> set[str]:
    """The rooms that a door puts together: its imports, and those of modules beside it that are no room.

    The root config, which every door reads, stands for none.
    """
    known, seen, found = set(rooms()), set(), set()
    waiting = [PACKAGE / door / "__main__.py" if (PACKAGE / door).is_dir() else PACKAGE / f"{door}.py"]
    while waiting:
        path = waiting.pop()
        seen.add(path)
        for name in imported(path):
            beside = PACKAGE / f"{name}.py"
            if name.split(".")[0] in known:
                found.add(name.split(".")[0])
            elif beside.is_file() and not name.startswith("config") and beside not in seen:
                waiting.append(beside)
    return found


def doors() -> list[str]:
    """Those that there are."""
    return [door for door in DOORS if (PACKAGE / f"{door}.py").is_file() or (PACKAGE / door / "__main__.py").is_file()]


def sentence(room: str) -> str:
    """What a room says of itself."""
    folder = REPOSITORY / room if room == KERNELS else PACKAGE / room
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    first = docstring.split("\n\n")[0].replace("\n", " ").partition(". ")[0]
    return first.rstrip(".").replace("`", "")


def draw(path: Path) -> None:
    """Writes the picture, the same bytes each time with the same libraries."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "dseekjax", "font.family": "sans-serif"})
    from matplotlib import patches, pyplot

    figure, axes = pyplot.subplots(figsize=(11.5, 7.4))
    figure.subplots_adjust(0.01, 0.01, 0.99, 0.99)
    axes.set(xlim=(-0.1, WIDTH + 0.1), ylim=(-0.45, 5.5))
    axes.set_axis_off()

    def box(left: float, middle: float, width: float, name: str, text: str, color: str) -> None:
        shape = "round,pad=0,rounding_size=0.06"
        axes.add_patch(
            patches.FancyBboxPatch(
                (left, middle - HEIGHT / 2), width, HEIGHT, boxstyle=shape, facecolor=color, edgecolor="#44546a"
            )
        )
        lines = textwrap.wrap(text, round(width * 19))
        axes.text(left + width / 2, middle + 0.2, name, ha="center", va="center", fontsize=10, weight="bold")
        axes.text(
            left + width / 2, middle + 0.1, "\n".join(lines), ha="center", va="top", fontsize=6.8, linespacing=1.15
        )

    for room in rooms():
        place = PLACES[room]
        color = {"training": "#dbe9f6", KERNELS: "#fde9d3", "models": "#e3f1df"}.get(room, "#f3f4f6")
        box(place.left, place.tier, place.width, room, sentence(room), color)
    existing = doors()
    width = (WIDTH - 0.15 * (len(existing) - 1)) / len(existing)
    for number, door in enumerate(existing):
        name = f"dseekjax.{door}"
        box(number * (width + 0.15), 5.05, width, name, ", ".join(sorted(rooms_behind(door))), "#fff6cc")
    for room, lower in arrows():
        start, end = _ends(PLACES[room], PLACES[lower])
        arrow = patches.FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=11, shrinkA=0, shrinkB=0, color="#44546a"
        )
        arrow.set_gid(f"{room} imports {lower}")
        axes.add_patch(arrow)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _ends(upper: Place, lower: Place) -> tuple[tuple[float, float], tuple[float, float]]:
    """From one box to another: straight down where they are above each other, or sideways between neighbours."""
    assert lower.tier <= upper.tier, "an arrow points up"
    if lower.tier == upper.tier:
        return (upper.left, upper.tier), (lower.left + lower.width, lower.tier)
    first, last = max(upper.left, lower.left), min(upper.left + upper.width, lower.left + lower.width)
    if first < last:
        x = (first + last) / 2
        return (x, upper.tier - HEIGHT / 2), (x, lower.tier + HEIGHT / 2)
    return (upper.left + upper.width, upper.tier - HEIGHT / 4), (lower.left + 0.2, lower.tier + HEIGHT / 2)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
