"""The command ``penstock``.

The command is a thin layer: it reads flags into a ``Config``, finds the flow, starts a job, and watches it. It adds
three things. The first Ctrl-C ends a job in good order and says how to resume it, and the second ends it at once. An
error is one paragraph and a remedy, and a traceback only with ``-v``. ``--json`` puts JSON on standard output and
nothing else, whatever Spark, Java or a user's function prints.

The functions that need polars, PySpark or matplotlib import them, so that ``--help`` answers at once.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape

from penstock.errors import ConfigError, MachineError, PenstockError
from penstock.loading import load_flow

if TYPE_CHECKING:
    from penstock.observe.live import JobLike

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="penstock",
    help="Elastic, exactly-once, stateful stream processing in Python on Apache Spark.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Engine(StrEnum):
    spark = "spark"
    local = "local"


def main() -> None:
    """The entry point of the console script."""
    app()


# --- run ----------------------------------------------------------------------------------------------------------


@app.command()
def run(
    target: str = typer.Argument(
        ..., metavar="FLOW.py[:NAME]", help="The file that builds the flow; NAME chooses one of several flows."
    ),
    master: str | None = typer.Option(None, help="Where Spark runs, such as local[2] or spark://host:7077."),
    checkpoint: str | None = typer.Option(
        None, metavar="DIR", help="Where state is kept; a later run with the same DIR resumes."
    ),
    slices: int | None = typer.Option(
        None, help="Shares of each stage's keys; a checkpoint's first run fixes the number."
    ),
    instances: int | None = typer.Option(None, help="Containers of each stage at the start (default: all cores)."),
    config_file: Path | None = typer.Option(
        None, "--config", metavar="FILE", help="A TOML file with settings (default: penstock.toml, if it is there)."
    ),
    settings: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="Any other setting; may be repeated."),
    engine: Engine = typer.Option(Engine.spark, help="spark, or local: one process without Spark."),
    epochs: int | None = typer.Option(None, metavar="N", help="Stop after N epochs."),
    as_json: bool = typer.Option(False, "--json", help="Status as one line of JSON a second."),
    plain: bool = typer.Option(False, "--plain", help="Status as plain lines, even in a terminal."),
    verbose: bool = typer.Option(False, "-v", "--verbose", help="Show tracebacks of errors."),
) -> None:
    """Run a flow until its sources end, or until Ctrl-C, which finishes the epoch and takes a checkpoint."""
    with _manners(verbose):
        from penstock.config import Config, parse_assignments

        flags = {
            "master": master,
            "checkpoint": checkpoint,
            "slices": slices,
            "instances": instances,
            "epochs_max": epochs,
        }
        overrides = parse_assignments(settings) | {key: value for key, value in flags.items() if value is not None}
        config = Config.load(config_file, overrides)
        flow = load_flow(target)

        from penstock.engines.job import start

        with _standard_output(as_json) as write:
            supervise(
                lambda: start(flow, engine=engine.value, config=config),
                as_json=as_json,
                plain=plain,
                resume=resume_hint(sys.argv, config.checkpoint),
                write=write,
            )


@app.command()
def explain(
    target: str = typer.Argument(..., metavar="FLOW.py[:NAME]", help="The file that builds the flow."),
    svg: Path | None = typer.Option(None, metavar="FILE", help="Draw the flow into this file ('-': standard output)."),
    verbose: bool = typer.Option(False, "-v", "--verbose", help="Show tracebacks of errors."),
) -> None:
    """Show a flow's operators, stages, exchanges and schemas. Nothing is run."""
    with _manners(verbose):
        flow = load_flow(target)
        if svg is None:
            print(flow.explain())
        elif str(svg) == "-":
            print(flow.explain("svg"), end="")
        else:
            try:
                svg.write_text(flow.explain("svg"))
            except OSError as error:
                raise ConfigError(
                    f"{svg} cannot be written: {error.strerror or error}.", remedy="Choose another file for --svg."
                ) from None
            print(f"drawn into {svg}")


