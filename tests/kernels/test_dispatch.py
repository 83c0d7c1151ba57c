import jax
import pytest

from jetrl_jax.kernels import dispatch
from jetrl_jax.kernels.dispatch import Hardware

HOPPER = Hardware('gpu', (9, 0), has_mosaic=True)
ADA = Hardware('gpu', (8, 9), has_mosaic=True)
AMD = Hardware('gpu', (), has_mosaic=True)
CPU = Hardware('cpu', (), has_mosaic=True)
OLD_JAX = Hardware('gpu', (9, 0), has_mosaic=False)


def chosen(hardware, setting='auto'):
  return dict(dispatch.select(setting, hardware).chosen)


def test_a_hopper_gpu_has_the_first_of_every_row():
  assert chosen(HOPPER) == {o: names[0] for o, names in dispatch.TABLE.items()}


@pytest.mark.parametrize('hardware', [CPU, AMD, ADA, OLD_JAX])
def test_what_has_no_kernels_runs_plain_jax(hardware):
  assert set(chosen(hardware).values()) == {'reference'}


def test_every_operation_has_a_kernel_for_hopper_and_all_can_be_named():
  everything = ','.join(f'{o}=mosaic_sm90' for o in dispatch.TABLE)
  assert set(chosen(HOPPER, everything).values()) == {'mosaic_sm90'}


def test_every_operation_has_a_reference_and_one_prefers_it():
  places = {o: names.index('reference') for o, names in dispatch.TABLE.items()}
  assert {o for o, place in places.items() if place == 0} == {'gather_columns'}
  assert all(
      place == len(dispatch.TABLE[o]) - 1
      for o, place in places.items()
      if place
  )


def test_kernels_can_be_switched_off_all_or_one_by_one():
  assert set(chosen(HOPPER, 'reference').values()) == {'reference'}
  assert _apart('rope_append=reference, mlp=reference') == {
      'rope_append',
      'mlp',
  }


def _apart(setting):
  """Returns what runs its reference and would else run a kernel."""
  found, usual = chosen(HOPPER, setting), chosen(HOPPER)
  return {o for o in found if found[o] == 'reference' != usual[o]}


@pytest.mark.parametrize(
    'one, other',
    [
        ('attention', 'decode_attention'),
        ('decode_attention', 'attention'),
        ('swiglu', 'gate_up'),
        ('log_sum_exp', 'sample_token'),
    ],
)
def test_what_must_have_equal_bits_is_switched_off_together(one, other):
  assert _apart(f'{one}=reference') == {one, other}


def test_a_draw_and_gate_up_may_go_alone():
  # Without them decode runs what training runs.
  assert _apart('gate_up=reference') == {'gate_up'}
  assert _apart('sample_token=reference') == {'sample_token'}


@pytest.mark.parametrize(
    'setting, hardware, said',
    [
        ('none', HOPPER, "kernels is 'none'; allowed: auto, reference, or"),
        (
            'attention=cuda',
            HOPPER,
            'attention has the implementations mosaic_sm90, reference',
        ),
        (
            'norm=mosaic_sm90',
            HOPPER,
            'with operations add_norm_quantize, adamw',
        ),
        ('attention=mosaic_sm90', CPU, 'needs a CUDA GPU, and this is cpu'),
        ('gate_up=mosaic_sm90', ADA, 'needs a GPU of compute capability 9.0'),
        ('gate_up=mosaic_sm90', OLD_JAX, "needs Pallas' Mosaic backend"),
        (
            'attention=reference,decode_attention=mosaic_sm90',
            HOPPER,
            'decode_attention has the bits of attention, so attention=reference'
            ' goes with decode_attention=reference',
        ),
    ],
)
def test_a_choice_that_cannot_be_is_refused(setting, hardware, said):
  with pytest.raises(ValueError, match=said):
    dispatch.select(setting, hardware)


def test_a_choice_holds_where_it_is_made_and_nowhere_else():
  kernels = dispatch.select('auto', HOPPER)
  outside = dispatch.implementation('swiglu')
  with dispatch.using(kernels):
    assert dispatch.implementation('swiglu') == 'mosaic_sm90'
    with dispatch.using(dispatch.select('reference')):
      assert not dispatch.has_kernel('swiglu')
    assert dispatch.has_kernel('swiglu')
  assert dispatch.implementation('swiglu') == outside


def test_this_machine_is_known():
  assert dispatch.detect().backend == jax.default_backend()


def test_a_table_is_said_in_one_line():
  assert str(dispatch.select('reference')) == 'reference for all operations'
  said = str(dispatch.select('mlp=reference', HOPPER))
  assert 'mosaic_sm90: add_norm_quantize, ' in said
  assert said.endswith('reference: mlp, gather_columns')


def test_a_gpu_that_runs_no_kernel_is_told_why():
  assert dispatch.why_none(HOPPER) == dispatch.why_none(CPU) == ''
  assert 'they need a CUDA GPU' in dispatch.why_none(AMD)
  assert 'compute capability 9.0' in dispatch.why_none(ADA)
  assert "Pallas' Mosaic backend" in dispatch.why_none(OLD_JAX)
