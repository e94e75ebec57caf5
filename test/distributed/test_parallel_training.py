"""DDP, FSDP and pipelines of torch train float8 layers to the bits of one process."""

import pytest
from processes import failures
from recompute import KINDS

PLAIN, VIEWS = {}, {"gradient_as_bucket_view": True}
STATIC, BOTH = {"static_graph": True}, {"gradient_as_bucket_view": True, "static_graph": True}
NAN, INF = float("nan"), float("inf")
ON_TWO = [
    # Every form of DDP for delayed scaling, which has state; other recipes: test_compositions.py.
    *(("ddp_trains", "delayed", options) for options in (PLAIN, VIEWS, STATIC, BOTH)),
    ("ddp_trains", "unit", STATIC),
    *(("ddp_with_checkpointing_trains", "delayed", kind) for kind in KINDS),
    ("compiled_fsdp2_trains", "delayed"),
    ("ddp_keeps_the_amaxes_of_each_rank",),
    ("one_layer_equals_the_whole_batch_at_once", "delayed"),
    ("one_layer_equals_the_whole_batch_at_once", "unit"),
    *(("ranks_end_a_sync_with_equal_finite_scales", bad) for bad in (None, NAN, INF)),
    ("ranks_end_a_sync_with_equal_finite_scales", INF, 2),  # scales are found by every second sync
    ("a_missing_all_reduce_is_found",),
    ("a_pipeline_trains", "tensorwise", "GPipe"),
    ("a_pipeline_trains", "rowwise", "1F1B"),
    ("a_pipeline_trains", "unit", "GPipe"),
    ("a_pipeline_trains", "delayed", "GPipe"),
    ("a_pipeline_trains", "delayed", "1F1B"),
    ("a_pipeline_without_a_group_is_refused",),
]
# Sharding could change the scale of a whole weight, found from the gathered weight or a history:
# these recipes take every form. Scales of rows and constants take every other form.
FORMS = (
    ("fsdp1_trains", "FULL_SHARD"),
    ("fsdp1_in_mixed_precision_trains_as_autocast_does",),
    ("fsdp2_trains",),
    ("fsdp2_in_mixed_precision_trains_as_autocast_does",),
    ("hsdp_trains",),
)
FORMS_OF = {"tensorwise": FORMS, "delayed": FORMS, "rowwise": FORMS[::2], "unit": FORMS[1::2]}
ON_FOUR = [
    *(
        (check, recipe, *arguments)
        for recipe, forms in FORMS_OF.items()
        for check, *arguments in forms
    ),
    ("fsdp1_trains", "delayed", "SHARD_GRAD_OP"),
    ("fsdp1_that_rounds_buffers_is_refused",),
    ("cpu_offload_trains", "delayed"),
    *(("fsdp2_with_checkpointing_trains", "delayed", kind) for kind in KINDS),
    ("fsdp2_with_checkpointing_trains", "tensorwise", "selective"),
    ("uneven_shards_train", "tensorwise", "fsdp1", 3),
    ("uneven_shards_train", "tensorwise", "fsdp2", 1),
    ("uneven_shards_train", "delayed", "fsdp1", 1),
    ("uneven_shards_train", "delayed", "fsdp2", 3),
    ("uneven_shards_train", "rowwise", "fsdp2", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "checks"), [(2, ON_TWO), (4, ON_FOUR)])
def test_bits_are_those_of_one_process(world, checks):
    assert failures("parallel_training_program", checks, world) == {}