@app.command()
def simulate(
    seeds: int = typer.Option(1000, min=1, help="Number of seeds."),
    seed: int | None = typer.Option(None, min=0, help="Run only this seed, which replays exactly."),
    first: int = typer.Option(0, "--from", min=0, metavar="SEED", help="The first seed."),
    jobs: int = typer.Option(1, min=1, help="Number of processes that share the seeds."),
    storm: bool = typer.Option(
        False, "--storm", help="Give each job 200 orders (rescales, moves, cancellations), and kill nodes in between."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    verbose: bool = typer.Option(False, "-v", "--verbose", help="Show whole stories, and tracebacks of errors."),
) -> None:
    """Run jobs in virtual time under faults that seeds draw, and check that no fault shows in the results."""
    with _manners(verbose):
        os.environ.setdefault("POLARS_MAX_THREADS", "1")  # frames have a few rows, and a second thread would only cost
        from penstock.engines.sim.simulate import Campaign, show_campaign

        with _standard_output(as_json) as write:
            campaign = Campaign()
            interrupted = False
            if seed is not None:
                told = [o for o in campaign.run([seed], keep_stories=verbose, storm=storm) if o.story]
            else:
                interrupted = show_campaign(campaign, range(first, first + seeds), Console(stderr=True), jobs, storm)
                told = campaign.violations[:3]
            if write is not None:
                write(json.dumps(campaign.to_json()))
        if not as_json:
            for outcome in told:
                print("\n".join(outcome.lines(whole=verbose)))
            print(campaign.summary())
        if interrupted:
            raise typer.Exit(EXIT_INTERRUPTED)
        if campaign.violations:
            raise typer.Exit(EXIT_FAILED)


def resume_hint(argv: Sequence[str], checkpoint: str | None) -> str:
    """What to tell a user who stopped a job: the command that resumes it, or that there is no checkpoint."""
    if checkpoint is None:
        return "There was no checkpoint directory, so the next run begins anew; with --checkpoint DIR it would resume."
    return "Resume with: " + shlex.join(["penstock", *argv[1:]])


def supervise(
    begin: Callable[[], Any], *, as_json: bool, plain: bool, resume: str, write: Callable[[str], None] | None = None
) -> None:
    """Start a job, watch it to its end, and turn signals into an orderly stop."""
    from penstock.observe.live import await_start, duration_text, quiet_start, short, view_for, watch

    console = Console()
    notes = Console(stderr=True)
    view = view_for(console, plain=plain, as_json=as_json)

    def tell() -> None:
        # The live view's own console sets the line above the frame. Another console would write into the frame.
        where = console if view == "live" else notes
        where.print("Stopping after this epoch. Ctrl-C again stops at once.", highlight=False)

    with _Signals() as signals:
        with quiet_start() if view == "live" else contextlib.nullcontext():
            job = begin()
            if view == "live":
                await_start(job)
        # When PySpark starts it installs its own handler for Ctrl-C, which would cancel the running epoch.
        signals.attach(job, tell)
        try:
            watch(job, view, console, write=write)
        except (PenstockError, KeyboardInterrupt):
            raise
        except BaseException:
            # The view broke, for example because its reader has gone. The job is sound and ends in good order.
            job.stop()
            raise
        signals.join()
        status = job.status()
    for notice in getattr(job, "notices", ()):
        notes.print(f"note: {escape(notice)}", highlight=False, soft_wrap=True)
    if view != "json":
        console.print(
            f"{escape(status.flow)} {status.phase}: {short(status.rows)} rows in {status.epoch} epochs, "
            f"{duration_text(status.uptime_s)}.",
            highlight=False,
        )
    if signals.asked:
        notes.print(escape(resume), highlight=False, soft_wrap=True)


class _Signals:
    """Ctrl-C and SIGTERM while a job runs.

    Before there is a job there is nothing to save, and the first signal ends the command. While a job runs, the first
    signal asks it to stop. A thread of its own waits for the epoch, and the view goes on in this thread. A second
    signal raises KeyboardInterrupt here, whatever the job is doing.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._job: Any = None
        self._tell: Callable[[], None] = lambda: None
        self._before: dict[int, Any] = {}
        self._stopper: threading.Thread | None = None

    def __enter__(self) -> _Signals:
        self._install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def attach(self, job: JobLike, tell: Callable[[], None]) -> None:
        self._job, self._tell = job, tell
        self._install()

    def join(self) -> None:
        """Wait until ``stop`` returns. The job may have ended while its thread still tidies up."""
        if self._stopper is not None:
            self._stopper.join()

    def _install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(number, self._handle)
            self._before.setdefault(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked += 1
        if self._job is None or self.asked > 1:
            raise KeyboardInterrupt
        # The thread is a daemon: nothing may hold the command when the second signal ends it.
        self._stopper = threading.Thread(target=self._stop, name="penstock-stop", daemon=True)
        self._stopper.start()

    def _stop(self) -> None:
        self._tell()
        # An error while stopping is the job's failure. ``wait`` raises it to whoever watches the job.
        with contextlib.suppress(Exception):
            self._job.stop()


# --- a running job, from another process ---------------------------------------------------------------------------

_JOB_HELP = "The job's name, id, process number or checkpoint directory."


def _examples(*lines: str) -> str:
    """The examples below a command's help. Only an empty line keeps two examples apart there."""
    return "Examples:\n\n" + "\n\n".join(lines)


def _remote(job: str) -> Any:
    from penstock.engines.steering import RemoteJob, find_job

    notes = Console(stderr=True)
    return RemoteJob(find_job(job, note=lambda text: notes.print(f"note: {escape(text)}", soft_wrap=True)))


@app.command(epilog=_examples("penstock status", "penstock status top-words --watch", "penstock status state/ --json"))
def status(
    job: str | None = typer.Argument(None, metavar="[JOB]", help=_JOB_HELP + " Without JOB: all jobs."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON; with --watch one line a second."),
    watching: bool = typer.Option(
        False, "--watch", help="Follow the job until it ends; Ctrl-C ends the watching, not the job."
    ),
    plain: bool = typer.Option(False, "--plain", help="With --watch: plain lines, even in a terminal."),
    verbose: bool = typer.Option(False, "-v", "--verbose", help="Show tracebacks of errors."),
) -> None:
    """Show a running job's phase, epoch, rates, checkpoint, nodes and moves. Nothing is changed."""
    with _manners(verbose):
        if job is None:
            if watching:
                raise ConfigError("--watch needs the job to watch.", remedy="penstock status lists the running jobs.")
            _print_jobs(as_json)
            return
        remote = _remote(job)
        if watching:
            from penstock.observe.live import view_for, watch

            console = Console()
            with contextlib.suppress(KeyboardInterrupt):  # the watching ends, the job goes on
                watch(remote, view_for(console, plain=plain, as_json=as_json), console)
            return
        seen = remote.status()
        about = remote.contact.public()
        if as_json:
            print(json.dumps({**seen.to_dict(), "about": about}))
            return
        from penstock.observe.report import status_lines

        print("\n".join(status_lines(seen, about)))


def _print_jobs(as_json: bool) -> None:
    from penstock.engines.steering import RemoteJob, running_jobs
    from penstock.observe.live import duration_text, short
    from penstock.observe.report import columns

    listing = running_jobs()
    notes = Console(stderr=True)
    for note in listing.said():
        notes.print(f"note: {escape(note)}", highlight=False, soft_wrap=True)
    jobs = []
    for contact in listing.jobs:
        entry: dict[str, Any] = {**contact.public(), "phase": "on another machine" if contact.elsewhere() else ""}
        if not contact.elsewhere():
            try:
                seen = RemoteJob(contact, answer_s=5.0).status()
                entry |= {
                    "phase": seen.phase,
                    "epoch": seen.epoch,
                    "rows_s": seen.rows_s,
                    "uptime_s": seen.uptime_s,
                }
            except PenstockError as error:
                entry["phase"] = "does not answer"
                notes.print(f"note: {escape(str(error))}", highlight=False, soft_wrap=True)
        jobs.append(entry)
    if as_json:
        print(json.dumps(jobs))
        return
    if not jobs:
        print("No job of yours is running on this machine.")
        return
    rows = [
        (
            e["name"],
            e["job_id"] or "-",
            str(e["pid"]),
            e["phase"],
            str(e.get("epoch", "-")),
            short(e.get("rows_s", 0.0)),
            duration_text(e.get("uptime_s", 0.0)),
            e["checkpoint"] or "-",
        )
        for e in jobs
    ]
    print("\n".join(columns(("job", "id", "process", "phase", "epoch", "rows/s", "up", "checkpoint"), rows)))


@app.command(
    epilog=_examples(
        "penstock scale top-words --nodes +1",
        "penstock scale top-words --remove node-3 --dry-run",
        "penstock scale top-words --stage counts=4 --stage top=2",
        "penstock scale top-words --cores node-1=2",
    )
)
def scale(
    job: str = typer.Argument(..., metavar="JOB", help=_JOB_HELP),
    nodes: str | None = typer.Option(None, metavar="+N|-N", help="N nodes more or fewer."),
    remove: list[str] = typer.Option([], metavar="NODE", help="Empty this node and give it back; may be repeated."),
    stage: list[str] = typer.Option([], metavar="STAGE=N", help="Instances of a stage; may be repeated."),
    cores: list[str] = typer.Option([], metavar="NODE=N", help="Cores that the job uses of a node; may be repeated."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Say what would change, and change nothing."),
    verbose: bool = typer.Option(False, "-v", "--verbose", help="Show tracebacks of errors."),
) -> None:
    """Change the size of a running job: nodes, instances of a stage, or cores of a node."""
    with _manners(verbose):
        from penstock.engines.steering import parse_counts

        if sum(map(bool, (nodes, remove, stage, cores))) != 1:
            raise ConfigError(
                "scale needs exactly one of --nodes, --remove, --stage and --cores.",
                remedy="For example: penstock scale JOB --nodes +1",
            )
        asked: dict[str, Any] = {"dry_run": dry_run}
        if nodes:
            asked["nodes"] = _signed(nodes)
        if remove:
            asked["remove"] = remove
        if stage:
            asked["stages"] = parse_counts(stage, "--stage")
        if cores:
            asked["cores"] = parse_counts(cores, "--cores")
        print(_remote(job).change("scale", **asked))


def _signed(text: str) -> int:
    """The number of nodes with its sign. A bare number is refused: it could be a difference or a size."""
    if text[:1] in ("+", "-") and text[1:].isdecimal():
        return int(text)
    raise ConfigError(f"--nodes {text}: neither +N nor -N.", remedy="For example: --nodes +1, or --nodes -1")


@app.command(epilog=_examples("penstock migrate top-words counts 3,5,8-12 --to 1"))
def migrate(
    job: str = typer.Argument(..., metavar="JOB", help=_JOB_HELP),
    stage: str = typer.Argument(..., metavar="STAGE", help="The stage, or an operator in it."),
    slices: str = typer.Argument(..., metavar="SLICES", help="Which slices, as in 3,5,8-12."),
    to: int = typer.Option(..., metavar="CONTAINER", min=0, help="The container that shall own them."),
    verbose: bool = typer.Option(False, "-v", "--verbose", help="Show tracebacks of errors."),
) -> None:
    """Move slices of a stage to another container while the job runs."""
    with _manners(verbose):
        from penstock.engines.steering import parse_slices

        chosen = parse_slices(slices)
        print(_remote(job).change("migrate", stage=stage, slices=chosen, container=to))


@app.command(epilog=_examples("penstock rebalance top-words"))
def rebalance(
    job: str = typer.Argument(..., metavar="JOB", help=_JOB_HELP),
    cancel: bool = typer.Option(False, "--cancel", help="Cancel the moves that are under way."),
    verbose: bool = typer.Option(False, "-v", "--verbose", help="Show tracebacks of errors."),
) -> None:
    """Even out the load of a running job's containers by moving slices."""
    with _manners(verbose):
        print(_remote(job).change("cancel" if cancel else "rebalance"))


@app.command(epilog=_examples("penstock stop top-words", "penstock stop state/ --wait"))
def stop(
    job: str = typer.Argument(..., metavar="JOB", help=_JOB_HELP),
    wait: bool = typer.Option(False, "--wait", help="Return when the job has stopped."),
    verbose: bool = typer.Option(False, "-v", "--verbose", help="Show tracebacks of errors."),
) -> None:
    """Stop a running job in good order: finish the epochs under way, take a checkpoint, end."""
    with _manners(verbose):
        remote = _remote(job)
        said = remote.stop(wait=wait)
        if not wait:
            print(said)
            return
        seen = remote.status()
        print(f"{seen.job} {seen.phase} after epoch {seen.epoch}.")


# --- the journal ---------------------------------------------------------------------------------------------------


@app.command(
    epilog=_examples(
        "penstock journal state/ --incident",
        "penstock journal state/ --since 10m",
        "penstock journal s3://bucket/state --epoch 120..140",
        "penstock journal state/ --replay",
    )
)
def journal(
    place: str = typer.Argument(..., metavar="PLACE", help="The checkpoint directory of a job, running or not."),
    last: int | None = typer.Option(None, min=1, metavar="N", help="The last N lines (default: 40)."),
    since: str | None = typer.Option(None, metavar="TIME", help="What happened in the last 30s, 10m, 2h or 1d."),
    epoch: str | None = typer.Option(None, metavar="A..B", help="What happened around these epochs."),
    incident: bool = typer.Option(
        False, "--incident", help="Show the last incident: from a failure to the next new output."
    ),
    number: int | None = typer.Argument(
        None, metavar="N", min=1, help="With --incident: show this one instead of the last."
    ),
    follow: bool = typer.Option(False, "--follow", help="Show new lines as they come, until Ctrl-C."),
    as_json: bool = typer.Option(False, "--json", help="Every record as it is, one line of JSON each."),
    replaying: bool = typer.Option(
        False, "--replay", help="Play the journal through the controller and compare each step."
    ),
    everything: bool = typer.Option(False, "--all", help="Every event and command, the routine too."),
    verbose: bool = typer.Option(False, "-v", "--verbose", help="Show tracebacks of errors."),
) -> None:
    """Tell what happened to a job, why, and what the job did. Nothing is changed."""
    with _manners(verbose):
        from penstock.observe.journal import read_history
        from penstock.observe.story import Wanted, as_text, newest

        if number is not None and not incident:
            raise ConfigError(f"the number {number} says nothing here.", remedy="It belongs to --incident.")
        chosen = sum(x is not None and x is not False for x in (since, epoch, incident))
        if chosen > 1:
            raise ConfigError("--since, --epoch and --incident exclude each other.", remedy="Use one of them.")
        store = _journal_store(place)
        if replaying:
            history = read_history(store)
            _say_damaged(history.damaged)
            _print_replay(history, as_json)
            return
        last = last if last is not None or chosen else 40
        wanted = Wanted(
            last,
            None if since is None else int((time.time() - _seconds(since)) * 1000),
            None if epoch is None else _epoch_range(epoch),
            (number or 0) if incident else None,
            everything or as_json,
        )
        history, lines = newest(store, wanted)
        _say_damaged(history.damaged)
        shown = wanted.choose(lines)
        if incident and not shown:
            what = f"no incident {number}" if number else "no incident"
            print(f"There is {what} on record.", file=sys.stderr)
        if as_json:
            # Records come in the order of the lines. A record may have several lines and is printed once.
            steps = list(dict.fromkeys((line.start, line.step) for line in replace(wanted, last=None).choose(lines)))
            records = {(record.start, record.step): record for record in history}
            for step in steps[-last:] if last is not None else steps:
                print(json.dumps({"start": step[0], **records[step].raw}))
        else:
            for text in as_text(shown):
                print(text)
        if follow:
            with contextlib.suppress(KeyboardInterrupt):
                _follow_journal(store, history, everything, as_json)


def _journal_store(place: str) -> Any:
    """The store at ``place``. A place where no job has kept a journal is refused."""
    from penstock.connectors.store import FsspecStore, local_path
    from penstock.observe.journal import segments

    root = local_path(place)
    if root is not None and not os.path.isdir(root):
        raise ConfigError(f"{place}: there is no such directory.", remedy="Give a job's checkpoint directory.")
    store = FsspecStore(place)
    if not segments(store):
        if not store.exists("job.json"):
            raise ConfigError(f"{place}: no job has kept its state here.", remedy="Give a job's checkpoint directory.")
        raise ConfigError(
            f"{place}: there is no journal here yet.",
            remedy="A job writes it half a second after its start, unless journal_mb is 0.",
        )
    return store


def _say_damaged(damaged: Sequence[str]) -> None:
    for text in damaged:
        Console(stderr=True).print(f"note: skipped {escape(text)}", highlight=False, soft_wrap=True)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text.strip())
    if match is None:
        raise ConfigError(f"--since {text}: not a length of time.", remedy="For example 30s, 10m, 2h or 1d.")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[match[2]]


def _epoch_range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text.strip())
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise ConfigError(f"--epoch {text}: not a range of epochs.", remedy="For example 120 or 120..140.")
    return int(match[1]), int(match[2] or match[1])


def _print_replay(history: Any, as_json: bool) -> None:
    from penstock.observe.journal import replay

    found = replay(history)
    difference = found.difference.lines() if found.difference is not None else []
    if as_json:
        keys = {"steps": found.steps, "same": found.same, "skipped": found.skipped, "difference": difference}
        print(json.dumps(keys))
    else:
        if found.skipped:
            begin = f"; it begins at step {found.first[1]} of start {found.first[0]}" if found.first else ""
            print(f"{found.skipped} steps cannot be played: what led to them is no longer on record{begin}.")
        for version in found.written_by:
            print(f"Part of it was written by Penstock {version}, whose controller may have decided otherwise.")
        same = f"{found.steps} steps, all the same." if found.same else f"Different at the {found.steps}th step played:"
        print("\n".join([same, *difference]))
    if not found.same:
        raise typer.Exit(EXIT_FAILED)


def _follow_journal(store: Any, history: Any, everything: bool, as_json: bool) -> None:
    from penstock.observe.journal import read_history, segments
    from penstock.observe.story import Teller, as_text, incidents, tell

    seen = set(segments(store))
    tellers = {}
    for run in history.runs:
        tellers[run.start] = Teller(run, max(incidents(tell(history)), default=0), everything)
        for record in run.records:
            tellers[run.start].tell(record)
    while True:
        time.sleep(0.5)
        new = [name for name in segments(store) if name not in seen]
        seen |= set(new)
        part = read_history(store, new)
        _say_damaged(part.damaged)
        for run in part.runs:
            teller = tellers.setdefault(run.start, Teller(run, 0, everything))
            for record in run.records:
                if as_json:
                    print(json.dumps({"start": record.start, **record.raw}), flush=True)
                    continue
                for text in list(as_text(teller.tell(record)))[1:]:
                    print(text, flush=True)


# --- input that wedges a job --------------------------------------------------------------------------------------


@app.command(
    epilog=_examples(
        "penstock skip state/ --file in/broken.csv.gz",
        "penstock skip state/ --file in/a.csv --offset 1047",
        "penstock skip state/ --source pushed --offset 17:4",
        "penstock skip state/",
    )
)
def skip(
    place: str = typer.Argument(..., metavar="DIR", help="The checkpoint directory of a job that is stopped."),
    file: str | None = typer.Option(None, metavar="F", help="Leave out all of this file that is in no checkpoint yet."),
    offset: str | None = typer.Option(
        None, metavar="N", help="Leave out one record, at the place that its error or dead letter names."
    ),
    source: str | None = typer.Option(None, metavar="ID", help="Its source, if that is not clear."),
    verbose: bool = typer.Option(False, "-v", "--verbose", help="Show tracebacks of errors."),
) -> None:
    """Leave out input that a job cannot get past. Without --file and --offset: list the orders given."""
    with _manners(verbose):
        from penstock.engines.skipping import list_skips, order_skip

        if file is None and offset is None:
            print("\n".join(list_skips(place) or ["Nothing is left out."]))
        else:
            print("\n".join(order_skip(place, source=source, file=file, offset=offset)))


# --- demo, bench, doctor ------------------------------------------------------------------------------------------


@app.command()
def demo(
    master: str | None = typer.Option(None, help="Where Spark runs (default: this machine)."),
    executors: int | None = typer.Option(
        None, help="Run on N executors on this machine; one of them leaves, and another comes."
    ),
    seconds: float | None = typer.Option(None, help="Seconds that the demonstration runs."),
    plot: Path | None = typer.Option(None, metavar="FILE", help="Draw the run into this .png or .svg at the end."),
    plain: bool = typer.Option(False, "--plain", help="Status as plain lines, even in a terminal."),
    as_json: bool = typer.Option(False, "--json", help="Status as one line of JSON a second."),
    verbose: bool = typer.Option(False, "-v", "--verbose", help="Show tracebacks of errors."),
) -> None:
    """Watch the most frequent words of a sliding window, and the flow being rescaled while it runs."""
    with _manners(verbose):
        from penstock.demo import run_demo
        from penstock.observe.live import view_for

        view = view_for(Console(), plain=plain, as_json=as_json)
        run_demo(master=master, seconds=seconds, plot=plot, view=view, executors=executors)


@app.command()
def bench(
    name: str | None = typer.Argument(None, metavar="NAME", help="Which benchmark; --list shows them."),
    as_json: bool = typer.Option(False, "--json", help="Print exactly one JSON object and nothing else."),
    quick: bool = typer.Option(False, "--quick", help="Use a small size, to see that the benchmark works."),
    out: Path | None = typer.Option(None, metavar="FILE", help="Also write the result here: JSON, .png or .svg."),
    list_them: bool = typer.Option(False, "--list", help="List the benchmarks."),
    verbose: bool = typer.Option(False, "-v", "--verbose", help="Show tracebacks of errors."),
) -> None:
    """Run a benchmark against its peers on this machine."""
    with _manners(verbose):
        root = find_benchmarks()
        known = list_benchmarks(root)
        if list_them:
            _print_benchmarks(known, as_json)
            return
        if name is None:
            raise ConfigError("bench needs the name of a benchmark.", remedy="Benchmarks: " + ", ".join(known) + ".")
        name = name.replace("_", "-")
        if name not in known:
            raise ConfigError(f'There is no benchmark "{name}".', remedy="Benchmarks: " + ", ".join(known) + ".")
        with _standard_output(as_json) as write:
            if str(root) not in sys.path:
                sys.path.insert(0, str(root))
            module = importlib.import_module(f"benchmarks.{name.replace('-', '_')}")
            result = module.run(quick=quick, out=out)
            if write is not None:
                write(json.dumps(result))
        if not as_json:
            _print_result(result)


def find_benchmarks() -> Path:
    """The root of the source tree: the current directory, or the one this package was installed from."""
    for root in (Path.cwd(), Path(__file__).resolve().parents[2]):
        if any((root / "benchmarks").glob("*.py")):
            return root
    raise ConfigError(
        "The benchmarks are part of Penstock's source tree, and this is no checkout of it.",
        remedy="Clone the repository, run make setup there, and then .venv/bin/penstock bench.",
    )


def list_benchmarks(root: Path) -> dict[str, str]:
    """Name and summary of every module with a ``run``. Modules are parsed, not imported: a peer may be missing here."""
    found = {}
    for path in sorted((root / "benchmarks").glob("*.py")):
        if path.stem.startswith("_"):
            continue
        try:
            body = ast.parse(path.read_text(encoding="utf-8")).body
        except SyntaxError:
            continue
        if not any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in body):
            continue
        found[path.stem.replace("_", "-")] = _summary(body)
    return found


