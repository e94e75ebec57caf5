"""Loading into sharded models; the checks are in `multiprocess/load_program.py`."""

from __future__ import annotations

import pytest
from hand_written import Block, tensors_of, write
from processes import failures

from float8.checkpoints import save_pretrained


def test_sharded_models_load(tmp_path):
    folder = str(write(tmp_path, tensors_of(Block(seed=1)), shards=2))
    checks = {
        **{f"shards {r}": ("check_shards", folder, r) for r in ("plain", "blockwise", "delayed")},
        "gathered": ("check_gathered_in_float8", folder),
        "meta": ("check_meta", folder),
        "part": ("check_each_rank_reads_its_part", folder),
        "float8": ("check_float8_weights", folder),
        "converted late": ("check_conversion_after_sharding_is_refused", folder),
        "rows split twice": ("check_two_dimensions", folder),
    }
    # Four: some have no row of the gate, which has three.
    assert failures("load_program", checks, 4) == {}


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_each_rank_loads_its_own_experts(recipe, tmp_path):
    pytest.importorskip("transformers")
    from published_models import convert, model_of

    save_pretrained(convert(model_of("qwen3_moe"), recipe), tmp_path / "it")
    check = ("check_expert_parallel", str(tmp_path / "it"), recipe)
    assert failures("load_program", {"experts": check}, 2) == {}
