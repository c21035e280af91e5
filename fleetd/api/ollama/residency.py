"""``keep_alive``: how long a model of this machine stays loaded, and until when it does."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from aiohttp import web

from fleetd.api.http import token
from fleetd.api.http.context import SERVICES
from fleetd.api.model_list import one_model
from fleetd.api.ollama.render import timestamp
from fleetd.control.daemon_status import EngineStatus
from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.errors import FleetError, ModelCorrupt, ModelNotFound
from fleetd.models import file_threads

# "For ever", for clients that read a date: a calendar has not all the seconds that may be asked for.
_FOREVER_S = 36_500 * 86_400.0


async def keep(request: web.Request, model: str, seconds: float | None) -> bool:
    """Let a model stay for so many seconds after its last request; infinite for ever, None as it is.

    False for a model that is not loaded here: one of another machine stays as its settings have it.
    """
    if seconds is None:
        return False
    token.check_model(request, model)
    services = request.app[SERVICES]
    name = services.names.here(model)
    try:
        name = (await file_threads.look(services.models.resolve, name)).name
    except (ModelNotFound, ModelCorrupt):
        pass  # one whose folder is gone may still be loaded
    except FleetError:
        return False
    return services.pool.keep(name, seconds)


async def unload(request: web.Request, model: str) -> None:
    """Unload a model of this machine. Raises ModelNotFound for one that no machine has."""
    if not await keep(request, model, 0):
        await one_model(request.app[SERVICES], model)


def expires_at(pool: EnginePool, engine: EngineStatus) -> str:
    """When an idle model is unloaded, if nothing asks for it until then."""
    left_s = pool.stays_s(engine.model) - engine.idle_s
    return timestamp(datetime.now(UTC) + timedelta(seconds=min(max(0.0, left_s), _FOREVER_S)))