def _summary(body: Sequence[ast.stmt]) -> str:
    for node in body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == "SUMMARY" for target in targets):
            with contextlib.suppress(ValueError):
                return str(ast.literal_eval(node.value))  # type: ignore[attr-defined]
    return ""


def _print_benchmarks(known: Mapping[str, str], as_json: bool) -> None:
    if as_json:
        print(json.dumps(known))
        return
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, summary in known.items():
        table.add_row(f"[bold]{escape(name)}[/bold]", escape(summary))
    Console().print(table)


def _print_result(result: Mapping[str, Any]) -> None:
    from rich.table import Table

    console = Console()
    machine = result.get("machine", {})
    said = (
        ", ".join(f"{key} {value}" for key, value in machine.items()) if isinstance(machine, Mapping) else str(machine)
    )
    console.print(f"[bold]{escape(str(result.get('bench', '')))}[/bold]  [bright_black]{escape(said)}[/bright_black]")
    rows = [dict(row) for row in result.get("rows", ())]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if rows:
        table = Table(header_style="bright_black", box=None)
        for column in columns:
            numeric = any(isinstance(row.get(column), int | float) for row in rows)
            table.add_column(column.replace("_", " "), justify="right" if numeric else "left")
        for row in rows:
            ours = any("penstock" in str(value).lower() for value in row.values())
            table.add_row(*(_cell(row.get(column)) for column in columns), style="bold" if ours else "")
        console.print(table)
    ratios = result.get("ratios", {})
    if ratios:
        table = Table(header_style="bright_black", box=None)
        table.add_column("ratio")
        table.add_column("", justify="right")
        pairs = (
            ratios.items()
            if isinstance(ratios, Mapping)
            else [(entry.get("name"), entry.get("ratio")) for entry in ratios]
        )
        for key, value in pairs:
            table.add_row(escape(str(key)), f"[bold]{_cell(value)}[/bold]")
        console.print(table)
    for note in result.get("notes", ()):
        console.print(escape(str(note)), style="bright_black", highlight=False)


