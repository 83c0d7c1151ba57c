import jax
import pytest

from jetrl_jax.kernels import dispatch
from jetrl_jax.kernels.dispatch import Hardware

HOPPER = Hardware('gpu', (9, 0), has_triton=True)
ADA = Hardware('gpu', (8, 9), has_triton=True)
AMD = Hardware('gpu', (), has_triton=True)
CPU = Hardware('cpu', (), has_triton=True)


def chosen(hardware, setting='auto'):
  return dict(dispatch.select(setting, hardware).chosen)


def test_a_hopper_gpu_has_the_first_of_every_row():
  assert chosen(HOPPER) == {o: names[0] for o, names in dispatch.TABLE.items()}


def test_another_gpu_lacks_what_is_written_for_hopper_alone():
  found = chosen(ADA)
  assert found['gate_up'] == 'reference'
  assert found['attention'] == 'triton'


@pytest.mark.parametrize(
    'hardware', [CPU, AMD, Hardware('gpu', (9, 0), has_triton=False)]
)
def test_without_a_backend_for_kernels_all_is_plain_jax(hardware):
  assert set(chosen(hardware).values()) == {'reference'}


def test_every_operation_has_a_reference_and_it_is_last():
  assert all(names[-1] == 'reference' for names in dispatch.TABLE.values())


def test_kernels_can_be_switched_off_all_or_one_by_one():
  assert set(chosen(HOPPER, 'reference').values()) == {'reference'}
  found = chosen(HOPPER, 'attention=reference, swiglu=reference')
  apart = {o for o, name in found.items() if name == 'reference'}
  assert apart == {'attention', 'swiglu'}


@pytest.mark.parametrize(
    'setting, hardware, said',
    [
        ('none', HOPPER, "kernels is 'none'; allowed: auto, reference, or"),
        ('attention=cuda', HOPPER, 'attention has the implementations triton'),
        ('norm=triton', HOPPER, 'with operations add_norm_quantize, adamw'),
        ('attention=triton', CPU, 'triton needs a CUDA GPU, and this is cpu'),
        ('gate_up=triton_sm90', ADA, 'needs a GPU of compute capability 9.0'),
    ],
)
def test_a_choice_that_cannot_be_is_refused(setting, hardware, said):
  with pytest.raises(ValueError, match=said):
    dispatch.select(setting, hardware)


def test_a_choice_holds_where_it_is_made_and_nowhere_else():
  kernels = dispatch.select('auto', HOPPER)
  outside = dispatch.implementation('swiglu')
  with dispatch.using(kernels):
    assert dispatch.implementation('swiglu') == 'triton'
    with dispatch.using(dispatch.select('reference')):
      assert not dispatch.has_kernel('swiglu')
    assert dispatch.has_kernel('swiglu')
  assert dispatch.implementation('swiglu') == outside


def test_this_machine_is_known():
  assert dispatch.detect().backend == jax.default_backend()


def test_a_table_is_said_in_one_line():
  assert str(dispatch.select('reference')).startswith('reference: add_norm')
  assert 'triton_sm90: gate_up' in str(dispatch.select('auto', HOPPER))
