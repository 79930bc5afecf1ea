"""The copy engines' tests with the device pool on CUDA and a pinned host pool."""

import pytest
import torch

from tests.engine.device.test_copy_engine import (  # noqa: F401  (collected here too, with this file's device)
    pools,
    test_blocks_go_out_and_come_back_elsewhere_with_every_bit,
    test_copies_that_disagree_about_a_block_are_a_bug,
    test_the_canary_has_nothing_to_say_of_sequences_that_have_ended,
    test_the_canary_sees_changed_bytes_and_swapped_words,
    test_the_chaos_engine_copies_late_and_poisons_what_is_absent,
    test_the_synchronous_engine_copies_at_once_and_out_first,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")
