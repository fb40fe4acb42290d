"""A place's finished gradients into the end of a step: all-reduce, norm, clip and update.

Collectives keep one order on every device, so that none waits for another in a circle: first those among replicas, pack
by pack, then those of tied layers in descending order, then the clip.
"""

from counterpoint.core.task import AllReduce, Backward, Clip, Norm, Task, Update
from counterpoint.schedules.places import Place, updates_layer


def settle(place: Place, pack: Backward) -> list[Task]:
    """What follows a pack's last backward at once: its update, or with clipping its norm."""
    return reduce_pack(place, pack) + (_norm_pack(place, pack) if place.plan.clipping else _update_pack(place, pack))


def close(place: Place, step: int) -> list[Task]:
    """What is left when every pack is settled: tied layers, and with clipping all updates."""
    tasks = reduce_shared(place, step)
    if place.plan.clipping:
        return tasks + _norm_rest(place, step) + update_all(place, step)
    return tasks + [_update(place, item.layer, step) for item in reversed(place.shared) if item.updates]


def reduce_pack(place: Place, pack: Backward) -> list[Task]:
    if len(place.replicas) == 1:
        return []
    return [AllReduce(first, last, pack.step, place.replicas) for first, last in _spans(place, pack)]


def reduce_packs(place: Place, step: int) -> list[Task]:
    """The all-reduces of all packs at once: for schedules that delay the rest."""
    return [task for pack in _packs(place, step) for task in reduce_pack(place, pack)]


def reduce_shared(place: Place, step: int) -> list[Task]:
    return [AllReduce(item.layer, item.layer, step, item.peers) for item in place.shared]


def norm_all(place: Place, step: int) -> list[Task]:
    if not place.plan.clipping:
        return []
    return [task for pack in _packs(place, step) for task in _norm_pack(place, pack)] + _norm_rest(place, step)


def update_all(place: Place, step: int) -> list[Task]:
    """Clip if asked, then update in ascending order: what the next step needs first is ready first."""
    layers = [layer for pack in place.backwards for layer in _updated_layers(place, pack)]
    layers += [item.layer for item in place.shared if item.updates]
    updates: list[Task] = [_update(place, layer, step) for layer in sorted(layers)]
    return [Clip(step, place.pipeline), *updates] if _clips(place) else updates


def _norm_pack(place: Place, pack: Backward) -> list[Task]:
    return [Norm(first, last, pack.step) for first, last in _spans(place, pack)]


def _norm_rest(place: Place, step: int) -> list[Task]:
    """Norms of tied layers count where the layer itself runs; a place with copies only contributes an empty norm."""
    owned: list[Task] = [Norm(item.layer, item.layer, step) for item in place.shared if item.owned]
    if owned or not _clips(place) or any(_spans(place, pack) for pack in place.backwards):
        return owned
    return [Norm(place.backwards[0].first, place.backwards[0].last, step)]


def _update_pack(place: Place, pack: Backward) -> list[Task]:
    return [_update(place, layer, pack.step) for layer in reversed(_updated_layers(place, pack))]


def _update(place: Place, layer: int, step: int) -> Update:
    plan, host = place.plan, _on_host(place, layer)
    return Update(layer, layer, step, host=host, clipped=plan.clipping, keeps_old=place.delay > 0)


def _updated_layers(place: Place, pack: Backward) -> list[int]:
    """One after the other: the state of one comes while another's is updated, and never has all of it to be there."""
    layers = [layer for first, last in _spans(place, pack) for layer in range(first, last + 1)]
    outline, plan = place.outline, place.plan
    return [i for i in layers if outline.layers[i].has_weights and updates_layer(plan, i, place.replica)]


def _clips(place: Place) -> bool:
    return place.plan.clipping and place.device in place.pipeline


def _packs(place: Place, step: int) -> list[Backward]:
    packs = reversed(place.backwards)
    return [Backward(p.first, p.last, 0, step - place.delay, step, p.recompute, p.count) for p in packs]


def _spans(place: Place, pack: Backward) -> list[tuple[int, int]]:
    """The pack's layers without those that are reduced on their own, in runs that are updated in one place.

    Runs without weights are left out.
    """
    alone = {item.layer for item in place.shared}
    layers = [layer for layer in range(pack.first, pack.last + 1) if layer not in alone]
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1 and _on_host(place, layer) == _on_host(place, layer - 1):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return [(run[0], run[-1]) for run in runs if any(place.outline.layers[layer].has_weights for layer in run)]


def _on_host(place: Place, layer: int) -> bool:
    return layer in place.plan.host_layers
