"""What each process was given -> certainty that all were given the same, or an error that names those that differ."""

import base64
import hashlib
import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from counterpoint.core.duties import Duties
from counterpoint.core.errors import ExecutionError
from counterpoint.core.files import from_json, to_json
from counterpoint.core.profile import Profile
from counterpoint.planner.apart import Question, decide_apart
from counterpoint.planner.decision import Decision
from counterpoint.planner.search import Freedom
from counterpoint.runtime.compute import Compute
from counterpoint.runtime.peers import Peers
from counterpoint.trainer.parts import Parts
from counterpoint.trainer.this_machine import Surroundings, these_devices
from counterpoint.trainer.wishes import Wishes

T = TypeVar("T")


def agree(peers: Peers, parts: Parts, wishes: Wishes) -> None:
    """Compare versions, model, optimizer and options of all processes with those of device 0."""
    known = peers.gather("what is trained", facts_of(parts, wishes))
    problems = []
    for device, facts in enumerate(known):
        different = [name for name in known[0] if facts.get(name) != known[0][name]]
        problems += [
            f"{name} on device {device} is {_of(facts, name)}, on device 0 {_of(known[0], name)}" for name in different
        ]
    if problems:
        raise ExecutionError(f"the processes differ: {'; '.join(problems)}; start all of them alike")


def agree_on_weights(peers: Peers, model: nn.Module) -> None:
    """Weights that a model brings are the same in every process; on the meta device they are made from the seed."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_meta:
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    found = peers.gather("the initial weights", digest.hexdigest())
    different = [device for device, text in enumerate(found) if text != found[0]]
    if different:
        raise ExecutionError(
            f"the model's initial weights on device {', '.join(map(str, different))} are not those on device 0; call "
            "torch.manual_seed with the same seed before the model is built, or build it on the meta device"
        )


def facts_of(parts: Parts, wishes: Wishes) -> dict[str, str]:
    chain, optimizer = parts.chain, parts.rule.optimizer
    shapes = {name: (spec.shape, str(spec.dtype), spec.requires_grad) for name, spec in chain.parameters.items()}
    olds = [(slot.name, str(slot.dtype)) for flat in parts.frame.olds for slot in flat.slots]
    model = _digest([shapes, [layer.signature for layer in chain.layers], olds])
    groups = [{k: str(v) for k, v in g.items() if k not in ("params", "lr")} for g in optimizer.param_groups]
    return {
        "torch": torch.__version__,
        "counterpoint": _own_version(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "the model": f"{type(parts.module).__name__} {model}",
        "the optimizer": f"{parts.rule.name} {_digest([groups, parts.rule.group_of])}",
        "the plan": "none" if wishes.plan is None else _digest(to_json(wishes.plan)),
        "memory": str(wishes.memory_bytes),
        "the kind of device": parts.backend.device.type,
        "precision": str(wishes.autocast),
        "max_grad_norm": str(wishes.max_grad_norm),
        "the seed": str(wishes.seed),
        "flush_steps": str(wishes.flush_steps),
        "the options": _digest(repr(wishes.freedom)),
    }


def shared(peers: Peers, kind: type[T], what: str, value: T | None) -> T:
    """Device 0's value on every device."""
    data = peers.broadcast(what, None if value is None else to_json(value))
    return value if value is not None else from_json(kind, data, what)


def decide_together(
    peers: Peers, profile: Profile, budget: int, around: Surroundings, freedom: Freedom, wishes: Wishes
) -> Decision:
    """Device 0 decides with everybody's budget; the others take its program."""
    budgets = peers.gather("the budget", budget)
    if peers.device:
        return Decision.from_json(peers.broadcast("the plan", None))
    machine = these_devices(budgets, around, peers.servers, wishes.network_bytes_per_s)
    chosen = decide_apart(Question(profile, machine, freedom, wishes.plan, wishes.replicas, wishes.flush_steps))
    peers.broadcast("the plan", chosen.to_json())
    return chosen


def share_buffers(peers: Peers, duties: Duties, compute: Compute) -> None:
    """Buffers that layers mutate are those of the first device that runs the layer, on every device."""
    runners: dict[str, int] = {}
    for layer in compute.chain.layers:
        runners |= dict.fromkeys(layer.mutates, duties.runners[layer.index][0])
    if not runners:
        return
    own = {name: _packed(compute.buffers[name]) for name, device in runners.items() if device == peers.device}
    found = peers.gather("the buffers", own)
    for name, device in runners.items():
        if device != peers.device:
            like = compute.buffers[name]
            data = bytearray(base64.b64decode(found[device][name]))
            content = torch.frombuffer(data, dtype=torch.uint8).view(like.dtype).view(like.shape).clone()
            compute.buffers[name] = compute.backend.here(content)


def _packed(tensor: Tensor) -> str:
    return base64.b64encode(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).decode()


def _of(facts: Mapping[str, Any], name: str) -> str:
    return str(facts.get(name, "unknown"))


def _digest(data: Any) -> str:
    return hashlib.blake2b(json.dumps(data, default=str).encode(), digest_size=4).hexdigest()


def _own_version() -> str:
    try:
        return version("counterpoint")
    except PackageNotFoundError:
        return "unknown"
