"""A model that the Trainer has trained ends in a folder that transformers reads."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

import torch
from trainers import data_of, llama, short_collections, trainer_of  # noqa: F401

from float8.checkpoints import load, save_pretrained
from float8.checkpoints.__main__ import main
from float8.integrations.transformers import Float8Callback


@pytest.mark.filterwarnings("ignore")  # of compressed-tensors and torch
@pytest.mark.parametrize(
    ("recipe", "layout"),
    [("tensorwise", None), ("rowwise", "compressed_tensors"), ("blockwise", None)],
)
def test_the_folder_has_the_weights_that_were_trained(recipe, layout, tmp_path, capsys):
    callback, folder = Float8Callback(recipe), str(tmp_path / "float8")
    options = {"max_steps": 2, "load_best_model_at_end": False}
    trainer = trainer_of(tmp_path / "out", llama(), callback, **options)
    trainer.train()
    save_pretrained(trainer.model, folder, layout)
    assert main(["inspect", folder, "--data"]) == 0
    assert "7 layers in float8" in capsys.readouterr().out
    plain = str(tmp_path / "out" / "checkpoint-2")  # the Trainer's own, after the same step
    assert main(["compare", plain, folder, "--at-least", "28"]) == 0
    model = load(llama(1), folder)
    # The head and the embedding are those of the trained model, to the bit.
    head = trainer.model.lm_head.weight
    assert torch.equal(model.lm_head.weight, head)
    assert not torch.equal(head, llama().lm_head.weight)
