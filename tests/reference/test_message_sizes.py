"""The rules of `message_sizes` alone; `test_comm_hook_messages` compares them with what real ranks send."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference import message_sizes
from ddplab.reference.comm_hooks.quantization import quantize
from ddplab.reference.message_sizes import (
    PIECES_IN_FLIGHT,
    channel_shape,
    factors,
    quantized_parts_bytes,
    send_in_pieces,
    square_side,
)


def test_pieces_are_finished_in_turn_before_too_many_are_in_flight(monkeypatch):
    monkeypatch.setattr(message_sizes, "PIECE_BYTES", 8)
    log: list[str] = []

    def launch(piece: list[int]) -> list[int]:
        log.append(f"launch {piece}")
        return piece

    send_in_pieces([4, 4, 8, 4, 4], "aabaa", launch, lambda piece: log.append(f"finish {piece}"))
    assert log == ["launch [0, 1]", "launch [2]", "finish [0, 1]", "launch [3, 4]", "finish [2]", "finish [3, 4]"]
    assert PIECES_IN_FLIGHT == 2


@given(st.integers(1, 2000), st.none() | st.integers(1, 600))
def test_a_quantised_bucket_has_the_bytes_of_its_parts(elements, channel_elements):
    channels, each = shape = channel_shape(elements, channel_elements)
    assert (channels - 1) * each < elements <= channels * each
    assert quantize(torch.zeros(shape)).nbytes == sum(quantized_parts_bytes(*shape))


@given(st.integers(0, 2**70))
def test_the_side_of_a_square_is_the_smallest_that_holds_all_elements(elements):
    side = square_side(elements)
    assert side**2 >= elements
    assert side == 0 or (side - 1) ** 2 < elements


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 50))
def test_factors_multiply_to_the_matrix_and_have_no_more_columns_than_it_has_dimensions(rows, columns, rank):
    p, q = map(torch.ones, factors(rows, columns, rank))
    assert (p @ q.T).shape == (rows, columns)
    assert p.shape[1] == min(rank, rows, columns)
