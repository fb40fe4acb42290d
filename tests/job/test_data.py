"""Data: the same batches from the same position, whatever the files; clear words about data that will not do."""

import json
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.core.errors import ExecutionError
from counterpoint.job.config import Config
from counterpoint.job.data import Data, open_data, shuffled
from counterpoint.job.sources import find_sources

TEXT = "\n".join(f"line {number} of a text with ünïcödé" for number in range(200)) + "\n"


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Data]:
    def open_(place: Path | str, vocabulary: int | None = 256, **options: object) -> Data:
        values = {"data": str(place), "sequence_length": 16, "minibatch": 2} | options
        return open_data(Config(**values), vocabulary, None, tmp_path / "cache")  # type: ignore[arg-type]

    return open_


def epoch(data: Data) -> list[bytes]:
    samples = data.training
    return [bytes(samples.batch(i, 1)["input_ids"][0].tolist()) for i in range(samples.count)]


@given(st.integers(1, 300), st.text(max_size=3))
def test_an_order_visits_every_place_once(count: int, key: str) -> None:
    assert sorted(shuffled(index, count, key) for index in range(count)) == list(range(count))


def test_text_becomes_its_bytes(tmp_path: Path, opened: Callable[..., Data]) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    data = opened(tmp_path / "a.txt", validation_share=0.0)
    whole = TEXT.encode() + b"\0"
    expected = {whole[i : i + 16] for i in range(0, len(whole) - 15, 16)}
    assert set(epoch(data)) == expected
    assert data.training.corpus.num_tokens == len(whole)


def test_labels_are_the_inputs_and_a_tensor_of_their_own(tmp_path: Path, opened: Callable[..., Data]) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    batch = opened(tmp_path / "a.txt").training.batch(3, 2)
    assert batch["input_ids"].shape == (2, 16)
    assert batch["input_ids"].equal(batch["labels"])
    assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()


def test_the_order_follows_from_seed_and_epoch(tmp_path: Path, opened: Callable[..., Data]) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    first, again, other = (opened(tmp_path / "a.txt", seed=seed).training for seed in (1, 1, 2))
    count = first.count
    assert first.batch(5, 8)["input_ids"].equal(again.batch(5, 8)["input_ids"])
    assert not first.batch(0, 8)["input_ids"].equal(other.batch(0, 8)["input_ids"])
    assert not first.batch(0, 8)["input_ids"].equal(first.batch(count, 8)["input_ids"])


def test_a_batch_may_reach_into_the_next_epoch(tmp_path: Path, opened: Callable[..., Data]) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    samples = opened(tmp_path / "a.txt").training
    across = samples.batch(samples.count - 1, 2)["input_ids"]
    assert across[:1].equal(samples.batch(samples.count - 1, 1)["input_ids"])
    assert across[1:].equal(samples.batch(samples.count, 1)["input_ids"])


def test_held_out_samples_are_never_trained_on(tmp_path: Path, opened: Callable[..., Data]) -> None:
    tokens = np.arange(3200, dtype=np.uint16)
    np.save(tmp_path / "tokens.npy", tokens)
    data = opened(tmp_path / "tokens.npy", vocabulary=3200, validation_share=0.25)
    trained = data.training.batch(0, data.training.count)["input_ids"].flatten().tolist()
    held_out = data.held_out.batch(0, data.held_out.count)["input_ids"].flatten().tolist()
    assert (data.training.count, data.held_out.count) == (150, 50)
    assert sorted(trained + held_out) == list(range(3200))


def test_held_out_data_may_lie_elsewhere(tmp_path: Path, opened: Callable[..., Data]) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text("x" * 64)
    data = opened(tmp_path / "a.txt", validation_data=str(tmp_path / "b.txt"))
    assert data.held_out.count == 4
    assert set(data.held_out.batch(0, 4)["input_ids"].flatten().tolist()) == {ord("x")}


