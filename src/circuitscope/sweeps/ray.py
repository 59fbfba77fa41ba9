"""The Ray executor: jobs are plain tasks of a Ray cluster, or of a Ray that is started for them on this machine.

Tasks get jobs as plain data and leave their runs on a disk that all nodes see. They are retried here and not by Ray, so
that a job whose worker or node dies is counted as in the local executor, and goes on from its resume point.
"""

import asyncio
import logging
import math
import os
import socket
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from circuitscope.errors import Stopped, UserError
from circuitscope.sweeps.executor import ONE_THREAD, PATIENCE, TRIES, Job, Moved, Telling, Watch, failed, run_job
from circuitscope.sweeps.local import cores
from circuitscope.sweeps.results import Row

Ref = Any
"""Ray's reference to what a task will give; Ray need not be installed to import this."""

News = dict[str, Any]
"""What a task says while it runs: {"started": digest} or {"moved": …}."""

_ANSWERS = 10.0  # seconds in which an address must answer
_MAILBOX = 30.0  # seconds to wait for the mailbox before jobs are started without it
_STORE = 100_000_000  # bytes of Ray's object store; rows are small


@dataclass
class RayExecutor:
    """Runs jobs on a Ray cluster.

    Args:
        address: of a cluster: auto, HOST:PORT or ray://HOST:PORT. Without it a Ray of this machine is started, and
            stopped at the end.
        workers: how many jobs run at once; by default as many as the cluster has room for.
        minutes: after this time no further job is started; those that run come to their end.
        cpus: cores of each job.
        gpus: GPUs of each job; several jobs share a GPU if this is a fraction.
    """

    address: str | None = None
    workers: int | None = None
    minutes: float | None = None
    cpus: float = 1.0
    gpus: float = 0.0

    def __call__(self, jobs: Sequence[Job], watch: Watch) -> Iterator[Row]:
        if not jobs:
            return
        with ExitStack() as stack:
            stack.enter_context(_connected(self.address, math.ceil((self.workers or cores()) * self.cpus)))
            self._check_room()
            token = stack.enter_context(_token({job.folder for job in jobs}))
            yield from _Crew(self, jobs, watch, token).rows()

    def _check_room(self) -> None:
        """Refuses jobs that no node can run: Ray would let them wait without a word."""
        import ray

        rooms = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(room.get("CPU", 0) >= self.cpus and room.get("GPU", 0) >= self.gpus for room in rooms):
            most = ", ".join(sorted({f"{room.get('CPU', 0):g} and {room.get('GPU', 0):g}" for room in rooms}))
            raise UserError(
                f"no node of Ray has {self.cpus:g} cores and {self.gpus:g} GPUs free for a job; nodes: {most}"
            )


