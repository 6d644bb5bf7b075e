"""Which commits of the old line are steps of the edition (0-based index)."""
import re
SUBJ = [l.rstrip("\n").split(" ", 3) for l in open("EDITION/sizes_old.txt")]  # idx size tests subject
# F: its change belongs to main's form of the units from their birth on
F = """24b7868? """
FOLD = {14, 25+0*1}  # 1-based; 14: few rows on the right
FOLD = {14, 149, 166, 177+1, 178, 179, 180, 184, 186, 187, 188, 189, 190, 191, 193, 202, 203, 205, 206, 207, 214, 218, 219, 220, 222, 223, 224, 225, 226, 227, 228, 229, 230,
        246, 247, 248, 249, 250, 251, 252, 253, 254, 255, 256, 257, 258, 269, 272, 245, 265, 143, 168, 200, 192, 167}
TAILP = {306, 307, 308, 309, 310, 311, 312, 321, 322, 323, 324, 329, 332, 333, 335, 336, 338, 342, 350, 352, 358, 371, 416}
def kind(n):  # n 1-based
    if n > 272: return "P" if n in TAILP else "F"
    s = SUBJ[n-1][3]
    if re.match(r"\d\d+ ", s): return "L"
    if n in FOLD: return "F"
    return "P"
KIND = [kind(i+1) for i in range(len(SUBJ))]
if __name__ == "__main__":
    for i, k in enumerate(KIND):
        if k == "P": print(i, SUBJ[i][1:])
