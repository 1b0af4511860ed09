"""Writes the reference, from docstrings and config models: reference.py FOLDER

Sources are read, not imported objects asked, so that the pages are the same with any version of the libraries.
"""

import ast
import importlib
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY))
SECTIONS = ("Args", "Returns", "Raises")
OPS = ("attention", "bf16_matmul", "fp8_matmul", "norm", "quantize")
LINE = 100
"""A signature that is longer has an argument to a line."""


def pages() -> dict[str, str]:
    """Every page, by the name of its file."""
    written = {"config.md": _config(), "library.md": _library(), "kernels.md": _kernels()}
    return {name: re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n" for name, text in written.items()}


def _config() -> str:
    from dseekjax.config import Config
    from dseekjax.config_reference import describe

    keys = list(describe(Config))
    parts = [
        "# Config\n\nEvery key, for a config file (`--config FILE`, as in `configs/`) and for the command line\n"
        "(`KEY=VALUE`). Items of a list go by number: `data.sources.0.path=my.txt`. Written by\n"
        "`scripts/write_reference` from the config models.\n"
    ]
    for section in dict.fromkeys(key.name.partition(".")[0] for key in keys):
        rows = [key for key in keys if key.name.startswith(f"{section}.")]
        lines = [f"## {section}\n\n| key | type | default | meaning |\n|---|---|---|---|"]
        lines += [f"| `{key.name}` | {_cell(key.type)} | {_cell(key.default)} | {_cell(key.meaning)} |" for key in rows]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _cell(text: str) -> str:
    """For a table of Markdown; what stands between backticks stays as it is."""
    pieces = text.split("`")
    pieces[::2] = [re.sub(r"([*<])", r"\\\1", piece) for piece in pieces[::2]]
    return "`".join(pieces).replace("|", r"\|")


def _library() -> str:
    return "\n".join(
        [
            "# Python\n\n[The library's page](../library.md) shows how these are used. Written by\n"
            "`scripts/write_reference` from docstrings.\n",
            *_package("dseekjax", _homes("dseekjax")),
            *_package("dseekjax.plan", _homes("dseekjax.plan")),
        ]
    )


def _kernels() -> str:
    parts = [
        "# Kernels in Python\n\n[The page of the kernels](../kernels.md) tells what they are. Written by\n"
        "`scripts/write_reference` from docstrings.\n"
    ]
    for op in OPS:
        parts += _package(f"pallas_kernels.{op}", _reexports(f"pallas_kernels.{op}"))
    return "\n".join(parts)


def _homes(package: str) -> dict[str, str]:
    """Names of a package that loads them lazily, and the module that each is from."""
    return dict(sorted(importlib.import_module(package)._HOMES.items()))


def _reexports(package: str) -> dict[str, str]:
    """Names that a package takes from modules of its own, and the module that each is from."""
    imports = (node for node in _parse(package).body if isinstance(node, ast.ImportFrom))
    return dict(sorted((alias.name, str(node.module)) for node in imports for alias in node.names))


def _package(package: str, homes: dict[str, str]) -> Iterator[str]:
    yield f"## {package}\n"
    yield _prose((ast.get_docstring(_parse(package)) or "").partition("\n>>>")[0]) + "\n"
    for name, home in homes.items():
        found = [
            node for node in _parse(home).body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
        ]
        if found:
            yield from _entry(found[0])


def _parse(module: str) -> ast.Module:
    path = REPOSITORY / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def _entry(node: ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    yield f"### {node.name}\n"
    if isinstance(node, ast.FunctionDef):
        yield _signature(node.name, node) + _prose(ast.get_docstring(node)) + "\n"
        return
    functions = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    constructor = next((item for item in functions if item.name == "__init__"), None)
    if constructor is not None:
        yield _signature(node.name, constructor, skip_first=True)
    yield _prose(ast.get_docstring(node)) + "\n"
    if constructor is not None and ast.get_docstring(constructor):
        yield _prose(ast.get_docstring(constructor)) + "\n"
    attributes = list(_attributes(node.body, node.name))
    if attributes:
        yield "\n".join(attributes) + "\n"
    for function in functions:
        if not function.name.startswith("_"):
            yield from _method(node.name, function)


def _attributes(body: Sequence[ast.stmt], owner: str) -> Iterator[str]:
    """Fields of a dataclass or config model, with what is said below each."""
    from dseekjax.config import Config

    for item, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        if item.target.id.startswith("_"):
            continue
        if owner == Config.__name__:
            yield f"- `{item.target.id}`: see [config](config.md#{item.target.id})"
            continue
        default = "" if item.value is None or isinstance(item.value, ast.Lambda) else f" = {_code(item.value)}"
        if isinstance(item.value, ast.Call):
            default = ""
        yield f"- `{item.target.id}: {_code(item.annotation)}{default}`{_meaning(item.value, after)}"


def _meaning(value: ast.expr | None, after: ast.stmt | None) -> str:
    """Of a field: the string below it, or the description that a config model gives it."""
    text = after.value if isinstance(after, ast.Expr) else None
    if isinstance(value, ast.Call):
        text = next((word.value for word in value.keywords if word.arg == "description"), text)
    if not isinstance(text, ast.Constant):
        return ""
    return ": " + " ".join(str(text.value).split())


def _method(owner: str, function: ast.FunctionDef) -> Iterator[str]:
    kinds = {decorator.id for decorator in function.decorator_list if isinstance(decorator, ast.Name)}
    yield f"#### {owner}.{function.name}\n"
    if "property" not in kinds:
        yield _signature(f"{owner}.{function.name}", function, skip_first="staticmethod" not in kinds)
    yield _prose(ast.get_docstring(function)) + "\n"


def _signature(name: str, function: ast.FunctionDef, *, skip_first: bool = False) -> str:
    arguments = function.args
    if skip_first:
        arguments = ast.arguments(
            arguments.posonlyargs,
            arguments.args[1:],
            arguments.vararg,
            arguments.kwonlyargs,
            arguments.kw_defaults,
            arguments.kwarg,
            arguments.defaults,
        )
    initializes = function.name == "__init__"
    returned = "" if function.returns is None or initializes else f" -> {_code(function.returns)}"
    line = f"{name}({_code(arguments)}){returned}"
    if len(line) > LINE:
        tree = ast.parse(f"def f({_code(arguments)}): ...").body[0]
        assert isinstance(tree, ast.FunctionDef)
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in _one_by_one(tree.args)) + f"){returned}"
    return f"```\n{line}\n```\n\n"


def _one_by_one(arguments: ast.arguments) -> Iterator[str]:
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in zip(arguments.args, defaults, strict=True):
        yield _code(argument) + ("" if default is None else f" = {_code(default)}")
    if arguments.vararg or arguments.kwonlyargs:
        yield "*" + (_code(arguments.vararg) if arguments.vararg else "")
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _code(argument) + ("" if value is None else f" = {_code(value)}")
    if arguments.kwarg:
        yield f"**{_code(arguments.kwarg)}"


def _code(node: ast.AST) -> str:
    return ast.unparse(node)


def _prose(docstring: str | None) -> str:
    """Markdown of a docstring: its sections become lists."""
    lines: list[str] = []
    section = ""
    for line in (docstring or "").splitlines():
        heading = line.rstrip(":")
        if heading in SECTIONS and line.endswith(":"):
            section = heading
            lines.append(f"{heading}:\n" if heading != "Returns" else "Returns:")
        elif section and line.startswith(" "):
            inner = textwrap.dedent(line) if not line.startswith(" " * 8) else "  " + line.strip()
            entry = re.match(r"([\w, *]+): ", inner) if section != "Returns" else None
            lines.append(f"- `{entry[1]}`: {inner[entry.end() :]}" if entry else inner)
        else:
            section = "" if line else section
            lines.append(line)
    return "\n".join(lines).strip()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text)
