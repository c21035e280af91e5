"""The comment in a stream while there is no text yet: how far loading or prefill has come. Pure."""

from __future__ import annotations

from fleetd.control.model_change import MemberProgress
from fleetd.engine.protocol import Accepted, Event, Loading, Prefill, Tokenized


class ProgressComments:
    """Folds events of all choices into one comment.

    ``: loading STAGE done/total`` while a model is fetched or loaded, with ``; MACHINE: STAGE done/total`` in
    bytes for each other machine of a model over several, then ``: keepalive done/total`` in prompt tokens,
    summed over the choices. The counts never shrink, so a progress bar never jumps back.
    """

    def __init__(self) -> None:
        self._loading: Loading | None = None
        self._done: dict[int, int] = {}
        self._total: dict[int, int] = {}

    def feed(self, index: int, event: Loading | Event) -> bool:
        """Take an event; True if it changed the comment."""
        match event:
            case Loading():
                self._loading = event
            case Tokenized() | Accepted():
                self._loading = None
                self._total[index] = event.prompt_tokens
            case Prefill():
                self._loading = None
                self._total[index] = event.total
                self._done[index] = max(event.done, self._done.get(index, 0))
            case _:
                return False
        return True

    def comment(self) -> str:
        if self._loading is not None:
            # A newline would end the comment and start a field.
            stage = " ".join(self._loading.stage.split()) or "model"
            members = "".join(f"; {_member(each)}" for each in self._loading.members)
            return f"loading {stage} {self._loading.done}/{self._loading.total}{members}"
        return f"keepalive {sum(self._done.values())}/{sum(self._total.values())}"


def _member(member: MemberProgress) -> str:
    """A name is whatever its owner typed: here it holds none of the marks between members."""
    name = " ".join(member.name.replace(";", " ").replace(":", " ").split())
    stage = " ".join(member.stage.replace(";", " ").split())
    return f"{name}: {stage} {member.done_bytes}/{member.total_bytes}"
