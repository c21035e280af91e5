"""The models of the fleet, as OpenAI's clients read them; other dialects make their lists from this one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, cast

from msgspec import UNSET, Meta, Struct, UnsetType

from fleetd.api.http.services import Services
from fleetd.control.model_facts import ModelPurpose, ModelShape
from fleetd.engine.protocol import Ready
from fleetd.errors import ModelNotFound
from fleetd.models import file_threads
from fleetd.models.abilities import ModelAbilities, of_files
from fleetd.models.catalog import CatalogEntry, find
from fleetd.models.folder import ModelFolder
from fleetd.models.model_names import untagged
from fleetd.models.names import is_name
from fleetd.requests.job import THIS_NAME

ModelState = Literal["installed", "loading", "loaded"]
_UNKNOWN = ModelShape()


class ModelPlace(Struct, frozen=True):
    """A machine that has a model."""

    node: Annotated[str, Meta(description='The machine\'s name; "this" is the machine that was asked.')]
    state: ModelState


class ModelDetails(Struct, frozen=True):
    """What OpenAI's object has no field for."""

    source: Annotated[
        str,
        Meta(description='Where its files are; "fleet" or "catalog" for a model that is not installed here.'),
    ]
    architecture: str
    context_tokens: int
    weights_bytes: int
    loaded: Annotated[bool, Meta(description="The machine that was asked has it in memory.")]
    installed: Annotated[bool, Meta(description="The machine that was asked has its files.")]
    nodes: Annotated[
        list[ModelPlace], Meta(description="Every machine that can answer with the model now.")
    ] = []
    tools: Annotated[
        str,
        Meta(
            description='The format in which it writes tool calls; "grammar" if it is told one and held to '
            'it; "" if it can make none or this is not known.'
        ),
    ] = ""
    thinking: Annotated[bool, Meta(description="The model can reason before it answers.")] = False
    images: Annotated[bool, Meta(description="A user's messages may have images.")] = False
    purpose: Annotated[
        ModelPurpose,
        Meta(description="What it is asked for: chats, vectors of texts, or scores of documents."),
    ] = "chat"
    vector_width: Annotated[
        int, Meta(description="Numbers in a vector; 0 if it makes none or this is not known.")
    ] = 0


class ModelObject(Struct, frozen=True, kw_only=True):
    """A model of the fleet."""

    id: str
    object: Literal["model"] = "model"
    created: Annotated[
        int, Meta(description="Seconds since 1970: when its files were installed; 0 if they are not.")
    ]
    owned_by: str
    context_length: Annotated[
        int | UnsetType,
        Meta(description="Tokens, under OpenRouter's name; absent if no machine here knows the number."),
    ] = UNSET
    max_model_len: Annotated[int | UnsetType, Meta(description="The same, under vLLM's name.")] = UNSET
    fleet: ModelDetails


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelObject]


def abilities(
    path: Path | None, entry: CatalogEntry | None = None, facts: Ready | None = None
) -> ModelAbilities:
    """What a model can do besides answer: from ``facts`` of a worker that has it loaded, which knows best, or
    else from the files in ``path``."""
    if facts is not None:
        tools = facts.tool_format if facts.tool_calls else ""
        return ModelAbilities(tools, facts.reasoning, facts.has_chat_template)
    return of_files(path, entry)


async def one_model(services: Services, name: str) -> ModelObject:
    """The model that a request for ``name`` would get. Raises ModelNotFound."""
    asked = untagged(services.names.named(name))
    try:
        folder = await file_threads.look(services.models.in_part, asked)
        files = await file_threads.look(_files_of, folder, services.pool.facts(folder.name))
    except ModelNotFound:
        real = services.names.alias(asked)
        canonical = entry.name if (entry := find(real or asked)) is not None else real or asked
        found = [model for model in await all_models(services) if model.id in (asked, canonical)]
        if not found:
            raise
        return found[0]
    return _describe(folder, files, loaded_models(services), elsewhere(services))


