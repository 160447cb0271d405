"""Chooses the hub for a model: the named one, otherwise each in turn until one has it.

A hub that does not answer, or has no such repository, is passed over, and that is said. One that has it and gives it
only to those who accept its licence is not: whoever made the model is to be asked first, wherever copies lie.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ktcli.errors import Gated, HubError, KtError, NotFound, UsageError
from ktcli.store import catalog
from ktcli.store.hubs import Hub, Snapshot, hub_named
from ktcli.store.profile import HUBS
from ktcli.store.reference import Reference, parse
from ktcli.store.retrying import Tell, silent, with_retries


def look(reference: Reference, *, tell: Tell = silent) -> tuple[Hub, Snapshot]:
    """Asks the hubs of a reference in turn for its repository; returns the first hub that has it, and the repository's
    snapshot (revision and files) there.

    Args:
        tell: is given a sentence when a hub is waited for, or passed over.
    Raises:
        Gated: a hub has it, and wants a licence to be accepted first.
        NotFound, HubError: no hub has it, or none responds.
    """
    failed: list[KtError] = []
    known = candidates(reference)
    for i, (name, repository) in enumerate(known):
        client = hub_named(name)
        try:
            ask = partial(client.look, repository, reference.revision)
            return client, with_retries(ask, tell)
        except Gated:
            raise
        except (NotFound, HubError) as error:
            failed.append(error)
            if i + 1 < len(known):
                following, other = known[i + 1]
                tell(f"{error}; trying {other} on {HUBS[following]} …")
    first = failed[0]
    if len(failed) == 1:
        raise first
    servers = "check the network, then run the command again; HF_ENDPOINT and MODELSCOPE_ENDPOINT name other servers"
    hint = first.hint if isinstance(first, NotFound) else servers
    raise type(first)("; ".join(str(each) for each in failed), hint=hint)


def candidates(reference: Reference) -> tuple[tuple[str, str], ...]:
    """Returns the hubs to ask for a model, in that order: pairs of the hub's short name ("hf", "ms") and the id of the
    repository there.
    """
    first = (reference.hub, reference.repository)
    if not reference.anywhere:
        return (first,)
    others = _elsewhere(reference)
    return (first, *(each for each in others.items() if each[0] != reference.hub))


def only_from(reference: Reference, hub: str) -> Reference:
    """Returns a reference to the same model that is looked for on one hub ("hf" or "ms") only.

    Raises:
        UsageError: the reference names no model on a hub, or one on another hub, or kt does not know the model's id
            there.
    """
    if not reference.repository:
        raise UsageError(
            f"--from: {reference.text} is not the name of a model on a hub",
            hint="leave out --from, or write org/repo",
        )
    if not reference.anywhere and reference.hub != hub:
        raise UsageError(
            f"--from: {reference.text} is on {HUBS[reference.hub]}, not on {HUBS[hub]}",
            hint="leave out --from, or write org/repo",
        )
    if (profile := catalog.find(reference.name)) is None:
        return reference if reference.hub == hub else parse(f"{hub}:{reference.lasting}")
    if hub not in profile.repositories:
        raise UsageError(
            f"--from: kt does not know a repository of {profile.name} on {HUBS[hub]}",
            hint=f"kt search {profile.name} --from {hub} looks for one",
        )
    repository = profile.repositories[hub]
    return replace(reference, hub=hub, repository=repository, anywhere=False)


def _elsewhere(reference: Reference) -> dict[str, str]:
    """The ids of a model on all hubs; of one that kt does not know, the same id."""
    if (profile := catalog.find(reference.name)) is not None:
        return dict(profile.repositories)
    for each in catalog.published():
        if each.repositories.get(reference.hub) == reference.repository:
            return dict(each.repositories)
    return dict.fromkeys(HUBS, reference.repository)
