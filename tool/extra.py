"""extra.py PATH QUAL STEP OLD NEW: answer for the text before STEP, by replacing OLD with NEW in the text from STEP on."""
import sys, emit, bisect
def extra(e, path, qual, step, *pairs):
    c = next(c for c, k in e.keys.items() if k == (path, qual))
    vs = e.vers[c]; n = bisect.bisect_right([v[0] for v in vs], step) - 1
    t = vs[n][1]
    for old, new in zip(pairs[::2], pairs[1::2]):
        assert old in t, (path, qual, old)
        t = t.replace(old, new)
    open(f"{emit.BASE}answers_code/{c}-{step}.txt", "w").write(t + "\n"); print("wrote", c, step)
if __name__ == "__main__":
    e = emit.Edition(); a = sys.argv
    extra(e, a[1], a[2], int(a[3]), *[x.encode().decode("unicode_escape") for x in a[4:]])
