"""`quality/tasks.py`: batches that follow from seed and step, and texts with padding."""

from __future__ import annotations

import pytest
import torch

from benchmarks.models.bert import IGNORED, PADDING
from benchmarks.quality import tasks
from scripts.training import corpus


@pytest.fixture(autouse=True)
def short_text(monkeypatch):
    """Some text; to read torch's own takes seconds."""
    text = torch.randint(256, (5000,), dtype=torch.uint8)
    known = corpus.Corpus(text[:4000], text[4000:], (), ())
    monkeypatch.setattr(corpus, "torch_sources", lambda: known)


def made(name, seed=0, held_out=130):
    torch.manual_seed(0)
    return tasks.TASKS[name](1, 32, 3, held_out, seed)


@pytest.mark.parametrize("name", tasks.TASKS)
def test_a_batch_follows_from_the_seed_and_the_step(name):
    first = made(name).batch(5)
    for again, is_same in (
        (made(name).batch(5), True),
        (made(name).batch(6), False),
        (made(name, seed=1).batch(5), False),
    ):
        same = [torch.equal(a, b) for a, b in zip(first, again, strict=True)]
        assert all(same) if is_same else not any(same)


@pytest.mark.parametrize("name", tasks.TASKS)
def test_held_out_batches_are_the_same_for_every_seed_and_in_no_training_batch(name):
    task, other = made(name), made(name, seed=1)
    batches = list(task.held_out())
    assert [len(inputs) for inputs, _ in batches] == [128, 2]
    for pair, same in zip(batches, other.held_out(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pair, same, strict=True))
    trained = torch.cat([task.batch(step)[0] for step in range(50)])
    seen = {tuple(x.flatten().tolist()) for x in trained}
    assert not any(tuple(x.flatten().tolist()) in seen for x in torch.cat([b[0] for b in batches]))


@pytest.mark.parametrize("name", tasks.TASKS)
def test_logits_fit_the_targets(name):
    task = made(name)
    inputs, targets = task.batch(0)
    assert task.model(inputs).shape[:-1] == targets.shape
    assert int(targets.max()) < task.model(inputs).shape[-1]


def test_rows_of_a_batch_are_no_multiple_of_sixteen():
    rows = {"vit": 33 * 37, "encoder": 17 * tasks.CONTEXT}
    assert rows == {"vit": 1221, "encoder": 1037}
    assert all(count % 16 for count in rows.values())


def test_padding_fills_the_end_of_a_text_and_has_no_target():
    inputs, targets = next(made("encoder", held_out=1000).held_out())
    is_padding = inputs == PADDING
    lengths = (~is_padding).sum(1)
    assert torch.equal(is_padding, torch.arange(tasks.CONTEXT) >= lengths[:, None])
    assert lengths.min() >= tasks.SHORTEST
    assert lengths.max() <= tasks.CONTEXT
    assert len(lengths.unique()) > 20
    assert (targets[is_padding] == IGNORED).all()
    assert (targets != IGNORED).any()
