"""Reads HTTP/1.x responses from bytes in any pieces. No I/O: a connection feeds it and looks at the result."""

from __future__ import annotations

import httptools

from specproxy.adapters.base import Headers, ResponseHead

__all__ = ["MAX_HEAD_BYTES", "ResponseReader"]

MAX_HEAD_BYTES = 256 * 1024  # of a response head, or of what follows the last body byte


class ResponseReader:
    """One response at a time; `begin` starts the next.

    After each `feed`, look at `head` (None until it is whole), `take_parts()` (body bytes of this feed, one
    item a piece of an upstream chunk), `complete`, and then `error`: what came before a fault is good.
    Interim 1xx responses are skipped.
    """

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.begin(bodiless=False)

    def begin(self, *, bodiless: bool) -> None:
        """Start on the next response; `bodiless`: its body is not sent, whatever its headers say (HEAD)."""
        self.heard = False  # any byte has come, of a 1xx response too
        self.head: ResponseHead | None = None
        self.complete = False
        self.trailers: Headers = ()
        self.error = ""  # why the bytes are not HTTP/1.x
        self.until_close = False  # the end of the connection is the end of the body
        self.reusable = False  # the connection may carry another request, once complete
        self._bodiless = bodiless
        self._parts: list[bytes] = []
        self._reason = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._loose_bytes = 0  # fed since the last body byte

    def feed(self, data: bytes) -> None:
        """Take in what was read; never raises."""
        self.heard = True
        before = len(self._parts)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.error = "switched protocols without being asked"
        except httptools.HttpParserError as error:
            self.error = str(error) or type(error).__name__
        if self.error:
            self.reusable = False
        if len(self._parts) > before:
            self._loose_bytes = 0
            return
        self._loose_bytes += len(data)
        if self._loose_bytes > MAX_HEAD_BYTES and not self.complete:
            self.error = self.error or f"more than {MAX_HEAD_BYTES} bytes of headers"

    def eof(self) -> bool:
        """The connection has ended; returns whether that completes the response."""
        if self.until_close and not self.error:
            self.complete = True
        return self.complete

    def take_parts(self) -> list[bytes]:
        """Body bytes since the last call."""
        parts, self._parts = self._parts, []
        return parts

    # --- httptools callbacks ---

    def on_message_begin(self) -> None:
        if self.complete:
            self.reusable = False  # bytes that nobody asked for

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        status = self._parser.get_status_code()
        headers, self._headers = tuple(self._headers), []
        reason, self._reason = self._reason, b""
        if status < 200:
            return
        self.head = ResponseHead(status, reason, headers, self._parser.get_http_version())
        if self._bodiless:
            self.complete = True
            self.reusable = self._parser.should_keep_alive()
            self._parser = httptools.HttpResponseParser(self)  # the old one waits for a body
        elif status not in (204, 304):
            names = {name.lower() for name, _ in headers}
            self.until_close = b"content-length" not in names and not self._chunked(headers)

    def on_body(self, data: bytes) -> None:
        if self.complete:
            self.reusable = False
        else:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        if self.complete or self.head is None:  # after the end, or a 1xx response
            return
        self.complete = True
        self.trailers = tuple(self._headers)
        self.reusable = self._parser.should_keep_alive()

    @staticmethod
    def _chunked(headers: Headers) -> bool:
        codings = b",".join(value for name, value in headers if name.lower() == b"transfer-encoding")
        return codings.lower().rstrip(b" \t").endswith(b"chunked")
