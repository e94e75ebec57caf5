"""Batches are cut from the text that was given, and a model is plotted in one call."""

from __future__ import annotations

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from float8.unit_scaling.analysis.visualise import example_batch, visualiser


def test_a_batch_is_bytes_of_the_text_and_labels_are_the_next_ones():
    text = "abcdefghijklmnopqrstuvwxyz"
    inputs, mask, labels = example_batch(None, 5, 7, texts=[text])
    assert inputs.shape == mask.shape == labels.shape == (5, 7)
    assert {x.dtype for x in (inputs, mask, labels)} == {torch.int64}
    for row, following in zip(inputs.tolist(), labels.tolist(), strict=True):
        assert bytes(row).decode() in text
        assert following == [byte + 1 for byte in row]
    assert mask.all()
    assert all(x.is_contiguous() for x in (inputs, mask, labels))


def test_short_texts_are_padded_out_of_the_mask_and_out_of_the_loss():
    inputs, mask, labels = example_batch(None, 1, 5, texts=["abc"])
    assert inputs.tolist() == [[97, 98, 99, 0, 0]]
    assert mask.tolist() == [[1, 1, 1, 0, 0]]
    assert labels.tolist() == [[98, 99, -100, -100, -100]]
    assert example_batch(None, 1, 1, texts=["ab"])[2].tolist() == [[98]]
    assert example_batch(None, 9, 5, texts=["abcdef"])[1].all()  # each is cut at the beginning


def test_tokenizers_of_either_kind_encode_the_text():
    words = types.SimpleNamespace(encode=lambda text: [len(word) for word in text.split()])
    boxed = types.SimpleNamespace(encode=lambda text: types.SimpleNamespace(ids=[1, 2, 3]))
    assert example_batch(words, 1, 3, ["to be or not"])[0].tolist() == [[2, 2, 2]]
    assert example_batch(boxed, 1, 2, ["anything"])[2].tolist() == [[2, 3]]


def test_the_same_seed_cuts_the_same_batch_from_text_that_is_at_hand():
    first, again = example_batch(None, 4, 32), example_batch(None, 4, 32)
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], example_batch(None, 4, 32, seed=7)[0])
    before = torch.get_rng_state()
    example_batch(None, 4, 32)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_makes_no_batch_is_refused():
    with pytest.raises(ValueError, match="none of 1 texts"):
        example_batch(None, 1, 4, ["a"])


class Bigram(nn.Module):
    def __init__(self, returns="both"):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.returns = returns

    def forward(self, inputs, labels):
        logits = self.head(self.embed(inputs))
        # nanoGPT's spelling: view takes contiguous labels only
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
        return {"both": (logits, loss), "loss": loss, "logits": logits}[self.returns]


@pytest.mark.parametrize("returns", ["both", "loss"])
def test_a_model_is_plotted_in_one_call_and_stays_as_it_is(returns):
    model = Bigram(returns)
    axes = visualiser(model, batch_size=2, seq_len=16, title="bigram")
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert {"embed_weight", "linear", "cross_entropy"} <= set(names)
    assert axes.get_title() == "bigram"
    assert all(p.grad is None for p in model.parameters())
    assert "backward pass, tensor" in axes.get_legend_handles_labels()[1]