@dataclass
class _Crew:
    """The tasks of one call of the executor."""

    executor: RayExecutor
    jobs: Sequence[Job]
    watch: Watch
    token: str
    running: dict[Ref, Job] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)

    def rows(self) -> Iterator[Row]:
        import ray

        waiting, tries = deque(self.jobs), dict.fromkeys((job.digest for job in self.jobs), 0)
        minutes, most = self.executor.minutes, self.executor.workers or len(self.jobs)
        deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
        task, mailbox = self._task(), self._mailbox()
        ray.wait([mailbox.here.remote()], timeout=_MAILBOX)  # or a short job has ended before anybody hears of it
        post: Ref | None = mailbox.take.remote()
        try:
            while True:
                if time.monotonic() >= deadline:
                    waiting.clear()
                    self._drop_those_that_wait()
                while waiting and len(self.running) < most:
                    job = waiting.popleft()
                    self.running[task.remote(job.plain(), self.token, mailbox)] = job
                if not self.running:
                    return
                refs = [*self.running, *([post] if post is not None else [])]
                timeout = min(max(deadline - time.monotonic(), 0.1), 3600)
                for ref in ray.wait(refs, num_returns=1, timeout=timeout)[0]:
                    if ref == post:
                        post = self._read(post, mailbox)
                        continue
                    job = self.running.pop(ref)
                    row = self._row(ref, job, tries)
                    if row is not None:
                        self._start(job.digest)
                        yield row
                    else:
                        self.started.discard(job.digest)
                        waiting.appendleft(job)
        finally:
            _stop(list(self.running))
            if post is not None:
                mailbox.tell.remote({})  # so that no task is left that waits for news
                ray.wait([post], timeout=2)
            ray.kill(mailbox)

    def _task(self) -> Any:
        import ray

        return ray.remote(
            num_cpus=self.executor.cpus,
            num_gpus=self.executor.gpus,
            max_retries=0,
            runtime_env={"env_vars": ONE_THREAD},
        )(work)

    def _mailbox(self) -> Any:
        """An actor that keeps what tasks say until the executor takes it; on the executor's node, if that is one."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
        if not (self.executor.address or "").startswith("ray://"):
            here = ray.get_runtime_context().get_node_id()
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(here, soft=True)
        return ray.remote(_Mailbox).options(**options).remote()

    def _read(self, post: Ref, mailbox: Any) -> Ref | None:
        """Passes on what tasks have said, and asks for what they say next."""
        import ray

        running = {job.digest for job in self.running.values()}
        try:
            for news in ray.get(post):
                digest = news.get("started") or news["moved"]["digest"]
                if digest in running:  # otherwise it comes too late
                    self._start(digest)
                    if "moved" in news:
                        self.watch.moved(Moved(**news["moved"]))
        except ray.exceptions.RayError:
            return None  # nobody sees progress any more; the jobs go on
        return mailbox.take.remote()

    def _start(self, digest: str) -> None:
        if digest not in self.started:
            self.started.add(digest)
            self.watch.started(digest)

    def _row(self, ref: Ref, job: Job, tries: dict[str, int]) -> Row | None:
        """What a task gave; None if the job is to be started again."""
        import ray

        found: Any
        try:
            found = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            return failed(job, f"its task failed: {' '.join(str(error.cause or error).split())}")
        except ray.exceptions.RayError as error:  # the worker or its node has died
            found = {"died": str(error).strip().partition("\n")[0]}
        if "unseen" in found:
            raise UserError(
                f"{found['unseen']} does not see {job.folder}: runs must be on a path that all nodes of Ray see;"
                " name one with --runs"
            )
        if "row" in found:
            return found["row"]  # type: ignore[no-any-return]
        tries[job.digest] += 1
        if tries[job.digest] < TRIES:
            return None
        return failed(job, f"its worker died {TRIES} times, the last time so: {found['died']}")

    def _drop_those_that_wait(self) -> None:
        """Takes back the tasks that Ray has not started yet."""
        waiting = [ref for ref, job in self.running.items() if job.digest not in self.started]
        _stop(waiting)
        for ref in waiting:
            del self.running[ref]


def work(plain: dict[str, Any], token: str, mailbox: Any) -> dict[str, Any]:
    """The task: brings a job to its end on a node of the cluster.

    Gives {"row": …}, or {"unseen": host} if this node does not see the job's folder, or {"died": why} if a signal
    stopped the job.
    """
    job = Job(**plain)
    if not _sees(Path(job.folder) / token):
        return {"unseen": socket.gethostname()}
    mailbox.tell.remote({"started": job.digest})
    with Telling(job, lambda moved: mailbox.tell.remote({"moved": asdict(moved)})) as progress:
        try:
            return {"row": run_job(job, progress, patience=PATIENCE)}
        except Stopped as stop:
            return {"died": str(stop)}


def _sees(path: Path, seconds: float = 5.0) -> bool:
    """Whether a file is there; a network file system may show it a moment late."""
    until = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


class _Mailbox:
    """Keeps news until somebody takes them."""

    def __init__(self) -> None:
        self.news: list[News] = []
        self.arrived = asyncio.Event()

    async def here(self) -> None:
        """Returns as soon as the mailbox has been made."""

    async def tell(self, news: News) -> None:
        self.news.append(news)
        self.arrived.set()

    async def take(self) -> list[News]:
        """All news since the last time; waits until there are some."""
        await self.arrived.wait()
        self.arrived.clear()
        taken, self.news = self.news, []
        return taken


def _stop(refs: list[Ref]) -> None:
    """Ends tasks: those that run save their run first, so that it can be continued."""
    import ray

    for ref in refs:
        ray.cancel(ref, force=False)
    left = ray.wait(refs, num_returns=len(refs), timeout=PATIENCE)[1] if refs else []
    for ref in left:
        ray.cancel(ref, force=True)


@contextmanager
def _connected(address: str | None, cpus: int) -> Iterator[None]:
    """Connects to a cluster, or starts a Ray of this machine, and lets it go at the end.

    A connection that exists already is used and stays.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise UserError("Ray is not installed; install it with: pip install 'circuitscope[ray]'") from None
    if ray.is_initialized():
        yield
        return
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        quiet |= {"num_cpus": cpus, "object_store_memory": _STORE, "include_dashboard": False}
        quiet["_system_config"] = {
            "worker_niceness": 0
        }  # trials run as they do without Ray, also beside other programs
    else:
        _check_answers(address)
    try:
        ray.init(address or "local", **quiet)
    except Exception as error:  # Ray raises whatever its parts raise
        where = f"at {address}" if address else "on this machine"
        raise UserError(f"cannot start with Ray {where}: {str(error).strip().partition(chr(10))[0]}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Refuses an address at which nothing answers; Ray itself would try for minutes, and print what it tries."""
    if address == "auto":
        return  # Ray looks for a cluster on this machine, which takes no time
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise UserError(f"no address of Ray: {address}; expected auto, HOST:PORT or ray://HOST:PORT")
    import grpc

    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWERS):
            pass
        if os.environ.get("RAY_USE_TLS", "0") == "0":
            with grpc.insecure_channel(f"{host}:{port}") as channel:
                grpc.channel_ready_future(channel).result(timeout=_ANSWERS)
    except (OSError, UnicodeError, grpc.FutureTimeoutError):
        raise UserError(
            f"no Ray answers at {address}; start one with: ray start --head, or leave out --address"
        ) from None


@contextmanager
def _token(folders: set[str]) -> Iterator[str]:
    """The name of a file that is put into folders, so that tasks can tell whether they see the same folders."""
    name = f".seen-{uuid.uuid4().hex}"
    paths = [Path(folder) / name for folder in sorted(folders)]
    try:
        for path in paths:
            try:
                path.touch()
            except OSError as error:
                raise UserError(f"cannot write to {path.parent}: {error.strerror}") from None
        yield name
    finally:
        for path in paths:
            with suppress(OSError):
                path.unlink(missing_ok=True)
