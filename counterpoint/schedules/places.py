"""A plan into places: what each device runs in a step, and with whom it shares gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.core.outline import Outline
from counterpoint.core.plan import Pack, Plan
from counterpoint.core.task import Backward, Forward


@dataclass(frozen=True, slots=True)
class Shared:
    """A tied layer whose weights are differentiated on several positions: its gradient is summed over `peers`.

    `owned` where the layer itself runs, `updates` where the optimizer steps it.
    """

    layer: int
    peers: tuple[int, ...]
    owned: bool
    updates: bool


@dataclass(frozen=True, slots=True)
class Place:
    """One device's part of a step: a `position` in the pipeline of a `replica`.

    `forwards` and `backwards` are its packs as tasks of microbatch 0, both in ascending order. `replicas` are the
    devices that run the same packs, `pipeline` those that hold one copy of the model and update it; this device is
    among them. `shared` is in descending order. A minibatch runs on weights that are `delay` updates old.
    """

    plan: Plan
    outline: Outline
    device: int
    replica: int
    forwards: tuple[Forward, ...]
    backwards: tuple[Backward, ...]
    replicas: tuple[int, ...]
    pipeline: tuple[int, ...]
    shared: tuple[Shared, ...] = ()
    delay: int = 0
    position: int = 0


def replica_places(plan: Plan, outline: Outline) -> list[Place]:
    """Every device runs all packs, on its own share of the minibatch."""
    refuse_other_chain(plan, outline)
    if plan.num_devices != plan.num_replicas:
        raise ValueError(
            f"{plan.schedule} runs the whole chain on every device, so {plan.num_devices} devices need as many "
            f"replicas, not {plan.num_replicas}"
        )
    devices = tuple(range(plan.num_replicas))
    forwards, backwards = forward_tasks(plan, plan.forward_packs), backward_tasks(plan, plan.backward_packs)
    return [Place(plan, outline, device, device, forwards, backwards, devices, (device,)) for device in devices]


def stage_places(plan: Plan, outline: Outline, delay: int = 0) -> list[Place]:
    """In the order of the devices."""
    refuse_other_chain(plan, outline)
    _refuse_bad_stages(plan)
    owned = [_inside(plan.backward_packs, stage) for stage in plan.stages]
    everywhere = not plan.shard_updates
    places = []
    for position, stage in enumerate(plan.stages):
        forwards = forward_tasks(plan, _inside(plan.forward_packs, stage))
        backwards = backward_tasks(plan, owned[position])
        replicas = tuple(plan.device(position, replica) for replica in range(plan.num_replicas))
        for replica, device in enumerate(replicas):
            updating = updating_positions(plan, outline, owned, everywhere)
            pipeline = tuple(plan.device(other, replica) for other in updating)
            shared = shared_layers(plan, outline, owned, position, replica, everywhere)
            places.append(
                Place(
                    plan, outline, device, replica, forwards, backwards, replicas, pipeline, shared, delay, position
                )
            )  # fmt: skip
    return sorted(places, key=lambda place: place.device)


def shared_layers(
    plan: Plan, outline: Outline, owned: Sequence[Sequence[Pack]], position: int, replica: int, everywhere: bool
) -> tuple[Shared, ...]:
    """Layers whose weights this position and others use; `owned` are the backward packs of each position.

    Copies are updated on every position when `everywhere`, else only where the layer itself runs.
    """
    found = []
    owners = {owner for user in outline.layers for owner in user.tied}
    for layer in sorted(owners, reverse=True):
        users = [p for p, packs in enumerate(owned) if any(layer in _weights(outline, pack) for pack in packs)]
        if len(users) < 2 or position not in users:
            continue
        peers = tuple(sorted(plan.device(user, other) for user in users for other in range(plan.num_replicas)))
        owns = any(pack.first <= layer <= pack.last for pack in owned[position])
        updates = (everywhere and layer not in plan.host_layers) or (owns and updates_layer(plan, layer, replica))
        found.append(Shared(layer, peers, owns, updates))
    return tuple(found)


def updating_positions(plan: Plan, outline: Outline, owned: Sequence[Sequence[Pack]], everywhere: bool) -> list[int]:
    """Positions that have something to update: layers of their own or, when `everywhere`, copies of tied ones."""
    found = []
    for position, packs in enumerate(owned):
        layers = [layer for pack in packs for layer in _weights(outline, pack)]
        own = any(pack.first <= layer <= pack.last for layer in layers for pack in packs)
        if own or (everywhere and any(layer not in plan.host_layers for layer in layers)):
            found.append(position)
    return found


def updates_layer(plan: Plan, layer: int, replica: int) -> bool:
    """Whether this replica updates the layer: all do, unless updates are sharded by pack or happen at the one home."""
    if not plan.shard_updates and layer not in plan.host_layers:
        return True
    pack = next(index for index, pack in enumerate(plan.backward_packs) if pack.first <= layer <= pack.last)
    return pack % plan.num_replicas == replica


def forward_tasks(plan: Plan, packs: Sequence[Pack]) -> tuple[Forward, ...]:
    kept = [p for p, policy in zip(plan.backward_packs, plan.activations, strict=True) if policy != "recompute"]
    return tuple(
        Forward(
            pack.first,
            pack.last,
            0,
            0,
            tuple(layer for p in _inside(kept, pack) for layer in range(p.first, p.last + 1)),
            tuple(p.first for p in plan.backward_packs if pack.first <= p.first <= pack.last and p not in kept),
            plan.forward_group,
        )
        for pack in packs
    )


def backward_tasks(plan: Plan, packs: Sequence[Pack]) -> tuple[Backward, ...]:
    """A fused pack always recomputes: that is its forward."""
    fused = plan.backward_packs[-1] if plan.fused else None
    return tuple(
        Backward(p.first, p.last, 0, 0, 0, p == fused or plan.policy(p) == "recompute", plan.backward_group)
        for p in packs
    )


def refuse_other_chain(plan: Plan, outline: Outline) -> None:
    if plan.num_layers != outline.num_layers:
        raise ValueError(
            f"packs do not cover the chain: they end at layer {plan.num_layers - 1}, "
            f"the outline at layer {outline.num_layers - 1}"
        )


def _refuse_bad_stages(plan: Plan) -> None:
    if not plan.stages:
        raise ValueError(f"{plan.schedule} needs stages: give one range of layers per pipeline position")
    for stage in plan.stages:
        for pack in plan.forward_packs:
            if pack.first <= stage.last < pack.last:
                raise ValueError(
                    f"forward pack {pack.first}-{pack.last} crosses the end of stage {stage.first}-{stage.last}; "
                    "end a forward pack where each stage ends"
                )


def _inside(packs: Sequence[Pack], stage: Pack) -> tuple[Pack, ...]:
    return tuple(pack for pack in packs if stage.first <= pack.first and pack.last <= stage.last)


def _weights(outline: Outline, pack: Pack) -> tuple[int, ...]:
    return outline.weights(pack.first, pack.last)
