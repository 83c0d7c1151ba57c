"""Links of the documentation site that leave docs/."""

from tools.docs_links import absolute, seen_from_docs


def test_a_link_out_of_the_pages_leads_to_the_repository():
  text = 'See [raw](../benchmarks/results/a.md#x) and [two](tuning.md).'
  assert absolute(text, 'numerics.md', 'https://host/me/it/') == (
      'See [raw](https://host/me/it/blob/main/benchmarks/results/a.md#x) and'
      ' [two](tuning.md).'
  )


def test_without_an_address_the_words_stay():
  assert absolute('See [raw](../a.md).', 'b.md', '') == 'See raw.'


def test_a_link_back_into_the_pages_and_a_picture_stay():
  for text in ('[x](../docs/b.md)', '![x](../docs/b.png)', '[x](../b.md)'):
    assert absolute(text, 'deep/c.md', 'https://host') == text


def test_links_of_the_root_lead_to_the_same_files_from_a_page():
  text = (
      '[a](docs/b.md#c), [d](README.md), [e](x/y.py), [f](https://g), [h](#i)'
  )
  assert seen_from_docs(text) == (
      '[a](b.md#c), [d](../README.md), [e](../x/y.py), [f](https://g), [h](#i)'
  )
