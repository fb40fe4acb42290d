"""A Forecast into the lines that a person reads before the first step."""

from collections.abc import Iterator

from counterpoint.core.plan import Pack, Plan
from counterpoint.core.units import format_bytes, format_ns
from counterpoint.planner.forecast import Forecast, TierUse

CAUSE_TEXTS = {
    "load": "waiting for loads",
    "evict": "waiting for evicts",
    "peer": "waiting for peers",
    "optimizer": "waiting for the optimizer",
    "start": "pipeline fill and drain",
}
_BAR = 30
_NAME = 28
_SHOWN_LINKS = 8
_SHOWN_TIERS = 12


def describe(forecast: Forecast) -> str:
    """Plain text, at most 110 columns."""
    sections = (
        _rows(_model(forecast)), _rows(_speed(forecast)), _rows(_time(forecast)),
        _rows(_links(forecast)), _rows(_tiers(forecast)),
    )  # fmt: skip
    return "\n\n".join(section for section in sections if section)


def _rows(rows: Iterator[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<{_NAME}}{text}".rstrip() for name, text in rows)


def _model(forecast: Forecast) -> Iterator[tuple[str, str]]:
    plan = forecast.plan
    state, memory = forecast.training_bytes, forecast.device_bytes
    yield "model", f"{forecast.model}, {plan.num_layers} layers"
    yield "machine", forecast.machine
    yield (
        "training state",
        f"{format_bytes(state)} (weights, gradients, optimizer), "
        f"{state / memory:.2g} x the devices' {format_bytes(memory)}",
    )
    yield "plan", _batch(plan)
    yield "", _cut(plan)
    yield "", _memory(plan)


def plan_text(plan: Plan) -> str:
    """A plan in one sentence."""
    return f"{_batch(plan)}; {_cut(plan)}; {_memory(plan)}"


def _batch(plan: Plan) -> str:
    apart = ", pipelines side by side" if plan.replicas_apart else ""
    replicas = f" on each of {plan.num_replicas} replicas{apart}" if plan.num_replicas > 1 else ""
    group = f" in groups of {plan.forward_group} and {plan.backward_group}" if plan.forward_group > 1 else ""
    first = f" after {plan.flush_steps} steps by flush" if plan.flush_steps else ""
    return (
        f"{plan.schedule}{first}, minibatch {plan.minibatch_size} = "
        f"{plan.num_microbatches} microbatches of {plan.microbatch_size}{group}{replicas}"
    )


def _cut(plan: Plan) -> str:
    parts = [f"{len(plan.stages)} stages"] if plan.stages else []
    parts.append(f"{len(plan.backward_packs)} packs of {_sizes(plan.backward_packs)}")
    if plan.fused:
        parts.append("last fused")
    return ", ".join(parts)


def _updated(plan: Plan) -> str:
    if not plan.host_layers:
        return "device"
    if len(plan.host_layers) == plan.num_layers:
        return "host"
    return f"device, of {len(plan.host_layers)} layers on the host"


def _memory(plan: Plan) -> str:
    return ", ".join(
        (
            "activations " + "/".join(dict.fromkeys(plan.activations)),
            f"optimizer on the {_updated(plan)}{' with clipping' * plan.clipping}",
            {"planned": "planned residency", "lru": "lru on demand", "none": "no swapping"}[plan.residency],
        )
    )


def _sizes(packs: tuple[Pack, ...]) -> str:
    sizes = sorted(pack.last - pack.first + 1 for pack in packs)
    if sizes[0] < sizes[-1]:
        return f"{sizes[0]} to {sizes[-1]} layers"
    return f"{sizes[0]} layer{'s' * (sizes[0] > 1)}"


def _speed(forecast: Forecast) -> Iterator[tuple[str, str]]:
    yield "step time", format_ns(forecast.step_ns) + _first_steps(forecast)
    rate = forecast.samples_per_s
    yield "throughput", (f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}") + " samples/s" + _tokens(forecast)


def _first_steps(forecast: Forecast) -> str:
    if not forecast.plan.flush_steps:
        return ""
    return f", after {forecast.plan.flush_steps} steps by flush of {format_ns(forecast.flush_step_ns)}"


def _tokens(forecast: Forecast) -> str:
    return f", {forecast.tokens_per_s:,.0f} tokens/s" if forecast.tokens_per_sample > 1 else ""


def _time(forecast: Forecast) -> Iterator[tuple[str, str]]:
    yield "share of time", "(all devices, in the steady state)"
    yield _share("computing", forecast.useful_permille)
    yield _share("recomputing", forecast.repeated_permille)
    yield _share("optimizer", forecast.updating_permille)
    for cause, permille in sorted(forecast.idle_permille, key=lambda item: -item[1]):
        yield _share(CAUSE_TEXTS.get(cause, cause), permille)


def _share(name: str, permille: int) -> tuple[str, str]:
    return f"  {name}", f"{permille / 10:5.1f} %  {'#' * (permille * _BAR // 1000)}"


def _links(forecast: Forecast) -> Iterator[tuple[str, str]]:
    links = sorted(forecast.link_bytes, key=lambda link: -link[1])
    if not links:
        yield "moved in one step", "nothing"
        return
    yield "moved in one step", ""
    for name, size in links[:_SHOWN_LINKS]:
        yield f"  {name}", f"{format_bytes(size):>9}   {format_bytes(size * 10**9 // forecast.step_ns)}/s on average"
    if len(links) > _SHOWN_LINKS:
        rest = links[_SHOWN_LINKS:]
        yield f"  {len(rest)} more links", f"{format_bytes(sum(size for _, size in rest)):>9}"


def _tiers(forecast: Forecast) -> Iterator[tuple[str, str]]:
    used = [tier for tier in forecast.tiers if tier.peak_bytes]
    yield "peak memory", ""
    for tier in used[:_SHOWN_TIERS]:
        yield _tier(tier)
    rest = used[_SHOWN_TIERS:]
    if rest:
        fullest = max(rest, key=lambda tier: tier.peak_bytes / tier.capacity_bytes)
        yield f"  {len(rest)} more tiers", f"at most {format_bytes(fullest.peak_bytes)} of {fullest.name}"


def _tier(tier: TierUse) -> tuple[str, str]:
    filled = min(_BAR, tier.peak_bytes * _BAR // max(tier.capacity_bytes, 1))
    over = "" if tier.fits else "  does not fit"
    text = f"{format_bytes(tier.peak_bytes):>9} of {format_bytes(tier.capacity_bytes):<9} {'#' * filled}{over}"
    return f"  {tier.name}", text
