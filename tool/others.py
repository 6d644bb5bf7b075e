"""Files that are no units: which version stands at which step."""
import os, re, pickle
import pygit2
from hist import listing, is_code, REPO, LINE, BASE
TIP = len(LINE) - 1
FINAL = pygit2.Repository(BASE + "final")
TEXTS = {"Makefile", ".ci/run", "Readme.md"}
class Others:
    def __init__(self):
        head = FINAL.references["refs/heads/final"].peel().tree
        self.tip = {}
        def rec(t, pre):
            for e in t:
                if e.type_str == "tree": rec(FINAL[e.id], pre + e.name + "/")
                else: self.tip[pre + e.name] = (e.id, 0o100755 if e.filemode == 0o100755 else 0o100644)
        rec(head, "")
        try: self.birth = pickle.load(open("/dev/shm/others.cache", "rb"))
        except Exception:
            self.birth = {}
            for i, h in enumerate(LINE):
                for p, o in listing(REPO[h].tree):
                    if not is_code(p): self.birth.setdefault(p, i)
            pickle.dump(self.birth, open("/dev/shm/others.cache", "wb"))
        self.data = {}
        self.readmes = sorted(int(f[:-3]) for f in (os.listdir(BASE + "readme") if os.path.isdir(BASE + "readme") else []) if f[:-3].isdigit())
    def read(self, p):
        if p not in self.data: self.data[p] = FINAL[self.tip[p][0]].data
        return self.data[p]
    def at(self, i):
        out = {}
        for p, (o, m) in self.tip.items():
            if is_code(p): continue
            if p in ("lessons.py", "pyproject.toml", "tests/test_lessons.py") or p in TEXTS: b = 0
            elif p == "LESSONS.md": b = 0
            else: b = self.birth.get(p, TIP + 1)
            if b > i: continue
            d = self.read(p)
            if i <= TIP:
                if p == "Makefile": d = makefile(i, d.decode()).encode()
                if p == ".ci/run": d = gate(i, d.decode()).encode()
                if p == "Readme.md":
                    n = max((r for r in self.readmes if r <= i), default=None)
                    if n is not None: d = open(f"{BASE}readme/{n}.md", "rb").read()
            out[p] = (d, m)
        return out
TARGETS = {"chat": 159, "smollm2": 159, "test-book": 141, "test-ray": 136, "test-smollm2": 159, "book": 141, ".venv/compiled": 67, ".venv/book": 141, ".venv/ray": 136, ".venv/smollm2": 159}
def makefile(i, text):
    blocks = text.split("\n\n")
    out = []
    gone = [t for t, b in TARGETS.items() if i < b]
    for b in blocks:
        name = b.split(":")[0]
        if name in gone: continue
        lines = b.split("\n")
        for t in gone: lines[0] = re.sub(rf"(?<= ){re.escape(t)}(?= |$)", "", lines[0]) if not lines[0].startswith("\t") else lines[0]
        lines[0] = re.sub(r" {2,}(?=[^#])", " ", lines[0]).rstrip() if lines[0].startswith((".", "demo", "test", "chat", "book", "tags", "smollm2")) else lines[0]
        out.append("\n".join(lines))
    t = "\n\n".join(out)
    if i < 72: t = t.replace("there is no compiled code (python infer.py --backend native says why); torch does as well", "there is no compiled code; torch does as well")
    return t
def gate(i, text):
    if i < 141:
        return '''#!/usr/bin/env bash
# The gate: the tests of this commit, the linter, then every lesson at its own commit, by its own tests.
set -euo pipefail
cd "$(dirname "$0")/.."
make test
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/python lessons.py verify
'''
    if i < 159:
        text = text.replace("make smollm2 .venv/book  # here, as two that run at once must not both install\n", "")
        text = re.sub(r"make book &.*?wait \"\$book\"\n", "make book\n", text, flags=re.S)
        text = text.replace("those with Ray and with a real model among them", "those with Ray among them")
    return text
