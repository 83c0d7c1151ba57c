import jax
import pytest

from jetrl_jax.kernels import dispatch, hopper_dot
from jetrl_jax.kernels.dispatch import Hardware

HOPPER = Hardware('gpu', (9, 0), has_triton=True, has_mosaic=True)
ADA = Hardware('gpu', (8, 9), has_triton=True, has_mosaic=True)
AMD = Hardware('gpu', (), has_triton=True, has_mosaic=True)
CPU = Hardware('cpu', (), has_triton=True, has_mosaic=True)


def chosen(hardware, setting='auto'):
  return dict(dispatch.select(setting, hardware).chosen)


def test_a_hopper_gpu_has_the_first_of_every_row():
  assert chosen(HOPPER) == {o: names[0] for o, names in dispatch.TABLE.items()}


def test_another_gpu_lacks_what_is_written_for_hopper_alone():
  found = chosen(ADA)
  assert found['gate_up'] == 'reference'
  assert found['attention'] == 'triton'
  assert found['block_scaled_dot'] == 'triton'


NEITHER = Hardware('gpu', (9, 0), has_triton=False, has_mosaic=False)
WITHOUT_TRITON = Hardware('gpu', (9, 0), has_triton=False, has_mosaic=True)


@pytest.mark.parametrize('hardware', [CPU, AMD, NEITHER])
def test_without_a_backend_for_kernels_all_is_plain_jax(hardware):
  assert set(chosen(hardware).values()) == {'reference'}


def test_a_jax_without_mosaic_has_what_is_in_triton(monkeypatch):
  old = Hardware('gpu', (9, 0), has_triton=True, has_mosaic=False)
  monkeypatch.setattr(hopper_dot, 'is_there', lambda: True)
  found = chosen(old)
  assert found['attention'] == found['block_scaled_dot'] == 'triton'
  assert found['gate_up'] == 'triton_sm90'
  # Where it has moved the private part that this one takes, there is none.
  monkeypatch.setattr(hopper_dot, 'is_there', lambda: False)
  assert chosen(old)['gate_up'] == 'reference'


def test_a_jax_without_triton_has_what_is_in_mosaic_on_hopper_alone():
  found = chosen(WITHOUT_TRITON)
  assert found['block_scaled_dot'] == 'mosaic_sm90'
  # It has the bits of SwiGLU's kernel, which is not there.
  assert found['gate_up'] == 'reference'
  named = chosen(WITHOUT_TRITON, 'swiglu=mosaic_sm90')
  assert named['gate_up'] == 'mosaic_sm90'
  ada = Hardware('gpu', (8, 9), has_triton=False, has_mosaic=True)
  assert set(chosen(ada).values()) == {'reference'}


@pytest.mark.parametrize(
    'operation', sorted(name for name, _ in dispatch._UNTRIED)
)
def test_a_kernel_that_no_gpu_has_run_runs_where_it_is_named(operation):
  assert chosen(WITHOUT_TRITON)[operation] == 'reference'
  assert chosen(HOPPER)[operation] == 'triton'
  for hardware in (HOPPER, WITHOUT_TRITON):
    found = chosen(hardware, f'{operation}=mosaic_sm90')
    assert found[operation] == 'mosaic_sm90'


def test_without_triton_what_a_gpu_has_run_is_mosaics_and_the_rest_plain_jax():
  found = chosen(WITHOUT_TRITON)
  mosaic = {'attention', 'block_scaled_dot', 'decode_attention'}
  assert {o for o, name in found.items() if name == 'mosaic_sm90'} == mosaic
  assert {found[o] for o in found.keys() - mosaic} == {'reference'}


@pytest.mark.parametrize('hardware', [HOPPER, WITHOUT_TRITON])
def test_every_operation_has_a_kernel_in_mosaic_and_all_can_be_named(hardware):
  everything = ','.join(f'{o}=mosaic_sm90' for o in dispatch.TABLE)
  assert set(chosen(hardware, everything).values()) == {'mosaic_sm90'}