def _cell(value: Any) -> str:
    from penstock.observe.live import short

    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int | float):
        return f"{value:.2f}" if isinstance(value, float) and abs(value) < 10 else short(value)
    return escape(str(value))


@app.command()
def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    master: str = typer.Option("local[*]", help="The master that flows will run on."),
    verbose: bool = typer.Option(False, "-v", "--verbose", help="Show tracebacks of errors."),
) -> None:
    """Check whether this machine is ready for Penstock, and say what to do if it is not."""
    with _manners(verbose):
        from penstock.doctor import report, run_checks

        with _standard_output(as_json) as write:
            checks = run_checks(master)
            result = report(checks)
            if write is not None:
                write(json.dumps(result))
        if not as_json:
            _print_checks(checks)
        if not result["ok"]:
            raise typer.Exit(EXIT_FAILED)


def _print_checks(checks: Sequence[Any]) -> None:
    from rich.table import Table

    signs = {"ok": "[green]ok[/green]", "warn": "[yellow]warn[/yellow]", "fail": "[bold red]FAIL[/bold red]"}
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for check in checks:
        found = escape(check.found)
        if check.remedy:
            found += f"\n[cyan]-> {escape(check.remedy)}[/cyan]"
        table.add_row(signs[check.outcome], escape(check.name), found)
    console = Console()
    console.print(table)
    failed = sum(check.outcome == "fail" for check in checks)
    verdict = f"[bold red]Not ready: {failed} to correct.[/bold red]" if failed else "[bold green]Ready.[/bold green]"
    console.print(verdict)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Show the version and exit.")) -> None:
    if version:
        try:
            print("penstock", importlib.metadata.version("penstock"))
        except importlib.metadata.PackageNotFoundError:
            print("penstock (not installed)")
        raise typer.Exit


