"""show.py NAME... : chains whose qual ends with NAME, their versions in the edition."""
import sys, emit
e = emit.Edition()
for n in sys.argv[1:]:
    for c, k in e.keys.items():
        if k[1] == n or k[1].split(".")[-1] == n or str(c) == n:
            print("=====", c, k, [(i, None if t is None else len(t)) for i, t in e.vers[c]], "old:", [v[0] for v in e.w.chains[c]][:12] if c < 10**5 else "hand", "death", e.w.death.get(c))
            for i, t in e.vers[c]: 
                if len(sys.argv) < 4: print("--- from", i); print(t)
