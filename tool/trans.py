"""Translation of a unit's old text into main's names."""
import pickle, re, difflib
from collections import Counter, defaultdict
from hist import tokens, TOK, BASE, LINE
KEYW = set("and as assert async await break class continue def del elif else except False finally for from global if import in is lambda None nonlocal not or pass raise return True try while with yield self cls int float str bool list dict tuple set void const static char struct sizeof a the of".split())
IDENT = re.compile(r"--[a-z][\w-]*$|[A-Za-z_]\w*$")
def ok(t): return IDENT.match(t) and t not in KEYW
FROM = 272   # 0-based index from which names may change

def align(old, new):
    """Counter of (a, b) identifier pairs in equal-length replaced runs; Counter of kept."""
    a = [t for t in tokens(old) if not t.isspace()]; b = [t for t in tokens(new) if not t.isspace()]
    pairs, kept = Counter(), Counter()
    sm = difflib.SequenceMatcher(None, a, b, autojunk=False)
    for op, i1, i2, j1, j2 in sm.get_opcodes():
        if op == "equal":
            kept.update(a[i1:i2])
        elif op == "replace" and i2 - i1 == j2 - j1:
            for x, y in zip(a[i1:i2], b[j1:j2]):
                if ok(x) and ok(y) and x != y: pairs[x, y] += 1
                else: kept[x] += 1
    return pairs, kept

def build():
    chains, death, alive = pickle.load(open(BASE + "chains.pickle", "rb"))
    local = defaultdict(dict)   # chain -> {i: map}
    glob = defaultdict(Counter)  # i -> Counter pair
    gkept = defaultdict(Counter)
    for c, vs in enumerate(chains):
        for (i0, k0, t0), (i, k, t) in zip(vs, vs[1:]):
            if i < FROM or (t0 == t and k0 == k): continue
            if len(t0) > 60000: continue
            if k[0].startswith('tests/') and i >= 437: continue
            pairs, kept = align(t0, t)
            if k0[1] != k[1]:
                x, y = k0[1].split(".")[-1].split("#")[0], k[1].split(".")[-1].split("#")[0]
                if x != y: glob[i][x, y] += 5
            if pairs:
                best = {}
                tot = Counter()
                for (x, y), n in pairs.items(): tot[x] += n
                for (x, y), n in pairs.items():
                    if n == tot[x] and kept[x] == 0: best[x] = y
                if best: local[c][i] = best
                for (x, y), n in pairs.items(): glob[i][x, y] += n
            gkept[i].update(kept)
    gmap = {}
    for i, cnt in glob.items():
        tot = Counter()
        for (x, y), n in cnt.items(): tot[x] += n
        m = {}
        for (x, y), n in cnt.items():
            if n >= 3 and n >= .8 * tot[x] and gkept[i][x] <= .1 * n: m[x] = y
        if m: gmap[i] = m
    pickle.dump((dict(local), gmap), open(BASE + "maps.pickle", "wb"))
    return local, gmap
SAFE = re.compile(r"_|^--|[a-z][A-Z]")
REGION = re.compile(r'"""(?:.|\n)*?"""|/\*(?:.|\n)*?\*/|#[^\n]*|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'')
def prose_flags(text, toks):
    flags = bytearray(len(text) + 1)
    for m in REGION.finditer(text):
        flags[m.start():m.end()] = b"\1" * (m.end() - m.start())
    out, pos = [], 0
    for t in toks:
        out.append(flags[pos] == 1); pos += len(t)
    return out
def hash_(t):
    import hashlib
    return hashlib.md5(t.encode()).digest()
class Translator:
    def __init__(self):
        self.local, self.gmap = pickle.load(open(BASE + "maps.pickle", "rb"))
        self.idx = sorted(set(self.gmap) | {i for m in self.local.values() for i in m})
        self.gidx = sorted(self.gmap)
    def __call__(self, text, c, i):
        """Text of chain c as of commit i in main's names."""
        if not hasattr(self, "cache"):
            import atexit, os
            f = "/dev/shm/trans.cache"
            try: self.cache = pickle.load(open(f, "rb"))
            except Exception: self.cache = {}
            n0 = len(self.cache)
            def save():
                if len(self.cache) > n0:
                    pickle.dump(self.cache, open(f"{f}.{os.getpid()}", "wb")); os.replace(f"{f}.{os.getpid()}", f)
            atexit.register(save)
        k = (c, i, hash_(text))
        if k not in self.cache: self.cache[k] = self.translate(text, c, i)
        return self.cache[k]
    def translate(self, text, c, i, upto=10**9):
        loc = self.local.get(c, {})
        toks = tokens(text)
        prose = prose_flags(text, toks)
        for j in sorted(set(self.gidx) | set(loc)):
            if j <= i or j > upto: continue
            m = dict(self.gmap.get(j, {})); m.update(loc.get(j, {}))
            toks = [m.get(t, t) if not p or SAFE.search(t) else t for t, p in zip(toks, prose)]
        return "".join(toks)
if __name__ == "__main__":
    l, g = build()
    print(len(l), sum(len(m) for m in g.values()))
    for i in sorted(g): print(i, len(g[i]), list(g[i].items())[:6])