# --- manners ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _manners(verbose: bool) -> Iterator[None]:
    """Turn the errors of a command into a paragraph and a remedy on standard error, and the right exit code."""
    try:
        yield
    except PenstockError as error:
        if verbose:
            traceback.print_exc()
        print_error(error)
        raise typer.Exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("\nStopped.", highlight=False)
        _leave_at_once(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has gone. This is no error, but Python would complain when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise typer.Exit(EXIT_FAILED) from None
    except ImportError as error:
        if verbose:
            traceback.print_exc()
        missing = MachineError(
            f"A module is missing: {error}.", remedy="Run make setup, or pip install -r requirements.txt."
        )
        print_error(missing)
        raise typer.Exit(EXIT_FAILED) from None
    except Exception as error:
        if isinstance(error, typer.Exit):
            raise
        if verbose:
            traceback.print_exc()
        kind = type(error).__name__
        print_error(
            PenstockError(
                f"{kind}: {error}", remedy="This should not happen: run again with -v and report what it shows."
            )
        )
        raise typer.Exit(EXIT_FAILED) from None


def print_error(error: PenstockError) -> None:
    console = Console(stderr=True)
    console.print(f"[bold red]error:[/bold red] [red]{escape(error.message)}[/red]", highlight=False, soft_wrap=True)
    if error.remedy:
        console.print(f"[cyan]-> {escape(error.remedy)}[/cyan]", highlight=False, soft_wrap=True)


def _leave_at_once(code: int) -> None:
    """End the process now. Threads that wait for Spark would hold it otherwise. The JVM ends with our pipe to it."""
    sys.stdout.flush()
    sys.stderr.flush()
    if (steering := sys.modules.get("penstock.engines.steering")) is not None:
        steering.close_all()  # os._exit asks nobody
    os._exit(code)


@contextlib.contextmanager
def _standard_output(as_json: bool) -> Iterator[Callable[[str], None] | None]:
    """With ``as_json``, give a function that writes a line to standard output. Everything else goes to standard error.

    Java and Python workers write to file descriptor 1, past Python's ``sys.stdout``. So the descriptor is redirected.
    """
    if not as_json:
        yield None
        return
    stdout = sys.stdout
    stdout.flush()
    try:
        turned = stdout.fileno() == 1
    except (OSError, ValueError):
        turned = False
    saved = os.dup(1) if turned else -1
    output = open(saved, "w", encoding="utf-8", closefd=False) if turned else stdout

    def write(line: str) -> None:
        output.write(line + "\n")
        output.flush()

    if turned:
        os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield write
    finally:
        if turned:
            os.dup2(saved, 1)
            output.close()
            os.close(saved)


if __name__ == "__main__":
    main()
