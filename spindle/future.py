"""The one future type of the public API: thread-safe, blocking ``result()``, and awaitable from any event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")

__all__ = ["Future", "failed"]


class Future(concurrent.futures.Future, Generic[T]):
    """``concurrent.futures.Future`` that can also be awaited. ``cancel()`` stops work that has not started."""

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()

    def settle(self, value: T) -> None:
        """Set the result unless the future is already settled or cancelled."""
        try:
            self.set_result(value)
        except concurrent.futures.InvalidStateError:
            pass

    def fail(self, error: BaseException) -> None:
        """Set the exception unless the future is already settled or cancelled."""
        try:
            self.set_exception(error)
        except concurrent.futures.InvalidStateError:
            pass

    def then(self, function: Callable[[T], U], executor: concurrent.futures.Executor | None = None) -> Future[U]:
        """A future of ``function(result)``, run in ``executor`` or else in the completing thread. Cancelling it cancels this one."""
        following: Future[U] = Future()

        def run(value: T) -> None:
            try:
                following.settle(function(value))
            except BaseException as error:  # the waiter must learn of anything that went wrong
                following.fail(error)

        def done(first: concurrent.futures.Future) -> None:
            if first.cancelled():
                concurrent.futures.Future.cancel(following)
            elif (error := first.exception()) is not None:
                following.fail(error)
            elif executor is None:
                run(first.result())
            else:
                try:
                    executor.submit(run, first.result())
                except RuntimeError:  # the executor is shut down: finish here rather than never
                    run(first.result())

        self.add_done_callback(done)
        following._upstream = self  # type: ignore[attr-defined]
        return following

    def cancel(self) -> bool:
        upstream = getattr(self, "_upstream", None)
        if upstream is not None and not self.done():
            return upstream.cancel()
        return super().cancel()


def failed(error: BaseException) -> Future[Any]:
    """A future that has already failed."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future
