"""Config files and flags: typed, unknown keys refused, written back as they were read."""

from pathlib import Path

import pytest

from counterpoint.job.config import OPTIONS, Config
from counterpoint.job.config_file import config_text, read_config


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_flags_stand_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "model: tiny\nsteps: 7\nlearning_rate: 1e-3\nbetas: [0.8, 0.9]\nmax_grad_norm: null\n")
    config = read_config(path, {"steps": "9", "memory": "600MiB"})
    assert config == Config(
        model="tiny", steps=9, learning_rate=1e-3, betas=(0.8, 0.9), max_grad_norm=None, memory="600MiB"
    )
    assert config.memory_bytes == 600 << 20


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, ""), {}) == Config()


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    config = Config(model="a: b", steps=3, memory="1073741824", activations="evict", trace=False, learning_rate=1e-5)
    assert read_config(write(tmp_path, config_text(config)), {}) == config


def test_a_size_may_be_a_plain_number(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, "memory: 1048576\n"), {}).memory_bytes == 1 << 20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stesp: 3", "unknown key 'stesp' (did you mean 'steps'?)"),
        ("lr: 1", "unknown key 'lr' (did you mean 'learning_rate'?)"),
        ("lr: 1\nxyzzyx: 2", "unknown keys 'lr' (did you mean 'learning_rate'?), 'xyzzyx'"),
        ("steps: many", "steps must be a whole number, not 'many'"),
        ("steps: 1.5", "steps must be a whole number, not 1.5"),
        ("steps: true", "steps must be a whole number, not True"),
        ("steps: 0", "steps must be at least 1, not 0"),
        ("learning_rate: .nan", "learning_rate must be finite, not nan"),
        ("learning_rate: 0", "learning_rate must be above 0, not 0.0"),
        ("betas: 0.9", "betas must be two numbers, such as 0.9, 0.95, not 0.9"),
        ("betas: [0.9, 1.0]", "betas must be from 0 to below 1"),
        ("trace: 1", "trace must be true or false, not 1"),
        ("model: [a]", "model must be text, not ['a']"),
        ("precision: fp16", "precision must be one of fp32, bf16, not 'fp16'"),
        ("activations: forget", "activations must be one of recompute, keep, evict, not 'forget'"),
        ("memory: 4 gigs", "cannot read '4 gigs' as a size"),
        ("memory: 0", "memory must be more than nothing"),
        ("minibatch: 8\nmicrobatch: 3", "microbatches of 3 do not divide a minibatch of 8"),
        ("resume: last", "resume: last needs the run folder too"),
        ("validation_share: 1", "validation_share must be below 1, not 1.0"),
        ("flush_steps: 3", "flush_steps are the first steps of 2bw, and the schedule is harmony"),
        ("schedule: 2bw\nflush_steps: -3", "flush_steps must be at least 0, not -3"),
        ("error_feedback: -1", "error_feedback must be at least 0, not -1"),
        ("- a", "must hold keys and values"),
        ("a: [", "is not YAML"),
    ],
)
def test_refusals(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_config(write(tmp_path, text), {})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"steps must be .*; minibatch must be .*"):
        Config(steps=0, minibatch=0)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*absent\.yaml: No such file"):
        read_config(tmp_path / "absent.yaml", {})


def test_every_option_says_what_it_is() -> None:
    assert [
        name for name, option in OPTIONS.items() if not (option.metadata["about"] or option.metadata["choices"])
    ] == []
