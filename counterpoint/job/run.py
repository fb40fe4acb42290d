"""Config -> a trained model: the loop, its checkpoints, its measurements and its end, whichever that is."""

import contextlib
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from counterpoint.core import files
from counterpoint.core.errors import CounterpointError, ExecutionError
from counterpoint.job.config import LAST, Config
from counterpoint.job.config_file import config_text
from counterpoint.job.expected import expected_of
from counterpoint.job.folder import RunFolder, open_folder
from counterpoint.job.interruption import Interruption, terminable
from counterpoint.job.metrics import Metrics, MetricsLog
from counterpoint.job.optimizers import learning_rate_at, set_learning_rate
from counterpoint.job.progress import Progress, choose_progress
from counterpoint.job.report import report
from counterpoint.job.setup import DIGEST, Setup, changes, resolve, set_up, stated
from counterpoint.job.several import is_first, is_restarted, one_at_a_time
from counterpoint.planner.forecast_text import plan_text
from counterpoint.trainer import Trainer
from counterpoint.viewer import page, trace

_TRACED_STEPS = 3


def train(config: Config, *, quiet: bool = False, forecast_only: bool = False) -> int:
    """Exit code: 0 at the end of the run, 128 + number of the signal that ended it before.

    One of several processes does the same as the others; only the first speaks and writes the log.
    """
    folder, checkpoint = open_folder(_restarted(config) if is_restarted() else config)
    config = resolve(config, folder)
    with terminable(), _folder_of(folder), contextlib.ExitStack() as stack:
        with one_at_a_time(folder.root):
            setup = set_up(config, folder, checkpoint, _say)
        stack.callback(setup.data.close)
        _introduce(setup)
        trainer = stack.enter_context(_trainer(setup))
        _record(setup, trainer)
        if forecast_only:
            return 0
        if trainer.step_count >= config.steps:
            raise ValueError(
                f"{folder.root} is at step {trainer.step_count} already: ask for more than that with steps"
            )
        number = _run(setup, trainer, quiet or not is_first())
    if is_first():
        _say("\n" + report(folder.root))
    return 0 if number is None else 128 + number


def _restarted(config: Config) -> Config:
    """A run that its launcher starts again goes on from its last checkpoint, or begins anew if it has none."""
    folder = RunFolder(Path(config.run)) if config.run else None
    if folder is not None and folder.last_checkpoint() is not None:
        return replace(config, resume=LAST)
    if folder is not None and is_first():
        folder.metrics.unlink(missing_ok=True)
    return config


def _introduce(setup: Setup) -> None:
    rows = [("run folder", str(setup.folder.root)), ("config", stated(setup.config)), ("data", setup.data.about)]
    if setup.checkpoint is not None:
        rows += [("goes on", f"from {setup.checkpoint}"), ("changed", changes(setup.config, setup.folder) or "nothing")]
    rows += [("next", "tracing the model, timing its layers and the disk, choosing a plan")]
    _say("\n".join(f"{name:<12}{text}" for name, text in rows))


def _say(text: str) -> None:
    if is_first():
        print(text, flush=True)


@contextlib.contextmanager
def _folder_of(folder: RunFolder) -> Iterator[None]:
    """The folder is made if need be, and taken away again if nothing came of the run."""
    made = not folder.root.exists()
    folder.root.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        (folder.root / ".turn").unlink(missing_ok=True)
        if not is_first():
            pass
        elif made and not folder.checkpoints() and not (folder.metrics.exists() and folder.metrics.stat().st_size):
            shutil.rmtree(folder.root)
        elif folder.scratch.is_dir() and not any(folder.scratch.iterdir()):
            folder.scratch.rmdir()


def _trainer(setup: Setup) -> Trainer:
    config = setup.config
    return Trainer(
        setup.source.model,
        setup.optimizer,
        example=setup.data.training.batch(0, config.minibatch),
        device=config.device,
        memory=config.memory,
        host_memory=config.host_memory,
        disk=config.disk or setup.folder.scratch,
        loss=setup.source.loss,
        max_grad_norm=config.max_grad_norm,
        microbatch=config.microbatch,
        precision=config.precision,
        seed=config.seed,
        schedule=config.schedule,
        replicas=config.replicas,
        network=config.network,
        flush_steps=config.flush_steps,
        activations=config.activations,
        weights=setup.source.weights,
        resume=setup.checkpoint,
    )


def _record(setup: Setup, trainer: Trainer) -> None:
    """What was decided and what it will be like, to read now and to compare later."""
    folder = setup.folder
    if not is_first():
        return
    folder.config.write_text(config_text(setup.config))
    files.save(trainer.plan, folder.plan)
    files.save(expected_of(trainer), folder.forecast)
    folder.forecast_text.write_text(trainer.describe() + "\n")
    _say(f"\n{trainer.describe()}\n")


