"""What a run came to, as a picture and a page."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from dseekjax.training.hooks import Record

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
table {{ border-collapse: collapse; }} td {{ padding: .2rem 1.5rem .2rem 0; }} td:last-child {{ text-align: right; }}
img {{ max-width: 100%; }} pre {{ background: #f5f5f5; padding: 1rem; overflow-x: auto; }}
</style>
<h1>{title}</h1>
<table>{rows}</table>
<img alt="Loss by step" src="data:image/png;base64,{picture}">
<h2>Start</h2><pre>{summary}</pre>
<h2>Config</h2><pre>{config}</pre>
</html>
"""


def plot_loss(records: Sequence[Record], path: Path) -> None:
    """Draws training and held-out loss by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    training = [(r["step"], r["loss"]) for r in records if r["loss"] is not None]
    held_out = [(r["step"], r["eval_loss"]) for r in records if r.get("eval_loss") is not None]
    axes.plot(*zip(*training, strict=True), linewidth=1, label="training")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), marker="o", label="held-out")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write_report(records: Sequence[Record], *, title: str, summary: str, config: str, plot: Path, page: Path) -> None:
    """Writes the picture and a page with the picture inside, which needs no other file."""
    if not any(record["loss"] is not None for record in records):
        return
    plot_loss(records, plot)
    rows = "".join(f"<tr><td>{name}<td>{value}" for name, value in _results(records))
    page.write_text(
        PAGE.format(
            title=html.escape(title),
            rows=rows,
            picture=base64.b64encode(plot.read_bytes()).decode(),
            summary=html.escape(summary),
            config=html.escape(config),
        ),
        encoding="utf-8",
    )


def _results(records: Sequence[Record]) -> list[tuple[str, str]]:
    last = records[-1]
    evaluated = next((r for r in reversed(records) if r.get("eval_loss") is not None), None)
    seconds = sum(r["step_seconds"] or 0 for r in records)
    speeds = sorted(r["tokens_per_second"] or 0 for r in records)
    waiting = sum(r["data_wait_seconds"] or 0 for r in records)
    results = [("Steps", f"{last['step']}")]
    if last["loss"] is not None:
        results.append(("Training loss, last step", f"{last['loss']:.4f}"))
    if evaluated is not None:
        results.append(("Held-out loss", f"{evaluated['eval_loss']:.4f}"))
        results.append(("Held-out bits per byte", f"{evaluated['eval_bits_per_byte']:.4f}"))
    results += [
        ("Tokens per second, median", f"{speeds[len(speeds) // 2]:,.0f}"),
        ("Time in steps", f"{seconds:.1f} s"),
        ("Share of it waiting for data", f"{waiting / seconds:.2%}"),
        ("Steps skipped as not finite", f"{sum((r['bad_steps'] or 0) > 0 for r in records)}"),
    ]
    return results
