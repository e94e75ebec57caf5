"""`Float8Callback` with ``save_float8``: the Trainer ends with a folder that transformers reads."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

import torch
from trainers import data_of, llama, short_collections, trainer_of  # noqa: F401

from float8.checkpoints import load
from float8.checkpoints.__main__ import main
from float8.integrations.transformers import Float8Callback

E4M3 = torch.float8_e4m3fn


def trained(folder, recipe, layout=None, **options):
    callback = Float8Callback(recipe, save_float8=folder / "float8", layout=layout)
    trainer = trainer_of(folder / "out", llama(), callback, max_steps=2, **options)
    trainer.train()
    return trainer


@pytest.mark.filterwarnings("ignore")  # of compressed-tensors and torch
@pytest.mark.parametrize(
    ("recipe", "layout"),
    [("tensorwise", None), ("rowwise", "compressed_tensors"), ("blockwise", None)],
)
def test_the_folder_has_the_weights_that_were_trained(recipe, layout, tmp_path, capsys):
    trainer = trained(tmp_path, recipe, layout, load_best_model_at_end=False)
    folder = str(tmp_path / "float8")
    assert main(["inspect", folder, "--data"]) == 0
    assert "7 layers in float8" in capsys.readouterr().out
    plain = str(tmp_path / "out" / "checkpoint-2")  # the Trainer's own, after the same step
    assert main(["compare", plain, folder, "--at-least", "28"]) == 0
    model = load(llama(1), folder)
    # The head and the embedding are those of the trained model, to the bit.
    head = trainer.model.lm_head.weight
    assert torch.equal(model.lm_head.weight, head)
    assert not torch.equal(head, llama().lm_head.weight)


def test_what_would_fail_after_the_training_fails_before_it(tmp_path):
    (tmp_path / "float8").mkdir()
    (tmp_path / "float8" / "notes").write_text("mine")
    with pytest.raises(FileExistsError, match=r"save_float8: .*float8 exists and is not empty"):
        trained(tmp_path, "tensorwise")
    assert [entry.name for entry in (tmp_path / "float8").iterdir()] == ["notes"]
    assert not (tmp_path / "out" / "checkpoint-2").exists()
