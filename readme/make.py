"""Readmes of each part's end, from one template: lines may begin with @LO-HI, the parts in which they stand."""
import re, json, os, sys
B = "EDITION/"
STEPS = {0: 0, 1: 27, 3: 45, 4: 66, 5: 85, 6: 123, 7: 133, 8: 140, 8.5: 141, 9: 200, 10: 220, 11: 269}
SIZES = json.load(open(B + "sizes.json")) if os.path.exists(B + "sizes.json") else {}
def make(part):
    out = []
    for line in open(B + "readme/template.md"):
        m = re.match(r"@([\d.]+)-([\d.]*) ?(.*\n)", line)
        if m:
            if not float(m[1]) <= part <= float(m[2] or 99): continue
            line = m[3]
        line = re.sub(r"\{(\w+)\}", lambda m: str(SIZES.get(m[1], m[0])), line)
        out.append(line)
    return re.sub(r"\n{3,}", "\n\n", "".join(out))
if __name__ == "__main__":
    for p, s in STEPS.items(): open(f"{B}readme/{s}.md", "w").write(make(p))