def test_decode_attention_without_triton_is_mosaics_and_so_is_attention():
  assert chosen(HOPPER)['decode_attention'] == 'triton'
  found = chosen(WITHOUT_TRITON)
  assert found['decode_attention'] == found['attention'] == 'mosaic_sm90'


@pytest.mark.parametrize('named', ['log_sum_exp', 'sample_token'])
def test_what_has_equal_bits_in_one_backend_only_is_named_together(named):
  for name, other in (('mosaic_sm90', WITHOUT_TRITON), ('triton', HOPPER)):
    for hardware in (HOPPER, other):
      found = chosen(hardware, f'{named}={name}')
      assert found['log_sum_exp'] == found['sample_token'] == name


def test_shapes_that_only_triton_takes_say_so_where_it_is_not(monkeypatch):
  monkeypatch.setattr(dispatch, 'has_triton', lambda: True)
  assert dispatch.triton_instead('attention', 'heads') == 'triton'
  monkeypatch.setattr(dispatch, 'has_triton', lambda: False)
  said = "attention has heads, .* set kernels to 'attention=reference'"
  with pytest.raises(ValueError, match=said):
    dispatch.triton_instead('attention', 'heads')


def test_every_operation_has_a_reference_and_it_is_last():
  assert all(names[-1] == 'reference' for names in dispatch.TABLE.values())


def test_kernels_can_be_switched_off_all_or_one_by_one():
  assert set(chosen(HOPPER, 'reference').values()) == {'reference'}
  assert _apart('rope_append=reference, mlp=reference') == {
      'rope_append',
      'mlp',
  }


def _apart(setting):
  found = chosen(HOPPER, setting).items()
  return {operation for operation, name in found if name == 'reference'}


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
            'attention has the implementations mosaic_sm90, triton',
        ),
        ('norm=triton', HOPPER, 'with operations add_norm_quantize, adamw'),
        ('attention=triton', CPU, 'triton needs a CUDA GPU, and this is cpu'),
        ('gate_up=triton_sm90', ADA, 'needs a GPU of compute capability 9.0'),
        ('gate_up=mosaic_sm90', NEITHER, "needs Pallas' Mosaic backend"),
        (
            'attention=reference,decode_attention=triton',
            HOPPER,
            'decode_attention has the bits of attention, so attention=reference'
            ' goes with decode_attention=reference',
        ),
        (
            'sample_token=mosaic_sm90,log_sum_exp=triton',
            HOPPER,
            'log_sum_exp=triton goes with sample_token=triton',
        ),
        (
            'log_sum_exp=mosaic_sm90,sample_token=triton',
            HOPPER,
            'log_sum_exp=mosaic_sm90 goes with sample_token=mosaic_sm90: leave'
            ' sample_token out',
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
    assert dispatch.implementation('swiglu') == 'triton'
    with dispatch.using(dispatch.select('reference')):
      assert not dispatch.has_kernel('swiglu')
    assert dispatch.has_kernel('swiglu')
  assert dispatch.implementation('swiglu') == outside


def test_this_machine_is_known():
  assert dispatch.detect().backend == jax.default_backend()


def test_a_table_is_said_in_one_line():
  assert str(dispatch.select('reference')) == 'reference for all operations'
  said = str(dispatch.select('auto', HOPPER))
  assert 'mosaic_sm90: attention, block_scaled_dot, gate_up' in said
  assert 'triton: add_norm_quantize, ' in said


def test_a_gpu_that_runs_no_kernel_is_told_why():
  assert dispatch.why_none(HOPPER) == dispatch.why_none(CPU) == ''
  assert 'they need a CUDA GPU' in dispatch.why_none(AMD)
  assert "Pallas' Triton backend, which this jax" in dispatch.why_none(NEITHER)
  assert not dispatch.why_none(WITHOUT_TRITON)
