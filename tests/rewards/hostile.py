"""Answers made to hang, crash or fool a verifier."""


def _box(text):
  return rf'So the answer is \boxed{{{text}}}.'


# All are wrong for the reference 18.
HOSTILE = {
    'power tower': _box('9**9**9**9'),
    'latex tower': _box('9^{9^{9^{9^9}}}'),
    'big power': _box('9^{999999999}'),
    'big power by product': _box(r'(10^{99})^{(99 \cdot 99 \cdot 99)}'),
    'power of a sum': _box('(x+y+z+1)^{90}(x-y)^{90}'),
    'power of a complex sum': _box('(1+i)^{999}'),
    'power of roots': _box(r'(\sqrt2+\sqrt3+\sqrt5+1)^{99}'),
    'powers of powers': _box('((x+1)^9)^9'),
    'products of powers': _box('(x+y+z+1)^9(x-y)^9(y-z+2)^9'),
    'redundant braces': _box('{' * 14 + '1' + '}' * 14),
    'nested braces': _box('{1' * 8 + '}' * 8),
    'sum of fractions': _box(
        '+'.join(
            rf'\frac{{1}}{{{x}^9-{y}^8+{z}}}'
            for x, y, z in (
                'xyz',
                'yzx',
                'zxy',
                'abc',
                'bca',
                'cab',
                'xab',
                'ybc',
            )
        )
    ),
    'equation': _box('x^{50}+x^{49}-x+1=0'),
    'equation of factors': _box('(x^5+x+1)(x^5-x+3)(x^5+2)=x'),
    'equation of roots': _box(
        r'\sqrt{x+1}+\sqrt{x+2}+\sqrt{x+3}+\sqrt{x+4}=x^3'
    ),
    'transcendental equation': _box('2^x+3^x=x^5'),
    'quotient of powers': _box(r'\frac{7^{999}-1}{7^{998}+7^{997}}'),
    'factorial': _box('99999999!'),
    'factorials': _box('9!!!!!!'),
    'factorial of a power': _box('(10^9)!'),
    'binomial': _box(r'\binom{999999999}{499999999}'),
    'small binomials': _box(r'\binom{999}{499}' * 20),
    'braces': _box('{' * 300 + '1' + '}' * 300),
    'unclosed braces': r'\boxed{' * 5000,
    'closing braces': r'\boxed' + '}' * 100_000,
    'parentheses': _box('(' * 200 + '1' + ')' * 200),
    'fractions': _box(r'\frac{1}{1+' * 60 + 'x' + '}' * 60),
    'roots': _box(r'\sqrt{2+' * 15 + 'x' + '}' * 15),
    'a million digits': _box('9' * 1_000_000),
    'a million letters': 'x' * 1_000_000,
    'a million boxes': r'\boxed{1}' * 100_000 + r'\boxed{2',
    'a million marks': '#' * 1_000_000,
    'a million spaces': '####' + ' ' * 1_000_000 + '19',
    'long number': _box('1' * 500),
    'many commas': _box(','.join('123456789' * 20)),
    'tuple bomb': _box('(' + ','.join(['(1,2)'] * 60) + ')'),
    'set bomb': _box(r'\{' + ','.join(f'x_{i}^{i}' for i in range(60)) + r'\}'),
    'integral': _box(r'\int_0^\infty e^{-x^{x^x}}\sin(x^x)dx'),
    'integral of 18': _box(r'\int_0^{18} 1\,dx'),
    'sum': _box(r'\sum_{n=1}^{999999999}\frac{1}{n^n}'),
    'product': _box(r'\prod_{n=1}^{99999}(x+n)'),
    'limit': _box(r'\lim_{x\to 0}\frac{\sin^{99}x}{x^{99}}'),
    'matrix': _box(
        r'\begin{pmatrix}' + r'x&y&z&w\\' * 12 + r'\end{pmatrix}^{99}'
    ),
    'operator': _box(r'\operatorname{eye}(99999)'),
    'zeros': _box(r'\operatorname{zeros}(99999,99999)'),
    'polynomial': _box('+'.join(f'x^{{{i}}}' for i in range(40))),
    'equations': _box('=' * 200),
    'inequality': _box('<'.join('x^7-x+1' for _ in range(20))),
    'trigonometry': _box(r'\sin(' * 15 + 'x' + ')' * 15 + r'\cos^{99}(x)'),
    'logarithms': _box(r'\log(' * 15 + '99' + ')' * 15),
    'absolute values': _box('|' * 60 + 'x' + '|' * 60),
    'plus or minus': _box(r'\pm 1' * 60),
    'units': _box('1 ' + r'\text{cm}' * 60),
    'unicode': _box('١٨' + '\u202e' * 50 + '𝟙𝟠½' * 40),
    'lone surrogate': _box('\ud800' * 50),
    'nul': _box('\0' * 100),
    'backslashes': _box('\\\\' * 200),
    'code': _box("__import__('os').system('touch OWNED')"),
    'code in text': _box(r"\text{__import__('os').system('touch OWNED')}"),
    'code as name': _box(r"f_{__import__('os').system('touch OWNED')}(18)"),
    'exit': _box(r'\text{exit()}'),
}