def test_lines_of_json(tmp_path: Path, opened: Callable[..., Data]) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": f"{n:015d}", "id": n}) for n in range(40)) + "\n\n")
    data = opened(tmp_path / "a.jsonl", validation_share=0.0)
    assert sorted(epoch(data)) == [f"{n:015d}".encode() + b"\0" for n in range(40)]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_bare_token_files(tmp_path: Path, opened: Callable[..., Data], dtype: str) -> None:
    np.arange(1, 321).astype(dtype).tofile(tmp_path / "a.bin")
    np.arange(321, 641).astype(dtype).tofile(tmp_path / "b.bin")
    data = opened(tmp_path, vocabulary=1000, token_dtype=dtype, validation_share=0.0)
    assert sorted(data.training.batch(0, 40)["input_ids"].flatten().tolist()) == list(range(1, 641))


def test_a_large_vocabulary_means_wide_tokens(tmp_path: Path, opened: Callable[..., Data]) -> None:
    np.arange(100_000, 100_320).astype("uint32").tofile(tmp_path / "a.bin")
    data = opened(tmp_path / "a.bin", vocabulary=128_000)
    assert int(data.training.batch(0, 4)["input_ids"].min()) >= 100_000


def test_a_tokenizer_of_ones_own(tmp_path: Path, opened: Callable[..., Data]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<end>": 0, "<unknown>": 1} | {f"w{number}": number + 2 for number in range(50)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    (tmp_path / "a.txt").write_text("\n".join(f"w{number % 50}" for number in range(159)))
    options = {"tokenizer": str(tmp_path / "tokenizer"), "validation_share": 0.0}
    data = opened(tmp_path / "a.txt", **options)
    tokens = data.training.batch(0, 10)["input_ids"].flatten().tolist()
    assert sorted(tokens) == sorted([number % 50 + 2 for number in range(159)] + [0])
    with pytest.raises(ValueError, match="the tokenizer has 52 tokens, the model's vocabulary 40"):
        opened(tmp_path / "a.txt", vocabulary=40, **options)


def test_tokens_are_written_once(tmp_path: Path, opened: Callable[..., Data]) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    first = opened(tmp_path / "a.txt")
    written = (tmp_path / "cache" / "tokens.bin").stat().st_mtime_ns
    assert opened(tmp_path / "a.txt").digest == first.digest
    assert (tmp_path / "cache" / "tokens.bin").stat().st_mtime_ns == written
    (tmp_path / "a.txt").write_text(TEXT + "more")
    assert opened(tmp_path / "a.txt").digest != first.digest
    assert [path.name for path in (tmp_path / "cache").iterdir() if "unfinished" in path.name] == []


def test_a_damaged_cache_is_named(tmp_path: Path, opened: Callable[..., Data]) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    opened(tmp_path / "a.txt")
    with (tmp_path / "cache" / "tokens.bin").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ExecutionError, match=r"tokens\.bin is damaged"):
        opened(tmp_path / "a.txt")


def test_long_texts_are_parted_between_characters(
    tmp_path: Path, opened: Callable[..., Data], monkeypatch: pytest.MonkeyPatch
) -> None:
    from counterpoint.job import token_cache

    monkeypatch.setattr(token_cache, "_BLOCK_BYTES", 5)
    text = "äöü" * 30 + "\n" + "word " * 30
    (tmp_path / "a.txt").write_text(text)
    parts = [part for part, _ in token_cache._texts(find_sources(str(tmp_path / "a.txt"))[0])]
    assert b"".join(parts).decode() == text
    assert "".join(part.decode() for part in parts) == text


