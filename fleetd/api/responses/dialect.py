"""OpenAI's errors before a stream, but for the status of a full queue; in it, events that carry their names
and are numbered from 0."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from fleetd.api.http.dialect import ServerSentEvents, tag_of
from fleetd.api.http.openai_dialect import OpenAIDialect
from fleetd.api.responses.objects import Event
from fleetd.errors import FleetError, Overloaded


class _NumberedEvents(ServerSentEvents):
    """One stream. Events get their number when they are sent: they may be made in another order."""

    _sent = 0

    def frame(self, item: object) -> bytes:
        if isinstance(item, Event):
            item = msgspec.structs.replace(item, sequence_number=self._sent)
            self._sent += 1
        return super().frame(item)


class ResponsesDialect(OpenAIDialect):
    def status(self, error: FleetError) -> int:
        # Codex takes 429 for a quota that is used up and gives up; what is 500 or more it tries again.
        return HTTPStatus.SERVICE_UNAVAILABLE if isinstance(error, Overloaded) else error.status

    def stream(self) -> ServerSentEvents:
        return _NumberedEvents(self.error, event=tag_of)


RESPONSES = ResponsesDialect()
