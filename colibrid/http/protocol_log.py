"""What aiohttp says about connections, without what clients sent: their bytes may hold keys, or fill the log."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import structlog
from aiohttp.http_exceptions import HttpProcessingError

if TYPE_CHECKING:
    from collections.abc import Mapping

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class ProtocolLogger(logging.Logger):
    """Takes the place of the logger `aiohttp.server`."""

    def __init__(self) -> None:
        super().__init__("colibrid.http.protocol", logging.WARNING)

    def exception(
        self,
        msg: object,
        *args: object,
        exc_info: logging._ExcInfoType = True,
        stack_info: bool = False,
        stacklevel: int = 1,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        """Bytes that are no HTTP are the client's mistake, as is leaving early: one line when debugging; all else is ours."""
        del args, stack_info, stacklevel, extra
        error = exc_info if isinstance(exc_info, BaseException) else sys.exception()
        if isinstance(error, HttpProcessingError):
            _log.debug("bad_http", kind=type(error).__name__)
        elif isinstance(error, ConnectionError):
            _log.debug("client_gone", kind=type(error).__name__)
        else:
            _log.error("connection_broken", message=str(msg), exc_info=exc_info)
