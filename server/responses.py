"""Answers that end when their client is gone."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Mapping

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from server.errors import ApiError, bad_request


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, if it is JSON and not too large.

    Raises:
        ApiError: If it is not.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise bad_request(
            f"the content type is {kind or 'missing'}; it must be application/json", "content-type"
        )
    too_large = ApiError(
        413,
        f"the body is larger than {max_bytes} bytes; the server's --max-body-bytes says how large "
        "it may be",
        kind="RequestEntityTooLarge",
    )
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise too_large
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > max_bytes:
            raise too_large
        pieces.append(piece)
    return b"".join(pieces)


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has gone; the body must have been read."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


async def unless_gone[Result](receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client goes.

    Raises:
        ClientDisconnect: If it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


class EventStream:
    """Server-sent events, pulled as fast as the client reads them.

    A client that reads nothing for `patience_s` is taken for gone.
    """

    def __init__(
        self,
        first: asyncio.Future[bytes],
        events: AsyncGenerator[bytes],
        *,
        headers: Mapping[str, str],
        patience_s: float,
        keep_alive_s: float = 0.0,
    ):
        """Takes the first event, or what will be it: the status depends on whether there is one."""
        self._first, self._events = first, events
        self._headers = dict(headers) | {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # of proxies, which would hold events back
        }
        self._patience_s, self._keep_alive_s = patience_s, keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events; returns early if the client goes."""
        try:
            await unless_gone(receive, self._send_all(send))
        except (ClientDisconnect, TimeoutError, OSError):
            pass
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in self._headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if self._keep_alive_s:
            try:
                await self._send_with_comments(send)
            except ApiError as error:  # too late for a status
                body = json.dumps(error.body, separators=(",", ":"))
                await self._send(send, f"data: {body}\n\ndata: [DONE]\n\n".encode())
        else:
            await self._send(send, self._first.result())
            async for event in self._events:
                await self._send(send, event)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_with_comments(self, send: Send) -> None:
        """So that proxies do not take a long prompt for a dead connection."""
        following: asyncio.Future[bytes] | None = self._first
        while True:
            following = following or asyncio.ensure_future(_next(self._events))
            try:
                done, _ = await asyncio.wait({following}, timeout=self._keep_alive_s)
            except asyncio.CancelledError:
                following.cancel()
                await asyncio.wait({following})
                raise
            if not done:
                await self._send(send, b": keep-alive\n\n")
                continue
            try:
                event = following.result()
            except StopAsyncIteration:
                return
            following = None
            await self._send(send, event)

    async def _send(self, send: Send, body: bytes) -> None:
        message: Message = {"type": "http.response.body", "body": body, "more_body": True}
        async with asyncio.timeout(self._patience_s):
            await send(message)


async def _next(events: AsyncGenerator[bytes]) -> bytes:
    return await anext(events)


async def first_event(
    receive: Receive, events: AsyncGenerator[bytes], *, timeout_s: float | None
) -> asyncio.Future[bytes]:
    """The first event, waited for as long as the client does and no longer than `timeout_s`.

    Raises:
        ApiError: If there is an error instead.
        ClientDisconnect: If the client went.
    """
    first = asyncio.ensure_future(_next(events))
    try:
        await unless_gone(receive, asyncio.wait({first}, timeout=timeout_s))
        if first.done():
            first.result()
        return first
    except BaseException:
        first.cancel()
        await asyncio.wait({first})
        await events.aclose()
        raise
