"""What a run writes besides its report."""

import json
from collections.abc import Iterator
from pathlib import Path

from kvreturn.bench import page
from kvreturn.bench.run import Run
from kvreturn.bench.sample import LEGS
from kvreturn.bench.summary import Summary


def write(  # noqa: PLR0913, PLR0917 - one file each
    run: Run, summary: Summary, html: Path | None, picture: Path | None, stats: Path | None, turn_log: Path | None
) -> None:
    """Write the files that are wanted.

    Args:
        run: what was played.
        summary: its conclusions.
        html: for the report as a page; needs matplotlib.
        picture: for its plots; needs matplotlib. Not written if there is nothing to compare.
        stats: for all turns, as a JSON array.
        turn_log: for the turns of the leg `off`, one a line.

    Raises:
        OSError: one cannot be written; those before it are.
    """
    if stats:
        _stats(run, stats)
    if turn_log:
        _turn_log(run, turn_log)
    if not (html or picture):
        return
    from kvreturn.bench import plots  # noqa: PLC0415 - takes half a second

    drawn = summary.comparison is not None
    if html:
        html.write_text(page.render(summary, plots.svg(run) if drawn else ""), encoding="utf-8")
    if picture and drawn:
        plots.save(run, picture)


def _stats(run: Run, path: Path) -> None:
    """All turns as a JSON array, as `--stats-json-output` of vLLM's multi-turn benchmark does."""
    rows = [s.as_json() for leg in LEGS for s in run.samples(leg)]
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def _turn_log(run: Run, path: Path) -> None:
    """The turns without read-back, one a line, as `kvreturn analyze` reads them: so it can be asked what it expects."""
    path.write_text("".join(f"{line}\n" for line in _turns(run)), encoding="utf-8")


def _turns(run: Run) -> Iterator[str]:
    for sample in sorted(run.samples("off"), key=lambda s: s.start_time_ms):
        turn = {
            "conversation_id": sample.conversation_id,
            "ts": round(run.begun + sample.start_time_ms / 1e3, 6),
            "prompt_tokens": sample.input_num_tokens,
            "completion_tokens": sample.output_num_tokens,
        }
        yield json.dumps(turn)