def test_folders_leave_out_what_is_hidden_or_binary(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    for name, content in ((".git/x", b"a"), ("b.txt", b"b"), ("a.md", b"a"), ("c.png", b"\x89\0"), (".d", b"d")):
        (tmp_path / name).write_bytes(content)
    assert [file.path.name for file in find_sources(str(tmp_path))] == ["a.md", "b.txt"]


def test_the_standard_library_is_there_by_default() -> None:
    files = find_sources("stdlib")
    assert sum(file.num_bytes for file in files) > 1 << 20
    names = {str(file.path.relative_to(sysconfig.get_path("stdlib"))) for file in files}
    assert "argparse.py" in names
    assert not any("site-packages" in name or name.startswith("test/") for name in names)


def refused(tmp_path: Path) -> dict[str, tuple[object, str]]:
    """Content of a file by name, and what is said of it."""
    return {
        "empty.txt": (b"", "holds no data"),
        "short.txt": (b"abc", "is too short: 4 tokens make 0 samples to train on, a minibatch needs 2 of 16 tokens"),
        "binary.txt": (b"a\0b" * 99, "is binary"),
        "odd.bin": (b"abc", "has 3 bytes, no multiple of uint16's 2"),
        "wide.bin": (np.arange(1, 99, dtype=np.uint32).tobytes(), "looks like uint32 tokens"),
        "torn.npy": (b"\x93NUMPY\x01\x00", "is not an array of tokens"),
        "floats.npy": (np.ones(99), "must be a one-dimensional array of whole numbers"),
        "plane.npy": (np.ones((9, 9), dtype=np.uint16), "must be a one-dimensional array of whole numbers"),
        "objects.npy": (np.array([{}] * 9), "is not an array of tokens"),
        "torn.jsonl": (b'{"text": "a"}\n{"tex', "line 2 is not a JSON object with a text"),
        "other.jsonl": (b'{"body": "a"}\n', "line 1 is not a JSON object with a text"),
        "number.jsonl": (b'{"text": 3}\n', "line 1: text must be text, not int"),
    }


@pytest.mark.parametrize("name", refused(Path()))
def test_refused_files(tmp_path: Path, opened: Callable[..., Data], name: str) -> None:
    content, message = refused(tmp_path)[name]
    if isinstance(content, np.ndarray):
        np.save(tmp_path / name, content, allow_pickle=True)
    else:
        assert isinstance(content, bytes)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        opened(tmp_path / name)
    assert message in str(caught.value)


def test_missing_mixed_and_unheld(tmp_path: Path, opened: Callable[..., Data]) -> None:
    with pytest.raises(ValueError, match=r"no data at .*absent"):
        opened(tmp_path / "absent")
    (tmp_path / "mix").mkdir()
    (tmp_path / "mix" / "a.txt").write_text(TEXT)
    np.save(tmp_path / "mix" / "b.npy", np.arange(99))
    with pytest.raises(ValueError, match="mixes token files with text"):
        opened(tmp_path / "mix")
    with pytest.raises(ValueError, match="too little is held out: 0 samples"):
        opened(tmp_path / "mix" / "a.txt", validation_share=0.0, evaluate_every=1)
    with pytest.raises(ValueError, match="no tokenizer at"):
        opened(tmp_path / "mix" / "a.txt", tokenizer=str(tmp_path / "absent"))


def test_tokens_beyond_the_vocabulary_are_found_at_once(tmp_path: Path, opened: Callable[..., Data]) -> None:
    np.save(tmp_path / "a.npy", np.arange(320))
    with pytest.raises(ValueError, match=r"a\.npy holds token 319, the model's vocabulary is 100"):
        opened(tmp_path / "a.npy", vocabulary=100)


def test_tokens_beyond_the_vocabulary_are_found_far_behind(
    tmp_path: Path, opened: Callable[..., Data], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("counterpoint.job.corpus._BLOCK_TOKENS", 16)
    monkeypatch.setattr("counterpoint.job.corpus._LOOKED_AT_BYTES", 16)
    np.save(tmp_path / "a.npy", np.arange(320))
    data = opened(tmp_path / "a.npy", vocabulary=100)
    with pytest.raises(ExecutionError, match=r"token \d+ at position \d+ of the data is beyond .* vocabulary of 100"):
        [data.training.batch(i, 2) for i in range(data.training.count)]