def _run(setup: Setup, trainer: Trainer, quiet: bool) -> int | None:
    """The number of the signal that ended the run, None if it came to its end."""
    config, folder = setup.config, setup.folder
    with contextlib.ExitStack() as stack:
        log: MetricsLog | None = None
        if is_first():
            log = MetricsLog(folder.metrics, folder.tensorboard if config.tensorboard else None, trainer.step_count)
            stack.callback(log.close)
        every = config.log_every if is_first() else config.steps + 1
        progress = choose_progress(config.steps, trainer.step_count, trainer.memory_bytes, every, quiet)
        stack.enter_context(progress)
        interruption = stack.enter_context(Interruption(progress.note))
        start_peak = _begin_measuring(trainer)
        try:
            stopping = False
            while trainer.step_count < config.steps and not stopping:
                metrics = replace(_step(setup, trainer), start_peak_bytes=start_peak)
                start_peak = None
                stopping = trainer.agreed(interruption.requested)
                if log is not None:
                    log.write(metrics)
                    progress.step(metrics)
                if _is_due(config.save_every, metrics.step) or metrics.step == config.steps or stopping:
                    saved = _save(setup, trainer)
                    if is_first():
                        progress.note(f"saved {saved}")
        except CounterpointError as error:
            raise _with_checkpoint(error, folder) from error
        if config.trace and is_first():
            _draw(setup, trainer)
        number = interruption.number or (signal.SIGTERM if stopping else None)
        if is_first():
            _part(progress, number, setup, trainer.step_count)
        return number


def _begin_measuring(trainer: Trainer) -> int | None:
    """The most memory so far, if the system lets the peak begin anew."""
    backend = trainer.compute.backend
    peak = backend.peak_bytes()
    return peak if backend.reset_peak() else None


def _step(setup: Setup, trainer: Trainer) -> Metrics:
    config = setup.config
    rate = learning_rate_at(config, trainer.step_count)
    set_learning_rate(setup.optimizer, rate)
    start = time.perf_counter_ns()
    loss = trainer.step(setup.data.training.batch(trainer.data_position, config.minibatch))
    step_ns = time.perf_counter_ns() - start
    trainer.data_position += config.minibatch
    statistics = trainer.statistics()
    due = _is_due(config.evaluate_every, trainer.step_count)
    return Metrics(
        step=trainer.step_count,
        loss=loss,
        learning_rate=rate,
        tokens=config.tokens_per_step,
        step_ns=step_ns,
        resident_bytes=statistics.resident_bytes,
        peak_bytes=statistics.peak_bytes,
        read_bytes=statistics.read_bytes,
        written_bytes=statistics.written_bytes,
        waited_ns=statistics.waited_ns,
        evaluation_loss=_evaluate(setup, trainer) if due else None,
    )


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _evaluate(setup: Setup, trainer: Trainer) -> float:
    """The mean loss over the same held-out samples every time."""
    config, samples = setup.config, setup.data.held_out
    count = min(config.evaluate_minibatches, samples.count // config.minibatch)
    batches = (samples.batch(index * config.minibatch, config.minibatch) for index in range(count))
    return sum(trainer.evaluate(batch) for batch in batches) / count


def _save(setup: Setup, trainer: Trainer) -> Path:
    target = setup.folder.checkpoint(trainer.step_count)
    target.parent.mkdir(parents=True, exist_ok=True)
    trainer.save(target, {DIGEST: setup.data.digest})
    if is_first():
        setup.folder.remove_other_checkpoints(trainer.step_count, setup.config.keep)
    return target


def _with_checkpoint(error: CounterpointError, folder: RunFolder) -> ExecutionError:
    last = folder.last_checkpoint()
    return ExecutionError(f"{error}; " + (f"the last checkpoint is {last}" if last else "there is no checkpoint yet"))


def _draw(setup: Setup, trainer: Trainer) -> None:
    timeline = trainer.timeline(_TRACED_STEPS)
    title = f"{setup.source.name}: the last {_TRACED_STEPS} steps, measured"
    setup.folder.trace.write_text(trace(timeline))
    budgets = (trainer.memory_bytes,) * trainer.plan.num_devices
    setup.folder.timeline.write_text(
        page(timeline, title, budgets, plan_text(trainer.plan), trainer.simulated_timeline())
    )


def _part(progress: Progress, number: int | None, setup: Setup, step: int) -> None:
    if number is not None:
        word = f"stopped by {signal.Signals(number).name} after step {step} and saved"
        progress.note(f"{word}; go on with: counterpoint train --resume {setup.folder.root}")
