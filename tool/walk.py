"""Walk each unit back from main, taking away each step's diff."""
import pickle, subprocess, os, sys, tempfile, hashlib, re, ast
from collections import defaultdict
from hist import tokens, BASE, LINE, sim
from trans import Translator, SAFE, prose_flags
from collections import Counter
from steps import KIND, SUBJ
TIP = len(LINE) - 1
TESTS_TIP = 509
TMP = "/dev/shm/merge"
os.makedirs(TMP, exist_ok=True)
_MC = None
def merge(base, ours, theirs, conflict=False):
    """diff3 of lines: text, or None."""
    global _MC
    if _MC is None:
        import atexit
        try: _MC = pickle.load(open("/dev/shm/merge.cache", "rb"))
        except Exception: _MC = {}
        n0 = len(_MC)
        def save():
            if len(_MC) > n0:
                pickle.dump(_MC, open(f"/dev/shm/merge.cache.{os.getpid()}", "wb")); os.replace(f"/dev/shm/merge.cache.{os.getpid()}", "/dev/shm/merge.cache")
        atexit.register(save)
    k = hashlib.md5("\0".join((base, ours, theirs, str(conflict))).encode()).digest()
    if k not in _MC: _MC[k] = _merge(base, ours, theirs, conflict)
    return _MC[k]
def _merge(base, ours, theirs, conflict=False):
    if base == theirs: return ours
    if base == ours: return theirs
    d = f"{TMP}/{os.getpid()}"
    for n, t in (("b", base), ("o", ours), ("t", theirs)):
        with open(d + n, "w") as f: f.write(t + "\n")
    p = subprocess.run(["git", "merge-file", "-p", "--diff3", "-L", "NEW", "-L", "OLD-AFTER", "-L", "OLD-BEFORE", d+"o", d+"b", d+"t"], capture_output=True, text=True)
    if p.returncode == 0 or conflict: return p.stdout.rstrip("\n")
    return None
HUNK = re.compile(r"<<<<<<< NEW\n(.*?)\|\|\|\|\|\|\| OLD-AFTER\n(.*?)=======\n(.*?)>>>>>>> OLD-BEFORE(?:\n|$)", re.S)
def merge_hunks(merged):
    """Merge the tokens of each conflict by itself; what still conflicts keeps its markers."""
    def one(m):
        new, after, before = m[1], m[2], m[3]
        r = merge_tokens(after, new, before) if after.strip() and new.strip() and before.strip() else None
        if r is None: return m[0]
        return r if r.endswith("\n") or not r else r + "\n"
    return HUNK.sub(one, merged)
def enc(t): return "\n".join("W" + x.replace("\n", "\\n") for x in tokens(t))
def dec(t): return "".join(x[1:].replace("\\n", "\n") for x in t.split("\n"))
def merge_tokens(base, ours, theirs):
    r = merge(enc(base), enc(ours), enc(theirs))
    return None if r is None else dec(r)
def norm(t):
    import textwrap
    return textwrap.dedent(t)
def fine(t, path):
    if not path.endswith(".py"): return t.count("{") == t.count("}") and t.count("(") == t.count(")")
    try: ast.parse(norm(t)); return True
    except SyntaxError: pass
    try: ast.parse(norm(t) + "\n    pass"); return True
    except SyntaxError: return False
def fmt(t, path): return t

def is_test(p): return p.startswith("tests/")
class TestTranslator(Translator):
    """Names of TESTS_TIP; words that its tests still use stay."""
    def __init__(self, still, base):
        self.still, self.local, self.gmap, self.gidx = still, base.local, base.gmap, base.gidx
        f = "/dev/shm/ttrans.cache"
        try: self.memo = pickle.load(open(f, "rb"))
        except Exception: self.memo = {}
        n0 = len(self.memo)
        def save():
            if len(self.memo) > n0:
                pickle.dump(self.memo, open(f"{f}.{os.getpid()}", "wb")); os.replace(f"{f}.{os.getpid()}", f)
        import atexit; atexit.register(save)
    def __call__(self, text, c, i):
        k = (c, i, hashlib.md5(text.encode()).digest())
        if k in self.memo: return self.memo[k]
        toks = tokens(text); prose = prose_flags(text, toks); loc = self.local.get(c, {})
        for j in sorted(set(self.gidx) | set(loc)):
            if j <= i or j > TESTS_TIP: continue
            m = {x: y for x, y in self.gmap.get(j, {}).items() if x not in self.still}
            m.update(loc.get(j, {}))
            toks = [m.get(t, t) if not p or SAFE.search(t) else t for t, p in zip(toks, prose)]
        self.memo[k] = "".join(toks)
        return self.memo[k]
