"""The text is real, the same everywhere, and its windows are one token apart."""

import itertools

import pytest
import torch

from shardfn_demo import text


def test_the_corpus_is_python_source_up_to_the_limit():
    data = text.corpus(200_000)
    assert data.shape == (200_000,) and data.dtype == torch.int64
    assert data.min() >= 0 and data.max() < 256
    assert b"\nimport " in bytes(data.tolist())


def test_the_corpus_takes_whole_files_in_one_order():
    first, second = (path.read_bytes() for path in text.files()[:2])
    whole = first + second
    assert bytes(text.corpus(len(whole)).tolist()) == whole
    assert text.files() == sorted(text.files())


def test_a_python_without_library_source_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(text, "files", list)
    with pytest.raises(FileNotFoundError, match="carries no library source"):
        text.corpus()


def test_batches_are_windows_whose_targets_come_one_token_later():
    data = torch.arange(1000)
    for x, y in itertools.islice(text.batches(data, batch=3, context=7), 5):
        assert x.shape == y.shape == (3, 7) and x.is_contiguous() and y.is_contiguous()
        assert torch.equal(y, x + 1) and torch.equal(x[:, 1:], x[:, :-1] + 1)


def test_batches_reach_the_last_token_and_no_further():
    data = torch.arange(9)
    ends = {int(y[0, -1]) for _, y in itertools.islice(text.batches(data, batch=1, context=7), 30)}
    assert ends == {7, 8}


def test_a_seed_gives_the_same_batches_and_another_seed_others():
    data = torch.arange(10_000)

    def take(seed):
        return torch.stack(
            [x for x, _ in itertools.islice(text.batches(data, batch=2, context=5, seed=seed), 3)]
        )

    assert torch.equal(take(3), take(3))
    assert not torch.equal(take(3), take(4))