async def all_models(services: Services) -> list[ModelObject]:
    """Each model of the fleet once."""
    folders = await file_threads.look(services.models.answerable)
    facts = {folder.name: services.pool.facts(folder.name) for folder in folders}
    files = await file_threads.look(lambda: [_files_of(each, facts[each.name]) for each in folders])
    loaded, others = loaded_models(services), elsewhere(services)
    found = [_describe(folder, each, loaded, others) for folder, each in zip(folders, files, strict=True)]
    here = {model.id for model in found}
    if services.names.default not in here | set(others):
        found.insert(0, _absent(services.names.default, []))
    shapes = _shapes_elsewhere(services)
    found += [
        _absent(name, places, shapes.get(name, _UNKNOWN))
        for name, places in sorted(others.items())
        if name not in here
    ]
    return found


def _shapes_elsewhere(services: Services) -> dict[str, ModelShape]:
    """Model name → what a peer says it is."""
    peers = services.fleet.view().peers
    return {model.name: model.shape for peer in peers for model in peer.models}


def elsewhere(services: Services) -> dict[str, list[ModelPlace]]:
    """Model name → the peers that can answer with it now: usable, and allowed to see prompts."""
    found: dict[str, list[ModelPlace]] = {}
    for peer in services.fleet.view().peers:
        if peer.usable and peer.sees_prompts:
            for model in peer.models:
                if not is_name(model.name):
                    continue  # an earlier version's, which could not be asked for
                found.setdefault(model.name, []).append(
                    ModelPlace(peer.name, cast("ModelState", model.state))
                )
    return found


def loaded_models(services: Services) -> frozenset[str]:
    return frozenset(engine.model for engine in services.status().engines if engine.state == "ready")


def _files_of(folder: ModelFolder, facts: Ready | None) -> tuple[ModelShape, ModelAbilities]:
    """What is read from a model's files for ``_describe``, which runs where no file may be read."""
    return folder.shape, abilities(folder.path, find(folder.name), facts)


def _describe(
    folder: ModelFolder,
    files: tuple[ModelShape, ModelAbilities],
    loaded: frozenset[str],
    others: Mapping[str, list[ModelPlace]],
) -> ModelObject:
    owner, slash, _ = folder.name.partition("/")
    here = ModelPlace(THIS_NAME, "loaded" if folder.name in loaded else "installed")
    shape, able = files
    return ModelObject(
        id=folder.name,
        created=int(folder.created_s),
        owned_by=owner if slash and owner else "fleetd",
        context_length=shape.context_tokens,
        max_model_len=shape.context_tokens,
        fleet=ModelDetails(
            source=folder.source,
            architecture=folder.architecture,
            context_tokens=shape.context_tokens,
            weights_bytes=folder.weights_bytes,
            loaded=folder.name in loaded,
            installed=True,
            nodes=[here, *others.get(folder.name, [])],
            tools=able.shown_tools,
            thinking=able.thinking,
            images=folder.images,
            purpose=shape.purpose,
            vector_width=shape.vector_width,
        ),
    )


def _absent(name: str, places: list[ModelPlace], shape: ModelShape = _UNKNOWN) -> ModelObject:
    """A model that is not on this machine, as far as the catalog and the machines that have it know it."""
    source = "fleet" if places else "catalog"
    entry = find(name)
    able = abilities(None, entry)
    context = shape.context_tokens or (entry.context_tokens if entry is not None else 0)
    details = ModelDetails(
        source,
        "",
        context,
        0,
        loaded=False,
        installed=False,
        nodes=places,
        tools=able.shown_tools,
        thinking=able.thinking,
        images=shape.images,
        purpose=entry.purpose if entry is not None else shape.purpose,
        vector_width=shape.vector_width,
    )
    return ModelObject(
        id=name,
        created=0,
        owned_by="fleetd",
        context_length=context or UNSET,
        max_model_len=context or UNSET,
        fleet=details,
    )
