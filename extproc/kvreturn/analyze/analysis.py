"""All of it: lines in, sums out. What grows with the input lies in temporary files."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvreturn.analyze import sessions
from kvreturn.analyze.fields import Unit
from kvreturn.analyze.formats import LineReader
from kvreturn.analyze.lines import Line
from kvreturn.analyze.model import Rates
from kvreturn.analyze.observation import Answered, LineError, Link, Measured, Observation, Turn, unpack_turn
from kvreturn.analyze.sorting import ExternalSort
from kvreturn.analyze.tally import MeasuredTally, Tally

_BUDGET = 48 << 20
_EXAMPLES = 3


@dataclass(slots=True)
class Intake:
    """What became of the lines.

    Attributes:
        lines: that are not blank.
        other: requests that are no turns (other paths, other methods, refused), and what else kvreturn logs.
        bad: lines that could not be used, by reason.
        examples: the first of these, as `source:number`.
    """

    lines: int = 0
    other: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def refuse(self, line: Line, reason: str) -> None:
        """Count a line that cannot be used."""
        self.bad[reason] += 1
        places = self.examples.setdefault(reason, [])
        if len(places) < _EXAMPLES:
            places.append(f"{line.source}:{line.number}")


@dataclass(slots=True)
class Options:
    """What the user decides.

    Attributes:
        ttl: seconds for which D holds blocks.
        rates: the model.
        unit: of times that are numbers.
        use_cached: whether to believe the log's prefix cache hits.
        decode_bytes: KV memory of all decode nodes together, None if it was not told.
    """

    ttl: float = 480.0
    rates: Rates = field(default_factory=Rates)
    unit: Unit = "auto"
    use_cached: bool = True
    decode_bytes: float | None = None


@dataclass(slots=True)
class Analysis:
    """The result.

    Attributes:
        options: what it was made with.
        intake: what became of the lines.
        tally: turns with a time.
        measured: turns of kvreturn's own log.
        forgotten: turns that memory had no room for, see `sessions.Linker`.
    """

    options: Options
    intake: Intake
    tally: Tally
    measured: MeasuredTally
    forgotten: int


def analyze(lines: Iterable[Line], options: Options) -> Analysis:
    """Read all lines, and find out what they say together."""
    intake, measured = Intake(), MeasuredTally()
    begin, end = float("inf"), 0.0
    with ExternalSort(_BUDGET) as turns, ExternalSort(_BUDGET) as unlinked:
        reader = LineReader(options.unit)
        for line in lines:
            intake.lines += 1
            found = _read(reader, line, intake)
            if isinstance(found, Measured):
                measured.add(found)
            elif found:
                begin, end = min(begin, found.ts), max(end, found.ts)
                if found.session:
                    named = Turn(found.session, found.ts, intake.lines, found.sizes, Link.NAMED, Answered.UNKNOWN)
                    turns.add(named.pack())
                else:
                    unlinked.add(sessions.pack(found, intake.lines))
        linker = sessions.Linker()
        for turn in linker.link(unlinked.drain()):
            turns.add(turn.pack())
        tally = Tally(options.ttl, options.rates, (min(begin, end), end), use_cached=options.use_cached)
        tally.take(map(unpack_turn, turns.drain()))
    return Analysis(options, intake, tally, measured, linker.forgotten)


def _read(reader: LineReader, line: Line, intake: Intake) -> Observation | Measured | None:
    if line.text is None:
        intake.refuse(line, "longer than any request")
        return None
    try:
        found = reader.read(line.text)
    except LineError as e:
        intake.refuse(line, str(e))
        return None
    intake.other += found is None
    return found
