"""Programs of training, which are written as text and read again."""

from hypothesis import given

from ddplab.conformance.random_programs import programs

from ..explore import examples


@examples(20)
@given(programs(3))
def test_the_text_of_a_program_is_the_program(program):
    from ddplab.conformance import training_programs as module

    assert eval(repr(program), vars(module)) == program
