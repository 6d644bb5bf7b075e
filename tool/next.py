"""Show the next conflicts of a group: python next.py g3 [COUNT]"""
import sys, os, pickle, difflib
from walk import Walk, load_answers, SUBJ, BASE
from groups import group
def main():
    g, n = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5
    w = Walk(); ans = load_answers()
    os.makedirs(BASE + "work_code", exist_ok=True)
    shown, left, units = 0, 0, 0
    order = sorted((c for c in range(len(w.chains)) if w.key(c) and group(w.key(c)[0]) == g), key=lambda c: (w.key(c)[0], c))
    for c in order:
        r = w.run(c, ans)
        if not r or not r[1]: continue
        left += len(r[1]); units += 1
        if shown >= n: continue
        shown += 1
        i, cur, a, b, merged = r[1][0]
        p, q = w.key(c)
        f = f"{BASE}work_code/{c}-{i}.txt"
        open(f, "w").write(merged + "\n")
        print(f"######## UNIT {c}  {p} :: {q}   before step {i} = {SUBJ[i][3]}   [{len(r[1])} conflicts in this unit]")
        print(f"# edit {f} , then: mv {f} {BASE}answers_code/{c}-{i}.txt   (or write NONE there: the unit does not exist before this step)")
        lines = merged.split("\n")
        if len(lines) <= 140: print(merged)
        else:
            keep = set(); inside = False
            for k, l in enumerate(lines):
                if l.startswith("<<<<<<< "): inside = True
                if inside: keep.update(range(max(0, k-6), min(len(lines), k+7)))
                if l.startswith(">>>>>>> "): inside = False
            lastk = None
            for k in sorted(keep):
                if lastk is not None and k != lastk + 1: print(f"   ... (line {k+1})")
                print(lines[k]); lastk = k
        print("---- the step's diff in the old line, in today's names:")
        print("\n".join(l for l in difflib.unified_diff(b.split("\n"), a.split("\n"), "before", "after", lineterm="", n=2)))
        print()
    print(f"======== {units} units, at least {left} conflicts left in {g}")
main()
