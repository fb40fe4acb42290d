"""A request for one extent -> chunks that a few threads move, and a handle to wait for the last of them."""

import contextlib
import threading
import time
from queue import SimpleQueue

from counterpoint.core.errors import ExecutionError
from counterpoint.runtime.disk_file import File


class Transfer:
    """One read or write under way. Its memory must not be touched, nor its key asked for again, until it is done."""

    def __init__(self, file: File, write: bool, key: str, view: memoryview, offset: int) -> None:
        self.key = key
        self.write = write
        self.num_bytes = len(view)
        self.started_ns = 0
        self.finished_ns = 0
        self._file = file
        self._view = view
        self._offset = offset
        self._claimed_bytes = 0
        self._num_open = 0
        self._error: ExecutionError | None = None
        self._lock = threading.Lock()
        self._finished = threading.Event()

    def done(self) -> bool:
        return self._finished.is_set()

    def exception(self) -> ExecutionError | None:
        """Why it failed, if it has; None while it is under way."""
        return self._error if self.done() else None

    def wait(self, timeout_ns: int | None = None) -> None:
        """Return when every byte has been moved; raise if one could not be."""
        if not self._finished.wait(None if timeout_ns is None else timeout_ns / 1e9):
            raise TimeoutError(f"{self._verb()} of {self.key!r} ({self.num_bytes} bytes) is still under way")
        if self._error is not None:
            raise self._error

    def run(self, chunk_bytes: int) -> int:
        """Move the next chunk; the number of bytes moved, 0 if none was left or it failed."""
        start = self._claim(chunk_bytes)
        if start is None:
            return 0
        chunk = self._view[start : start + chunk_bytes]
        num_bytes = len(chunk)
        error = self._move(chunk, self._offset + start)
        chunk.release()
        self._settle(error)
        return 0 if error else num_bytes

    def cancel(self, reason: str) -> None:
        """Claim no further chunk; done as soon as no thread is within one."""
        with self._lock:
            if not self.done() and self._claimed_bytes < self.num_bytes:
                self._fail(ExecutionError(f"{self._verb()} of {self.key!r} was cancelled: {reason}"))

    def _claim(self, chunk_bytes: int) -> int | None:
        with self._lock:
            start = self._claimed_bytes
            if start >= self.num_bytes or self._error is not None:
                return None
            self.started_ns = self.started_ns or time.perf_counter_ns()
            self._claimed_bytes += chunk_bytes
            self._num_open += 1
            return start

    def _move(self, chunk: memoryview, offset: int) -> ExecutionError | None:
        try:
            if self.write:
                self._file.write(chunk, offset)
            else:
                self._file.read(chunk, offset)
        except BaseException as error:  # a waiter must hear of whatever went wrong here
            return self._file.explain(error, self._verb(), self.key, offset, len(chunk))
        return None

    def _settle(self, error: ExecutionError | None) -> None:
        with self._lock:
            self._num_open -= 1
            if error is not None and self._error is None:
                self._error = error
            self._finish_if_complete()

    def _fail(self, error: ExecutionError) -> None:
        self._error = error
        self._finish_if_complete()

    def _finish_if_complete(self) -> None:
        if self._num_open == 0 and (self._error is not None or self._claimed_bytes >= self.num_bytes):
            self.finished_ns = time.perf_counter_ns()
            self._view.release()
            self._finished.set()

    def _verb(self) -> str:
        return "write" if self.write else "read"


class Threads:
    """A few threads for one direction. All share a large transfer; transfers under way take turns, chunk by chunk."""

    def __init__(self, name: str, num_threads: int, chunk_bytes: int) -> None:
        self.moved_bytes = 0
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._closed = False
        self._queue: SimpleQueue[Transfer | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            for index in range(num_threads):
                thread = threading.Thread(target=self._serve, name=f"counterpoint-{name}-{index}", daemon=True)
                thread.start()
                self._threads.append(thread)
            stack.pop_all()

    def submit(self, transfer: Transfer) -> None:
        num_chunks = -(-transfer.num_bytes // self._chunk_bytes)
        with self._lock:
            if self._closed:
                raise ExecutionError(f"the disk is closed: {transfer.key!r} cannot be moved; open it again")
            for _ in range(min(num_chunks, len(self._threads))):
                self._queue.put(transfer)

    def close(self) -> None:
        """Finish the chunks under way, cancel the rest, end the threads."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in self._threads:
                self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> "Threads":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _serve(self) -> None:
        while (transfer := self._queue.get()) is not None:
            moved = 0 if self._closed else transfer.run(self._chunk_bytes)
            with self._lock:
                self.moved_bytes += moved
                if self._closed:
                    transfer.cancel("the disk was closed")
                elif moved:
                    self._queue.put(transfer)
            del transfer  # an idle thread must not keep its last transfer's memory
