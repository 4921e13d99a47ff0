"""The style of the page, in light and dark."""

STYLE = """\
:root {
  --ink: #1f2328; --muted: #59636e; --face: #ffffff; --line: #dfe3e8;
  --fine: #0072b2; --look: #b35900; --wrong: #b00020;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6edf3; --muted: #9aa4af; --face: #14181d; --line: #2b323b;
    --fine: #56b4e9; --look: #e69f00; --wrong: #ff7b72;
  }
}
body { margin: 0; background: var(--face); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 54rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 0 0 .4rem; }
.verdict { border: 1px solid var(--line); border-left: .4rem solid var(--fine); border-radius: .4rem; padding: .9rem 1.1rem; }
.verdict.look { border-left-color: var(--look); }
.verdict.wrong { border-left-color: var(--wrong); }
.verdict p, figcaption { color: var(--muted); font-size: .92rem; margin: .4rem 0 0; }
.verdict ul { margin: .4rem 0; padding-left: 1.2rem; }
.verdict li { margin: .5rem 0; overflow-wrap: anywhere; }
li.look::marker { color: var(--look); }
li.wrong::marker { color: var(--wrong); }
code { font-size: .92em; }
table { border-collapse: collapse; font-size: .92rem; }
.facts { margin: 1.2rem 0 0; }
.facts th { text-align: left; font-weight: 600; padding: .15rem 1.2rem .15rem 0; vertical-align: top; white-space: nowrap; }
.facts td { overflow-wrap: anywhere; }
figure { margin: 2.4rem 0 0; }
figure img { display: block; width: 100%; height: auto; }
section { margin-top: 2.4rem; }
h1 + section { margin-top: 0; }
.wide { overflow-x: auto; }
.numbers th, .numbers td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); }
.numbers th, .numbers td { text-align: right; white-space: nowrap; }
.numbers { font-variant-numeric: tabular-nums; }
.numbers thead th { color: var(--muted); font-weight: 600; white-space: normal; vertical-align: bottom; }
.numbers th:first-child { text-align: left; }
"""
