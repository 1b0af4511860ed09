"""A report for people."""

import math
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from dseekjax.plan.report import Report

JAX_TAKES = 0.75


def print_report(report: Report, console: Console) -> None:
    """Prints all of a report; without colours where the console has none."""
    for part in _parts(report):
        console.print(part, highlight=False)


def size(num_bytes: float) -> str:
    """Bytes in the largest binary unit that leaves a digit before the point."""
    magnitude = abs(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if magnitude < 1024 or unit == "TiB":
            break
        num_bytes, magnitude = num_bytes / 1024, magnitude / 1024
    return f"{num_bytes:.0f} {unit}" if unit == "B" or magnitude >= 100 else f"{num_bytes:.3g} {unit}"


def verdict(report: Report) -> str:
    """Whether it fits, and by how much."""
    room = report.capacity_bytes - report.reserved_bytes
    of = f"{size(report.peak_bytes)} of {size(room)} ({size(report.capacity_bytes)} less {size(report.reserved_bytes)} "
    of += "for CUDA and NCCL)"
    if report.fits:
        fraction = report.peak_bytes / report.capacity_bytes
        return f"It fits: {of}, {report.peak_bytes / room:.0%}." + (
            f" JAX takes {JAX_TAKES:.0%} of the memory by default: run it with XLA_PYTHON_CLIENT_MEM_FRACTION="
            f"{math.floor(1000 * room / report.capacity_bytes) / 1000:.3f}."
            if fraction > JAX_TAKES
            else ""
        )
    return f"Out of memory: {of}; {size(-report.spare_bytes)} too much per GPU."


def _parts(report: Report) -> Iterator[RenderableType]:
    mesh = " x ".join(f"{axis} {length}" for axis, length in report.mesh.items() if length > 1) or "one device"
    yield Text.assemble(
        (report.program, "bold"),
        f" on {report.gpus} x {report.gpu} ({report.hosts} x {report.gpus_per_host}), mesh {mesh}, "
        f"{report.global_batch_size} sequences of {report.sequence_length} tokens per step",
    )
    yield Text(verdict(report), style="bold green" if report.fits else "bold red")
    yield ""
    yield _memory(report)
    yield ""
    yield _collectives(report)
    yield ""
    yield _computation(report)
    yield ""
    yield (
        f"Built in {report.build_seconds:.1f} s, lowered in {report.lower_seconds:.1f} s, compiled in "
        f"{report.compile_seconds:.1f} s."
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _memory(report: Report) -> RenderableType:
    table = _table("Memory per GPU", "", "")
    table.show_header = False
    rows = {
        "arguments (state and batch)": report.argument_bytes,
        "outputs": report.output_bytes,
        "  of them in place of arguments": -report.aliased_bytes,
        "temporaries": report.temporary_bytes,
        "peak": report.peak_bytes,
    }
    for name, value in rows.items():
        table.add_row(name, size(value), style="bold" if name == "peak" else "")
    if report.host_bytes:
        table.add_row("on the host", size(report.host_bytes))
    return table


def _collectives(report: Report) -> RenderableType:
    if not report.collectives:
        return "No collectives."
    table = _table("Collectives per step", "", "axes", "GPUs", "over", "count", "sent/GPU", "exposed", "time", "waited")
    for row in report.collectives:
        table.add_row(
            row.kind + (" *" if row.is_conditional else ""),
            row.axes,
            str(row.group_size),
            "network" if row.crosses_hosts else "NVLink",
            f"{row.count:,.0f}",
            size(row.wire_bytes),
            f"{row.exposed_wire_bytes / row.wire_bytes:.0%}" if row.wire_bytes else "",
            seconds(row.seconds),
            seconds(row.exposed_seconds),
        )
    notes = [
        f"Sent per GPU within hosts {size(report.wire_bytes_within_hosts)}, "
        f"by groups that cross hosts {size(report.wire_bytes_across_hosts)}.",
        f"Exposed, with no matrix product between start and end: {report.exposed_share:.0%} of the bytes sent"
        + "".join(f", {share:.0%} along {axes}" for axes, share in report.exposed_share_by_axes.items())
        + ". Times are estimates, at full bandwidth and peak speed.",
    ]
    if any(row.is_conditional for row in report.collectives):
        notes.append("* stands in a branch; counted as if always taken.")
    if report.unknown_loops:
        notes.append(f"{report.unknown_loops} loops are of unknown length; counted as one pass.")
    return Group(table, *notes)


def _computation(report: Report) -> RenderableType:
    table = _table("Computation per GPU and step", "", "FLOPs", "")
    table.show_header = False
    table.columns[2].justify = "left"
    table.add_row("model", f"{report.model_flops:.3g}", "what it needs: causal attention half, nothing recomputed")
    table.add_row("program", f"{report.program_flops:.3g}", "matrix products before XLA, shared out evenly")
    table.add_row("compiled", f"{report.compiled_flops:.3g}", "matrix products that XLA made each GPU do")
    busy = report.compute_seconds + report.exposed_seconds
    kernels = ", ".join(f"{count:,.0f} {name}" for name, count in report.kernels.items())
    return Group(
        table,
        f"Estimate: {seconds(report.compute_seconds)} of matrix products at peak speed, "
        f"{seconds(report.communication_seconds)} of collectives, {seconds(report.exposed_seconds)} of them waited "
        f"for; no step is faster than {seconds(busy)}.",
        f"Kernels: {kernels or 'none'}.",
    )


def seconds(value: float) -> str:
    """A time in a unit that suits it."""
    if value == 0:
        return "0"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale or unit == "us":
            digits = max(0, 2 - math.floor(math.log10(max(value / scale, 1e-9))))
            return f"{value / scale:.{min(digits, 2)}f} {unit}"
    raise AssertionError