class Walk:
    def __init__(self):
        self.chains, self.death, self.alive = pickle.load(open(BASE + "chains.pickle", "rb"))
        self.tip_of = {}   # chain -> key at tip
        for k, c in self.alive.items(): self.tip_of[c] = k
        self.tr = Translator()
        still = Counter()
        for c, vs in enumerate(self.chains):
            if not is_test(vs[0][1][0]): continue
            d = self.death.get(c)
            if d is not None and d <= TESTS_TIP: continue
            v = self.versions(c)
            if v: still.update(set(re.findall(r"[A-Za-z_]\w*", v[-1][2])))
        self.trt = TestTranslator(set(still), self.tr)
    def versions(self, c):
        if not hasattr(self, "_vs"): self._vs = {}
        if c not in self._vs: self._vs[c] = self._versions(c)
        return self._vs[c]
    def _versions(self, c):
        vs = self.chains[c]
        if is_test(vs[0][1][0]):
            out = [v for v in vs if v[0] <= TESTS_TIP]
            for j in range(1, len(out)):
                if out[j][0] >= 437 and sim(out[j-1][2], out[j][2]) < .45: out = out[:j]; break
            return out
        return vs
    def key(self, c):
        vs = self.versions(c)
        return vs[-1][1] if vs else None
    def run(self, c, answers):
        """[(from index, text or None)] newest first, conflicts [(i, cur, base, theirs, merged)]."""
        vs = self.versions(c)
        if not vs: return None
        test = is_test(vs[0][1][0])
        last = vs[-1]
        out, conf = [], []
        tr = self.trt if test else self.tr
        if test:
            end = None
            d = self.death.get(c)
            cur = last[2] if d is None or d > TESTS_TIP else self.trt(last[2], c, last[0])
            if d is not None and d <= TESTS_TIP and KIND[d] != "F": end = d
        else:
            d = self.death.get(c)
            if d is None: cur, end = last[2], None
            elif KIND[d] != "F": cur, end = self.tr(last[2], c, d), d
            else: return None    # gone in the end: a refactoring took it
        path = vs[-1][1][0]
        if end is not None: out.append((end, None))
        steps = {v[0] for v in vs}
        if not hasattr(self, "by_chain") or self.ans_id != id(answers):
            self.by_chain = defaultdict(list); self.ans_id = id(answers)
            for k in answers:
                x, y = k.split("-"); self.by_chain[int(x)].append(int(y))
        extras = sorted(e for e in self.by_chain[c] if e not in steps)
        if extras and extras[-1] == end: cur = answers[f"{c}-{extras.pop()}"]   # what a unit was when it died
        for j in range(len(vs) - 1, -1, -1):
            i, k, t = vs[j]
            born = KIND[i] == "F" and j == 0
            while extras and (born or extras[-1] > i):
                e = extras.pop(); out.append((e, cur)); cur = answers[f"{c}-{e}"]
                if cur is None: break
            if cur is None: break
            if KIND[i] == "F":
                if j == 0: out.append((-1 if len(out) > (end is not None) else -i, cur)); break   # born by need
                continue
            if j == 0:
                out.append((i, cur)); break
            key = f"{c}-{i}"
            if key in answers:
                before = answers[key]
                out.append((i, cur))
                if before is None: break
                cur = before; continue
            a = tr(t, c, i); b = tr(vs[j-1][2], c, i)
            r = merge(a, cur, b)
            how = "line"
            if r is None or not fine(r, path):
                mm = merge(a, cur, b, True)
                r2 = merge_hunks(mm + "\n").rstrip("\n")
                if "<<<<<<< NEW" in r2: mm, r2 = r2, None
                if r2 is not None and fine(r2, path) : r = r2; how = "token"
                else:
                    conf.append((i, cur, a, b, mm))
                    r = cur   # go on with what there is
                    how = "conflict"
                    out.append((i, cur)); cur = r; continue
            if r != cur: out.append((i, cur))
            cur = r
        return out, conf
def load_answers():
    d = BASE + "answers_code/"; os.makedirs(d, exist_ok=True)
    a = {}
    for f in os.listdir(d):
        if f.endswith(".txt"):
            t = open(d + f).read().rstrip("\n")
            a[f[:-4]] = None if t.strip() == "NONE" else t
    return a
if __name__ == "__main__":
    w = Walk(); ans = load_answers()
    res, nconf = {}, defaultdict(int)
    allconf = {}
    for c in range(len(w.chains)):
        r = w.run(c, ans)
        if r is None: continue
        res[c] = r[0]
        if r[1]: allconf[c] = r[1]
    pickle.dump((res, allconf), open(BASE + "walk.pickle", "wb"))
    nv = sum(len(v) for v in res.values())
    print("units", len(res), "versions", nv, "units in conflict", len(allconf), "conflicts", sum(map(len, allconf.values())))
    by = defaultdict(lambda: [0, 0])
    for c, f in allconf.items():
        p = w.key(c)[0]; by[p][0] += 1; by[p][1] += len(f)
    for p, (a, b) in sorted(by.items(), key=lambda x: -x[1][1]): print(p, a, b)
    print("born by need", sum(1 for v in res.values() if v and v[-1][0] < 0))
